"""pystale in verl: the replay buffer of its V1 trainers, its off-policy metrics, and a client that survives aborts.

In verl's configuration::

    trainer:
      v1:
        sampler:
          custom_sampler:
            path: pkg://pystale.integrations.verl
            name: StalenessReplayBuffer
"""

from pystale.integrations.verl.client import AbortAwareClient, RetriesExhausted
from pystale.integrations.verl.metrics import off_policy_metrics_from_tags
from pystale.integrations.verl.replay_buffer import StalenessReplayBuffer

__all__ = ["AbortAwareClient", "RetriesExhausted", "StalenessReplayBuffer", "off_policy_metrics_from_tags"]

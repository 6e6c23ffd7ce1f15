"""One buffer for a whole Ray cluster: an actor that decides, and payloads that stay where they were produced.

Three kinds of processes take part:

- The **actor** (:class:`ReplayBufferActor`) holds a :class:`~pystale.ReplayBuffer` of *summaries*: of every rollout its
  status, its versions and its semantic mask as runs, and the names of its payloads. A summary is as long as the
  response has versions, not tokens. Everything that is decided is decided here, by the buffer itself.
- **Keepers** (:class:`PayloadKeeper`), one per node, own the payloads: objects in Ray's object store. They run nobody's
  code, so that payloads survive the producer that made them, and the actor when it is started anew.
- **Clients** (:class:`RayReplayBuffer`), in producers and trainers, have the methods of the buffer. They measure a
  group with the same compiled code, give its payloads to the keeper of their node, and the summary to the actor; and
  they make the masks of a batch from the payloads, with the rule and the T the actor took it at.

The actor has a journal, and answers a put or a take once it is on disk. When it is killed Ray starts it anew; it reads
checkpoint and journal, and calls that were under way are sent again and recognised.
"""

from pystale.integrations.ray.actor import ReplayBufferActor
from pystale.integrations.ray.batch import BatchRefs
from pystale.integrations.ray.client import RayReplayBuffer
from pystale.integrations.ray.keeper import PayloadKeeper, PayloadsLost

__all__ = ["BatchRefs", "PayloadKeeper", "PayloadsLost", "RayReplayBuffer", "ReplayBufferActor"]

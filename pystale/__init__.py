"""Staleness control for asynchronous LLM reinforcement learning.

pystale knows the policy version of every token and acts on it: it masks stale tokens out of the loss, expires, resets
and re-rolls groups that have nothing left to train on, and says where every generated token went.
"""

try:
    from pystale._core import build_info
except ModuleNotFoundError as _error:
    if _error.name != "pystale._core":
        raise
    raise ImportError(
        f"{__path__[0]!r} is pystale's source, without its compiled modules: install it with `pip install .`, and "
        "start Python in another directory"
    ) from None
from pystale._objects import ModelSteps, effective_mask, has_trainable_token, refresh_batch, seq_staleness
from pystale.batch import TrainBatch
from pystale.buffer import ReplayBuffer
from pystale.checkpoint import CheckpointError
from pystale.client import PartialRolloutClient
from pystale.disaggregated import DisaggAgentLoopManager
from pystale.manager import AgentLoopManager
from pystale.metrics import off_policy_metrics
from pystale.off_policy import OffPolicyAccumulator
from pystale.policy import GroupMode, Order
from pystale.producer import (
    AsyncProduceStrategyConfig,
    DisaggAsyncProduceStrategyConfig,
    SyncProduceStrategyConfig,
)
from pystale.production import ProductionStalled
from pystale.report import ProduceBatchStatus
from pystale.reservations import StragglersOverdue
from pystale.result import ProduceBatchResult
from pystale.sampler import PromptSampler, PromptsExhausted
from pystale.saving import Resumed
from pystale.staleness import StalenessRule
from pystale.state import RolloutState, Status, group_status, update_sample_version
from pystale.tasks import TaskSpec

__version__: str = build_info()["version"]

__all__ = [
    "AgentLoopManager",
    "AsyncProduceStrategyConfig",
    "CheckpointError",
    "DisaggAgentLoopManager",
    "DisaggAsyncProduceStrategyConfig",
    "GroupMode",
    "ModelSteps",
    "OffPolicyAccumulator",
    "Order",
    "PartialRolloutClient",
    "ProduceBatchResult",
    "ProduceBatchStatus",
    "ProductionStalled",
    "PromptSampler",
    "PromptsExhausted",
    "ReplayBuffer",
    "Resumed",
    "RolloutState",
    "StalenessRule",
    "Status",
    "StragglersOverdue",
    "SyncProduceStrategyConfig",
    "TaskSpec",
    "TrainBatch",
    "build_info",
    "effective_mask",
    "group_status",
    "has_trainable_token",
    "off_policy_metrics",
    "refresh_batch",
    "seq_staleness",
    "update_sample_version",
]

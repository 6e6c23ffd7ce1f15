"""An XTuner to test against: its field names and types, the functions pystale leaves to it, and a Ray and a torch.

XTuner is on no package index, so none of this is XTuner's code.
"""

import enum
import itertools
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field


class Status(enum.Enum):
    INIT = "init"
    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    FAILED = "failed"
    FILTERED = "filtered"
    ARCHIVED = "archived"


class SampleParams(BaseModel):
    max_tokens: int = 2048
    temperature: float = 1.0


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    message: list[dict[str, Any]] = Field(...)
    group_id: int | None = None
    rollout_id: int | None = None
    session_id: int | None = None
    task_name: str | None = None
    prompt_ids: list[int] | None = None
    tokens: list[int] | None = None
    mm_info: dict[str, Any] | None = None
    sample_params: SampleParams = SampleParams()
    response: str | None = None
    tool_calls: list[Any] | None = None
    response_ids: list[int] | None = None
    logprobs: list[float] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    response_mask: list[int] | None = None
    response_model_steps: list[int] | None = None
    seq_staleness: int = 0
    input_ids: list[int] | None = None
    labels: list[int] | None = None
    position_ids: np.ndarray | None = None
    reward: dict[str, Any] | None = None
    status: Status = Status.INIT
    error_msg: str | None = None
    extra_fields: dict[str, Any] = {}


def reset_rollout_response(state: RolloutState) -> RolloutState:
    """Empty the response; prebuilt training tensors and tool calls stay."""
    state.tokens = None if state.prompt_ids is None else list(state.prompt_ids)
    state.response = ""
    for name in ("response_ids", "logprobs", "response_model_steps"):
        setattr(state, name, [])
    for name in ("routed_experts", "finish_reason", "response_mask", "reward", "error_msg"):
        setattr(state, name, None)
    return state


def discard(state: RolloutState) -> None:
    """Every optional field becomes what it is by default."""
    for name, field in RolloutState.model_fields.items():
        if not field.is_required():
            setattr(state, name, field.get_default(call_default_factory=True))


@dataclass
class StorageItem:
    item: list[RolloutState]
    uid: int
    timestamp_id: int
    task_name: str
    status: Status
    staleness: int


@dataclass
class SerializedRayObjectRef:
    value: Any


class ObjectRef:
    def __init__(self, number: int) -> None:
        self.number = number


class Cluster:
    """Objects that references name, and how often they were asked for."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.numbers = itertools.count()
        self.asked = 0

    def put(self, value: Any) -> ObjectRef:
        reference = ObjectRef(next(self.numbers))
        self.objects[reference.number] = value
        return reference

    def get(self, references: Any) -> Any:
        self.asked += 1
        if isinstance(references, list):
            return [self.objects[reference.number] for reference in references]
        return self.objects[references.number]


class StandIn:
    """The modules, and what was called.

    Attributes
    ----------
    released : list of list of int
        Session ids of every call that released and discarded groups.
    on_release : callable or None
        Awaited inside such a call.
    """

    def __init__(self) -> None:
        self.released: list[list[int | None]] = []
        self.on_release: Callable[[], Any] | None = None
        self.cluster = Cluster()

        async def release_and_discard_rollout_groups(groups: list[list[RolloutState]]) -> None:
            self.released.append([state.session_id for group in groups for state in group])
            if self.on_release is not None:
                await self.on_release()
            for group in groups:
                for state in group:
                    discard(state)

        def calculate_group_effective_response_masks(group: list[RolloutState], **_: Any) -> list[None]:
            return [None] * len(group)

        class SyncReplayBufferConfig(BaseModel):
            model_config = ConfigDict(extra="forbid")

            def build(self) -> str:
                return "XTuner's own, fifo"

        class AsyncReplayBufferConfig(BaseModel):
            model_config = ConfigDict(extra="forbid")

            def build(self) -> str:
                return "XTuner's own, stalest first"

        class TrainerConfig(BaseModel):
            """Typed like the trainer's: any other class is refused."""

            replay_buffer_config: SyncReplayBufferConfig | AsyncReplayBufferConfig = SyncReplayBufferConfig()

        self.TrainerConfig = TrainerConfig
        self.rl_data = types.ModuleType("xtuner.v1.data_proto.rl_data")
        self.replay_buffer = types.ModuleType("xtuner.v1.rl.replay_buffer")
        # Imports the mask function by name, as XTuner's own module of this name does.
        self.produce_utils = types.ModuleType("xtuner.v1.rl.agent_loop_manager.produce_utils")
        for module in (self.rl_data, self.replay_buffer, self.produce_utils):
            module.calculate_group_effective_response_masks = calculate_group_effective_response_masks
        vars(self.replay_buffer).update(
            SyncReplayBufferConfig=SyncReplayBufferConfig,
            AsyncReplayBufferConfig=AsyncReplayBufferConfig,
            StorageItem=StorageItem,
            SerializedRayObjectRef=SerializedRayObjectRef,
            Status=Status,
            reset_rollout_response=reset_rollout_response,
            release_and_discard_rollout_groups=release_and_discard_rollout_groups,
        )

    def modules(self) -> dict[str, types.ModuleType]:
        ray = types.ModuleType("ray")
        vars(ray).update(ObjectRef=ObjectRef, put=self.cluster.put, get=self.cluster.get)
        torch = types.ModuleType("torch")
        vars(torch).update(save=save, load=load)
        named = {m.__name__: m for m in (self.rl_data, self.replay_buffer, self.produce_utils, ray, torch)}
        for name in list(named):
            for end, letter in enumerate(name):
                if letter == ".":
                    named.setdefault(name[:end], types.ModuleType(name[:end]))
        return named


def save(document: Any, path: Any) -> None:
    with open(path, "wb") as file:
        pickle.dump(document, file)


def load(path: Any, *, map_location: str, weights_only: bool) -> Any:
    if weights_only:
        raise ValueError("the file holds more than weights")
    with open(path, "rb") as file:
        return pickle.load(file)


@pytest.fixture
def xtuner(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """An imported XTuner."""
    stand_in = StandIn()
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return stand_in

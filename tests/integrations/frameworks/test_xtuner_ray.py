"""XTuner's checkpoint file with a real Ray cluster and a real torch."""

import asyncio
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from stand_in_xtuner import RolloutState, StandIn, Status

from pystale.integrations.xtuner import XTunerReplayBuffer

# Ray's own: sockets it leaves to the interpreter, and notes on what its next version will do.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[types.ModuleType]:
    started = not ray.is_initialized()
    if started:
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    if started:
        ray.shutdown()


@pytest.fixture
def xtuner(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    for name, module in stand_in.modules().items():
        if name.startswith("xtuner"):
            monkeypatch.setitem(sys.modules, name, module)
    return stand_in


@pytest.mark.parametrize("fifo", [True, False], ids=["fifo", "stalest_first"])
def test_ray_objects_survive_save_and_resume(cluster: types.ModuleType, xtuner: StandIn, tmp_path: Path, fifo: bool):
    experts = np.arange(12).reshape(3, 4)
    inner = cluster.put({"scores": [0.25, 0.75]})
    state = RolloutState(
        message=[],
        response_ids=[1, 2],
        response_model_steps=[3, 3],
        routed_experts=[cluster.put(experts), cluster.put(experts + 1)],
        mm_info={"pixel_values": cluster.put(np.ones((2, 2)))},
        extra_fields={"outer": {"inner": cluster.put({"deeper": inner})}},
        status=Status.COMPLETED,
    )

    async def save_and_resume() -> RolloutState:
        buffer = XTunerReplayBuffer(fifo=fifo)
        await buffer.put([state], "task", current_train_step=5)
        await buffer.save(tmp_path)
        resumed = XTunerReplayBuffer(fifo=fifo)
        await resumed.resume(tmp_path)
        ((back,),) = await resumed.get(1, "task", Status.COMPLETED)
        return back

    back = asyncio.run(save_and_resume())
    assert isinstance(state.mm_info["pixel_values"], cluster.ObjectRef)
    assert back.seq_staleness == 1
    assert back.mm_info["pixel_values"] != state.mm_info["pixel_values"]
    for reference, expected in zip(back.routed_experts, (experts, experts + 1), strict=True):
        np.testing.assert_array_equal(cluster.get(reference), expected)
    np.testing.assert_array_equal(cluster.get(back.mm_info["pixel_values"]), np.ones((2, 2)))
    deeper = cluster.get(back.extra_fields["outer"]["inner"])["deeper"]
    assert cluster.get(deeper) == {"scores": [0.25, 0.75]}

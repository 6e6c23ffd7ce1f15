"""Over random histories, the buffer in XTuner's place does what XTuner's does."""

import asyncio
from pathlib import Path

import pytest
from plain_xtuner import PlainBuffer
from stand_in_xtuner import RolloutState, StandIn, Status, xtuner  # noqa: F401
from xtuner_histories import History

from pystale.integrations.xtuner import XTunerReplayBuffer


@pytest.mark.parametrize("fifo", [True, False], ids=["fifo", "stalest_first"])
@pytest.mark.parametrize("seed", range(12))
def test_same_groups_expire_in_the_same_order(xtuner: StandIn, tmp_path: Path, fifo: bool, seed: int):  # noqa: F811
    async def reload(buffer: XTunerReplayBuffer) -> XTunerReplayBuffer:
        await buffer.save(tmp_path)
        resumed = XTunerReplayBuffer(fifo=fifo)
        await resumed.resume(tmp_path)
        return resumed

    theirs = PlainBuffer(fifo=fifo)
    history = History(XTunerReplayBuffer(fifo=fifo), theirs, RolloutState, Status, seed, reload)
    asyncio.run(history.play(150))
    assert xtuner.released == theirs.discarded
    assert min(history.done.values()) > 0

"""Plays random histories to XTuner's own buffer and to pystale's: `xtuner_same_histories.py FIRST_SEED SEEDS`.

Resuming goes through XTuner: what pystale saved, XTuner's buffer resumes from and saves, and pystale resumes from that.
"""

import asyncio
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from xtuner.v1.data_proto.rl_data import RolloutState, Status
from xtuner.v1.rl.replay_buffer import AsyncReplayBufferConfig, SyncReplayBufferConfig
from xtuner.v1.rl.rollout import trace_store
from xtuner_histories import History, agree

from pystale.integrations.xtuner import XTunerReplayBuffer


class Watched:
    """A buffer, and the sessions that each of its calls has released."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.released: list[list[str]] = []

    def __len__(self) -> int:
        return len(self.buffer)

    def __getattr__(self, name: str) -> Any:
        async def release(session_ids: list[str]) -> set[str]:
            self.released.append(session_ids)
            return set(session_ids)

        async def call(*args: Any, **kwargs: Any) -> Any:
            trace_store.release_existing_sessions = release
            return await getattr(self.buffer, name)(*args, **kwargs)

        return call


def play(seed: int, fifo: bool) -> dict[str, int]:
    config = SyncReplayBufferConfig if fifo else AsyncReplayBufferConfig

    async def through_xtuner(ours: Watched) -> Watched:
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            await ours.buffer.save(first)
            theirs = config().build()
            await theirs.resume(first)
            await theirs.save(second)
            ours.buffer = XTunerReplayBuffer(fifo=fifo)
            await ours.buffer.resume(second)
        return ours

    ours, theirs = Watched(XTunerReplayBuffer(fifo=fifo)), Watched(config().build())
    history = History(ours, theirs, RolloutState, Status, seed, through_xtuner, strict=True)
    asyncio.run(history.play(150))
    agree(ours.released, theirs.released)
    return history.done


if __name__ == "__main__":
    first, seeds = map(int, sys.argv[1:])
    done: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        for fifo in (True, False):
            try:
                done.update(play(seed, fifo))
            except BaseException:
                print(f"seed {seed}, fifo {fifo}:", file=sys.stderr)
                raise
    print(f"{seeds * 2 * 150} operations, the same in both:", dict(done))

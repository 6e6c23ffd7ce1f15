"""XTuner's own replay buffer and pystale's, in one process, on XTuner's own states; needs XTuner to be importable.

Not a pytest benchmark, since XTuner is on no package index; see CONTRIBUTING.md for how to run it.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from xtuner.v1.data_proto.rl_data import RolloutState, Status, calculate_group_effective_response_masks
from xtuner.v1.rl import replay_buffer
from xtuner.v1.rl.rollout import trace_store

from pystale.integrations import xtuner

BUILD: dict[str, Callable[[], Any]] = {
    "before": lambda: replay_buffer.AsyncReplayBufferConfig().build(),
    "after": lambda: xtuner.AsyncReplayBufferConfig().build(),
}
OFF: dict[str, Any] = {"task_stale_thresholds": {"t": 100}, "task_token_stale_thresholds": {"t": 50}}


def group(members: int, tokens: int) -> list[RolloutState]:
    """Every token is an object of its own, the steps are of two versions."""
    return [
        RolloutState(
            message=[],
            prompt_ids=[1, 2],
            response_ids=list(range(1000, 1000 + tokens)),
            response_mask=[1] * tokens,
            response_model_steps=[7] * (tokens // 2) + [8] * (tokens - tokens // 2),
            logprobs=[0.5] * tokens,
            status=Status.COMPLETED,
        )
        for _ in range(members)
    ]


async def timed(call: Any) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = await call
    return time.perf_counter() - start, result


def show(what: str, times: dict[str, list[float]]) -> None:
    before, after = (statistics.median(times[name]) * 1e3 for name in BUILD)
    print(f"| {what} | {before:,.1f} ms | {after:,.3f} ms | {before / after:,.0f}x |", flush=True)


async def compare(what: str, buffers: dict[str, Any], call: Callable[[Any], Any], repeats: int) -> None:
    """Time one call on both, in turn; their answers must agree as far as they are plain."""
    times: dict[str, list[float]] = {name: [] for name in BUILD}
    for _ in range(repeats):
        answers = []
        for name, buffer in buffers.items():
            took, answer = await timed(call(buffer))
            times[name].append(took)
            answers.append(answer if isinstance(answer, (int, dict)) else None)
        if answers[0] != answers[1]:
            raise RuntimeError(f"{what}: {answers}")
    show(what, times)


async def main() -> None:
    async def release(session_ids: list[str]) -> set[str]:
        return set(session_ids)

    trace_store.release_existing_sessions = release
    print("| | XTuner | pystale | ratio |\n|---|---|---|---|")

    times: dict[str, list[float]] = {name: [] for name in BUILD}
    for _ in range(9):
        for name, build in BUILD.items():
            put = build().put(
                group(8, 8192),
                "t",
                model_step=9,
                current_train_step=10,
                stale_threshold=100,
                token_stale_threshold=50,
            )
            times[name].append((await timed(put))[0])
    show("put 8 x 8,192 tokens", times)

    buffers = {name: build() for name, build in BUILD.items()}
    for _ in range(256):
        members = group(8, 8192)
        for buffer in buffers.values():
            await buffer.put(members, "t", current_train_step=10)
    size = "256 x 8 x 8,192 tokens"
    await compare(
        f"refresh, {size}, nothing due",
        buffers,
        lambda buffer: buffer.refresh_staleness(**OFF, current_train_step=11),
        3,
    )

    for what, retry in (("and are reset", True), ("for good", False)):
        buffers = {name: build() for name, build in BUILD.items()}
        for buffer in buffers.values():
            for _ in range(32):
                await buffer.put(group(8, 8192), "t", current_train_step=10)
        await compare(
            f"refresh, 32 x 8 x 8,192 tokens expire {what}",
            buffers,
            lambda buffer, retry=retry: buffer.refresh_staleness(
                task_stale_thresholds={"t": 1},
                expired_groups_retryable_by_task={"t": retry},
                current_train_step=30,
            ),
            1,
        )

    members = group(8, 8192)
    times = {name: [] for name in BUILD}
    for _ in range(5):
        for name, masks in (
            ("before", calculate_group_effective_response_masks),
            ("after", xtuner.calculate_group_effective_response_masks),
        ):
            start = time.perf_counter()
            masks(members, current_train_step=10, token_stale_threshold=2)
            times[name].append(time.perf_counter() - start)
    show("group masks, 8 x 8,192 tokens", times)

    buffers = {name: build() for name, build in BUILD.items()}
    for number in range(100_000):
        steps = [number % 9] * 3
        one = [RolloutState(message=[], response_ids=[1, 2, 3], response_model_steps=steps, status=Status.COMPLETED)]
        for buffer in buffers.values():
            await buffer.put(one, "t", current_train_step=10)
    await compare("count of 100,000 groups", buffers, lambda buffer: buffer.count("t", Status.COMPLETED), 5)
    await compare("get(64) of 100,000 groups", buffers, lambda buffer: buffer.get(64, "t", Status.COMPLETED), 5)


if __name__ == "__main__":
    asyncio.run(main())

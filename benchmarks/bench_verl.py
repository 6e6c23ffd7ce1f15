"""verl's replay buffer beside pystale's, over a store held in memory; runs where verl can be imported.

Prompts of 8 trajectories each; between two calls 1 % of the prompts go with all their keys and as many come. Neither
the listing itself nor the network is timed: TransferQueue's functions are replaced by those of a dict.
"""

import functools
import os
import random
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks warn about one another

os.environ.setdefault("TQ_NUM_THREADS", "2")
tq = pytest.importorskip("transfer_queue", reason="needs the packages of .ci/frameworks.txt")
verls = pytest.importorskip("verl.trainer.ppo.v1.replay_buffer", reason="needs verl")

from pystale.integrations.verl import StalenessReplayBuffer  # noqa: E402

LARGEST = int(os.environ.get("PYSTALE_BENCH_GROUPS", 100_000))
SIZES = sorted({min(10_000, LARGEST), LARGEST})
MEMBERS, STEP, BATCH = 8, 8, 64
CLASSES = {"before": verls.ReplayBufferAsync, "after": StalenessReplayBuffer}


class Store:
    """Prompts, nine in ten of them finished."""

    def __init__(self, prompts: int) -> None:
        self.rng = random.Random(1)
        self.items: dict[str, dict[str, Any]] = {}
        self.uids: list[str] = []
        self.add(prompts)

    def add(self, prompts: int) -> None:
        for _ in range(prompts):
            uid = f"{self.rng.getrandbits(128):032x}"
            step = STEP - self.rng.randrange(6)
            status = "running" if self.rng.random() < 0.1 else "finished"
            self.uids.append(uid)
            self.items[uid] = {"is_prompt": True, "status": status, "global_steps": step}
            for session in range(MEMBERS):
                tag = {"status": "success", "seq_len": 18, "global_steps": step}
                self.items[f"{uid}_{session}_0"] = tag | {"min_global_steps": step - 1, "max_global_steps": step - 1}

    def change(self) -> None:
        n = len(self.uids) // 100
        for uid in self.rng.sample(self.uids, n):
            for key in (uid, *(f"{uid}_{session}_0" for session in range(MEMBERS))):
                self.items.pop(key, None)
        self.uids = [uid for uid in self.uids if uid in self.items]
        self.add(n)

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {"train": self.items}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.items.pop(key, None)


@functools.lru_cache(maxsize=1)
def store_of(side: str, prompts: int) -> Store:
    return Store(prompts)


def buffer_over(side: str, prompts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Store]:
    store = store_of(side, prompts)
    monkeypatch.setattr(tq, "kv_list", store.kv_list)
    monkeypatch.setattr(tq, "kv_clear", store.kv_clear)
    buffer = CLASSES[side](
        trainer_mode="colocate_async",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
    )
    return buffer, store


def finished(store: Store) -> int:
    return sum(tag.get("status") == "finished" for tag in store.items.values())


@pytest.mark.benchmark(group="verl: first listing")
@pytest.mark.parametrize("prompts", SIZES)
@pytest.mark.parametrize("side", CLASSES)
def test_first_listing(benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, side: str, prompts: int) -> None:
    _, store = buffer_over(side, prompts, monkeypatch)

    def fresh() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (buffer_over(side, prompts, monkeypatch)[0],), {}

    count = benchmark.pedantic(lambda buffer: buffer.get_sampleable_count(STEP, "train"), setup=fresh, rounds=3)
    assert count == finished(store)


@pytest.mark.benchmark(group="verl: get_sampleable_count, 1 % changed")
@pytest.mark.parametrize("prompts", SIZES)
@pytest.mark.parametrize("side", CLASSES)
def test_count(benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, side: str, prompts: int) -> None:
    buffer, store = buffer_over(side, prompts, monkeypatch)
    buffer.get_sampleable_count(STEP, "train")
    count = benchmark.pedantic(buffer.get_sampleable_count, (STEP, "train"), setup=store.change, rounds=5)
    assert count == finished(store)


@pytest.mark.benchmark(group="verl: sample(64), 1 % changed")
@pytest.mark.parametrize("prompts", SIZES)
@pytest.mark.parametrize("side", CLASSES)
def test_sample(benchmark: BenchmarkFixture, monkeypatch: pytest.MonkeyPatch, side: str, prompts: int) -> None:
    buffer, store = buffer_over(side, prompts, monkeypatch)
    buffer.get_sampleable_count(STEP, "train")
    batch, metrics = benchmark.pedantic(buffer.sample, (STEP, "train", BATCH), setup=store.change, rounds=5)
    assert (len(batch.keys), metrics) == (BATCH * MEMBERS, {})
    assert {tag["global_steps"] for tag in batch.tags} <= {STEP - 5, STEP - 4}

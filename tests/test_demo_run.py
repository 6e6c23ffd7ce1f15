"""The demo's run: it learns, its account balances, every configuration runs, and Ctrl-C ends it at any moment."""

import asyncio
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from pystale.demo.engine import Engine
from pystale.demo.grpo import BaseModel, Trainer
from pystale.demo.record import Record
from pystale.demo.run import Run
from pystale.demo.session import execute
from pystale.demo.settings import BATCH_GROUPS, MODES, Settings

pytestmark = pytest.mark.whole_run

QUICK = {"steps": 3, "base_steps": 10, "group_size": 2}
ASYNCHRONOUS = ("colocated", "disaggregated")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command does it: with products this small, threads of a busy machine only wait for each other."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


class Silent:
    """A display that shows nothing."""

    def update(self, record: Record) -> None:
        pass


def finished(mode: str = "colocated", **changed: Any) -> tuple[Record, bool]:
    """Record of a run, and whether it was interrupted; no task may be left."""

    async def main() -> bool:
        interrupted = await execute(run, Silent())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return interrupted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some configurations warn, which is tested elsewhere
        run = Run(Settings.of_mode(mode, **{**QUICK, **changed}))
    interrupted = asyncio.run(main())
    return run.record, interrupted


def balances(record: Record) -> bool:
    ledger = record.ledger
    uses = sum(ledger[name] for name in ("trained", "masked_stale", "masked_semantic", "stored", "in_flight"))
    return ledger["produced"] == uses + sum(ledger["discarded"].values())


@pytest.mark.parametrize("mode", MODES)
def test_the_reward_rises(mode):
    record, _ = finished(mode, steps=25, base_steps=80, group_size=8)
    assert np.mean(record.rewards[-5:]) > 1.2 * np.mean(record.rewards[:5])


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_it_learns_to_count(mode):
    """What the command promises with its default settings; a fraction of the minute it may take is testing's."""
    record, _ = finished(mode, **{name: getattr(Settings(), name) for name in QUICK})
    first, last = record.tenths()
    assert last >= max(0.7, 3 * first)


@pytest.mark.parametrize("mode", ["sync", "colocated"])
def test_the_same_seed_gives_the_same_run(mode):
    first, again, other = (finished(mode, seed=seed)[0] for seed in (3, 3, 4))
    assert first.rewards == again.rewards != other.rewards
    assert first.ledger == again.ledger
    assert first.staleness == again.staleness


@pytest.mark.parametrize(
    "changed",
    [
        {"max_staleness": 0},
        {"max_staleness": 0, "max_token_staleness": 0, "tail_batch_trigger_size": -1},
        {"max_token_staleness": None},
        {"max_token_staleness": 0},
        {"max_token_staleness": 5},
        {"tail_batch_trigger_size": -1},
        {"tail_batch_trigger_size": 4},
        {"sync_weights_interval": 2},
        {"sync_weights_interval": 2, "max_staleness": 0, "max_token_staleness": 0},
        {"sync_weights_interval": 100},
        {"over_sample_threshold": 0.0},
        {"over_sample_threshold": 3.5},
        {"group_size": 1},
        {"group_size": 5},
        {"steps": 1},
    ],
    ids=lambda changed: " ".join(f"{name}={value}" for name, value in changed.items()),
)
@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_every_configuration_runs_and_its_account_balances(mode, changed):
    record, interrupted = finished(mode, **{"steps": 5, **changed})
    settings = record.settings
    assert not interrupted
    assert record.steps == settings.steps
    assert balances(record)
    assert record.ledger["trained"] == record.trainable_tokens
    assert record.ledger["trained"] + record.ledger["masked_stale"] == record.tokens
    assert sum(record.staleness.values()) == settings.steps * BATCH_GROUPS * settings.group_size
    assert min(record.staleness) >= 0
    assert max(record.staleness) < (settings.max_staleness + 1) * settings.sync_weights_interval
    if settings.max_token_staleness is None:
        assert record.ledger["masked_stale"] == 0


@pytest.mark.parametrize("interval", [1, 3])
def test_a_synchronous_run_trains_all_it_generates_and_keeps_nothing(interval):
    record, _ = finished("sync", steps=5, sync_weights_interval=interval)
    assert balances(record)
    assert record.ledger["produced"] == record.ledger["trained"] == record.generated_tokens
    assert set(record.versions) == {1}
    assert set(record.staleness) == set(range(interval))
    assert record.tokens_beside_training == record.groups_continued == record.groups_expired == 0


def test_a_disaggregated_run_generates_while_it_trains():
    record, _ = finished("disaggregated", steps=10, group_size=8)
    assert 0 < record.tokens_beside_training < record.generated_tokens
    assert record.generated_tokens == record.ledger["produced"]
    assert record.training_s > 0
    assert record.pausing_s > 0


@pytest.mark.parametrize("mode", MODES)
def test_no_group_is_trained_twice(mode):
    record, _ = finished(mode, steps=6)
    trained = [group_id for batch in record.batches for group_id in batch]
    assert [len(batch) for batch in record.batches] == [BATCH_GROUPS] * 6
    assert len(set(trained)) == len(trained)


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_responses_live_through_several_versions(monkeypatch, mode):
    """With generation slower than training, so that new weights meet responses on every machine."""
    original = Engine._decode

    def slow(self: Any) -> None:
        time.sleep(0.01)
        original(self)

    monkeypatch.setattr(Engine, "_decode", slow)
    record, _ = finished(mode, steps=6, group_size=8)
    assert max(record.versions) > 1
    assert record.groups_continued > 0
    assert record.sample is not None
    assert len({stretch.model_step for stretch in record.sample.stretches}) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("owner", "method", "call"), [
    (BaseModel, "train", 1), (Trainer, "step", 2), (Engine, "_decode", 1), (Engine, "_decode", 150)
])  # fmt: skip
def test_an_interrupt_ends_it_with_the_record_so_far(monkeypatch, owner, method, call, mode):
    """While the base model is taught, while the trainer works in its thread, and while responses are decoded."""
    calls, original = iter(range(1, 1_000_000)), getattr(owner, method)

    def interrupting(self: Any, *arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, interrupting)
    record, interrupted = finished(mode, steps=1000, group_size=4)
    assert interrupted
    assert record.steps < 20
    assert not record.ledger or balances(record)
    assert not record.ledger or record.ledger["in_flight"] == 0  # what was running was put back
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_comes_out_and_leaves_no_task(monkeypatch, mode):
    def broken(self: Any, *arguments: Any) -> None:
        raise RuntimeError("the trainer broke")

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(RuntimeError, match="the trainer broke"):
        finished(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_of_the_engine_is_an_error_and_no_hang(monkeypatch, mode):
    def broken(self: Any) -> None:
        raise RuntimeError("the engine broke")

    monkeypatch.setattr(Engine, "_decode", broken)
    with pytest.raises(RuntimeError, match="the engine"):
        finished(mode)


@pytest.mark.parametrize(("name", "value"), [
    ("max_staleness", 1), ("max_token_staleness", 0), ("tail_batch_trigger_size", 0), ("over_sample_threshold", 0.5)
])  # fmt: skip
def test_what_contradicts_a_synchronous_run_is_refused(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}, and in mode sync it is always"):
        Settings.of_mode("sync", **{name: value})


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="--mode must be one of sync, colocated, disaggregated, got 'async'"):
        Settings(mode="async")


def test_the_heartbeat_sees_what_holds_the_loop(monkeypatch):
    original = Engine._decode

    def slow(self: Any) -> None:
        if self.generated_tokens < 100:
            time.sleep(0.1)
        original(self)

    monkeypatch.setattr(Engine, "_decode", slow)
    record, _ = finished(steps=1)
    assert record.longest_gap_ms >= 100

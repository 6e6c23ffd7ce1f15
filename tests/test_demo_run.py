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
from pystale.demo.run import run
from pystale.demo.settings import BATCH_GROUPS, Settings

QUICK = {"steps": 3, "base_steps": 10, "group_size": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the command does it: with products this small, threads of a busy machine only wait for each other."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


class Silent:
    """A display that shows nothing."""

    def update(self, record: Record) -> None:
        pass


def finished(**changed: Any) -> tuple[Record, bool]:
    """Record of a run, and whether it was interrupted; no task may be left."""

    async def main() -> tuple[Record, bool]:
        result = await run(settings, strategy, buffer, Silent())
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    settings = Settings(**{**QUICK, **changed})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some configurations warn, which is tested elsewhere
        strategy, buffer = settings.build()
    return asyncio.run(main())


def balances(record: Record) -> bool:
    ledger = record.ledger
    uses = sum(ledger[name] for name in ("trained", "masked_stale", "masked_semantic", "stored", "in_flight"))
    return ledger["produced"] == uses + sum(ledger["discarded"].values())


def test_the_reward_rises():
    record, _ = finished(steps=25, base_steps=80, group_size=8)
    assert np.mean(record.rewards[-5:]) > 1.2 * np.mean(record.rewards[:5])


def test_the_same_seed_gives_the_same_run():
    first, again, other = (finished(seed=seed)[0] for seed in (3, 3, 4))
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
def test_every_configuration_runs_and_its_account_balances(changed):
    record, interrupted = finished(**{"steps": 5, **changed})
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


def test_responses_live_through_several_versions():
    record, _ = finished(steps=10, group_size=8)
    assert max(record.versions) > 1
    assert record.groups_continued > 0
    assert record.sample is not None
    assert len({stretch.model_step for stretch in record.sample.stretches}) > 1


@pytest.mark.parametrize(("owner", "method", "call"), [
    (BaseModel, "train", 1), (Trainer, "step", 2), (Engine, "_decode", 1), (Engine, "_decode", 150)
])  # fmt: skip
def test_an_interrupt_ends_it_with_the_record_so_far(monkeypatch, owner, method, call):
    """While the base model is taught, while the trainer works in its thread, and while responses are decoded."""
    calls, original = iter(range(1, 1_000_000)), getattr(owner, method)

    def interrupting(self: Any, *arguments: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, interrupting)
    record, interrupted = finished(steps=1000, group_size=4)
    assert interrupted
    assert record.steps < 20
    assert not record.ledger or balances(record)
    assert not record.ledger or record.ledger["in_flight"] == 0  # what was running was put back
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_fault_comes_out_and_leaves_no_task(monkeypatch):
    def broken(self: Any, *arguments: Any) -> None:
        raise RuntimeError("the trainer broke")

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(RuntimeError, match="the trainer broke"):
        finished()


def test_a_fault_of_the_engine_is_an_error_and_no_hang(monkeypatch):
    def broken(self: Any) -> None:
        raise RuntimeError("the engine broke")

    monkeypatch.setattr(Engine, "_decode", broken)
    with pytest.raises(RuntimeError, match="the engine"):
        finished()


def test_the_heartbeat_sees_what_holds_the_loop(monkeypatch):
    original = Engine._decode

    def slow(self: Any) -> None:
        if self.generated_tokens < 100:
            time.sleep(0.1)
        original(self)

    monkeypatch.setattr(Engine, "_decode", slow)
    record, _ = finished(steps=1)
    assert record.longest_gap_ms >= 100

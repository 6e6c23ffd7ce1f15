"""The buffer inside verl: its real trainer code, TransferQueue, Ray and torch."""

import asyncio
import copy
import os
import random
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import replay_buffer as verls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.import_utils import load_extern_object
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from pystale.integrations.verl import AbortAwareClient, StalenessReplayBuffer, off_policy_metrics_from_tags


def made(mode="colocate_async", threshold=8, strategy="drop", cls=StalenessReplayBuffer, refill_fn=None, **more):
    return cls(
        trainer_mode=mode,
        trainer_config={},
        max_off_policy_threshold=threshold,
        max_off_policy_strategy=strategy,
        sampler_kwargs={},
        poll_interval=0.02,
        refill_fn=refill_fn,
        **more,
    )


ROUNDS = 300
FILTERED = verls.DAPO_FILTERED_REWARD_COUNTS_KEY


# The real store


@pytest.fixture(scope="session")
def store() -> Iterator[Any]:
    """TransferQueue on a Ray of its own; it would wait for ever for processors that Ray does not count."""
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        tq.init()
        yield tq
        tq.close()
    finally:
        ray.shutdown()


@pytest.fixture
def partition(store) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    yield name
    if keys := list(store.kv_list(partition_id=name).get(name, {})):
        store.kv_clear(keys=keys, partition_id=name)


def put(partition_id: str, uid: str, status: str, step: int, rewards=(0.0, 1.0), versions=None) -> list[str]:
    """A prompt and its trajectories, as verl's agent loops put them: the prompt's status last."""
    keys = [f"{uid}_{session}_0" for session in range(len(rewards))]
    if keys:
        versions = versions or [step - 1] * len(keys)
        tq.kv_batch_put(
            keys=keys,
            partition_id=partition_id,
            fields=TensorDict(
                {"input_ids": torch.nested.as_nested_tensor([torch.arange(3)] * len(keys), layout=torch.jagged)},
                batch_size=[len(keys)],
            ),
            tags=[{"global_steps": step, "min_global_steps": v, "max_global_steps": v} for v in versions],
        )
        for key, reward in zip(keys, rewards, strict=True):
            tq.kv_put(
                key=key, partition_id=partition_id, fields={"extra_fields": {"reward_extra_info": {"acc": reward}}}
            )
    tq.kv_put(key=uid, partition_id=partition_id, tag={"is_prompt": True, "status": status, "global_steps": step})
    return keys


def listed(partition_id: str) -> set[str]:
    return set(tq.kv_list(partition_id=partition_id).get(partition_id, {}))


def test_the_oldest_prompts_are_taken_with_all_their_trajectories(partition):
    newest, oldest, middle = (put(partition, uid, "finished", step) for uid, step in (("n", 5), ("o", 3), ("m", 4)))
    batch, metrics = made().sample(global_steps=5, partition_id=partition, batch_size=2)
    assert isinstance(batch, KVBatchMeta)
    assert batch.keys == [*oldest, *middle]
    assert [tag["min_global_steps"] for tag in batch.tags] == [2, 2, 3, 3]
    assert (batch.partition_id, batch.extra_info, metrics) == (partition, {}, {})
    assert listed(partition) == {"n", *newest, *oldest, *middle}


def test_an_evicted_group_is_cleared_refilled_once_and_counted_under_every_reason(partition):
    stale_and_filtered = put(partition, "s", "finished", 1, rewards=(1.0, 1.0))
    put(partition, "f", "failure", 5)
    refills = []

    def refill(n):
        refills.append(n)
        for _ in range(n):
            put(partition, uuid.uuid4().hex, "finished", 5)
        return n

    buffer = made(threshold=2, refill_fn=refill, filter_groups_metric="acc")
    batch, metrics = buffer.sample(global_steps=5, partition_id=partition, batch_size=2)
    assert refills == [2]
    assert metrics == {
        "validation/off_policy/evicted_samples": 1,
        "validation/off_policy/evicted_samples_staleness/mean": 5.0,
        "validation/off_policy/evicted_samples_staleness/max": 5.0,
        "validation/off_policy/evicted_samples_staleness/min": 5.0,
        "validation/filter_groups/evicted_samples": 1,
        "validation/rollout_failure/evicted_samples": 1,
        "_dapo_filtered_reward_counts": {1.0: 1},
    }
    assert not {"s", "f", *stale_and_filtered} & listed(partition)
    assert len(batch.keys) == 4


def test_sampling_is_held_back_until_a_prompt_in_flight_has_finished(partition):
    fresh = put(partition, "fresh", "finished", 5)
    old = put(partition, "old", "running", 1)
    buffer = made(threshold=2, strategy="wait")
    got = []
    thread = threading.Thread(target=lambda: got.append(buffer.sample(5, partition, 1)), daemon=True)
    thread.start()
    thread.join(0.5)
    assert not got
    tq.kv_put(key="old", partition_id=partition, tag={"status": "finished"})  # merges into the tag, as verl's does
    thread.join(60)
    assert [batch.keys for batch, _ in got] == [old]
    assert buffer.get_sampleable_count(5, partition) == 1
    assert buffer.sample(5, partition, 1)[0].keys == fresh


def test_waiting_takes_nothing(partition):
    put(partition, "a", "finished", 5)
    buffer = made()
    assert buffer.wait_for_sampleable(5, partition, 1) == ({"a"}, {})
    assert buffer.get_sampleable_count(5, partition) == 1


def test_the_age_of_tokens_may_count_instead_of_the_prompts(partition):
    put(partition, "p", "finished", 5, versions=[4, 1])
    refill = lambda n: put(partition, "q", "finished", 5)  # noqa: E731
    kwargs = OmegaConf.create({"staleness": "tokens"})
    by_prompt = made(threshold=3)
    assert by_prompt.get_sampleable_count(5, partition) == 1
    by_tokens = StalenessReplayBuffer("separate_async", {}, 3, "drop", kwargs, refill_fn=refill)
    assert by_tokens.get_sampleable_count(5, partition) == 0
    batch, metrics = by_tokens.sample(5, partition, 1)
    assert batch.keys == ["q_0_0", "q_1_0"]
    assert metrics["validation/off_policy/evicted_samples_staleness/max"] == 4.0


def test_of_validation_nothing_is_evicted(store):
    keys = put("val", "v", "finished", 1, rewards=(1.0, 1.0))
    failed = put("val", "w", "failure", 1)
    buffer = made(threshold=1, filter_groups_metric="acc", refill_fn=lambda n: pytest.fail("refilled"))
    batch, metrics = buffer.sample(global_steps=9, partition_id="val", batch_size=2)
    assert (batch.keys, metrics) == ([*keys, *failed], {})
    tq.kv_clear(keys=batch.keys, partition_id="val")


# verl's own configuration and code


def test_verls_trainer_builds_it_from_the_configuration_in_the_readme():
    config = OmegaConf.create(
        {
            "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}},
            "data": {"train_batch_size": 64},
            "trainer": {
                "v1": {
                    "trainer_mode": "sync",
                    "sampler": {
                        "max_off_policy_threshold": 8,
                        "max_off_policy_strategy": "drop",
                        "custom_sampler": {"path": "pkg://pystale.integrations.verl", "name": "StalenessReplayBuffer"},
                        "sampler_kwargs": {
                            "filter_groups_metric": "${algorithm.filter_groups.metric}",
                            "train_batch_size": "${data.train_batch_size}",
                        },
                    },
                }
            },
        }
    )

    class Trainer:
        trainer_mode = config.trainer.v1.trainer_mode

        def __init__(self):
            self.config = config

        def _add_prompts_to_generate(self, num_prompts):
            return num_prompts

    buffer = PPOTrainer._build_replay_buffer(Trainer())
    assert type(buffer) is load_extern_object("pkg://pystale.integrations.verl", "StalenessReplayBuffer")
    assert buffer.settings.filter_groups_metric == "acc"
    assert buffer.settings.train_batch_size == 64


def test_verls_token_outputs_are_continued():
    class Server:
        version = 3

        async def generate(self, request_id, *, prompt_ids, sampling_params, **options):
            self.version += 1
            aborted = self.version < 7
            tokens = [self.version] if self.version > 4 else []
            return TokenOutput(
                token_ids=tokens,
                log_probs=[0.0] * len(tokens),
                stop_reason="aborted" if aborted else "completed",
                extra_fields={"global_steps": self.version},
            )

    client = AbortAwareClient(Server(), backoff_s=0.0)
    answer = asyncio.run(client.generate("r", prompt_ids=[1], sampling_params={"max_tokens": 9}))
    assert isinstance(answer, TokenOutput)
    assert answer.token_ids == [5, 6, 7]
    assert answer.extra_fields == {"global_steps": 7, "min_global_steps": 5, "max_global_steps": 7}


def test_the_client_can_be_sent_to_a_ray_actor(store):
    client = AbortAwareClient(LLMServerClient(config={"rollout": 1}), max_tokens=7)
    assert ray.get(ray.remote(lambda sent: (sent.max_tokens, sent.client.config)).remote(client)) == (7, {"rollout": 1})


# Decisions, side by side


class Listing:
    """A store in memory; the module functions of TransferQueue are put in its place."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.rewards: dict[str, float] = {}
        self.cleared: list[set[str]] = []

    def kv_list(self, partition_id=None):
        return {"train": {key: dict(tag) for key, tag in self.items.items()}}

    def kv_clear(self, keys, partition_id):
        self.cleared.append(set(keys))
        for key in keys:
            self.items.pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        return {"extra_fields": [{"reward_extra_info": {"acc": self.rewards[key]}} for key in keys]}


class Side(Listing):
    """One buffer and its store; prompts arrive alike on both sides, fresh ones are named by what was asked before."""

    def __init__(self, cls, seed, **settings):
        super().__init__()
        self.step = 1
        self.asked: list[int] = []
        self.refilled: dict[str, Any] = {}
        self.rng = random.Random(seed)
        self.buffer = made(cls=cls, refill_fn=self.refill, **settings)

    def prompt(self, uid, status, step):
        for session in range(self.rng.randrange(4 if status == "failure" else 3) + (status != "failure")):
            self.items[f"{uid}_{session}_0"] = {"global_steps": step, "min_global_steps": step - 1}
            self.rewards[f"{uid}_{session}_0"] = float(self.rng.random() < 0.6)
        self.items[uid] = {"is_prompt": True, "status": status, "global_steps": step}

    def refill(self, n):
        self.asked.append(n)
        before = set(self.items)
        for i in range(n):
            self.prompt(f"r{len(self.asked)}x{i}", "finished", self.step)
        self.refilled.update((key, self.items[key]) for key in self.items.keys() - before)
        return n

    def advance(self, round_):
        """What rollouts and the trainer do between two calls."""
        self.step += self.rng.random() < 0.4
        for i in range(self.rng.randrange(5)):
            status = self.rng.choice(("pending", "running", "finished", "finished", "failure"))
            self.prompt(f"u{round_}x{i}", status, self.step - self.rng.randrange(min(self.step, 5)))
        for uid in self.in_flight():
            if self.rng.random() < 0.5:
                self.items[uid] = self.items[uid] | {"status": self.rng.choice(("running", "finished", "failure"))}
        for key in [key for key in self.items if "_" in key and key.split("_")[0] not in self.items]:
            del self.items[key]

    def in_flight(self):
        return [uid for uid, tag in self.items.items() if tag.get("status") in ("pending", "running")]

    def settle_old(self, threshold):
        for uid in self.in_flight():
            if self.step - self.items[uid]["global_steps"] + 1 >= threshold:
                self.items[uid] = self.items[uid] | {"status": "finished"}

    def call(self, monkeypatch, question, *arguments):
        for name in ("kv_list", "kv_clear", "kv_batch_get"):
            monkeypatch.setattr(tq, name, getattr(self, name))
        return getattr(self.buffer, question)(self.step, "train", *arguments)


def same_metrics(theirs, ours):
    """Means may differ in the last bit; the rewards of filtered groups are a dict of their own."""
    return theirs.pop(FILTERED, None) == ours.pop(FILTERED, None) and theirs == pytest.approx(ours)


@pytest.mark.parametrize("strategy", ["drop", "wait"])
@pytest.mark.parametrize("metric", [None, "acc"], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("threshold", [1, 3])
def test_evictions_refills_counts_and_gates_equal_verls(monkeypatch, strategy, metric, threshold):
    settings = {"threshold": threshold, "strategy": strategy, "filter_groups_metric": metric}
    theirs, ours = sides = [Side(cls, 7, **settings) for cls in (verls.ReplayBufferAsync, StalenessReplayBuffer)]
    for round_ in range(ROUNDS):
        for side in sides:
            side.advance(round_)
        counts = [side.call(monkeypatch, "get_sampleable_count") for side in sides]
        assert counts[0] == counts[1]
        if strategy == "wait":  # with nobody else to finish them, prompts in flight would hold it back for ever
            for side in sides:
                side.settle_old(threshold)
        for target in (0, counts[0]):
            (uids, metrics), (others, other_metrics) = (
                side.call(monkeypatch, "wait_for_sampleable", target) for side in sides
            )
            assert uids == others
            assert same_metrics(metrics, other_metrics)
        assert theirs.items == ours.items
        assert theirs.asked == ours.asked


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_what_is_taken_equals_verls(monkeypatch, mode):
    """Prompts of one step are in no order at verl's, so steps are compared, and both go on from the same store."""
    theirs, ours = sides = [
        Side(cls, 11, mode=mode, threshold=4)
        for cls in (verls.ReplayBuffer if mode == "sync" else verls.ReplayBufferAsync, StalenessReplayBuffer)
    ]
    taken = 0
    for round_ in range(ROUNDS):
        for side in sides:
            side.advance(round_)
        ready = [
            tag for tag in ours.items.values() if tag.get("status") in ("finished", "failure")[: 1 + (mode == "sync")]
        ]
        fresh = [tag for tag in ready if mode == "sync" or ours.step - tag["global_steps"] + 1 <= 4]
        if not fresh:
            continue
        n = 1 + round_ % len(fresh)
        before = [dict(side.items) for side in sides]
        outcomes = []
        for side in sides:
            try:
                batch, metrics = side.call(monkeypatch, "sample", n)
            except RuntimeError as error:  # sync mode, with no trajectory in any group selected
                outcomes.append(str(error)[:0])
                continue
            uids = side.cleared[-1]
            items = before[0] if mode == "sync" else {**before[0], **side.items, **side.refilled}
            assert sorted(batch.keys) == sorted(k for k in items if "_" in k and k.split("_")[0] in uids)
            outcomes.append((sorted(items[uid]["global_steps"] for uid in uids), metrics))
            taken += len(uids)
        if isinstance(outcomes[0], str) or isinstance(outcomes[1], str):
            assert mode == "sync"
        else:
            assert outcomes[0][0] == outcomes[1][0]
            assert same_metrics(outcomes[0][1], outcomes[1][1])
        ours.items = {key: dict(tag) for key, tag in theirs.items.items()}
        ours.refilled, ours.asked, ours.rng = dict(theirs.refilled), list(theirs.asked), copy.deepcopy(theirs.rng)
    assert taken > ROUNDS


def test_metrics_equal_the_formulas_of_verls_trainer(rng):
    low = rng.integers(0, 5, size=9)
    high = low + rng.integers(0, 3, size=9)
    tags = [{"min_global_steps": int(a), "max_global_steps": int(b)} for a, b in zip(low, high, strict=True)]
    ours = off_policy_metrics_from_tags(tags, torch.ones(9, dtype=torch.bool), 8)
    assert ours["training/off_policy/trajectory_staleness_worst/mean"] == pytest.approx((7 - low).mean())
    assert len(ours) == 9

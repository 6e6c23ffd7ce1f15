import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import group, state

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.accumulators import Tally
from pystale.off_policy import OffPolicyAccumulator

P = "training/off_policy"

steps_lists = st.lists(st.integers(-1, 9), max_size=12)
groups_of_steps = st.lists(st.lists(steps_lists, min_size=1, max_size=3), max_size=4)


def accumulated(groups=(), train_step=10, token_stale_threshold=None):
    accumulator = OffPolicyAccumulator()
    accumulator.add_groups(groups, train_step=train_step, token_stale_threshold=token_stale_threshold)
    return accumulator


def of_everything(seed):
    """An accumulator into which every kind of thing was added."""
    rng = np.random.default_rng(seed)
    low = rng.integers(-1, 8, size=5)
    accumulator = accumulated([group([3, 3, 4], [seed % 5]), group([None, None])], token_stale_threshold=4)
    accumulator.add_steps(low, low + rng.integers(1, 3, size=5), train_step=12)
    accumulator.add_evicted(rng.integers(0, 9, size=seed % 3))
    accumulator.add_ledger({"trained": seed, "masked_stale": 2 * seed})
    return accumulator


# What is counted


def test_the_worst_age_is_the_lag_in_flight_and_the_lag_in_queue():
    accumulator = OffPolicyAccumulator()
    accumulator.add_steps([3, 7, 9], [8, 7, 9], train_step=11)
    assert accumulator.trajectory_staleness_worst == Tally([7, 3, 1])
    assert accumulator.in_flight == Tally([5, 0, 0])
    assert accumulator.in_queue == Tally([2, 3, 1])


def test_a_future_version_has_negative_staleness_and_never_waited():
    accumulator = OffPolicyAccumulator()
    accumulator.add_steps([3, 3], [9, 3], train_step=3)
    assert accumulator.trajectory_staleness == Tally([-7, -1])
    assert accumulator.trajectory_staleness_worst == accumulator.in_flight == Tally([-1, -1])
    assert accumulator.in_queue == Tally([0, 0])


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=9), st.integers(1, 2**63 - 1))
def test_rows_of_any_version_are_counted_by_the_formulas(rows, train_step):
    low, high = [min(row) for row in rows], [max(row) for row in rows]
    accumulator = OffPolicyAccumulator()
    accumulator.add_steps(low, high, train_step=train_step)
    expected = {name: [] for name in ("spans", "least", "worst", "in_flight", "in_queue")}
    for oldest, newest in zip(low, high, strict=True):
        worst = train_step - 1 - oldest
        expected["spans"].append(newest - oldest + 1)
        expected["least"].append(train_step - 1 - newest)
        expected["worst"].append(worst)
        expected["in_flight"].append(min(worst, newest - oldest))
        expected["in_queue"].append(worst - min(worst, newest - oldest))
    for tally, values in (
        (accumulator.trajectory_spans, expected["spans"]),
        (accumulator.trajectory_staleness, expected["least"]),
        (accumulator.trajectory_staleness_worst, expected["worst"]),
        (accumulator.in_flight, expected["in_flight"]),
        (accumulator.in_queue, expected["in_queue"]),
    ):
        total, count = sum(values), len(values)
        assert (tally.count, tally.sum) == (count, total)
        assert (tally.min, tally.max) == (min(values, default=None), max(values, default=None))


# Members as (token step, mask entry), whether they have the mask, and the form their steps come in.
members = st.tuples(
    st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 1)), max_size=10),
    st.booleans(),
    st.sampled_from([list, tuple, ModelSteps.from_list, np.array]),
)


@given(st.lists(st.lists(members, min_size=1, max_size=3), max_size=3), st.integers(1, 12), st.integers(0, 6))
def test_groups_are_counted_token_by_token(drawn, train_step, threshold):
    groups = [[[step for step, _ in tokens] for tokens, _, _ in group] for group in drawn]
    states = [
        [
            RolloutState(
                response_ids=list(range(len(tokens))),
                response_model_steps=form([step for step, _ in tokens]) if tokens else None,
                response_mask=[mask for _, mask in tokens] if masked else None,
            )
            for tokens, masked, form in group
        ]
        for group in drawn
    ]
    accumulator = accumulated(states, train_step, threshold)
    counts, ruled, stale, low, high = {}, 0, 0, [], []
    for group_steps, made in zip(groups, states, strict=True):
        for steps, of in zip(group_steps, made, strict=True):
            model = [step for step in steps if step >= 0]
            mask = [1] * len(steps) if of.response_mask is None else of.response_mask
            applies = any(m and step >= 0 for m, step in zip(mask, steps, strict=True))
            if model:
                low.append(min(model))
                high.append(max(model))
            for step in model:
                age = train_step - step - 1
                counts[age] = counts.get(age, 0) + 1
                ruled += applies
                stale += applies and age >= threshold
    expected = OffPolicyAccumulator()
    expected.add_steps(low, high, train_step=train_step)
    assert accumulator.token_staleness.counts == counts
    assert (accumulator.ruled_tokens, accumulator.stale_tokens) == (ruled, stale)
    assert accumulator.trajectory_metrics() == expected.trajectory_metrics()


def test_a_trajectory_counts_the_same_as_a_row_and_as_a_state():
    as_rows = OffPolicyAccumulator()
    as_rows.add_steps([6, 3, -1], [7, 8, -1], train_step=9)
    as_states = accumulated([group([-1, -1, 6, 6, 7]), group([3, 3, 5, 8], [None])], 9)
    assert as_rows.trajectory_metrics() == as_states.trajectory_metrics()
    assert as_rows.trajectory_metrics()[f"{P}/coverage"] == 2 / 3


@pytest.mark.parametrize("empty", [state([]), state([-1, -1]), RolloutState()])
def test_a_response_without_a_model_token_is_no_row(empty):
    assert accumulated([[empty]], token_stale_threshold=1) == OffPolicyAccumulator()


def test_without_anything_there_are_no_values():
    assert OffPolicyAccumulator().metrics() == {}
    assert accumulated([], token_stale_threshold=3).metrics() == {}
    only_padding = OffPolicyAccumulator()
    only_padding.add_steps([5, -9], [1, 7], train_step=3, padding_mask=[1, 1])
    only_padding.add_evicted([])
    only_padding.add_released([], train_step=3)
    assert only_padding.metrics() == {}


def test_rows_that_are_all_of_unknown_version_have_a_coverage_of_0_and_nothing_else():
    assert accumulated([group([None, None])], token_stale_threshold=1).metrics() == {f"{P}/coverage": 0.0}


def test_the_stale_fraction_is_the_same_before_and_after_masks_are_written():
    def groups():
        return [group([5, 5, 5, 7, 7], train, response_mask=None)[:1] for train in ([7], [7])]

    rule = StalenessRule(max_staleness=7, max_token_staleness=1)
    buffer = ReplayBuffer(rule, tail_batch_trigger_size=0)
    before = accumulated(groups(), 8, rule.token_stale_threshold)
    for made in groups():
        buffer.sync.put(made, train_step=8)
    batch = buffer.sync.take_train_batch({"default": 2}, train_step=8)
    after = accumulated(batch, 8, rule.token_stale_threshold)
    assert after == before
    assert after.metrics()[f"{P}/stale_token_fraction"] == 0.6


@pytest.mark.parametrize(
    "exempt",
    [{"response_mask": [0, 0, 0]}, {"input_ids": [1]}, {"labels": [1]}],
    ids=["nothing trains", "input ids", "labels"],
)
def test_tokens_that_the_token_rule_does_not_apply_to_are_not_stale(exempt):
    accumulator = accumulated([group([1, 1, 2], **exempt)], token_stale_threshold=1)
    assert accumulator.token_staleness.count == 3
    assert f"{P}/stale_token_fraction" not in accumulator.metrics()


def test_one_prebuilt_member_exempts_its_group():
    members = [state([1]), state([1], input_ids=[5])]
    assert accumulated([members], token_stale_threshold=1).ruled_tokens == 0


def test_a_batch_of_several_tasks_is_counted_in_one_call():
    by_task = {"a": [group([3]), group([4])], "b": [group([5])]}
    assert accumulated(by_task) == accumulated([*by_task["a"], *by_task["b"]])


def test_states_of_other_frameworks_are_counted_too():
    theirs = SimpleNamespace(response_ids=[1, 2], response_model_steps=[4, 5], response_mask=[1, 1])
    assert accumulated([[theirs]], token_stale_threshold=5) == accumulated([group([4, 5])], token_stale_threshold=5)


def test_long_responses_cost_what_their_runs_are():
    # Not a time: expanding these steps would need 8 TB.
    steps = ModelSteps.from_runs([(3, 10**12), (4, 1)])
    accumulator = accumulated([[RolloutState(response_model_steps=steps)]], token_stale_threshold=6)
    assert accumulator.token_staleness.counts == {6: 10**12, 5: 1}
    assert accumulator.stale_tokens == 10**12


# Evictions and the ledger


def released_by(rule, trigger, train_step, groups):
    evictions = OffPolicyAccumulator()
    buffer = ReplayBuffer(
        rule,
        tail_batch_trigger_size=trigger,
        missing_version="newest",
        on_release=lambda released: evictions.add_released(released, train_step=train_step),
    )
    for made in groups:
        buffer.sync.put(made, train_step=6)
    buffer.sync.refresh_staleness(train_step)
    return buffer, evictions


@pytest.mark.parametrize("trigger", [-1, 0])
def test_a_group_that_expires_counts_once_with_the_age_of_its_oldest_token(trigger):
    groups = [group([5, 5], [4, 5], [4, 4]), group([5]), group([4], group_id=9), group([4], group_id=10)]
    _, evictions = released_by(StalenessRule(max_staleness=2), trigger, 8, groups)
    assert evictions.evicted == 3
    assert evictions.evicted_staleness == Tally([3, 3, 3])


def test_a_group_that_waits_for_its_re_rollout_counts_again_when_another_member_expires():
    buffer, evictions = released_by(StalenessRule(max_staleness=2), 0, 8, [group([5, 5], [4, 5])])
    buffer.sync.refresh_staleness(9)
    assert evictions.evicted == 2


def test_what_was_rejected_for_another_reason_was_not_evicted():
    buffer, evictions = released_by(StalenessRule(), -1, 6, [])
    buffer.sync.reject(group([5], status=Status.FAILED), outcome="failed")
    assert evictions.metrics() == {}


def test_an_eviction_of_unknown_age_is_counted_without_it():
    evictions = OffPolicyAccumulator()
    lost = SimpleNamespace(status=Status.EXPIRED, group_id=None)
    evictions.add_released([(lost, {"response_ids": [5]}), (state([], Status.EXPIRED), {"reward": 1})], train_step=3)
    assert evictions.metrics() == {f"{P}/evicted_samples": 2.0}


def test_groups_of_the_same_id_in_two_tasks_are_two():
    evictions = OffPolicyAccumulator()
    states = [state([], Status.EXPIRED, group_id=1, task_name=task) for task in ("a", "b", "a")]
    evictions.add_released([(s, {"response_model_steps": [i]}) for i, s in enumerate(states)], train_step=5)
    assert evictions.evicted_staleness == Tally([4, 3])


def test_the_masked_fraction_is_of_the_tokens_that_could_have_trained():
    rule = StalenessRule(max_staleness=7, max_token_staleness=1)
    buffer = ReplayBuffer(rule, tail_batch_trigger_size=0)
    accumulator = OffPolicyAccumulator()
    before = buffer.ledger()
    for step in (8, 9):
        buffer.sync.put(group([5, 5, 7, 7, 7], response_mask=[0, 1, 1, 1, 1]), train_step=step)
        buffer.sync.take_train_batch({"default": 1}, train_step=step)
        accumulator.add_ledger(buffer.ledger(), since=before)
        before = buffer.ledger()
    assert (accumulator.trained_tokens, accumulator.masked_stale_tokens) == (6, 2)
    assert accumulator.metrics() == {f"{P}/masked_stale_fraction": 0.25}


# Merging


@given(st.lists(st.tuples(groups_of_steps, st.integers(1, 12)), max_size=4), st.integers(1, 3))
def test_merging_over_polls_and_ranks_equals_counting_their_union(polls, ranks):
    at_once = OffPolicyAccumulator()
    by_rank = [OffPolicyAccumulator() for _ in range(ranks)]
    for poll, (groups, train_step) in enumerate(polls):
        made = [group(*members) for members in groups]
        for accumulator in (at_once, by_rank[poll % ranks]):
            accumulator.add_groups(made, train_step=train_step, token_stale_threshold=2)
            accumulator.add_evicted([train_step, 1])
            accumulator.add_ledger({"trained": train_step, "masked_stale": 1})
    merged = OffPolicyAccumulator()
    for accumulator in by_rank:
        merged.merge(OffPolicyAccumulator.from_dict(json.loads(json.dumps(accumulator.to_dict()))))
    assert merged == at_once
    assert merged.metrics() == at_once.metrics()


def test_merging_is_associative_commutative_and_leaves_both_sides_alone():
    a, b, c = map(of_everything, (1, 2, 3))
    saved = a.to_dict(), b.to_dict()
    assert (a + b) + c == a + (b + c) == c + (b + a)
    assert (a.to_dict(), b.to_dict()) == saved


def test_means_of_merged_batches_of_different_size_are_those_of_all_rows():
    small, large = OffPolicyAccumulator(), OffPolicyAccumulator()
    small.add_steps([1], [1], train_step=11)
    large.add_steps([9] * 9, [9] * 9, train_step=11)
    small.merge(large)
    assert small.metrics()[f"{P}/trajectory_staleness/mean"] == (9 + 9 * 1) / 10


def test_it_merges_only_with_its_like():
    with pytest.raises(TypeError, match="from_dict"):
        of_everything(1).merge(of_everything(1).to_dict())
    with pytest.raises(TypeError):
        of_everything(1) + 1
    assert of_everything(1) != 1


def test_everything_is_a_flat_dict_of_floats():
    metrics = of_everything(2).metrics("off/line")
    assert set(metrics) == {
        f"off/line/{name}"
        for name in (
            "coverage",
            "stale_token_fraction",
            "masked_stale_fraction",
            "evicted_samples",
            "token_staleness/p50",
            "token_staleness/p99",
            *(
                f"{name}/{statistic}"
                for name in (
                    "trajectory_spans",
                    "trajectory_staleness",
                    "trajectory_staleness_worst",
                    "in_flight",
                    "in_queue",
                    "token_staleness",
                    "evicted_samples_staleness",
                )
                for statistic in ("mean", "max", "min")
            ),
        )
    }
    assert all(type(value) is float for value in metrics.values())


# Wrong input


@pytest.mark.parametrize(
    ("groups", "error", "match"),
    [
        ([5], TypeError, "group 0 must be a sequence"),
        ([group([3]), state([3])], TypeError, "group 1 must be a sequence"),
        ([[3]], TypeError, "group 0, member 0 .*no rollout state"),
        ([group([3], [3.5])], TypeError, r"group 0, member 1 \(rollout_id \d+\)"),
        ([[RolloutState(response_ids=[1, 2], response_model_steps=[3])]], ValueError, "1 entries, response_ids has 2"),
        ([group([3, 3], response_mask=[1])], ValueError, "member 0"),
    ],
)
def test_wrong_groups_are_refused_by_name_and_nothing_is_added(groups, error, match):
    accumulator = of_everything(2)
    with pytest.raises(error, match=match):
        accumulator.add_groups([group([4]), *groups][1:], train_step=5, token_stale_threshold=1)
    with pytest.raises(error):
        accumulator.add_groups([group([4]), *groups], train_step=5, token_stale_threshold=1)
    assert accumulator == of_everything(2)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.add_groups([], train_step=0),
        lambda a: a.add_groups([], train_step=True),
        lambda a: a.add_groups([], train_step=1, token_stale_threshold=-1),
        lambda a: a.add_steps([1], [1], train_step=1.0),
        lambda a: a.add_released([], train_step=0),
        lambda a: a.add_evicted([0.5]),
        lambda a: a.add_ledger({"trained": 1}),
        lambda a: a.add_ledger({"trained": 1, "masked_stale": -1}),
        lambda a: a.add_ledger({"trained": 1, "masked_stale": 1}, since={"trained": 1, "masked_stale": 2}),
        lambda a: a.add_ledger(7),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_added(call):
    accumulator = of_everything(2)
    with pytest.raises((TypeError, ValueError)):
        call(accumulator)
    assert accumulator == of_everything(2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": -1}, "rows"),
        ({"rows": 1}, "rows"),
        ({"evicted": True}, "evicted"),
        ({"evicted": 0}, "evicted_staleness is 2.*only 0"),
        ({"stale_tokens": 10**6}, "stale_tokens"),
        ({"ruled_tokens": 10**6}, "ruled_tokens"),
        ({"in_flight": Tally([1]).to_dict()}, "in_flight"),
        ({"in_queue": {"count": 1}}, "in_queue: tally"),
        ({"token_staleness": {"counts": [[1]]}}, "token_staleness: histogram"),
        ({"more": 1}, "expected a mapping of"),
    ],
)
def test_a_dict_nobody_can_have_written_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        OffPolicyAccumulator.from_dict(of_everything(2).to_dict() | change)

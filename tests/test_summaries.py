"""Buffers of summaries: masks as runs, counts without masks, and notes kept with what was done."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale._objects import measure, trainable_masks

RULE = StalenessRule(max_staleness=2, max_token_staleness=0)
tokens = st.lists(st.tuples(st.sampled_from([-1, 2, 3, 4, 5]), st.integers(0, 2)), max_size=40)


def summary(steps: list[int], mask: list[int] | None = None, **fields: Any) -> RolloutState:
    return RolloutState(
        response_model_steps=ModelSteps.from_list(steps),
        response_mask=None if mask is None else ModelSteps.from_list(mask),  # type: ignore[arg-type]
        status=Status.COMPLETED,
        **fields,
    )


@given(tokens, st.booleans(), st.integers(5, 8), st.sampled_from([None, 1, 2, 9]))
def test_runs_are_measured_and_counted_as_the_tokens_they_stand_for(
    pairs: list[tuple[int, int]], masked: bool, train_step: int, threshold: int | None
) -> None:
    steps, mask = [step for step, _ in pairs], [value for _, value in pairs] if masked else None
    full = RolloutState(response_ids=list(range(len(steps))), response_model_steps=steps, response_mask=mask)
    runs = summary(steps, mask)
    members = [measure(full, steps), measure(runs, runs.response_model_steps)]
    assert repr(members[0]) == repr(members[1])
    _, written = trainable_masks([full], members[:1], threshold is not None, train_step, threshold)
    for state, member in zip((full, runs), members, strict=True):
        masks, counted = trainable_masks(
            [state], [member], threshold is not None, train_step, threshold, count_only=True
        )
        assert (masks, counted) == ([None], written)


def test_without_masks_a_batch_is_counted_and_its_states_stay() -> None:
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0, write_masks=False)
    state = summary([3, 4, 4], [1, 1, 0])
    buffer.sync.put([state], train_step=5)
    mask = state.response_mask
    batch = buffer.sync.take_train_batch({"default": 1}, train_step=5)
    assert batch.trainable_tokens == 1
    assert state.response_mask is mask
    ledger = buffer.ledger()
    assert (ledger["trained"], ledger["masked_stale"], ledger["masked_semantic"]) == (1, 1, 1)


def test_masks_as_runs_are_in_checkpoint_and_journal(tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        return ReplayBuffer(RULE, tail_batch_trigger_size=0, journal=tmp_path / "journal", write_masks=False)

    first = buffer()
    first.sync.put([summary([3, 4, 4], [0, 1, 1], group_id=1)], train_step=5)
    first.sync.save(tmp_path)
    first.sync.put([summary([4, 4], [1, 0], group_id=2)], train_step=5)
    first.sync.close()
    second = buffer()
    second.sync.resume(tmp_path)
    batch = second.sync.take_train_batch({"default": 2}, train_step=5)
    assert [state.response_mask for state in batch.responses] == [
        ModelSteps.from_list([0, 1, 1]),
        ModelSteps.from_list([1, 0]),
    ]
    assert batch.trainable_tokens_by_task == {"default": 3}


def test_notes_come_back_in_order_with_what_the_operations_returned(tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        return ReplayBuffer(RULE, tail_batch_trigger_size=-1, journal=tmp_path, write_masks=False)

    with pytest.warns(UserWarning, match="tail_batch_trigger_size"):
        first = buffer()
    operations = first.operations
    operations.put([summary([4, 4], group_id=1)], "default", None, 5, ["put", 1])
    operations.put([summary([0, 0], group_id=2)], "default", None, 5, ["put", 2])
    operations.annotate(["only", {"a": None}])
    claim, _ = operations.claim_train_batch({"default": 1}, 5, ["take", 3])
    assert claim is not None
    asyncio.run(first.close())
    with pytest.warns(UserWarning, match="tail_batch_trigger_size"):
        second = buffer()
    notes = second.sync.resume(None).notes
    assert [note for note, _ in notes] == [["put", 1], ["put", 2], ["only", {"a": None}], ["take", 3]]
    assert [result for _, result in notes[:3]] == [Status.COMPLETED, Status.EXPIRED, None]
    batch = notes[3][1]
    assert [state.group_id for state in batch.responses] == [1]
    assert batch.trainable_tokens == 2


def test_one_group_is_handed_out_by_its_id_whatever_its_place() -> None:
    buffer = ReplayBuffer(RULE, tail_batch_trigger_size=0)
    for group_id in range(3):
        buffer.sync.put([summary([4, 4], group_id=group_id)], train_step=5)
    group = buffer.operations.get_group("default", 1)
    assert group is not None
    assert [state.group_id for state in group] == [1]
    assert buffer.ledger()["in_flight"] == 2
    assert buffer.operations.get_group("default", 1) is None
    assert buffer.sync.put(group, train_step=5) is Status.COMPLETED
    assert [group[0].group_id for group in buffer.sync.get(3)] == [0, 1, 2], "it keeps its place"

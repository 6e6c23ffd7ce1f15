"""A buffer that runs for a long time holds no more than what is stored in it."""

import pytest
from memory import memory_in_use, resident_bytes
from rollouts import balance, state

from pystale import ModelSteps, ReplayBuffer, StalenessRule, Status

WARM_UP = 8  # trainer steps, until every kind of group is stored in the share it keeps


def new_group(number: int, step: int) -> list:
    """Every eighth group was aborted, every fifth is old when it comes, every seventh has a reference to release."""
    born = step - 1 if number % 5 else step - 3
    steps = ModelSteps.from_runs([(born, 3), (step, 2)])
    members = [state(list(steps), group_id=f"g{number}"), state([step] * 4, group_id=f"g{number}")]
    members[0].response_model_steps = steps
    if number % 7 == 0:
        members[1].routed_experts = object()
    if number % 8 == 0:
        members[1].status = Status.ABORTED
    return members


def finish(members: list, step: int) -> list:
    """Roll out what is not complete."""
    for member in members:
        if member.status is not Status.COMPLETED:
            member.response_ids = [*(member.response_ids or []), 1]
            member.response_model_steps = [*(member.response_model_steps or []), step]
            member.status = Status.COMPLETED
    return members


class Run:
    """One trainer step after the other, with the buffer as full at the end of each."""

    def __init__(self, stored: int) -> None:
        self.full = stored
        self.stored = ReplayBuffer(StalenessRule(6, 4), tail_batch_trigger_size=0, max_rerolls=2)
        self.buffer = self.stored.sync
        self.step, self.groups, self.expired = 4, 0, 0

    def put_new(self, count: int) -> None:
        for _ in range(count):
            self.groups += 1
            self.buffer.put(new_group(self.groups, self.step), train_step=self.step + 1)

    def go_on(self) -> None:
        self.step += 1
        self.put_new(self.full // 4)
        self.expired += sum(self.buffer.refresh_staleness(self.step + 1).values())
        for status in (Status.EXPIRED, Status.ABORTED):
            for number, members in enumerate(self.buffer.get(self.full, status=status)):
                if number % 9 == 0:
                    self.buffer.reject(members)
                else:
                    self.buffer.put(finish(members, self.step))
        surplus = len(self.stored) - self.full
        if surplus > 0:
            self.buffer.take_train_batch({"default": surplus}, train_step=self.step + 1)


def soak(groups: int, stored: int) -> None:
    run = Run(stored)
    run.put_new(stored)
    for _ in range(WARM_UP):
        run.go_on()
    before, resident = memory_in_use(), resident_bytes()
    began = run.groups
    while run.groups < began + groups:
        run.go_on()
        produced, accounted_for = balance(run.buffer.ledger())
        assert produced == accounted_for
    growth, came = memory_in_use().growth_since(before), run.groups - began
    ledger = run.buffer.ledger()
    assert (len(run.stored), run.expired > 0) == (stored, True)
    assert min(ledger["trained"], ledger["masked_stale"], *ledger["discarded"].values()) > 0
    # What is stored is another mix of groups than before, but of as many. A group that stays takes over 2 kB.
    assert growth.heap < came * 100 + (4 << 20), growth
    assert growth.blocks < came // 2, growth
    assert growth.objects < came // 2, growth
    assert resident_bytes() - resident < came * 100 + (16 << 20)


@pytest.mark.whole_run
def test_twenty_thousand_groups() -> None:
    soak(20_000, stored=2_000)


@pytest.mark.long
def test_a_million_groups() -> None:
    soak(1_000_000, stored=10_000)

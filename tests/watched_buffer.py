"""A buffer that follows every group through its places, and checks all it knows after every operation."""

import functools

from rollouts import balance

from pystale import ReplayBuffer, Status, effective_mask

IN_FLIGHT, STORED, TRAINED, GONE = "in flight", "stored", "trained", "gone"


class WatchedBuffer(ReplayBuffer):
    """At any time a group that was drawn is in flight, stored, trained or gone, and in one of these places only.

    What is watched is what all faces of the buffer share, so that nothing passes unseen. It needs an `on_release`,
    without which the buffer does not say what it has discarded.
    """

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        for name in ("get", "put", "reject", "refresh", "claim_train_batch"):
            watched = functools.partial(getattr(self, f"watch_{name}"), getattr(self.operations, name))
            setattr(self.operations, name, watched)
        self.places = {}
        self.log = []

    def move(self, name, here, there):
        assert self.places.get(name) == here, f"{name} goes from {here} to {there}, but is {self.places.get(name)}"
        self.places[name] = there
        self.log.append((name, there))

    def draw(self, name):
        """A new prompt of this task and group id was drawn."""
        self.move(name, None, IN_FLIGHT)

    def check(self):
        assert list(self.places.values()).count(STORED) == len(self)
        produced, accounted_for = balance(self.ledger())
        assert produced == accounted_for

    def released(self, effects):
        """Groups that were discarded, not merely reset, and not by a reject, are gone."""
        cleared = effects.cleared.states
        for name in {(state.task_name, state.group_id) for state, _ in cleared if state.response_ids is None}:
            if self.places[name] is not GONE:
                self.move(name, self.places[name], GONE)

    def watch_get(self, get, n, task_name, status):
        groups = get(n, task_name, status)
        for members in groups:
            self.move((task_name, members[0].group_id), STORED, IN_FLIGHT)
        self.check()
        return groups

    def watch_put(self, put, group, task_name, model_step, train_step):
        unstamped = [state for state in group if len(state.response_model_steps) < len(state.response_ids)]
        status, effects = put(group, task_name, model_step, train_step)
        for state in unstamped:
            if state.response_ids:
                assert state.response_model_steps[-1] == state.extra_fields["version"], "stamped with another version"
        name = task_name, group[0].group_id
        if status is Status.EXPIRED and self.tail_batch_trigger_size(task_name) < 0:
            self.move(name, IN_FLIGHT, GONE)
        else:
            self.released(effects)
            if self.places[name] is not GONE:
                self.move(name, IN_FLIGHT, STORED)
        self.check()
        return status, effects

    def watch_reject(self, reject, group, task_name, outcome):
        name = task_name, group[0].group_id
        effects = reject(group, task_name, outcome)
        self.move(name, IN_FLIGHT, GONE)
        self.check()
        return effects

    def watch_refresh(self, refresh, train_step, statuses=None):
        moved, effects = refresh(train_step, statuses)
        self.released(effects)
        self.check()
        return moved, effects

    def watch_claim_train_batch(self, claim_train_batch, sizes, train_step):
        claim, effects = claim_train_batch(sizes, train_step)
        self.released(effects)
        for task_name, groups in (claim.batch if claim else {}).items():
            assert len(groups) == sizes[task_name]
            for members in groups:
                self.move((task_name, members[0].group_id), STORED, TRAINED)
                for member in members:
                    self.check_fresh(member, self.rule(task_name), train_step)
        self.check()
        return claim, effects

    @staticmethod
    def check_fresh(member, rule, train_step):
        assert member.status is Status.COMPLETED
        steps = list(member.response_model_steps)
        assert all(train_step - step - 1 < rule.stale_threshold for step in steps)
        if rule.token_stale_threshold is not None and steps:
            mask = list(member.response_mask)
            fresh = [train_step - step - 1 < rule.token_stale_threshold for step in steps]
            assert mask == fresh
            assert any(fresh)
            assert (
                mask
                == effective_mask(
                    steps, train_step=train_step, token_stale_threshold=rule.token_stale_threshold
                ).tolist()
            )

"""The buffer against a plain model that looks at every token of every group each time."""

import tempfile
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rollouts import balance

from pystale import ModelSteps, ReplayBuffer, RolloutState, StalenessRule, Status
from pystale.lengths import LengthAccumulator

C, A, E, F, X, U = (
    Status.COMPLETED,
    Status.ABORTED,
    Status.EXPIRED,
    Status.FAILED,
    Status.FILTERED,
    Status.INIT,
)
AGEING = (C, A, E)
TASKS = {
    "a": (StalenessRule(2, 0), 0),
    "b": (StalenessRule(1, 1, 2, spare_aborted=True), 3),
    "c": (StalenessRule(1), -1),
}
MAX_REROLLS = 2


class ModelMember:
    def __init__(self, steps, mask, status, agentic):
        self.steps, self.mask, self.status, self.agentic = steps, mask, status, agentic

    def trainable(self):
        return [i for i, s in enumerate(self.steps) if s >= 0 and (self.mask is None or self.mask[i])]

    def fresh(self, train_step, threshold):
        return [i for i in self.trainable() if threshold is None or train_step - self.steps[i] - 1 < threshold]

    def staleness(self, train_step):
        return max((train_step - s - 1 for s in self.steps if s >= 0), default=0)


class ModelGroup:
    def __init__(self, task, gid, arrival, members, prompt):
        self.task, self.gid, self.arrival, self.members, self.prompt = task, gid, arrival, members, prompt
        self.rerolls, self.key, self.status = 0, None, None

    @property
    def tokens(self):
        return sum(len(m.steps) for m in self.members)

    @property
    def rule(self):
        return TASKS[self.task][0]

    def masks_tokens(self):
        return self.rule.token_stale_threshold is not None and not any(m.agentic for m in self.members)

    def statuses(self):
        found = {m.status for m in self.members}
        if found == {C}:
            return C
        return next((s for s in (F, A, E, X, U) if s in found), Status.ARCHIVED)

    def new_key(self, order):
        steps = [s for m in self.members for s in m.steps if s >= 0]
        if order == "fifo":
            return 0
        if not any(m.steps for m in self.members) and self.key is not None:
            return self.key
        oldest = min(steps, default=None)
        if order == "oldest_prompt_first":
            return oldest if self.prompt is None else self.prompt
        step = self.prompt if oldest is None else oldest
        return None if step is None else -step if order == "freshest_first" else step

    def expired_members(self, train_step):
        found = []
        for member in self.members:
            if member.status is E:
                continue
            if member.status is U:
                continue
            too_old = member.steps and any(s >= 0 for s in member.steps)
            too_old = too_old and member.staleness(train_step) >= self.rule.stale_threshold
            spared = self.rule.spare_aborted and member.status is A
            stale = (
                self.masks_tokens()
                and not spared
                and bool(member.trainable())
                and not member.fresh(train_step, self.rule.token_stale_threshold)
            )
            if too_old or stale:
                found.append(member)
        return found


members_strategy = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=5),  # lags behind the newest weights, in steps
        st.sampled_from([None, None, "ones", "alternate", "zeros"]),
        st.sampled_from([C, C, C, C, A, A, E, F, X, U]),
        st.sampled_from(["list", "steps"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


class BufferAgainstModel(RuleBasedStateMachine):
    @initialize(
        order=st.sampled_from(["fifo", "stalest_first", "oldest_prompt_first", "freshest_first"]),
        min_fresh=st.sampled_from([None, None, 1, 2, 3]),
    )
    def make(self, order, min_fresh):
        self.order, self.min_fresh = order, min_fresh
        self.buffer = self.new_buffer()
        self.stored, self.lent = [], []
        self.train_step, self.arrivals, self.ids = None, 0, 0
        self.now = 5
        self.discarded, self.produced, self.trained = Counter(), 0, 0
        self.masked_stale = self.masked_semantic = 0
        self.left_out = Counter()
        self.lengths = LengthAccumulator()

    def new_buffer(self):
        return ReplayBuffer(
            {task: rule for task, (rule, _) in TASKS.items()},
            order=self.order,
            tail_batch_trigger_size={task: trigger for task, (_, trigger) in TASKS.items()},
            max_rerolls=MAX_REROLLS,
            **({} if self.min_fresh is None else {"group_mode": "members", "min_fresh": self.min_fresh}),
        )

    # The model's life cycle

    def discard_group(self, model, reason):
        self.discarded[reason] += model.tokens
        for member in model.members:
            self.lengths.add(reason, len(member.steps))
            member.steps = []
        if model in self.stored:
            self.stored.remove(model)

    def age(self, model, expired):
        """Returns whether the group entered EXPIRED or left."""
        if not expired:
            return False
        if self.goes_on(model, expired):
            self.reset(expired)
            return False
        if TASKS[model.task][1] < 0:
            self.discard_group(model, "expired")
            return True
        if model.rerolls >= MAX_REROLLS:
            self.discard_group(model, "max_rerolls")
            return True
        self.reset(expired)
        entered = model.status is not E
        model.status = E
        return entered

    def reset(self, members):
        for member in members:
            self.discarded["expired"] += len(member.steps)
            self.lengths.add("expired", len(member.steps))
            member.steps, member.mask, member.status = [], None, E

    def goes_on(self, model, expired=()):
        """Whether a finished group is trained with those of its members that are fresh."""
        fresh = [m for m in model.members if m.status is C and m not in expired]
        return (
            self.min_fresh is not None
            and model.status is C
            and {m.status for m in model.members} <= {C, E}
            and len(fresh) >= self.min_fresh
        )

    def store(self, model):
        model.status = C
        if not self.goes_on(model):
            model.status = model.statuses()
        model.key = model.new_key(self.order)
        self.stored.append(model)
        if model.status in AGEING:
            already = [m for m in model.members if m.status is E]
            due = model.expired_members(self.train_step) if self.train_step is not None else []
            self.age(model, already + due)
        return model.status if model in self.stored else E

    def refresh(self, statuses=AGEING):
        moved = {m.task: 0 for m in self.stored}
        for model in list(self.stored):
            if model.status in AGEING and model.status in statuses:
                moved[model.task] += self.age(model, model.expired_members(self.train_step))
        return moved

    def pool(self, task, status):
        found = [m for m in self.stored if (m.task, m.status) == (task, status)]
        return sorted(found, key=lambda m: (m.key is None, m.key or 0, m.arrival))

    # Operations

    @rule(
        task=st.sampled_from(sorted(TASKS)),
        members=members_strategy,
        prompt=st.sampled_from([None, 1, 2, 3]),
        with_step=st.booleans(),
    )
    def put(self, task, members, prompt, with_step):
        states, modelled = [], []
        for lags, mask, status, kind, foreign in members:
            steps = sorted(max(0, self.now - 1 - lag) for lag in lags)
            if foreign and steps:
                steps[0] = -1
            masks = {"ones": [1] * len(steps), "zeros": [0] * len(steps), None: None}
            masks["alternate"] = [i % 2 for i in range(len(steps))]
            agentic = foreign and mask == "ones"
            states.append(
                RolloutState(
                    group_id=self.ids,
                    response_ids=list(range(len(steps))),
                    response_model_steps=list(steps) if kind == "list" else ModelSteps.from_list(steps),
                    response_mask=masks[mask],
                    status=status,
                    prompt_model_step=prompt,
                    labels=[1] if agentic else None,
                )
            )
            modelled.append(ModelMember(steps, masks[mask], status, agentic))
        model = ModelGroup(task, self.ids, self.arrivals, modelled, prompt)
        self.ids += 1
        self.arrivals += 1
        self.produced += model.tokens
        if with_step:
            self.train_step = self.now
        expected = self.store(model)
        assert self.buffer.sync.put(states, task, train_step=self.now if with_step else None) is expected

    @rule(back=st.integers(-1, 2), statuses=st.sampled_from([None, (C,), (A, E), (E,), (F, U)]))
    def refresh_staleness(self, back, statuses):
        self.train_step = max(1, self.now - back)
        expected = self.refresh(AGEING if statuses is None else statuses)
        assert self.buffer.sync.refresh_staleness(self.train_step, statuses=statuses) == expected

    @rule(a=st.integers(0, 2), c=st.integers(0, 2))
    def take(self, a, c):
        self.train_step = self.now
        self.refresh()
        batch = self.buffer.sync.take_train_batch({"a": a, "c": c}, train_step=self.now)
        pools = {"a": self.pool("a", C)[:a], "c": self.pool("c", C)[:c]}
        if len(pools["a"]) < a or len(pools["c"]) < c:
            assert not batch
            return
        total, left_out = 0, Counter()
        for task, models in pools.items():
            assert [g[0].group_id for g in batch[task]] == [m.gid for m in models]
            for model, states in zip(models, batch[task], strict=True):
                self.stored.remove(model)
                fresh = [m for m in model.members if m.status is C]
                assert len(fresh) >= min(self.min_fresh or len(model.members), len(model.members))
                left_out[task] += len(model.members) - len(fresh)
                for member, state in zip(fresh, states, strict=True):
                    applies = model.masks_tokens() and member.trainable()
                    threshold = model.rule.token_stale_threshold if applies else None
                    ones = member.fresh(self.now, threshold)
                    if applies or any(s < 0 for s in member.steps):
                        assert list(state.response_mask) == [int(i in ones) for i in range(len(member.steps))]
                    else:
                        assert state.response_mask == member.mask
                    if member.steps:
                        assert state.seq_staleness == member.staleness(self.now)
                    assert member.staleness(self.now) < model.rule.stale_threshold
                    total += len(ones)
                    self.lengths.add("trained", len(member.steps))
                    self.trained += len(ones)
                    self.masked_stale += len(member.trainable()) - len(ones)
                    self.masked_semantic += len(member.steps) - len(member.trainable())
        assert batch.trainable_tokens == total
        assert batch.left_out_by_task == {"a": left_out["a"], "c": left_out["c"]}
        self.left_out += left_out

    @rule(task=st.sampled_from(sorted(TASKS)), status=st.sampled_from(list(Status)), n=st.integers(0, 3))
    def get(self, task, status, n):
        models = self.pool(task, status)[:n]
        groups = self.buffer.sync.get(n, task, status)
        assert [g[0].group_id for g in groups] == [m.gid for m in models]
        for model, states in zip(models, groups, strict=True):
            self.stored.remove(model)
            model.rerolls += status is E
            assert {s.rerolls for s in states} == {model.rerolls}
            self.lent.append((model, states))

    @rule(data=st.data(), how=st.sampled_from(["same", "continue", "restart", "empty"]))
    def put_back(self, data, how):
        if not self.lent:
            return
        model, states = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        for member, state in zip(model.members, states, strict=True):
            if member.status is C or member.agentic:
                continue
            if how == "continue":
                member.steps = [*member.steps, self.now - 1, self.now - 1]
                state.response_ids = [*state.response_ids, 77, 78]
                self.produced += 2
            elif how == "restart" and member.steps:
                self.discarded["restarted"] += len(member.steps)
                self.produced += 6
                member.steps, state.response_ids = [self.now - 1] * 6, [90] * 6
            elif how == "empty":
                self.discarded["restarted"] += len(member.steps)
                member.steps, state.response_ids = [], []
            else:
                continue
            state.response_model_steps = list(member.steps)
            state.response_mask = member.mask = None
            state.status = member.status = A if how == "empty" else C
        expected = self.store(model)
        assert self.buffer.sync.put(states, model.task) is expected

    @rule(data=st.data(), outcome=st.sampled_from(["failed", "filtered", "lost", "trained"]))
    def settle(self, data, outcome):
        if not self.lent:
            return
        model, states = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.buffer.sync.settle([states], outcome)
        for member in model.members:
            self.lengths.add(outcome, len(member.steps))
        if outcome != "trained":
            self.discarded[outcome] += model.tokens
            return
        for member in model.members:
            self.trained += len(member.trainable())
            self.masked_semantic += len(member.steps) - len(member.trainable())

    @rule()
    def a_weight_update(self):
        self.now += 1

    @rule()
    def save_and_resume(self):
        if self.produced == 0:
            return
        with tempfile.TemporaryDirectory() as directory:
            self.buffer.sync.save(directory)
            self.buffer = self.new_buffer()
            self.buffer.sync.resume(directory)
        self.lengths = LengthAccumulator()
        self.stored += [model for model, _ in self.lent]  # back where they came from, as they were
        self.lent.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "buffer"):
            return
        counted = self.buffer.sync.count_statuses(sorted(TASKS), list(Status))
        expected = Counter((m.task, m.status) for m in self.stored)
        assert {(t, s): n for t, pools in counted.items() for s, n in pools.items() if n} == dict(expected)
        assert len(self.buffer) == len(self.stored)
        ledger = self.buffer.ledger()
        assert ledger == {
            "produced": self.produced,
            "trained": self.trained,
            "masked_stale": self.masked_stale,
            "masked_semantic": self.masked_semantic,
            "discarded": {reason: n for reason, n in self.discarded.items() if n},
            "stored": sum(m.tokens for m in self.stored),
            "in_flight": sum(m.tokens for m, _ in self.lent),
        }
        report = self.buffer.report()
        assert (report.left_out, report.lengths) == (self.left_out, self.lengths)
        produced, used = balance(ledger)
        assert produced == used


BufferAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBufferAgainstModel = BufferAgainstModel.TestCase

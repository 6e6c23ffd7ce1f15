"""Agent loops for the tests: small, real, and told by the test how each group ends."""

import asyncio

from pystale import Status


def clear(member):
    member.response_ids, member.response_model_steps, member.logprobs, member.response_mask = [], [], [], None


class ScriptedLoop:
    """Agent loop that ends group `n` as ``acts[n]`` says, and any other as `default` says.

    An act is an async function ``act(loop, members)`` of the members to generate; what it raises, the loop raises.
    """

    def __init__(self, default=None, acts=None, answers_pause=True):
        self.default = default or finish(3)
        self.acts = acts or {}
        self.answers_pause = answers_pause
        self.calls = []  # group ids, in order
        self.generated = []  # rollout ids, in order
        self.requests_to_pause = 0
        self.paused = asyncio.Event()

    async def generate_group(self, group, *, enable_partial_rollout):
        number = group[0].group_id
        self.calls.append(number)
        self.paused.clear()
        members = [member for member in group if member.status is not Status.COMPLETED]
        self.generated += [member.rollout_id for member in members]
        if not enable_partial_rollout:
            for member in members:
                clear(member)
        returned = await self.acts.get(number, self.default)(self, members)
        return group if returned is None else returned

    async def pause(self):
        self.requests_to_pause += 1
        if self.answers_pause:
            self.paused.set()


def add_tokens(member, n, step=None):
    begin = len(member.response_ids)
    member.response_ids = [*member.response_ids, *range(100 + begin, 100 + begin + n)]
    if step is not None:
        member.response_model_steps = [*member.response_model_steps, *[step] * n]


def finish(tokens=3, after=0.0, step=None, reward=1.0):
    async def act(_loop, members):
        await asyncio.sleep(after)
        for member in members:
            add_tokens(member, tokens, step)
            member.status, member.reward = Status.COMPLETED, reward

    return act


def until_paused(tokens=2, step=None):
    """Generate some tokens, then wait for the pause and come back ABORTED."""

    async def act(loop, members):
        for member in members:
            add_tokens(member, tokens, step)
        await loop.paused.wait()
        for member in members:
            member.status = Status.ABORTED

    return act


def until_cancelled(tokens=2):
    """Generate some tokens, then take no notice of anything but a cancellation."""

    async def act(_loop, members):
        for member in members:
            add_tokens(member, tokens)
        await asyncio.Event().wait()

    return act


def come_back(status, tokens=0, **fields):
    """Come back at once with this status."""

    async def act(_loop, members):
        await asyncio.sleep(0)
        for member in members:
            add_tokens(member, tokens)
            member.status = status
            for name, value in fields.items():
                setattr(member, name, value)

    return act


def fail(message="the engine is on fire", error=RuntimeError):
    async def act(_loop, _members):
        await asyncio.sleep(0)
        raise error(message)

    return act


def in_turn(*acts):
    """The first act at the first call, the second at the second, and so on; the last for all further ones."""
    left = list(acts)

    async def act(loop, members):
        return await (left.pop(0) if len(left) > 1 else left[0])(loop, members)

    return act

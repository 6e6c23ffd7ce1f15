"""Random histories of a replay buffer of XTuner's, played to two buffers that have to agree."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

TASKS = ("math", "code")
POOLS = ("INIT", "COMPLETED", "ABORTED", "EXPIRED", "FAILED", "FILTERED", "ARCHIVED")
SHOWN = (
    *("rollout_id", "status", "seq_staleness", "prompt_ids", "tokens", "response", "response_ids", "response_mask"),
    *("response_model_steps", "logprobs", "reward", "input_ids"),
)

MakeState = Callable[..., Any]
Reload = Callable[[Any], Awaitable[Any]]


class History:
    """Draws operations and plays each to both buffers.

    Parameters
    ----------
    ours, theirs : buffers
    make_state : callable
        Makes a state from keywords.
    statuses : enum
        Statuses of the states.
    seed : int
    reload : coroutine function
        Saves our buffer, and returns another that has resumed from that.
    strict : bool, default False
        Leave out what XTuner itself stops at: tokens without a list of steps under a token rule.
    """

    def __init__(
        self,
        ours: Any,
        theirs: Any,
        make_state: MakeState,
        statuses: Any,
        seed: int,
        reload: Reload,
        strict: bool = False,
    ) -> None:
        self.ours, self.theirs, self.reload = ours, theirs, reload
        self.make_state, self.statuses, self.strict = make_state, statuses, strict
        self.random = random.Random(seed)
        self.train_step = self.random.randint(0, 4)
        self.made = 0
        self.out: list[tuple[list[Any], list[Any]]] = []  # handed out by both, the same groups
        self.done: dict[str, int] = dict.fromkeys(("put", "again", "refresh", "get", "expired", "resume"), 0)

    def member(self) -> dict[str, Any]:
        draw = self.random
        self.made += 1
        length = draw.choice((0, 1, 2, 5, 9))
        newest = self.train_step - draw.choice((1, 1, 1, 2, 3, 5, 0, -2))
        steps = sorted(max(newest - draw.choice((0, 0, 1, 2, 4)), -3) for _ in range(length))
        if draw.random() < 0.2:
            steps = steps[: draw.randint(0, length)]
        mask = [draw.choice((0, 1, 1, 1)) for _ in range(length)]
        if draw.random() < 0.1:
            mask = mask[: draw.randint(0, length)] or [draw.choice((0, 2, True))]
        return {
            "rollout_id": self.made,
            "session_id": self.made,
            "message": [{"role": "user", "content": "?"}],
            "prompt_ids": [7, self.made],
            "tokens": [7, self.made, 8],
            "response": "r" * length,
            "response_ids": draw.choice((None, [])) if not length else list(range(length)),
            "response_mask": draw.choice((None, mask, mask)),
            "response_model_steps": draw.choice((None, [])) if not (steps or self.strict) else steps,
            "logprobs": [0.5] * length,
            "reward": {"score": 1.0},
            "seq_staleness": draw.choice((0, 0, 1, 3, 8)),
            "status": self.statuses[draw.choice(("COMPLETED",) * 8 + POOLS)],
            "input_ids": [1] if draw.random() < 0.04 else None,
        }

    async def put(self) -> None:
        draw = self.random
        if self.out and draw.random() < 0.4:
            ours, theirs = self.out.pop(draw.randrange(len(self.out)))
            self.done["again"] += 1
            for one, other in zip(ours, theirs, strict=True):
                if one.status.name != "COMPLETED" and draw.random() < 0.8:
                    new = self.member()
                    for state in (one, other):
                        for name in ("response_ids", "response_mask", "response_model_steps", "logprobs", "status"):
                            value = new[name]
                            setattr(state, name, list(value) if isinstance(value, list) else value)
        else:
            members = [self.member() for _ in range(draw.randint(1, 3))]
            ours, theirs = ([self.make_state(**copied(member)) for member in members] for _ in range(2))
            self.done["put"] += 1
        call: dict[str, Any] = {"model_step": draw.choice((None, self.train_step - 1, self.train_step - 2))}
        if draw.random() < 0.75:
            call["current_train_step"] = self.train_step + draw.choice((0, 0, 0, 1))
            call["stale_threshold"] = draw.choice((None, 1, 2, 4))
            call["token_stale_threshold"] = draw.choice((None, 1, 2, 6))
        call["expired_groups_retryable"] = draw.random() < 0.8
        task = draw.choice(TASKS)
        await self.ours.put(ours, task, **call)
        await self.theirs.put(theirs, task, **call)

    async def refresh(self) -> None:
        draw = self.random
        self.train_step = max(self.train_step + draw.choice((0, 1, 1, 1, 2, -1)), 0)
        tasks = draw.choice((TASKS, TASKS, TASKS[:1], ("math", "unknown")))
        call: dict[str, Any] = {
            "task_stale_thresholds": {task: draw.choice((3, 3, 3, 1, 5)) for task in tasks},
            "task_token_stale_thresholds": draw.choice((None, {}, {"math": 2}, {"math": 2}, {"math": 1, "code": 3})),
            "expired_groups_retryable_by_task": draw.choice((None, {"math": True}, {"code": False})),
            "current_train_step": self.train_step,
        }
        if draw.random() < 0.3:
            call["statuses"] = [self.statuses[name] for name in draw.sample(POOLS, draw.randint(0, 4))]
        ours = await self.ours.refresh_staleness(**call)
        agree(ours, await self.theirs.refresh_staleness(**call))
        self.done["refresh"] += 1
        self.done["expired"] += sum(ours.values())

    async def get(self) -> None:
        task, pool, n = self.random.choice(TASKS), self.random.choice(POOLS[1:5]), self.random.randint(0, 4)
        ours = await self.ours.get(n, task, self.statuses[pool])
        theirs = await self.theirs.get(n, task, self.statuses[pool])
        agree(list(map(shown, ours)), list(map(shown, theirs)))
        self.done["get"] += len(ours)
        self.out += zip(ours, theirs, strict=True)
        del self.out[:-8]

    async def resume(self) -> None:
        if self.random.random() < 0.4:
            self.ours = await self.reload(self.ours)
            self.done["resume"] += 1

    async def play(self, operations: int) -> None:
        for _ in range(operations):
            await self.random.choice((self.put, self.put, self.put, self.refresh, self.get, self.resume))()
            agree(len(self.ours), len(self.theirs))
            for task in TASKS:
                for name in POOLS:
                    status = self.statuses[name]
                    agree(await self.ours.count(task, status), await self.theirs.count(task, status))
        for task in TASKS:
            for name in POOLS:
                ours = await self.ours.get(10**6, task, self.statuses[name])
                theirs = await self.theirs.get(10**6, task, self.statuses[name])
                agree(list(map(shown, ours)), list(map(shown, theirs)))


def agree(ours: Any, theirs: Any) -> None:
    """No `assert`: this is no test module, and `python -O` would drop it."""
    if ours != theirs:
        raise AssertionError(f"ours {ours!r}, theirs {theirs!r}")


def copied(member: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in member.items()}


def shown(group: list[Any]) -> list[dict[str, Any]]:
    return [{name: getattr(state, name) for name in SHOWN} for state in group]

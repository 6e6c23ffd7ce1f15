"""Lines of a trace: what each of them says, read strictly, since a trace may come from anywhere."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pystale.arguments import OUTCOMES, Rules, Triggers, checked_missing_version, checked_order
from pystale.ledger import REASONS
from pystale.policy import Order
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status

__all__ = [
    "MOST_MEMBERS",
    "MOST_TOKENS",
    "OPERATIONS",
    "Account",
    "Arrival",
    "Event",
    "Get",
    "Groups",
    "Header",
    "Leg",
    "Lost",
    "MemberLine",
    "Refresh",
    "Resume",
    "Runs",
    "Sync",
    "Take",
    "TraceError",
    "Undo",
    "event_of",
    "header_of",
]

# Tokens of one response, and members of one group, beyond which a line is taken for damage.
MOST_TOKENS = 2**40
MOST_MEMBERS = 2**16

Runs = tuple[tuple[int, int], ...]
Groups = tuple[tuple[str, int | str], ...]  # (task, group id), in order


class TraceError(ValueError):
    """A trace, or a line of it, that cannot be read."""


class Header(NamedTuple):
    """Settings of the buffer that was traced."""

    rules: Rules
    triggers: Triggers
    order: Order
    missing_version: str
    max_rerolls: int | None
    min_fresh: int | None = None  # members that a group is trained with at least; None: all it has
    created: str = ""


class MemberLine(NamedTuple):
    """A member of a group that came."""

    status: Status
    tokens: int
    steps: Runs | None  # None where its tokens have no version
    mask: Runs | None  # None where every token that a model generated may enter the loss


class Arrival(NamedTuple):
    """A group that came: it was put, or it was rejected or settled with an outcome."""

    op: str  # "put", "reject", "settle", or "stored" for one that a checkpoint held
    task: str
    group: int | str
    members: tuple[MemberLine, ...]
    train_step: int | None
    back: bool  # it had been handed out
    restarted: tuple[int, ...]  # members that did not go on with the response they had then
    agentic: bool  # the token rule does not apply
    prompt_model_step: int | None
    rerolls: int
    outcome: str | None = None
    pool: Status | None = None  # of a stored group
    key: int | None = None  # of a stored group


class Refresh(NamedTuple):
    """Groups were aged."""

    train_step: int
    pools: tuple[Status, ...] | None  # None: all that age


class Get(NamedTuple):
    """Groups of a pool were handed out."""

    pool: Status
    groups: Groups


class Take(NamedTuple):
    """A batch was asked for."""

    sizes: dict[str, int]
    train_step: int | None
    pool: Status
    groups: Groups  # empty where a task was short
    known: bool = True  # False: the run is not a trace's, and did not record what was taken


class Undo(NamedTuple):
    """Groups that were handed out or taken are stored as if they had never left."""

    groups: Groups


class Account(NamedTuple):
    """Tokens and groups booked so far."""

    ledger: dict[str, Any]
    group_counts: dict[str, int]


class Resume(NamedTuple):
    """A checkpoint was loaded; what it held follows as stored groups."""

    train_step: int | None
    account: Account


class Leg(NamedTuple):
    """A request to the engine was over."""

    group: int | str | None
    rollout: int | str | None
    model_step: int | None
    tokens: int
    reason: str
    seconds: float


class Sync(NamedTuple):
    """The engine serves newer weights."""

    model_step: int


class Lost(NamedTuple):
    """Lines were left out."""

    lines: int


Event = Arrival | Refresh | Get | Take | Undo | Account | Resume | Leg | Sync | Lost


def header_of(content: dict[str, Any]) -> Header:
    """The header of a trace, from its first line.

    Raises
    ------
    TypeError, ValueError
        If a setting is missing, unknown or wrong.
    """
    fields = {"pystale_trace", "created", "order", "missing_version", "max_rerolls", "min_fresh", "tasks"}
    if set(content) != fields:
        raise ValueError(f"the header consists of {', '.join(sorted(fields))}, got {', '.join(sorted(content)):.200}")
    rules: dict[str | None, StalenessRule] = {}
    triggers: dict[str | None, int] = {}
    tasks = content["tasks"]
    if not isinstance(tasks, list) or not tasks:
        raise ValueError(f"tasks must be a list of settings, got {tasks!r:.40}")
    for settings in tasks:
        if not isinstance(settings, dict):
            raise ValueError(f"tasks must be a list of settings, got {settings!r:.40} in it")
        settings = dict(settings)
        name, trigger = settings.pop("task", None), settings.pop("tail_batch_trigger_size", None)
        if name in rules or not isinstance(name, (str, type(None))):
            raise ValueError(f"tasks: {name!r:.40} is no name, or occurs twice")
        rules[name] = StalenessRule(**settings)
        triggers[name] = checked_int("tail_batch_trigger_size", trigger, at_least=-1)
    max_rerolls, min_fresh = content["max_rerolls"], content["min_fresh"]
    shared, shared_triggers = _shared(rules, triggers)
    return Header(
        shared,
        shared_triggers,
        checked_order(content["order"]),
        checked_missing_version(content["missing_version"]),
        None if max_rerolls is None else checked_int("max_rerolls", max_rerolls, at_least=0),
        None if min_fresh is None else checked_int("min_fresh", min_fresh, at_least=1),
        str(content["created"])[:40],
    )


def _shared(rules: Mapping[str | None, StalenessRule], triggers: Mapping[str | None, int]) -> tuple[Rules, Triggers]:
    """Rules and triggers as a buffer takes them: one for all, or by task."""
    named = {name: trigger for name, trigger in triggers.items() if name is not None}
    if None not in rules:
        return {name: rule for name, rule in rules.items() if name is not None}, named
    if not named:
        return rules[None], triggers[None]
    if set(rules.values()) != {rules[None]} or triggers[None] != -1:
        raise ValueError(
            "tasks: where one rule is for all tasks, named ones may differ in tail_batch_trigger_size only"
        )
    return rules[None], named


# Fields of a line. Each takes its field away, so that what is left over is unknown.


def _integer(content: dict[str, Any], name: str, at_least: int = 0) -> int:
    if name not in content:
        raise ValueError(f"{name} is missing")
    return checked_int(name, content.pop(name), at_least=at_least)


def _optional(content: dict[str, Any], name: str, at_least: int = 0) -> int | None:
    value = content.pop(name, None)
    return None if value is None else checked_int(name, value, at_least=at_least)


def _text(content: dict[str, Any], name: str) -> str:
    value = content.pop(name, None)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r:.40}")
    return value


def _flag(content: dict[str, Any], name: str) -> bool:
    value = content.pop(name, False)
    if type(value) is not bool:
        raise ValueError(f"{name} must be true or false, got {value!r:.40}")
    return value


def _group_id(value: Any) -> int | str:
    if type(value) not in (int, str):
        raise ValueError(f"a group id is an integer or a text, got {value!r:.40}")
    return value  # type: ignore[no-any-return]


def _status(value: Any) -> Status:
    if not isinstance(value, str) or value not in Status.__members__:
        raise ValueError(f"a status is one of {', '.join(Status.__members__)}, got {value!r:.40}")
    return Status[value]


def _runs(content: dict[str, Any], name: str) -> Runs | None:
    flat = content.pop(name, None)
    if flat is None:
        return None
    if not isinstance(flat, list) or len(flat) % 2 or any(type(number) is not int for number in flat):
        raise ValueError(f"{name} must be a list of value, length, value, length, …, got {flat!r:.40}")
    values, lengths = flat[::2], flat[1::2]
    if any(length < 1 for length in lengths) or sum(lengths) > MOST_TOKENS:
        raise ValueError(f"{name} must have lengths from 1 on that sum up to {MOST_TOKENS} at most, got {flat!r:.40}")
    if any(not -(2**63) <= value < 2**63 for value in values):
        raise ValueError(f"{name} must have values of 64 bits, got {flat!r:.40}")
    return tuple(zip(values, lengths, strict=True))


def _groups(content: dict[str, Any]) -> Groups:
    by_task = content.pop("groups", None)
    if not isinstance(by_task, dict) or not all(isinstance(ids, list) for ids in by_task.values()):
        raise ValueError(f"groups must be lists of group ids by task, got {by_task!r:.40}")
    return tuple((task, _group_id(group_id)) for task, ids in by_task.items() for group_id in ids)


def _members(content: dict[str, Any]) -> tuple[MemberLine, ...]:
    members = content.pop("members", None)
    if not isinstance(members, list) or not 0 < len(members) <= MOST_MEMBERS:
        raise ValueError(f"members must be a list of 1 to {MOST_MEMBERS} objects, got {members!r:.40}")
    return tuple(map(_member, members))


def _member(content: Any) -> MemberLine:
    if isinstance(content, list):
        content = {"steps": content}
    if not isinstance(content, dict):
        raise ValueError(f"a member is a list of runs or an object, got {content!r:.40}")
    steps, mask = _runs(content, "steps"), _runs(content, "mask")
    tokens = _optional(content, "tokens")
    status = _status(content.pop("status", "COMPLETED"))
    if content:
        raise ValueError(f"a member has no {', '.join(sorted(content)):.80}")
    if steps is not None and tokens is not None:
        raise ValueError("a member has steps, or tokens where they have no version; not both")
    total = sum(length for _, length in steps) if steps is not None else tokens or 0
    if total > MOST_TOKENS:
        raise ValueError(f"tokens must be at most {MOST_TOKENS}, got {total}")
    if mask is not None and sum(length for _, length in mask) != total:
        raise ValueError(f"mask has {sum(length for _, length in mask)} tokens, the response {total}")
    return MemberLine(status, total, steps, mask)


def _arrival(op: str, content: dict[str, Any]) -> Arrival:
    members = _members(content)
    back = op != "put" if op == "settle" else _flag(content, "back")
    if op == "settle":
        content.pop("back", None)
    restarted = content.pop("restarted", [])
    if not isinstance(restarted, list) or any(type(at) is not int or at < 0 for at in restarted):
        raise ValueError(f"restarted must list positions of members, got {restarted!r:.40}")
    outcome = None if op in ("put", "stored") else _text(content, "outcome")
    if outcome is not None and outcome not in (OUTCOMES[1:] if op == "reject" else OUTCOMES):
        raise ValueError(f"outcome must be one of {', '.join(OUTCOMES)}, got {outcome!r:.40}")
    return Arrival(
        op,
        _text(content, "task"),
        _group_id(content.pop("group", None)),
        members,
        _optional(content, "train_step", at_least=1),
        back,
        tuple(restarted),
        _flag(content, "agentic"),
        _optional(content, "prompt_model_step"),
        _optional(content, "rerolls") or 0,
        outcome,
        _status(content.pop("pool", None)) if op == "stored" else None,
        _optional(content, "key", at_least=-(2**63)) if op == "stored" else None,
    )


def _refresh(op: str, content: dict[str, Any]) -> Refresh:
    pools = content.pop("pools", None)
    if pools is not None and not isinstance(pools, list):
        raise ValueError(f"pools must be a list of statuses, got {pools!r:.40}")
    return Refresh(_integer(content, "train_step", 1), None if pools is None else tuple(map(_status, pools)))


def _get(op: str, content: dict[str, Any]) -> Get:
    return Get(_status(content.pop("pool", None)), _groups(content))


def _take(op: str, content: dict[str, Any]) -> Take:
    sizes = content.pop("sizes", None)
    if not isinstance(sizes, dict) or not sizes:
        raise ValueError(f"sizes must be numbers of groups by task, got {sizes!r:.40}")
    sizes = {task: checked_int("sizes", n, at_least=0) for task, n in sizes.items()}
    pool = _status(content.pop("pool", "COMPLETED"))
    groups = _groups(content)
    if groups and len(groups) != sum(sizes.values()):
        raise ValueError(f"{len(groups)} groups were taken, and {sum(sizes.values())} were asked for")
    return Take(sizes, _optional(content, "train_step", at_least=1), pool, groups)


def _undo(op: str, content: dict[str, Any]) -> Undo:
    return Undo(_groups(content))


GROUP_COUNTS = ("trained", "expired", "rerolled", "discarded")


def _account(op: str, content: dict[str, Any]) -> Account:
    ledger: dict[str, Any] = {
        name: _integer(content, name)
        for name in ("produced", "trained", "masked_stale", "masked_semantic", "stored", "in_flight")
    }
    for name, names in (("discarded", REASONS), ("groups", GROUP_COUNTS)):
        counts = content.pop(name, None)
        if not isinstance(counts, dict) or not set(counts) <= set(names):
            raise ValueError(f"{name} must map some of {', '.join(names)} to counts, got {counts!r:.40}")
        ledger[name] = {key: checked_int(name, count, at_least=0) for key, count in counts.items()}
    return Account(ledger, ledger.pop("groups"))


def _resume(op: str, content: dict[str, Any]) -> Resume:
    return Resume(_optional(content, "train_step", at_least=1), _account(op, content))


def _leg(op: str, content: dict[str, Any]) -> Leg:
    leg = content.pop("leg", None)
    if not isinstance(leg, list) or not 5 <= len(leg) <= 6:
        raise ValueError(f"leg must be [group, rollout, model_step, tokens, seconds, reason], got {leg!r:.40}")
    group, rollout, model_step, tokens, seconds, *reason = leg
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e12:
        raise ValueError(f"seconds must be a number, got {seconds!r:.40}")
    return Leg(
        None if group is None else _group_id(group),
        None if rollout is None else _group_id(rollout),
        None if model_step is None else checked_int("model_step", model_step, at_least=-(2**63)),
        checked_int("tokens", tokens, at_least=0),
        _text({"reason": reason[0]}, "reason") if reason else "stop",
        float(seconds),
    )


def _sync(op: str, content: dict[str, Any]) -> Sync:
    return Sync(_integer(content, "model_step"))


def _lost(op: str, content: dict[str, Any]) -> Lost:
    return Lost(_integer(content, "lines", 1))


_EVENTS: dict[str, Callable[[Any, dict[str, Any]], Event]] = {
    **dict.fromkeys(("put", "reject", "settle", "stored"), _arrival),
    "refresh": _refresh,
    "get": _get,
    "take": _take,
    "undo": _undo,
    "ledger": _account,
    "resume": _resume,
    "leg": _leg,
    "sync": _sync,
    "lost": _lost,
}
OPERATIONS = tuple(_EVENTS)


def event_of(content: dict[str, Any]) -> Event:
    """What a line says; its fields are taken away.

    Raises
    ------
    TypeError, ValueError
        If a field is missing, unknown or wrong.
    """
    op = content.pop("op", None)
    read = _EVENTS.get(op) if isinstance(op, str) else None
    if read is None:
        raise ValueError(f"op must be one of {', '.join(_EVENTS)}, got {op!r:.40}")
    event = read(op, content)
    if content:
        raise ValueError(f"{op} has no {', '.join(sorted(content)):.80}")
    return event

"""Arguments of the buffer, checked before anything changes."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from pystale.policy import GroupMode, Order
from pystale.staleness import StalenessRule, checked_int

__all__ = [
    "OUTCOMES",
    "Rules",
    "Sizes",
    "Triggers",
    "checked_group_id",
    "checked_group_mode",
    "checked_hooks",
    "checked_missing_version",
    "checked_order",
    "checked_outcome",
    "checked_rules",
    "checked_seconds",
    "checked_sizes",
    "checked_task_name",
    "checked_triggers",
    "warn_of_discards",
    "warn_of_order",
]

Sizes = Mapping[str, int]
Rules = StalenessRule | dict[str, StalenessRule]
Triggers = int | dict[str, int]
OUTCOMES = ("trained", "failed", "filtered", "lost")


def checked_rules(rule: Any) -> Rules:
    if isinstance(rule, StalenessRule):
        return rule
    if not isinstance(rule, Mapping):
        raise TypeError(f"rule must be a StalenessRule or a mapping of task names to them, got {type(rule).__name__}")
    if not rule:
        raise ValueError("rule names no task; give at least one, or one StalenessRule for all")
    for name, value in rule.items():
        checked_task_name(name)
        if not isinstance(value, StalenessRule):
            raise TypeError(f"rule of task {name!r} must be a StalenessRule, got {type(value).__name__}")
    return dict(rule)


def checked_triggers(trigger: Any, rules: Rules) -> Triggers:
    if not isinstance(trigger, Mapping):
        return checked_int("tail_batch_trigger_size", trigger, at_least=-1)
    for name in trigger:
        if isinstance(rules, dict) and name not in rules:
            raise ValueError(f"tail_batch_trigger_size names task {name!r}, which has no rule")
    return {
        checked_task_name(name): checked_int(f"tail_batch_trigger_size of task {name!r}", value, at_least=-1)
        for name, value in trigger.items()
    }


def checked_task_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a task name is a str, got {type(name).__name__} {name!r}")
    return name


def checked_sizes(sizes: Any) -> dict[str, int]:
    if not isinstance(sizes, Mapping):
        raise TypeError(f"sizes must map task names to numbers of groups, got {type(sizes).__name__}")
    if not sizes:
        raise ValueError("sizes names no task; give {task_name: number of groups}")
    return {checked_task_name(name): checked_int(f"sizes[{name!r}]", n, at_least=0) for name, n in sizes.items()}


def checked_outcome(outcome: Any, allowed: tuple[str, ...]) -> None:
    if outcome not in allowed:
        raise ValueError(f"outcome must be one of {', '.join(allowed)}, got {outcome!r}")


def checked_order(order: Any) -> Order:
    try:
        return Order(order)
    except ValueError:
        raise ValueError(f"order must be one of {', '.join(o.value for o in Order)}, got {order!r}") from None


def checked_group_id(group_id: Any) -> Any:
    if group_id is not None and type(group_id) not in (int, str) and not isinstance(group_id, np.integer):
        raise TypeError(f"group_id must be an int, a str or None, got {type(group_id).__name__} {group_id!r}")
    return group_id


def checked_group_mode(group_mode: Any, min_fresh: Any) -> tuple[GroupMode, int]:
    try:
        mode = GroupMode(group_mode)
    except ValueError:
        raise ValueError(
            f"group_mode must be one of {', '.join(m.value for m in GroupMode)}, got {group_mode!r}"
        ) from None
    fewest = checked_int("min_fresh", min_fresh, at_least=1, remedy="a group without a fresh member trains nothing")
    if mode is GroupMode.ALL and fewest != 1:
        raise ValueError(
            f"min_fresh={fewest} has no effect with group_mode='all', which trains whole groups only; "
            "leave it out, or choose group_mode='members'"
        )
    return mode, fewest


def checked_missing_version(missing_version: Any) -> str:
    if missing_version not in ("error", "oldest", "newest"):
        raise ValueError(f"missing_version must be 'error', 'oldest' or 'newest', got {missing_version!r}")
    return str(missing_version)


def checked_hooks(*, on_release: Any, dump_ref: Any, load_ref: Any) -> None:
    for name, hook in (("on_release", on_release), ("dump_ref", dump_ref), ("load_ref", load_ref)):
        if hook is not None and not callable(hook):
            raise TypeError(f"{name} must be callable, got {type(hook).__name__}")
    if (dump_ref is None) != (load_ref is None):
        raise ValueError("dump_ref and load_ref come together: what one writes the other has to read")


def checked_seconds(name: str, value: Any, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {type(value).__name__} {value!r}")
    if not 0 <= value < float("inf") or (positive and not value):
        raise ValueError(f"{name} must be {'above' if positive else 'at least'} 0 and finite, got {value}")
    return value


def warn_of_order(order: Order) -> None:
    """Warn the caller's caller that what takes have waited for may expire all the same."""
    if order is not Order.STALEST_FIRST:
        warnings.warn(
            f"wait_for_stragglers with order={order.value!r}: what a take has waited for may be left behind, younger "
            "groups taken in its place, and expire; 'stalest_first' takes it first",
            stacklevel=3,
        )


def warn_of_discards(rules: Rules, triggers: Triggers) -> None:
    """Warn the caller's caller where token expiry throws whole groups away."""
    for name, rule in {"": rules}.items() if isinstance(rules, StalenessRule) else rules.items():
        trigger = triggers if isinstance(triggers, int) else triggers.get(name, -1)
        if rule.token_stale_threshold is not None and trigger < 0:
            warnings.warn(
                f"tail_batch_trigger_size=-1{name and f' of task {name!r}'} with max_token_staleness="
                f"{rule.max_token_staleness}: a group is discarded for good, fresh members too, as soon as one member "
                "has no trainable token left; 0 or more keeps it for re-rollout",
                stacklevel=3,
            )

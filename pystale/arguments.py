"""Arguments of the buffer, checked before anything changes."""

from collections.abc import Mapping
from typing import Any

from pystale.staleness import StalenessRule, checked_int

__all__ = [
    "Rules",
    "Sizes",
    "Triggers",
    "checked_outcome",
    "checked_rules",
    "checked_sizes",
    "checked_task_name",
    "checked_triggers",
]

Sizes = Mapping[str, int]
Rules = StalenessRule | dict[str, StalenessRule]
Triggers = int | dict[str, int]


def checked_rules(rule: Any) -> StalenessRule | dict[str, StalenessRule]:
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


def checked_triggers(trigger: Any, rules: StalenessRule | dict[str, StalenessRule]) -> int | dict[str, int]:
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

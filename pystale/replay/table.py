"""Outcomes as a table, and what has to be said around it."""

from collections.abc import Sequence
from typing import Any

from pystale.replay.engine import ASSUMPTIONS
from pystale.replay.history import History
from pystale.replay.outcome import Outcome, mean_of, quantile_of
from pystale.replay.whatif import NO_LIMIT

__all__ = ["introduction", "notes", "setting_name", "text_table"]

# Two lines each; the second ones are for terminals that are too narrow for the first.
HEADINGS = (
    (("max", "staleness"), ("max", "stale")),
    (("max token", "staleness"), ("token", "stale")),
    (("tokens", "trained"), ("tokens", "trained")),
    (("tokens", "masked"), ("tokens", "masked")),
    (("tokens", "expired"), ("tokens", "expired")),
    (("tokens", "wasted"), ("tokens", "wasted")),
    (("groups", "re-rolled"), ("groups", "reroll")),
    (("groups", "discarded"), ("groups", "discard")),
    (("staleness", "mean"), ("age", "mean")),
    (("", "p95"), ("age", "p95")),
    (("", "max"), ("age", "max")),
    (("batches", "waited"), ("batches", "waited")),
)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def setting_name(outcome: Outcome) -> tuple[str, str]:
    """Limits of an outcome as they are given on the command line; those of several tasks side by side."""
    mark = "*" if outcome.setting.recorded else ""
    return _joined(outcome.max_staleness.values()) + mark, _joined(outcome.max_token_staleness.values())


def _joined(values: Any) -> str:
    return "/".join(dict.fromkeys("none" if value in (None, NO_LIMIT) else str(value) for value in values))


def cells(outcome: Outcome, *, narrow: bool = False) -> list[str]:
    """A row of the table; `narrow`: large numbers in thousands, millions and so on."""
    ages, number = outcome.token_staleness, short if narrow else "{:,}".format
    mean, p95, worst = mean_of(ages), quantile_of(ages, 0.95), max(ages, default=None)
    tokens = (outcome.ledger["trained"], outcome.ledger["masked_stale"], outcome.expired_tokens, outcome.wasted)
    return [
        *setting_name(outcome),
        *map(number, (*tokens, outcome.rerolled, outcome.discarded)),
        "-" if mean is None else f"{mean:.2f}",
        "-" if p95 is None else str(p95),
        "-" if worst is None else str(worst),
        number(outcome.waited),
    ]


def short(number: int) -> str:
    """A number in six characters."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 10 * size:
            return f"{number / size:.1f}{unit}"
    return f"{number:,}"


def text_table(outcomes: Sequence[Outcome], width: int | None = None) -> list[str]:
    """The table as lines of text, two of headings first; narrower if it would not fit in `width` columns."""
    for narrow in (False, True):
        rows = [list(line) for line in zip(*(heading[narrow] for heading in HEADINGS), strict=True)]
        rows += [cells(outcome, narrow=narrow) for outcome in outcomes]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        gap = " " if narrow else "  "
        lines = [gap.join(cell.rjust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
        if width is None or max(map(len, lines)) <= width:
            break
    return lines


def introduction(path: str, history: History, recorded: Outcome) -> list[str]:
    """What was read, and whether its own settings reproduce it."""
    lines = [
        f"{path}: {counted(history.rollouts, 'response')} in {counted(history.groups, 'group')}, "
        f"{counted(len(recorded.batches), 'batch', 'batches')} taken, order {history.header.order.value}"
    ]
    if history.legs:
        tokens = sum(history.leg_tokens.values())
        lines.append(
            f"{counted(history.legs, 'request')} to the engine brought {counted(tokens, 'token')}, "
            f"{counted(history.syncs, 'weight sync')}"
        )
    if history.lost:
        lines.append(f"{counted(history.lost, 'line')} left out when it was recorded: the disk was too slow")
    if history.skipped:
        lines.append(f"{counted(history.skipped, 'damaged line')} left out, the first: {history.damaged[0]}")
    if not history.accounts:
        lines.append("it has no account to compare with")
    elif recorded.differs:
        lines.append(f"its own settings do NOT reproduce it: {recorded.differs}")
    else:
        lines.append("its own settings reproduce the run's own counts")
    return lines


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What stands under the table."""
    lines = [
        "* as recorded. Wasted: masked as stale, or discarded. Staleness: of tokens in the loss, in trainer steps."
    ]
    if len(outcomes) > 1:
        lines += ["The other rows are what would have happened, assuming:", *(f"- {text}" for text in ASSUMPTIONS)]
    unfilled = [f"{'/'.join(setting_name(o))}: {o.unfilled:,}" for o in outcomes if o.unfilled]
    if unfilled:
        lines.append(f"Batches that waited to the end of the trace, by setting: {', '.join(unfilled)}.")
    return lines

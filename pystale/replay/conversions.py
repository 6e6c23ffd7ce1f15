"""Runs that were not traced: their rollouts as rows of a CSV file, and the CSV file as a history.

A row says that one version wrote so many tokens of a rollout. What rows do not say is assumed:

- A rollout's rows are in the order of its tokens. A negative model step marks tokens that no model wrote.
- A group is put whole, all its rollouts COMPLETED, for the largest ``put_step`` of its rows, in the order of the file.
- The trainer takes one batch at every step from the first ``put_step`` to the last, after the groups of that step, with
  the same number of groups each time; by default as many as came per step, rounded down. The oldest go first.
- Nothing expired in the run, and an expired group is discarded: re-rolls were not recorded.
"""

import csv
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from pystale._objects import ModelSteps, effective_mask
from pystale.policy import Order
from pystale.replay.history import History
from pystale.replay.whatif import NO_LIMIT
from pystale.staleness import StalenessRule, checked_int
from pystale.state import Status
from pystale.trace_lines import MOST_MEMBERS, MOST_TOKENS, Arrival, Header, MemberLine, Take, TraceError

__all__ = ["COLUMNS", "Row", "read_csv", "rows_of_states", "rows_of_verl_tags", "write_csv"]

COLUMNS = ("group", "rollout", "model_step", "tokens", "put_step")
TASK = "default"
STRIDE = 2_000
# More steps than this between the first row and the last are taken for a mistake.
MOST_STEPS = 10_000_000


class Row(NamedTuple):
    """Tokens of a rollout that one version wrote."""

    group: int | str
    rollout: int | str
    model_step: int
    tokens: int
    put_step: int


def rows_of_states(groups: Iterable[Iterable[Any]], put_step: int) -> Iterator[Row]:
    """Rows of groups of XTuner's rollout states, of :class:`~pystale.RolloutState`, or alike.

    Tokens out of the semantic mask are taken for tokens that no model wrote: they are not trained, and not counted
    as old.

    Parameters
    ----------
    groups : iterable of groups
        With ``response_model_steps``, before they are taken for training, which changes their masks. States have no
        ids of their own where ``group_id`` or ``rollout_id`` is None or missing: positions stand for them.
    put_step : int
        Trainer step they are put for.

    Raises
    ------
    ValueError
        For tokens without a model step.

    Examples
    --------
    >>> from pystale import RolloutState
    >>> state = RolloutState(group_id=7, rollout_id=70, response_ids=[1, 2, 3], response_model_steps=[4, 4, 5])
    >>> [tuple(row) for row in rows_of_states([[state]], put_step=6)]
    [(7, 70, 4, 2, 6), (7, 70, 5, 1, 6)]
    """
    for number, group in enumerate(groups):
        for position, state in enumerate(group):
            ids = [getattr(state, name, None) for name in ("group_id", "uid", "rollout_id")]
            group_id = next((i for i in (ids[0], ids[1], f"{put_step}.{number}") if i is not None), None)
            rollout = position if ids[2] is None else ids[2]
            steps: Any = state.response_model_steps
            if not steps and state.response_ids is not None and len(state.response_ids):
                raise ValueError(f"group {group_id!r}, member {position}: its tokens have no response_model_steps")
            runs = ModelSteps.from_list([] if steps is None else steps)
            if state.response_mask is not None and len(runs):
                runs = _model_tokens(runs, state.response_mask)
            for model_step, tokens in runs.runs() or [(0, 0)]:
                yield Row(_text_id(group_id), _text_id(rollout), model_step, tokens, put_step)


def _model_tokens(steps: ModelSteps, mask: Any) -> ModelSteps:
    """Steps with -1 where a mask is 0."""
    kept = ModelSteps.from_list(
        effective_mask(steps, train_step=1, token_stale_threshold=None, response_mask=mask)
    ).runs()
    merged, runs = ModelSteps(), iter(steps.runs())
    step, left = next(runs, (0, 0))
    for value, length in kept:
        while length:
            part = min(length, left)
            merged.append(step if value else -1, part)
            length, left = length - part, left - part
            if not left:
                step, left = next(runs, (0, length))
    return merged


def rows_of_verl_tags(tags: Mapping[str, Mapping[str, Any]], put_step: int) -> Iterator[Row]:
    """Rows of verl's trajectories, from their keys and tags (``KVBatchMeta.keys`` and ``.tags`` of a batch).

    The tags know the oldest and the newest version of a response, and no more: half of its tokens is taken to be of
    each. Prompts and padding are left out.

    Parameters
    ----------
    tags : mapping of str to mapping
        By key, ``{uid}_{session}_{index}``, with ``min_global_steps``, ``max_global_steps`` and ``response_len``.
    put_step : int
        ``global_steps`` of the trainer that samples them.

    Raises
    ------
    ValueError
        For a trajectory without versions or length.

    Examples
    --------
    >>> tags = {"a1": {"is_prompt": True}, "a1_0_0": {"min_global_steps": 3, "max_global_steps": 4, "response_len": 5}}
    >>> [tuple(row) for row in rows_of_verl_tags(tags, put_step=6)]
    [('a1', '0_0', 3, 2, 6), ('a1', '0_0', 4, 3, 6)]
    """
    for key, tag in tags.items():
        if tag.get("is_prompt") or tag.get("is_padding"):
            continue
        uid, _, rollout = key.partition("_")
        try:
            low, high, tokens = (
                checked_int(name, tag.get(name), at_least=0)
                for name in ("min_global_steps", "max_global_steps", "response_len")
            )
        except (TypeError, ValueError) as fault:
            raise ValueError(f"trajectory {key!r}: {fault}") from None
        older = 0 if low == high else tokens // 2
        if older:
            yield Row(uid, rollout, low, older, put_step)
        yield Row(uid, rollout, high, tokens - older, put_step)


def _text_id(value: Any) -> Any:
    return value if isinstance(value, str) else int(value)


def write_csv(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Append rows to a CSV file for ``pystale replay``; a new one gets the names of the columns first."""
    with open(path, "a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        if not file.tell():
            writer.writerow(COLUMNS)
        writer.writerows(rows)


def read_csv(
    path: str | os.PathLike[str],
    *,
    batch_groups: int | None = None,
    skip_damaged: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> History:
    """History of the rows in a CSV file; what they do not say is assumed as described above.

    Parameters
    ----------
    path : path
        With a line of column names; columns other than :data:`COLUMNS` are not looked at.
    batch_groups : int, optional
        Groups per batch.
    skip_damaged : bool, default False
        Leave out rows that cannot be read, and count them.
    progress : callable, optional
        ``progress(done, of)`` is called with bytes now and then.

    Raises
    ------
    OSError
        If the file cannot be read.
    TraceError
        If a column is missing, or a row cannot be right.
    """
    history = History(Header(StalenessRule(max_staleness=NO_LIMIT), -1, Order.STALEST_FIRST, "error", None))
    groups: dict[Any, dict[Any, list[Row]]] = {}
    with open(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        size = os.fstat(raw.fileno()).st_size
        for count, (number, row) in enumerate(_rows(os.fspath(path), file, history, skip_damaged)):
            rollouts = groups.setdefault(row.group, {})
            rollouts.setdefault(row.rollout, []).append(row)
            if len(rollouts) > MOST_MEMBERS:
                raise TraceError(f"line {number}: group {row.group!r} has more than {MOST_MEMBERS} rollouts")
            if progress is not None and not count % STRIDE:
                progress(raw.tell(), size)
    _fill(history, groups, batch_groups)
    return history


def _rows(path: str, file: TextIO, history: History, skip_damaged: bool) -> Iterator[tuple[int, Row]]:
    reader = csv.reader(file, strict=True)
    places: list[int] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
            if cells is None:
                break
            if places is None:
                if missing := [name for name in COLUMNS if name not in cells]:
                    raise TraceError(f"{path!r} has no column {', '.join(missing)}; {', '.join(COLUMNS)} are required")
                places = [cells.index(name) for name in COLUMNS]
            elif cells:
                yield number, _row(cells, places)
        except TraceError:
            raise
        except UnicodeDecodeError:
            raise TraceError(f"{path!r} is not text in UTF-8") from None
        except (ValueError, csv.Error) as fault:
            if not skip_damaged:
                raise TraceError(f"line {number}: {fault!s:.300}; --skip-damaged leaves such lines out") from None
            history.skip(f"line {number}: {fault!s:.300}")
    if places is None:
        raise TraceError(f"{path!r} is empty; a line with {', '.join(COLUMNS)} is required")


def _row(cells: list[str], places: list[int]) -> Row:
    if len(cells) <= max(places):
        raise ValueError(f"{len(cells)} cells, at least {max(places) + 1} are required")
    group, rollout, *numbers = (cells[place].strip() for place in places)
    model_step, tokens, put_step = map(_number, COLUMNS[2:], numbers, (-1, 0, 1))
    if model_step >= put_step:
        raise ValueError(
            f"model_step {model_step} is in the future of put_step {put_step}, whose newest weights are of step "
            f"{put_step - 1}"
        )
    if tokens > MOST_TOKENS:
        raise ValueError(f"tokens must be at most {MOST_TOKENS}, got {tokens}")
    return Row(group, rollout, model_step, tokens, put_step)


def _number(name: str, text: str, at_least: int) -> int:
    if not text.removeprefix("-").isdecimal() or len(text) > 19:
        raise ValueError(f"{name} must be an integer, got {text!r:.40}")
    return checked_int(name, int(text), at_least=at_least)


def _fill(history: History, groups: dict[Any, dict[Any, list[Row]]], batch_groups: int | None) -> None:
    by_step: dict[int, list[Arrival]] = {}
    for group, rollouts in groups.items():
        put_step = max(row.put_step for rows in rollouts.values() for row in rows)
        members = tuple(_member(rows) for rows in rollouts.values())
        by_step.setdefault(put_step, []).append(
            Arrival("put", TASK, group, members, put_step, False, (), False, None, 0)
        )
    if not by_step:
        return
    first, last = min(by_step), max(by_step)
    if last - first >= MOST_STEPS:
        raise TraceError(
            f"put_step goes from {first} to {last}; more than {MOST_STEPS:,} steps are taken for a mistake"
        )
    size = batch_groups or max(len(groups) // (last - first + 1), 1)
    number = 1
    for step in range(first, last + 1):
        for arrival in by_step.get(step, ()):
            number += 1
            history.add(number, arrival)
        history.add(number, Take({TASK: size}, step, Status.COMPLETED, (), known=False))


def _member(rows: list[Row]) -> MemberLine:
    runs = tuple((row.model_step, row.tokens) for row in rows if row.tokens)
    return MemberLine(Status.COMPLETED, sum(tokens for _, tokens in runs), runs or None, None)

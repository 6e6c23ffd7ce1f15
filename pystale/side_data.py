"""Data that comes along with tokens, one row each, and how the rows of several requests become those of a response."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from pystale.buffer import OnRelease
from pystale.pending import resolved

__all__ = ["SideData", "joined_rows"]

logger = logging.getLogger("pystale")

LoadRef = Callable[[Any], Awaitable[Any] | Any]
StoreRef = Callable[[Any], Awaitable[Any] | Any]


def joined_rows(kept: Any, added: Any, *, sent: int, generated: int, new: int) -> Any:
    """Rows of a response after one more request.

    The rows of a request cover the whole sequence, that is prompt and response, or the new tokens only. Whole-sequence
    rows may lack the last, which belongs to a token that was sampled but never fed to the model. Of those, only the
    rows past the ones already there are appended: the others were computed again under newer weights, and are not
    what the earlier tokens were sampled with. Rows of new tokens are appended. The two are told apart by their number.

    Parameters
    ----------
    kept : rows or None
        Rows up to this request: a list, a tuple or an array.
    added : rows or None
        Rows of this request.
    sent : int
        Tokens sent with the request: the prompt and the response until then.
    generated : int
        How many of them are of the response.
    new : int
        Tokens the request brought.

    Returns
    -------
    rows or None
        `kept` or `added` itself where the other has nothing to add, otherwise a new list or array.

    Raises
    ------
    ValueError
        If the number of rows is neither, or rows are missing before, or in, this request.
    TypeError
        If something has no rows.

    Notes
    -----
    The rule is XTuner's (``PartialRolloutHandler.postprocess``), which asserts whole-sequence rows; rows of new tokens
    are what other engines return.

    Examples
    --------
    A prompt of 2 tokens and 3 new ones give 4 rows; after 1 more token there are 5, of which the last is taken:

    >>> first = joined_rows(None, ["a", "b", "c", "d"], sent=2, generated=0, new=3)
    >>> joined_rows(first, ["A", "B", "C", "D", "E"], sent=5, generated=3, new=1)
    ['a', 'b', 'c', 'd', 'E']
    >>> joined_rows(first, ["E"], sent=5, generated=3, new=1)
    ['a', 'b', 'c', 'd', 'E']
    """
    if new == 0:
        return kept  # an aborted request may bring the rows of its prompt; nothing is known of them that was not before
    before = 0 if kept is None else _count("the rows of earlier requests", kept)
    if added is None:
        if before == 0:
            return kept
        raise ValueError(f"{new} new tokens came without rows, the {sent} tokens before them have {before}")
    rows = _count("the rows of a request", added)
    if rows in (sent + new, sent + new - 1):
        needed = {sent - (sent + new - rows)} | ({0} if generated == 0 else set())
        first = before
    elif rows == new:
        needed = {generated, sent - 1, sent}
        first = 0
    else:
        raise ValueError(
            f"{rows} rows for {new} new tokens after {sent}; allowed are {new} (new tokens only) and "
            f"{sent + new - 1} or {sent + new} (whole sequence)"
        )
    if before not in needed:
        raise ValueError(
            f"the {sent} tokens before the {new} new ones, {generated} of them generated, have {before} rows; "
            f"to append to them takes {' or '.join(map(str, sorted(needed)))}"
        )
    if before == 0:
        return added
    if isinstance(kept, (list, tuple)) and isinstance(added, (list, tuple)):
        return [*kept, *added[first:]]
    return np.concatenate((np.asarray(kept), np.asarray(added)[first:]))


def _count(what: str, rows: Any) -> int:
    if isinstance(rows, (str, bytes)):
        raise TypeError(f"{what} must be a list or an array, got {type(rows).__name__}")
    try:
        return len(rows)
    except TypeError:
        raise TypeError(
            f"{what} must be a list or an array, got {type(rows).__name__}; for references to rows give load_ref and "
            f"store_ref"
        ) from None


class SideData:
    """The side data of responses, given as rows or as references to rows, and the release of what is not needed.

    Parameters
    ----------
    load_ref, store_ref, on_release : callable, optional
        See :class:`~pystale.client.PartialRolloutClient`.
    """

    def __init__(self, load_ref: LoadRef | None, store_ref: StoreRef | None, on_release: OnRelease | None) -> None:
        given = {"load_ref": load_ref, "store_ref": store_ref, "on_release": on_release}
        for name, value in given.items():
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        if (load_ref is None) != (store_ref is None):
            raise ValueError("load_ref and store_ref belong together; give both or neither")
        self.load_ref = load_ref
        self.store_ref = store_ref
        self.on_release = on_release

    async def joined(self, kept: Any, added: Any, *, sent: int, generated: int, new: int) -> Any:
        """Rows, or a reference to them, of a response after one more request (see :func:`joined_rows`)."""
        if self.load_ref is None or self.store_ref is None:
            return joined_rows(kept, added, sent=sent, generated=generated, new=new)
        if not new or (kept is None and added is None):
            return kept
        if kept is None and not generated:
            return added  # the usual case, one request, loads nothing; its rows are checked once more are joined
        old, more = [None if ref is None else await resolved(self.load_ref(ref)) for ref in (kept, added)]
        return await resolved(self.store_ref(joined_rows(old, more, sent=sent, generated=generated, new=new)))

    async def release(self, state: Any, *fields: dict[str, Any]) -> None:
        """Tell ``on_release`` of old values of fields that `state` holds no longer. What it raises is logged."""
        released = [(state, cleared) for cleared in fields if cleared]
        if not released or self.on_release is None:
            return
        try:
            result = self.on_release(released)
            if inspect.isawaitable(result):
                await result
        except Exception:
            logger.exception("on_release failed on %d states", len(released))

    async def release_all_but(self, held: Any, state: Any, *values: Any) -> None:
        """Release those of `values` that are not `held`."""
        old = [value for value in values if value is not None and value is not held]
        await self.release(state, *({"routed_experts": value} for value in old))

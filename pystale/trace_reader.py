"""Reading a trace line by line: every line is right, or refused with its number."""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from pystale.columns import Malformed
from pystale.strict_json import parse_json
from pystale.trace import LINE_BYTES, SCHEMA
from pystale.trace_lines import Event, Header, TraceError, event_of, header_of

__all__ = ["Line", "TraceReader"]

GZIP = b"\x1f\x8b"  # how compressed files begin


class Line(NamedTuple):
    """A line of a trace."""

    number: int
    at: float | None  # seconds since the start
    event: Event


class TraceReader:
    """Reads the lines of a trace; a context manager and an iterator over :class:`Line`.

    Parameters
    ----------
    path : path
        The file.
    skip_damaged : bool, default False
        Leave out lines that cannot be read, and count them, instead of ending with the first.

    Attributes
    ----------
    header : Header
    size : int
        Bytes of the file.
    position : int
        Bytes read.
    damaged : list of str
        What was wrong with lines that were left out; of the first hundred.
    skipped : int
        How many were.

    Raises
    ------
    OSError
        If the file cannot be read.
    TraceError
        If it is not a trace, or one of a schema that is not known.
    """

    def __init__(self, path: str | os.PathLike[str], *, skip_damaged: bool = False) -> None:
        self._skip = skip_damaged
        self.damaged: list[str] = []
        self.skipped = 0
        self.position = 0
        self._number = 0
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 (closed by __exit__)
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self.header = self._read_header(os.fspath(path))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TraceReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read_header(self, path: str) -> Header:
        text = self._file.readline(LINE_BYTES + 1)
        self.position, self._number = len(text), 1
        try:
            content = parse_json(text)
            known = isinstance(content, dict) and "pystale_trace" in content
        except Malformed:
            known = False
        if not known:
            why = "unpack it first" if text.startswith(GZIP) else "its first line has no pystale_trace"
            raise TraceError(f"{path!r} is not a trace: {why}")
        if content["pystale_trace"] != SCHEMA or type(content["pystale_trace"]) is not int:
            raise TraceError(
                f"{path!r} is a trace of schema {content['pystale_trace']!r:.40}; "
                f"this version of pystale reads {SCHEMA}"
            )
        try:
            return header_of(content)
        except (TypeError, ValueError) as fault:
            raise TraceError(f"{path!r}, line 1: {fault!s:.300}") from None

    def __iter__(self) -> Iterator[Line]:
        while text := self._file.readline(LINE_BYTES + 1):
            self.position += len(text)
            self._number += 1
            try:
                yield self._line(text)
            except (TypeError, ValueError) as fault:
                self.refuse(self._number, str(fault))

    def refuse(self, number: int, why: str) -> None:
        """Raise for a line that makes no sense, or count it where these are left out."""
        message = f"line {number}: {why:.300}"
        if not self._skip:
            raise TraceError(f"{message}; --skip-damaged leaves such lines out") from None
        self.skipped += 1
        if len(self.damaged) < 100:
            self.damaged.append(message)

    def _line(self, text: bytes) -> Line:
        if not text.endswith(b"\n"):
            if len(text) <= LINE_BYTES:
                raise ValueError("it is cut off; the run ended, or the copy did, in the middle of it")
            while text and not text.endswith(b"\n"):
                text = self._file.readline(LINE_BYTES)
                self.position += len(text)
            raise ValueError(f"it is longer than {LINE_BYTES >> 20} MiB")
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"an object is required, got {content!r:.40}")
        at = content.pop("at", None)
        if at is not None and (isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e12):
            raise ValueError(f"at must be seconds since the start, got {at!r:.40}")
        return Line(self._number, at, event_of(content))

"""What a fuzzer feeds with bytes: every target takes any bytes, and raises where pystale is wrong.

A new target is a function with ``@target``, and a folder of its name under ``fixtures/fuzz`` with an input or two.
``fuzz.py`` runs one under a fuzzer, ``test_fuzz_corpus.py`` the inputs that are kept.
"""

import contextlib
import hashlib
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rollouts import balance

from pystale import (
    CheckpointError,
    ModelSteps,
    ReplayBuffer,
    StalenessRule,
    _objects,
    _reference,
    effective_mask,
    has_trainable_token,
    refresh_batch,
    seq_staleness,
)
from pystale.checkpoint_reader import read_checkpoint
from pystale.replay.engine import replay
from pystale.replay.history import read_history
from pystale.replay.whatif import WhatIf
from pystale.trace_lines import TraceError

__all__ = ["CORPUS", "TARGETS"]

Target = Callable[[bytes], None]
MOST_OPERATIONS = 30  # on one ModelSteps: more inputs find more than longer ones
FIXTURES = Path(__file__).parent / "fixtures"
CORPUS = FIXTURES / "fuzz"
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


class Source:
    """Reads values from bytes; zeros when they have ended."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def integer(self, size: int = 1, signed: bool = False) -> int:
        piece = self.data[self.at : self.at + size].ljust(size, b"\0")
        self.at += size
        return int.from_bytes(piece, "little", signed=signed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.integer() % len(choices)]

    def step(self) -> int:
        """Mostly small, sometimes any int64."""
        small = self.integer(signed=True)
        return small if small > -120 else self.integer(8, signed=True)

    def steps(self) -> list[int]:
        values: list[int] = []
        for _ in range(self.integer() % 8):
            size = self.integer()
            length = size % 4 + 1 if size < 160 else size % 67 if size < 252 else 1025  # past a block of the kernels
            values += [self.step()] * length
        return values


# The kernels, in every form of their arguments, against their reference.


def integer_array(source: Source, values: list[int]) -> Any:
    low, high = min(values, default=0), max(values, default=0)
    codes = [code for code in "bhiqBHIQ" if np.iinfo(code).min <= low and high <= np.iinfo(code).max]
    plain = np.array(values, np.dtype(source.pick(codes)).newbyteorder(source.pick("<>")))
    match source.integer() % 4:
        case 0:
            return plain
        case 1:
            return plain[::-1].copy()[::-1]
        case 2:
            table = np.ones((len(values), 3), plain.dtype)
            table[:, 1] = plain
            return table[:, 1]
        case _:
            records = np.zeros(len(values), [("pad", "u1"), ("value", plain.dtype)])
            records["value"] = plain
            return records["value"]


def in_some_form(source: Source, values: list[int]) -> Any:
    forms: tuple[Callable[[], Any], ...] = (
        lambda: list(values),
        lambda: tuple(values),
        lambda: [np.int64(value) for value in values],
        lambda: ModelSteps.from_list(values),
        lambda: integer_array(source, values),
        lambda: integer_array(source, values),
    )
    return source.pick(forms)()


def same(ours: Any, expected: Any) -> None:
    if not np.array_equal(ours, expected):
        raise AssertionError(f"{ours!r} is not {expected!r}")


@target
def kernels(data: bytes) -> None:
    source = Source(data)
    train_step = max(1, source.pick((source.integer(), source.integer(8) >> 1)))
    threshold = source.pick((None, source.integer(), source.integer(8)))
    limit = source.integer()
    values = source.steps()
    mask = [source.pick((1, 1, 0, -3, 300)) for _ in range(7)] * (len(values) // 7 + 1)
    plain_mask = source.pick((None, mask[: len(values)]))
    steps = in_some_form(source, values)
    response_mask = None if plain_mask is None else in_some_form(source, plain_mask)
    rule = {"train_step": train_step, "token_stale_threshold": threshold}
    expected = _reference.effective_mask(values, response_mask=plain_mask, **rule)
    same(effective_mask(steps, response_mask=response_mask, **rule), expected)
    out: Any = np.full(2 * len(values) + 1, 7, source.pick((np.uint8, np.bool_)))
    out = out[source.integer() % 2 :: 2][: len(values)]
    effective_mask(steps, response_mask=response_mask, out=out, **rule)
    same(out, expected)
    same(has_trainable_token(steps, response_mask=response_mask, **rule), bool(expected.any()))
    same(seq_staleness(steps, train_step=train_step), _reference.seq_staleness(values, train_step=train_step))
    same(_objects.summarise(steps, response_mask), _reference.summarise(values, plain_mask))
    same(_objects.trainable_mask(steps, response_mask, train_step, threshold)[1], int(expected.sum()))
    cuts = sorted(source.integer(2) % (len(values) + 1) for _ in range(source.integer() % 5))
    offsets = [0, *cuts, len(values)]
    answers = refresh_batch(
        steps, in_some_form(source, offsets), stale_threshold=limit, response_mask=response_mask, **rule
    )
    reference = _reference.refresh_batch(values, offsets, stale_threshold=limit, response_mask=plain_mask, **rule)
    for ours, theirs in zip(answers, reference, strict=True):
        same(ours, theirs)


@target
def model_steps(data: bytes) -> None:
    """Operations on ModelSteps and on a list, one after the other."""
    source, steps, plain = Source(data), ModelSteps(), list[int]()
    for _ in range(MOST_OPERATIONS):
        if not source or len(plain) >= 3_000:
            break
        match source.integer() % 8:
            case 0:
                step, count = source.step(), source.integer() % 5
                steps.append(step, count)
                plain += [step] * count
            case 1:
                more = source.steps()
                steps.extend(in_some_form(source, more))
                plain += more
            case 2:
                steps.extend(steps)
                plain += plain
            case 3:
                bounds = [source.pick((None, source.integer(2, signed=True))) for _ in range(3)]
                piece = slice(bounds[0], bounds[1], bounds[2] or None)
                steps, plain = steps[piece], plain[piece]
            case 4:
                steps = ModelSteps.from_runs(steps.runs())
            case 5 if plain:
                at = source.integer(2, signed=True) % len(plain)
                same((steps[at], steps[at - len(plain)]), (plain[at], plain[at]))
                same(steps.index(plain[at]), plain.index(plain[at]))
            case 6:
                step = source.step()
                same((steps.count(step), step in steps), (plain.count(step), step in plain))
            case _:
                same(list(reversed(steps)), plain[::-1])
        same(steps.runs(), _reference.runs(plain))
        if len(steps) != len(plain) or steps != plain:
            raise AssertionError(f"{steps!r} is not {plain!r}")


# Readers of files: right bytes are read, others refused with the one error they are documented to raise.


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp())
    try:
        yield path
    finally:
        shutil.rmtree(path)


def seal(document: bytes) -> bytes:
    """The document with the checksum that it should have where it has one of zeros."""
    zeros = b"0" * 64
    return document.replace(zeros, hashlib.sha256(document).hexdigest().encode())


@target
def checkpoint(data: bytes) -> None:
    """The first byte says which file of a checkpoint the others are; all checksums are right."""
    which, content = data[:1], data[1:]
    with folder() as directory:
        for path in (FIXTURES / "checkpoint_v2").iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
        path = directory / "checkpoint.json"
        document = json.loads(path.read_bytes())
        (shard,) = document["shards"]
        file = {b"l": shard["lines"], b"a": shard["arrays"][0]}.get(which)
        if file is not None:
            (directory / file["name"]).write_bytes(content)
            file |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            content = json.dumps({**document, "sha256": "0" * 64}).encode()
        path.write_bytes(seal(content))
        with contextlib.suppress(CheckpointError):
            read_checkpoint(directory)


def frame(seed: int, offset: int, body: bytes) -> bytes:
    checksum = zlib.crc32(body, zlib.crc32(struct.pack("<IQQ", seed, offset, len(body))))
    return b"\x89PSF" + struct.pack("<QI", len(body), checksum) + body


HEADER = (
    b'{"format":"pystale-journal","schema_version":1,"library_version":"0","journal":"0000000000000000",'
    b'"segment":0,"after":null,"order":"stalest_first"}'
)
PREFACE = b"pystale-journal\n"


@target
def journal(data: bytes) -> None:
    """The first byte says what the others are: a whole segment, its header, or bodies of frames, between tabs."""
    which, content = data[:1], data[1:]
    if which == b"s":
        segment = content
    else:
        header, bodies = (content, []) if which == b"h" else (HEADER, content.split(b"\t"))
        segment = PREFACE + frame(0, len(PREFACE), header)
        seed = struct.unpack_from("<I", segment, len(PREFACE) + 12)[0]
        for body in bodies:
            segment += frame(seed, len(segment), body)
    with folder() as directory:
        (directory / "segment-0000000000.journal").write_bytes(segment)
        buffer = ReplayBuffer(StalenessRule(3, 1), tail_batch_trigger_size=0, journal=directory)
        try:
            buffer.sync.resume(None)
        except ValueError:  # a CheckpointError, or a journal of another buffer
            if len(buffer) or buffer.ledger()["produced"]:
                raise AssertionError("a journal that was refused was loaded in part") from None
        finally:
            buffer.sync.close()
        produced, accounted_for = balance(buffer.ledger())
        same(produced, accounted_for)


@target
def trace(data: bytes) -> None:
    """A whole trace. What can be read of it is replayed, under its own limits and others."""
    with folder() as directory:
        path = directory / "run.jsonl"
        path.write_bytes(data)
        try:
            history = read_history(path, skip_damaged=True)
        except TraceError:
            return
        recorded, reference = replay(history)
        for outcome in (recorded, replay(history, WhatIf(0, 0), reference)[0]):
            produced, accounted_for = balance(outcome.ledger)
            same(produced, accounted_for)

"""Traces written by hand, for the tests."""

import json

HEADER = {
    "pystale_trace": 1,
    "created": "2026-01-01T00:00:00+00:00",
    "order": "stalest_first",
    "missing_version": "error",
    "max_rerolls": None,
    "min_fresh": None,
    "tasks": [
        {
            "task": None,
            "max_staleness": 1,
            "max_token_staleness": None,
            "sync_weights_interval": 1,
            "spare_aborted": False,
            "tail_batch_trigger_size": 0,
        }
    ],
}
# Four groups, three batches of one group. At step 3 the second member of "c" is too old, and generated anew.
LINES = [
    {"op": "sync", "at": 0.0, "model_step": 0},
    {
        "op": "put",
        "at": 0.1,
        "task": "t",
        "group": "a",
        "train_step": 1,
        "members": [{"steps": [0, 10]}, {"steps": [0, 20]}],
    },
    {"op": "put", "at": 0.2, "task": "t", "group": "b", "train_step": 1, "members": [[0, 5]]},
    {"op": "take", "at": 0.3, "sizes": {"t": 1}, "train_step": 1, "groups": {"t": ["a"]}},
    {"op": "leg", "at": 0.4, "leg": ["c", 0, 1, 8, 0.2]},
    {
        "op": "put",
        "at": 0.5,
        "task": "t",
        "group": "c",
        "train_step": 2,
        "members": [{"steps": [1, 8]}, {"steps": [0, 2, 1, 6]}],
    },
    {"op": "take", "at": 0.6, "sizes": {"t": 1}, "train_step": 2, "groups": {"t": ["b"]}},
    {"op": "refresh", "at": 0.7, "train_step": 3},
    {"op": "get", "at": 0.8, "pool": "EXPIRED", "groups": {"t": ["c"]}},
    {"op": "put", "at": 0.9, "task": "t", "group": "d", "train_step": 3, "members": [{"steps": [2, 4]}]},
    {
        "op": "put",
        "at": 1.0,
        "task": "t",
        "group": "c",
        "back": True,
        "train_step": 3,
        "members": [{"steps": [1, 8]}, {"steps": [2, 9]}],
    },
    {"op": "take", "at": 1.1, "sizes": {"t": 1}, "train_step": 3, "groups": {"t": ["c"]}},
    {
        "op": "ledger",
        "at": 1.2,
        "produced": 64,
        "trained": 52,
        "masked_stale": 0,
        "masked_semantic": 0,
        "discarded": {"expired": 8},
        "stored": 4,
        "in_flight": 0,
        "groups": {"trained": 3, "expired": 1, "rerolled": 1, "discarded": 0},
    },
]


def header(**task):
    """The header, with other settings of the one task."""
    return {**HEADER, "tasks": [{**HEADER["tasks"][0], **task}]}


def written(path, lines=LINES, head=HEADER):
    """A trace file of these lines; each may be an object, or the bytes of a line without its end."""
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in [head, *lines]))
    return path


def line(op, **changed):
    """The first line of this kind, with fields changed; None takes a field away."""
    found = {**next(x for x in LINES if x["op"] == op), **changed}
    return {name: value for name, value in found.items() if value is not None}

"""A checkpoint directory holds the new checkpoint or the previous one, whole, or is refused by name."""

import errno
import fcntl
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from pystale import ModelSteps, checkpoint, checkpoint_reader
from pystale.checkpoint import CheckpointError, CheckpointWriter
from pystale.checkpoint_reader import read_checkpoint
from pystale.collector import collector_paused
from pystale.payload import encode_group
from pystale.state import RolloutState, Status

Groups = list[tuple[dict[str, Any], list[RolloutState]]]

FIXTURE = Path(__file__).parent / "fixtures" / "checkpoint_v1"
DOCUMENT = {"train_step": 7, "order": "stalest_first", "tasks": {"math": (2, None)}}


def fixture_groups() -> Groups:
    """What the committed checkpoint of schema version 1 holds: every kind of value once."""
    first = RolloutState(
        rollout_id=1, group_id=3, task_name="math", message=[{"role": "user", "content": "2 + 2?"}], prompt_ids=[5, 6],
        prompt_model_step=4, tokens=[5, 6, 70_000], sample_params={"temperature": 0.7, "stop": None}, response="four",
        response_ids=[70_000], response_mask=[True], response_model_steps=ModelSteps.from_list([4]), logprobs=[-0.25],
        finish_reason="stop", reward=1.0, status=Status.COMPLETED, seq_staleness=2, rerolls=1,
    )  # fmt: skip
    second = RolloutState(
        rollout_id=2, group_id=3, task_name="math", message=[{"role": "user", "content": "2 + 2?"}], prompt_ids=[5, 6],
        prompt_model_step=4, tokens=np.array([5, 6, 9, 10], np.int32), response_ids=np.array([9, 10], ">i4"),
        response_mask=np.array([1, 0], np.uint8), response_model_steps=np.array([4, 5]), logprobs=[float("nan"), -0.0],
        routed_experts=np.arange(8, dtype=np.int16).reshape(2, 2, 2), tool_calls=[("add", (2, 2))],
        reward={"score": np.float32(0.5), "huge": 2**100}, status=Status.ABORTED, session_id="s-1",
        mm_info={"image": b"\x89PNG", 3: np.array(2.5)}, position_ids=np.array([[0, 1], [0, 2]]),
        extra_fields={"$odd": [float("inf"), {"deep": ()}], "ids": list(range(20))},
    )  # fmt: skip
    third = RolloutState(group_id="g", status=Status.EXPIRED, error_msg="späť", input_ids=(1, 2), labels=[-100, 1])
    return [
        ({"arrival": 0, "key": (4, 0)}, [first, second]),
        ({"arrival": 1, "at": np.int64(9)}, [third, RolloutState(group_id="g")]),
    ]


def group(number: int, size: int = 3) -> tuple[dict[str, Any], list[RolloutState]]:
    state = RolloutState(rollout_id=number, response_ids=list(range(size)), tokens=np.full(size, number), response="x")
    return {"arrival": number}, [state, RolloutState(rollout_id=-number, logprobs=[0.5] * size)]


def write(directory: Path, groups: Groups, document: dict[str, Any] | None = None) -> None:
    with CheckpointWriter(directory) as writer:
        for header, states in groups:
            writer.add(header, states)
        writer.commit(DOCUMENT if document is None else document)


def content(groups: Groups) -> list[Any]:
    """Something that is equal only for groups that are the same in every type and bit."""
    encoded = [encode_group(header, states) for header, states in groups]
    return [(one.line, one.entries) for one in encoded]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def listed(directory: Path) -> set[str]:
    """The document and the files it lists."""
    shards = json.loads((directory / "checkpoint.json").read_bytes())["shards"]
    return {"checkpoint.json"} | {file["name"] for shard in shards for file in (shard["lines"], *shard["arrays"])}


def seal(document: dict[str, Any]) -> bytes:
    """A document with a checksum that is right."""
    document["sha256"] = "0" * 64
    text = json.dumps(document)
    return text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()).encode()


def forge(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the document of a checkpoint so that its checksums are right."""
    path = directory / "checkpoint.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(seal(document))


def forge_file(directory: Path, suffix: str, change: Callable[[bytes], bytes]) -> None:
    """Change the first data file with this suffix so that all checksums are right."""

    def relist(document: dict[str, Any]) -> None:
        shard = document["shards"][0]
        file = shard["lines"] if suffix == ".jsonl" else shard["arrays"][0]
        data = change((directory / file["name"]).read_bytes())
        (directory / file["name"]).write_bytes(data)
        file["size"], file["sha256"] = len(data), hashlib.sha256(data).hexdigest()

    forge(directory, relist)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "saved"
    write(directory, fixture_groups())
    return directory


def test_what_was_written_is_read(saved: Path) -> None:
    document, groups = read_checkpoint(saved)
    assert document == DOCUMENT
    assert content(groups) == content(fixture_groups())


def test_an_empty_checkpoint_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", [], {})
    assert read_checkpoint(str(tmp_path / "a" / "b")) == ({}, [])


def test_groups_may_be_encoded_before_they_are_added(tmp_path: Path) -> None:
    header, states = group(5)
    encoded = encode_group(header, states)
    states[0].response_ids.append(99)  # type: ignore[union-attr]
    with CheckpointWriter(tmp_path) as writer:
        writer.add_encoded(encoded)
        writer.commit({})
    assert content(read_checkpoint(tmp_path)[1]) == content([group(5)])


def test_groups_keep_their_order_over_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 7)
    groups = [group(i, i % 5) for i in range(40)]
    write(tmp_path, groups)
    assert len(listed(tmp_path)) == 1 + 2 * 6
    assert content(read_checkpoint(tmp_path)[1]) == content(groups)


@pytest.mark.parametrize("size", [1, 8, 100, 1000])
def test_arrays_larger_than_a_file_are_spread_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", size)
    groups = [group(i, 50) for i in range(4)]
    groups[1][1][0].routed_experts = np.arange(600, dtype=np.int16).reshape(100, 3, 2)
    groups[1][1][0].response_model_steps = ModelSteps.from_list([1, 2, 3] * 40)
    write(tmp_path, groups)
    assert all(len(data) < size + 2000 for name, data in files(tmp_path).items() if name.startswith("arrays"))
    assert content(read_checkpoint(tmp_path)[1]) == content(groups)


def test_the_committed_checkpoint_of_schema_version_1_is_read() -> None:
    document, groups = read_checkpoint(FIXTURE)
    assert document == DOCUMENT
    assert content(groups) == content(fixture_groups())


def test_the_format_is_readable_with_json_and_safetensors_alone() -> None:
    document = json.loads((FIXTURE / "checkpoint.json").read_text("ascii"))
    assert (document["format"], document["schema_version"], document["groups"]) == ("pystale-checkpoint", 1, 2)
    (shard,) = document["shards"]
    (arrays,) = shard["arrays"]
    tensors = load((FIXTURE / arrays["name"]).read_bytes())
    first, second = map(json.loads, (FIXTURE / shard["lines"]["name"]).read_text("ascii").splitlines())
    assert first["header"] == {"arrival": 0, "key": {"$tuple": [4, 0]}}
    assert first["fields"]["status"] == ["COMPLETED", "ABORTED"]
    assert first["fields"]["prompt_ids"] == "ints"
    assert first["fields"]["task_name"] == {"all": "math"}
    assert tensors["prompt_ids:ints"].tolist() == [5, 6, 5, 6]
    assert tensors["prompt_ids:ints:shapes"].tolist() == [[2], [2]]
    assert first["fields"]["response_model_steps"] == [{"$column": "runs"}, {"$column": "array.<i8.1"}]
    assert tensors["response_model_steps:runs"].tolist() == [[4, 1]]
    assert tensors["routed_experts:array.<i2.3:shapes"].tolist() == [[2, 2, 2]]
    assert second["fields"]["group_id"] == {"all": "g"}


def test_saving_again_replaces_the_checkpoint_and_its_files(saved: Path) -> None:
    before = set(files(saved))
    write(saved, [group(1)], {"n": 2})
    assert read_checkpoint(saved)[0] == {"n": 2}
    assert set(files(saved)) == listed(saved)
    assert before & set(files(saved)) == {"checkpoint.json"}


def test_nothing_changes_before_commit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 1)
    before = files(saved)
    with CheckpointWriter(saved) as writer:
        writer.add(*group(1))
        assert len(files(saved)) > len(before)
        assert content(read_checkpoint(saved)[1]) == content(fixture_groups())
    assert files(saved) == before


def test_a_refused_value_changes_nothing(saved: Path, tmp_path: Path) -> None:
    before = files(saved)
    for directory in (saved, tmp_path / "new"):
        with pytest.raises(TypeError, match=r"extra_fields\['x'\] of rollout_id 4 is a set"):
            write(directory, [group(1), ({}, [RolloutState(rollout_id=4, extra_fields={"x": {1}})])])
        with pytest.raises(TypeError, match=r"document\['x'\] is a set"):
            write(directory, [group(1)], {"x": {1}})
    assert files(saved) == before
    assert not (tmp_path / "new").exists()


def test_a_writer_goes_on_after_a_refused_value(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path) as writer:
        writer.add(*group(1))
        with pytest.raises(TypeError):
            writer.add({}, [RolloutState(message={1})])
        with pytest.raises(TypeError):
            writer.commit({"x": {1}})
        writer.add(*group(2))
        writer.commit({})
    assert content(read_checkpoint(tmp_path)[1]) == content([group(1), group(2)])


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("nth", range(8))
def test_the_previous_checkpoint_survives_a_failed_write(
    saved: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 1)
    before = files(saved)
    genuine = getattr(os, call)
    calls = iter(range(100))

    def fail(*args: Any) -> Any:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return genuine(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        try:
            write(saved, [group(1), group(2)], {"n": 2})
        except OSError:
            assert next(calls) > nth
    document, groups = read_checkpoint(saved)
    if document == DOCUMENT:
        assert files(saved) == before
    else:
        assert content(groups) == content([group(1), group(2)])
    write(saved, [group(3)], {"n": 3})
    assert set(files(saved)) == listed(saved)


def test_a_writer_that_failed_refuses_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 1)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    writer = CheckpointWriter(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            writer.add(*group(1))
    for refused in (lambda: writer.add(*group(2)), lambda: writer.commit({})):
        with pytest.raises(ValueError, match="this writer is broken"):
            refused()
    writer.abort()
    writer.abort()
    assert files(tmp_path) == {}


def test_a_writer_is_used_once(saved: Path) -> None:
    writer = CheckpointWriter(saved)
    writer.commit({"n": 2})
    writer.abort()
    with pytest.raises(ValueError, match="this writer is committed; a checkpoint needs a new CheckpointWriter"):
        writer.commit({})
    assert read_checkpoint(saved)[0] == {"n": 2}


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="this is a file"):
        CheckpointWriter(tmp_path / "file")


def test_a_foreign_document_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"model": "mine"}')
    with pytest.raises(FileExistsError, match="is not a checkpoint of pystale"):
        CheckpointWriter(tmp_path)
    assert files(tmp_path) == {"checkpoint.json": b'{"model": "mine"}'}


def test_foreign_files_stay(tmp_path: Path) -> None:
    names = ["notes.txt", "arrays-1.safetensors", "groups-x-00000.jsonl", "checkpoint.tmp", "writing.lock"]
    for name in names:
        (tmp_path / name).write_text("mine")
    write(tmp_path, [group(1)])
    write(tmp_path, [group(2)])
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "mine")


def test_files_of_dead_writers_are_deleted_by_the_next_commit(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    for name in (f"writing-{token}.lock", f"groups-{token}-00000.jsonl", f"arrays-{token}-00000.safetensors",
                 f"checkpoint-{token}.tmp", "arrays-fedcba9876543210-00003.safetensors"):  # fmt: skip
        (tmp_path / name).write_text("dead")
    write(tmp_path, [group(1)])
    assert set(files(tmp_path)) == listed(tmp_path)


def test_the_last_of_two_writers_to_commit_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 1)
    with CheckpointWriter(tmp_path) as one, CheckpointWriter(tmp_path) as two:
        one.add(*group(1))
        two.add(*group(2))
        two.commit({"n": 2})
        assert read_checkpoint(tmp_path)[0] == {"n": 2}
        one.add(*group(3))
        one.commit({"n": 1})
    document, groups = read_checkpoint(tmp_path)
    assert document == {"n": 1}
    assert content(groups) == content([group(1), group(3)])
    assert set(files(tmp_path)) == listed(tmp_path)


@pytest.mark.threads
def test_many_writers_at_once_leave_one_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_GROUPS", 2)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                write(tmp_path, [group(number) for _ in range(5)], {"n": number})
                read_checkpoint(tmp_path)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    document, groups = read_checkpoint(tmp_path)
    assert content(groups) == content([group(document["n"])] * 5)
    write(tmp_path, [])
    assert set(files(tmp_path)) == {"checkpoint.json"}


def test_without_locks_only_the_replaced_checkpoint_is_deleted(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (saved / "arrays-0123456789abcdef-00000.safetensors").write_text("of somebody")
    write(saved, [group(1)], {"n": 2})
    assert read_checkpoint(saved)[0] == {"n": 2}
    assert set(files(saved)) == listed(saved) | {"arrays-0123456789abcdef-00000.safetensors"}


def test_a_checkpoint_replaced_while_it_is_read_is_read_anew(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = checkpoint_reader._load_shard

    def replace_first(directory: Path, shard: dict[str, Any], load_ref: Any) -> Any:
        monkeypatch.setattr(checkpoint_reader, "_load_shard", genuine)
        write(saved, [group(1)], {"n": 2})
        return genuine(directory, shard, load_ref)

    monkeypatch.setattr(checkpoint_reader, "_load_shard", replace_first)
    assert read_checkpoint(saved)[0] == {"n": 2}


SAVER = """
import sys
from pystale import checkpoint
from pystale.checkpoint import CheckpointWriter
from pystale.state import RolloutState

checkpoint.SHARD_GROUPS = 5
generation = int(sys.argv[2])
while True:
    generation += 1
    with CheckpointWriter(sys.argv[1]) as writer:
        for number in range(23):
            writer.add({"generation": generation}, [RolloutState(rollout_id=number, response_ids=[generation] * 9)])
        writer.commit({"generation": generation})
    print(generation, flush=True)
"""


@pytest.mark.whole_run
def test_a_checkpoint_survives_kill_9_at_any_moment(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    generation = 0
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", textwrap.dedent(SAVER), str(tmp_path),
             str(generation)], stdout=subprocess.PIPE, text=True)  # fmt: skip
        assert process.stdout is not None
        with process.stdout as out:
            reported = int(out.readline())
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            reported = max([reported, *map(int, out.read().split())])
        process.wait()
        document, groups = read_checkpoint(tmp_path)
        # The commit may have succeeded before it was reported.
        assert document["generation"] in (reported, reported + 1)
        generation = document["generation"]
        assert [header for header, _ in groups] == [{"generation": generation}] * 23
        assert [states[0].rollout_id for _, states in groups] == list(range(23))
        assert all(states[0].response_ids == [generation] * 9 for _, states in groups)
    write(tmp_path, [])
    assert set(files(tmp_path)) == {"checkpoint.json"}


def test_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match=r"checkpoint\.json: is missing"):
            read_checkpoint(directory)
    assert not (tmp_path / "absent").exists()


def test_what_is_not_a_regular_file_is_an_error(saved: Path) -> None:
    name = next(name for name in files(saved) if name.startswith("arrays"))
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(CheckpointError, match=f"{name}: is not a regular file"):
        read_checkpoint(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(saved)


def test_every_missing_file_is_named(saved: Path) -> None:
    for name, data in files(saved).items():
        (saved / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: is missing"):
            read_checkpoint(saved)
        (saved / name).write_bytes(data)


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    rng = random.Random(1)
    for name, data in files(saved).items():
        for at in sorted({0, len(data) - 1, *rng.sample(range(len(data)), 80)}):
            damaged = bytearray(data)
            damaged[at] ^= 1 << rng.randrange(8)
            (saved / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(saved)
        (saved / name).write_bytes(data)
    read_checkpoint(saved)


def test_every_change_of_length_is_noticed(saved: Path) -> None:
    rng = random.Random(2)
    for name, data in files(saved).items():
        for length in sorted({0, 1, len(data) - 1, *rng.sample(range(len(data)), 40)}):
            (saved / name).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=name):
                read_checkpoint(saved)
        (saved / name).write_bytes(data + b" ")
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(saved)
        (saved / name).write_bytes(data)


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return apply


FILE = ("shards", 0, "lines")


@pytest.mark.parametrize(
    ("forgery", "said"),
    [
        (change("format", to="other"), "is not a checkpoint of pystale"),
        (change("schema_version", to=3), "has schema version 3, this pystale reads up to 2"),
        (change("schema_version", to=2**70), "has schema version"),
        (change("schema_version", to=0), "no valid schema_version: 0"),
        (change("schema_version", to=True), "no valid schema_version: True"),
        (change("schema_version", to="1"), "no valid schema_version: '1'"),
        (change("library_version", to=1), "library_version"),
        (change("extra", to=1), "missing or unknown keys: extra"),
        (lambda document: document.pop("groups"), "missing or unknown keys: groups"),
        (change("groups", to=3), "says 3 groups, its shards hold 2"),
        (change("groups", to="2"), "groups or shards of a wrong type"),
        (change("shards", to={}), "groups or shards of a wrong type"),
        (change("shards", 0, to=[]), "a shard that is not an object"),
        (change("shards", 0, "arrays", to={}), "a shard that is not an object"),
        (change("shards", 0, "groups", to=True), "a shard of True groups"),
        (change("shards", 0, "groups", to=10**30), "does not hold 1000000000000000000000000000000 lines"),
        (change("shards", 0, "groups", to=1), "does not hold 1 lines"),
        (change("shards", 0, "arrays", to=[]), "names a column"),
        (change(*FILE, to="x"), "a file entry that is not an object"),
        (change(*FILE, "name", to=3), "names a file 3"),
        (change(*FILE, "name", to="../groups-0123456789abcdef-00000.jsonl"), "names a file '../groups"),
        (change(*FILE, "name", to="/etc/passwd"), "names a file '/etc/passwd'"),
        (change(*FILE, "name", to="groups-0123456789abcdef-00000.jsonl\n"), "names a file"),
        (change(*FILE, "name", to="arrays-0123456789abcdef-00000.safetensors"), "not a name of a groups file"),
        (change(*FILE, "size", to=10**18), "bytes, checkpoint.json lists 1000000000000000000"),
        (change(*FILE, "size", to=-1), "no valid size and sha256"),
        (change(*FILE, "size", to=1.0), "no valid size and sha256"),
        (change(*FILE, "sha256", to="0" * 63), "no valid size and sha256"),
        (change(*FILE, "sha256", to="1" * 64), "its SHA-256 is not the one"),
        (lambda document: document["shards"].append(document["shards"][0]), "twice"),
        (change("document", to=[]), "is not a dict"),
        (change("document", to={"$column": "ints"}), "names a column"),
        (change("document", to={"$dict": 1}), "wrong value"),
    ],
)  # fmt: skip
def test_a_forged_document_is_refused(saved: Path, forgery: Callable[[dict[str, Any]], Any], said: str) -> None:
    forge(saved, forgery)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(saved)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{}", b"null", b"[]", b'"pystale-checkpoint"', b"\xff\xfe", b"\x00" * 100, b"[" * 100_000,
        b'{"format":"pystale-checkpoint"}',
        b'{"format":"pystale-checkpoint","schema_version":1}',
        b'{"format":"pystale-checkpoint","format":"pystale-checkpoint"}',
        b'{"format":"pystale-checkpoint","schema_version":' + b"1" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_foreign_document_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "checkpoint.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: "):
        read_checkpoint(tmp_path)


def test_a_checkpoint_without_a_document_of_its_own_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    shutil.copy(saved / "checkpoint.json", tmp_path / "half")
    with pytest.raises(CheckpointError, match=r"jsonl: is missing|safetensors: is missing"):
        read_checkpoint(tmp_path / "half")


JUNK = [None, True, -1, 2**64, 10**40, 1e308, "", "ints", "runs", "\ud800", [], {}, [[]], {"$column": "ints"},
        {"$column": "array.<i4.3"}, {"$tuple": [1]}, {"$dict": [[1, 2]]}, {"$int": "0x1"},
        {"$float": "7ff0000000000000"}, {"$status": "INIT"}, {"all": 1}, {"x": 1}, ["INIT"], "COMPLETED"]  # fmt: skip


def mutate(rng: random.Random, node: Any, chance: float) -> Any:
    if rng.random() < chance:
        return rng.choice(JUNK)
    if isinstance(node, list):
        items = [mutate(rng, item, chance) for item in node if rng.random() > chance / 2]
        return items + items[:1] if rng.random() < chance / 2 else items
    if isinstance(node, dict):
        return {
            (rng.choice(["$tuple", "$x", "tokens", "status", key]) if rng.random() < chance / 2 else key): mutate(
                rng, item, chance
            )
            for key, item in node.items()
            if rng.random() > chance / 2
        }
    return node


def fault_of(directory: Path) -> CheckpointError | None:
    """What reading raises; anything but a CheckpointError passes through."""
    try:
        read_checkpoint(directory)
    except CheckpointError as fault:
        return fault
    return None


@pytest.mark.parametrize("seed", range(3))
def test_no_json_with_right_checksums_breaks_the_reader(saved: Path, seed: int) -> None:
    rng = random.Random(seed)
    pristine = files(saved)
    faults = []
    for _ in range(80):

        def change_lines(data: bytes) -> bytes:
            lines = [mutate(rng, json.loads(line), 0.02) for line in data.splitlines()]
            return "".join(json.dumps(line) + "\n" for line in lines).encode()

        if rng.random() < 0.7:
            forge_file(saved, ".jsonl", change_lines)
        else:
            document = mutate(rng, json.loads(pristine["checkpoint.json"]), 0.05)
            (saved / "checkpoint.json").write_bytes(
                seal(document) if isinstance(document, dict) else json.dumps(document).encode()
            )
        faults.append(fault_of(saved))
        for name, data in pristine.items():
            (saved / name).write_bytes(data)
    refused = [str(fault) for fault in faults if fault is not None]
    assert refused
    assert all(str(saved) in fault for fault in refused)


@pytest.mark.parametrize("suffix", [".jsonl", ".safetensors"])
def test_no_bytes_with_right_checksums_break_the_reader(saved: Path, suffix: str) -> None:
    rng = random.Random(suffix)
    pristine = files(saved)
    for _ in range(150):

        def damage(data: bytes) -> bytes:
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                # The head of a safetensors file is where its structure is.
                at = rng.randrange(min(len(damaged), rng.choice([8, 200, 2000, 10**6])))
                damaged[at] = rng.choice([rng.randrange(256), damaged[at] ^ 1, 0x30 + rng.randrange(10)])
            return bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])

        forge_file(saved, suffix, damage)
        fault_of(saved)
        for name, data in pristine.items():
            (saved / name).write_bytes(data)


@given(st.binary(max_size=200), st.sampled_from([".jsonl", ".safetensors"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_bytes_with_right_checksums_are_refused(saved: Path, data: bytes, suffix: str) -> None:
    forge_file(saved, suffix, lambda _: data)
    assert fault_of(saved) is not None


def test_reading_leaves_the_garbage_collector_as_it_was(saved: Path) -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        read_checkpoint(saved)
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(CheckpointError):
        read_checkpoint(saved / "absent")
    assert gc.isenabled()

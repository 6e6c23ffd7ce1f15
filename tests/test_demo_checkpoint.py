"""A demo run in a directory: another process goes on with it, and what is damaged or foreign is refused."""

import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_process import BASE_STEPS, EVERY, settings
from threadpoolctl import threadpool_limits

from pystale import ReplayBuffer, RolloutState, Status
from pystale.checkpoint import CheckpointError, CheckpointWriter
from pystale.checkpoint_reader import read_checkpoint
from pystale.demo.checkpoint import RunDirectory
from pystale.demo.record import Record
from pystale.demo.rollouts import forget_versions_after
from pystale.demo.run import Run
from pystale.demo.session import execute
from pystale.demo.settings import BATCH_GROUPS, MODES, TASK, Settings

pytestmark = pytest.mark.whole_run

PROCESS = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else [])]
PROCESS += [str(Path(__file__).parent / "demo_process.py")]
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(limits=1, user_api="blas"):
        yield


class Silent:
    def update(self, record: Record) -> None:
        pass


def finished(given: Settings, directory: Any, every: int = EVERY) -> Run:
    """A run to its end, from wherever it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(given, RunDirectory(directory, every))
    assert not asyncio.run(execute(run, Silent()))
    return run


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished run; to be copied."""
    directory = tmp_path_factory.mktemp("kept") / "run"
    with threadpool_limits(limits=1, user_api="blas"):
        finished(settings("colocated", 3), directory)
    return directory


@pytest.fixture
def copied(kept, tmp_path):
    return Path(shutil.copytree(kept, tmp_path / "copy"))


def check_whole_run(directory: Path, mode: str, steps: int) -> Record:
    """Every step was trained once, no group twice, no prompt is lost, and the account balances."""
    given = settings(mode, steps)
    saved = RunDirectory(directory).read(given)
    record = saved.record
    assert record.steps == steps
    assert [len(batch) for batch in record.batches] == [BATCH_GROUPS] * steps
    trained = [group_id for batch in record.batches for group_id in batch]
    assert len(set(trained)) == len(trained), "trained twice"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, buffer = given.build(journal=directory / "journal")
    resumed = buffer.sync.resume(directory)
    assert resumed.finished == {}  # nothing came after the last checkpoint
    ledger = buffer.ledger()
    uses = sum(ledger[name] for name in ("trained", "masked_stale", "masked_semantic", "stored", "in_flight"))
    assert ledger["produced"] == uses + sum(ledger["discarded"].values())
    assert ledger["trained"] == record.trainable_tokens
    assert ledger["trained"] + ledger["masked_stale"] == record.tokens
    stored = [
        group[0].group_id for status in Status for group in buffer.sync.get(len(buffer), TASK, status)
    ]  # fmt: skip
    buffer.sync.close()
    drawn = set(range(saved.sampler["drawn"])) - set(saved.sampler["again"])
    assert len(set(stored)) == len(stored)
    assert not set(stored) & set(trained), "trained and stored"
    assert set(stored) | set(trained) == drawn, "lost, or from nowhere"
    assert sum(record.staleness.values()) == steps * BATCH_GROUPS * given.group_size
    assert all(0 <= reward <= 1 for reward in record.rewards)
    return record


# Going on


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_a_directory_is_whole(tmp_path, mode, interval):
    given = Settings.of_mode(mode, steps=5, group_size=2, base_steps=BASE_STEPS, sync_weights_interval=interval)
    run = finished(given, tmp_path / "new" / "run")
    assert run.record.steps == 5
    assert len(run.record.checkpoints) == 4  # before the first step, after steps 2 and 4, and at the end


@pytest.mark.parametrize("step", [0, 2, 4])
def test_from_a_checkpoint_it_goes_on_bit_by_bit(tmp_path, monkeypatch, step):
    """In a synchronous run, which does not depend on time: weights, optimiser, random numbers and prompts are back."""
    original = RunDirectory.save

    async def save(self: Any, buffer: Any, record: Any, *rest: Any) -> None:
        await original(self, buffer, record, *rest)
        if record.steps == step and not record.continued_after:
            shutil.copytree(self.path, tmp_path / "then")

    monkeypatch.setattr(RunDirectory, "save", save)
    given = Settings.of_mode("sync", steps=6, group_size=4, base_steps=30, sync_weights_interval=2)
    whole, again = finished(given, tmp_path / "run"), finished(given, tmp_path / "then")
    assert again.record.continued_after == [step]
    assert again.record.rewards == whole.record.rewards
    assert again.record.batches == whole.record.batches
    assert again.record.ledger == whole.record.ledger
    assert np.array_equal(again.trainer.parameters, whole.trainer.parameters)


def test_a_finished_run_only_has_its_report(copied):
    before = {path: path.read_bytes() for path in copied.iterdir() if path.is_file()}
    run = Run(settings("colocated", 3), RunDirectory(copied))
    assert run.finished
    assert run.record.steps == 3
    assert run.record.seconds == pytest.approx(run.record.seconds)  # its clock stands
    assert {path: path.read_bytes() for path in copied.iterdir() if path.is_file()} == before


def test_one_checkpoint_is_kept_and_the_one_before_it_deleted(copied):
    names = sorted(re.sub(r"-[0-9a-f]{16}", "", path.name) for path in copied.iterdir())
    assert names == [
        "arrays-00000.safetensors", "checkpoint.json", "groups-00000.jsonl", "journal", "policy-000003.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize("broken", ["policy", "buffer"])
def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch, broken):
    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    directory = RunDirectory(tmp_path, 1)
    run = Run(settings("sync", 4), directory)
    saves, original = iter(range(10)), RunDirectory.save

    async def save(self: Any, *arguments: Any) -> None:
        if next(saves) == 2:
            if broken == "policy":
                monkeypatch.setattr(RunDirectory, "_write", refuse)
            else:
                monkeypatch.setattr(CheckpointWriter, "commit", refuse)
        await original(self, *arguments)

    monkeypatch.setattr(RunDirectory, "save", save)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(execute(run, Silent()))
    monkeypatch.undo()
    assert directory.read(settings("sync", 4)).record.steps == 1
    assert finished(settings("sync", 4), tmp_path).record.continued_after == [1]
    check_whole_run(tmp_path, "sync", 4)


def test_versions_that_were_not_saved_are_cut_off():
    """A response is continued by the weights that are there, so its versions stay in order."""
    group = [
        RolloutState(
            rollout_id=number, group_id=0, response_ids=np.arange(len(steps), dtype=np.uint8), status=status,
            logprobs=np.zeros(len(steps), np.float32), response_model_steps=np.array(steps, dtype=np.int64), reward=1.0,
        )
        for number, (steps, status) in enumerate(
            [([2, 3, 3, 5], "ABORTED"), ([3, 3], "COMPLETED"), ([3, 4], "COMPLETED"), ([5], "ABORTED")]
        )
    ]  # fmt: skip
    for state in group:
        state.status = Status[state.status]
    forget_versions_after(group, 3)
    assert [len(state.response_ids) for state in group] == [3, 2, 1, 0]
    assert [len(state.logprobs) for state in group] == [3, 2, 1, 0]
    assert [list(state.response_model_steps) for state in group] == [[2, 3, 3], [3, 3], [3], []]
    assert [state.status.name for state in group] == ["ABORTED", "COMPLETED", "ABORTED", "ABORTED"]
    assert [state.reward for state in group] == [None, 1.0, None, None]


# Refusing


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 4}, "--steps is 4, and the run in .* has 3; go on with --steps 3, or choose another directory"),
        ({"seed": 1}, "--seed is 1, and the run in .* has 0"),
        ({"group_size": 8}, "--group-size is 8, and the run in .* has 2"),
        ({"max_token_staleness": None}, "--max-token-staleness is none, and the run in .* has 1"),
        ({"over_sample_threshold": 0.5}, "--over-sample-threshold is 0.5, and the run in .* has 0.75"),
        ({"mode": "disaggregated"}, "--mode is disaggregated, and the run in .* has colocated"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused_by_name(kept, changed, message):
    given = {"steps": 3, "group_size": 2, "base_steps": BASE_STEPS, **changed}
    with pytest.raises(ValueError, match=message):
        Run(Settings(**given), RunDirectory(kept))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")], ids=["flip", "gone", "cut"])
@pytest.mark.parametrize("name", ["policy-*", "groups-*", "arrays-*", "checkpoint.json"])
def test_damage_is_named_and_nothing_loaded(copied, name, damage):
    (path,) = copied.glob(name)
    damage(path)
    if name == "checkpoint.json" and not path.exists():
        (copied / "journal" / "segment-0000000001.journal").touch()
    with pytest.raises(CheckpointError, match=re.escape(str(copied))):
        Run(settings("colocated", 3), RunDirectory(copied))


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        writer.commit({"extra": {"step": 3}})
    with pytest.raises(ValueError, match="a checkpoint of something else than this demo; choose another directory"):
        Run(settings("sync", 3), RunDirectory(tmp_path))


def test_a_later_version_is_refused(copied):
    rewrite(copied, lambda demo: demo.update(version=3))
    with pytest.raises(ValueError, match="holds a run of version 3, known is 2"):
        Run(settings("colocated", 3), RunDirectory(copied))


@pytest.mark.parametrize("change", [
    lambda demo: demo.pop("settings"),
    lambda demo: demo.pop("sampler"),
    lambda demo: demo["record"].pop("tokens"),
    lambda demo: demo["record"]["rewards"].append(0.5),
    lambda demo: demo["record"].update(sample={"nothing": 1}),
    lambda demo: demo.update(policy={"name": "../policy", "size": 3, "sha256": ""}),
    lambda demo: demo.update(policy=None),
])  # fmt: skip
def test_content_that_contradicts_itself_is_refused(copied, change):
    rewrite(copied, change)
    with pytest.raises(CheckpointError, match=re.escape(str(copied))):
        Run(settings("colocated", 3), RunDirectory(copied))


def rewrite(directory: Path, change: Any) -> None:
    """Change what a checkpoint says of the demo, with good checksums."""
    document, groups = read_checkpoint(directory)
    change(document["extra"]["demo"])
    with CheckpointWriter(directory) as writer:
        for header, states in groups:
            writer.add(header, states)
        writer.commit(document)


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(
        ValueError, match=r"holds 'thesis.txt' and no run of this demo; choose an empty or new directory"
    ):
        Run(settings("sync", 3), RunDirectory(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file, and a run is kept in a directory"):
        Run(settings("sync", 3), RunDirectory(tmp_path / "file"))


def test_a_directory_in_use_is_refused(tmp_path):
    buffer = ReplayBuffer(settings("sync", 3).build()[0].rule, journal=tmp_path / "journal")
    with pytest.raises(ValueError, match="is used by another buffer"):
        Run(settings("sync", 3), RunDirectory(tmp_path))
    buffer.sync.close()


# Killed and interrupted


def started(directory: Path, mode: str, steps: int, base_steps: int = BASE_STEPS) -> "subprocess.Popen[str]":
    command = [*PROCESS, str(directory), mode, str(steps), str(base_steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def live(directory: Path, mode: str, steps: int, sent: int | None, seconds: float) -> "tuple[int | None, str, str]":
    """One process, sent a signal, if any, `seconds` after its first line; its exit code and what it wrote."""
    with started(directory, mode, steps) as process:
        first = process.stdout.readline()
        if sent is not None:
            time.sleep(seconds)
            process.send_signal(sent)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, first + out, err


def drill(directory: Path, mode: str, steps: int, sent: int, signals: int) -> Record:
    """Send so many signals at random moments; the run is finished all the same."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    # A process that has done its work and is about to exit does not catch SIGINT any more.
    died = {-sent} if sent == signal.SIGKILL else {130, -sent}
    done = lives = 0
    code: int | None = None
    while code != 0 and done < steps:
        lives += 1
        seconds = rng.uniform(0, 0.2 + 0.2 * lives)
        code, out, err = live(directory, mode, steps, sent if lives <= signals else None, seconds)
        assert code in {0} | died, err
        assert "Traceback" not in err
        if (directory / "checkpoint.json").exists():
            before, done = done, RunDirectory(directory).read(settings(mode, steps)).record.steps
            assert done >= before
            if said := re.search(r"^interrupted after (\d+) of", out, re.MULTILINE):
                assert int(said[1]) == done  # nothing has to be trained again
                assert f"kept in {directory}: the same command goes on with it" in out
    record = check_whole_run(directory, mode, steps)
    print(lives, "lives, went on after steps", record.continued_after)
    with started(directory, mode, steps) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert f"the run in {directory} is finished" in out
    assert "balances" in out
    return record


@pytest.mark.parametrize(("sent", "mode"), [
    (signal.SIGKILL, "colocated"), (signal.SIGKILL, "disaggregated"), (signal.SIGINT, "disaggregated")
])  # fmt: skip
def test_a_run_goes_on_until_it_is_done(tmp_path, sent, mode):
    drill(tmp_path / "run", mode, 8, sent, 4)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=lambda sent: sent.name)
def test_a_long_run_goes_on_until_it_is_done(tmp_path, mode, sent):
    record = drill(tmp_path / "run", mode, 40, sent, 15)
    assert record.continued_after


def test_an_interrupt_before_the_first_checkpoint_keeps_nothing_and_says_so(tmp_path):
    with started(tmp_path / "run", "sync", 3, base_steps=100_000) as process:
        assert process.stdout.readline().startswith("teaching")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")
    assert "nothing is kept in" in out
    assert finished(settings("sync", 3), tmp_path / "run").record.continued_after == []


def test_the_document_is_strict_json(kept):
    def refuse(name: str) -> None:
        raise ValueError(name)

    json.loads((kept / "checkpoint.json").read_text(encoding="ascii"), parse_constant=refuse)

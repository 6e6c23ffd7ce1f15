"""A run in a directory, so that another process can go on with it.

``DIR`` holds a checkpoint of the buffer (see :mod:`pystale.checkpoint`), ``DIR/journal`` what happened to the buffer
since, and ``DIR/policy-STEP-TOKEN.safetensors`` the weights and averages of the optimiser. Everything else of the run,
from the settings to the state of the random generator, is kept with the buffer's checkpoint, in ``extra["demo"]``. So
there is one moment at which a new checkpoint counts: when the buffer's is in its place. The policy it names is on disk
by then, and the policy of the one before is deleted afterwards.
"""

import asyncio
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from pystale import ReplayBuffer
from pystale.checkpoint import CheckpointError
from pystale.checkpoint_reader import read_checkpoint
from pystale.demo.engine import Engine
from pystale.demo.grpo import Trainer
from pystale.demo.policy import SIZE, Floats
from pystale.demo.record import Record
from pystale.demo.settings import Settings, option, words
from pystale.saving import Resumed

__all__ = ["RunDirectory", "SavedRun"]

VERSION = 2
DOCUMENT = "checkpoint.json"
TENSORS = ("parameters", "served", "adam_mean", "adam_square")
_POLICY = re.compile(r"policy-[0-9]+-[0-9a-f]{16}\.safetensors(?:\.tmp)?")
_OWN = re.compile(r"(?:policy|groups|arrays|writing|checkpoint)-[0-9a-f-]+\.(?:[a-z]+\.)?[a-z]+|journal")


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says, beside the buffer."""

    record: Record
    sampler: dict[str, Any]
    drawn: dict[str, int]  # groups by the pool they were drawn from
    parameters: Floats
    served: Floats  # weights that the engine served
    model_step: int  # and the step they are of
    adam: dict[str, Floats]
    adam_updates: int
    engine_rng: dict[str, Any]


class RunDirectory:
    """Where a run is kept.

    Parameters
    ----------
    path : path
        Created if absent. Nothing but one run may be in it.
    every : int, default 10
        Trainer steps between two checkpoints.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 10) -> None:
        self.path = Path(path)
        self.every = every

    @property
    def journal(self) -> Path:
        """Directory of the buffer's journal."""
        return self.path / "journal"

    def read(self, settings: Settings) -> SavedRun | None:
        """What is saved here, None where nothing is. Changes nothing, but that the directory is created.

        Raises
        ------
        ValueError
            For a directory that holds something else, is damaged, or holds a run with other settings.
        OSError
            If it cannot be used.
        """
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is a file, and a run is kept in a directory", str(self.path))
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / DOCUMENT).exists():
            self._refuse_unknown()
            return None
        document, _ = read_checkpoint(self.path)
        extra = document.get("extra")
        content = extra.get("demo") if isinstance(extra, dict) else None
        if not isinstance(content, dict):
            raise ValueError(
                f"{str(self.path)!r} holds a checkpoint of something else than this demo; choose another directory"
            )
        if content.get("version") != VERSION:
            raise ValueError(
                f"{str(self.path)!r} holds a run of version {content.get('version')!r}, known is {VERSION}; choose "
                "another directory, or the pystale that wrote it"
            )
        self._check_settings(settings, content.get("settings"))
        try:
            return self._saved_run(settings, content)
        except CheckpointError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as fault:
            raise CheckpointError(f"the run in {str(self.path)!r} contradicts itself: {fault!r:.200}") from None

    def resume(self, buffer: ReplayBuffer) -> Resumed:
        """Load the groups. What was trained since the checkpoint is stored again: the weights do not know it."""
        return buffer.sync.resume(self.path, undo_takes=True)

    async def save(
        self,
        buffer: ReplayBuffer,
        record: Record,
        trainer: Trainer,
        engine: Engine,
        sampler: Mapping[str, Any],
        drawn: Mapping[str, int],
    ) -> None:
        """Save a run in which nothing is going on. The checkpoint before survives if this fails.

        Raises
        ------
        OSError
            If the file system refuses.
        """
        averages, updates = trainer.adam.state()
        data = save_tensors({
            "parameters": trainer.parameters,
            "served": engine.parameters,
            "adam_mean": averages["mean"],
            "adam_square": averages["square"],
        })  # fmt: skip
        name = f"policy-{record.steps:06d}-{secrets.token_hex(8)}.safetensors"
        content = {
            "version": VERSION,
            "settings": asdict(record.settings),
            "record": record.as_dict(),
            "sampler": dict(sampler),
            "drawn": dict(drawn),
            "policy": {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()},
            "model_step": engine.model_step,
            "adam_updates": updates,
            "engine_rng": engine.rng.bit_generator.state,
        }
        await asyncio.to_thread(self._write, name, data)
        # Where this is interrupted, either policy may be the one that counts: the next save deletes the other.
        await buffer.save(self.path, extra={"demo": content})
        await asyncio.to_thread(self._delete_policies_but, name)

    def _write(self, name: str, data: bytes) -> None:
        beside = self.path / f"{name}.tmp"
        with open(beside, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.path / name)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _delete_policies_but(self, name: str) -> None:
        for path in self.path.iterdir():
            if path.name != name and _POLICY.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def _refuse_unknown(self) -> None:
        for path in sorted(self.path.iterdir()):
            if not _OWN.fullmatch(path.name):
                raise ValueError(
                    f"{str(self.path)!r} holds {path.name!r} and no run of this demo; choose an empty or new directory"
                )
        if any(self.journal.glob("segment-*")):
            raise CheckpointError(
                f"{str(self.path)!r} holds a journal and no {DOCUMENT}, which is always written before it: the run "
                "cannot be continued; choose another directory to begin anew"
            )

    def _check_settings(self, settings: Settings, saved: Any) -> None:
        if not isinstance(saved, dict) or set(saved) != {field.name for field in fields(Settings)}:
            raise CheckpointError(f"the run in {str(self.path)!r} contradicts itself: its settings are {saved!r:.200}")
        for field in fields(Settings):
            given, kept = getattr(settings, field.name), saved[field.name]
            if given != kept or type(given) is not type(kept):
                raise ValueError(
                    f"{option(field.name)} is {words(given)}, and the run in {str(self.path)!r} has {words(kept)}; go "
                    f"on with {option(field.name)} {words(kept)}, or choose another directory to begin a new run"
                )

    def _saved_run(self, settings: Settings, content: dict[str, Any]) -> SavedRun:
        tensors = self._tensors(content["policy"])
        return SavedRun(
            Record.from_dict(settings, content["record"]),
            content["sampler"],
            content["drawn"],
            tensors["parameters"],
            tensors["served"],
            content["model_step"],
            {"mean": tensors["adam_mean"], "square": tensors["adam_square"]},
            content["adam_updates"],
            content["engine_rng"],
        )

    def _tensors(self, policy: Any) -> dict[str, Floats]:
        if not _POLICY.fullmatch(policy["name"]):
            raise CheckpointError(f"{str(self.path)!r} names the policy {policy['name']!r}, which is no such file")
        path = self.path / policy["name"]
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        if len(data) != policy["size"] or hashlib.sha256(data).hexdigest() != policy["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: it has {len(data)} bytes, and {policy['size']} with another checksum were written"
            )
        try:
            tensors = load_tensors(data)
        except SafetensorError as fault:
            raise CheckpointError(f"{path} is no safetensors file: {fault}") from None
        if set(tensors) != set(TENSORS) or any(t.shape != (SIZE,) or t.dtype != np.float32 for t in tensors.values()):
            raise CheckpointError(f"{path} does not hold the tensors {', '.join(TENSORS)}")
        return tensors

"""Inputs that fuzzing found worth keeping: what they reach stays right. ``fuzz.py`` looks for more."""

from pathlib import Path

import pytest
from fuzz_targets import CORPUS, TARGETS

INPUTS = sorted(path for name in TARGETS for path in (CORPUS / name).iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_inputs(name: str) -> None:
    assert any(path.parent.name == name for path in INPUTS)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_is_kept_passes(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())

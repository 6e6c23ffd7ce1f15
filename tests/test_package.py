"""The package as installed: its version, its public names, and every example that its documentation shows."""

import ast
import asyncio
import doctest
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import pystale

ROOT = Path(__file__).parent.parent
PUBLIC = [
    "RolloutState",
    "Status",
    "group_status",
    "update_sample_version",
    "StalenessRule",
    "ModelSteps",
    "ReplayBuffer",
    "TrainBatch",
    "seq_staleness",
    "effective_mask",
    "has_trainable_token",
    "refresh_batch",
    "off_policy_metrics",
    "AsyncProduceStrategyConfig",
    "build_info",
]


def module_names() -> list[str]:
    """Every module of the installed package; `__main__` runs when imported, so it is left out."""
    names = [found.name for found in pkgutil.walk_packages(pystale.__path__, "pystale.")]
    return ["pystale", *(name for name in sorted(names) if not name.endswith("__main__"))]


def examples(module: ModuleType) -> list[doctest.DocTest]:
    """Examples of a module's docstrings, compiled classes and functions included, each found once.

    doctest itself passes over objects whose ``__module__`` is the public `pystale` but which a private module defines.
    """
    known = vars(pystale) | {"np": np, "pystale": pystale} | vars(module)
    objects = {module.__name__: module}
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if own and (inspect.isclass(value) or inspect.isroutine(value)):
            objects[f"{module.__name__}.{name}"] = value
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {}
    for name, value in objects.items():
        for test in finder.find(value, name, module=False if value is not module else module, globs=dict(known)):
            if test.examples:
                found[test.name] = test
    return list(found.values())


def fences(document: Path) -> list[tuple[int, str]]:
    """Python blocks of a Markdown file, each with the line it starts in."""
    text = document.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in blocks]


def test_version_is_said_once():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert importlib.metadata.version("pystale") == declared[1]
    assert pystale.build_info()["version"] == declared[1]
    assert f"## {declared[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there_and_explained(name):
    assert name in pystale.__all__
    value: Any = getattr(pystale, name)
    assert inspect.getdoc(value), f"pystale.{name} has no docstring"


def test_all_lists_what_exists():
    assert sorted(set(pystale.__all__)) == sorted(pystale.__all__)
    assert [name for name in pystale.__all__ if not hasattr(pystale, name)] == []


def test_typing_information_is_installed():
    installed = Path(pystale.__file__).parent
    assert (installed / "py.typed").is_file()
    for compiled in ("_core", "_objects"):
        assert (installed / f"{compiled}.pyi").is_file(), f"{compiled} has no stub"


@pytest.mark.parametrize("name", module_names())
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    output: list[str] = []
    for test in examples(importlib.import_module(name)):
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_site_has_examples():
    assert sum(bool(fences(document)) for document in DOCUMENTS) >= 4


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_documented_snippets_run(document, tmp_path, monkeypatch):
    """In the order in which they stand, each with what those before it defined; `await` works as in a notebook."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": document.stem}
    loop = asyncio.new_event_loop()
    try:
        for line, snippet in fences(document):
            tree = ast.increment_lineno(ast.parse(snippet), line)
            code = compile(tree, document.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                loop.run_until_complete(result)
    finally:
        loop.close()


WITHOUT_FCNTL = """
import errno, sys
sys.modules["fcntl"] = None
import pystale
from pystale.checkpoint_reader import read_checkpoint
assert pystale.seq_staleness([3], train_step=5) == 1
rule = pystale.StalenessRule()
buffer = pystale.ReplayBuffer(rule)
for refused in (
    lambda: pystale.ReplayBuffer(rule, journal="journal"),
    lambda: buffer.sync.save("checkpoint"),
    lambda: read_checkpoint("checkpoint"),
):
    try:
        refused()
    except OSError as error:
        assert error.errno == errno.ENOTSUP, error
        assert "not on Windows" in str(error)
    else:
        raise SystemExit("it was not refused")
"""


def test_where_there_are_no_posix_files_only_what_needs_them_is_refused(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_FCNTL], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []

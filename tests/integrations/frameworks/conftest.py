"""Tests here need the packages of `.ci/frameworks.txt`; they are collected when this folder is named, as CI does."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [
        (config.invocation_params.dir / str(arg).split("::")[0]).resolve() for arg in config.invocation_params.args
    ]
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # the frameworks warn about one another, on import already

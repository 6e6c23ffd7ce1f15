"""Tests here need the packages of `.ci/frameworks.txt`; they are collected when this folder is named, as CI does."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # the frameworks warn about one another, on import already

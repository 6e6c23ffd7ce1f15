"""Tests here need the packages of `.ci/frameworks.txt`; they are collected when this folder is named, as CI does."""

import os

import pytest

# Before Ray is imported. Its workers are niced by 15 otherwise, and starve where another suite has the cores.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TQ_NUM_THREADS", "2")  # read when transfer_queue is imported


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore")  # the frameworks warn about one another, on import already

"""Killed at any moment, a run loses no prompt, trains none twice, and brings none back that was discarded."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), str(Path(__file__).parent / "crashing_run.py")]


class Account:
    """What a run was answered over all its lives, and what the next life found."""

    def __init__(self):
        self.lines = 0
        self.put, self.trained, self.discarded = set(), set(), set()
        self.lives = 0

    def read(self, path):
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines[self.lines :]:
            what, content = json.loads(line)
            if what == "resumed":
                self.resumed(**content)
                continue
            ids = set(content)
            assert len(ids) == len(content)
            if what == "put":
                self.put |= ids
            elif what == "trained":
                assert not ids & self.trained, f"trained twice: {sorted(ids & self.trained)}"
                assert not ids & self.discarded, f"trained after being discarded: {sorted(ids & self.discarded)}"
                self.trained |= ids
            else:
                assert not ids & self.discarded
                assert not ids & self.trained
                self.discarded |= ids
        self.lines = len(lines)

    def resumed(self, stored, taken, sampler, ledger):
        self.lives += 1
        pools = {name: set(ids) for name, ids in stored.items() if ids}
        assert set(pools) <= {"COMPLETED", "ABORTED"}
        here = set().union(*pools.values())
        # A batch on its way to the trainer when it died counts as trained: the journal names it.
        limbo = set(taken) - self.trained
        assert len(limbo) <= 3
        self.trained |= limbo
        again = set(sampler["again"])
        gone = set(range(sampler["drawn"])) - again
        assert not here & self.trained, "trained and stored again"
        assert not here & self.discarded, "brought back after being discarded"
        assert not again & (self.put | self.trained | self.discarded), "drawn again after its put, or its end"
        assert self.put <= here | self.trained | self.discarded | (gone - here), "lost"
        # Each of the others was discarded, and was on disk as such, before the run could note it.
        unnoted = gone - here - self.trained - self.discarded
        assert ledger["discarded"] == len(self.discarded) + len(unnoted)
        assert ledger["trained"] == len(self.trained)
        assert ledger["produced"] == ledger["trained"] + ledger["discarded"] + ledger["stored"]
        assert ledger["stored"] == len(pools.get("COMPLETED", ()))
        assert ledger["in_flight"] == 0
        self.discarded |= unnoted


def live(directory, seed, seconds, account):
    """One life of the run, killed `seconds` after it is ready, or before that where they are negative."""
    process = subprocess.Popen([*RUN, str(directory), str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process.stdout as out, process.stderr as err:
        if seconds >= 0:
            ready = out.readline()
            assert ready == b"ready\n", err.read().decode()
        time.sleep(abs(seconds))
        process.send_signal(signal.SIGKILL)
        said = err.read().decode()
    assert process.wait() == -signal.SIGKILL, said
    account.read(directory / "notes")


def drill(directory, kills):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    account = Account()
    for _ in range(kills):
        early = rng.random() < 0.15
        live(directory, rng.randrange(2**32), -rng.uniform(0.1, 1.0) if early else rng.uniform(0, 0.5), account)
    live(directory, rng.randrange(2**32), 0.5, account)
    assert account.lives >= kills // 2
    assert account.trained
    assert (directory / "checkpoint" / "checkpoint.json").exists()
    return account


@pytest.mark.whole_run
def test_prompts_are_conserved_over_10_kills(tmp_path):
    account = drill(tmp_path, 10)
    print(account.lives, "lives,", len(account.trained), "trained,", len(account.discarded), "discarded")


@pytest.mark.long
@pytest.mark.parametrize("run", range(4))
def test_prompts_are_conserved_over_many_kills(tmp_path, run):
    account = drill(tmp_path, 25)
    assert account.discarded

"""A run that trains, journals and saves until it is killed; what it was answered it notes in a file of its own.

``python crashing_run.py DIRECTORY SEED``. Every response that is COMPLETED or FAILED has one token and every other
none, so that the token account counts groups.
"""

import asyncio
import itertools
import json
import os
import random
import sys
import warnings
from pathlib import Path

from pystale import ReplayBuffer, StalenessRule, Status
from pystale.sampler import PromptSampler

EMPTY = {"version": 1, "drawn": 0, "again": []}


class Notes:
    """Lines that survive the process: written at once, by one call each."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, what, ids):
        os.write(self.fd, (json.dumps([what, ids]) + "\n").encode())


async def main(directory, seed):
    rng = random.Random(seed)
    notes = Notes(directory / "notes")
    warnings.simplefilter("ignore")
    buffer = ReplayBuffer(
        StalenessRule(max_staleness=1, max_token_staleness=0),
        on_release=lambda released: notes.add("discarded", [s.group_id for s, _ in released]),
        journal=directory / "journal",
        journal_delay=rng.choice([0, 0.002, 0.01]),
    )
    sampler = PromptSampler(itertools.count(), buffer, group_size=1)
    resumed = await buffer.resume(directory / "checkpoint")
    cursor = resumed.extra.get("sampler", EMPTY)
    sampler.load_state_dict(cursor, resumed.finished.get("default", ()))
    step = max(resumed.extra.get("step", 1), buffer.operations.store.train_step or 1)
    stored = {
        s.name: sorted(r.group_id for r in buffer.operations.store.records.values() if r.status is s) for s in Status
    }
    notes.add("resumed", {
        "stored": stored,
        "taken": resumed.taken.get("default", []),
        "sampler": sampler.state_dict(),
        "ledger": {**buffer.ledger(), "discarded": sum(buffer.ledger()["discarded"].values())},
    })  # fmt: skip
    print("ready", flush=True)
    fresh = set()  # prompts drawn that have not come to the buffer

    async def produce():
        while True:
            (state,) = members = await sampler.sample("default", [Status.ABORTED])
            if state.status is Status.INIT:
                fresh.add(state.group_id)
            await asyncio.sleep(rng.uniform(0, 0.01))
            await asyncio.sleep(0.05 * (len(buffer) > 40))
            state.response_ids, state.response_model_steps = [], []
            state.status = Status.ABORTED if rng.random() < 0.2 else Status.COMPLETED
            if state.status is Status.COMPLETED:
                state.response_ids, state.response_model_steps = [1], [step - 1]
            # Nothing is awaited between this and the moment put, or reject, takes effect: a save sees both or neither.
            fresh.discard(state.group_id)
            if rng.random() < 0.05:
                state.response_ids, state.response_model_steps = [1], [step - 1]
                await buffer.reject(members, outcome="failed")
            else:
                await buffer.put(members, train_step=step)
                notes.add("put", [state.group_id])

    async def train():
        nonlocal step
        while True:
            await buffer.wait_ready({"default": 3})
            batch = await buffer.take_train_batch({"default": 3}, train_step=step)
            if batch:
                notes.add("trained", [g[0].group_id for g in batch["default"]])
            await asyncio.sleep(rng.uniform(0, 0.01))
            step += rng.random() < 0.3

    async def save():
        while True:
            await asyncio.sleep(rng.uniform(0, 0.1))
            extra = {"step": step, "sampler": sampler.state_dict(in_flight=fresh)}
            await buffer.save(directory / "checkpoint", extra=extra)

    await asyncio.gather(*(produce() for _ in range(4)), train(), save())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))

"""Whatever happens to a buffer: its trace, replayed under its own settings, gives its account at every moment."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from test_buffer_model import BufferAgainstModel

from pystale import ReplayBuffer
from pystale.replay import read_history, replay, what_ifs


class TracedBuffer(BufferAgainstModel):
    """The random histories of the buffer's model test, each recorded and replayed at its end."""

    def new_buffer(self) -> ReplayBuffer:
        if not hasattr(self, "directory"):
            self.directory = tempfile.TemporaryDirectory()
            self.traced: list[Any] = []
        plain = super().new_buffer()
        store = plain.operations.store
        traced = ReplayBuffer(
            store.rules,
            order=store.order,
            tail_batch_trigger_size=store.triggers,
            max_rerolls=store.max_rerolls,
            group_mode=plain.group_mode,
            min_fresh=plain.min_fresh,
            trace=Path(self.directory.name, f"{len(self.traced)}.jsonl"),
        )
        self.traced.append(traced)
        return traced

    def teardown(self) -> None:
        try:
            for buffer in getattr(self, "traced", ()):
                buffer.sync.close()
                history = read_history(buffer.trace.path)
                recorded, reference = replay(history)
                assert recorded.differs == ""
                assert recorded.ledger == buffer.ledger()
                assert history.accounts
                for setting in what_ifs(history.header.rules, [0, 1, 3], [None, 0])[1:]:
                    outcome, _ = replay(history, setting, reference)
                    ledger = outcome.ledger
                    kept = ledger["stored"] + ledger["in_flight"] + ledger["masked_semantic"]
                    assert ledger["produced"] == ledger["trained"] + outcome.wasted + kept
        finally:
            if hasattr(self, "directory"):
                self.directory.cleanup()


TestTracedBuffer = TracedBuffer.TestCase
TestTracedBuffer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

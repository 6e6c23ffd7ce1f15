"""What other settings would have done with a recorded run.

A trace is read once (:mod:`pystale.replay.history`) and played to a buffer's store once per setting
(:mod:`pystale.replay.engine`), the recorded settings first: they give the run's own counts.
"""

from pystale.replay.engine import ASSUMPTIONS, replay
from pystale.replay.history import History, read_history
from pystale.replay.outcome import Outcome
from pystale.replay.whatif import RECORDED, WhatIf, what_ifs

__all__ = ["ASSUMPTIONS", "RECORDED", "History", "Outcome", "WhatIf", "read_history", "replay", "what_ifs"]

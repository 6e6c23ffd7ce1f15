"""Staleness control for asynchronous LLM reinforcement learning."""

from pystale._core import build_info
from pystale._objects import ModelSteps, effective_mask, has_trainable_token, refresh_batch, seq_staleness

__all__ = ["ModelSteps", "build_info", "effective_mask", "has_trainable_token", "refresh_batch", "seq_staleness"]

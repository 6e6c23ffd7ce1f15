"""Staleness control for asynchronous LLM reinforcement learning."""

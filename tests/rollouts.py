"""Builders of states and groups for the tests."""

from itertools import count

from pystale import RolloutState, Status

_ids = count(1)


def state(steps, status=Status.COMPLETED, **fields):
    """State whose response has one token per step; a step of None gives a response without versions."""
    ids = list(range(100, 100 + len(steps)))
    steps = None if None in steps else list(steps)
    return RolloutState(
        rollout_id=next(_ids), prompt_ids=[1, 2], response_ids=ids, response_model_steps=steps, status=status, **fields
    )


def group(*members, status=Status.COMPLETED, **fields):
    """Group of states, one per list of steps."""
    return [state(steps, status, **fields) for steps in members]


def balance(ledger):
    """Both sides of the token account."""
    names = ("trained", "masked_stale", "masked_semantic", "stored", "in_flight")
    return ledger["produced"], sum(ledger[n] for n in names) + sum(ledger["discarded"].values())

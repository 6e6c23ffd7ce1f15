"""Where every generated token went."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pystale._objects import Member
from pystale.group import Arriving
from pystale.staleness import checked_int
from pystale.ticket import Ticket, begins_with

__all__ = ["Ledger", "Shares", "booked", "counts_by_task"]

# Trained, masked as stale, masked semantically: where the tokens of a group taken went.
Shares = tuple[int, int, int]

REASONS = ("expired", "failed", "filtered", "restarted", "max_rerolls", "lost")


class Ledger:
    """Double-entry account of response tokens.

    After every operation of the buffer::

        produced = trained + masked_stale + masked_semantic + sum(discarded) + stored + in_flight

    Not synchronised; the buffer's mutex guards it.
    """

    __slots__ = ("discarded", "in_flight", "masked_semantic", "masked_stale", "produced", "stored", "trained")

    def __init__(self) -> None:
        self.produced = 0
        self.trained = 0
        self.masked_stale = 0
        self.masked_semantic = 0
        self.discarded: Counter[str] = Counter()
        self.stored = 0
        self.in_flight = 0

    def discard(self, reason: str, tokens: int) -> None:
        if tokens:
            self.discarded[reason] += tokens

    def train(self, members: Sequence[Member], tokens: int, trained: int, sign: int = 1) -> Shares:
        """Book a group in flight as trained, with `trained` of its `tokens` in the loss.

        Returns
        -------
        tuple of int
            Tokens trained, masked as stale, and masked semantically.
        """
        trainable = sum([member.trainable for member in members])
        self.in_flight -= sign * tokens
        self.trained += sign * trained
        self.masked_stale += sign * (trainable - trained)
        self.masked_semantic += sign * (tokens - trainable)
        return trained, trainable - trained, tokens - trainable

    def untrain(self, members: Sequence[Member], tokens: int, trained: int) -> None:
        """Undo :meth:`train`."""
        self.train(members, tokens, trained, sign=-1)

    def take_back(self, ticket: Ticket, arriving: Arriving) -> None:
        """Book what became of the tokens a group had when it was handed out, and those it has now as produced.

        A response that still begins with them was continued, any other was restarted.
        """
        self.in_flight -= ticket.tokens
        self.produced += arriving.tokens
        for position, (tokens, begins) in enumerate(ticket.held):
            if position >= len(arriving.states):
                self.discard("lost", tokens)
            elif arriving.members[position].tokens >= tokens and begins_with(arriving.states[position], begins):
                self.produced -= tokens
            else:
                self.discard("restarted", tokens)

    def close(self, members: Sequence[Member], outcome: str) -> None:
        """Book tokens that are produced and nowhere else; "trained" with the masks they have."""
        for member in members:
            if outcome == "trained":
                self.trained += member.trainable
                self.masked_semantic += member.tokens - member.trainable
            else:
                self.discard(outcome, member.tokens)

    def as_dict(self) -> dict[str, Any]:
        """Copy of the account; ``discarded`` is a Counter over the reasons that occurred."""
        return {
            "produced": self.produced,
            "trained": self.trained,
            "masked_stale": self.masked_stale,
            "masked_semantic": self.masked_semantic,
            "discarded": Counter(self.discarded),
            "stored": self.stored,
            "in_flight": self.in_flight,
        }

    @classmethod
    def after_restart(cls, saved: Any, stored: int) -> "Ledger":
        """Account carried over a restart: what was in flight did not come back.

        Raises
        ------
        ValueError
            If `saved` is not an account that balances with `stored` tokens stored.
        """
        if not isinstance(saved, dict):
            raise ValueError(f"ledger must be an object, got {saved!r}")
        ledger = cls()
        for name in ("produced", "trained", "masked_stale", "masked_semantic", "stored"):
            setattr(ledger, name, _count(saved, name))
        discarded = saved.get("discarded")
        if not isinstance(discarded, dict) or not set(discarded) <= set(REASONS):
            raise ValueError(
                f"ledger: discarded must map reasons among {', '.join(REASONS)} to counts, got {discarded!r}"
            )
        for reason in discarded:
            ledger.discard(reason, _count(discarded, reason))
        ledger.discard("lost", _count(saved, "in_flight"))
        if ledger.stored != stored or not ledger.balances():
            raise ValueError(f"ledger does not balance: {saved!r} with {stored} tokens stored")
        return ledger

    def balances(self) -> bool:
        return self.produced == sum(self._uses())

    def _uses(self) -> Iterable[int]:
        yield from (self.trained, self.masked_stale, self.masked_semantic, self.stored, self.in_flight)
        yield from self.discarded.values()


def _count(saved: dict[str, Any], name: str) -> int:
    value = saved.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"ledger: {name} must be a count, got {value!r}")
    return value


def counts_by_task(saved: Any, name: str) -> Counter[str]:
    """Counts by task that were saved under `name`; ValueError for anything else."""
    if not isinstance(saved, dict) or not all(type(n) is int and n >= 0 for n in saved.values()):
        raise ValueError(f"{name} must map tasks to counts, got {saved!r:.80}")
    return Counter(saved)


def booked(ledger: Mapping[str, Any], name: str, since: Mapping[str, Any] | None) -> int:
    """Tokens a ledger booked under `name`, after `since`."""
    now, before = (
        0 if account is None else _booked(where, account, name)
        for where, account in (("ledger", ledger), ("since", since))
    )
    if now < before:
        raise ValueError(f"ledger has {now} {name} tokens, since has {before} already; since is the earlier account")
    return now - before


def _booked(where: str, account: Any, name: str) -> int:
    if not isinstance(account, Mapping):
        raise TypeError(f"{where} must be what ReplayBuffer.ledger returns, got {type(account).__name__}")
    if name not in account:
        raise ValueError(f"{where} has no {name!r}; it must be what ReplayBuffer.ledger returns")
    return checked_int(f"{where}[{name!r}]", account[name], at_least=0)

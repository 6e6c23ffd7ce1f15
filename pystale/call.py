"""One rollout on its way through the partial-rollout client: what it asks for, and how far its bounds are used up."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pystale.continuation import as_list, continued_params, refuse_broken
from pystale.engine import EngineOutput
from pystale.staleness import checked_int
from pystale.state import Status, length

__all__ = ["Call"]


@dataclass(slots=True, eq=False)
class Call:
    """One rollout being generated.

    Attributes
    ----------
    state : RolloutState or alike
    partial : bool
        Whether aborted requests leave their tokens.
    prompt : list of int
    params : dict
        The caller's sampling parameters, which are never changed.
    limit : str
        The parameter that holds `max_tokens`.
    max_tokens : int
        Longest response.
    end_ids : frozenset of int
        Tokens that end a response.
    deadline : float or None
        Time of the client's clock when it has taken too long.
    paused : future
        Done once a pause was asked for.
    request_id : str or None
        The request that is out.
    failures : int
        Requests in a row that brought nothing.
    reason : str
        Why the last of them did not.
    spent : int
        Tokens generated so far, dropped ones included.
    """

    state: Any
    partial: bool
    prompt: list[int]
    params: dict[str, Any]
    limit: str
    max_tokens: int
    end_ids: frozenset[int]
    deadline: float | None
    paused: "asyncio.Future[None]"
    request_id: str | None = None
    failures: int = 0
    reason: str = ""
    spent: int = 0

    @classmethod
    def of(
        cls,
        state: Any,
        partial: bool,
        *,
        max_tokens: int | None,
        eos_token_ids: frozenset[int],
        deadline: float | None,
    ) -> "Call":
        """Check a rollout and what it asks for; nothing changes.

        Raises
        ------
        TypeError, ValueError
            See :meth:`PartialRolloutClient.generate <pystale.client.PartialRolloutClient.generate>`.
        """
        if not isinstance(partial, bool):
            raise TypeError(f"enable_partial_rollout must be a bool, got {type(partial).__name__}")
        which = f"rollout_id {getattr(state, 'rollout_id', None)!r}"
        if not length(state.prompt_ids):
            raise ValueError(f"{which} has no prompt_ids; at least one token is needed to continue from")
        params = _as_dict(getattr(state, "sample_params", None), which)
        limit = "max_new_tokens" if "max_new_tokens" in params and "max_tokens" not in params else "max_tokens"
        given = params.get(limit)
        if given is None and (given := max_tokens) is None:
            raise ValueError(f"sample_params of {which} have no max_tokens; give it there or to the client")
        if params.get("n") not in (None, 1):
            raise ValueError(f"sample_params of {which} have n={params['n']}; a rollout is one response, n must be 1")
        if partial:
            refuse_broken(state, which)
        end_ids = frozenset() if params.get("ignore_eos") else eos_token_ids
        return cls(
            state=state,
            partial=partial,
            prompt=as_list(state.prompt_ids),
            params=params,
            limit=limit,
            max_tokens=checked_int(f"{limit} of {which}", given, at_least=0),
            end_ids=end_ids | frozenset(params.get("stop_token_ids") or ()),
            deadline=deadline,
            paused=asyncio.get_running_loop().create_future(),
        )

    @property
    def generated(self) -> int:
        """Tokens of the response."""
        return length(self.state.response_ids)

    @property
    def left(self) -> int:
        """Tokens the response may still get."""
        return self.max_tokens - self.generated

    def finished(self) -> str | None:
        """Finish reason of a response that needs no further request."""
        ids = self.state.response_ids
        if length(ids) and ids[-1] in self.end_ids:
            return "stop"
        return "length" if self.left <= 0 else None

    def verdict(self, output: EngineOutput) -> Status:
        """Status that an answer gives the response; one that finishes it without a single token is a fault."""
        status = Status.from_finish_reason(output.finish_reason)
        nothing = status is Status.COMPLETED and not self.generated and not len(output.token_ids)
        return Status.FAILED if nothing else status

    def failed(self, reason: str) -> None:
        """Count a request that brought nothing."""
        self.failures += 1
        self.reason = reason

    def tokens(self) -> list[int]:
        """What the next request continues: the prompt, and the response so far."""
        return [*self.prompt, *as_list(self.state.response_ids)]

    def request_params(self) -> dict[str, Any]:
        """Parameters of the next request: the caller's, with budgets less what has been generated."""
        return continued_params(self.params, self.limit, self.left, self.generated)


def _as_dict(params: Any, which: str) -> dict[str, Any]:
    """Sampling parameters in a dict of our own."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    if callable(dump := getattr(params, "model_dump", None)):
        return dict(dump())
    raise TypeError(
        f"sample_params of {which} must be a mapping or have model_dump (pydantic), got {type(params).__name__}"
    )

"""Settings to try on a recorded run."""

import dataclasses
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from pystale.arguments import Rules
from pystale.staleness import StalenessRule

__all__ = ["NO_LIMIT", "RECORDED", "WhatIf", "what_ifs"]

# Max staleness of runs in which nothing expired; the command line takes no larger one.
NO_LIMIT = 1_000_000


@dataclass(frozen=True)
class WhatIf:
    """A rule to try, for every task alike; all else is as recorded."""

    max_staleness: int | None = None
    max_token_staleness: int | None = None
    recorded: bool = False  # leave the rules as they are

    def rules(self, recorded: Rules) -> Rules:
        """The rules of a trace with these limits."""
        if self.recorded:
            return recorded
        if isinstance(recorded, StalenessRule):
            return self._rule(recorded)
        return {name: self._rule(rule) for name, rule in recorded.items()}

    def _rule(self, rule: StalenessRule) -> StalenessRule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a limit that masks nothing is worth comparing with
            return dataclasses.replace(
                rule, max_staleness=self.max_staleness or 0, max_token_staleness=self.max_token_staleness
            )


RECORDED = WhatIf(recorded=True)


def what_ifs(
    recorded: Rules, max_staleness: Iterable[int] | None, max_token_staleness: Iterable[int | None] | None
) -> list[WhatIf]:
    """Every combination, after the recorded settings. A limit that is not given stays as recorded.

    Raises
    ------
    ValueError
        If a limit is left out that the recorded tasks do not agree on.
    """
    if max_staleness is None and max_token_staleness is None:
        return [RECORDED]
    rules = [recorded] if isinstance(recorded, StalenessRule) else list(recorded.values())
    for name, given in (("max_staleness", max_staleness), ("max_token_staleness", max_token_staleness)):
        if given is None and len({getattr(rule, name) for rule in rules}) > 1:
            raise ValueError(f"the recorded tasks differ in {name}; give --{name.replace('_', '-')}")
    sequence = list(dict.fromkeys([rules[0].max_staleness] if max_staleness is None else max_staleness))
    token = list(dict.fromkeys([rules[0].max_token_staleness] if max_token_staleness is None else max_token_staleness))
    return [RECORDED, *(WhatIf(limit, token_limit) for limit in sequence for token_limit in token)]

"""Orders in which stored groups are handed out."""

import enum

__all__ = ["NEWEST_KEY", "OLDEST_KEY", "Order"]

# A missing version counts as one of these steps where `missing_version` says "oldest" or "newest". They lie outside the
# steps a model can have and inside int64, also when negated.
OLDEST_KEY = -(2**62)
NEWEST_KEY = 2**62


class Order(enum.Enum):
    """Order in which groups of one pool are handed out; ties go to the earlier arrival.

    A group's key is made when it is stored and does not depend on the train step, so refreshing never sorts.
    """

    FIFO = "fifo"
    STALEST_FIRST = "stalest_first"
    OLDEST_PROMPT_FIRST = "oldest_prompt_first"
    FRESHEST_FIRST = "freshest_first"

    def key(self, oldest: int | None, prompt_model_step: int | None) -> int | None:
        """Number to sort a group by, ascending.

        Parameters
        ----------
        oldest : int or None
            Oldest model step of the group's tokens.
        prompt_model_step : int or None
            Oldest model step at which its prompt was dispatched.

        Returns
        -------
        int or None
            None where the group has nothing to be ordered by; it comes after all groups that have.

        Examples
        --------
        >>> Order.FRESHEST_FIRST.key(oldest=5, prompt_model_step=None)
        -5
        """
        if self is Order.FIFO:
            return 0
        if self is Order.OLDEST_PROMPT_FIRST:
            return oldest if prompt_model_step is None else prompt_model_step
        step = prompt_model_step if oldest is None else oldest
        if step is None:
            return None
        return -step if self is Order.FRESHEST_FIRST else step

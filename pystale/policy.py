"""What a buffer is told to do with its groups: in which order they go out, and what an expired member does to them."""

import enum

__all__ = ["NEWEST_KEY", "OLDEST_KEY", "GroupMode", "Order"]

# A missing version counts as one of these steps where `missing_version` says "oldest" or "newest". They lie outside the
# steps a model can have and inside int64, also when negated.
OLDEST_KEY = -(2**62)
NEWEST_KEY = 2**62


class Order(enum.Enum):
    """Order in which groups of one pool are handed out; ties go to the earlier arrival.

    A group's key is made when it is stored and does not depend on the train step, so refreshing never sorts.

    Attributes
    ----------
    FIFO
        As they arrived.
    STALEST_FIRST
        By the oldest model step of the tokens, oldest first.
    OLDEST_PROMPT_FIRST
        By the model step at which the prompt was dispatched, oldest first.
    FRESHEST_FIRST
        By the oldest model step of the tokens, newest first.
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


class GroupMode(enum.Enum):
    """What becomes of a finished group some of whose members have expired.

    ``ALL``: it is trained whole or not at all. With an expired member it is re-rolled, or discarded where re-rollout is
    off. ``MEMBERS``: while at least ``min_fresh`` of its members are COMPLETED and not expired, it is trained with
    those. The others are left out: reset as ever (their tokens are booked as discarded, ``expired``), and not in the
    batch that is handed to training. With fewer fresh members it goes the way of ``ALL``.

    Only finished groups lose members this way, those whose members are all COMPLETED or EXPIRED; one that holds an
    ABORTED member is to be generated further anyway, and goes the way of ``ALL``.

    Notes
    -----
    Leaving members out changes what a group-normalised baseline (GRPO: ``(reward - mean) / std`` over the group) says.
    Mean and standard deviation are over fewer members, so they are noisier; and not over a random choice of them: a
    long response spans more weight versions and expires first, so the baseline becomes that of the short, fresh ones.
    Where length and reward go together, advantages shift. Four responses, of which the two long ones are right, have
    rewards 1, 1, 0, 0 and advantages 1, 1, -1, -1. With one of the long ones left out, the other is worth 1.41 and the
    short ones -0.71 each; with both left out nothing is to be learnt any more, as all that are left are equal. So is a
    member alone: with such a baseline a `min_fresh` below 2 trains groups that have no gradient.

    A trainer that wants the baseline of the whole group takes it before the group is put, while all rewards are there,
    and keeps it in ``extra_fields`` of every member.

    Examples
    --------
    >>> import statistics
    >>> from pystale import ReplayBuffer, RolloutState, StalenessRule, Status
    >>> def advantages(group):
    ...     rewards = [state.reward for state in group]
    ...     mean, std = statistics.fmean(rewards), statistics.pstdev(rewards)
    ...     return [round((reward - mean) / std, 2) if std else 0.0 for reward in rewards]
    >>> def response(reward, *steps):
    ...     return RolloutState(
    ...         response_ids=[1] * len(steps), response_model_steps=list(steps), reward=reward, status=Status.COMPLETED
    ...     )
    >>> buffer = ReplayBuffer(StalenessRule(max_staleness=1), group_mode="members", min_fresh=2)
    >>> group = [response(1.0, 2, 2, 3, 4), response(1.0, 3, 3, 4), response(0.0, 4), response(0.0, 4)]
    >>> advantages(group)
    [1.0, 1.0, -1.0, -1.0]
    >>> stored = buffer.sync.put(group, train_step=5)  # the first response began too long ago
    >>> batch = buffer.sync.take_train_batch({"default": 1}, train_step=5)
    >>> batch.left_out, advantages(batch["default"][0])
    (1, [1.41, -0.71, -0.71])
    """

    ALL = "all"
    MEMBERS = "members"

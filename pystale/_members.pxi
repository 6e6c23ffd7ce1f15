"""What the buffer knows of a rollout's tokens, read from the object in place (text of _objects.pyx)."""


@cython.final
@cython.auto_pickle(False)
cdef class Member:
    """Numbers of one group member.

    Attributes
    ----------
    tokens : int
        Response tokens.
    oldest : int
        Oldest model step, -1 without a model token.
    newest_trainable : int
        Newest model step of a semantically trainable token, -1 without any.
    trainable : int
        Semantically trainable tokens.
    others : int
        Tokens that no model produced.
    versioned : bool
        False: there are response tokens and none has a step.
    """

    cdef readonly Py_ssize_t tokens
    cdef readonly int64_t oldest
    cdef readonly int64_t newest_trainable
    cdef readonly Py_ssize_t trainable
    cdef readonly Py_ssize_t others
    cdef readonly bint versioned

    def __cinit__(self):
        self.oldest = -1
        self.newest_trainable = -1
        self.versioned = True

    def __repr__(self):
        return (f"Member(tokens={self.tokens}, oldest={self.oldest}, newest_trainable={self.newest_trainable}, "
                f"trainable={self.trainable}, others={self.others}, versioned={self.versioned})")

    def seq_staleness(self, int64_t train_step):
        """Staleness of the oldest model token at `train_step`, in trainer steps; 0 without one."""
        return staleness_of(self.oldest, train_step)


cdef Py_ssize_t entries_of(values) except -1:
    return 0 if values is None else len(values)


cdef Py_ssize_t per_token(values, str name) except -1:
    """Entries of a field with one per token; what has no order, or is text, is refused."""
    if type(values) is not list and isinstance(values, (str, dict, set, frozenset)):
        raise TypeError(f"{name} must be a sequence or an array with one entry per token, got {type(values).__name__}")
    return len(values)


cdef int refuse_length(str name, Py_ssize_t entries, str of, Py_ssize_t tokens) except -1:
    raise ValueError(f"{name} has {entries} entries, {of} has {tokens}; one entry per response token is required")


def measure(state, steps, train_step=None):
    """Check the lengths of a state's per-token fields and summarise its tokens.

    Parameters
    ----------
    state : RolloutState or alike
        Its ``response_ids``, ``response_mask`` and ``logprobs`` are read.
    steps : integer array, list or tuple of int, ModelSteps, or None
        Stands for its ``response_model_steps``.
    train_step : int, optional
        Refuses steps that this train step cannot have seen.

    Returns
    -------
    Member

    Raises
    ------
    TypeError, ValueError
        For lengths that differ, entries that are not integers, or a future step.
    """
    cdef Argument tokens_given, mask_given, unmasked
    cdef Summary summary
    cdef int64_t newest
    cdef Member member = Member.__new__(Member)
    ids = state.response_ids
    mask = state.response_mask
    logprobs = getattr(state, "logprobs", None)
    cdef Py_ssize_t stamped = entries_of(steps)
    cdef Py_ssize_t tokens = stamped if ids is None else per_token(ids, "response_ids")
    cdef str of = "response_model_steps" if ids is None else "response_ids"
    if stamped and stamped != tokens:
        refuse_length("response_model_steps", stamped, of, tokens)
    if mask is not None and entries_of(mask) != tokens:
        refuse_length("response_mask", entries_of(mask), of, tokens)
    cdef Py_ssize_t scored = 0 if logprobs is None else per_token(logprobs, "logprobs")
    if scored and scored != tokens:
        refuse_length("logprobs", scored, of, tokens)
    if not tokens:
        return member
    member.tokens = tokens
    member.versioned = stamped > 0
    if not stamped:
        # Only the semantic mask says anything then; steps of 0 stand in, to have it checked and counted.
        steps = ModelSteps.from_runs([(0, tokens)])
    kept = bind(&tokens_given, steps, b"steps", False)
    kept_mask = None if mask is None else bind(&mask_given, mask, b"response_mask", True)
    require_flat(tokens_given)
    require_same_shape(tokens_given, mask_given)
    with cython.critical_section(kept, kept_mask):
        summary = summary_of(tokens_given, mask_given)
        if train_step is not None and stamped:
            newest = summary_of(tokens_given, unmasked).newest_trainable if mask is not None else summary.newest_trainable
    member.trainable = summary.trainable
    if not stamped:
        return member
    if train_step is not None and newest > <int64_t> train_step - 1:
        raise ValueError(
            f"model step {newest} is in the future of train_step {train_step}, whose newest weights are of step "
            f"{train_step - 1}; pass the step the group is produced for, at least {newest + 1}"
        )
    member.oldest = summary.oldest
    member.newest_trainable = summary.newest_trainable
    member.others = tokens - summary.model
    return member


cdef object ABSENT = object()


def replace_fields(state, dict new, list refused):
    """Write those fields of `new` that `state` has.

    Parameters
    ----------
    state : RolloutState or alike
    new : dict of str to object
        Values by field.
    refused : list
        Gets ``(field, exception)`` for every field that cannot be written; the others are written all the same.

    Returns
    -------
    dict of str to object
        Old values of the fields that held something: neither None nor an empty str, list, tuple, dict or ModelSteps.
    """
    cdef dict cleared = {}
    for name, value in new.items():
        old = getattr(state, name, ABSENT)
        if old is ABSENT or old is value:
            continue
        try:
            setattr(state, name, value)
        except Exception as error:
            refused.append((name, error))
            continue
        if old is None or (type(old) in (str, list, tuple, dict, ModelSteps) and not len(old)):
            continue
        cleared[name] = old
    return cleared


def copy_fields(state, copied, tuple names):
    """Write the fields `names` of `state` to `copied`; a quarter of the time of ``copy.copy``."""
    for name in names:
        setattr(copied, name, getattr(state, name))


cdef object mask_and_ones(steps, response_mask, int64_t cutoff, Py_ssize_t* ones_found):
    """Effective mask of one response; adds the ones in it to `ones_found`."""
    cdef Argument tokens, mask, ones
    kept = bind(&tokens, steps, b"steps", False)
    kept_mask = None if response_mask is None else bind(&mask, response_mask, b"response_mask", True)
    require_flat(tokens)
    require_same_shape(tokens, mask)
    result = new_mask(tokens, mask, cutoff, kept, kept_mask)
    bind(&ones, result, b"mask", True)
    ones_found[0] += count_flags(ones.column, 0, ones.column.size)
    return result


cdef Py_ssize_t ones_in_runs(ModelSteps steps, ModelSteps mask, int64_t cutoff):
    """Ones of the effective mask of runs under a mask of runs (None: all ones); costs the runs."""
    cdef Py_ssize_t ones = 0, left = 0, both
    cdef list masked = [(1, len(steps))] if mask is None else mask.runs()
    cdef Py_ssize_t at = -1
    for step, count in steps.runs():
        while count:
            if not left:
                at += 1
                left = masked[at][1]
            both = min(<Py_ssize_t> count, left)
            if step >= cutoff and masked[at][0]:
                ones += both
            left -= both
            count -= both
    return ones


def trainable_masks(list states, list members, bint rule_applies, train_step, token_stale_threshold, *,
                    bint count_only=False):
    """Masks a group trains with, and the number of tokens that train.

    Parameters
    ----------
    states : list of RolloutState or alike
    members : list of Member
        Their numbers.
    rule_applies : bool
        Whether the token rule applies to the group.
    train_step : int
    token_stale_threshold : int or None
    count_only : bool
        Make no masks. What is in runs is not expanded then.

    Returns
    -------
    masks : list
        For each member the mask to write, a list where it had one; None where it keeps its own.
    n_trainable : int
    """
    cdef Member member
    cdef bint applies
    cdef Py_ssize_t position, ones = 0
    cdef int64_t fresh = oldest_fresh_step(as_train_step(train_step), as_token_threshold(token_stale_threshold))
    cdef int64_t model = oldest_fresh_step(as_train_step(train_step), as_token_threshold(None))
    cdef list masks = []
    if len(states) != len(members):
        raise ValueError(f"{len(states)} states, {len(members)} members")
    for position in range(len(states)):
        state = states[position]
        member = members[position]
        applies = rule_applies and member.newest_trainable >= 0
        if not applies and not member.others:
            masks.append(None)
            ones += member.trainable
            continue
        old = state.response_mask
        steps = state.response_model_steps
        if count_only and type(steps) is ModelSteps and (old is None or type(old) is ModelSteps):
            ones += ones_in_runs(steps, old, fresh if applies else model)
            masks.append(None)
            continue
        mask = mask_and_ones(steps, old, fresh if applies else model, &ones)
        if count_only:
            masks.append(None)
            continue
        masks.append(mask.tolist() if isinstance(old, list) else mask)
    return masks, ones

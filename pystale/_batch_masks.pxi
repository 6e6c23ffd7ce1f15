"""The masks of many responses written into one array (text of _objects.pyx)."""


cdef object masked_response(state, Py_ssize_t at):
    """Steps, mask and number of tokens of a response; steps of 0 stand in where it has none."""
    ids = state.response_ids
    mask = state.response_mask
    steps = state.response_model_steps
    cdef Py_ssize_t stamped = entries_of(steps)
    cdef Py_ssize_t tokens = stamped if ids is None else len(ids)
    if stamped and stamped != tokens:
        raise ValueError(f"response {at}: response_model_steps has {stamped} entries, response_ids has {tokens}; "
                         "one entry per response token is required")
    if not stamped:
        steps = ModelSteps.from_runs([(0, tokens)]) if tokens else ModelSteps()
    if mask is not None and entries_of(mask) != tokens:
        raise ValueError(f"response {at}: response_mask has {entries_of(mask)} entries, the response has {tokens} "
                         "tokens; one entry per response token is required")
    return steps, mask, tokens


cdef tuple bind_response(Argument* tokens, Argument* mask, steps, given):
    """Points the two at what they read, and returns the objects to be kept for as long."""
    tokens[0].clear()
    mask[0].clear()
    kept = bind(tokens, steps, b"response_model_steps", False)
    kept_mask = None if given is None else bind(mask, given, b"response_mask", True)
    require_flat(tokens[0])
    if given is not None:
        require_flat(mask[0])
    return kept, kept_mask


cdef int check_response(steps, given) except -1:
    """Refuses what `fill_mask` would, before anything is written."""
    cdef Argument tokens, mask
    kept, kept_mask = bind_response(&tokens, &mask, steps, given)
    with cython.critical_section(kept, kept_mask):
        check_lists(tokens, mask)
        if tokens.in_memory and tokens.view.element == Element.u64:
            check_entries(tokens.column)
    return 0


def read_responses(states):
    """Steps, mask and number of tokens of every response, all of them checked.

    Parameters
    ----------
    states : iterable of RolloutState or alike
        Their ``response_ids``, ``response_mask`` and ``response_model_steps`` are read.

    Returns
    -------
    list of (steps, mask, int)

    Raises
    ------
    TypeError, ValueError
        For lengths that differ and entries that are not integers, naming the position of the response.
    """
    cdef list responses = []
    cdef Py_ssize_t at
    for at, state in enumerate(states):
        response = masked_response(state, at)
        steps, mask, _ = response
        try:
            check_response(steps, mask)
        except (TypeError, ValueError) as refusal:
            raise type(refusal)(f"response {at}: {refusal}") from refusal
        responses.append(response)
    return responses


def write_responses(list responses, out, one, *, bint left=False):
    """Write which tokens a model generated and the mask lets count, for many responses at once.

    Parameters
    ----------
    responses : list of (steps, mask, int)
        From `read_responses`.
    out : ndarray of an unsigned dtype, shape (responses, length) or (tokens,)
        A table gets a row per response, filled up with 0; otherwise the responses are laid end to end. Entries of a row
        lie side by side.
    one : int
        The entry of a token that counts, of the others it is 0. Other dtypes are written as the bits of their 1.
    left : bool
        Fill rows up on the left.

    Raises
    ------
    ValueError
        `out` shares memory with an argument. Nothing is written then.
    """
    cdef Argument tokens, mask
    cdef ArrayView target
    cdef Layout flags
    cdef Py_ssize_t count, start, width, at, side_by_side = 1
    cdef uint64_t bits = one
    cdef size_t item
    cdef bint table
    cdef byte* place
    arrays.view(<PyObject*> out, &target)
    table = target.layout.axes == 2
    item = target.layout.item_size
    for at, (steps, given, _) in enumerate(responses):
        bind_response(&tokens, &mask, steps, given)
        if overlaps(target.layout, tokens) or overlaps(target.layout, mask):
            raise ValueError(f"out shares memory with the mask or the steps of response {at}; it must not")
    longest = max([count for _, _, count in responses], default=0)
    buffer = np.empty(0 if item == 1 else longest, np.uint8)
    flags.item_size = 1
    flags.axes = 1
    flags.shape = &count
    flags.strides = &side_by_side
    place = target.layout.data
    for at, (steps, given, n) in enumerate(responses):
        count = n
        width, start = count, 0
        if table:
            place = target.layout.data + at * target.layout.strides[0]
            width = target.layout.shape[1]
            start = width - count if left else 0
        flags.data = place + start * item if item == 1 else <byte*> <size_t> buffer.ctypes.data
        kept, kept_mask = bind_response(&tokens, &mask, steps, given)
        with cython.critical_section(kept, kept_mask):
            fill_mask(tokens, mask, 0, flags)
        if item > 1:
            spread(<uint8_t*> flags.data, count, item, bits, place + start * item)
        memset(place, 0, start * item)
        memset(place + (start + count) * item, 0, (width - start - count) * item)
        place += count * item

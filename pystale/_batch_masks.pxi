"""The masks of many responses, written into one array (text of _objects.pyx)."""


@cython.final
@cython.auto_pickle(False)
cdef class Responses:
    """The masks of many responses: all checked when made, then written at once.

    Parameters
    ----------
    states : list of RolloutState or alike
        Their ``response_ids``, ``response_mask`` and ``response_model_steps`` are read; they must not change until the
        masks are written.

    Attributes
    ----------
    tokens : list of int
        Length of every response.

    Raises
    ------
    TypeError, ValueError
        For lengths that differ and entries that are not integers, naming the position of the response.
    """

    cdef readonly list tokens
    cdef list kept  # the objects whose memory is read
    cdef Argument* arguments  # steps and mask of every response

    def __cinit__(self, list states):
        cdef Py_ssize_t at
        self.tokens = []
        self.kept = []
        self.arguments = new_arguments(2 * len(states))
        for at, state in enumerate(states):
            try:
                self.bind(at, state)
            except (TypeError, ValueError) as refusal:
                raise type(refusal)(f"response {at}: {refusal}") from refusal

    def __dealloc__(self):
        delete_arguments(self.arguments)

    cdef int bind(self, Py_ssize_t at, state) except -1:
        cdef Argument* steps_given = &self.arguments[2 * at]
        cdef Argument* mask_given = &self.arguments[2 * at + 1]
        ids = state.response_ids
        mask = state.response_mask
        steps = state.response_model_steps
        cdef Py_ssize_t stamped = entries_of(steps)
        cdef Py_ssize_t tokens = stamped if ids is None else len(ids)
        if stamped and stamped != tokens:
            refuse_length("response_model_steps", stamped, "response_ids", tokens)
        if mask is not None and entries_of(mask) != tokens:
            refuse_length("response_mask", entries_of(mask), "response_model_steps" if ids is None else "response_ids",
                          tokens)
        if not stamped:
            # Steps of 0 stand in where there are none: then the mask alone says which tokens count.
            steps = ModelSteps.from_runs([(0, tokens)] if tokens else [])
        kept = bind(steps_given, steps, b"response_model_steps", False)
        kept_mask = None if mask is None else bind(mask_given, mask, b"response_mask", True)
        require_flat(steps_given[0])
        require_flat(mask_given[0])
        with cython.critical_section(kept, kept_mask):
            check_lists(steps_given[0], mask_given[0])
            if steps_given.in_memory and steps_given.view.element == Element.u64:
                check_entries(steps_given.column)
        self.kept.append(kept)
        self.kept.append(kept_mask)
        self.tokens.append(tokens)
        return 0

    def write(self, out, one, *, bint left=False):
        """Write which tokens a model generated and the mask lets count.

        Parameters
        ----------
        out : ndarray of an unsigned dtype, shape (responses, length) or (tokens,)
            A table gets a row per response, filled up with 0; otherwise the responses are laid end to end. Entries of a
            row lie side by side.
        one : int
            The entry of a token that counts, of the others it is 0. Other dtypes are written as the bits of their 1.
        left : bool
            Fill rows up on the left.

        Raises
        ------
        ValueError
            `out` shares memory with an argument. Nothing is written then.
        """
        cdef ArrayView target
        cdef Layout flags
        cdef Py_ssize_t at, count, width, start, side_by_side = 1
        cdef Py_ssize_t responses = len(self.tokens)
        cdef uint64_t bits = one
        cdef size_t item
        cdef bint table
        cdef byte* place
        arrays.view(<PyObject*> out, &target)
        for at in range(2 * responses):
            if overlaps(target.layout, self.arguments[at]):
                raise ValueError(f"out shares memory with the mask or the steps of response {at // 2}; it must not")
        table = target.layout.axes == 2
        item = target.layout.item_size
        # Wider entries are made of bytes, one response at a time.
        buffer = np.empty(max(self.tokens, default=0) if item > 1 else 0, np.uint8)
        cdef byte* scratch = <byte*> <size_t> buffer.ctypes.data
        flags.item_size = 1
        flags.axes = 1
        flags.shape = &count
        flags.strides = &side_by_side
        place = target.layout.data
        for at in range(responses):
            count = self.tokens[at]
            width, start = count, 0
            if table:
                place = target.layout.data + at * target.layout.strides[0]
                width = target.layout.shape[1]
                start = width - count if left else 0
            flags.data = place + start if item == 1 else scratch
            with cython.critical_section(self.kept[2 * at], self.kept[2 * at + 1]):
                fill_mask(self.arguments[2 * at], self.arguments[2 * at + 1], 0, flags)
            if item > 1:
                spread(<uint8_t*> scratch, count, item, bits, place + start * item)
            memset(place, 0, start * item)
            memset(place + (start + count) * item, 0, (width - start - count) * item)
            place += count * item

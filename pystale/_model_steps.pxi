# ModelSteps: the Python face of Runs (csrc/runs.hpp).


@cython.final
cdef class ModelSteps:
    """Model steps of a response, run-length encoded: 16 bytes for every run of equal steps.

    A response holds one run per weight version it lived through, so a 32k-token response takes a few dozen bytes, and
    every kernel answers in time that grows with the runs. It behaves as a sequence of int that can only grow.

    See Also
    --------
    ModelSteps.from_list : from a list, a tuple or an array.

    Examples
    --------
    >>> import numpy as np
    >>> from pystale import ModelSteps
    >>> steps = ModelSteps.from_list([3, 3, 4])
    >>> steps.append(4, 2)
    >>> steps
    ModelSteps.from_runs([(3, 2), (4, 3)])
    >>> len(steps), steps[-1], steps == [3, 3, 4, 4, 4]
    (5, 4, True)
    >>> np.asarray(steps)
    array([3, 3, 4, 4, 4])
    """

    cdef Runs runs_

    @staticmethod
    def from_list(steps):
        """Encode steps given one by one.

        Parameters
        ----------
        steps : integer array, shape (n,), list or tuple of int, or ModelSteps
            Copied; later changes of `steps` are not seen.

        Returns
        -------
        ModelSteps

        Raises
        ------
        TypeError
            An entry is not an int, or the array has no integer dtype.
        ValueError
            An entry does not fit int64, or the array has not one dimension.
        """
        cdef ModelSteps encoded = ModelSteps()
        encoded.extend(steps)
        return encoded

    @staticmethod
    def from_runs(runs):
        """Build from `(model_step, length)` pairs, the inverse of `runs`. Equal neighbours are merged.

        Parameters
        ----------
        runs : iterable of (int, int)

        Returns
        -------
        ModelSteps

        Examples
        --------
        >>> from pystale import ModelSteps
        >>> list(ModelSteps.from_runs([(3, 2), (4, 1)]))
        [3, 3, 4]
        """
        cdef ModelSteps built = ModelSteps()
        for model_step, length in runs:
            built.append(model_step, length)
        return built

    def append(self, model_step, n=1):
        """Add `n` tokens generated at `model_step` at the end.

        Parameters
        ----------
        model_step : int
            Trainer step whose update produced the weights; negative for tokens no model generated.
        n : int, default 1
            Number of tokens, at least 0.
        """
        cdef int64_t step = as_step(model_step, "model_step")
        cdef int64_t count = as_step(n, "n")
        if count < 0:
            raise ValueError(f"n is {n}; the number of tokens must be at least 0")
        self.runs_.append(step, count)

    def extend(self, steps):
        """Add steps given one by one, of any kind `from_list` takes, at the end. Nothing is added when it raises."""
        cdef Argument argument
        cdef Runs more
        kept = bind(&argument, steps, "steps", False)
        require_flat(argument)
        with cython.critical_section(kept):
            if argument.runs != NULL:
                more = argument.runs[0]
            else:
                more = encode(argument.column)
        self.runs_.append(more)

    def runs(self):
        """The runs, oldest token first.

        Returns
        -------
        list of (int, int)
            `(model_step, length)`; neighbours differ in model step and every length is at least 1.

        Examples
        --------
        >>> from pystale import ModelSteps
        >>> ModelSteps.from_list([3, 3, 4]).runs()
        [(3, 2), (4, 1)]
        """
        # A copy: making tuples can start a garbage collection, which runs other code, which may append.
        cdef Runs now = self.runs_
        cdef RunSpan span = now.runs()
        cdef int64_t start = 0
        cdef size_t i
        pairs = []
        for i in range(span.size()):
            pairs.append((span[i].step, span[i].end - start))
            start = span[i].end
        return pairs

    @property
    def nbytes(self):
        """Bytes the runs take: 16 for each."""
        return self.runs_.runs().size() * sizeof(Run)

    def copy(self):
        """An independent copy."""
        cdef ModelSteps other = ModelSteps()
        other.runs_ = self.runs_
        return other

    def count(self, value, /):
        """Number of tokens of this model step."""
        return sum(length for step, length in self.runs() if step == value)

    def index(self, value, start=0, stop=None, /):
        """Position of the first token of this model step in `[start, stop)`; ValueError when there is none."""
        first, last, _ = slice(start, stop).indices(len(self))
        begin = 0
        for step, length in self.runs():
            at = max(begin, first)
            begin += length
            if step == value and at < min(begin, last):
                return at
        raise ValueError(f"{value!r} is not in these model steps")

    def __len__(self):
        return self.runs_.size()

    def __getitem__(self, key):
        cdef Py_ssize_t size = self.runs_.size()
        cdef Py_ssize_t at
        cdef ModelSteps picked
        if isinstance(key, slice):
            start, stop, step = key.indices(size)
            count = len(range(start, stop, step))
            picked = ModelSteps()
            if count > 0:
                # A stride longer than the sequence picks one token, whatever its length.
                picked.runs_ = self.runs_.slice(start, max(-size, min(step, size)), count)
            return picked
        at = PyNumber_AsSsize_t(key, IndexError)
        if at < 0:
            at += size
        if not 0 <= at < size:
            raise IndexError(f"index {key} is out of range for {size} model steps")
        return self.runs_.runs()[self.runs_.find(at)].step

    def __iter__(self):
        # Over the runs as they are now, so that appending meanwhile is harmless. Also gives the same int object for
        # every token of a run, which is what makes lists made from it fast to read.
        runs = self.runs()
        return itertools.chain.from_iterable(map(itertools.repeat, *zip(*runs))) if runs else iter(())

    def __reversed__(self):
        return iter(self[::-1])

    def __contains__(self, value):
        return any(step == value for step, _ in self.runs())

    def __eq__(self, other):
        cdef Argument argument
        cdef ModelSteps encoded
        if type(other) is ModelSteps:
            return self.runs_ == (<ModelSteps> other).runs_
        if not isinstance(other, (list, tuple, np.ndarray)):
            return NotImplemented
        if (other.size if isinstance(other, np.ndarray) else len(other)) != len(self):
            return False
        try:
            encoded = ModelSteps.from_list(other)
        except (TypeError, ValueError):
            return False
        return self.runs_ == encoded.runs_

    def __array__(self, dtype=None, copy=None):
        cdef Runs now = self.runs_
        cdef Py_ssize_t size = now.size()
        cdef ArrayView view
        if copy is not None and not copy:
            raise ValueError("ModelSteps are run-length encoded; an array of them is always a copy")
        array = arrays.create(Element.i64, False, 1, &size)
        arrays.view(<PyObject*> array, &view)
        decode(now, <int64_t*> view.layout.data)
        if dtype is None or dtype == array.dtype:
            return array
        converted = array.astype(dtype)
        if converted.dtype.kind in "iu" and not np.array_equal(converted, array):
            raise OverflowError(f"a model step does not fit dtype {converted.dtype}")
        return converted

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        return self.copy()

    def __reduce__(self):
        return ModelSteps.from_runs, (self.runs(),)

    def __sizeof__(self):
        return object.__sizeof__(self) + self.runs_.capacity() * sizeof(Run)

    def __repr__(self):
        runs = self.runs()
        if len(runs) > 16:
            shown = f"[{str(runs[:3])[1:-1]}, ..., {str(runs[-3:])[1:-1]}]"
            return f"<ModelSteps of {len(self)} tokens in {len(runs)} runs: {shown}>"
        return f"ModelSteps.from_runs({runs})"


# The public name: what pickle looks up and repr shows.
(<PyTypeObject*> ModelSteps).tp_name = "pystale.ModelSteps"
collections.abc.Sequence.register(ModelSteps)

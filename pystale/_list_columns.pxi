"""Lists of numbers as the columns that files hold, read from the lists in place (text of _objects.pyx)."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact

cdef extern from "<algorithm>" namespace "std":
    void fill_n(int64_t* values, size_t count, int64_t value) noexcept


cdef bint pack_ints(PyObject** items, size_t count, int64_t* values):
    cdef size_t i = 0
    cdef size_t same
    cdef int overflow = 0
    cdef int64_t value = 0
    while i < count:
        if not PyLong_CheckExact(<object> items[i]):
            return False
        if not small_int(items[i], &value):
            value = PyLong_AsLongLongAndOverflow(items[i], &overflow)
            if overflow:
                return False
        values[i] = value
        i += 1
        # The same object is the same int; lists of masks and steps repeat objects in runs.
        if i < count and items[i] == items[i - 1]:
            same = same_objects(items + i, count - i)
            fill_n(values + i, same, value)
            i += same
    return True


cdef bint pack_floats(PyObject** items, size_t count, double* values):
    cdef size_t i
    for i in range(count):
        if not PyFloat_CheckExact(<object> items[i]):
            return False
        values[i] = PyFloat_AS_DOUBLE(<object> items[i])
    return True


cdef bint pack_bools(PyObject** items, size_t count, uint8_t* values):
    cdef size_t i
    for i in range(count):
        if not PyBool_Check(<object> items[i]):
            return False
        values[i] = <object> items[i] is True
    return True


def pack_lists(lists):
    """The values of several lists, end to end, where all are of one kind.

    Runs no code but its own between the first list and the last, so that nothing changes meanwhile.

    Parameters
    ----------
    lists : sequence of list

    Returns
    -------
    kind : {"ints", "floats", "bools"}
        All values are exactly of type int, float or bool. Lists that are all empty are ``ints``.
    values : bytes
        int64, float64 or uint8 in native byte order.
    lengths : list of int
        Entries of each list.
    None
        Instead, where the values are of other types or of several, or an int does not fit int64.

    Raises
    ------
    RuntimeError
        A list changed its length while it was being read; only without a GIL.

    Examples
    --------
    >>> from pystale._objects import pack_lists
    >>> pack_lists([[True, False], [], [True]])
    ('bools', b'\\x01\\x00\\x01', [2, 0, 1])
    >>> pack_lists([[1, 2.0]])
    """
    cdef Py_ssize_t total = 0
    cdef Py_ssize_t size, width
    cdef PyObject** items
    cdef char* target
    cdef bint fits
    cdef list lengths = []
    cdef type kind_of_values = None
    for values in lists:
        if type(values) is not list:
            return None
        with cython.critical_section(values):
            size = PySequence_Fast_GET_SIZE(<PyObject*> values)
            if size and kind_of_values is None:
                kind_of_values = type(<object> PySequence_Fast_ITEMS(<PyObject*> values)[0])
        total += size
        lengths.append(size)
    if kind_of_values is None or kind_of_values is int:
        kind, width = "ints", sizeof(int64_t)
    elif kind_of_values is float:
        kind, width = "floats", sizeof(double)
    elif kind_of_values is bool:
        kind, width = "bools", 1
    else:
        return None
    packed = PyBytes_FromStringAndSize(NULL, total * width)
    target = PyBytes_AS_STRING(packed)
    for values, length in zip(lists, lengths):
        size = length
        with cython.critical_section(values):
            if PySequence_Fast_GET_SIZE(<PyObject*> values) != size:
                raise RuntimeError("a list changed its length while it was being read")
            items = PySequence_Fast_ITEMS(<PyObject*> values)
            if kind_of_values is bool:
                fits = pack_bools(items, size, <uint8_t*> target)
            elif kind_of_values is float:
                fits = pack_floats(items, size, <double*> target)
            else:
                fits = pack_ints(items, size, <int64_t*> target)
        if not fits:
            return None
        target += size * width
    return kind, packed, lengths


def filled_fields(list states, tuple names):
    """The fields that hold something in any of the states.

    Parameters
    ----------
    states : list
        Objects that have these attributes.
    names : tuple of str

    Returns
    -------
    list of (str, list, type or None)
        Name and values, one per state, of every field that is not None in all of them; and the type they all have,
        None where they have several.

    Examples
    --------
    >>> from pystale import RolloutState
    >>> from pystale._objects import filled_fields
    >>> filled_fields([RolloutState(reward=0.5), RolloutState(reward=1.0)], ("response", "reward"))
    [('reward', [0.5, 1.0], <class 'float'>)]
    """
    cdef list found = []
    cdef list values
    cdef bint filled, alike
    for name in names:
        values = []
        filled, alike, kind = False, True, None
        for state in states:
            value = getattr(state, name)
            if value is not None:
                filled = True
            if kind is None:
                kind = type(value)
            elif type(value) is not kind:
                alike = False
            values.append(value)
        if filled:
            found.append((name, values, kind if alike else None))
    return found

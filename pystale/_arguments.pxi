# Reading the arguments of the kernels: C++ declarations, lists walked in place, arrays through the table of _core.

from cpython.buffer cimport PyObject_CheckBuffer
from cpython.bool cimport PyBool_Check
from cpython.long cimport PyLong_Check, PyLong_CheckExact
from cpython.number cimport PyNumber_AsSsize_t, PyNumber_Index
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memset

cdef extern from "Python.h":
    bint PyList_Check(PyObject* object) noexcept
    bint PyTuple_Check(PyObject* object) noexcept
    Py_ssize_t PySequence_Fast_GET_SIZE(PyObject* object) noexcept
    PyObject** PySequence_Fast_ITEMS(PyObject* object) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject* object, int* overflow) noexcept

cdef extern from "bindings_arguments.hpp" namespace "pystale::loops":
    void repeat(int64_t value, size_t count, int64_t* out) noexcept
    void spread(const uint8_t* flags, size_t count, size_t item_size, uint64_t one, byte* out) noexcept

cdef extern from "bindings_arguments.hpp" namespace "pystale":
    const int kAllTheSame
    ctypedef int (*Reader)(void* source, size_t first, size_t count, int64_t* values) except -1

    cdef cppclass byte "std::byte":
        pass

    cdef enum class Element(unsigned char):
        u8
        i64
        u64

    cdef cppclass Column:
        const char* name
        size_t size
        Element element
        Reader read

    cdef cppclass Layout:
        byte* data
        size_t item_size
        int axes
        const Py_ssize_t* shape
        const Py_ssize_t* strides

    cdef cppclass Summary:
        int64_t oldest
        int64_t newest_trainable
        size_t trainable
        size_t model

    cdef cppclass BatchResult:
        byte* staleness
        Py_ssize_t staleness_stride
        uint8_t* expired
        Py_ssize_t expired_stride

    cdef struct Run:
        int64_t step
        int64_t end

    cdef cppclass RunSpan "std::span<const pystale::Run>":
        size_t size() noexcept
        const Run& operator[](size_t) noexcept

    cdef cppclass Runs:
        size_t size() noexcept
        size_t capacity() noexcept
        RunSpan runs() noexcept
        void append(int64_t step, size_t count) except +
        void append(const Runs& other) except +
        size_t find(size_t at) noexcept
        Runs slice(size_t start, Py_ssize_t stride, size_t count) except +
        bint operator==(const Runs&) noexcept

    int64_t oldest_fresh_step(int64_t train_step, int64_t threshold) noexcept
    int64_t staleness_of "pystale::seq_staleness"(int64_t oldest, int64_t train_step) noexcept
    size_t entries(const Layout& layout) noexcept
    bint may_overlap(const Layout& a, const Layout& b) noexcept
    bint same_entries(const Layout& a, const Layout& b) noexcept
    bint entries_are_distinct(const Layout& layout) noexcept
    void check_offsets(const Column& offsets, size_t tokens) except +
    size_t count_flags(const Column& mask, size_t first, size_t count) except +
    Runs encode(const Column& steps) except +
    void decode(const Runs& runs, int64_t* steps) noexcept

cdef extern from "bindings_arguments.hpp" namespace "pystale::bindings":
    cdef enum class ArrayKind(int):
        integers
        other_dtype
        not_an_array

    cdef cppclass ArrayView:
        Layout layout
        Element element
        bint swapped
        bint boolean
        bint writable

    cdef cppclass ArrayTable:
        ArrayKind (*view)(PyObject* object, ArrayView* view) noexcept
        object (*create)(Element element, bint boolean, int axes, const Py_ssize_t* shape)

    cdef cppclass ListCursor:
        PyObject* items
        Py_ssize_t size
        PyObject* last
        int64_t value
        bint is_mask

    cdef cppclass Argument:
        bint given
        const Runs* runs
        bint in_memory
        ArrayView view
        ListCursor cursor
        Column column

    Argument* new_arguments(size_t count) except +
    void delete_arguments(Argument* arguments) noexcept
    size_t same_objects(PyObject** items, size_t count) noexcept
    bint small_int(PyObject* object, int64_t* value) noexcept
    void use_array(Argument& argument) noexcept
    void use_runs(Argument& argument, const Runs& runs) noexcept
    void use_list(Argument& argument, Reader read) noexcept
    size_t kGilReleaseTokens
    int64_t oldest_step(const Argument& steps) except +
    bint has_trainable(const Argument& steps, const Argument& mask, int64_t cutoff) except +
    Summary summary_of "pystale::bindings::summarise"(const Argument& steps, const Argument& mask) except +
    void fill_mask(const Argument& steps, const Argument& mask, int64_t cutoff, const Layout& out) except +
    void fill_batch "pystale::bindings::refresh_batch"(
        const Argument& steps, const Argument& mask, const Argument& offsets, int64_t train_step,
        int64_t stale_threshold, int64_t token_stale_threshold, const BatchResult& result) except +
    void check_entries(const Column& column) except +

cdef const ArrayTable* arrays = <const ArrayTable*> PyCapsule_GetPointer(_core._arrays, "pystale._core._arrays")

cdef class ModelSteps

# Exactly these scalar types are read from lists: a subclass could run code of its own in __index__.
cdef frozenset INTEGER_SCALARS = frozenset(np.dtype(code).type for code in "bBhHiIlLqQ")
cdef type BOOL_SCALAR = np.bool_


cdef str described(object value):
    """The value and its type, for an error message. Only built-in values are shown: others would run their own code."""
    name = type(value).__name__
    if value is None or PyBool_Check(value):
        return repr(value)
    if type(value) in (float, str):
        return f"{value!r:.60} ({name})"
    return f"of type {name}"


cdef int64_t list_entry(Argument* argument, PyObject* item, size_t at) except? -1:
    """The value of one entry; for a mask, zero or not zero.

    Runs no code but the interpreter's and NumPy's own, and makes nothing that the garbage collector tracks: a collection
    runs other code, which could change the list.
    """
    cdef int overflow = 0
    cdef int64_t value
    cdef bint is_mask = argument.cursor.is_mask
    entry = <object> item
    kind = type(entry)
    if PyLong_Check(entry) and (is_mask or not PyBool_Check(entry)):
        pass
    elif kind in INTEGER_SCALARS:
        entry = PyNumber_Index(entry)
    elif is_mask and kind is BOOL_SCALAR:
        return entry is np.True_
    else:
        wanted = "an int or a bool" if is_mask else "an int"
        raise TypeError(f"{argument.column.name.decode()}[{at}] is {described(entry)}; {wanted} is required")
    value = PyLong_AsLongLongAndOverflow(<PyObject*> entry, &overflow)
    if overflow and is_mask:
        return 1
    if overflow:
        raise ValueError(f"{argument.column.name.decode()}[{at}] does not fit int64; values from -2**63 to 2**63 - 1 are allowed")
    return value


cdef int read_list(void* source, size_t first, size_t count, int64_t* values) except -1:
    cdef Argument* argument = <Argument*> source
    cdef ListCursor* cursor = &argument.cursor
    cdef PyObject* last = cursor.last
    cdef int64_t value = cursor.value
    cdef PyObject* item
    cdef PyObject** items
    cdef size_t i = 0
    cdef size_t same
    if PySequence_Fast_GET_SIZE(cursor.items) != cursor.size:
        raise RuntimeError(f"{argument.column.name.decode()} changed its length while it was being read")
    items = PySequence_Fast_ITEMS(cursor.items) + first
    while i < count:
        item = items[i]
        if item == last:
            same = same_objects(items + i, count - i)
            if same == count:
                values[0] = value
                return kAllTheSame
            repeat(value, same, values + i)
            i += same
            continue
        if not PyLong_CheckExact(<object> item) or not small_int(item, &value):
            value = list_entry(argument, item, first + i)
        last = item
        values[i] = value
        i += 1
    cursor.last = last
    cursor.value = value
    return 0


def tensor_memory(tensor, str name, *, bint floats=False):
    """The array over a torch tensor's memory; anything else comes back as it is.

    Torch is looked up among the imported modules, never imported.

    Parameters
    ----------
    tensor : object
    name : str
        What the caller calls it, for the error message.
    floats : bool
        Whether floating point is of use to the caller.

    Raises
    ------
    TypeError
        The memory cannot be used as it is, and what the caller can do about it.
    """
    torch = sys.modules.get("torch")
    kind = getattr(torch, "Tensor", None)
    if kind is None or not isinstance(tensor, kind):
        return tensor
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as refusal:
        reason = refusal
    if not floats and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        message = f"has dtype {tensor.dtype}; an integer or bool dtype is required, nothing is converted"
    elif tensor.device.type != "cpu":
        message = f"is on device {tensor.device}; memory of the CPU is required, .cpu() copies it there"
    elif tensor.layout is not torch.strided:
        message = f"has layout {tensor.layout}; a dense tensor is required, .to_dense() makes one"
    elif tensor.requires_grad:
        message = "requires grad; a tensor outside the graph is required, .detach() gives one over the same memory"
    elif tensor.is_neg():
        message = "is a negated view that was not computed yet; .resolve_neg() makes a tensor of it"
    else:
        message = f"of dtype {tensor.dtype} cannot be used as an array: {reason}"
    raise TypeError(f"{name} {message}") from reason


cdef object bind(Argument* argument, object given, const char* name, bint is_mask):
    """Points `argument` at `given` and returns the object whose memory is read, to be kept for as long."""
    cdef ArrayKind kind
    cdef PyObject* pointer = <PyObject*> given
    argument.column.name = name
    if PyList_Check(pointer) or PyTuple_Check(pointer):
        argument.cursor.items = pointer
        argument.cursor.size = PySequence_Fast_GET_SIZE(pointer)
        argument.cursor.is_mask = is_mask
        use_list(argument[0], read_list)
        return given
    if type(given) is ModelSteps:
        use_runs(argument[0], (<ModelSteps> given).runs_)
        return given
    kind = arrays.view(pointer, &argument.view)
    if kind == ArrayKind.not_an_array:
        given = tensor_memory(given, name.decode())
        kind = arrays.view(<PyObject*> given, &argument.view)
    if kind == ArrayKind.not_an_array and (PyObject_CheckBuffer(given) or hasattr(type(given), "__array__")):
        given = np.asarray(given)
        kind = arrays.view(<PyObject*> given, &argument.view)
    if kind == ArrayKind.not_an_array:
        raise TypeError(f"{name.decode()} is {described(given)}; an integer array, a list or tuple of int, or "
                        "ModelSteps is required")
    if kind == ArrayKind.other_dtype or (argument.view.boolean and not is_mask):
        allowed = "an integer or bool dtype" if is_mask else "an integer dtype"
        raise TypeError(f"{name.decode()} has dtype {given.dtype}; {allowed} is required, nothing is converted")
    use_array(argument[0])
    return given


cdef tuple shape_tuple(int axes, const Py_ssize_t* shape):
    return tuple([shape[axis] for axis in range(axes)])


cdef tuple shape_of(const Argument& argument):
    if not argument.in_memory:
        return (argument.column.size,)
    return shape_tuple(argument.view.layout.axes, argument.view.layout.shape)


cdef int require_flat(const Argument& argument) except -1:
    if argument.in_memory and argument.view.layout.axes != 1:
        raise ValueError(f"{argument.column.name.decode()} has shape {shape_of(argument)}; one dimension is required")
    return 0


cdef bint is_flat(const Argument& argument) noexcept:
    return not argument.in_memory or argument.view.layout.axes == 1


cdef int require_same_shape(const Argument& steps, const Argument& mask) except -1:
    if not mask.given:
        return 0
    if is_flat(steps) and is_flat(mask):
        if mask.column.size != steps.column.size:
            raise ValueError(f"response_mask has {mask.column.size} entries, steps has {steps.column.size}; "
                             "one mask entry per model step is required")
    elif shape_of(steps) != shape_of(mask):
        raise ValueError(f"response_mask has shape {shape_of(mask)}, steps has {shape_of(steps)}; "
                         "equal shapes are required")
    return 0


cdef int64_t as_int64(object value, str name, int* overflow) except? -1:
    if not PyLong_Check(value) or PyBool_Check(value):
        if not isinstance(value, np.integer):
            raise TypeError(f"{name} is {described(value)}; an int is required")
        value = int(value)
    return PyLong_AsLongLongAndOverflow(<PyObject*> value, overflow)


cdef int64_t as_step(object value, str name) except? -1:
    cdef int overflow = 0
    cdef int64_t step = as_int64(value, name, &overflow)
    if overflow:
        raise ValueError(f"{name} does not fit int64; values from -2**63 to 2**63 - 1 are allowed")
    return step


cdef int64_t as_train_step(object value) except -1:
    cdef int64_t step = as_step(value, "train_step")
    if step < 1:
        raise ValueError(f"train_step is {value}; train steps are counted from 1")
    return step


cdef int64_t as_threshold(object value, str name) except -1:
    """A threshold too large for int64 is as good as the largest: no staleness reaches either."""
    cdef int overflow = 0
    cdef int64_t threshold = as_int64(value, name, &overflow)
    if threshold < 0 and overflow == 0 or overflow < 0:
        raise ValueError(f"{name} is {value}; at least 0 trainer steps is required")
    return INT64_MAX if overflow else threshold


cdef int64_t as_token_threshold(object value) except -1:
    """None turns the rule off, which is what a threshold out of reach does."""
    return INT64_MAX if value is None else as_threshold(value, "token_stale_threshold")


cdef bint overlaps(const Layout& layout, const Argument& argument) noexcept:
    return argument.in_memory and may_overlap(layout, argument.view.layout)


cdef int check_lists(const Argument& steps, const Argument& mask) except -1:
    """Refuses a bad entry before anything is written to an array of the caller's."""
    if steps.cursor.items != NULL:
        check_entries(steps.column)
    if mask.cursor.items != NULL:
        check_entries(mask.column)
    return 0


cdef enum OutDtype:
    flags  # uint8 or bool
    bools
    int64s


cdef object bind_out(ArrayView* view, object out, str name, OutDtype wanted, int axes, const Py_ssize_t* shape):
    """Points `view` at the memory of `out`, an array or a tensor, and returns the array, to be kept for as long."""
    cdef ArrayKind kind = arrays.view(<PyObject*> out, view)
    dtype = "uint8 or bool" if wanted == OutDtype.flags else "bool" if wanted == OutDtype.bools else "int64"
    if kind == ArrayKind.not_an_array:
        out = tensor_memory(out, name)
        kind = arrays.view(<PyObject*> out, view)
    if kind == ArrayKind.not_an_array:
        raise TypeError(f"{name} is {described(out)}; an array or tensor of {dtype} is required")
    if (kind == ArrayKind.other_dtype or view.swapped
            or view.element != (Element.i64 if wanted == OutDtype.int64s else Element.u8)
            or (wanted == OutDtype.bools and not view.boolean)):
        raise TypeError(f"{name} has dtype {out.dtype}; {dtype} is required")
    if view.layout.axes != axes or memcmp(view.layout.shape, shape, axes * sizeof(Py_ssize_t)) != 0:
        raise ValueError(f"{name} has shape {out.shape}; {shape_tuple(axes, shape)} is required")
    if not view.writable:
        raise ValueError(f"{name} is read-only; a writable array is required")
    if not entries_are_distinct(view.layout):
        raise ValueError(f"entries of {name} share memory (strides {out.strides}); every entry must have its own")
    return out


cdef object new_mask(const Argument& steps, const Argument& mask, int64_t cutoff, object kept, object kept_mask):
    cdef ArrayView target
    cdef Py_ssize_t size = steps.column.size
    if steps.in_memory:
        result = arrays.create(Element.u8, False, steps.view.layout.axes, steps.view.layout.shape)
    else:
        result = arrays.create(Element.u8, False, 1, &size)
    arrays.view(<PyObject*> result, &target)
    with cython.critical_section(kept, kept_mask):
        fill_mask(steps, mask, cutoff, target.layout)
    return result

#pragma once
// One argument of a kernel, however it came, and the kernels over any mix of them.
//
// Shared by the two modules: _core (pybind11) knows arrays and lends _objects (Cython) the ArrayTable; _objects knows
// lists and ModelSteps. Needs Python.h only, so that neither has to know the other's tools.

#include <Python.h>
#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#include "layout.hpp"
#include "loops.hpp"
#include "runs.hpp"

namespace pystale::bindings {

// An integer or bool array. shape and strides point into the array object.
struct ArrayView {
    Layout layout;
    Element element = Element::i64;
    bool swapped = false;
    bool boolean = false;
    bool writable = false;
};

enum class ArrayKind : int { integers = 0, other_dtype = 1, not_an_array = 2 };

// What _core lends to _objects, through the capsule `pystale._core._arrays`, so that no module is compiled against
// NumPy's headers. Both functions need the GIL.
struct ArrayTable {
    // Fills `view` for integer and bool arrays. Never fails with a Python error.
    ArrayKind (*view)(PyObject* object, ArrayView* view);
    // A new C-contiguous array of u8, i64 or, for `boolean`, bool. NULL with a Python error when there is no memory.
    PyObject* (*create)(Element element, bool boolean, int axes, const Py_ssize_t* shape);
};

// A list or tuple being read in place.
struct ListCursor {
    PyObject* items = nullptr;  // borrowed
    Py_ssize_t size = 0;        // when the call began; a change since is an error
    PyObject* last = nullptr;   // the object read last, and its value: lists stamped with model steps repeat the same
    std::int64_t value = 0;     // object in long runs, and the same object is the same number
    bool is_mask = false;
};

// The value of an exact int of one digit (below 2**30 in size), as every real model step is. False for larger ones.
// Saves the call into the interpreter, which is half the cost of reading a list of distinct ints.
inline bool small_int(PyObject* object, std::int64_t* value) noexcept {
    auto* const number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
    if (!PyUnstable_Long_IsCompact(number)) return false;
    *value = PyUnstable_Long_CompactValue(number);
#else
    const Py_ssize_t digits = Py_SIZE(number);  // negative for negative numbers
    if (digits < -1 || digits > 1) return false;
    *value = digits == 0 ? 0 : static_cast<std::int64_t>(digits) * number->ob_digit[0];
#endif
    return true;
}

// Entries from items[0] on that are the same object, at least 1.
inline std::size_t same_objects(PyObject* const* items, std::size_t count) noexcept {
    return loops::same_words(reinterpret_cast<const std::uintptr_t*>(items), count);
}

// Column::source points into the argument itself, so it must stay where it is.
struct Argument {
    Argument() = default;
    Argument(const Argument&) = delete;
    Argument& operator=(const Argument&) = delete;

    bool given = false;          // false: None
    const Runs* runs = nullptr;  // set for ModelSteps
    bool in_memory = false;      // set for arrays; `view` is filled
    ArrayView view;
    ListCursor cursor;
    Column column;  // of every kind, except an array whose number of axes is not 1

    [[nodiscard]] const Column* mask() const noexcept { return given ? &column : nullptr; }
};

inline Argument* new_arguments(std::size_t count) { return new Argument[count]; }
inline void delete_arguments(Argument* arguments) noexcept { delete[] arguments; }

inline void use_array(Argument& argument) noexcept {
    argument.given = true;
    argument.in_memory = true;
    argument.column.data = argument.view.layout.data;
    argument.column.element = argument.view.element;
    argument.column.swapped = argument.view.swapped;
    if (argument.view.layout.axes == 1) {
        argument.column.size = static_cast<std::size_t>(argument.view.layout.shape[0]);
        argument.column.stride = argument.view.layout.strides[0];
    }
}

inline void use_runs(Argument& argument, const Runs& runs) noexcept {
    const char* const name = argument.column.name;
    argument.given = true;
    argument.runs = &runs;
    argument.column = as_column(runs);
    argument.column.name = name;
}

inline void use_list(Argument& argument, Reader read) noexcept {
    argument.given = true;
    argument.column.size = static_cast<std::size_t>(argument.cursor.size);
    argument.column.read = read;
    argument.column.source = &argument;
}

// The GIL is let go for calls over at least this many tokens, about 0.1 ms of work. Below that it would cost more than
// it gives: taking it back means waiting up to a switch interval (5 ms) behind any thread that computes.
inline constexpr std::size_t kGilReleaseTokens = std::size_t{1} << 20;

// Lets the GIL go while arrays are read. Never while a list or ModelSteps is: other threads may change those.
class GilRelease {
  public:
    GilRelease(const Argument& steps, const Argument& mask, std::size_t tokens) {
        const bool arrays_only = steps.in_memory && (!mask.given || mask.in_memory);
        if (arrays_only && tokens >= kGilReleaseTokens) state_ = PyEval_SaveThread();
    }
    ~GilRelease() {
        if (state_) PyEval_RestoreThread(state_);
    }
    GilRelease(const GilRelease&) = delete;
    GilRelease& operator=(const GilRelease&) = delete;

  private:
    PyThreadState* state_ = nullptr;
};

// ModelSteps as they were when the call began. Making the result or turning a foreign object into an array can run
// other code, which may append to them. Throws std::runtime_error.
inline const Runs& unchanged(const Argument& steps) {
    if (steps.runs->size() != steps.column.size) {
        throw std::runtime_error(std::string(steps.column.name) + " changed its length while it was being read");
    }
    return *steps.runs;
}

// The kernels over any kind of steps. All of them throw what the readers throw.

inline std::int64_t oldest_step(const Argument& steps) {
    if (steps.runs) return oldest_step(unchanged(steps));
    const GilRelease release(steps, Argument(), steps.column.size);
    return oldest_step(steps.column);
}

inline bool has_trainable(const Argument& steps, const Argument& mask, std::int64_t cutoff) {
    if (steps.runs) return has_trainable(unchanged(steps), mask.mask(), cutoff);
    const GilRelease release(steps, mask, steps.column.size);
    return has_trainable(steps.column, mask.mask(), cutoff);
}

inline Summary summarise(const Argument& steps, const Argument& mask) {
    if (steps.runs) return summarise(unchanged(steps), mask.mask(), 0, steps.column.size);
    const GilRelease release(steps, mask, steps.column.size);
    return summarise(steps.column, mask.mask(), 0, steps.column.size);
}

inline void fill_mask(const Argument& steps, const Argument& mask, std::int64_t cutoff, const Layout& out) {
    const std::size_t tokens = entries(out);
    if (tokens == 0) return;
    if (steps.in_memory && (!mask.given || mask.in_memory)) {
        const GilRelease release(steps, mask, tokens);
        return fill_mask(steps.column, steps.view.layout, mask.mask(), mask.view.layout, cutoff, out);
    }
    auto* const flags = reinterpret_cast<std::uint8_t*>(out.data);
    if (steps.runs) return fill_mask(unchanged(steps), mask.mask(), cutoff, flags, out.strides[0]);
    fill_mask(steps.column, mask.mask(), cutoff, flags, out.strides[0]);
}

inline void refresh_batch(const Argument& steps, const Argument& mask, const Argument& offsets, std::int64_t train_step,
                          std::int64_t stale_threshold, std::int64_t token_stale_threshold, const BatchResult& result) {
    if (steps.runs) {
        return refresh_batch(unchanged(steps), mask.mask(), offsets.column, train_step, stale_threshold,
                             token_stale_threshold, result);
    }
    // Offsets kept in a list or ModelSteps hold the GIL as well.
    const GilRelease release(steps, mask, offsets.in_memory ? steps.column.size : 0);
    refresh_batch(steps.column, mask.mask(), offsets.column, train_step, stale_threshold, token_stale_threshold,
                  result);
}

// Reads every entry, so that a bad one is reported before anything is written.
inline void check_entries(const Column& column) {
    std::int64_t values[kBlock];
    for (std::size_t first = 0; first < column.size; first += kBlock) {
        load_steps(column, first, column.size - first < kBlock ? column.size - first : kBlock, values);
    }
}

}  // namespace pystale::bindings

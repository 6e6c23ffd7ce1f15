// The index as a Python class. Every call holds the GIL: it lasts microseconds, and the GIL keeps calls apart.

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings.hpp"
#include "index.hpp"

namespace py = pybind11;

namespace pystale::bindings {
namespace {

using GroupId = StalenessIndex::GroupId;
using Integer = std::int64_t;

// Any sequence or iterable of integers. Not pybind11's own caster: its refusal names neither the entry nor its value.
std::vector<Integer> read_integers(py::handle values, const char* name) {
    const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), ""));
    if (!fast) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
        PyErr_Clear();
        throw py::type_error(std::string(name) + " must be a sequence of integers, got " +
                             Py_TYPE(values.ptr())->tp_name);
    }
    std::vector<Integer> integers;
    integers.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(fast.ptr())));
    // The size is asked every time and the entry is held: a foreign __index__ may change the list.
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
        auto entry = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(fast.ptr(), i));
        const auto at = [&] { return std::string(name) + "[" + std::to_string(i) + "]"; };
        if (!PyLong_CheckExact(entry.ptr())) {
            if (!PyIndex_Check(entry.ptr()))
                throw py::type_error(at() + " must be an integer, got " + Py_TYPE(entry.ptr())->tp_name);
            entry = py::reinterpret_steal<py::object>(PyNumber_Index(entry.ptr()));
            if (!entry) throw py::error_already_set();
        }
        int overflow = 0;
        const long long integer = PyLong_AsLongLongAndOverflow(entry.ptr(), &overflow);
        if (overflow != 0) throw py::value_error(at() + " does not fit in 64 bits: " + std::string(py::str(entry)));
        if (integer == -1 && PyErr_Occurred()) throw py::error_already_set();
        integers.push_back(integer);
    }
    return integers;
}

// A list of f(value) for each value, without growing it.
template <typename Values, typename F>
py::list to_list(const Values& values, F&& f) {
    py::list list(values.size());
    Py_ssize_t i = 0;
    for (const auto& value : values) PyList_SET_ITEM(list.ptr(), i++, py::object(f(value)).release().ptr());
    return list;
}

template <typename Values>
py::list to_list(const Values& values) {
    return to_list(values, [](Integer value) { return py::int_(value); });
}

py::list due(const StalenessIndex& index, Integer train_step, Integer statuses, std::optional<Integer> task) {
    std::vector<Integer> positions;
    return to_list(index.due(train_step, statuses, task), [&](GroupId group) {
        index.due_members(group, train_step, positions);
        return py::make_tuple(group, to_list(positions));
    });
}

py::list take(StalenessIndex& index, Integer task, Integer status, Integer n) {
    const std::vector<GroupId> groups = index.first(task, status, n);
    // The answer is complete before the first group leaves, so running out of memory loses none.
    py::list taken = to_list(groups);
    for (const GroupId group : groups) index.remove(group);
    return taken;
}

bool contains(const StalenessIndex& index, const py::object& group) {
    if (!PyLong_Check(group.ptr())) return false;
    int overflow = 0;
    const long long id = PyLong_AsLongLongAndOverflow(group.ptr(), &overflow);
    return overflow == 0 && index.contains(id);
}

}  // namespace

void bind_index(py::module_& m) {
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const UnknownGroup& unknown) {
            PyErr_SetString(PyExc_KeyError, unknown.what());
        }
    });

    using Index = StalenessIndex;
    py::class_<Index>(m, "StalenessIndex", R"(Which groups expire at a trainer step, and which come next.

Per group and member two integers are kept, its oldest model step and its newest
semantically trainable one, so a member's deadline is known when it is put:
``1 + min(oldest + stale_threshold, newest_trainable + token_stale_threshold)``. A term is
absent when its step is -1 or the token threshold is None; a member without terms, or whose
deadline lies past ``2**63 - 1``, has no deadline. A group is due at ``T`` iff
``T >=`` the earliest deadline of its members.

Groups of a pool ``(task, status)`` are ordered by key, ascending, then by arrival; key None
comes last. Key and arrival are the caller's: the oldest model step for stalest first, minus it
for freshest first, 0 for first in, first out. Arrival numbers are unique per task.

Steps, keys, arrivals and ``train_step`` are 64-bit signed integers; statuses are 0 to 6; a
group id is never issued twice. Not thread-safe: the caller keeps calls apart.

Raises
------
KeyError
    The group was never inserted, or was taken or removed.
IndexError
    No such task, or no such member of the group.
ValueError
    A status outside 0 to 6, a threshold below 1, ``n < 0``, no member, or lists of
    different lengths. Whatever is raised, nothing has changed.

Examples
--------
>>> from pystale._core import StalenessIndex
>>> index = StalenessIndex()
>>> task = index.add_task(3, 1)
>>> group = index.insert(task, 1, 4, 0, oldest=[4, 5], newest_trainable=[6, 5])
>>> index.deadline(group)
7
>>> index.due(6, 1 << 1)
[]
>>> index.due(7, 1 << 1) == [(group, [1])]
True
)")
        .def(py::init<>())
        .def(
            "add_task",
            [](Index& index, Integer stale, std::optional<Integer> token) { return index.add_task({stale, token}); },
            py::arg("stale_threshold"), py::arg("token_stale_threshold"),
            "Number of a new task: 0, 1, 2, ... Thresholds in trainer steps, >= 1; None: the token rule is off.")
        .def(
            "set_thresholds",
            [](Index& index, Integer task, Integer stale, std::optional<Integer> token) {
                index.set_thresholds(task, {stale, token});
            },
            py::arg("task"), py::arg("stale_threshold"), py::arg("token_stale_threshold"),
            "Recompute the deadlines of this task; does nothing when nothing changes.")
        .def(
            "insert",
            [](Index& index, Integer task, Integer status, std::optional<Integer> key, Integer arrival,
               const py::object& oldest, const py::object& newest_trainable) {
                const std::vector<Integer> oldest_steps = read_integers(oldest, "oldest");
                return index.insert(task, status, key, arrival, oldest_steps,
                                    read_integers(newest_trainable, "newest_trainable"));
            },
            py::arg("task"), py::arg("status"), py::arg("key"), py::arg("arrival"), py::arg("oldest"),
            py::arg("newest_trainable"),
            "Store a group, one entry per member in both lists, negative for none; returns its id.")
        .def("due", due, py::arg("train_step"), py::arg("statuses"), py::arg("task") = py::none(),
             "``(group, positions of its due members)`` for each group due at ``train_step``, by arrival.\n\n"
             "``statuses`` is a bitmask of ``1 << status``; ``task=None`` asks all tasks. A pure query.")
        .def(
            "due_members",
            [](const Index& index, GroupId group, Integer train_step) {
                std::vector<Integer> positions;
                index.due_members(group, train_step, positions);
                return to_list(positions);
            },
            py::arg("group"), py::arg("train_step"), "Positions of the members due at ``train_step``, ascending.")
        .def(
            "expire",
            [](Index& index, GroupId group, const py::object& members, Integer status) {
                index.expire(group, read_integers(members, "members"), status);
            },
            py::arg("group"), py::arg("members"), py::arg("status"),
            "These members stop counting and the group moves to the pool ``status``; id, key and arrival stay.")
        .def("remove", &Index::remove, py::arg("group"), "Forget a group.")
        .def(
            "first",
            [](const Index& index, Integer task, Integer status, Integer n) {
                return to_list(index.first(task, status, n));
            },
            py::arg("task"), py::arg("status"), py::arg("n"), "The first n groups of a pool, or all it has; they stay.")
        .def("take", take, py::arg("task"), py::arg("status"), py::arg("n"),
             "The first n groups of a pool, or all it has; they are removed.")
        .def("count", &Index::count, py::arg("task"), py::arg("status"), "Number of groups in a pool.")
        .def(
            "counts",
            [](const Index& index, Integer task) {
                std::vector<Integer> counts;
                for (Integer status = 0; status < Index::kStatuses; ++status)
                    counts.push_back(index.count(task, status));
                return to_list(counts);
            },
            py::arg("task"), "Number of groups in each pool of a task, by status.")
        .def("count_keys", &Index::count_keys, py::arg("task"), py::arg("status"), py::arg("first"), py::arg("last"),
             "Number of groups of a pool with a key from ``first`` to ``last``.")
        .def(
            "seq_staleness",
            [](const Index& index, GroupId group, Integer train_step) {
                return to_list(index.members(group), [&](const Index::Member& member) {
                    return py::int_(Index::seq_staleness(member, train_step));
                });
            },
            py::arg("group"), py::arg("train_step"),
            "``train_step - oldest - 1`` per member, 0 where it has no model step.")
        .def(
            "oldest",
            [](const Index& index, GroupId group) {
                return to_list(index.members(group),
                               [](const Index::Member& member) { return py::int_(member.oldest); });
            },
            py::arg("group"), "Oldest model step per member, -1 for none.")
        .def(
            "newest_trainable",
            [](const Index& index, GroupId group) {
                return to_list(index.members(group),
                               [](const Index::Member& member) { return py::int_(member.newest_trainable); });
            },
            py::arg("group"), "Newest semantically trainable model step per member, -1 for none.")
        .def("key", &Index::key, py::arg("group"), "Order key of a group.")
        .def("arrival", &Index::arrival, py::arg("group"), "Arrival number of a group.")
        .def("status", &Index::status, py::arg("group"), "Status of the pool a group is in.")
        .def("deadline", &Index::deadline, py::arg("group"),
             "The first ``train_step`` at which the group is due, None if there is none.")
        .def("__len__", &Index::size)
        .def("__contains__", contains, py::arg("group"))
        .def_property_readonly("nbytes", &Index::nbytes, "Memory held, in bytes, approximately.");
}

}  // namespace pystale::bindings

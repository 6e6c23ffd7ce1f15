# KeyedListing: what changed between one listing of a key-value store and the next, without splitting a key twice.

from cpython.ref cimport Py_DECREF, Py_INCREF
from libcpp.vector cimport vector

cdef extern from "Python.h":
    int PyDict_Next(object, Py_ssize_t*, PyObject**, PyObject**) noexcept
    PyObject* item_at "PyList_GET_ITEM"(object, Py_ssize_t) noexcept
    PyObject* PyDict_GetItemWithError(PyObject*, PyObject*) except? NULL
    PyObject* field_at "PyTuple_GET_ITEM"(object, Py_ssize_t) noexcept
    bint PyDict_Check(PyObject*) noexcept
    bint PyUnicode_CheckExact(PyObject*) noexcept
    int same_text "PyObject_RichCompareBool"(PyObject*, PyObject*, int) except -1
    int PyDict_Contains(object, PyObject*) except -1
    Py_ssize_t PyUnicode_FindChar(object, Py_UCS4, Py_ssize_t, Py_ssize_t, int) except -2
    Py_ssize_t PyUnicode_Tailmatch(object, object, Py_ssize_t, Py_ssize_t, int) except -1
    const int Py_EQ
    ctypedef struct PyDictObject:
        void* ma_keys

cdef extern from *:
    """
    #include <cstring>
    static inline void pystale_prefetch(const void* address) {
    #if defined(__GNUC__)
        __builtin_prefetch(address);
    #endif
    }
    """
    void prefetch "pystale_prefetch"(const void* address) noexcept
    void memmove "std::memmove"(void* to, const void* source, size_t bytes) noexcept

cdef enum:
    AHEAD = 16  # heads whose tags are on their way from memory while others are looked at
    SHARED_AT_MOST = 4096


@cython.final
@cython.auto_pickle(False)
@cython.no_gc  # what it holds refers to nothing; tracked, 100k groups took twice the time to make
cdef class KeyGroup:
    """The keys of a listing that belong together: a head, and members named ``{head}{separator}...``.

    Attributes
    ----------
    uid : str
        Key of the head.
    keys : list of str
        Keys of the members, as they came; a new list each time.
    listed : bool
        Whether the head is listed.
    status, steps : int or None
        For whoever reads the listing; not looked at here.
    arrival, number : int
        Likewise.
    """

    cdef readonly str uid
    cdef readonly bint listed
    cdef public object status
    cdef public object steps
    cdef public int64_t arrival
    cdef public int64_t number
    cdef vector[PyObject*] members  # one reference each
    cdef size_t lost  # members that are no longer listed, while that is counted

    def __init__(self, str uid not None):
        self.uid = uid

    def __dealloc__(self):
        self.release_members()

    def __repr__(self):
        return f"<KeyGroup {self.uid}: status {self.status}, steps {self.steps}, {self.members.size()} members>"

    @property
    def keys(self):
        cdef size_t i
        return [<object>self.members[i] for i in range(self.members.size())]

    cdef int add(self, str key) except -1:
        self.members.push_back(<PyObject*>key)
        Py_INCREF(key)
        return 0

    cdef int remove(self, PyObject* key) except -1:
        """Remove a member, known by the very object that was added."""
        cdef size_t i
        for i in range(self.members.size()):
            if self.members[i] == key:
                self.members.erase(self.members.begin() + i)
                Py_DECREF(<object>key)
                return 0
        return 0

    cdef void release_members(self):
        cdef size_t i
        for i in range(self.members.size()):
            Py_DECREF(<object>self.members[i])
        self.members.clear()


@cython.final
@cython.auto_pickle(False)
cdef class ListingChanges:
    """What :meth:`KeyedListing.compare` found.

    Attributes
    ----------
    new_heads : list of (str, tuple)
        Heads not listed before, in the order of the listing, with their fields.
    changed_heads : list of (KeyGroup, tuple)
        Heads whose fields differ from the last listing, with the fields of now.
    gone_heads : list of KeyGroup
        Heads that are no longer listed.
    gone : int
        How many keys are no longer listed, heads included.
    new : int
        How many were not listed before, heads included.
    """

    cdef readonly list new_heads
    cdef readonly list changed_heads
    cdef readonly list gone_heads
    cdef list new_keys
    cdef list changed       # (place, fields)
    cdef list gone_places   # ascending
    cdef list order         # place of each key, -1 for a new one; None: as before, new ones last
    cdef Py_ssize_t known

    @property
    def gone(self):
        return len(self.gone_places)

    @property
    def new(self):
        return len(self.new_keys)


@cython.final
@cython.auto_pickle(False)
cdef class KeyedListing:
    """The keys of a listing ``{key: tag}``, kept so that the next listing is compared with them, not read anew.

    A key without the separator is a *head*: its tag is looked at in every listing. That of any other key is not: the
    key is split once, when it is first seen, and counted to its group.

    A comparison is one pass over the keys side by side, as long as keys keep their order and new ones come last, which
    is how dicts grow. A listing in another order is compared through a hash table, with the same result.

    Parameters
    ----------
    mark : str
        Entry of a tag that only heads may have.
    fields : tuple of str
        Entries of a head's tag that are watched.
    separator : str, default "_"
        One character that keys of heads do not contain.

    Notes
    -----
    Not synchronised.

    Examples
    --------
    >>> from pystale._objects import KeyedListing
    >>> listing = KeyedListing("is_head", ("status",))
    >>> found = listing.compare({"p": {"status": "running"}, "p_0": {}})
    >>> found.new_heads, found.new
    ([('p', ('running',))], 2)
    >>> [group], grown = listing.accept(found)
    >>> group.uid, group.keys
    ('p', ['p_0'])
    >>> found = listing.compare({"p": {"status": "finished"}})
    >>> found.changed_heads == [(group, ("finished",))], found.gone
    (True, 1)
    """

    cdef str mark
    cdef tuple fields
    cdef Py_ssize_t watched
    cdef Py_UCS4 separator
    cdef dict groups  # by uid
    # In the order of the last listing.
    cdef list keys
    cdef list owners
    cdef list states  # fields of a head, None for any other key
    cdef dict shared
    cdef bint reading

    def __init__(self, str mark not None, fields, separator="_"):
        self.mark = mark
        self.fields = tuple(fields)
        self.watched = len(self.fields)
        self.separator = separator
        self.groups = {}
        self.keys, self.owners, self.states = [], [], []
        self.shared = {}
        self.reading = False

    def __len__(self):
        return len(self.keys)

    def compare(self, dict items not None):
        """Changes since the last listing that was accepted; what is remembered stays as it is.

        Parameters
        ----------
        items : dict of str to dict

        Returns
        -------
        ListingChanges

        Raises
        ------
        TypeError
            If a key is no str, or a tag that is looked at no dict.
        ValueError
            If a key with the separator is marked as a head.
        RuntimeError
            If `items` changed while it was read.
        """
        if self.reading:
            raise RuntimeError("a listing is being compared already")
        self.reading = True
        try:
            with cython.critical_section(items):
                return self._compare(items)
        finally:
            self.reading = False

    cdef ListingChanges _compare(self, dict items):
        cdef Py_ssize_t position = 0, at = 0, entry = 0, known = len(self.keys), count = len(items)
        cdef PyObject** seen_keys = PySequence_Fast_ITEMS(<PyObject*>self.keys)
        cdef PyObject** states = PySequence_Fast_ITEMS(<PyObject*>self.states)
        cdef object none = None
        cdef Py_ssize_t[AHEAD] waiting
        cdef list tags = [None] * AHEAD
        cdef size_t arrived = 0, looked_at = 0
        cdef PyObject *key
        cdef PyObject *tag
        cdef PyObject *seen
        cdef const char* tag_keys
        cdef list gone = [], new = [], new_heads = [], changed = []
        cdef dict places = None
        cdef list order = None
        while PyDict_Next(items, &position, &key, &tag):
            entry = -1
            if at < known and seen_keys[at] == key:
                entry = at
                at += 1
                if states[entry] == <PyObject*>none:
                    continue  # what nearly all keys are; never in another order
            elif not PyUnicode_CheckExact(key):
                raise TypeError(f"keys of a listing are str, got {type(<object>key).__name__} {<object>key!r}")
            elif places is not None:
                place = places.pop(<object>key, None)
                if place is not None:
                    entry = place
            else:
                # Comparing exact str runs nobody's code, so the borrowed pointers stay good.
                while at < known:
                    seen = seen_keys[at]
                    if seen == key or same_text(seen, key, Py_EQ):
                        entry = at
                        at += 1
                        break
                    if PyDict_Contains(items, seen):
                        break
                    gone.append(at)
                    at += 1
                if entry < 0 and at < known:
                    # A key came before one that was here already: start over, by hash.
                    places = dict(zip(self.keys, range(known)))
                    order, position, at = [], 0, known
                    arrived = looked_at = 0
                    for found in (gone, new, new_heads, changed):
                        found.clear()
                    continue
            if order is not None:
                order.append(entry)
            if entry < 0:
                self._introduce(<str>key, require_tag(key, tag), new, new_heads)
            elif states[entry] != <PyObject*>none:
                require_dict(key, tag)
                if arrived - looked_at == AHEAD:
                    self._watch(waiting[looked_at % AHEAD], item_at(tags, looked_at % AHEAD), changed)
                    looked_at += 1
                waiting[arrived % AHEAD] = entry
                tags[arrived % AHEAD] = <object>tag
                arrived += 1
                if arrived - looked_at > AHEAD // 2:
                    tag_keys = <const char*>(<PyDictObject*>item_at(tags, (arrived - AHEAD // 2) % AHEAD)).ma_keys
                    prefetch(tag_keys)
                    prefetch(tag_keys + 64)
        while looked_at < arrived:
            self._watch(waiting[looked_at % AHEAD], item_at(tags, looked_at % AHEAD), changed)
            looked_at += 1
        if len(items) != count:
            raise RuntimeError(f"the listing had {count} keys and has {len(items)} now; it changed while it was read")
        gone.extend(range(at, known) if places is None else sorted(places.values()))
        cdef ListingChanges changes = ListingChanges.__new__(ListingChanges)
        changes.new_heads = new_heads
        changes.changed = changed
        changes.changed_heads = [(self.owners[entry], state) for entry, state in changed]
        changes.gone_heads = [self.owners[entry] for entry in gone if self.states[entry] is not None]
        changes.new_keys, changes.gone_places, changes.order = new, gone, order
        changes.known = known
        return changes

    cdef int _introduce(self, str key, dict tag, list new, list new_heads) except -1:
        if PyUnicode_FindChar(key, self.separator, 0, len(key), 1) < 0:
            new_heads.append((key, self.state(tag)))
        elif self.mark in tag and tag[self.mark]:
            raise ValueError(f"key {key!r} is marked {self.mark}, but holds {chr(self.separator)!r}, which heads must not")
        new.append(key)
        return 0

    cdef int _watch(self, Py_ssize_t entry, PyObject* tag, list changed) except -1:
        """Note a head whose fields are not what they were."""
        cdef Py_ssize_t i
        cdef PyObject *value
        cdef object none = None
        cdef tuple old = <tuple>item_at(self.states, entry)
        for i in range(self.watched):
            value = PyDict_GetItemWithError(tag, field_at(self.fields, i))
            if value == NULL:
                value = <PyObject*>none
            if value != field_at(old, i) and <object>value != <object>field_at(old, i):
                changed.append((entry, self.state(<dict>tag)))
                break
        return 0

    cpdef tuple state(self, dict tag):
        """Watched fields of a tag, None where it has none."""
        cdef tuple fields = tuple([tag.get(field) for field in self.fields])
        # Heads with equal fields share one tuple, which then is in the processor's cache when they are compared.
        if len(self.shared) >= SHARED_AT_MOST:
            self.shared.clear()
        try:
            return self.shared.setdefault(fields, fields)
        except TypeError:
            return fields

    def accept(self, ListingChanges changes not None):
        """Remember what :meth:`compare` found, and bring the groups up to date with it.

        Returns
        -------
        heads : list of KeyGroup
            Those of ``changes.new_heads``.
        touched : dict of KeyGroup to None
            Groups that got or lost members.

        Raises
        ------
        ValueError
            If something else was accepted since.
        """
        if self.reading:
            raise RuntimeError("a listing is being compared")
        if changes.known != len(self.keys):
            raise ValueError("another listing was accepted since this one was compared; compare it again")
        changes.known = -1
        cdef dict touched = {}
        cdef list new_heads = []
        cdef list states = []
        cdef list owners = self._owners(changes, new_heads, touched, states)
        cdef KeyGroup group
        cdef Py_ssize_t place
        for place, state in changes.changed:
            self.states[place] = state
        for place in changes.gone_places:
            group = <KeyGroup>item_at(self.owners, place)
            if self.states[place] is not None:
                group.listed = False
            else:
                group.lost += 1
        for place in changes.gone_places:
            group = <KeyGroup>item_at(self.owners, place)
            if self.states[place] is not None:
                continue
            if group.lost:  # the first that is lost, and what is usual: all of them are
                touched[group] = None
                if group.lost == group.members.size():
                    group.release_members()
                group.lost = 0
            if group.members.size():
                group.remove(item_at(self.keys, place))
        for place in changes.gone_places:
            group = self.owners[place]
            if not group.listed and not group.members.size():
                self.groups.pop(group.uid, None)
        if changes.order is not None:
            self._reorder(changes, owners, states)
            return new_heads, touched
        if changes.gone_places:
            for column in (self.keys, self.owners, self.states):
                drop(column, changes.gone_places)
        self.keys.extend(changes.new_keys)
        self.owners.extend(owners)
        self.states.extend(states)
        return new_heads, touched

    cdef list _owners(self, ListingChanges changes, list new_heads, dict touched, list states):
        """Groups of the new keys, which get them."""
        cdef str key, uid
        cdef KeyGroup group = None
        cdef KeyGroup last = None
        cdef Py_ssize_t end, size
        cdef list owners = []
        for key in changes.new_keys:
            size = len(key)
            end = PyUnicode_FindChar(key, self.separator, 0, size, 1)
            if end >= 0:
                size = end
            # Members often follow their head or one another.
            if group is None or len(group.uid) != size or not PyUnicode_Tailmatch(key, group.uid, 0, size, -1):
                uid = key if end < 0 else key[:size]
                group = self.groups.get(uid)
                if group is None:
                    group = self.groups[uid] = KeyGroup(uid)
            if end < 0:
                group.listed = True
                states.append(changes.new_heads[len(new_heads)][1])
                new_heads.append(group)
            else:
                states.append(None)
                group.add(key)
                if group is not last:
                    touched[group] = None
                    last = group
            owners.append(group)
        return owners

    cdef int _reorder(self, ListingChanges changes, list owners, list states) except -1:
        cdef list columns = []
        cdef Py_ssize_t entry, fresh
        for before, new in ((self.keys, changes.new_keys), (self.owners, owners), (self.states, states)):
            column, fresh = [], 0
            for entry in changes.order:
                if entry >= 0:
                    column.append(before[entry])
                else:
                    column.append(new[fresh])
                    fresh += 1
            columns.append(column)
        self.keys, self.owners, self.states = columns
        return 0


cdef int require_dict(PyObject* key, PyObject* tag) except -1:
    if not PyDict_Check(tag):
        raise TypeError(f"the tag of key {<object>key!r} must be a dict, got {type(<object>tag).__name__}")
    return 0


cdef dict require_tag(PyObject* key, PyObject* tag):
    require_dict(key, tag)
    return <dict>tag


cdef int drop(list column, list gone) except -1:
    """Remove the entries at these ascending positions, keeping the order of the rest."""
    cdef PyObject** items = PySequence_Fast_ITEMS(<PyObject*>column)
    cdef vector[PyObject*] dropped
    cdef Py_ssize_t n = len(column), write = 0, read = 0, place
    for place in gone:
        dropped.push_back(items[place])
    # Moved as they are, so that every reference stays counted once; what is dropped gathers at the end.
    for place in gone:
        memmove(items + write, items + read, (place - read) * sizeof(PyObject*))
        write += place - read
        read = place + 1
    memmove(items + write, items + read, (n - read) * sizeof(PyObject*))
    write += n - read
    memmove(items + write, dropped.data(), dropped.size() * sizeof(PyObject*))
    del column[write:]
    return 0

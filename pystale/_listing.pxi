# KeyedListing: what changed between one listing of a key-value store and the next, without splitting a key twice.

cdef extern from "Python.h":
    int PyDict_Next(object, Py_ssize_t*, PyObject**, PyObject**) noexcept
    PyObject* item_at "PyList_GET_ITEM"(object, Py_ssize_t) noexcept
    void put_item "PyList_SET_ITEM"(object, Py_ssize_t, PyObject*) noexcept
    PyObject* PyDict_GetItemWithError(object, object) except? NULL
    bint PyUnicode_CheckExact(PyObject*) noexcept
    int same_text "PyObject_RichCompareBool"(PyObject*, PyObject*, int) except -1
    int PyDict_Contains(object, object) except -1
    const int Py_EQ


class ListingChanges:
    """What :meth:`KeyedListing.compare` found.

    Attributes
    ----------
    gone : list of (str, object)
        Keys that are no longer listed, and their owners.
    new : list of str
        Keys not seen before, in the order of the listing.
    new_tags : list of dict
        Their tags.
    changed : list of (object, tuple, tuple)
        Heads whose fields differ: owner, fields as they were, fields as they are.
    """

    __slots__ = ("gone", "new", "new_tags", "changed", "plan")


cdef class KeyedListing:
    """The keys of a listing ``{key: tag}``, kept so that the next listing is compared with them, not read anew.

    A key without the separator is a *head*: its tag is looked at in every listing. The tag of any other key is not: its
    group was named by the key when it was first seen.

    The cost of a comparison is a pass over the keys side by side, as long as keys keep their order and new ones come
    last, which is how dicts grow. A listing in another order is compared through a hash table, with the same result.

    Parameters
    ----------
    fields : tuple of str
        Entries of a head's tag that are watched.
    separator : str, default "_"
        What the keys of heads do not contain.

    Examples
    --------
    >>> from pystale._objects import KeyedListing
    >>> listing = KeyedListing(("status",))
    >>> found = listing.compare({"p": {"status": "running"}, "p_0": {}})
    >>> found.new
    ['p', 'p_0']
    >>> listing.accept(found, ["owner", "owner"])
    >>> found = listing.compare({"p": {"status": "finished"}, "q": {}})
    >>> found.gone, found.new, found.changed
    ([('p_0', 'owner')], ['q'], [('owner', ('running',), ('finished',))])
    """

    cdef tuple fields
    cdef str separator
    # In the order of the last listing. The state of a head is a tuple of its fields, None for any other key.
    cdef list keys
    cdef list owners
    cdef list states

    def __init__(self, fields, separator="_"):
        self.fields = tuple(fields)
        self.separator = separator
        self.keys, self.owners, self.states = [], [], []

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
            If a key is no str, or a head's or new key's tag is no dict.
        RuntimeError
            If `items` changed while it was read.
        """
        with cython.critical_section(self, items):
            return self._compare(items)

    cdef object _compare(self, dict items):
        cdef Py_ssize_t position = 0, at = 0, entry = 0, known = len(self.keys), count = len(items)
        cdef PyObject *key
        cdef PyObject *tag
        cdef PyObject *seen
        cdef object none = None
        cdef list gone = [], new = [], new_tags = [], changed = []
        cdef dict places = None
        cdef list order = None
        while PyDict_Next(items, &position, &key, &tag):
            entry = -1
            if at < known and item_at(self.keys, at) == key:
                entry = at
                at += 1
            elif not PyUnicode_CheckExact(key):
                raise TypeError(f"keys of a listing are str, got {type(<object>key).__name__} {<object>key!r}")
            elif places is not None:
                place = places.pop(<object>key, None)
                if place is not None:
                    entry = place
            else:
                # Comparing exact str runs nobody's code, so the borrowed pointers stay good.
                while at < known:
                    seen = item_at(self.keys, at)
                    if seen == key or same_text(seen, key, Py_EQ):
                        entry = at
                        at += 1
                        break
                    if PyDict_Contains(items, <object>seen):
                        break
                    gone.append(at)
                    at += 1
                if entry < 0 and at < known:
                    # A key came before one that was here already: start over, by hash.
                    places = dict(zip(self.keys, range(known)))
                    order, position, at = [], 0, known
                    gone.clear()
                    new.clear()
                    new_tags.clear()
                    changed.clear()
                    continue
            if order is not None:
                order.append(entry)
            if entry < 0:
                new.append(<object>key)
                new_tags.append(require_tag(key, tag))
            elif item_at(self.states, entry) != <PyObject*>none:
                old = <tuple>item_at(self.states, entry)
                state = self._state(require_tag(key, tag), old)
                if state is not old:
                    changed.append((entry, state))
        if len(items) != count:
            raise RuntimeError(f"the listing had {count} keys and has {len(items)} now; it changed while it was read")
        if places is None:
            gone.extend(range(at, known))  # after the last key that is listed
        else:
            gone.extend(sorted(places.values()))
        changes = ListingChanges()
        changes.gone = [(self.keys[entry], self.owners[entry]) for entry in gone]
        changes.new, changes.new_tags = new, new_tags
        changes.changed = [(self.owners[entry], self.states[entry], state) for entry, state in changed]
        changes.plan = (known, gone, changed, order)
        return changes

    cdef tuple _state(self, dict tag, tuple old):
        """Watched fields of a head; `old` itself where they are the same."""
        cdef Py_ssize_t i
        cdef PyObject *value
        cdef object none = None
        cdef bint same = old is not None
        if same:
            for i in range(len(self.fields)):
                value = PyDict_GetItemWithError(tag, self.fields[i])
                if value == NULL:
                    value = <PyObject*>none
                if value != <PyObject*>old[i] and <object>value != old[i]:
                    same = False
                    break
        return old if same else tuple([tag.get(field) for field in self.fields])

    def state(self, dict tag not None):
        """Watched fields of a tag, None where it has none."""
        return self._state(tag, None)

    def accept(self, changes, list owners not None):
        """Remember what :meth:`compare` found; `owners` has one entry per new key.

        Raises
        ------
        ValueError
            If the number of owners differs, or something else was accepted since.
        """
        known, gone, changed, order = changes.plan
        if len(owners) != len(changes.new):
            raise ValueError(f"{len(owners)} owners for {len(changes.new)} new keys; one each is required")
        if known != len(self.keys):
            raise ValueError("another listing was accepted since this one was compared; compare it again")
        states = [
            self._state(tag, None) if self.separator not in key else None
            for key, tag in zip(changes.new, changes.new_tags)
        ]
        changes.plan = (-1, (), (), None)
        for entry, state in changed:
            self.states[entry] = state
        if order is not None:
            fresh = iter(range(len(owners)))
            picked = [(entry, -1) if entry >= 0 else (-1, next(fresh)) for entry in order]
            self.keys = [self.keys[e] if e >= 0 else changes.new[n] for e, n in picked]
            self.owners = [self.owners[e] if e >= 0 else owners[n] for e, n in picked]
            self.states = [self.states[e] if e >= 0 else states[n] for e, n in picked]
            return
        if gone:
            for column in (self.keys, self.owners, self.states):
                drop(column, gone)
        self.keys.extend(changes.new)
        self.owners.extend(owners)
        self.states.extend(states)


cdef object require_tag(PyObject* key, PyObject* tag):
    if not isinstance(<object>tag, dict):
        raise TypeError(f"the tag of key {<object>key!r} must be a dict, got {type(<object>tag).__name__}")
    return <object>tag


cdef void drop(list column, list gone):
    """Remove the entries at these ascending positions, keeping the order of the rest."""
    cdef Py_ssize_t write, read, n = len(column), at = 0, dropped = len(gone), next_gone
    cdef PyObject *moved
    write = next_gone = gone[0]
    for read in range(write, n):
        if read == next_gone:
            at += 1
            next_gone = gone[at] if at < dropped else n
            continue
        # Swapped, so that every reference stays counted once; what is dropped gathers at the end.
        moved = item_at(column, write)
        put_item(column, write, item_at(column, read))
        put_item(column, read, moved)
        write += 1
    del column[write:]

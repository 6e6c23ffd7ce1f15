"""Comparing a listing with the last one, against dicts that are read anew each time."""

import copy
import sys

import pytest

from pystale._objects import KeyedListing

FIELDS = ("is_prompt", "status")


def listing_of(items):
    listing = KeyedListing("is_prompt", FIELDS)
    heads, _ = listing.accept(listing.compare(items))
    return listing, {group.uid: group for group in heads}


def heads_of(items):
    return {key: tuple(map(tag.get, FIELDS)) for key, tag in items.items() if "_" not in key}


def members_of(items, uid):
    return [key for key in items if key.startswith(f"{uid}_")]


def changed_at_random(items, rng):
    """Keys come, go, come back at the end, and change their tags, in place or not."""
    items = dict(items)
    for _ in range(rng.integers(8)):
        uid = str(rng.integers(9))
        key = uid if rng.random() < 0.4 else f"{uid}_{rng.integers(3)}_0"
        if rng.random() < 0.5:
            items.pop(key, None)
        elif key in items and rng.random() < 0.3:
            items[key]["status"] = "changed in place"
        else:
            items[key] = {"status": str(rng.integers(3))} | ({"is_prompt": True} if "_" not in key else {})
    if rng.random() < 0.1:
        keys = list(items)
        rng.shuffle(keys)
        items = {str(key): items[key] for key in keys}
    return copy.deepcopy(items) if rng.random() < 0.3 else items


@pytest.mark.parametrize("skipped", [0.0, 0.3], ids=["every listing accepted", "some listings only compared"])
def test_changes_are_those_between_two_readings(rng, skipped):
    for _ in range(60):
        listing = KeyedListing("is_prompt", FIELDS)
        items, seen_heads, seen_keys, groups = {}, {}, [], {}
        for _ in range(30):
            items = changed_at_random(items, rng)
            changes = listing.compare(items)
            heads = heads_of(items)
            assert changes.new_heads == [(uid, heads[uid]) for uid in heads if uid not in seen_heads]
            assert {group.uid: fields for group, fields in changes.changed_heads} == {
                uid: fields for uid, fields in heads.items() if uid in seen_heads and seen_heads[uid] != fields
            }
            assert {group.uid for group in changes.gone_heads} == seen_heads.keys() - heads.keys()
            assert changes.gone == len([key for key in seen_keys if key not in items])
            assert changes.new == len([key for key in items if key not in seen_keys])
            if rng.random() < skipped:
                continue
            new_heads, touched = listing.accept(changes)
            assert [group.uid for group in new_heads] == [uid for uid, _ in changes.new_heads]
            groups.update((group.uid, group) for group in (*new_heads, *touched))
            for uid, group in groups.items():
                before = [key for key in seen_keys if key.startswith(f"{uid}_")]
                assert sorted(group.keys) == sorted(members_of(items, uid))
                assert group.listed == (uid in items)
                assert (group in touched) or sorted(before) == sorted(group.keys)
            groups = {uid: group for uid, group in groups.items() if group.listed or group.keys}
            seen_heads, seen_keys = heads, list(items)
            assert len(listing) == len(items)


def test_members_are_kept_as_they_came():
    items = {"p": {}, "p_2_0": {}, "p_0_0": {}}
    listing, groups = listing_of(items)
    items["p_1_0"] = {}
    listing.accept(listing.compare(items))
    assert groups["p"].keys == ["p_2_0", "p_0_0", "p_1_0"]


def test_members_may_come_before_their_head():
    listing, groups = listing_of({"p_0": {}, "p_1": {}})
    assert groups == {}
    [group], _ = listing.accept(listing.compare({"p_0": {}, "p_1": {}, "p": {"is_prompt": True}}))
    assert (group.uid, group.keys) == ("p", ["p_0", "p_1"])


def test_members_that_stay_keep_their_group_when_the_head_is_gone():
    listing, groups = listing_of({"p": {}, "p_0": {}})
    listing.accept(listing.compare({"p_0": {}}))
    [group], _ = listing.accept(listing.compare({"p_0": {}, "p": {}}))
    assert group is groups["p"]


def test_a_group_that_is_gone_altogether_is_forgotten():
    listing, groups = listing_of({"p": {}, "p_0": {}})
    listing.accept(listing.compare({}))
    [group], _ = listing.accept(listing.compare({"p": {}}))
    assert group is not groups["p"]


def test_every_reference_to_a_key_is_given_back():
    keys = [f"{uid}{suffix}" for uid in "pq" for suffix in ("", "_0", "_1", "_2")]
    before = [sys.getrefcount(key) for key in keys]
    listing, groups = listing_of({key: {} for key in keys})
    for left in ({"q", "q_1", "p_0"}, {"q_1", "q_2"}, set(keys), set()):
        listing.accept(listing.compare({key: {} for key in keys if key in left}))
    del listing, groups
    assert [sys.getrefcount(key) for key in keys] == before


def test_uids_that_begin_alike_are_told_apart():
    _, groups = listing_of({"1": {}, "1_0": {}, "11": {}, "11_0": {}, "1_1": {}})
    assert groups["1"].keys == ["1_0", "1_1"]
    assert groups["11"].keys == ["11_0"]


def test_a_refused_listing_changes_nothing():
    listing, groups = listing_of({"p": {"status": "a"}, "p_0": {}})
    with pytest.raises(ValueError, match="'q_1' is marked is_prompt"):
        listing.compare({"p": {"status": "b"}, "q": {}, "q_1": {"is_prompt": True}})
    assert groups["p"].keys == ["p_0"]
    assert listing.compare({"p": {"status": "a"}, "p_0": {}}).new == 0


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({1: {}}, "keys of a listing are str, got int"),
        ({"p": None}, "tag of key 'p' must be a dict, got NoneType"),
        ({"q": {}, "p": []}, "tag of key 'p' must be a dict, got list"),
    ],
)
def test_what_is_no_listing_is_refused(items, message):
    listing, _ = listing_of({"p": {}})
    with pytest.raises(TypeError, match=message):
        listing.compare(items)


def test_an_outdated_comparison_is_refused():
    listing, _ = listing_of({"p": {}})
    outdated = listing.compare({"p": {}, "q": {}})
    listing.accept(listing.compare({"p": {}, "r": {}}))
    with pytest.raises(ValueError, match="compare it again"):
        listing.accept(outdated)


def test_a_listing_that_changes_while_it_is_read_is_refused():
    items = {"p": {"status": "a"}, "q": {"status": "a"}}
    listing, _ = listing_of(items)

    class Status:
        __hash__ = None

        def __eq__(self, other):
            items.pop("q", None)
            return False

    items["p"] = {"status": Status()}
    with pytest.raises(RuntimeError, match="changed while it was read"):
        listing.compare(items)


def test_a_listing_is_not_accepted_while_one_is_compared():
    items = {"p": {"status": "a"}}
    listing, _ = listing_of(items)
    inner = listing.compare(items)

    class Status:
        __hash__ = None

        def __eq__(self, other):
            listing.accept(inner)

    with pytest.raises(RuntimeError, match="a listing is being compared"):
        listing.compare({"p": {"status": Status()}})
    assert listing.compare(items).changed_heads == []

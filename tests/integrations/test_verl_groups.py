"""Prompt groups from listings, against verl's rules written out in plain Python."""

import pytest

from pystale.integrations.verl.groups import FAILURE, FINISHED, PENDING, RUNNING, PromptGroups

NAMES = ("pending", "running", "finished", "failure")
THRESHOLD = 3


def prompt(status, steps=0):
    return {"is_prompt": True, "status": status, "global_steps": steps}


def trajectory(version=None):
    return {"status": "success", "min_global_steps": version, "max_global_steps": version}


def uids(groups):
    return [group.uid for group in groups]


# verl's rules: each is a scan over a listing.


def of_status(items, *names):
    return {key: tag for key, tag in items.items() if tag.get("is_prompt") and tag["status"] in names}


def span(tag, step):
    steps = tag.get("global_steps")
    return 1 if steps is None else step - steps + 1


def stale(items, step, threshold):
    return {uid for uid, tag in of_status(items, "finished").items() if span(tag, step) > threshold}


def oldest_first(items, n):
    """Ties by place in the listing, where verl leaves them to the order of a set."""
    ready = of_status(items, "finished", "failure")
    return sorted(ready, key=lambda uid: ready[uid].get("global_steps") or 0)[:n]


def held_back(items, step, threshold):
    return any(span(tag, step) >= threshold for tag in of_status(items, "pending", "running").values())


def history(rng, rounds):
    """Listings as trainers and rollouts make them, and some that they do not."""
    items, uid, step = {}, 0, 0
    for _ in range(rounds):
        step += int(rng.random() < 0.3)
        for _ in range(rng.integers(4)):
            uid += 1
            items[f"u{uid}"] = prompt(NAMES[rng.integers(4)], step - int(rng.integers(min(step, 5) + 1)))
        for key in [key for key, tag in items.items() if tag.get("is_prompt")]:
            draw = rng.random()
            if draw < 0.3:
                items[f"{key}_{rng.integers(4)}_0"] = trajectory(int(rng.integers(step + 1)))
            elif draw < 0.45:
                items[key] = {**items[key], "status": NAMES[rng.integers(4)]}
            elif draw < 0.5:
                items[key]["global_steps"] = step
            elif draw < 0.6:
                del items[key]
        for key in [key for key in items if "_" in key and rng.random() < 0.1]:
            del items[key]
        yield step, items


def test_answers_are_those_of_verls_rules(rng):
    for threshold in (1, 2, 5):
        for _ in range(10):
            groups = PromptGroups(threshold)
            for step, items in history(rng, 40):
                groups.read(items)
                assert set(uids(groups.stale(step))) == stale(items, step, threshold)
                assert groups.count(FINISHED, FAILURE) == len(of_status(items, "finished", "failure"))
                assert groups.count(PENDING, RUNNING) == len(of_status(items, "pending", "running"))
                assert set(uids(groups.of_status(FAILURE))) == set(of_status(items, "failure"))
                oldest = groups.oldest_in_flight()
                assert (oldest is not None and step - oldest + 1 >= threshold) == held_back(items, step, threshold)
                n = int(rng.integers(1, 9))
                chosen = groups.oldest_first(n)
                expected = oldest_first(items, n)
                assert [group.steps for group in chosen] == [items[uid]["global_steps"] for uid in expected]
                for group in chosen:
                    assert sorted(group.keys) == sorted(key for key in items if key.startswith(f"{group.uid}_"))
                for group in groups.stale(step):
                    assert groups.span(group, step) == span(items[group.uid], step)


def test_a_fresh_reading_says_the_same_as_one_that_followed_every_listing(rng):
    for _ in range(10):
        followed = PromptGroups(THRESHOLD)
        for step, items in history(rng, 40):
            followed.read(items)
            anew = PromptGroups(THRESHOLD)
            anew.read(items)
            assert set(uids(followed.stale(step))) == set(uids(anew.stale(step)))
            assert {g.uid: sorted(g.keys) for s in range(4) for g in followed.of_status(s)} == {
                g.uid: sorted(g.keys) for s in range(4) for g in anew.of_status(s)
            }


def test_prompts_of_one_step_go_by_arrival():
    groups = PromptGroups(THRESHOLD)
    items = {"b": prompt("running", 1), "a": prompt("finished", 1), "c": prompt("failure", 0)}
    groups.read(items)
    items["b"] = prompt("finished", 1)
    groups.read(items)
    assert uids(groups.oldest_first(9)) == ["c", "b", "a"]


@pytest.mark.parametrize(("steps", "is_stale"), [(2, True), (3, False), (None, False)])
def test_a_prompt_is_stale_past_the_threshold_and_never_without_a_step(steps, is_stale):
    groups = PromptGroups(THRESHOLD)
    groups.read({"p": prompt("finished", steps)})
    assert uids(groups.stale(5)) == ["p"] * is_stale


def test_a_prompt_without_a_step_is_the_oldest_and_cannot_be_waited_for():
    groups = PromptGroups(THRESHOLD)
    groups.read({"a": prompt("finished", 1), "b": prompt("finished", None)})
    assert uids(groups.oldest_first(2)) == ["b", "a"]
    groups.read({"a": prompt("running", None)})
    with pytest.raises(ValueError, match="prompt a is in flight without global_steps"):
        groups.oldest_in_flight()


def test_without_a_threshold_nothing_is_stale():
    groups = PromptGroups(None)
    groups.read({"p": prompt("finished", 0)})
    assert groups.stale(10**9) == []


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        (prompt("bogus"), "Unknown status: 'bogus' of prompt p; known are pending"),
        (prompt(None), "Unknown status: None"),
        (prompt("finished", 1.5), "global_steps of p must be an int, got float"),
        (prompt("finished", -1), "global_steps of p must be at least 0, got -1"),
    ],
)
def test_a_tag_that_cannot_be_is_refused_every_time_and_changes_nothing(tag, message):
    groups = PromptGroups(THRESHOLD)
    groups.read({"q": prompt("finished")})
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            groups.read({"p": tag})
    assert uids(groups.oldest_first(9)) == ["q"]


def test_what_is_not_tagged_as_a_prompt_is_none():
    groups = PromptGroups(THRESHOLD)
    groups.read({"p": {"status": "finished"}})
    assert groups.count(FINISHED) == 0
    groups.read({"p": prompt("finished")})
    assert groups.count(FINISHED) == 1


# Clearing


def test_cleared_groups_are_out_before_the_next_listing():
    groups = PromptGroups(THRESHOLD)
    items = {"p": prompt("finished"), "p_0_0": trajectory(), "q": prompt("finished")}
    groups.read(items)
    groups.clear(groups.oldest_first(1))
    assert uids(groups.oldest_first(9)) == ["q"]
    groups.read({"q": items["q"]})
    assert uids(groups.oldest_first(9)) == ["q"]


def test_cleared_groups_that_are_listed_all_the_same_come_back():
    groups = PromptGroups(THRESHOLD)
    items = {"p": prompt("finished"), "p_0_0": trajectory()}
    groups.read(items)
    groups.clear(groups.oldest_first(1))
    groups.read(items)
    [group] = groups.oldest_first(9)
    assert (group.uid, group.keys) == ("p", ["p_0_0"])


# Age by tokens


def by_tokens(items, missing_version="prompt"):
    groups = PromptGroups(THRESHOLD, by_tokens=True, missing_version=missing_version)
    groups.read(items)
    return groups


@pytest.mark.parametrize(("versions", "is_stale"), [([2, 5], False), ([1, 5], True), ([0], True)])
def test_by_tokens_a_group_is_as_old_as_its_oldest_trajectory(versions, is_stale):
    items = {"p": prompt("finished", 5)} | {f"p_{i}_0": trajectory(v) for i, v in enumerate(versions)}
    groups = by_tokens(items)
    assert uids(groups.stale(5)) == ["p"] * is_stale  # 5 - version - 1 >= 3
    assert groups.span(groups.oldest_first(1)[0], 5) == 5 - min(versions)


def test_by_tokens_the_dispatch_step_still_orders():
    items = {
        "new": prompt("finished", 5),
        "new_0_0": trajectory(0),
        "old": prompt("finished", 4),
        "old_0_0": trajectory(4),
    }
    assert uids(by_tokens(items).oldest_first(2)) == ["old", "new"]


@pytest.mark.parametrize(
    ("missing_version", "stale_at_5", "stale_at_8"), [("prompt", [], ["p"]), ("drop", ["p"], ["p"]), ("keep", [], [])]
)
@pytest.mark.parametrize("trajectories", [{}, {"p_0_0": trajectory(None)}], ids=["none", "one without a version"])
def test_what_becomes_of_a_missing_version(missing_version, stale_at_5, stale_at_8, trajectories):
    groups = by_tokens({"p": prompt("finished", 5), **trajectories}, missing_version)
    assert uids(groups.stale(5)) == stale_at_5
    assert uids(groups.stale(8)) == stale_at_8


def test_known_versions_count_beside_missing_ones():
    items = {"p": prompt("finished", 5), "p_0_0": trajectory(None), "p_1_0": trajectory(1)}
    assert uids(by_tokens(items, "keep").stale(5)) == ["p"]


def test_a_missing_version_can_be_an_error():
    groups = by_tokens({"p": prompt("finished", 5), "p_0_0": trajectory(None)}, "error")
    with pytest.raises(ValueError, match="group p has 1 trajectories, not all with min_global_steps"):
        groups.stale(5)
    groups.read({"p": prompt("finished", 5), "p_1_0": trajectory(5)})
    assert groups.stale(5) == []


def test_versions_are_read_when_the_group_finishes_and_when_trajectories_come_or_go():
    groups = by_tokens({"p": prompt("running", 5), "p_0_0": {}})
    items = {"p": prompt("finished", 5), "p_0_0": trajectory(5)}
    groups.read(items)
    assert groups.stale(5) == []
    items["p_1_0"] = trajectory(0)
    groups.read(items)
    assert uids(groups.stale(5)) == ["p"]
    del items["p_1_0"]
    groups.read(items)
    assert groups.stale(5) == []

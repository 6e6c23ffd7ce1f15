"""Lists that fight back: changed by other threads or by the call itself, holding objects with code of their own."""

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

from pystale import ModelSteps, _objects, effective_mask, has_trainable_token, refresh_batch, seq_staleness


class Foreign:
    """Has every hook that turns an object into an integer; none may be called."""

    def __init__(self, target: list[Any]) -> None:
        self.target = target

    def __index__(self) -> NoReturn:
        self.target.clear()
        pytest.fail("a foreign __index__ was called")

    __int__ = __bool__ = __float__ = __repr__ = __index__  # type: ignore[assignment]


class ShrinkingScalar(np.int64):
    """A subclass of a NumPy scalar, whose hooks are as foreign as any."""

    __index__ = __int__ = __repr__ = Foreign.__index__  # type: ignore[assignment]


class Loud(int):
    """A subclass of int: its value is read, its code is not run."""

    __index__ = __int__ = __bool__ = __eq__ = __repr__ = Foreign.__index__  # type: ignore[assignment]
    __hash__ = int.__hash__


CALLS: list[Callable[[Any], Any]] = [
    lambda steps: seq_staleness(steps, train_step=5),
    lambda steps: effective_mask(steps, train_step=5, token_stale_threshold=1),
    lambda steps: has_trainable_token(steps, train_step=2**40, token_stale_threshold=1),
    lambda steps: effective_mask([4] * len(steps), train_step=5, token_stale_threshold=1, response_mask=steps),
    lambda steps: refresh_batch(steps, [0, len(steps)], train_step=5, stale_threshold=1),
    lambda steps: refresh_batch([], steps, train_step=5, stale_threshold=1),
    lambda steps: _objects.summarise(steps),
    lambda steps: _objects.trainable_mask(steps, None, 5, 1),
    lambda steps: ModelSteps.from_list(steps),
]


@pytest.mark.parametrize("make", [Foreign, lambda _: ShrinkingScalar(3)], ids=["object", "NumPy scalar"])
@pytest.mark.parametrize("call", CALLS)
def test_foreign_objects_are_refused_without_running_their_code(call: Callable[[Any], Any], make: Any) -> None:
    steps: list[Any] = [0, 0]
    steps[1] = make(steps)
    with pytest.raises(TypeError, match=r"\[1\] is of type"):
        call(steps)
    assert ModelSteps.from_list([0, 0]) != steps
    assert len(steps) == 2


def test_subclasses_of_int_are_read_without_running_their_code() -> None:
    steps = [Loud(3), Loud(4), Loud(-1)]
    assert seq_staleness(steps, train_step=5) == 1
    assert effective_mask(steps, train_step=5, token_stale_threshold=1, response_mask=steps).tolist() == [0, 1, 0]
    assert ModelSteps.from_list(steps).runs() == [(3, 1), (4, 1), (-1, 1)]


@pytest.mark.parametrize("change", [list.clear, lambda steps: steps.extend([4] * 5000), lambda steps: steps.pop()])
def test_a_list_that_changes_its_length_during_the_call_is_an_error(change: Callable[[list[int]], Any]) -> None:
    steps = [4] * 3000

    class Mask:
        """Stands for any array-like of another library: turning it into an array runs its code."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            change(steps)
            return np.ones(3000, np.uint8)

    out = np.full(3000, 7, np.uint8)
    mask: Any = Mask()
    with pytest.raises(RuntimeError, match="steps changed its length while it was being read"):
        effective_mask(steps, train_step=5, token_stale_threshold=1, response_mask=mask, out=out)
    assert (out == 7).all()


@pytest.mark.threads
def test_lists_changed_by_other_threads_never_crash() -> None:
    steps = [4] * 5000
    mask: list[Any] = [1] * 5000
    stop = threading.Event()

    def change() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            steps[turn % len(steps) :] = [turn] * (turn % 3000)
            mask[:] = [turn % 2] * len(steps)
            steps.append(10**9 + turn)
            if len(steps) > 20_000:
                del steps[5000:]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=change) for _ in range(2)]
    for thread in threads:
        thread.start()
    answered = 0
    try:
        for _ in range(300):
            for call in (
                lambda: effective_mask(steps, train_step=5, token_stale_threshold=1, response_mask=mask),
                lambda: has_trainable_token(steps, train_step=2**40, token_stale_threshold=1),
                lambda: ModelSteps.from_list(steps),
                lambda: refresh_batch(steps, [0, len(steps)], train_step=5, stale_threshold=1),
            ):
                # Lengths may not match at the moment of the call; the answer or the error must be one of ours.
                try:
                    call()
                    answered += 1
                except (ValueError, RuntimeError):
                    pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert answered > 0


@pytest.mark.threads
def test_model_steps_that_grow_in_other_threads_give_whole_answers() -> None:
    steps = ModelSteps()
    done = threading.Event()

    def grow() -> None:
        for step in range(20_000):
            steps.append(step, 3)
        done.set()

    thread = threading.Thread(target=grow)
    thread.start()
    while not done.is_set():
        flags = effective_mask(steps, train_step=10**6, token_stale_threshold=None)
        assert len(flags) % 3 == 0
        assert flags.all()
        values = list(steps)
        assert values == sorted(values)
        assert len(values) % 3 == 0
    thread.join()
    assert len(steps) == 60_000


CALLS_WITH_MASK: list[Callable[[Any, Any], Any]] = [
    lambda steps, mask: effective_mask(steps, train_step=6, token_stale_threshold=1, response_mask=mask),
    lambda steps, mask: has_trainable_token(steps, train_step=6, token_stale_threshold=9, response_mask=mask),
    lambda steps, mask: refresh_batch(steps, [0, 3000], train_step=6, stale_threshold=1, response_mask=mask),
    lambda steps, mask: _objects.summarise(steps, mask),
]


@pytest.mark.parametrize("call", CALLS_WITH_MASK)
def test_model_steps_that_grow_during_the_call_are_an_error(call: Callable[[Any, Any], Any]) -> None:
    steps = ModelSteps.from_list([4] * 3000)

    class Mask:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            steps.append(5, 100_000)
            return np.ones(3000, np.uint8)

    with pytest.raises(RuntimeError, match="steps changed its length while it was being read"):
        call(steps, Mask())


def test_garbage_collection_during_a_call_may_append() -> None:
    # A collection can start wherever a tuple is made, and its callbacks are ordinary code.
    steps = ModelSteps.from_runs([(step, 2) for step in range(50)])
    whole = list(steps)

    def append(phase: str, info: dict[str, int]) -> None:
        for step in range(3):
            steps.append(10**6 + step)

    thresholds = gc.get_threshold()
    gc.callbacks.append(append)
    gc.set_threshold(1)
    try:
        answers = [list(steps), np.asarray(steps).tolist(), list(steps[:100]), list(reversed(steps))[::-1]]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(append)
    assert [answer[:100] for answer in answers] == [whole] * 4
    assert len(steps) > 100


def test_a_list_that_holds_itself_is_refused() -> None:
    steps: list[Any] = []
    steps.append(steps)
    with pytest.raises(TypeError, match=r"steps\[0\] is of type list"):
        seq_staleness(steps, train_step=5)

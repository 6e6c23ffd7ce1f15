"""The demo's task: what an answer is worth."""

import numpy as np
import pytest

from pystale.demo.task import END, MAX_TOKENS, OUTPUTS, SPACE, answer, counting_text, reward, sample_prompt, text

PROMPT = [3, 8, 4, 1]  # from 38 to 41


def test_right_answers_read_as_counting_and_end():
    assert text(answer(PROMPT)) == "38 39 40 41."
    assert text(answer([0, 7, 1, 0])) == "07 08 09 10."


def test_the_right_answer_is_worth_one():
    assert reward(PROMPT, answer(PROMPT)) == pytest.approx(1.0)


def test_no_answer_is_worth_nothing():
    assert reward(PROMPT, []) == 0.0


def test_a_response_is_worth_its_right_beginning():
    assert reward(PROMPT, answer(PROMPT)[:6]) == pytest.approx(0.8 * 6 / 12)
    wrong = answer(PROMPT).copy()
    wrong[6] = SPACE
    assert reward(PROMPT, wrong) == pytest.approx(0.8 * 6 / 12)


def test_going_on_past_the_end_costs_reward():
    longer = np.concatenate([answer(PROMPT)[:-1], [SPACE, 4, 2, SPACE, 4, 3, END]])
    assert reward(PROMPT, longer) == pytest.approx(0.8 * 11 / 18)


def test_every_prompt_has_an_answer_that_fits(rng):
    lengths = []
    for _ in range(2000):
        right = answer(sample_prompt(rng))
        lengths.append(len(right))
        assert right[-1] == END
        assert right.max() < OUTPUTS
    assert min(lengths) == 6
    assert MAX_TOKENS / 2 < max(lengths) <= MAX_TOKENS


def test_base_model_text_ends_anywhere():
    assert text(counting_text(PROMPT, 2)) == "38 39."
    assert text(counting_text([9, 8, 9, 9], 5)) == "98 99."

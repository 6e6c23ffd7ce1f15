"""The demo's policy and loss: its gradient against finite differences, and what it sees."""

from typing import Any

import numpy as np
import pytest

from pystale import RolloutState
from pystale.demo.grpo import TokenBatch, loss_gradient
from pystale.demo.policy import Policy, contexts, first_context, next_context
from pystale.demo.task import OUTPUTS, PAD, SYMBOLS, sample_prompt


def responses(rng: np.random.Generator, n: int) -> tuple[list[Any], list[Any]]:
    prompts = [sample_prompt(rng) for _ in range(n)]
    return prompts, [rng.integers(0, OUTPUTS, rng.integers(1, 20)).astype(np.uint8) for _ in range(n)]


def group(rng: np.random.Generator, size: int = 4) -> list[RolloutState]:
    prompt = sample_prompt(rng)
    members = []
    for _ in range(size):
        ids = rng.integers(0, OUTPUTS, rng.integers(2, 15)).astype(np.uint8)
        mask = (rng.random(len(ids)) < 0.7).astype(np.uint8)
        logprobs = np.log(rng.uniform(0.02, 0.3, len(ids))).astype(np.float32)
        member = RolloutState(prompt_ids=prompt, response_ids=ids, response_mask=mask, logprobs=logprobs)
        member.reward = rng.random()
        members.append(member)
    return members


def test_a_context_is_the_prompt_and_the_last_six_tokens(rng):
    prompts, texts = responses(rng, 5)
    seen = contexts(prompts, np.concatenate(texts), [len(text) for text in texts]).tolist()
    for prompt, text in zip(prompts, texts, strict=True):
        for position in range(len(text)):
            window = [PAD] * 6 + text[:position].tolist()
            expected = 0
            for symbol in [*prompt.tolist(), *window[-6:]]:
                expected = expected * SYMBOLS + symbol
            assert seen.pop(0) == expected == first_context(prompt, text[:position])
    assert seen == []


def test_the_next_context_follows_from_the_token(rng):
    (prompt,), (text,) = responses(rng, 1)
    seen = contexts([prompt], text, [len(text)])
    np.testing.assert_array_equal(next_context(seen[:-1], text[:-1]), seen[1:])


def test_probabilities_sum_to_one_and_do_not_depend_on_the_company(rng):
    policy = Policy.initial(rng)
    prompts, texts = responses(rng, 8)
    seen = contexts(prompts, np.concatenate(texts), [len(text) for text in texts])
    log_probs = policy.forward(seen).log_probs
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(policy.forward(seen[3:4]).log_probs[0], log_probs[3], atol=1e-5)


def test_the_gradient_is_that_of_finite_differences(rng):
    parameters = rng.standard_normal(len(Policy.initial(rng).parameters)) * 0.1  # float64, and away from all zeros
    policy = Policy(parameters)
    groups = [group(rng) for _ in range(3)]
    batch = TokenBatch.from_groups(groups)
    trainable = sum(int(np.sum(member.response_mask)) for members in groups for member in members)
    assert len(batch.tokens) == trainable
    _, gradient = loss_gradient(policy, batch, trainable)

    def loss(changed: Any) -> float:
        policy.load(changed)
        return loss_gradient(policy, batch, trainable)[0]

    for _ in range(20):
        direction = rng.standard_normal(len(parameters))
        direction *= 1e-6 / np.linalg.norm(direction)
        numeric = (loss(parameters + direction) - loss(parameters - direction)) / 2
        assert numeric == pytest.approx(float(gradient @ direction), rel=1e-3, abs=1e-12)


def test_masked_tokens_do_not_count(rng):
    members = group(rng)
    policy = Policy.initial(rng)
    with_garbage = TokenBatch.from_groups([members])
    for member in members:
        masked = np.asarray(member.response_mask) == 0
        member.logprobs = np.where(masked, np.float32(-7), member.logprobs)
    without = TokenBatch.from_groups([members])
    assert loss_gradient(policy, with_garbage, 10)[0] == loss_gradient(policy, without, 10)[0]


def test_advantages_are_normalised_in_the_group(rng):
    members = group(rng)
    for member, reward in zip(members, (0.0, 0.0, 1.0, 1.0), strict=True):
        member.reward, member.response_mask = reward, None
    advantages = TokenBatch.from_groups([members]).advantages
    expected = np.repeat([-1, -1, 1, 1], [len(member.response_ids) for member in members])
    np.testing.assert_allclose(advantages, expected, rtol=1e-3)


def test_a_group_of_equals_teaches_nothing(rng):
    members = group(rng)
    for member in members:
        member.reward = 0.5
    batch = TokenBatch.from_groups([members])
    _, gradient = loss_gradient(Policy.initial(rng), batch, 10)
    np.testing.assert_array_equal(gradient, 0)

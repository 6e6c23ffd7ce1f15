"""The demo's engine and agent loop: tokens, log-probabilities and versions over aborts, continuations and syncs."""

import asyncio
from typing import Any

import numpy as np
import pytest

from pystale import RolloutState, Status
from pystale.demo.engine import Engine
from pystale.demo.policy import Policy, contexts
from pystale.demo.rollouts import CountingAgentLoop
from pystale.demo.task import END, MAX_TOKENS, answer, reward

PROMPT = np.array([1, 0, 6, 5], dtype=np.uint8)
EMPTY = np.empty(0, dtype=np.uint8)


def weights(seed: int, scale: float = 0.3) -> Any:
    """Random weights under which some tokens are likelier than others."""
    rng = np.random.default_rng(seed)
    return (Policy.initial(rng).parameters + scale * rng.standard_normal(34828) / 10).astype(np.float32)


def never_ending(seed: int) -> Any:
    """Weights under which no response ends by itself."""
    parameters = weights(seed)
    parameters[-1] = -100.0  # bias of the last output, END
    return parameters


def rollouts(n: int) -> list[RolloutState]:
    return [RolloutState(rollout_id=i, group_id=0, prompt_ids=PROMPT) for i in range(n)]


async def decode_steps(n: int) -> None:
    """Let the engine take about n decode steps: it lets others run after each."""
    for _ in range(n):
        await asyncio.sleep(0)


def test_responses_end_with_the_end_token_or_at_their_limit():
    async def main() -> list[Any]:
        async with Engine(weights(0), np.random.default_rng(0)) as engine:
            requests = [engine.submit(PROMPT, EMPTY, limit) for limit in (1, 7, 30, MAX_TOKENS) * 10]
            return [(await request.done, request.limit) for request in requests]

    results = asyncio.run(main())
    assert {new.finish_reason for new, _ in results} == {"stop", "length"}
    for new, limit in results:
        ended = new.token_ids[-1] == END
        assert new.finish_reason == ("stop" if ended else "length")
        assert END not in new.token_ids[:-1]
        assert 1 <= len(new.token_ids) == len(new.logprobs) == len(new.model_steps) <= limit
        assert ended or len(new.token_ids) == limit


def test_the_same_seed_draws_the_same_tokens():
    async def main(seed: int) -> list[list[int]]:
        async with Engine(weights(0), np.random.default_rng(seed)) as engine:
            requests = [engine.submit(PROMPT, EMPTY, 40) for _ in range(20)]
            return [(await request.done).token_ids.tolist() for request in requests]

    assert asyncio.run(main(1)) == asyncio.run(main(1))
    assert asyncio.run(main(1)) != asyncio.run(main(2))


def test_a_continued_response_keeps_its_tokens_and_says_which_weights_wrote_each():
    """Its log-probabilities are those of the weights it names, recomputed for the whole response at once."""
    versions = {0: never_ending(1), 3: never_ending(2), 4: never_ending(3)}

    async def main() -> tuple[list[RolloutState], list[int]]:
        group, lengths = rollouts(3), [0]
        async with Engine(versions[0], np.random.default_rng(0)) as engine:
            agent_loop = CountingAgentLoop(engine)
            for model_step, parameters in versions.items():
                engine.load_weights(parameters, model_step)
                engine.resume()
                generating = asyncio.create_task(agent_loop.generate_group(group, enable_partial_rollout=True))
                await decode_steps(20)
                if model_step != 4:
                    await agent_loop.pause()
                assert await generating is group
                lengths.append(len(group[0].response_ids))
                if model_step != 4:
                    assert [member.status for member in group] == [Status.ABORTED] * 3
        return group, lengths

    group, lengths = asyncio.run(main())
    counts = np.diff(lengths).tolist()
    for member in group:
        assert member.status is Status.COMPLETED
        assert member.finish_reason == "length"
        assert len(member.response_ids) == MAX_TOKENS
        assert member.response_model_steps.runs() == list(zip(versions, counts, strict=True))
        seen = contexts([PROMPT], member.response_ids, [MAX_TOKENS])
        recomputed = {step: Policy(parameters).forward(seen).log_probs for step, parameters in versions.items()}
        for position, (token, step) in enumerate(zip(member.response_ids, member.response_model_steps, strict=True)):
            assert member.logprobs[position] == pytest.approx(recomputed[step][position, token], abs=1e-4)


def test_the_version_is_that_of_the_weights_before_the_step():
    """Weights that change while a response runs change the version of the tokens after, not of those before."""

    async def main() -> list[tuple[int, int]]:
        async with Engine(never_ending(0), np.random.default_rng(0)) as engine:
            request = engine.submit(PROMPT, EMPTY, 30)
            await decode_steps(10)
            before = engine.generated_tokens
            engine.load_weights(never_ending(1), 7)
            steps = (await request.done).model_steps
            assert steps.runs() == [(0, before), (7, 30 - before)]
            return steps.runs()

    assert len(asyncio.run(main())) == 2


def test_a_paused_engine_gives_requests_back_at_once():
    async def main() -> None:
        async with Engine(weights(0), np.random.default_rng(0)) as engine:
            running = engine.submit(PROMPT, EMPTY, 40)
            engine.pause()
            late = engine.submit(PROMPT, [1, 0], 40)
            for request in (running, late):
                new = await request.done
                assert (new.finish_reason, len(new.token_ids), len(new.model_steps)) == ("abort", 0, 0)
            engine.resume()
            assert len((await engine.submit(PROMPT, [1, 0], 40).done).token_ids) > 0

    asyncio.run(main())


def test_completed_members_are_not_generated_again():
    right = answer(PROMPT)

    async def main() -> list[RolloutState]:
        group = rollouts(3)
        group[1].status, group[1].response_ids, group[1].reward = Status.COMPLETED, right, 0.25
        async with Engine(weights(0), np.random.default_rng(0)) as engine:
            await CountingAgentLoop(engine).generate_group(group, enable_partial_rollout=True)
            assert engine.generated_tokens == len(group[0].response_ids) + len(group[2].response_ids)
        return group

    group = asyncio.run(main())
    assert [member.status for member in group] == [Status.COMPLETED] * 3
    assert group[1].response_ids is right
    assert group[1].reward == 0.25
    for member in (group[0], group[2]):
        assert member.reward == reward(PROMPT, member.response_ids)


def test_without_partial_rollout_an_aborted_response_starts_over():
    async def main() -> RolloutState:
        (member,) = rollouts(1)
        member.status, member.response_ids, member.logprobs = (
            Status.ABORTED,
            np.array([1, 0, 10], np.uint8),
            np.zeros(3),
        )
        member.response_model_steps = [0, 0, 0]
        async with Engine(weights(0), np.random.default_rng(0)) as engine:
            engine.load_weights(never_ending(0), 5)
            await CountingAgentLoop(engine).generate_group([member], enable_partial_rollout=False)
        return member

    member = asyncio.run(main())
    assert member.response_model_steps.runs() == [(5, MAX_TOKENS)]
    assert len(member.logprobs) == MAX_TOKENS


def test_a_cancelled_group_is_aborted_with_what_it_has():
    async def main() -> None:
        group = rollouts(2)
        async with Engine(never_ending(0), np.random.default_rng(0)) as engine:
            loop = CountingAgentLoop(engine)
            generating = asyncio.create_task(loop.generate_group(group, enable_partial_rollout=True))
            await decode_steps(10)
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
            tokens = engine.generated_tokens
            assert sum(len(member.response_ids) for member in group) == tokens > 0
            assert [member.status for member in group] == [Status.ABORTED] * 2
            await decode_steps(5)
            assert engine.generated_tokens == tokens  # nothing runs on

    asyncio.run(main())


@pytest.mark.parametrize(("length", "budget"), [(0, 0), (3, -1), (0, MAX_TOKENS + 1), (5, MAX_TOKENS)])
def test_a_budget_that_does_not_fit_is_refused(length, budget):
    async def main() -> None:
        async with Engine(weights(0), np.random.default_rng(0)) as engine:
            with pytest.raises(ValueError, match=f"max_new_tokens is {budget} for a response of {length} tokens"):
                engine.submit(PROMPT, [1] * length, budget)

    asyncio.run(main())


def test_the_engine_leaves_no_task_behind():
    async def main() -> None:
        engine = Engine(never_ending(0), np.random.default_rng(0))
        async with engine:
            request = engine.submit(PROMPT, EMPTY, 100)
            await decode_steps(3)
        assert (await request.done).finish_reason == "abort"
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())

"""A producer with all it works with, for the tests."""

import warnings

from agent_loops import ScriptedLoop

from pystale import ReplayBuffer, Status
from pystale.producer import AsyncProduceStrategyConfig
from pystale.sampler import PromptSampler


class Line:
    """Strategy, buffer, sampler and agent loop that agree with each other."""

    def __init__(
        self,
        loop=None,
        *,
        prompts=1000,
        group_size=1,
        interval=1,
        pause_repeat_s=3.0,
        pause_limit_s=60.0,
        on_release=None,
        buffer_class=ReplayBuffer,
        **settings,
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings that throw much away; tested by themselves
            self.strategy = AsyncProduceStrategyConfig(**settings).build(
                interval, pause_repeat_s=pause_repeat_s, pause_limit_s=pause_limit_s
            )
            self.buffer = buffer_class(
                self.strategy.rule,
                tail_batch_trigger_size=self.strategy.tail_batch_trigger_size,
                max_rerolls=self.strategy.max_rerolls,
                on_release=on_release,
            )
        self.loop = loop or ScriptedLoop()
        prompts = [[n] for n in range(prompts)] if isinstance(prompts, int) else prompts
        self.sampler = PromptSampler(prompts, self.buffer, group_size)

    async def produce(self, batch_size=2, train_step=1, model_step=None, **overrides):
        arguments = {
            "agent_loop": self.loop,
            "sampler": self.sampler,
            "buffer": self.buffer,
            "batch_size": batch_size,
            "task_name": "default",
            "train_step": train_step,
            "model_step": train_step - 1 if model_step is None else model_step,
        }
        return await self.strategy.produce_batch(**{**arguments, **overrides})

    async def take(self, n, train_step=1):
        """Ids of the groups of a training batch."""
        batch = await self.buffer.take_train_batch({"default": n}, train_step=train_step)
        return [group[0].group_id for group in batch.get("default", [])]

    def stored(self):
        """Groups by pool, empty pools left out."""
        counts = self.buffer.sync.count_statuses(["default"], Status)["default"]
        return {status: n for status, n in counts.items() if n}

"""Managers with all they work with, for the tests."""

import warnings

from agent_loops import ScriptedLoop

from pystale import (
    AgentLoopManager,
    AsyncProduceStrategyConfig,
    DisaggAgentLoopManager,
    DisaggAsyncProduceStrategyConfig,
    ReplayBuffer,
    Status,
    TaskSpec,
)
from pystale.sampler import PromptSampler


class Controller:
    """Engines that several agent loops share, as a list of what they were asked."""

    def __init__(self):
        self.asked = []

    async def pause_generation(self):
        self.asked.append("pause")

    def continue_generation(self):
        self.asked.append("continue")


class Site:
    """Buffer, samplers, agent loops and a manager of one or several tasks.

    `tasks` is a mapping of task name to ``(weight, agent loop, settings)``; `manager` and `buffer` hold further
    settings of these.
    """

    manager_class, config_class = AgentLoopManager, AsyncProduceStrategyConfig

    def __init__(
        self,
        loop=None,
        *,
        tasks=None,
        prompts=1000,
        group_size=1,
        interval=1,
        pause_repeat_s=3.0,
        pause_limit_s=60.0,
        on_release=None,
        buffer_class=ReplayBuffer,
        controller=None,
        config_class=None,
        manager=(),
        buffer=(),
        **settings,
    ):
        tasks = tasks or {"default": (1, loop or ScriptedLoop(), {})}
        self.loops = {name: loop for name, (_, loop, _) in tasks.items()}
        self.loop = next(iter(self.loops.values()))
        self.controller = controller
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about settings that throw much away; tested by themselves
            self.strategies = {
                name: (config_class or self.config_class)(**{**settings, **own}).build(
                    interval, pause_repeat_s=pause_repeat_s, pause_limit_s=pause_limit_s
                )
                for name, (_, _, own) in tasks.items()
            }
            self.strategy = next(iter(self.strategies.values()))
            self.buffer = buffer_class(
                {name: strategy.rule for name, strategy in self.strategies.items()},
                tail_batch_trigger_size={name: s.tail_batch_trigger_size for name, s in self.strategies.items()},
                max_rerolls=self.strategy.max_rerolls,
                group_mode=self.strategy.group_mode,
                min_fresh=self.strategy.min_fresh,
                on_release=on_release,
                **dict(buffer),
            )
        self.samplers = {
            name: self.sampler(prompts if isinstance(prompts, int) else list(prompts), group_size) for name in tasks
        }
        self.specs = [
            TaskSpec(name, self.loops[name], self.samplers[name], self.strategies[name], weight)
            for name, (weight, _, _) in tasks.items()
        ]
        self.manager = self.manager_class(self.specs, self.buffer, rollout_controller=controller, **dict(manager))

    def sampler(self, prompts, group_size):
        prompts = [[n] for n in range(prompts)] if isinstance(prompts, int) else prompts
        return PromptSampler(prompts, self.buffer, group_size)

    def stored(self, task_name=None):
        """Groups by pool, empty pools left out."""
        name = task_name or next(iter(self.loops))
        counts = self.buffer.sync.count_statuses([name], Status)[name]
        return {status: n for status, n in counts.items() if n}


class BackgroundSite(Site):
    """The same with a manager that produces in the background."""

    manager_class, config_class = DisaggAgentLoopManager, DisaggAsyncProduceStrategyConfig


def ids(result):
    """Group ids of a batch."""
    return [group[0].group_id for group in result.groups]

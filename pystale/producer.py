"""Producing groups for training: what to generate, how much of it, when to stop, and what becomes of the results.

Three ways to share the time between generation and training:

- Synchronous: generate a batch, train it, publish the weights.
- Colocated and asynchronous: generation and training alternate too, but a round generates more than a batch, and what
  is not finished when the batch is there is paused and kept. No work outlives a round.
- Disaggregated: engines of their own generate in the background while the trainer trains. Work outlives rounds, and is
  interrupted only to publish weights.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pystale.arguments import checked_group_mode, checked_seconds
from pystale.background import BackgroundLine
from pystale.buffer import ReplayBuffer
from pystale.policy import GroupMode
from pystale.production import Line, ShouldContinue
from pystale.progress import Progress
from pystale.report import ProduceReport
from pystale.rollout import AgentLoop, IsValidSample
from pystale.rounds import run_round
from pystale.sampler import Sampler
from pystale.staleness import StalenessRule, checked_int

__all__ = [
    "AsyncProduceStrategy",
    "AsyncProduceStrategyConfig",
    "DisaggAsyncProduceStrategy",
    "DisaggAsyncProduceStrategyConfig",
    "ProduceStrategy",
    "SyncProduceStrategyConfig",
]


class _Settings(BaseModel):
    """Settings that every way of producing has."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    max_retries: int = Field(default=3, ge=0, lt=2**63)
    is_valid_sample_fn: IsValidSample | None = None
    should_continue_fn: ShouldContinue | None = None


class AsynchronousSettings(_Settings):
    """Settings of producers whose groups may be older than the weights they train; the same wherever these run."""

    over_sample_threshold: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    enable_partial_rollout: bool = False
    max_staleness: int = Field(default=0, ge=0, lt=2**63)
    max_token_staleness: int | None = Field(default=None, ge=0, lt=2**63)
    tail_batch_trigger_size: int = Field(default=-1, ge=-1, lt=2**63)
    spare_aborted: bool = False
    max_rerolls: int | None = Field(default=None, ge=0, lt=2**63)
    group_mode: Literal["all", "members"] = "all"
    min_fresh: int = Field(default=1, ge=1, lt=2**63)

    @model_validator(mode="after")
    def _check_group_mode(self) -> "AsynchronousSettings":
        checked_group_mode(self.group_mode, self.min_fresh)
        return self


class AsyncProduceStrategyConfig(AsynchronousSettings):
    """Settings of the colocated asynchronous producer.

    Parameters
    ----------
    over_sample_threshold : float, default 0.0
        Share of the batch to generate on top of it, so that a round need not wait for its slowest groups. The product
        with the batch size is exact and rounded up. Surplus groups stay in the buffer for the next round.
    enable_partial_rollout : bool, default False
        Continue aborted responses from the tokens they have, instead of from their prompt.
    max_staleness, max_token_staleness, spare_aborted
        See :class:`~pystale.StalenessRule`.
    tail_batch_trigger_size : int, default -1
        -1: expired groups are discarded for good. 0: they are generated anew at once, first in line. N > 0: when at
        least N of them wait at the start of a round, the round draws them first and does not oversample.
    max_rerolls : int, optional
        Re-rollouts after which a group that expires again is discarded.
    group_mode, min_fresh
        Whether a group is trained without members that have expired; see :class:`~pystale.ReplayBuffer`.
    max_retries : int, default 3
        How often a group is tried again after ``generate_group`` raised, before it is FAILED.
    is_valid_sample_fn : callable, optional
        ``is_valid_sample_fn(group) -> bool``, plain or async, asked of every COMPLETED group that comes back. False:
        the group is FILTERED, which means released and counted instead of stored.
    should_continue_fn : callable, optional
        ``should_continue_fn(completed_count, batch_size, **kwargs) -> bool``, plain or async. By default a round goes
        on while ``completed_count < batch_size``.

    Raises
    ------
    pydantic.ValidationError
        A ValueError, for an unknown key, a value of another type (a bool is no int), NaN, or a bound passed.

    Examples
    --------
    >>> config = AsyncProduceStrategyConfig(max_staleness=2, max_token_staleness=0, tail_batch_trigger_size=0)
    >>> config.build(sync_weights_interval=2).stale_threshold
    6
    """

    def build(
        self, sync_weights_interval: int = 1, *, pause_repeat_s: float = 3.0, pause_limit_s: float = 60.0
    ) -> "AsyncProduceStrategy":
        """Strategy for weights that are published every `sync_weights_interval` trainer steps.

        Parameters
        ----------
        sync_weights_interval : int, default 1
            Trainer steps between two publications.
        pause_repeat_s : float, default 3.0
            Seconds after which a request to pause is repeated while groups are still running.
        pause_limit_s : float, default 60.0
            Seconds after the first request when groups still running are cancelled. After that long again, those that
            have not even ended then are given up as FAILED.

        Raises
        ------
        TypeError, ValueError
            If a number is out of range.

        Warns
        -----
        UserWarning
            Where the settings throw more away than one would expect; see :class:`ProduceStrategy`.
        """
        return AsyncProduceStrategy(self, sync_weights_interval, pause_repeat_s, pause_limit_s)


class SyncProduceStrategyConfig(_Settings):
    """Settings of the synchronous producer: generate exactly a batch, with the newest weights, and train all of it.

    It is the colocated producer with ``max_staleness`` 0, no token rule, no oversampling, and expired groups discarded.

    Parameters
    ----------
    max_retries, is_valid_sample_fn, should_continue_fn
        See :class:`AsyncProduceStrategyConfig`.

    Raises
    ------
    pydantic.ValidationError
        See :class:`AsyncProduceStrategyConfig`.

    Examples
    --------
    >>> SyncProduceStrategyConfig().build().stale_threshold
    1
    """

    def build(
        self, sync_weights_interval: int = 1, *, pause_repeat_s: float = 3.0, pause_limit_s: float = 60.0
    ) -> "AsyncProduceStrategy":
        """See :meth:`AsyncProduceStrategyConfig.build`."""
        config = AsyncProduceStrategyConfig(**dict(self))
        return AsyncProduceStrategy(config, sync_weights_interval, pause_repeat_s, pause_limit_s)


class DisaggAsyncProduceStrategyConfig(AsynchronousSettings):
    """Settings of the disaggregated producer, which works in the background while the trainer trains.

    Parameters
    ----------
    over_sample_threshold, enable_partial_rollout, max_staleness, max_token_staleness, tail_batch_trigger_size, \
    spare_aborted, max_rerolls, group_mode, min_fresh, max_retries, is_valid_sample_fn
        See :class:`AsyncProduceStrategyConfig`. `max_staleness` also says how far production may run ahead.
    should_continue_fn : callable, optional
        ``should_continue_fn(completed_count, batch_size, **kwargs) -> bool``, plain or async. Both numbers count from
        the beginning of the run: groups consumed and in the buffer, and groups wanted for all steps so far.

    Raises
    ------
    pydantic.ValidationError
        See :class:`AsyncProduceStrategyConfig`.

    Examples
    --------
    >>> strategy = DisaggAsyncProduceStrategyConfig(max_staleness=1).build(sync_weights_interval=2)
    >>> strategy.stale_threshold, strategy.model_expired(4, 0), strategy.model_expired(5, 0)
    (4, False, True)
    """

    def build(
        self, sync_weights_interval: int = 1, *, pause_repeat_s: float = 3.0, pause_limit_s: float = 60.0
    ) -> "DisaggAsyncProduceStrategy":
        """See :meth:`AsyncProduceStrategyConfig.build`."""
        return DisaggAsyncProduceStrategy(self, sync_weights_interval, pause_repeat_s, pause_limit_s)


class ProduceStrategy:
    """What all built strategies have in common.

    It holds no state between rounds, so one strategy may serve several tasks at once.

    Attributes
    ----------
    config : AsyncProduceStrategyConfig or DisaggAsyncProduceStrategyConfig
    rule : StalenessRule
    stale_threshold, token_stale_threshold, tail_batch_trigger_size, max_rerolls, group_mode, min_fresh
        What a buffer must agree on.
    pause_repeat_s, pause_limit_s : float
        See :meth:`AsyncProduceStrategyConfig.build`.

    Warns
    -----
    UserWarning
        If expired groups are discarded though the token rule is on, or if every aborted response is reset at the next
        weight sync though partial rollout is on.
    """

    def __init__(
        self,
        config: AsynchronousSettings,
        sync_weights_interval: int,
        pause_repeat_s: float,
        pause_limit_s: float,
    ) -> None:
        self.config = config
        self.rule = StalenessRule(
            max_staleness=config.max_staleness,
            max_token_staleness=config.max_token_staleness,
            sync_weights_interval=sync_weights_interval,
            spare_aborted=config.spare_aborted,
        )
        self.stale_threshold = self.rule.stale_threshold
        self.token_stale_threshold = self.rule.token_stale_threshold
        self.tail_batch_trigger_size = config.tail_batch_trigger_size
        self.max_rerolls = config.max_rerolls
        self.group_mode, self.min_fresh = checked_group_mode(config.group_mode, config.min_fresh)
        self.pause_repeat_s = checked_seconds("pause_repeat_s", pause_repeat_s, positive=True)
        self.pause_limit_s = checked_seconds("pause_limit_s", pause_limit_s, positive=True)
        whole_groups = self.group_mode is GroupMode.ALL
        if self.token_stale_threshold is not None and config.tail_batch_trigger_size < 0 and whole_groups:
            warnings.warn(
                f"tail_batch_trigger_size=-1 with max_token_staleness={config.max_token_staleness}: a group is "
                "discarded for good, fresh members too, as soon as one member has no trainable token left; 0 or more "
                "has it generated anew",
                stacklevel=3,
            )
        if config.max_token_staleness == 0 and config.enable_partial_rollout and not config.spare_aborted:
            warnings.warn(
                "max_token_staleness=0 with enable_partial_rollout: every aborted response is reset at the next "
                "weight sync, since it has no fresh token then, so partial rollout saves nothing; spare_aborted=True "
                "or a larger max_token_staleness keeps it",
                stacklevel=3,
            )

    def check_buffer(self, buffer: ReplayBuffer, task_name: str) -> None:
        """Raise a ValueError where the buffer's settings for the task differ from the strategy's."""
        rule = buffer.rule(task_name)
        for name, own, theirs in (
            ("stale_threshold", self.stale_threshold, rule.stale_threshold),
            ("token_stale_threshold", self.token_stale_threshold, rule.token_stale_threshold),
            ("spare_aborted", self.rule.spare_aborted, rule.spare_aborted),
            ("tail_batch_trigger_size", self.tail_batch_trigger_size, buffer.tail_batch_trigger_size(task_name)),
            ("max_rerolls", self.max_rerolls, buffer.max_rerolls),
            ("group_mode", self.group_mode.value, buffer.group_mode.value),
            ("min_fresh", self.min_fresh, buffer.min_fresh),
        ):
            if own != theirs:
                raise ValueError(
                    f"{name} of task {task_name!r} is {theirs!r} in the buffer and {own!r} in the strategy; build both "
                    "from the same settings"
                )

    def _line_settings(
        self, agent_loop: AgentLoop, sampler: Sampler, buffer: ReplayBuffer, task_name: str
    ) -> dict[str, Any]:
        return {
            "agent_loop": agent_loop,
            "sampler": sampler,
            "buffer": buffer,
            "task_name": task_name,
            "settings": self.config,
            "pause_repeat_s": self.pause_repeat_s,
            "pause_limit_s": self.pause_limit_s,
        }


class AsyncProduceStrategy(ProduceStrategy):
    """The colocated producer; made by :meth:`AsyncProduceStrategyConfig.build`. See :class:`ProduceStrategy`."""

    async def produce_batch(
        self,
        *,
        agent_loop: AgentLoop,
        sampler: Sampler,
        buffer: ReplayBuffer,
        batch_size: int,
        task_name: str,
        train_step: int,
        model_step: int,
    ) -> ProduceReport:
        """Generate until `buffer` holds `batch_size` COMPLETED groups of the task, then pause what is running.

        The buffer is refreshed at `train_step` first. Every group drawn is in the buffer afterwards, or was counted as
        failed, filtered or expired. If the round is cancelled, its tasks are too; what they have generated is put as
        ABORTED before the cancellation goes on.

        Parameters
        ----------
        agent_loop : AgentLoop
            Generates groups.
        sampler : Sampler
            Draws groups.
        buffer : ReplayBuffer
            Takes groups. Rule, tail batch trigger and bound on re-rollouts must be the strategy's.
        batch_size : int
            Groups wanted in the buffer, those already there included.
        task_name : str
            Task of the buffer.
        train_step : int
            Trainer step that will consume the batch, from 1.
        model_step : int
            Trainer step whose weights are served; stamped on tokens that come back without a step.

        Raises
        ------
        TypeError, ValueError
            For an argument out of range, a buffer whose settings differ, or weights so old that all they generate
            would expire at once. Nothing has started then.
        PromptsExhausted
            If prompts run out before the batch is there, and nothing is left that could be generated anew.
        ProductionStalled
            If groups keep failing, or coming back without anything in them.
        """
        batch_size = checked_int("batch_size", batch_size, at_least=1)
        self.check_steps(train_step, model_step)
        self.check_buffer(buffer, task_name)
        line = self.line(agent_loop, sampler, buffer, task_name, train_step=train_step, model_step=model_step)
        line.report.refreshed = (await buffer.refresh_staleness(train_step)).get(task_name, 0)
        await run_round([line], {task_name: batch_size})
        return line.report

    def line(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler,
        buffer: ReplayBuffer,
        task_name: str,
        *,
        train_step: int,
        model_step: int,
    ) -> Line:
        """Production line of a task, for one round."""
        return Line(
            **self._line_settings(agent_loop, sampler, buffer, task_name), train_step=train_step, model_step=model_step
        )

    def check_steps(self, train_step: int, model_step: int) -> None:
        """Refuse steps out of range, and weights so old that all they generate would expire at once."""
        checked_int("train_step", train_step, at_least=1)
        checked_int("model_step", model_step, at_least=0)
        if model_step > train_step - 1:
            raise ValueError(
                f"model_step={model_step} is in the future of train_step={train_step}, whose newest weights are of "
                f"step {train_step - 1}"
            )
        if train_step - model_step - 1 >= self.stale_threshold:
            raise ValueError(
                f"weights of model_step={model_step} are {train_step - model_step - 1} steps old at "
                f"train_step={train_step}, and the rule keeps less than {self.stale_threshold}: all they generate "
                "would expire at once; publish newer weights first"
            )


class DisaggAsyncProduceStrategy(ProduceStrategy):
    """The disaggregated producer; made by :meth:`DisaggAsyncProduceStrategyConfig.build`. See :class:`ProduceStrategy`.

    :class:`~pystale.DisaggAgentLoopManager` drives it.
    """

    def model_expired(self, train_step: int, model_step: int) -> bool:
        """Whether all that weights of `model_step` generate would be too old at `train_step`.

        Notes
        -----
        ``train_step - model_step - 1 >= stale_threshold``, as in XTuner.
        """
        return train_step - model_step - 1 >= self.stale_threshold

    def tokens_expired(self, train_step: int, model_step: int) -> bool:
        """Whether no token that weights of `model_step` generate could enter the loss at `train_step`."""
        threshold = self.token_stale_threshold
        return threshold is not None and train_step - model_step - 1 >= threshold

    def too_old(self, progress: Progress) -> bool:
        """Whether to wait for newer weights at this position of production and consumption.

        Beside the step that is produced for, this looks at the step that is consumed next: groups age by that one as
        they are put, and where no token of them could be trained any more, they would expire at once.
        """
        step, model_step = progress.next_train_step, progress.model_step
        return self.model_expired(max(progress.future_step, step), model_step) or self.tokens_expired(step, model_step)

    def line(
        self,
        agent_loop: AgentLoop,
        sampler: Sampler,
        buffer: ReplayBuffer,
        task_name: str,
        *,
        progress: Progress,
        too_old: Callable[[], bool],
        on_stall: Callable[[], None],
    ) -> BackgroundLine:
        """Production line of a task, for a whole run. `on_stall` is called when nothing can be produced for now."""
        return BackgroundLine(
            **self._line_settings(agent_loop, sampler, buffer, task_name),
            too_old=too_old,
            progress=progress,
            on_stall=on_stall,
        )

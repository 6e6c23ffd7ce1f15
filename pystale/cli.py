"""The ``pystale`` command."""

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from pystale.demo.settings import MODES, Settings

__all__ = ["app", "run"]

app = typer.Typer(
    help="Staleness control for asynchronous LLM reinforcement learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


# Numbers of steps, syncs and groups beyond this are taken for a mistake.
FAR = 1_000_000


def run(arguments: Sequence[str]) -> int:
    """Run a command line, and return its exit code; a mistake in it is one line on stderr, and 2.

    Typer only reads the arguments: a command returns what is to be done. It is done outside, because what Typer makes
    of Ctrl-C and of closed pipes depends on its version.
    """
    # The base of every complaint about arguments; it is Click's or Typer's own, depending on the version of Typer.
    usage_error: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
    try:
        todo = app(list(arguments), prog_name="pystale", standalone_mode=False)
        if callable(todo):
            return int(todo())
    except BrokenPipeError:
        raise
    except usage_error as error:
        message = error.format_message().removesuffix(".")
        if type(error) is not typer.BadParameter and error.ctx is not None:  # one that says no remedy
            message += f"; see {error.ctx.command_path} --help"
        return _refuse(message)
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename!r}: {error.strerror}" if error.filename else str(error.strerror or error))
    return todo if isinstance(todo, int) else 0  # help and version have been printed, or Ctrl-C came


def _refuse(message: str) -> int:
    print(f"pystale: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _version(wanted: bool) -> None:
    if wanted:
        from pystale import __version__

        print(f"pystale {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pystale(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _integer(low: int, high: int = FAR, *, none: bool = False) -> Callable[[str], int | None]:
    """Parser of an option that takes an integer in ``[low, high]``, or the word "none"."""

    def parse(value: str) -> int | None:
        text = str(value).strip()
        if none and text.lower() in ("none", ""):
            return None
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise typer.BadParameter(
                f"{value!r} is {'neither none nor' if none else 'not'} an integer from {low} to {high}"
            )
        return int(text)

    return parse


def _mode(value: str) -> str:
    if value not in MODES:
        raise typer.BadParameter(f"{value!r} is none of {', '.join(MODES)}")
    return value


def _engine(value: str) -> str:
    if value not in ("local", "ray"):
        raise typer.BadParameter(f"{value!r} is none of local, ray")
    return value


def _on_ray() -> Callable[..., Any]:
    from pystale.demo.cluster import start_on_ray

    if importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray; install it with: pip install 'pystale[ray]'")
    return start_on_ray


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 8:
        raise typer.BadParameter(f"{value!r} is not a number from 0 to 8")
    return share


@app.command(
    help="Train a small policy by asynchronous GRPO with partial rollouts, here and now, in less than a minute.\n\n"
    "A policy in NumPy learns to count from a to b. Weight syncs land in the middle of its long responses, which are "
    "continued under the new weights. Every token knows the version that wrote it: stale ones are masked out of the "
    "loss, and groups with nothing fresh left are generated anew. Ctrl-C ends it early, with the report so far; with "
    "--checkpoint the same command goes on with it, as it does after a crash."
)
def demo(
    context: typer.Context,
    mode: Annotated[
        str,
        typer.Option(
            parser=_mode,
            metavar="MODE",
            help="sync: exactly a batch is generated, then trained; nothing is stale. colocated: what is not finished "
            "when a batch is there is continued after the weight sync. disaggregated: the engine generates in the "
            "background while the policy trains.",
        ),
    ] = Settings.mode,
    steps: Annotated[int, typer.Option(parser=_integer(1), metavar="N", help="Trainer steps.")] = Settings.steps,
    seed: Annotated[
        int,
        typer.Option(
            parser=_integer(0, 2**63),
            metavar="N",
            help="Without --checkpoint the same seed gives the same run, but not in mode disaggregated, where it "
            "depends on the speed of the machine.",
        ),
    ] = Settings.seed,
    group_size: Annotated[
        int, typer.Option(parser=_integer(1, 128), metavar="N", help="Responses per prompt.")
    ] = Settings.group_size,
    max_staleness: Annotated[
        int,
        typer.Option(
            parser=_integer(0), metavar="N", help="Extra weight syncs that the oldest token of a response may lag."
        ),
    ] = Settings.max_staleness,
    max_token_staleness: Annotated[
        int | None,
        typer.Option(
            parser=_integer(0, none=True),
            metavar="N|none",
            help="Extra weight syncs that a token in the loss may lag. none: no token is masked.",
        ),
    ] = Settings.max_token_staleness,
    sync_weights_interval: Annotated[
        int, typer.Option(parser=_integer(1), metavar="N", help="Trainer steps between two weight syncs.")
    ] = Settings.sync_weights_interval,
    tail_batch_trigger_size: Annotated[
        int,
        typer.Option(
            parser=_integer(-1),
            metavar="N",
            help="-1: expired groups are discarded. 0: they are generated anew at once. N: they are, once N of them "
            "wait, in a round without oversampling.",
        ),
    ] = Settings.tail_batch_trigger_size,
    over_sample_threshold: Annotated[
        float,
        typer.Option(
            parser=_share, metavar="X", help="Share of a batch, which is 16 groups, to generate on top of the batch."
        ),
    ] = Settings.over_sample_threshold,
    engine: Annotated[
        str,
        typer.Option(
            parser=_engine,
            metavar="ENGINE",
            help="local: the buffer is in this process. ray: it is an actor of a Ray cluster, the one that RAY_ADDRESS "
            "names or a new one on this machine.",
        ),
    ] = "local",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep the run in this directory, and go on with the run that is there: after Ctrl-C, a crash or "
            "kill -9.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(parser=_integer(1), metavar="N", help="Trainer steps between two checkpoints.")
    ] = 10,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Record the run in this file, for pystale replay. It must not exist; to go on, name another.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write plots (PNG) and the record of the run (JSON) to this directory.",
            show_default=False,
        ),
    ] = None,
) -> Callable[[], int]:
    given = {
        name: value
        for name, value in context.params.items()
        if name not in ("mode", "engine", "checkpoint", "checkpoint_every", "trace", "report")
        and _was_given(context, name)
    }
    try:
        settings = Settings.of_mode(mode, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if checkpoint == "":
        raise typer.BadParameter("--checkpoint is empty; name a directory")
    if checkpoint is None and _was_given(context, "checkpoint_every"):
        raise typer.BadParameter("--checkpoint-every needs --checkpoint DIR")
    if trace == "":
        raise typer.BadParameter("--trace is empty; name a file")
    if report == "":
        raise typer.BadParameter("--report is empty; name a directory")
    if engine == "ray" and trace is not None:
        raise typer.BadParameter("--trace records a run with --engine local only; leave one of the two out")
    if engine == "ray" and checkpoint is not None:
        raise typer.BadParameter("--checkpoint keeps a run with --engine local only; leave one of the two out")
    return functools.partial(_demo, settings, checkpoint, checkpoint_every, engine, trace, report)


def _limits(*, none: bool) -> Callable[[str], list[int | None]]:
    """Parser of an option that takes integers, and the word "none", between commas."""
    parse = _integer(0, none=none)

    def parse_all(value: str) -> list[int | None]:
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            raise typer.BadParameter(f"{value!r} is not a list of limits between commas, such as 0,1,2")
        return [parse(part) for part in parts]

    return parse_all


@app.command(
    help="Replay a recorded run under other staleness limits.\n\n"
    "TRACE is a file that pystale demo --trace or ReplayBuffer(trace=...) wrote, or a .csv with the columns group, "
    "rollout, model_step, tokens, put_step. Every combination of the limits is played to a buffer, after the recorded "
    "settings, which give the run's own counts. What other settings would have done rests on assumptions that stand "
    "under the table."
)
def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="The recorded run.", show_default=False)],
    max_staleness: Annotated[
        Any,
        typer.Option(
            parser=_limits(none=False),
            metavar="N,N,...",
            help="Extra weight syncs that the oldest token of a response may lag. Not given: as recorded.",
            show_default=False,
        ),
    ] = None,
    max_token_staleness: Annotated[
        Any,
        typer.Option(
            parser=_limits(none=True),
            metavar="N|none,...",
            help="Extra weight syncs that a token in the loss may lag. none: no token is masked. Not given: as "
            "recorded.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write plots (PNG) to this directory.", show_default=False)
    ] = None,
    batch_groups: Annotated[
        int | None,
        typer.Option(
            parser=_integer(1),
            metavar="N",
            help="Groups per batch of a run from a .csv. Not given: as many as came per step, rounded down.",
            show_default=False,
        ),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged lines out and count them, instead of ending there.")
    ] = False,
) -> Callable[[], int]:
    if plot == "":
        raise typer.BadParameter("--plot is empty; name a directory")
    return functools.partial(
        _replay,
        trace,
        max_staleness,
        max_token_staleness,
        as_json=as_json,
        plots=plot,
        skip_damaged=skip_damaged,
        batch_groups=batch_groups,
    )


def _replay(trace: str, max_staleness: Any, max_token_staleness: Any, *, plots: str | None, **options: Any) -> int:
    from pystale.replay.command import show

    if plots is not None:
        _need_matplotlib("--plot")
    return show(trace, max_staleness, max_token_staleness, plots=plots, **options)


@app.command(
    help="Measure on this machine what pystale saves, in about a minute.\n\n"
    "Masks, the question whether a token is left to train, put, refresh and take are compared with list "
    "comprehensions and NumPy. Both sides must give the same results before they are timed, in turn. Ctrl-C ends it "
    "with what was measured so far."
)
def bench(
    seconds: Annotated[
        int,
        typer.Option(
            parser=_integer(1, 3600),
            metavar="N",
            help="Time for all of it. What does not fit in is left out, and named.",
        ),
    ] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write plots (PNG) to this directory.", show_default=False)
    ] = None,
) -> Callable[[], int]:
    if plot == "":
        raise typer.BadParameter("--plot is empty; name a directory")
    return functools.partial(_bench, seconds, as_json, plot)


def _bench(seconds: int, as_json: bool, plots: str | None) -> int:
    from pystale.bench.command import Disagreement, show

    try:
        if plots is not None:
            _need_matplotlib("--plot")
        return show(seconds, as_json=as_json, plots=plots)
    except Disagreement as error:
        _refuse(str(error))
        return 1


def _need_matplotlib(option: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib; install it with: pip install 'pystale[cli]'")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _demo(
    settings: Settings, checkpoint: str | None, every: int, engine: str, trace: str | None, plots: str | None
) -> int:
    from pystale.demo.checkpoint import RunDirectory
    from pystale.demo.display import NotKept, show

    directory = None if checkpoint is None else RunDirectory(checkpoint, every)
    try:
        if plots is not None:
            _need_matplotlib("--report")
        return show(settings, directory, None if engine == "local" else _on_ray(), trace, plots=plots)
    except NotKept as error:
        _refuse(str(error))
        return 1

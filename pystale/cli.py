"""The ``pystale`` command."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

__all__ = ["app", "run"]

app = typer.Typer(
    help="Staleness control for asynchronous LLM reinforcement learning.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def run(arguments: Sequence[str]) -> int:
    """Run a command line, and return its exit code; a mistake in it is one line on stderr, and 2."""
    # The base of every complaint about arguments; it is Click's or Typer's own, depending on the version of Typer.
    usage_error: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
    try:
        result = app(list(arguments), prog_name="pystale", standalone_mode=False)
    except usage_error as error:
        return _refuse(error.format_message())
    except typer.Abort:
        return 130
    return result if isinstance(result, int) else 0


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


def _int_or_none(value: str) -> int | None:
    text = str(value).strip().lower()
    if text == "none":
        return None
    if not text.isdecimal():
        raise typer.BadParameter(f"{value!r} is neither an integer from 0 on nor none.")
    return int(text)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Trainer steps.")] = 450,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same run.")] = 0,
    group_size: Annotated[int, typer.Option(min=1, max=128, help="Responses per prompt.")] = 8,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Extra weight syncs that the oldest token of a response may lag.")
    ] = 2,
    max_token_staleness: Annotated[
        int | None,
        typer.Option(
            parser=_int_or_none,
            metavar="none|INTEGER",
            help="Extra weight syncs that a token in the loss may lag; none: no token is masked.",
        ),
    ] = 1,
    sync_weights_interval: Annotated[int, typer.Option(min=1, help="Trainer steps between two weight syncs.")] = 1,
    tail_batch_trigger_size: Annotated[
        int,
        typer.Option(
            min=-1,
            help="-1: expired groups are discarded. 0: they are generated anew at once. "
            "N: when N of them wait, in a round without oversampling.",
        ),
    ] = 0,
    over_sample_threshold: Annotated[
        float, typer.Option(min=0.0, max=8.0, help="Share of the batch of 16 groups to generate on top of it.")
    ] = 0.75,
) -> None:
    """Train a small policy by asynchronous GRPO with partial rollouts, here and now, in less than a minute.

    A policy in NumPy learns to count from a to b. Weight syncs land in the middle of long responses, which are
    continued under the new weights; every token knows the version that wrote it, stale ones are masked out of the
    loss, expired groups are generated anew. It ends with a report. Ctrl-C ends it early, with the report so far.
    """
    from pystale.demo.display import show
    from pystale.demo.settings import Settings

    settings = Settings(
        steps=steps,
        seed=seed,
        group_size=group_size,
        max_staleness=max_staleness,
        max_token_staleness=max_token_staleness,
        sync_weights_interval=sync_weights_interval,
        tail_batch_trigger_size=tail_batch_trigger_size,
        over_sample_threshold=over_sample_threshold,
    )
    raise typer.Exit(show(settings))

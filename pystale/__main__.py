"""Entry of the ``pystale`` command and of ``python -m pystale``."""

import importlib.util
import os
import sys

__all__ = ["main"]

# What the extra `cli` brings; looked for before anything of it is imported.
_CLI = ("typer", "rich", "threadpoolctl")


def main() -> int:
    """Run the command line and return its exit code: 2 for bad usage, 130 after Ctrl-C, 141 after a closed pipe."""
    if missing := [name for name in _CLI if importlib.util.find_spec(name) is None]:
        print(f"pystale: the command line needs {' and '.join(missing)}: pip install 'pystale[cli]'", file=sys.stderr)
        return 1
    try:
        from pystale.cli import run

        if sys.stdout is None:  # closed by whoever started this: nobody reads
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        code = run(sys.argv[1:])
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # What is still buffered must go nowhere, or Python would complain while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141  # nobody reads any more
        print(f"pystale: standard output: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""A short demo run as a process of its own: ``python demo_process.py DIRECTORY MODE STEPS BASE_STEPS``.

It is the command but for a base model that learns next to nothing, so that a test can start it many times.
"""

import sys

from pystale.demo.checkpoint import RunDirectory
from pystale.demo.display import show
from pystale.demo.settings import Settings

EVERY, BASE_STEPS = 2, 10


def settings(mode: str, steps: int, base_steps: int = BASE_STEPS) -> Settings:
    return Settings.of_mode(mode, steps=steps, group_size=2, base_steps=base_steps)


if __name__ == "__main__":
    directory, mode, steps, base_steps = sys.argv[1:]
    try:
        code = show(settings(mode, int(steps), int(base_steps)), RunDirectory(directory, EVERY))
    except KeyboardInterrupt:  # before the run has begun, or while it reports; the command does the same
        code = 130
    sys.exit(code)

"""A pytest plugin that runs XTuner's own tests with pystale in place of its replay buffer; see CONTRIBUTING.md."""

from collections.abc import Callable
from typing import Any

calls = {"buffers built": 0, "masks computed": 0}


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    return wrapper


def pytest_sessionstart() -> None:
    # Not earlier: a conftest of XTuner's stubs the parts of it that need a GPU, and has to come first.
    from pystale.integrations.xtuner import XTunerReplayBuffer, install, masks

    install()
    XTunerReplayBuffer.__init__ = counted("buffers built", XTunerReplayBuffer.__init__)
    masks._mask = counted("masks computed", masks._mask)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"pystale in XTuner's place: {calls}")

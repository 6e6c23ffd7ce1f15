"""XTuner's replay buffer and mask function, replaced by pystale's.

One line turns it on, before the trainer is built::

    import pystale.integrations.xtuner

    pystale.integrations.xtuner.install()

From then on XTuner's own ``SyncReplayBufferConfig().build()`` and ``AsyncReplayBufferConfig().build()`` give an
:class:`XTunerReplayBuffer`, and its trainer masks stale tokens with pystale's kernels. :func:`uninstall` takes it back;
buffers that were built stay what they are.

Without `install`, the configs of this module can be given to a trainer in place of XTuner's. They are subclasses of
XTuner's, made when they are first asked for: importing this module does not import XTuner.
"""

from typing import Any

from pystale.integrations.xtuner.buffer import XTunerReplayBuffer
from pystale.integrations.xtuner.installation import config_class, install, uninstall
from pystale.integrations.xtuner.masks import calculate_group_effective_response_masks

# The two configs are not listed: whoever goes through the names of a module would need XTuner.
__all__ = ["XTunerReplayBuffer", "calculate_group_effective_response_masks", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncReplayBufferConfig", "SyncReplayBufferConfig"):
        return config_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

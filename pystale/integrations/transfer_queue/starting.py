"""Starting TransferQueue where it has what it needs, instead of waiting for that without end."""

import contextlib
import os
import threading
from collections.abc import Mapping
from typing import Any

from pystale.integrations.transfer_queue.framework import framework
from pystale.staleness import checked_int

__all__ = ["start_transfer_queue"]


def start_transfer_queue(
    *, num_data_storage_units: int = 2, config: Mapping[str, Any] | None = None, timeout: float = 300.0
) -> None:
    """Start TransferQueue in the Ray cluster of this process; does nothing but connect where it runs already.

    ``transfer_queue.init`` waits for ever, and silently, where Ray cannot place its processes. This does not.

    Parameters
    ----------
    num_data_storage_units : int, default 2
        Processes that hold payloads. Each takes a logical CPU of Ray, and the controller one more.
    config : mapping, optional
        For ``transfer_queue.init``, merged over its defaults. Anything but the number of storage units.
    timeout : float, default 300.0
        Seconds.

    Raises
    ------
    RuntimeError
        If this process is in no Ray cluster, or that has too few logical CPUs free, naming how many it needs.
    TimeoutError
        If it has not started in time.
    """
    units = checked_int("num_data_storage_units", num_data_storage_units, at_least=1)
    settings = {"backend": {"SimpleStorage": {"num_data_storage_units": units}}}
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # or every operation logs a warning
    ray, queue = framework("ray"), framework("transfer_queue")
    if not ray.is_initialized():
        raise RuntimeError("TransferQueue runs in a Ray cluster, and this process is in none; call ray.init first")
    with contextlib.suppress(ValueError):
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
        units = -1  # it runs: nothing is to be placed
    free = ray.available_resources().get("CPU", 0)
    if free < units + 1:
        raise RuntimeError(
            f"TransferQueue needs {units + 1} logical CPUs of Ray, one for its controller and one for each of its "
            f"{units} storage units; {free:g} of {ray.cluster_resources().get('CPU', 0):g} are free. Start Ray with "
            "more, as in ray.init(num_cpus=8): they are a count, not cores. Or give fewer num_data_storage_units"
        )
    omegaconf = framework("omegaconf").OmegaConf
    merged = omegaconf.merge(omegaconf.create(dict(config or {})), omegaconf.create(settings))
    failed: list[BaseException] = []

    def start() -> None:
        try:
            queue.init(merged)
        except BaseException as error:
            failed.append(error)

    starting = threading.Thread(target=start, name="pystale-transferqueue-start", daemon=True)
    starting.start()
    starting.join(timeout)
    if failed:
        raise failed[0]
    if starting.is_alive():
        raise TimeoutError(
            f"TransferQueue has not started within {timeout} s; `ray status` says which of its processes Ray could "
            "not place"
        )

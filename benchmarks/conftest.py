"""Says with every result which processor level the kernels ran at."""

from typing import Any

import pystale


def pytest_report_header() -> str:
    return f"pystale: {pystale.build_info()}"


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["pystale"] = pystale.build_info()

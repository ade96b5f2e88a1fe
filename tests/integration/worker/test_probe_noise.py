"""A device is measured as what it is, whatever else its machine does meanwhile."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from harness.wait import wait_until
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker.messages import ProbeOrder, ProbeResult
from shoal.agent.worker.probe import probe

pytestmark = pytest.mark.alone
ORDER = ProbeOrder("CPUExecutionProvider", DeviceAccess(), 2, 10.0)
SPIN = "print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many other programs that never wait."""
    started = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(programs)]
    try:
        for each in started:
            wait_until(each.stdout.readline if each.stdout else list, 30.0, "a program to begin")
        yield
    finally:
        for each in started:
            each.kill()
            each.communicate()


def test_four_starts_under_changing_load_measure_the_same() -> None:
    """Within 15 %. By the clock they differed four times."""
    found: list[ProbeResult] = []
    for programs in (0, 1, 4, 2):
        with busy(programs):
            found.append(probe(ORDER))
    rates = [each.rates for each in found]
    figures: dict[str, list[float]] = {
        "matmul": [each.matmul_flops["fp32"] for each in rates],
        "conv": [each.conv_flops["fp32"] for each in rates],
    }
    for name, values in figures.items():
        assert max(values) <= 1.15 * min(values), f"{name}: {values}"

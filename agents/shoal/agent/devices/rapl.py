"""Energy counters of processors: powercap's `energy_uj` files (RAPL), one per package."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

RAPL: Final = "shoal.agent.devices.rapl:open_energy_counter"
"""As `driver_port.EnergyCounter.opener`; the arguments are paths of `energy_uj` files."""
_MOST_PACKAGE_W: Final = 2000.0
"""Four times what the largest packages draw that are sold (AMD EPYC 9965, Intel Xeon 6980P: 500 W)."""
_SLACK_S: Final = 1.0
"""Counters move in steps, so that a short time may have more than its own joules."""


class RaplCounter:
    """Joules of all packages since it was made. The files wrap at `max_energy_range_uj`.

    NaN where a file cannot be read, or was set back, which looks like a wrap of more joules than a package can have
    drawn: as after a suspend, or when the kernel's driver is loaded anew. The time since the call before that one then
    counts for nothing.
    """

    def __init__(self, *paths: str, now: Callable[[], float] = time.perf_counter) -> None:
        """Raises OSError if this process may not read them."""
        self._files = [Path(path) for path in paths]
        self._ranges = [_number(path.with_name("max_energy_range_uj")) for path in self._files]
        self._last: list[float] = [_number(path) for path in self._files]
        self._now = now
        self._at = now()
        self._total_uj = 0.0

    def __call__(self) -> float:
        now, found = self._now(), [_number_or_nan(path) for path in self._files]
        steps = [
            after - before + (wraps_at if after < before else 0)
            for before, after, wraps_at in zip(self._last, found, self._ranges, strict=True)
        ]
        most_uj = _MOST_PACKAGE_W * 1e6 * (now - self._at + _SLACK_S)
        self._at, self._last = now, found
        if not all(0 <= step <= most_uj for step in steps):
            return math.nan
        self._total_uj += sum(steps)
        return self._total_uj / 1e6


open_energy_counter = RaplCounter


def _number(path: Path) -> int:
    """Raises OSError."""
    try:
        return int(path.read_text())
    except ValueError as error:
        raise OSError(f"{path} holds no number") from error


def _number_or_nan(path: Path) -> float:
    try:
        return _number(path)
    except OSError:
        return math.nan

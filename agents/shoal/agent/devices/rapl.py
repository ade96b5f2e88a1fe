"""Energy counters of processors: powercap's `energy_uj` files (RAPL), one per package."""

from pathlib import Path
from typing import Final

RAPL: Final = "shoal.agent.devices.rapl:open_energy_counter"
"""As `driver_port.EnergyCounter.opener`; the arguments are paths of `energy_uj` files."""


class RaplCounter:
    """Joules of all packages since it was made. The files wrap at `max_energy_range_uj`."""

    def __init__(self, *paths: str) -> None:
        """Raises OSError if this process may not read them."""
        self._files = [Path(path) for path in paths]
        self._ranges = [_number(path.with_name("max_energy_range_uj")) for path in self._files]
        self._last = [_number(path) for path in self._files]
        self._total_uj = 0

    def __call__(self) -> float:
        for index, path in enumerate(self._files):
            now = _number(path)
            step = now - self._last[index]
            self._total_uj += step if step >= 0 else step + self._ranges[index]
            self._last[index] = now
        return self._total_uj / 1e6


open_energy_counter = RaplCounter


def _number(path: Path) -> int:
    return int(path.read_text())

"""Energy of a worker's runs: counted if the device counts it, otherwise watts times busy seconds, and reported as such.

The estimate for a processor without a counter is the median over 621 cloud instances of package and memory power per
virtual processor: 7.65 W busy, 1.34 W idle (cloud-carbon-footprint/ccf-coefficients b0032d9, Apache-2.0,
`data/ccf_aws_instance_power.csv.gz`, columns PkgWatt and RAMWatt at 100 % and idle over vCPU).
"""

import pkgutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from shoal.agent.driver_port import DeviceAccess
from shoal.types.device import EnergySource

CORE_ACTIVE_W: Final = 7.65
CORE_IDLE_W: Final = 1.34
_IDLE_S: Final = 0.3


class Energy(Protocol):
    """`joules` returns the energy of each origin so far, given each origin's busy seconds so far. Both only grow."""

    source: EnergySource

    def joules(self, busy_s: Mapping[str, float]) -> dict[str, float]: ...


class ConstantPower:
    """Watts times busy seconds: from an emulated device's profile, or an estimate."""

    def __init__(self, watts: float, source: EnergySource) -> None:
        self.source = source
        self._watts = watts

    def joules(self, busy_s: Mapping[str, float]) -> dict[str, float]:
        return {origin: seconds * self._watts for origin, seconds in busy_s.items()}


class CountedEnergy:
    """Energy counted by the device between two calls, times this process's share, split by busy seconds.

    Energy of a window in which nothing ran here is attributed to no origin.
    """

    source = EnergySource.MEASURED

    def __init__(self, counter: Callable[[], float], share: Callable[[float], float]) -> None:
        self._counter = counter
        self._share = share
        self._last = counter()
        self._busy: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        share(0.0)

    def joules(self, busy_s: Mapping[str, float]) -> dict[str, float]:
        new = {origin: seconds - self._busy.get(origin, 0.0) for origin, seconds in busy_s.items()}
        total = sum(new.values())
        if total > 0:
            now = self._counter()
            mine = max(0.0, now - self._last) * self._share(total)
            self._last = now
            self._busy = dict(busy_s)
            for origin, seconds in new.items():
                self._joules[origin] = self._joules.get(origin, 0.0) + mine * seconds / total
        return {origin: self._joules.get(origin, 0.0) for origin in busy_s}


class CpuShare:
    """This process's share of the CPU time of all processes since the last call; between 0 and 1."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._last = self._read()

    def __call__(self, busy_s: float) -> float:
        last, self._last = self._last, self._read()
        mine, busy = (now - then for now, then in zip(self._last, last, strict=True))
        return min(1.0, mine / busy) if busy > 0 else 0.0

    def _read(self) -> tuple[int, int]:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
            int, (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        )
        own = (self._proc / "self/stat").read_text().rpartition(")")[2].split()
        return int(own[11]) + int(own[12]), user + nice + system + irq + softirq


class BusyShare:
    """The share of the time since the last call in which runs were busy; between 0 and 1."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, busy_s: float) -> float:
        last, self._last = self._last, time.perf_counter()
        return min(1.0, busy_s / max(self._last - last, 1e-9))


def energy_of(access: DeviceAccess, threads: int) -> Energy:
    """Counted if a counter can be read, otherwise estimated from the CPU time of `threads` per run."""
    counter = _open_counter(access)
    if counter is None or access.energy is None:
        return ConstantPower(CORE_ACTIVE_W * threads, EnergySource.ESTIMATED)
    return CountedEnergy(counter, CpuShare() if access.energy.of_processors else BusyShare())


def idle_watts(access: DeviceAccess, cores: int) -> float:
    """Idle power per core, in watts, measured while this process does nothing. The estimate if there is no counter."""
    counter = _open_counter(access)
    if counter is None:
        return CORE_IDLE_W
    start = counter()
    threading.Event().wait(_IDLE_S)
    return (counter() - start) / _IDLE_S / max(1, cores)


def _open_counter(access: DeviceAccess) -> Callable[[], float] | None:
    """Returns joules so far. None if the device does not count them, or this process may not read them."""
    if access.energy is None:
        return None
    try:
        counter: Callable[[], float] = pkgutil.resolve_name(access.energy.opener)(*access.energy.arguments)
    except OSError:
        return None
    return counter

"""Energy of a worker's runs: counted if the device counts it, otherwise watts times busy seconds, and reported as such.

The estimate for a processor without a counter is the median over 621 cloud instances of package and memory power per
virtual processor: 7.65 W busy, 1.34 W idle (cloud-carbon-footprint/ccf-coefficients b0032d9, Apache-2.0,
`data/ccf_aws_instance_power.csv.gz`, columns PkgWatt and RAMWatt at 100 % and idle over vCPU).
"""

import pkgutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from shoal.agent.driver_port import DeviceAccess
from shoal.types.device import EnergySource
from shoal.types.readings import MOST_WATTS

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


class Share(Protocol):
    """How much of what a device takes is this process's."""

    def read(self) -> tuple[int, int]:
        """Counters of this process and of all, so far."""
        ...

    def between(self, then: tuple[int, int], now: tuple[int, int], busy: float) -> float:
        """0 to 1. busy: seconds of runs, in parts of the time between the two readings."""
        ...


class _Mark(NamedTuple):
    """Where a window may begin."""

    at: float
    joules: float
    share: tuple[int, int]


_MOST_MARKS: Final = 128
"""Of idle windows kept. A run over more of them counts with what it took in the last of these."""
_SLACK_S: Final = 1.0
"""Counters move in steps (NVML's every tenth of a second), so that a short time may have more than its own joules."""


class CountedEnergy:
    """Energy counted by the device between two calls, times this process's share, split by busy seconds.

    Busy seconds are told when a run ends. So a window begins as long before that as runs were busy, and not when the
    run before them ended: energy of the time between is attributed to no origin.
    """

    source = EnergySource.MEASURED

    def __init__(
        self, counter: Callable[[], float], share: Share, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._counter = counter
        self._share = share
        self._now = now
        # Since the last window, at each call; the first is its end.
        self._marks = deque([self._mark()], _MOST_MARKS)
        self._busy: dict[str, float] = {}
        self._joules: dict[str, float] = {}

    def joules(self, busy_s: Mapping[str, float]) -> dict[str, float]:
        new = {origin: seconds - self._busy.get(origin, 0.0) for origin, seconds in busy_s.items()}
        total, now = sum(new.values()), self._mark()
        if total > 0:
            while len(self._marks) > 1 and self._marks[1].at <= now.at - total:
                self._marks.popleft()
            then = self._marks[0]
            share = self._share.between(then.share, now.share, total / max(now.at - then.at, 1e-9))
            counted, most = now.joules - then.joules, MOST_WATTS * (now.at - then.at + _SLACK_S)
            # Nothing where the counter did not tell (NaN), or was set back or on.
            mine = counted * share if 0.0 <= counted <= most else 0.0
            self._marks.clear()
            self._busy = dict(busy_s)
            for origin, seconds in new.items():
                self._joules[origin] = self._joules.get(origin, 0.0) + mine * seconds / total
        self._marks.append(now)
        return {origin: self._joules.get(origin, 0.0) for origin in busy_s}

    def _mark(self) -> _Mark:
        return _Mark(self._now(), self._counter(), self._share.read())


class CpuShare:
    """This process's share of the CPU time of all processes."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def read(self) -> tuple[int, int]:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
            int, (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        )
        own = (self._proc / "self/stat").read_text().rpartition(")")[2].split()
        return int(own[11]) + int(own[12]), user + nice + system + irq + softirq

    def between(self, then: tuple[int, int], now: tuple[int, int], busy: float) -> float:
        mine, all_of_them = (after - before for after, before in zip(now, then, strict=True))
        return min(1.0, mine / all_of_them) if all_of_them > 0 else 0.0


class BusyShare:
    """The share of the time in which runs were busy."""

    def read(self) -> tuple[int, int]:
        return 0, 0

    def between(self, then: tuple[int, int], now: tuple[int, int], busy: float) -> float:
        return min(1.0, busy)


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

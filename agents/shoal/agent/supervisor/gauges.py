"""What the supervisor sees of its node: devices through their drivers, counters of workers and front as last told."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.agent.ports import Driver, Front, FrontStats, Log, Pace, Workers, WorkerStats
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Device, Reading
from shoal.types.units import Seconds, Watts

Tell = Callable[[str, str, str], None]
"""code, subject, message: to the log now, and to the region when there is a link."""


class Gauges:
    """tell: of a device that does not answer, and of a name that two drivers claim. front_turned: the front became
    ready, or is no more."""

    def __init__(
        self,
        drivers: Sequence[Driver],
        workers: Workers,
        front: Front,
        log: Log,
        tell: Tell,
        front_turned: Callable[[], None],
    ) -> None:
        self._drivers = drivers
        self._workers = workers
        self._front = front
        self._log = log
        self._tell = tell
        self._front_turned = front_turned
        self._by_device: dict[str, Driver] = {}
        self._silent: set[str] = set()
        self._unmeasured: set[str] = set()
        """Devices that fell silent and were not measured since: what they can do now, nobody knows."""
        self._back: set[str] = set()
        self._worker_stats: dict[str, WorkerStats] = {}
        self._devices_of: dict[str, str] = {}
        self._worked_j: dict[str, float] = {}
        self.front = FrontStats(ready=False, ingress=(), in_flight=())

    def discover(self) -> tuple[Device, ...]:
        """Asks every driver; of two devices of one name the first counts."""
        found: list[Device] = []
        for driver in self._drivers:
            for device in driver.discover():
                if device.name in self._by_device:
                    self._tell(Code.NAME_DUPLICATE, device.name, "two drivers offer a device of this name")
                    continue
                self._by_device[device.name] = driver
                found.append(device)
        return tuple(found)

    def pace(self, device: str) -> Pace | None:
        driver = self._by_device.get(device)
        return driver.pace(device) if driver else None

    def rest(self, device: str, asleep: bool) -> Seconds:
        """As `Driver.rest`; of a device that no driver has, 0."""
        driver = self._by_device.get(device)
        return driver.rest(device, asleep) if driver else Seconds(0.0)

    def read(self, device: str) -> Reading | None:
        """None while it does not answer, which is told once, and from then on until it was measured again."""
        driver = self._by_device.get(device)
        if driver is None:
            return None
        try:
            reading = driver.read(device)
        except ShoalError as error:
            if device not in self._silent:
                self._silent.add(device)
                self._unmeasured.add(device)
                self._tell(error.code, device, str(error))
            return None
        if device in self._silent:
            self._silent.discard(device)
            self._back.add(device)
        return None if device in self._unmeasured else _finite(self._with_work(reading, driver.pace(device)))

    def back(self) -> tuple[str, ...]:
        """Devices that answer again, each once: they are to be measured."""
        found = tuple(sorted(self._back))
        self._back.clear()
        return found

    def measured(self, device: str) -> None:
        """There is a receipt of what it can do now."""
        if device not in self._silent:
            self._unmeasured.discard(device)

    def _with_work(self, reading: Reading, pace: Pace | None) -> Reading:
        """An emulated device's joules: its driver counts it awake and at rest, its workers what they do."""
        if pace is None or math.isnan(reading.energy_j):
            return reading
        beyond_idling = 1 - pace.idle_w / pace.active_w
        worked_j = self._worked_j.get(reading.device, 0.0)
        return replace(reading, energy_j=reading.energy_j + beyond_idling * worked_j)

    async def sample(self) -> bool:
        """Asks front and workers for their counters; False when one did not answer, and its last ones stand."""
        try:
            workers, front = await self._workers.stats(), await self._front.stats()
        except ShoalError:
            workers, front = None, replace(self.front, ready=False)
        if workers is not None:
            self._count(workers)
            self._worker_stats = {each.assignment: each for each in workers}
        if front.ready != self.front.ready:
            self._log("front_ready" if front.ready else "front_down", error=not front.ready)
            self._front_turned()
        self.front = front
        return workers is not None

    def runs_on(self, assignment: str, device: str) -> None:
        """From now on its joules count to that device."""
        self._devices_of[assignment] = device

    def gone(self, assignment: str) -> None:
        """Nothing of it runs any more."""
        self._devices_of.pop(assignment, None)

    def _count(self, workers: Sequence[WorkerStats]) -> None:
        """What each has used since the last sample; all of it where its counters began anew."""
        for each in workers:
            device = self._devices_of.get(each.assignment)
            if device is None:
                continue
            before = self._worker_stats.get(each.assignment)
            then, now = _joules(before) if before is not None else 0.0, _joules(each)
            self._worked_j[device] = self._worked_j.get(device, 0.0) + (now - then if now >= then else now)

    def worker(self, assignment: str) -> WorkerStats | None:
        """As of the last sample."""
        return self._worker_stats.get(assignment)

    def in_flight(self, assignment: str) -> int:
        """The greater of what its worker and the front count."""
        stats = self._worker_stats.get(assignment)
        return max(stats.in_flight if stats else 0, dict(self.front.in_flight).get(assignment, 0))


def _joules(stats: WorkerStats) -> float:
    return math.fsum(each.joules for each in stats.served if not math.isnan(each.joules))


def _finite(reading: Reading) -> Reading:
    """A sensor that shows infinity does not tell: one bad value must not cost the whole message, and the node its
    voice."""
    return replace(
        reading,
        utilisation=_known(reading.utilisation),
        temperature_c=_known(reading.temperature_c),
        power_w=Watts(_known(reading.power_w)),
        energy_j=_known(reading.energy_j),
    )


def _known(value: float) -> float:
    return math.nan if math.isinf(value) else value

"""The supervisor's view of its node: devices through their drivers, and the last counters of workers and front."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.agent.driver_port import DeviceAccess, DeviceDriver, EmulatedPace
from shoal.agent.ports import AgentClock, FrontControl, FrontStats, Log, WorkerPool, WorkerStats
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, DeviceKind, Reading, SilentDevice
from shoal.types.units import Elapsed, Seconds, Wall, Watts

EventReporter = Callable[[str, str, str], None]
"""(code, subject, message): writes to the log now, and sends to the region while there is a link."""


class NodeMonitor:
    """Reads devices, workers and the front.

    `report_event` gets an event for a device that does not answer, and for a name that two drivers claim.
    `on_front_change` is called when the front becomes ready, or stops being so.
    """

    def __init__(
        self,
        drivers: Sequence[DeviceDriver],
        workers: WorkerPool,
        front: FrontControl,
        clock: AgentClock,
        log: Log,
        report_event: EventReporter,
        on_front_change: Callable[[], None],
    ) -> None:
        self._drivers = drivers
        self._workers = workers
        self._front = front
        self._clock = clock
        self._log = log
        self._report_event = report_event
        self._on_front_change = on_front_change
        self._driver_by_device: dict[str, DeviceDriver] = {}
        # Whose memory each device works in.
        self._memory_roots: dict[str, str] = {}
        # Roots of the devices that work in the memory of processes.
        self._host_roots: set[str] = set()
        # Devices that did not answer when they were read last: since when, and why now.
        self._silent_devices: dict[str, tuple[Elapsed, Refusal]] = {}
        # Devices that were lost and not probed since: what they can do now is unknown.
        self._unmeasured_devices: set[str] = set()
        self._returned_devices: set[str] = set()
        self._worker_stats: dict[str, WorkerStats] = {}
        self._last_request_at: dict[str, Elapsed] = {}
        self._device_by_assignment: dict[str, str] = {}
        self._work_joules: dict[str, float] = {}
        self.front_stats = FrontStats(ready=False, ingress=(), in_flight=())

    def discover(self) -> tuple[Device, ...]:
        """Ask every driver. If two drivers offer a device of one name, the first one counts."""
        found: list[Device] = []
        for driver in self._drivers:
            for device in driver.discover():
                if self._driver_by_device.get(device.name) not in (None, driver):
                    self._report_event(Code.NAME_DUPLICATE, device.name, "two drivers offer a device of this name")
                    continue
                self._driver_by_device[device.name] = driver
                self._memory_roots[device.name] = device.memory_root
                if device.kind is DeviceKind.CPU:
                    self._host_roots.add(device.memory_root)
                found.append(device)
        return tuple(found)

    def same_memory(self, device: str) -> frozenset[str]:
        """Names of the devices that work in the device's memory, its own among them."""
        root = self._memory_roots.get(device)
        return frozenset(each for each, own in self._memory_roots.items() if own == root) | {device}

    def is_in_host_memory(self, device: str) -> bool:
        """Whether its models and the node's processes share memory."""
        return self._memory_roots.get(device) in self._host_roots

    def access(self, device: str) -> DeviceAccess:
        """As `DeviceDriver.access`. Nothing special for a device that no driver has."""
        driver = self._driver_by_device.get(device)
        return driver.access(device) if driver else DeviceAccess()

    def set_sleep(self, device: str, asleep: bool) -> Seconds:
        """As `DeviceDriver.set_sleep`. 0 for a device that no driver has, or whose driver does not answer: whoever
        wants to run something there finds out when it is read."""
        driver = self._driver_by_device.get(device)
        try:
            return driver.set_sleep(device, asleep) if driver else Seconds(0.0)
        except ShoalError:
            return Seconds(0.0)

    def silence(self, device: str) -> Refusal | None:
        """Why the device did not answer when it was read last; None if it did. A device that no driver has found does
        not."""
        if device not in self._driver_by_device:
            return Refusal(Code.DEVICE_LOST, "no driver has found it")
        found = self._silent_devices.get(device)
        return found[1] if found is not None else None

    def silent_devices(self, epoch_wall: Seconds) -> tuple[SilentDevice, ...]:
        """Those that did not answer when they were read last. `epoch_wall`: the wall clock minus the elapsed clock."""
        return tuple(
            SilentDevice(device, why.code, why.words, Wall(since + epoch_wall))
            for device, (since, why) in sorted(self._silent_devices.items())
        )

    def read(self, device: str) -> Reading | None:
        """The device's reading. None from the first failed read, which is reported once, until the device answers. One
        that was lost must be probed again too; one whose driver failed (DEVICE_UNREACHABLE) is what it was."""
        driver = self._driver_by_device.get(device)
        if driver is None:
            return None
        try:
            reading = driver.read(device)
        except ShoalError as error:
            if error.code is not Code.DEVICE_UNREACHABLE:
                self._unmeasured_devices.add(device)
            if device not in self._silent_devices:
                self._report_event(error.code, device, error.refusal.words)
            since, _ = self._silent_devices.get(device, (self._clock.now(), None))
            self._silent_devices[device] = since, error.refusal
            return None
        if device in self._silent_devices:
            del self._silent_devices[device]
            if device in self._unmeasured_devices:
                self._returned_devices.add(device)
        return (
            None
            if device in self._unmeasured_devices
            else _without_infinities(self._with_work_energy(reading, driver.access(device).pace))
        )

    def take_returned_devices(self) -> tuple[str, ...]:
        """Devices that were lost and answer again. Each is returned once; the caller probes it."""
        found = tuple(sorted(self._returned_devices))
        self._returned_devices.clear()
        return found

    def on_measured(self, device: str) -> None:
        """A new receipt says what the device can do now."""
        if device not in self._silent_devices:
            self._unmeasured_devices.discard(device)

    def _with_work_energy(self, reading: Reading, pace: EmulatedPace | None) -> Reading:
        """Joules of an emulated device: its driver counts awake and asleep time, and its workers count their runs."""
        if pace is None or math.isnan(reading.energy_j):
            return reading
        beyond_idling = 1 - pace.idle_w / pace.active_w
        worked_j = self._work_joules.get(reading.device, 0.0)
        return replace(reading, energy_j=reading.energy_j + beyond_idling * worked_j)

    async def sample(self) -> bool:
        """Ask front and workers for their counters. False if one did not answer; then its last counters stay."""
        try:
            workers, front = await self._workers.stats(), await self._front.stats()
        except ShoalError:
            workers, front = None, replace(self.front_stats, ready=False)
        if workers is not None:
            self._count_energy(workers)
            self._note_requests(workers)
            self._worker_stats = {each.assignment: each for each in workers}
        if front.ready != self.front_stats.ready:
            if front.ready:
                self._log.info("front_ready")
            else:
                self._log.error("front_down")
            self._on_front_change()
        self._report_denials(front)
        self.front_stats = front
        return workers is not None

    def _report_denials(self, front: FrontStats) -> None:
        """Report refused forwards: the first of each front, the tenth, the hundredth, and so on."""
        before = dict(self.front_stats.denied)
        for name, count in front.denied:
            known = before.get(name, 0)
            if count > known and (known == 0 or len(str(count)) > len(str(known))):
                self._report_event(Code.FORWARD_DENIED, name, f"{count} requests that it forwarded were refused")

    def assign_device(self, assignment: str, device: str) -> None:
        """From now on, this assignment's joules count to that device."""
        self._device_by_assignment[assignment] = device

    def forget_assignment(self, assignment: str) -> None:
        """No part of the assignment runs now."""
        self._device_by_assignment.pop(assignment, None)
        self._last_request_at.pop(assignment, None)

    def last_request_at(self, assignment: str) -> Elapsed:
        """When a sample last showed a request in flight, or one that had ended since the sample before; minus infinity
        where none did."""
        return self._last_request_at.get(assignment, Elapsed(-math.inf))

    def _note_requests(self, workers: Sequence[WorkerStats]) -> None:
        at_front = dict(self.front_stats.in_flight)
        for each in workers:
            before = self._worker_stats.get(each.assignment)
            then = 0 if before is None else _requests(before)
            if each.in_flight or at_front.get(each.assignment, 0) or _requests(each) != then:
                self._last_request_at[each.assignment] = self._clock.now()

    def _count_energy(self, workers: Sequence[WorkerStats]) -> None:
        """Add what each worker used since the last sample. If its counters restarted, add all of it."""
        for each in workers:
            device = self._device_by_assignment.get(each.assignment)
            if device is None:
                continue
            before = self._worker_stats.get(each.assignment)
            then, now = _joules(before) if before is not None else 0.0, _joules(each)
            self._work_joules[device] = self._work_joules.get(device, 0.0) + (now - then if now >= then else now)

    def worker_stats(self, assignment: str) -> WorkerStats | None:
        """Counters of the last sample. None if the worker has not reported."""
        return self._worker_stats.get(assignment)

    def in_flight(self, assignment: str) -> int:
        """The greater of the worker's count and the front's."""
        stats = self._worker_stats.get(assignment)
        return max(stats.in_flight if stats else 0, dict(self.front_stats.in_flight).get(assignment, 0))


def _requests(stats: WorkerStats) -> int:
    return sum(each.requests for each in stats.served)


def _joules(stats: WorkerStats) -> float:
    return math.fsum(each.joules for each in stats.served if not math.isnan(each.joules))


def _without_infinities(reading: Reading) -> Reading:
    """Replace infinite values by NaN. An infinite reading is no measurement, and one bad value must not make the whole
    status unserialisable, which would silence the node."""
    return replace(
        reading,
        utilisation=_nan_if_infinite(reading.utilisation),
        temperature_c=_nan_if_infinite(reading.temperature_c),
        power_w=Watts(_nan_if_infinite(reading.power_w)),
        energy_j=_nan_if_infinite(reading.energy_j),
    )


def _nan_if_infinite(value: float) -> float:
    return math.nan if math.isinf(value) else value

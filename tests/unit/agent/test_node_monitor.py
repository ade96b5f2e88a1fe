"""What an agent counts of its workers, as they come and go."""

from typing import cast

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.log import RecordingLog
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.emulated import EmulatedDriver
from shoal.agent.driver_port import DriverOptions
from shoal.agent.ports import FrontControl, FrontStats, WorkerPool, WorkerStats
from shoal.agent.supervisor.node_monitor import NodeMonitor
from shoal.types.assignment import Served
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds

DEVICE = "xr5610-l4"


class Counted:
    """Workers that have used so many joules, by assignment."""

    def __init__(self) -> None:
        self.joules: dict[str, float] = {}

    async def stats(self) -> tuple[WorkerStats, ...]:
        none = Seconds(0.0)
        return tuple(
            WorkerStats(name, 0, (Served("", 1, 0, none, none, Joules(joules), EnergySource.PROFILE),))
            for name, joules in self.joules.items()
        )


class Ready:
    """A front that is."""

    async def stats(self) -> FrontStats:
        return FrontStats(ready=True, ingress=(), in_flight=())


async def test_joules_count_to_a_device_until_their_replica_is_gone() -> None:
    counted = Counted()
    driver = EmulatedDriver(ManualClock(), DriverOptions((DEVICE,), 1.0))
    workers, front = cast(WorkerPool, counted), cast(FrontControl, Ready())
    gauges = NodeMonitor([driver], workers, front, ManualClock(), RecordingLog(), lambda *_: None, lambda: None)
    gauges.discover()
    pace = driver.access(DEVICE).pace
    assert pace is not None

    def active_joules() -> float:
        reading = gauges.read(DEVICE)
        assert reading is not None
        return (reading.energy_j - driver.read(DEVICE).energy_j) / (1 - pace.idle_w / pace.active_w)

    gauges.assign_device("a", DEVICE)
    for joules in (5.0, 7.0, 2.0):  # then a worker that began anew
        counted.joules = {"a": joules}
        await gauges.sample()
    assert active_joules() == pytest.approx(9.0)
    counted.joules = {}
    await gauges.sample()
    gauges.forget_assignment("a")
    gauges.forget_assignment("never held")
    counted.joules = {"a": 100.0}
    await gauges.sample()
    assert active_joules() == pytest.approx(9.0), "nothing is kept of what is gone"


class Refusing:
    """A front that has refused so many forwards of one other."""

    def __init__(self) -> None:
        self.count = 0

    async def stats(self) -> FrontStats:
        return FrontStats(ready=True, ingress=(), in_flight=(), denied=(("thief", self.count),))


async def test_a58_refused_forwards_are_told_at_the_first_the_tenth_and_the_hundredth() -> None:
    told, refusing = list[tuple[str, str, str]](), Refusing()
    workers, front = cast(WorkerPool, Counted()), cast(FrontControl, refusing)
    gauges = NodeMonitor(
        [], workers, front, ManualClock(), RecordingLog(), lambda *each: told.append(each), lambda: None
    )
    for refusing.count in (1, 1, 5, 12, 90, 700, 700):
        await gauges.sample()
    assert [message.split()[0] for _, _, message in told] == ["1", "12", "700"]
    assert {each[:2] for each in told} == {(Code.FORWARD_DENIED, "thief")}


def test_devices_in_one_memory_are_known() -> None:
    driver = EmulatedDriver(ManualClock(), DriverOptions(("hailo-8", "hailo-8l", "rk3588s")))
    workers, front = cast(WorkerPool, Counted()), cast(FrontControl, Ready())
    monitor = NodeMonitor([driver], workers, front, ManualClock(), RecordingLog(), lambda *_: None, lambda: None)
    monitor.discover()
    assert monitor.same_memory("hailo-8") == {"hailo-8", "hailo-8l"}
    assert monitor.same_memory("rk3588s") == {"rk3588s"}
    assert monitor.same_memory("gone") == {"gone"}
    assert not monitor.is_in_host_memory("hailo-8")


def test_a_processor_s_models_share_memory_with_processes() -> None:
    driver = CpuDriver(ManualClock(), DriverOptions())
    workers, front = cast(WorkerPool, Counted()), cast(FrontControl, Ready())
    monitor = NodeMonitor([driver], workers, front, ManualClock(), RecordingLog(), lambda *_: None, lambda: None)
    monitor.discover()
    assert monitor.is_in_host_memory("cpu0")
    assert not monitor.is_in_host_memory("gone")

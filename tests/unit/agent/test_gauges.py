"""What an agent counts of its workers, as they come and go."""

from typing import cast

import pytest

from harness.clock import ManualClock
from shoal.agent.devices.emulated import EmulatedDriver
from shoal.agent.ports import DriverOptions, Front, FrontStats, Workers, WorkerStats
from shoal.agent.supervisor.gauges import Gauges
from shoal.types.assignment import Served
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds

DEVICE = "nvidia-l4"


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
    workers, front = cast(Workers, counted), cast(Front, Ready())
    gauges = Gauges([driver], workers, front, lambda *_, **__: None, lambda *_: None, lambda: None)
    gauges.discover()
    pace = driver.pace(DEVICE)
    assert pace is not None

    def worked() -> float:
        reading = gauges.read(DEVICE)
        assert reading is not None
        return (reading.energy_j - driver.read(DEVICE).energy_j) / (1 - pace.idle_w / pace.active_w)

    gauges.runs_on("a", DEVICE)
    for joules in (5.0, 7.0, 2.0):  # then a worker that began anew
        counted.joules = {"a": joules}
        await gauges.sample()
    assert worked() == pytest.approx(9.0)
    counted.joules = {}
    await gauges.sample()
    gauges.gone("a")
    gauges.gone("never held")
    counted.joules = {"a": 100.0}
    await gauges.sample()
    assert worked() == pytest.approx(9.0), "nothing is kept of what is gone"

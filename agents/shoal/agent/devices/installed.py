"""Loads device drivers by entry point (group `shoal.devices`), including third-party ones."""

from collections.abc import Sequence
from importlib.metadata import entry_points

from shoal.agent.ports import AgentClock, DeviceDriver, DriverFactory, DriverOptions


def load_drivers(clock: AgentClock, options: DriverOptions, *, cpu: bool) -> Sequence[DeviceDriver]:
    """All drivers in the order of their names. `cpu` False leaves out the CPU's. Raises ShoalError(FIELD_INVALID)."""
    chosen = [each for each in entry_points(group="shoal.devices") if cpu or each.name != "cpu"]
    factories: list[DriverFactory] = [each.load() for each in sorted(chosen, key=lambda each: each.name)]
    return tuple(factory(clock, options) for factory in factories)

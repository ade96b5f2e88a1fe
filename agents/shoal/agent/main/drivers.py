"""Device drivers by entry point (group `shoal.devices`), ours or not."""

from collections.abc import Sequence
from importlib.metadata import entry_points

from shoal.agent.ports import Clock, Driver, DriverFactory, DriverOptions


def installed(clock: Clock, options: DriverOptions, *, cpu: bool) -> Sequence[Driver]:
    """All of them in the order of their names; cpu False leaves that one out. Raises ShoalError(FIELD_INVALID)."""
    chosen = [each for each in entry_points(group="shoal.devices") if cpu or each.name != "cpu"]
    factories: list[DriverFactory] = [each.load() for each in sorted(chosen, key=lambda each: each.name)]
    return tuple(factory(clock, options) for factory in factories)

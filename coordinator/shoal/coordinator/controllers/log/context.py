"""What the controllers of one region, or of a federation, have in common."""

from dataclasses import dataclass

from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.ports import Clock, IdSource, Meter, Store


@dataclass(frozen=True, slots=True)
class ControllerContext:
    """The ports of a coordinator's process that most of its controllers need."""

    # The region's name, or the federation's.
    name: str
    # Its state of record.
    store: Store
    # Its event log and audit log.
    events: EventLog
    # Of all times that its controllers hold and store: the region's own clock, not the process's.
    clock: Clock
    # Source of its names and secrets.
    ids: IdSource
    # Counters of the process.
    meter: Meter


@dataclass(frozen=True, slots=True)
class RegionContext(ControllerContext):
    """As ControllerContext, of a region, whose commits are fenced."""

    # Through which its controllers commit.
    fence: RegionFence

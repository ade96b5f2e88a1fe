"""How silence is judged in a region, by what its workloads ask for."""

from collections import Counter

from shoal.coordinator.core.fleet.state import DEFAULT_PARTITION, LivenessTiming
from shoal.coordinator.core.workloads.changed import difference
from shoal.types.units import Seconds
from shoal.types.workload import Intent


class LivenessRules:
    """Follows the workloads: one that did not change costs nothing."""

    def __init__(self) -> None:
        self._intents: tuple[Intent, ...] = ()
        self._heartbeats = Counter[float]()
        """By interval in seconds: how many workloads ask for it."""
        self._losses = Counter[float]()
        """By time until a node counts as lost, in seconds: how many workloads ask for it."""

    def timing(self, intents: tuple[Intent, ...]) -> LivenessTiming:
        """The shortest heartbeat and loss time that any workload's `partition` rule asks for; the defaults without
        workloads."""
        new, gone = difference(self._intents, intents)
        self._intents = intents
        self._heartbeats.update(each.partition.heartbeat_s for each in new)
        self._heartbeats.subtract(each.partition.heartbeat_s for each in gone)
        self._losses.update(each.partition.lost_after_s for each in new)
        self._losses.subtract(each.partition.lost_after_s for each in gone)
        self._heartbeats, self._losses = +self._heartbeats, +self._losses
        return LivenessTiming(
            Seconds(min(self._heartbeats, default=DEFAULT_PARTITION.heartbeat_s)),
            Seconds(min(self._losses, default=DEFAULT_PARTITION.lost_after_s)),
        )

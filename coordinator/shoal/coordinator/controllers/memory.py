"""What reconciling remembers, as it is stored: maps as pairs, since their keys are more than text."""

from dataclasses import dataclass, replace

from shoal.coordinator.core.placement.model import Trial, Triple
from shoal.coordinator.core.workloads.model import Crashes, Mark, Memory, Table
from shoal.types.assignment import Measured
from shoal.types.units import Elapsed
from shoal.types.workload import WorkloadKey


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """at: the elapsed time of the coordinator that wrote it."""

    at: Elapsed
    issued: int
    marks: tuple[tuple[str, Mark], ...]
    tables: tuple[tuple[WorkloadKey, Table], ...]
    crashes: tuple[tuple[Triple, Crashes], ...]
    measured: tuple[tuple[Trial, Measured], ...]
    without_ready: tuple[tuple[WorkloadKey, Elapsed], ...]

    @classmethod
    def of(cls, memory: Memory, now: Elapsed) -> "StoredMemory":
        return cls(
            now,
            memory.issued,
            tuple(memory.marks.items()),
            tuple(memory.tables.items()),
            tuple(memory.crashes.items()),
            tuple(memory.measured.items()),
            tuple(memory.without_ready.items()),
        )

    def restored(self, now: Elapsed) -> Memory:
        """Moved to this process's elapsed time. The time in between counts for nothing: nobody watched."""
        shift = now - self.at
        return Memory(
            self.issued,
            {name: replace(mark, since=Elapsed(mark.since + shift)) for name, mark in self.marks},
            dict(self.tables),
            dict(self.crashes),
            dict(self.measured),
            {key: Elapsed(since + shift) for key, since in self.without_ready},
        )

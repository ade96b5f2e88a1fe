"""What reconciling remembers, as it is stored, and how it comes back on another process's clock."""

from dataclasses import dataclass, replace

from shoal.coordinator.core.workloads.model import Memory
from shoal.types.units import Elapsed


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """at: the elapsed time of the coordinator that wrote it."""

    at: Elapsed
    memory: Memory

    def restored(self, now: Elapsed) -> Memory:
        """Moved to this process's elapsed time. The time in between counts for nothing: nobody watched."""
        memory = self.memory

        def moved(since: Elapsed) -> Elapsed:
            return Elapsed(since + now - self.at)

        return replace(
            memory,
            marks={name: replace(mark, since=moved(mark.since)) for name, mark in memory.marks.items()},
            crashes=tuple(replace(each, last_at=moved(each.last_at)) for each in memory.crashes),
            short={name: moved(since) for name, since in memory.short.items()},
            without_ready={name: moved(since) for name, since in memory.without_ready.items()},
            away={name: moved(since) for name, since in memory.away.items()},
            back={name: moved(since) for name, since in memory.back.items()},
            pending={
                name: replace(
                    each, since=moved(each.since), unseen=moved(each.unseen) if each.unseen is not None else None
                )
                for name, each in memory.pending.items()
            },
            idle={name: moved(since) for name, since in memory.idle.items()},
        )

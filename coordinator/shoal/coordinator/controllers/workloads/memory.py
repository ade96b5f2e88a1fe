"""The reconciler's memory as stored, and its conversion to another process's clock."""

from dataclasses import dataclass, replace

from shoal.coordinator.core.workloads.model import ReconcilerMemory
from shoal.types.units import Elapsed


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """The reconciler's memory with the clock reading that its times refer to."""

    # Elapsed time of the coordinator that wrote it.
    at: Elapsed
    memory: ReconcilerMemory

    def restore(self, now: Elapsed) -> ReconcilerMemory:
        """The memory with its times moved to this process's elapsed time. The time in between does not count, because
        no process watched.
        """
        memory = self.memory

        def rebase(since: Elapsed) -> Elapsed:
            return Elapsed(since + now - self.at)

        return replace(
            memory,
            marks={name: replace(mark, since=rebase(mark.since)) for name, mark in memory.marks.items()},
            crashes=tuple(replace(each, last_at=rebase(each.last_at)) for each in memory.crashes),
            short={name: rebase(since) for name, since in memory.short.items()},
            without_ready={name: rebase(since) for name, since in memory.without_ready.items()},
            away={name: rebase(since) for name, since in memory.away.items()},
            back={name: rebase(since) for name, since in memory.back.items()},
            pending={
                name: replace(
                    each, since=rebase(each.since), unseen=rebase(each.unseen) if each.unseen is not None else None
                )
                for name, each in memory.pending.items()
            },
            idle={name: rebase(since) for name, since in memory.idle.items()},
        )

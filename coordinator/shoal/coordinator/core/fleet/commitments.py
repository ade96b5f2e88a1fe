"""Memory committed on each device. To prevent overcommit, placement uses the commitments or the live reading, whichever
leaves less."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.device import Device, DeviceKind
from shoal.types.units import Bytes

MARGIN_SHARE = 0.05
MARGIN_MOST = Bytes(256 * 2**20)
"""Live free memory is not used to the last byte: 5 % of the device, at most 256 MiB, stay free."""
LOADED_PHASES = frozenset({Phase.READY, Phase.DRAINING})


@dataclass(frozen=True, slots=True)
class MemoryCommitment:
    """Memory that is committed on one device."""

    # Of all its assignments and reservations.
    committed_bytes: Bytes
    # The part of it that is not loaded yet.
    pending_bytes: Bytes

    def plus(self, memory: Bytes, *, loaded: bool) -> "MemoryCommitment":
        return MemoryCommitment(
            Bytes(self.committed_bytes + memory), Bytes(self.pending_bytes + (0 if loaded else memory))
        )

    def beside(self, other: "MemoryCommitment") -> "MemoryCommitment":
        """Of both together."""
        return MemoryCommitment(
            Bytes(self.committed_bytes + other.committed_bytes), Bytes(self.pending_bytes + other.pending_bytes)
        )

    def __neg__(self) -> "MemoryCommitment":
        """What takes it out again where it is added."""
        return MemoryCommitment(Bytes(-self.committed_bytes), Bytes(-self.pending_bytes))

    def minus(self, memory: Bytes) -> "MemoryCommitment":
        """As if it had never been committed. Pending bytes may become negative: a loaded replica that is taken out
        frees live memory too."""
        return MemoryCommitment(Bytes(self.committed_bytes - memory), Bytes(self.pending_bytes - memory))


NO_COMMITMENT = MemoryCommitment(Bytes(0), Bytes(0))


def commitments(
    fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]
) -> Mapping[tuple[str, str], MemoryCommitment]:
    """Committed memory by (node, device). An assignment counts until it has left the desired set, draining or not."""
    found = dict[tuple[str, str], MemoryCommitment]()
    for node, assignments in desired.items():
        state = fleet.nodes.get(node)
        for assignment in assignments:
            observed = None if state is None else state.observed.get(assignment.id)
            slot = (node, assignment.device)
            loaded = is_loaded(observed)
            found[slot] = found.get(slot, NO_COMMITMENT).plus(memory_of(assignment, observed), loaded=loaded)
    return found


def is_loaded(observed: Observed | None) -> bool:
    """Whether its memory is in use: what the device reports as free is without it."""
    return observed is not None and observed.phase in LOADED_PHASES and not observed.is_unloaded


def memory_of(assignment: Assignment, observed: Observed | None) -> Bytes:
    """Memory of a replica: as committed, or as measured where that is more. One that joined another's worker is without
    what its provider takes there once: the other has that, or, if it is gone, the reading of free memory. Once it is
    unloaded it counts whole: it may be the first of its next worker."""
    measured = observed.measured if observed is not None else None
    if measured is None:
        return assignment.memory_bytes
    joined = assignment.provider_bytes if measured.joined and is_loaded(observed) else 0
    return Bytes(max(assignment.memory_bytes - joined, measured.memory_bytes))


def least_committed_bytes(assignments: Iterable[Assignment], observed: Mapping[str, Observed]) -> Bytes:
    """What these are committed at least, all on devices in one memory. Of a tenant's models that share workers on a
    device the provider's part counts for those that are known to have a worker's first one, and once if none is: one
    that is loaded anew may join a worker, and what it was placed with may have been that of another."""
    total = 0
    providers = dict[tuple[str, str], tuple[int, int]]()
    for each in assignments:
        total += each.memory_bytes - each.provider_bytes
        seen, worker = observed.get(each.id), (each.workload.tenant, each.device)
        is_first = is_loaded(seen) and seen is not None and seen.measured is not None and not seen.measured.joined
        first, most = providers.get(worker, (0, 0))
        providers[worker] = first + (each.provider_bytes if is_first else 0), max(most, each.provider_bytes)
    return Bytes(total + sum(max(both) for both in providers.values()))


def total_bytes(device: Device, node: NodeState) -> Bytes:
    """Memory that assignments may share. A CPU's is limited by its node's control group."""
    if device.kind is DeviceKind.CPU and node.node.memory_limit_bytes > 0:
        return Bytes(min(device.memory_bytes, node.node.memory_limit_bytes))
    return device.memory_bytes


def admissible_bytes(device: Device, node: NodeState, commitment: MemoryCommitment) -> Bytes:
    """min(live free - margin - pending, total - committed). The second alone where the device reports no free
    memory."""
    total = total_bytes(device, node)
    by_books = total - commitment.committed_bytes
    reading = node.readings.get(device.name)
    if reading is None or math.isnan(reading.free_bytes):
        return Bytes(by_books)
    margin = min(MARGIN_SHARE * total, MARGIN_MOST)
    return Bytes(int(min(reading.free_bytes - margin - commitment.pending_bytes, by_books)))

"""What is promised on each device, so that nothing is oversold: the books or the device's word, whichever is less."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.device import Device, DeviceKind
from shoal.types.units import Bytes

MARGIN_SHARE = 0.05
MARGIN_MOST = Bytes(256 * 2**20)
"""Live free memory is not used to its last byte: 5 % of the device, at most 256 MiB, stay free."""
LOADED = frozenset({Phase.READY, Phase.DRAINING})


@dataclass(frozen=True, slots=True)
class Committed:
    """committed: bytes of all assignments of a device, holds included. pending: the part of it not loaded yet."""

    committed: Bytes
    pending: Bytes

    def plus(self, memory: Bytes, *, loaded: bool) -> "Committed":
        return Committed(Bytes(self.committed + memory), Bytes(self.pending + (0 if loaded else memory)))

    def less(self, memory: Bytes) -> "Committed":
        """As if it had never come: what it took of the live free memory, if it is loaded, would be free too."""
        return Committed(Bytes(self.committed - memory), Bytes(self.pending - memory))


NOTHING = Committed(Bytes(0), Bytes(0))


def commitments(fleet: Fleet, desired: Mapping[str, tuple[Assignment, ...]]) -> Mapping[tuple[str, str], Committed]:
    """Committed memory by (node, device). An assignment counts until it has left the desired set, draining or not."""
    books = dict[tuple[str, str], Committed]()
    for node, assignments in desired.items():
        state = fleet.nodes.get(node)
        for assignment in assignments:
            observed = None if state is None else state.observed.get(assignment.id)
            slot = (node, assignment.device)
            loaded = observed is not None and observed.phase in LOADED
            books[slot] = books.get(slot, NOTHING).plus(memory_of(assignment, observed), loaded=loaded)
    return books


def memory_of(assignment: Assignment, observed: Observed | None) -> Bytes:
    """What a replica takes: as committed, or as measured when that was more."""
    measured = observed.measured if observed is not None else None
    return Bytes(max(assignment.memory_bytes, measured.memory_bytes if measured is not None else 0))


def total_bytes(device: Device, node: NodeState) -> Bytes:
    """Memory that assignments may share; a CPU's is bounded by its node's control group."""
    if device.kind is DeviceKind.CPU and node.node.memory_limit_bytes > 0:
        return Bytes(min(device.memory_bytes, node.node.memory_limit_bytes))
    return device.memory_bytes


def admissible_bytes(device: Device, node: NodeState, books: Committed) -> Bytes:
    """min(live free - margin - pending, total - committed); the books alone where the device tells nothing."""
    total = total_bytes(device, node)
    by_books = total - books.committed
    reading = node.readings.get(device.name)
    if reading is None or math.isnan(reading.free_bytes):
        return Bytes(by_books)
    margin = min(MARGIN_SHARE * total, MARGIN_MOST)
    return Bytes(int(min(reading.free_bytes - margin - books.pending, by_books)))

"""What an answer about some nodes depends on, to tell later whether it still holds."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import Reservation
from shoal.coordinator.core.workloads.model import DesiredContent


@dataclass(frozen=True, slots=True, eq=False)
class RoomMark:
    """What takes room of the region's nodes, at one moment."""

    # By name, as decisions see them.
    nodes: Mapping[str, NodeState]
    # By node, what it is to run.
    desired: Mapping[str, DesiredContent]
    # What is kept for guest workloads.
    reserved: tuple[Reservation, ...]

    def still_has(self, now: "RoomMark", nodes: Collection[str]) -> bool:
        """Whether what fitted on these nodes still fits: they are the same, and no more is kept there. Compares nodes
        by identity: it is called on the loop."""
        return (
            are_same([self.nodes.get(each) for each in nodes], [now.nodes.get(each) for each in nodes])
            and are_same([self.desired.get(each) for each in nodes], [now.desired.get(each) for each in nodes])
            and are_within(_on(now.reserved, nodes), _on(self.reserved, nodes))
        )


def are_same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


def are_within(some: Sequence[Reservation], others: Sequence[Reservation]) -> bool:
    """Whether the others have all of them."""
    return not Counter(some) - Counter(others)


def _on(reserved: Sequence[Reservation], nodes: Collection[str]) -> list[Reservation]:
    return [each for each in reserved if each.slot.node in nodes]

"""What each device of a region costs: its node's price, else the region's."""

from collections.abc import Iterator, Mapping

from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.model import Slot
from shoal.policies import node_price
from shoal.types.units import UsdPerHour


class DeviceCosts(Mapping[Slot, UsdPerHour]):
    """USD/h of whole devices, looked up when asked for; absent where the price is unknown. Two are equal if the
    region's price is: that of a node is a label of it, and its change is a change of the node."""

    def __init__(self, nodes: Mapping[str, NodeState], region_price: UsdPerHour | None) -> None:
        self._nodes = nodes
        self._region_price = region_price

    def __getitem__(self, slot: Slot) -> UsdPerHour:
        state = self._nodes.get(slot.node)
        price = None if state is None else node_price(state.node.labels, self._region_price)
        if state is None or price is None or state.device(slot.device) is None:
            raise KeyError(slot)
        return price

    def __iter__(self) -> Iterator[Slot]:
        slots = (Slot(name, device.name) for name, state in self._nodes.items() for device in state.node.devices)
        return (slot for slot in slots if slot in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceCosts) and self._region_price == other._region_price

    __hash__ = None  # type: ignore[assignment]

"""Which nodes hold the limits of tenants that were decided last."""

from dataclasses import replace

from harness.builders.coordinator_core import node
from shoal.coordinator.controllers.workloads.confirmed_limits import ConfirmedLimits
from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.types.assignment import DesiredSet, Version
from shoal.types.tenant import TenantLimit
from shoal.types.units import PerSecond, Seconds


def desired_set(generation: int, rate: float, history: str = "h") -> DesiredSet:
    limits = (TenantLimit("shop", PerSecond(rate)),)
    return DesiredSet("n", Version(history, 1, generation), (), (), (), (), Seconds(1.0), tenants=limits)


class Region:
    """One node, and what it was told."""

    def __init__(self) -> None:
        self.confirmed = ConfirmedLimits()
        self.desired: dict[str, DesiredSet] = {}
        self.state = NodeState(node("n"))

    def tell(self, generation: int, rate: float, history: str = "h") -> bool:
        changed = {"n": desired_set(generation, rate, history)}
        self.confirmed.on_change(self.desired, changed)
        self.desired |= changed
        return self.is_confirmed()

    def hold(self, generation: int, history: str = "h") -> bool:
        self.state = replace(self.state, version=Version(history, 1, generation))
        return self.is_confirmed()

    def is_confirmed(self) -> bool:
        return "n" in self.confirmed.nodes(Fleet({"n": self.state}), self.desired)


def test_a_node_has_confirmed_its_limits_with_any_set_since_they_changed() -> None:
    region = Region()
    assert not region.is_confirmed()
    assert not region.tell(1, 10.0)
    assert region.hold(1)
    assert region.tell(2, 10.0), "another set on its way, with the same limits"
    assert not region.tell(3, 5.0)
    assert not region.hold(2)
    assert not region.tell(4, 5.0)
    assert region.hold(3)
    assert not region.tell(5, 5.0, "restored")
    assert region.hold(5, "restored")


def test_a_set_that_is_not_followed_has_to_be_held_itself() -> None:
    region = Region()
    region.desired["n"] = desired_set(7, 10.0)
    assert not region.hold(6)
    assert region.hold(7)
    assert not region.tell(8, 10.0), "it is not known when its limits changed"
    region.hold(8)
    region.confirmed.forget("n")
    assert region.is_confirmed()
    assert not region.tell(9, 10.0)
    region.confirmed.forget_all()
    assert not region.is_confirmed()
    assert "other" not in region.confirmed.nodes(Fleet({}), region.desired)

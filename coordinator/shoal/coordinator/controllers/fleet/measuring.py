"""Asks nodes to measure their devices again: by an operator's word, or before a receipt is too old for a policy."""

from collections.abc import Iterable

from shoal.coordinator.core.fleet.measuring import MeasuringState, due_measurements
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.ports import AgentLinks, Clock
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, refuse
from shoal.types.link import ProbeNow
from shoal.types.workload import Intent


class MeasuringController:
    """A request that is lost is made again: the receipt stays old."""

    def __init__(self, links: AgentLinks, clock: Clock) -> None:
        self._links = links
        self._clock = clock
        self._state = MeasuringState()

    async def tick(self, fleet: Fleet, intents: Iterable[Intent], replicas: Iterable[tuple[str, Assignment]]) -> None:
        now, wall = self._clock.now(), self._clock.wall()
        self._state, due = due_measurements(self._state, fleet, intents, replicas, now, wall)
        for node, devices in due.items():
            await self._links.send(node, ProbeNow(devices))

    async def ask(self, fleet: Fleet, node: str, device: str) -> tuple[str, ...]:
        """Ask for one device, or for all of the node. Returns their names.

        Raises ShoalError(NODE_UNKNOWN | NODE_NOT_READY | DEVICE_LOST).
        """
        state = fleet.nodes.get(node)
        if state is None:
            raise refuse(Code.NODE_UNKNOWN, f"no node {node!r:.80}", "an enrolled node", "see `shoal get nodes`")
        if not state.connected:
            raise refuse(Code.NODE_NOT_READY, f"{node} is not connected", "a node that answers", f"start {node}")
        names = tuple(each.name for each in state.node.devices if device in ("", each.name))
        if not names:
            had = ", ".join(each.name for each in state.node.devices) or "none"
            raise refuse(Code.DEVICE_LOST, f"no device {device!r:.80} on {node}", had, "see `shoal get devices`")
        await self._links.send(node, ProbeNow(names))
        return names

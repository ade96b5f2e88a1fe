"""Sends desired sets that are stored.

A lost message is repaired: a node that reports another version gets its set again.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.ports import AgentLinks, Clock, Proofs
from shoal.types.assignment import DesiredSet
from shoal.types.units import Elapsed, Seconds

RESEND_HEARTBEATS: Final = 3
"""A node that still reports another version this many heartbeats after a send is sent its set again."""
SENT_AT_ONCE: Final = 16
"""Sets between two turns of the loop: each is signed and made a message."""


class DesiredSetSender:
    """To nodes that may hold another set than theirs."""

    def __init__(self, links: AgentLinks, fleet: FleetController, proofs: Proofs, clock: Clock) -> None:
        self._links = links
        self._fleet = fleet
        self._proofs = proofs
        self._clock = clock
        self._sent_at: dict[str, Elapsed] = {}
        self._behind: set[str] = set()
        """Nodes that did not hold their set when they were looked at last."""

    async def send(self, stored: Mapping[str, DesiredSet]) -> None:
        """stored: the desired set of every node. Looks at nodes that reported something new, at those whose set is new,
        and at those that have not confirmed theirs.
        """
        looked_at, self._fleet.unconfirmed = self._fleet.unconfirmed | self._fleet.unsent | self._behind, set()
        self._behind = set()
        sent = 0
        for node in sorted(looked_at):
            state, desired = self._fleet.state_of(node), stored.get(node)
            if state is None or desired is None or not (state.connected and state.sequence > 0):
                continue
            if state.version != desired.version:
                self._behind.add(node)
            if node in self._fleet.unsent or self._is_overdue(state, desired):
                self._sent_at[node] = self._clock.now()
                self._fleet.unsent.discard(node)
                await self._links.send(node, replace(desired, proof=self._proofs.sign(desired)))
                sent += 1
                if sent % SENT_AT_ONCE == 0:
                    await self._clock.sleep(Seconds(0.0))

    def _is_overdue(self, state: NodeState, desired: DesiredSet) -> bool:
        resend_s = RESEND_HEARTBEATS * self._fleet.decision_fleet.timing.heartbeat_s
        sent_at = self._sent_at.get(state.name)
        return state.version != desired.version and (sent_at is None or self._clock.now() - sent_at >= resend_s)

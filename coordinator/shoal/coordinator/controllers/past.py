"""Nodes that were told more than this store knows: then it is an old copy, or the machine's image was put back.

What they were told is signed by this region, so it is believed. The region begins a new history, in which agents accept
what would be a step back in the old one, and everybody says hello to it. The replicas that nodes show are taken as if
they had been decided here, so that nothing that runs is ended or begun anew for what the store has forgotten.
"""

from shoal.coordinator.controllers.fleet import FleetController
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.controllers.workloads import WorkloadsController
from shoal.coordinator.ports import Meter, Proofs
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal
from shoal.types.link import Hello


class NoProofs:
    """Signs nothing, and believes nothing."""

    def of(self, desired: DesiredSet) -> bytes:
        return b""

    def read(self, node: str, proof: bytes) -> DesiredSet | None:
        return None


class Past:
    def __init__(
        self, truth: Truth, fleet: FleetController, workloads: WorkloadsController, proofs: Proofs, meter: Meter
    ) -> None:
        self._truth = truth
        self._fleet = fleet
        self._workloads = workloads
        self._proofs = proofs
        self._meter = meter

    async def greeted(self, hello: Hello) -> None:
        """Before the hello is answered. Raises ShoalError(NOT_LEADER | STORE_FULL | STORE_UNAVAILABLE)."""
        node, held = hello.node.name, hello.holds
        if held is None or not hello.proof or not self._is_news(node, held):
            return
        told = self._proofs.read(node, hello.proof)
        if told is None or (told.node, told.version) != (node, held):
            self._meter.count("proofs_refused")
            return
        async with self._workloads.stepping:
            if not self._is_news(node, held):
                return
            if self._is_of_another_course(node, held):
                found = f"{node} was told generation {held.generation} of term {held.term}, signed by this region"
                await self._truth.open_history(f"the store is an old copy: {found}", left=held.history)
                self._workloads.await_nodes()
                await self._fleet.dismiss(
                    Refusal(Code.EPOCH_STALE, "a session of an earlier history", "one of the new", "connect again")
                )
            self._workloads.adopt_told(told)

    def _is_of_another_course(self, node: str, version: Version) -> bool:
        """Whether what this store would say next has been said otherwise. A node of which nothing is known (deleted, or
        enrolled since the copy was made) can be told what follows on what it holds."""
        is_known = node in self._workloads.desired
        return version.history not in self._truth.past and (is_known or version.history != self._truth.history)

    def _is_news(self, node: str, version: Version) -> bool:
        """Whether the store lacks it: it is later than what is known of the node, or of a history that is not."""
        known = self._workloads.desired.get(node)
        if known is not None and known.version.history == version.history:
            return (known.version.term, known.version.generation) < (version.term, version.generation)
        return known is None or version.history not in self._truth.past

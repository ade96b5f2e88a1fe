"""Detects a restored store: nodes hold desired sets that are newer than the store, because it is an old copy or the
machine's image was rolled back.

The region signed those sets, so it accepts them. It opens a new history, in which agents accept what would be a step
back in the old one. It ends all sessions, so that every node says hello again. The region adopts the replicas that
nodes show as if it had decided them. So nothing that runs is stopped or started again because the store lacks it.
"""

from shoal.coordinator import metrics
from shoal.coordinator.controllers.fleet.controller import FleetController
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.workloads.step import WorkloadsController
from shoal.coordinator.ports import Meter, Proofs
from shoal.types.assignment import DesiredSet, Version
from shoal.types.codes import Code, Refusal
from shoal.types.link import Hello


class NoProofs:
    """Signs nothing and verifies nothing."""

    def sign(self, desired: DesiredSet) -> bytes:
        return b""

    def verify(self, node: str, proof: bytes) -> DesiredSet | None:
        return None


class RestoredStoreDetector:
    """Compares each hello with the store, and opens a new history when the store is older."""

    def __init__(
        self, fence: RegionFence, fleet: FleetController, workloads: WorkloadsController, proofs: Proofs, meter: Meter
    ) -> None:
        self._fence = fence
        self._fleet = fleet
        self._workloads = workloads
        self._proofs = proofs
        self._meter = meter

    async def check_hello(self, hello: Hello) -> None:
        """Runs before the hello is answered. Raises ShoalError(NOT_LEADER | STORE_FULL | STORE_UNAVAILABLE)."""
        node, held = hello.node.name, hello.holds
        if held is None or not hello.proof or not self._is_newer(node, held):
            return
        told = self._proofs.verify(node, hello.proof)
        if told is None or (told.node, told.version) != (node, held):
            self._meter.count(metrics.PROOFS_REFUSED)
            return
        async with self._workloads.step_lock:
            if not self._is_newer(node, held):
                return
            if self._diverges(node, held):
                found = f"{node} was told generation {held.generation} of term {held.term}, signed by this region"
                await self._fence.open_history(f"the store is an old copy: {found}", unknown_history=held.history)
                self._workloads.await_nodes()
                await self._fleet.end_sessions(
                    Refusal(Code.EPOCH_STALE, "a session of an earlier history", "one of the new", "connect again")
                )
            self._workloads.adopt_desired(told)

    def _diverges(self, node: str, version: Version) -> bool:
        """Whether this store could issue a version again with other content. A node that the store does not know
        (deleted, or enrolled since the copy was made) can continue from the version that it holds.
        """
        is_known = node in self._workloads.desired
        return version.history not in self._fence.old_histories and (is_known or version.history != self._fence.history)

    def _is_newer(self, node: str, version: Version) -> bool:
        """Whether the store lacks this version: it is newer than the node's known one, or of an unknown history."""
        known = self._workloads.desired.get(node)
        if known is not None and known.version.history == version.history:
            return (known.version.term, known.version.generation) < (version.term, version.generation)
        return known is None or version.history not in self._fence.old_histories

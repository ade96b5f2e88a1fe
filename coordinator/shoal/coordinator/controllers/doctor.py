"""Checks of one region by component, each failure with the line that fixes it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import AUDIT, AuditEntry, broken_link
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.workloads.invariants import check
from shoal.coordinator.ports import Store
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node

REGION: Final = "region"
AGENT: Final = "agent"

PROGRESS: Final = frozenset(
    {
        Code.WAITING_FOR_LINK,
        Code.WAITING_FOR_FETCH,
        Code.WAITING_FOR_LOAD,
        Code.WAITING_FOR_WARMUP,
        Code.WAITING_FOR_DRAIN,
        Code.WAITING_FOR_REPLACEMENT,
    }
)
"""Something on its way; when it takes longer than it may, an invariant (I5) says so."""


@dataclass(frozen=True, slots=True)
class Check:
    """refusal None: in order."""

    component: str
    name: str
    refusal: Refusal | None


async def examine(region: Region, store: Store) -> AsyncIterator[Check]:
    """Store, audit log, invariants and gateway of the region; then each of its nodes."""
    yield Check(REGION, "the store is its newest state", region.restored)
    yield Check(REGION, "the store takes writes", region.store_refusal)
    entries = [records.load(AuditEntry, record.value) for record in await store.scan(AUDIT)]
    yield Check(REGION, f"{len(entries)} audit entries follow from each other", _audit(entries))
    violations = check(region.workloads.snapshot())
    if not violations:
        yield Check(REGION, "the invariants hold", None)
    for each in violations:
        remedy = "shoal events; report it with them"
        refusal = Refusal(Code.INTERNAL, f"{each.subject}: {each.message}", each.invariant, remedy)
        yield Check(REGION, f"invariant {each.invariant}", refusal)
    for wait in region.workloads.waits:
        if wait.code not in PROGRESS:
            remedy = f"shoal explain {wait.workload.name} --tenant {wait.workload.tenant}"
            refusal = Refusal(wait.code, wait.reason, "", remedy)
            yield Check(REGION, f"workload {wait.workload} {wait.assignment}".strip(), refusal)
    nodes = sorted(region.fleet.fleet.nodes.values(), key=lambda state: state.name)
    yield Check(REGION, "a gateway answers", _gateway(nodes))
    for state in nodes:
        yield Check(AGENT, f"node {state.name}", _node(state))
        if state.node.devices:
            yield Check(AGENT, f"node {state.name} {_confines(state.node)}", None)


def _audit(entries: Sequence[AuditEntry]) -> Refusal | None:
    bad = broken_link(entries)
    if bad is None:
        return None
    return Refusal(Code.STATE_CORRUPT, f"entry {bad} does not follow", "an unbroken chain", "compare with your copies")


def _gateway(nodes: Sequence[NodeState]) -> Refusal | None:
    if any(not state.node.devices and state.liveness is Liveness.READY for state in nodes):
        return None
    return Refusal(Code.NODE_NOT_READY, "none", "at least one", "start one: shoal-agent run --role gateway")


def _confines(node: Node) -> str:
    """No failure: whether the rest is enough is for whoever knows whose models run there."""
    return f"confines its workers, but for {'; '.join(node.unconfined)}" if node.unconfined else "confines its workers"


def _node(state: NodeState) -> Refusal | None:
    if state.quarantined:
        return state.refusal
    if state.liveness is not Liveness.READY:
        code = Code.NODE_LOST if state.liveness is Liveness.LOST else Code.NODE_SUSPECT
        return Refusal(code, f"{state.name} is {state.liveness}", "a heartbeat", f"look at the agent on {state.name}")
    return None

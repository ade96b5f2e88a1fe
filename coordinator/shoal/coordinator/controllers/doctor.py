"""Checks of one region by component, each failure with the line that fixes it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.events import AUDIT, AuditEntry, broken_link
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.ports import Store
from shoal.types.codes import Code, Refusal

STORE: Final = "store"
AUDIT_LOG: Final = "audit"
FLEET: Final = "fleet"
WORKLOADS: Final = "workloads"


@dataclass(frozen=True, slots=True)
class Check:
    """refusal None: in order."""

    component: str
    name: str
    refusal: Refusal | None


async def examine(region: Region, store: Store) -> AsyncIterator[Check]:
    yield Check(STORE, "restored from a copy", region.restored)
    yield Check(STORE, "takes writes", region.store_refusal)
    entries = [records.load(AuditEntry, record.value) for record in await store.scan(AUDIT)]
    bad = broken_link(entries)
    yield Check(
        AUDIT_LOG,
        f"{len(entries)} entries follow from each other",
        None
        if bad is None
        else Refusal(
            Code.STATE_CORRUPT, f"entry {bad} does not follow", "an unbroken chain", "compare with your copies"
        ),
    )
    nodes = sorted(region.fleet.fleet.nodes.values(), key=lambda state: state.name)
    gateways = [state for state in nodes if not state.node.devices and state.liveness is Liveness.READY]
    yield Check(
        FLEET,
        "a gateway answers",
        None
        if gateways
        else Refusal(Code.NODE_NOT_READY, "none", "at least one", "start one: shoal-agent run --role gateway"),
    )
    for state in nodes:
        yield Check(FLEET, f"node {state.name}", _node(state))
    for wait in region.workloads.waits:
        refusal = Refusal(
            wait.code, wait.reason, "", f"shoal explain {wait.workload.name} --tenant {wait.workload.tenant}"
        )
        yield Check(WORKLOADS, f"{wait.workload} {wait.assignment}".strip(), refusal)


def _node(state: NodeState) -> Refusal | None:
    if state.quarantined:
        return state.refusal
    if state.liveness is not Liveness.READY:
        code = Code.NODE_LOST if state.liveness is Liveness.LOST else Code.NODE_SUSPECT
        return Refusal(code, f"{state.name} is {state.liveness}", "a heartbeat", f"look at the agent on {state.name}")
    return None

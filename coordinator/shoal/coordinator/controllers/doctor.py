"""Checks of one region by component, each failure with the line that fixes it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.controllers.events import AUDIT, broken_link, digest_of
from shoal.coordinator.controllers.members import Members
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.signals.model import Signal
from shoal.coordinator.core.workloads.invariants import check
from shoal.coordinator.ports import Record, Store
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node
from shoal.types.units import show_seconds

REGION: Final = "region"
AGENT: Final = "agent"
CA_SPARE_S: Final = 365 * 86400.0
ROTATION_MOST_S: Final = 3600.0

PROGRESS: Final = frozenset(
    {
        Code.WAITING_FOR_LINK,
        Code.WAITING_FOR_FETCH,
        Code.WAITING_FOR_LOAD,
        Code.WAITING_FOR_WARMUP,
        Code.WAITING_FOR_VERIFY,
        Code.WAITING_FOR_SHIFT,
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
    """Store, audit log, ledger, invariants and gateway of the region; then each of its nodes."""
    yield Check(REGION, "the store is its newest state", region.restored)
    yield Check(REGION, "the store takes writes", region.unwritable)
    head = region.events.audit_head
    entries = await store.scan(AUDIT)
    yield Check(REGION, f"{len(entries)} audit entries follow from each other", _audit(entries, head))
    yield Check(REGION, "the ledger is as it was written", await region.ledger.broken(region.heads_shown))
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
    now = region.signals.now()
    for name in region.workloads.catalog.rules(region.config.name):
        yield Check(REGION, f"the {name} is known and new", _signal(now.get(name), region.signals.refusals.get(name)))
    nodes = sorted(region.fleet.fleet.nodes.values(), key=lambda state: state.name)
    yield Check(REGION, "a gateway answers", _gateway(nodes))
    for state in nodes:
        yield Check(AGENT, f"node {state.name}", _node(state))
        if state.node.devices:
            yield Check(AGENT, f"node {state.name} {_confines(state.node)}", None)


async def examine_members(members: Members) -> AsyncIterator[Check]:
    """The region's CA, and certificates that should have been renewed by now."""
    rotation = await members.rotation()
    issuing = next(root for root in rotation.roots if root.state == "issuing")
    left = issuing.not_after - members.wall
    found = f"the CA ends in {show_seconds(left)}"
    soon = Refusal(Code.CERT_EXPIRED, found, f"{show_seconds(CA_SPARE_S)} to spare", "shoal ca rotate")
    yield Check(REGION, "the CA has time", soon if left < CA_SPARE_S else None)
    if rotation.stage != "idle" and members.wall - rotation.since > ROTATION_MOST_S:
        names = ", ".join(each.uri for each in rotation.laggards[:5])
        refusal = Refusal(Code.WAITING_FOR_LINK, f"it waits for {names}", "a rotation that ends", "shoal ca status")
        yield Check(REGION, f"the rotation of the CA goes on from {rotation.stage}", refusal)
    for uri, left in await members.near_end():
        ended = f"ended {show_seconds(-left)} ago" if left <= 0 else f"ends in {show_seconds(left)}"
        remedy = "look at its log; it renews by itself when it reaches the enrolment port, or joins again with a token"
        yield Check(REGION, f"certificate of {uri}", Refusal(Code.CERT_EXPIRED, ended, "one that was renewed", remedy))


def _signal(signal: Signal | None, refusal: Refusal | None) -> Refusal | None:
    """Why its source failed, else that its value is old or not there. An operator's word needs no source."""
    if signal is not None and not signal.stale:
        return None
    if refusal is not None:
        return refusal
    found = f"{signal.source} said nothing new" if signal is not None else "its source was not read yet"
    return Refusal(Code.SIGNAL_STALE, found, "a value within stale_after", "look at what writes the source")


def _audit(entries: Sequence[Record], head: str) -> Refusal | None:
    """head: digest of what was the newest entry before they were read: a tail that was cut shows by it."""
    if (bad := broken_link(entries)) is not None:
        return _edited(f"entry {bad} cannot be read or does not follow from the one before it")
    if head and all(digest_of(entry.value) != head for entry in reversed(entries)):
        return _edited("the newest entries are not those that were written")
    return None


def _edited(found: str) -> Refusal:
    return Refusal(Code.STATE_CORRUPT, found, "an unbroken chain", "compare with a copy of the store in backups/")


def _gateway(nodes: Sequence[NodeState]) -> Refusal | None:
    if any(not state.node.devices and state.liveness is Liveness.READY for state in nodes):
        return None
    return Refusal(Code.NODE_NOT_READY, "none", "at least one", "start one: shoal-agent run --role gateway")


def _confines(node: Node) -> str:
    """No failure: whether the rest is enough is for whoever knows whose models run there."""
    return f"confines its workers, but for {'; '.join(node.unconfined)}" if node.unconfined else "confines its workers"


def _node(state: NodeState) -> Refusal | None:
    if state.revoked:
        remedy = f"join it again with a new token, or: shoal delete node {state.name}"
        return Refusal(Code.CERT_REVOKED, f"{state.name} was revoked", "a member of the region", remedy)
    if state.twins is not None:
        found = f"one agent at {state.twins.running} has the session, one at {state.twins.other} was refused"
        return Refusal(Code.TWIN_REFUSED, found, "one agent for each identity", f"shoal node settle {state.name}")
    if state.quarantined:
        return state.refusal
    if state.hidden:
        return state.unheard
    if state.liveness is not Liveness.READY:
        code = Code.NODE_LOST if state.liveness is Liveness.LOST else Code.NODE_SUSPECT
        return Refusal(code, f"{state.name} is {state.liveness}", "a heartbeat", f"look at the agent on {state.name}")
    return None

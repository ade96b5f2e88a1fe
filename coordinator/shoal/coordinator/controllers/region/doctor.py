"""The checks of `shoal doctor` for one region, by component; each failure carries its remedy."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from shoal.coordinator.controllers.log.events import AUDIT, digest_of, first_broken_entry
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.region.trust import TrustController
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.core.fleet.state import Liveness, NodeState
from shoal.coordinator.core.signals.model import Signal
from shoal.coordinator.core.workloads.invariants import check
from shoal.coordinator.ports import Store, StoreRecord
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node
from shoal.types.units import show_seconds

REGION: Final = "region"
AGENT: Final = "agent"
CA_MIN_LEFT_S: Final = 365 * 86400.0
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
"""Waits that are normal progress; invariant I5 reports one that takes too long."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One check and its result."""

    # `region` or `agent`.
    component: str
    # What is checked, as a sentence that holds when it passes.
    name: str
    # Why it fails; None: it passes.
    refusal: Refusal | None


async def examine(region: RegionalCoordinator, store: Store, compute: Compute = inline) -> AsyncIterator[HealthCheck]:
    """Checks store, audit log, ledger, reports, invariants and gateway of the region; then each of its nodes. compute:
    runs what reads a whole log or the whole region.
    """
    yield HealthCheck(REGION, "the store is its newest state", region.restore_reason)
    yield HealthCheck(REGION, "the store takes writes", region.write_refusal)
    head = region.events.audit_head
    entries = await store.scan(AUDIT)
    refusal = await compute(partial(_audit, entries, head))
    yield HealthCheck(REGION, f"{len(entries)} audit entries follow from each other", refusal)
    broken = await region.ledger.verify(region.peer_heads, compute)
    yield HealthCheck(REGION, "the ledger is as it was written", broken)
    if region.origin is not None:
        yield HealthCheck(REGION, "the federation takes its reports", region.origin.report_refusal)
    violations = await compute(partial(check, region.workloads.snapshot()))
    if not violations:
        yield HealthCheck(REGION, "the invariants hold", None)
    for each in violations:
        remedy = "shoal events; report it with them"
        refusal = Refusal(Code.INTERNAL, f"{each.subject}: {each.message}", each.invariant, remedy)
        yield HealthCheck(REGION, f"invariant {each.invariant}", refusal)
    for wait in region.workloads.waits:
        if wait.code not in PROGRESS:
            remedy = f"shoal explain {wait.workload.name} --tenant {wait.workload.tenant}"
            refusal = Refusal(wait.code, wait.reason, "", remedy)
            yield HealthCheck(REGION, f"workload {wait.workload} {wait.assignment}".strip(), refusal)
    now = region.signals.current()
    for name in region.workloads.catalog.rules(region.config.name):
        yield HealthCheck(
            REGION, f"the {name} is known and new", _signal(now.get(name), region.signals.refusals.get(name))
        )
    nodes = sorted(region.fleet.fleet.nodes.values(), key=lambda state: state.name)
    yield HealthCheck(REGION, "a gateway answers", _gateway(nodes))
    for state in nodes:
        yield HealthCheck(AGENT, f"node {state.name}", _node(state))
        if state.node.devices:
            yield HealthCheck(AGENT, f"node {state.name} {_confinement(state.node)}", None)


async def examine_certificates(trust: TrustController) -> AsyncIterator[HealthCheck]:
    """Checks the region's CA, and certificates that should have been renewed by now."""
    rotation = await trust.rotation()
    issuing = next(root for root in rotation.roots if root.state == "issuing")
    left = issuing.not_after - trust.wall
    found = f"the CA ends in {show_seconds(left)}"
    soon = Refusal(Code.CERT_EXPIRED, found, f"{show_seconds(CA_MIN_LEFT_S)} to spare", "shoal ca rotate")
    yield HealthCheck(REGION, "the CA has time", soon if left < CA_MIN_LEFT_S else None)
    if rotation.stage != "idle" and trust.wall - rotation.since > ROTATION_MOST_S:
        names = ", ".join(each.uri for each in rotation.laggards[:5])
        refusal = Refusal(Code.WAITING_FOR_LINK, f"it waits for {names}", "a rotation that ends", "shoal ca status")
        yield HealthCheck(REGION, f"the rotation of the CA goes on from {rotation.stage}", refusal)
    for uri, left in await trust.overdue_renewals():
        ended = f"ended {show_seconds(-left)} ago" if left <= 0 else f"ends in {show_seconds(left)}"
        remedy = "look at its log; it renews by itself when it reaches the enrolment port, or joins again with a token"
        yield HealthCheck(
            REGION, f"certificate of {uri}", Refusal(Code.CERT_EXPIRED, ended, "one that was renewed", remedy)
        )


def _signal(signal: Signal | None, refusal: Refusal | None) -> Refusal | None:
    """Why its source failed, or that its value is stale or missing. An operator's override needs no source."""
    if signal is not None and not signal.stale:
        return None
    if refusal is not None:
        return refusal
    found = f"{signal.source} said nothing new" if signal is not None else "its source was not read yet"
    return Refusal(Code.SIGNAL_STALE, found, "a value within stale_after", "look at what writes the source")


def _audit(entries: Sequence[StoreRecord], head: str) -> Refusal | None:
    """head: digest of the newest entry before the entries were read, so that a truncated tail is detected."""
    if (bad := first_broken_entry(entries)) is not None:
        return _corruption(f"entry {bad} cannot be read or does not follow from the one before it")
    if head and all(digest_of(entry.value) != head for entry in reversed(entries)):
        return _corruption("the newest entries are not those that were written")
    return None


def _corruption(found: str) -> Refusal:
    return Refusal(Code.STATE_CORRUPT, found, "an unbroken chain", "compare with a copy of the store in backups/")


def _gateway(nodes: Sequence[NodeState]) -> Refusal | None:
    if any(not each.node.devices and each.liveness is Liveness.READY and each.front_ready for each in nodes):
        return None
    return Refusal(Code.NODE_NOT_READY, "none", "at least one", "start one: shoal-agent run --role gateway")


def _confinement(node: Node) -> str:
    """Not a failure: the operator knows whose models run there, and whether the remaining confinement suffices."""
    return f"confines its workers, but for {'; '.join(node.unconfined)}" if node.unconfined else "confines its workers"


def _node(state: NodeState) -> Refusal | None:
    if state.revoked:
        remedy = f"join it again with a new token, or: shoal delete node {state.name}"
        return Refusal(Code.CERT_REVOKED, f"{state.name} was revoked", "a member of the region", remedy)
    if state.duplicate is not None:
        found = f"one agent at {state.duplicate.running} has the session, one at {state.duplicate.other} was refused"
        return Refusal(Code.DUPLICATE_IDENTITY, found, "one agent for each identity", f"shoal node settle {state.name}")
    if state.quarantined:
        return state.refusal
    if state.link_lost:
        return state.link_lost_refusal
    if state.liveness is not Liveness.READY:
        code = Code.NODE_LOST if state.liveness is Liveness.LOST else Code.NODE_SUSPECT
        return Refusal(code, f"{state.name} is {state.liveness}", "a heartbeat", f"look at the agent on {state.name}")
    if state.has_full_status and not state.front_ready:
        found = f"the front of {state.name} does not answer"
        remedy = f"its agent starts it again within 5 s; else look at the agent's log on {state.name}"
        return Refusal(Code.NODE_NOT_READY, found, "a front that serves", remedy)
    return None

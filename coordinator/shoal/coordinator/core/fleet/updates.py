"""What a message does to the fleet. Messages that are replayed, late or from a foreign node change nothing."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.checks import CheckedStatus, check_receipt, check_status, is_plausible_time
from shoal.coordinator.core.fleet.state import DuplicateIdentity, Fleet, Liveness, LivenessTiming, NodeState
from shoal.types import latency
from shoal.types.assignment import MAX_INGRESS, AgreementCounts, Ingress, Observed, Status, Subscriptions
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node, Reading, SilentDevice
from shoal.types.link import OLDEST_PROTOCOL
from shoal.types.receipt import Receipt
from shoal.types.units import Elapsed, Seconds, Wall

QUARANTINE_AT = 3
"""Absurd reports, minus the clean ones since, that put a node in quarantine. It ends when clean reports have outweighed
them."""
MOST_STRIKES = 30


def restore(nodes: tuple[NodeState, ...], fleet: Fleet, now: Elapsed) -> Fleet:
    """The fleet when a coordinator starts: every node that the store knows, none heard yet, and one full loss window of
    grace."""
    seen = {
        state.name: replace(
            state,
            liveness=Liveness.NEVER_SEEN,
            since=now,
            connected=False,
            heard_at=now,
            has_full_status=False,
            counts_since=now,
        )
        for state in nodes
    }
    patient_until = Elapsed(now + fleet.timing.lost_after_s)
    return replace(fleet, nodes=seen, grace_until=patient_until, ticked_at=now, mass_silence=None)


def with_timing(fleet: Fleet, timing: LivenessTiming, now: Elapsed) -> Fleet:
    """Applies new timing. A shorter heartbeat interval takes effect only after the nodes can have received it."""
    if timing.suspect_after_s >= fleet.timing.suspect_after_s:
        return replace(fleet, timing=timing)
    patient_until = Elapsed(max(fleet.grace_until, now + fleet.timing.suspect_after_s))
    return replace(fleet, timing=timing, grace_until=patient_until)


def connect(
    fleet: Fleet, node: Node, epoch: int, now: Elapsed, wall: Wall, sent_at: Wall | None = None,
    protocol: int = OLDEST_PROTOCOL,
) -> Fleet:  # fmt: skip
    """A session began. Until its first full status the node counts as last observed, unless it rebooted since.

    Only the first hello is a sign of life, because an agent that does not get the answer repeats its hello endlessly.
    sent_at: by the node's clock.
    """
    known = fleet.nodes.get(node.name)
    if known is None:
        known = NodeState(node=node, heard_at=now, since=now, joined_at=wall)
    elif epoch <= known.epoch:
        return fleet
    if known.node.boot_id != node.boot_id:
        known = replace(
            known,
            observed={},
            readings={},
            silent={},
            ingress=(),
            tenants=(),
            has_full_status=False,
            front_ready=False,
            version=None,
        )
    receipts = {name: receipt for name, receipt in known.receipts.items() if _is_valid_for(receipt, node)}
    first_status = Elapsed(now + fleet.timing.suspect_after_s)
    excused = first_status if known.link_lost else Elapsed(min(known.grace_until, first_status))
    return fleet.with_node(
        replace(
            known, node=node, epoch=epoch, sequence=0, connected=True, receipts=receipts, last_seen=wall,
            heard_at=now if known.liveness is Liveness.NEVER_SEEN else known.heard_at,
            skew_s=known.skew_s if sent_at is None else _skew(known, sent_at, wall), revoked=False,
            link_lost=False, grace_until=excused, protocol=protocol,
            readings={name: reading for name, reading in known.readings.items() if _has_device(node, name)},
        )
    )  # fmt: skip


def with_status(
    known: NodeState | None, node: str, epoch: int, status: Status, now: Elapsed, wall: Wall
) -> tuple[NodeState | None, tuple[Refusal, ...]]:
    """The node's state after a status; the same object where that counts for nothing. Absurd parts are left out and
    returned as refusals; the node stays alive.

    A full status replaces what was observed, a delta updates it. A missing delta needs no repair, because every entry
    is a whole assignment and the next full status corrects the rest. What is observed as before stays the same object,
    so that whoever compares two states need not look into it.

    known: the state before; None: the region does not know the node.
    """
    if known is None:
        return None, (Refusal(Code.NODE_UNKNOWN, node, "an enrolled node", "say hello first"),)
    if status.node != node:
        return known, (Refusal(Code.NODE_MISMATCH, status.node, node, "a node reports itself only"),)
    if epoch != known.epoch or status.epoch != known.epoch:
        stale = Refusal(Code.EPOCH_STALE, f"epoch {status.epoch}", f"epoch {known.epoch}", "connect again")
        return known, (stale,)
    if status.sequence <= known.sequence:
        return known, ()
    checked = check_status(status, known.node, known.observed)
    ended = _counts_of_restarted_fronts(known, checked.agreement_counts) if checked.agreement_counts else {}
    is_new = status.front_ready and not known.front_ready
    struck = _with_strikes(known, checked.refusals)
    # Named one by one, as `replace` takes longer than all the rest.
    state = NodeState(
        node=known.node,
        liveness=known.liveness,
        since=known.since,
        epoch=known.epoch,
        sequence=status.sequence,
        connected=known.connected,
        heard_at=max(now, known.heard_at),
        last_seen=wall,
        joined_at=known.joined_at,
        has_full_status=known.has_full_status or status.full,
        version=known.version if known.version == status.version else status.version,
        observed=_merge_observed(known.observed, status, checked),
        readings=_merge_readings(known.readings, status, checked),
        silent=_merge_silent(known, status) if status.silent else {},
        receipts=known.receipts,
        ingress=_merge_ingress(known.ingress, status, checked),
        tenants=checked.tenants,
        front_ready=status.front_ready,
        cordoned=known.cordoned,
        strikes=struck.strikes,
        quarantined=struck.quarantined,
        refusal=struck.refusal,
        revoked=known.revoked,
        duplicate=known.duplicate,
        serial=status.serial or known.serial,
        roots=status.roots or known.roots,
        skew_s=_skew(known, status.taken_at, wall),
        link_lost=known.link_lost,
        grace_until=known.grace_until,
        agreement_counts=_amended(known.agreement_counts, checked.agreement_counts),
        earlier_agreement_counts=_amended(known.earlier_agreement_counts, ended),
        counts_since=now if is_new or ended else known.counts_since,
        protocol=known.protocol,
        subscriptions=_merge_subscriptions(known.subscriptions, checked.subscriptions),
    )
    return state, checked.refusals


def merge_receipts(
    fleet: Fleet, node: str, receipts: tuple[Receipt, ...], now: Elapsed, wall: Wall
) -> tuple[Fleet, tuple[Refusal, ...]]:
    """Keeps the receipts that can be true and are not older than those known, and refuses the rest. A receipt is from
    the future only if it is ahead of both clocks, the node's and ours, because either may be behind."""
    known = fleet.nodes.get(node)
    if known is None:
        return fleet, (Refusal(Code.NODE_UNKNOWN, node, "an enrolled node", "say hello first"),)
    kept = dict(known.receipts)
    latest = Wall(max(wall, wall - known.skew_s))
    refusals = list[Refusal]()
    for receipt in receipts:
        refusal = check_receipt(receipt, known.node, latest)
        if refusal is not None:
            refusals.append(refusal)
        elif receipt.device not in kept or receipt.measured_at >= kept[receipt.device].measured_at:
            kept[receipt.device] = receipt
    state = _with_contact(known, now, wall)
    if refusals:
        state = _with_strikes(state, tuple(refusals))
    return fleet.with_node(replace(state, receipts=kept)), tuple(refusals)


def disconnect(fleet: Fleet, node: str, epoch: int) -> Fleet:
    """The session ended. A closed stream does not make a node suspect, only silence does."""
    known = fleet.nodes.get(node)
    if known is None or known.epoch != epoch:
        return fleet
    return fleet.with_node(replace(known, connected=False))


def extend_grace(fleet: Fleet, nodes: Collection[str], now: Elapsed) -> Fleet:
    """For one heartbeat, the silence of these nodes does not count, because the coordinator has not processed their
    last messages yet."""
    until = Elapsed(now + fleet.timing.heartbeat_s)
    found = {
        name: replace(fleet.nodes[name], grace_until=max(fleet.nodes[name].grace_until, until))
        for name in nodes
        if name in fleet.nodes
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def mark_link_lost(fleet: Fleet, nodes: Collection[str], now: Elapsed) -> Fleet:
    """The coordinator lost the broker that carries these nodes' sessions. For one loss window it attributes their
    silence to its own link. A longer outage does not prevent their replacement, because a node may have died with the
    broker."""
    until = Elapsed(now + fleet.timing.lost_after_s)
    found = {
        name: replace(fleet.nodes[name], link_lost=True, grace_until=until)
        for name in nodes
        if name in fleet.nodes and not fleet.nodes[name].link_lost
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def close_link(fleet: Fleet, sessions: Mapping[str, int], now: Elapsed) -> Fleet:
    """The connection to the broker that carried these sessions (epochs by node) is over: for one loss window the nodes'
    silence is attributed to it. Those with a newer session came by another way."""
    current = {name for name, epoch in sessions.items() if name in fleet.nodes and fleet.nodes[name].epoch == epoch}
    excused = mark_link_lost(fleet, current, now)
    found = {name: replace(excused.nodes[name], connected=False) for name in current if excused.nodes[name].connected}
    return replace(excused, nodes={**excused.nodes, **found}) if found else excused


def mark_link_restored(fleet: Fleet, now: Elapsed) -> Fleet:
    """The broker is reachable again. A node that has to reconnect gets one loss window to do so. A node that is still
    connected gets the time after which it would be suspect."""
    found = {
        state.name: replace(
            state,
            link_lost=False,
            grace_until=Elapsed(now + (fleet.timing.suspect_after_s if state.connected else fleet.timing.lost_after_s)),
        )
        for state in fleet.nodes.values()
        if state.link_lost
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def with_cordon(fleet: Fleet, node: str, is_cordoned: bool) -> Fleet:
    """Nothing new is placed on a cordoned node; what runs there continues."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.with_node(replace(known, cordoned=is_cordoned))


def revoke(fleet: Fleet, node: str, epoch: int) -> Fleet:
    """The node's certificates are refused from now on. It is lost at once, whatever it reports, and its session
    ends."""
    known = fleet.nodes.get(node)
    if known is None:
        return fleet
    lost = replace(known, revoked=True, connected=False, epoch=epoch, liveness=Liveness.LOST, duplicate=None)
    return fleet.with_node(lost)


def with_duplicate(fleet: Fleet, node: str, duplicate: DuplicateIdentity | None) -> Fleet:
    """Two agents used the node's identity; None: an operator resolved that."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.with_node(replace(known, duplicate=duplicate))


def with_labels(fleet: Fleet, node: str, labels: Mapping[str, str]) -> Fleet:
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.with_node(replace(known, node=replace(known.node, labels=labels)))


def clear_quarantine(fleet: Fleet, node: str) -> Fleet:
    """An operator inspected the node: its strikes are cleared, and later reports are judged without them."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.with_node(replace(known, strikes=0, quarantined=False, refusal=None))


def remove_node(fleet: Fleet, node: str) -> Fleet:
    """An operator deleted the node."""
    return replace(fleet, nodes={name: state for name, state in fleet.nodes.items() if name != node})


def _merge_observed(known: Mapping[str, Observed], status: Status, checked: CheckedStatus) -> Mapping[str, Observed]:
    """A full status replaces what was known, a delta amends it. An assignment whose figures were refused keeps its last
    report: it did not vanish."""
    if not status.full and not status.observed and not status.gone:
        return known
    merged: dict[str, Observed] = {}
    if not status.full:
        merged |= {key: each for key, each in known.items() if key not in status.gone}
    if refused := checked.refused_assignments:
        merged |= {key: each for key, each in known.items() if key in refused}
    merged |= checked.observed
    return known if list(merged.values()) == list(known.values()) else merged


def _merge_readings(known: Mapping[str, Reading], status: Status, checked: CheckedStatus) -> Mapping[str, Reading]:
    """A device without a reading is lost; one whose reading was refused keeps its last."""
    if [*known] == [*checked.readings]:
        return checked.readings
    answered = {each.device for each in status.readings}
    last_good = {device: reading for device, reading in known.items() if device in answered}
    return {**last_good, **checked.readings}


def _merge_silent(known: NodeState, status: Status) -> Mapping[str, SilentDevice]:
    return {
        each.device: each
        for each in status.silent
        if _has_device(known.node, each.device) and is_plausible_time(each.since)
    }


def _merge_ingress(known: tuple[Ingress, ...], status: Status, checked: CheckedStatus) -> tuple[Ingress, ...]:
    """What is known after a status. Where counts were refused, those before stay: the demand did not vanish. Beyond
    MAX_INGRESS what was told first is forgotten."""
    told = checked.ingress
    if refused := checked.refused_ingress:
        told = (*told, *(each for each in known if (each.workload, each.origin) in refused))
    part = status.ingress_range
    if part is not None:
        inside = (each for each in told if part.has(each.key))
        return (*(each for each in known if not part.has(each.key)), *inside)[-MAX_INGRESS:]
    return told if status.full or status.ingress else known


def _merge_subscriptions(known: Subscriptions | None, told: Subscriptions | None) -> Subscriptions | None:
    return known if told is None or told == known else told


def _amended(
    known: Mapping[str, AgreementCounts], told: Mapping[str, AgreementCounts]
) -> Mapping[str, AgreementCounts]:
    return {**known, **told} if told else known


def _with_contact(state: NodeState, now: Elapsed, wall: Wall) -> NodeState:
    """Any valid message of the node's own session is a sign of life; `update_liveness` reports the change."""
    return replace(state, heard_at=max(now, state.heard_at), last_seen=wall)


def _with_strikes(state: NodeState, refusals: tuple[Refusal, ...]) -> NodeState:
    """One strike more for a message with absurd parts, one less for a clean one; enters and leaves quarantine
    accordingly."""
    if not refusals and state.strikes == 0:
        return state
    strikes = min(state.strikes + 1, MOST_STRIKES) if refusals else max(state.strikes - 1, 0)
    quarantined = strikes >= QUARANTINE_AT or (state.quarantined and strikes > 0)
    refusal = refusals[0] if refusals else state.refusal if strikes else None
    return replace(state, strikes=strikes, quarantined=quarantined, refusal=refusal)


def _skew(known: NodeState, stamp: Wall, wall: Wall) -> Seconds:
    """Clock skew according to a message that the node stamped just now; unchanged where the timestamp is
    implausible."""
    return Seconds(wall - stamp) if is_plausible_time(stamp) else known.skew_s


def _counts_of_restarted_fronts(known: NodeState, now: Mapping[str, AgreementCounts]) -> Mapping[str, AgreementCounts]:
    """A front that counts less than before has restarted: the counts of its predecessors are kept."""
    return {
        name: sum_agreement_counts(known.earlier_agreement_counts[name], before)
        if name in known.earlier_agreement_counts
        else before
        for name, before in known.agreement_counts.items()
        if name in now and _has_restarted(now[name], before)
    }


def _has_restarted(now: AgreementCounts, before: AgreementCounts) -> bool:
    """Whether a count, or any bucket of its latency histogram, went down."""
    return now.requests < before.requests or latency.subtract(now.latencies, before.latencies) is None


def sum_agreement_counts(one: AgreementCounts, other: AgreementCounts) -> AgreementCounts:
    """What two fronts of a node counted under one agreement. The p95 is that of the second."""
    return replace(
        other,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        refused=one.refused + other.refused,
        late=one.late + other.late,
        latencies=latency.merge(one.latencies, other.latencies),
    )


def _has_device(node: Node, device: str) -> bool:
    return any(each.name == device for each in node.devices)


def _is_valid_for(receipt: Receipt, node: Node) -> bool:
    """A receipt becomes invalid when its device, driver or runtime changes."""
    return any(
        device.name == receipt.device
        and device.provider == receipt.provider
        and device.driver_version == receipt.driver_version
        and device.runtime_version == receipt.runtime_version
        for device in node.devices
    )

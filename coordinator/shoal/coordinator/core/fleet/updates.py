"""What a message does to the fleet. Replayed, late and foreign messages change nothing."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.checks import check_receipt, check_status, is_a_time
from shoal.coordinator.core.fleet.state import Fleet, Liveness, NodeState, Timing, Twins
from shoal.types import latency
from shoal.types.assignment import Crossing, Status
from shoal.types.codes import Code, Refusal
from shoal.types.device import Node
from shoal.types.link import OLDEST_PROTOCOL
from shoal.types.receipt import Receipt
from shoal.types.units import Elapsed, Seconds, Wall

QUARANTINE_AT = 3
"""Absurd reports, less the clean ones since, that put a node in quarantine; it ends when they are made up for."""
MOST_STRIKES = 30


def restored(nodes: tuple[NodeState, ...], fleet: Fleet, now: Elapsed) -> Fleet:
    """The fleet as a coordinator starts with it: what the store knew, nobody heard yet, a full window of patience."""
    seen = {
        state.name: replace(
            state,
            liveness=Liveness.NEVER_SEEN,
            since=now,
            connected=False,
            heard_at=now,
            reported=False,
            counts_since=now,
        )
        for state in nodes
    }
    patient_until = Elapsed(now + fleet.timing.lost_after_s)
    return replace(fleet, nodes=seen, patient_until=patient_until, ticked_at=now, mass_silence=None)


def retimed(fleet: Fleet, timing: Timing, now: Elapsed) -> Fleet:
    """Silence is judged by other rules from now on. A shorter beat counts only once the nodes can have heard of it."""
    if timing.suspect_after_s >= fleet.timing.suspect_after_s:
        return replace(fleet, timing=timing)
    patient_until = Elapsed(max(fleet.patient_until, now + fleet.timing.suspect_after_s))
    return replace(fleet, timing=timing, patient_until=patient_until)


def connected(
    fleet: Fleet, node: Node, epoch: int, now: Elapsed, wall: Wall, sent_at: Wall | None = None,
    protocol: int = OLDEST_PROTOCOL,
) -> Fleet:  # fmt: skip
    """A session began. Until its first full status the node counts as it was last seen, unless it booted since.

    Only the first hello is a sign of life: who does not hear the answer says hello for ever. sent_at: by the node's
    clock.
    """
    known = fleet.nodes.get(node.name)
    if known is None:
        known = NodeState(node=node, heard_at=now, since=now)
    elif epoch <= known.epoch:
        return fleet
    if known.node.boot_id != node.boot_id:
        known = replace(known, observed={}, readings={}, ingress=(), reported=False, front_ready=False, version=None)
    receipts = {name: receipt for name, receipt in known.receipts.items() if _still_holds(receipt, node)}
    first_status = Elapsed(now + fleet.timing.suspect_after_s)
    excused = first_status if known.hidden else Elapsed(min(known.excused_until, first_status))
    return fleet.put(
        replace(
            known, node=node, epoch=epoch, sequence=0, connected=True, receipts=receipts, last_seen=wall,
            heard_at=now if known.liveness is Liveness.NEVER_SEEN else known.heard_at,
            skew_s=known.skew_s if sent_at is None else _skew(known, sent_at, wall), revoked=False,
            hidden=False, excused_until=excused, protocol=protocol,
            readings={name: reading for name, reading in known.readings.items() if _has(node, name)},
        )
    )  # fmt: skip


def status_received(
    fleet: Fleet, node: str, epoch: int, status: Status, now: Elapsed, wall: Wall
) -> tuple[Fleet, tuple[Refusal, ...]]:
    """Merge one status. Absurd parts are left out and answered; the node lives all the same.

    A full status replaces what was observed, a delta amends it. A delta that is missing needs no repair: every entry is
    a whole assignment, and the next full status settles the rest.
    """
    known = fleet.nodes.get(node)
    if known is None:
        return fleet, (Refusal(Code.NODE_UNKNOWN, node, "an enrolled node", "say hello first"),)
    if status.node != node:
        return fleet, (Refusal(Code.NODE_MISMATCH, status.node, node, "a node reports itself only"),)
    if epoch != known.epoch or status.epoch != known.epoch:
        stale = Refusal(Code.EPOCH_STALE, f"epoch {status.epoch}", f"epoch {known.epoch}", "connect again")
        return fleet, (stale,)
    if status.sequence <= known.sequence:
        return fleet, ()
    checked = check_status(status, known.node)
    ended = _ended(known, checked.crossings)
    is_new = status.front_ready and not known.front_ready
    still_there = {key: each for key, each in known.observed.items() if key not in status.gone}
    known_observed = {} if status.full else still_there
    # What was known of an assignment whose figures were refused stays: it did not vanish.
    kept = {key: known.observed[key] for key in known.observed if key in checked.refused}
    answered = {each.device for each in status.readings}  # a device without a reading is lost
    last_good = {device: reading for device, reading in known.readings.items() if device in answered}
    state = replace(
        _judged(known, checked.refusals),
        heard_at=max(now, known.heard_at),
        last_seen=wall,
        sequence=status.sequence,
        version=status.version,
        observed={**known_observed, **kept, **checked.observed},
        readings={**last_good, **checked.readings},
        skew_s=_skew(known, status.taken_at, wall),
        ingress=status.ingress if status.full or status.ingress else known.ingress,
        front_ready=status.front_ready,
        reported=known.reported or status.full,
        serial=status.serial or known.serial,
        roots=status.roots or known.roots,
        crossings={**known.crossings, **checked.crossings},
        crossed={**known.crossed, **ended},
        counts_since=now if is_new or ended else known.counts_since,
    )
    return fleet.put(state), checked.refusals


def receipts_received(
    fleet: Fleet, node: str, receipts: tuple[Receipt, ...], now: Elapsed, wall: Wall
) -> tuple[Fleet, tuple[Refusal, ...]]:
    """Keep the receipts that can be true and are not older than what is kept; refuse the rest. From the future is
    what is ahead of both clocks, the node's and ours: either may be behind."""
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
    state = _heard(known, now, wall)
    if refusals:
        state = _judged(state, tuple(refusals))
    return fleet.put(replace(state, receipts=kept)), tuple(refusals)


def disconnected(fleet: Fleet, node: str, epoch: int) -> Fleet:
    """The session ended. Only silence, not a closed stream, makes a node suspect."""
    known = fleet.nodes.get(node)
    if known is None or known.epoch != epoch:
        return fleet
    return fleet.put(replace(known, connected=False))


def unread(fleet: Fleet, nodes: Collection[str], now: Elapsed) -> Fleet:
    """The coordinator has yet to read what these said last: for a beat it holds their silence to be its own."""
    until = Elapsed(now + fleet.timing.heartbeat_s)
    found = {
        name: replace(fleet.nodes[name], excused_until=max(fleet.nodes[name].excused_until, until))
        for name in nodes
        if name in fleet.nodes
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def hidden(fleet: Fleet, nodes: Collection[str], now: Elapsed) -> Fleet:
    """The coordinator has lost what carries these nodes' sessions: for one window it holds their silence to be its own
    blindness. A carrier that stays away longer keeps nobody from being replaced, since a node may have died with it."""
    until = Elapsed(now + fleet.timing.lost_after_s)
    found = {
        name: replace(fleet.nodes[name], hidden=True, excused_until=until)
        for name in nodes
        if name in fleet.nodes and not fleet.nodes[name].hidden
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def uncovered(fleet: Fleet, now: Elapsed) -> Fleet:
    """What was lost carries again. Whoever has to connect anew has one window for it, the others until they are heard
    or are suspect by right."""
    found = {
        state.name: replace(
            state,
            hidden=False,
            excused_until=Elapsed(
                now + (fleet.timing.suspect_after_s if state.connected else fleet.timing.lost_after_s)
            ),
        )
        for state in fleet.nodes.values()
        if state.hidden
    }
    return replace(fleet, nodes={**fleet.nodes, **found}) if found else fleet


def cordoned(fleet: Fleet, node: str, is_cordoned: bool) -> Fleet:
    """Nothing new is placed on a cordoned node; what runs there goes on."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.put(replace(known, cordoned=is_cordoned))


def revoked(fleet: Fleet, node: str, epoch: int) -> Fleet:
    """Its certificates are refused from now on: lost at once, whatever it says, and its session is over."""
    known = fleet.nodes.get(node)
    if known is None:
        return fleet
    lost = replace(known, revoked=True, connected=False, epoch=epoch, liveness=Liveness.LOST, twins=None)
    return fleet.put(lost)


def marked(fleet: Fleet, node: str, twins: Twins | None) -> Fleet:
    """Two agents showed its identity; None: an operator settled that."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.put(replace(known, twins=twins))


def released(fleet: Fleet, node: str) -> Fleet:
    """An operator looked at it: what it reported is forgiven, and what it reports next is judged anew."""
    known = fleet.nodes.get(node)
    return fleet if known is None else fleet.put(replace(known, strikes=0, quarantined=False, refusal=None))


def forgotten(fleet: Fleet, node: str) -> Fleet:
    """The node was deleted by an operator."""
    return replace(fleet, nodes={name: state for name, state in fleet.nodes.items() if name != node})


def _heard(state: NodeState, now: Elapsed, wall: Wall) -> NodeState:
    """Any valid message of the node's own session shows that it lives; `judge` reports the change."""
    return replace(state, heard_at=max(now, state.heard_at), last_seen=wall)


def _judged(state: NodeState, refusals: tuple[Refusal, ...]) -> NodeState:
    if not refusals and state.strikes == 0:
        return state
    strikes = min(state.strikes + 1, MOST_STRIKES) if refusals else max(state.strikes - 1, 0)
    quarantined = strikes >= QUARANTINE_AT or (state.quarantined and strikes > 0)
    refusal = refusals[0] if refusals else state.refusal if strikes else None
    return replace(state, strikes=strikes, quarantined=quarantined, refusal=refusal)


def _skew(known: NodeState, stamp: Wall, wall: Wall) -> Seconds:
    """What a message that its node stamped just now tells of its clock."""
    return Seconds(wall - stamp) if is_a_time(stamp) else known.skew_s


def _ended(known: NodeState, now: Mapping[str, Crossing]) -> Mapping[str, Crossing]:
    """A front that counts less than before began anew: what those before it had counted is kept."""
    return {
        name: united(known.crossed[name], before) if name in known.crossed else before
        for name, before in known.crossings.items()
        if name in now and _is_anew(now[name], before)
    }


def _is_anew(now: Crossing, before: Crossing) -> bool:
    return now.requests < before.requests or latency.since(now.latencies, before.latencies) is None


def united(one: Crossing, other: Crossing) -> Crossing:
    """What two fronts of a node counted under one agreement, the p95 as the second has it."""
    return replace(
        other,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        latencies=latency.together(one.latencies, other.latencies),
    )


def _has(node: Node, device: str) -> bool:
    return any(each.name == device for each in node.devices)


def _still_holds(receipt: Receipt, node: Node) -> bool:
    """A receipt is void when its device, driver or runtime changed."""
    return any(
        device.name == receipt.device
        and device.provider == receipt.provider
        and device.driver_version == receipt.driver_version
        and device.runtime_version == receipt.runtime_version
        for device in node.devices
    )

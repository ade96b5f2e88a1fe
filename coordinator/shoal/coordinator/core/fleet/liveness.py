"""Judges silent nodes, and rules out first that the coordinator itself is at fault."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness, LivenessChange, MassSilence, NodeState
from shoal.types.units import Elapsed, Seconds

MASS_SILENCE_NODES = 3
MASS_SILENCE_SHARE = 1 / 3
LATE_HEARTBEATS = 1.75
"""After this many intervals a heartbeat is certainly missing. Nodes that fall silent together with a node that is
suspect by now are late by now, because their last heartbeats were less than one interval apart."""


def update_liveness(fleet: Fleet, now: Elapsed) -> tuple[Fleet, tuple[LivenessChange, ...]]:
    """Liveness of every node at `now`, and the changes by name. Raises nothing.

    If the last tick is more than a suspect window ago, the coordinator itself was paused. The messages that it did not
    read prove nothing, so no node becomes suspect or lost for one more window. The same holds for a node whose broker
    the coordinator could not reach.
    """
    timing = fleet.timing
    if fleet.ticked_at is not None and now - fleet.ticked_at > timing.suspect_after_s:
        fleet = replace(fleet, grace_until=Elapsed(max(fleet.grace_until, now + timing.lost_after_s)))
    doubtful = _doubtful(fleet, now)
    found = [(state, after) for state in doubtful if (after := _liveness(state, fleet, now)) is not state.liveness]
    changed = {state.name: replace(state, liveness=after, since=now) for state, after in found}
    nodes = {**fleet.nodes, **changed} if changed else fleet.nodes
    judged = replace(fleet, nodes=nodes, ticked_at=now)
    changes = [
        LivenessChange(state.name, state.liveness, after, Seconds(now - state.heard_at)) for state, after in found
    ]
    changes.sort(key=lambda each: each.node)
    silent = [changed.get(state.name, state) for state in doubtful]
    return replace(judged, mass_silence=_mass_silence(judged, silent, now)), tuple(changes)


def deferred_nodes(fleet: Fleet, now: Elapsed) -> frozenset[str]:
    """Silent nodes whose replicas must not be replaced yet.

    In a mass silence nothing is replaced for 1.5 x `lost_after_s`: a coordinator at fault may be cut off for one such
    window, and then all nodes need time to reconnect. After that, nodes are replaced one by one, spread evenly over
    another half. A real loss is thus repaired within 2 x `lost_after_s`, and a false alarm costs little.
    """
    mass = fleet.mass_silence
    if mass is None:
        return frozenset()
    first = mass.since + 1.5 * fleet.timing.lost_after_s
    step = 0.5 * fleet.timing.lost_after_s / len(mass.nodes)
    return frozenset(name for index, name in enumerate(mass.nodes) if now < first + index * step)


def _doubtful(fleet: Fleet, now: Elapsed) -> list[NodeState]:
    """All nodes but those that are ready and were heard in time, which stay so. The region's loop asks at each turn, so
    what all nodes have in common is looked up once."""
    ready, suspect_after_s = Liveness.READY, fleet.timing.suspect_after_s
    return [
        state
        for state in fleet.nodes.values()
        if state.liveness is not ready or now - state.heard_at > suspect_after_s or state.epoch == 0 or state.revoked
    ]


def _liveness(state: NodeState, fleet: Fleet, now: Elapsed) -> Liveness:
    """A node's liveness at `now`. Within a grace period it keeps the liveness it has. A lost node becomes ready again
    only by a message, never suspect."""
    if state.revoked:
        return Liveness.LOST
    timing = fleet.timing
    silent = now - state.heard_at
    if state.epoch == 0 or state.liveness is Liveness.NEVER_SEEN:
        # Known from the store or enrolment alone: heard_at is when this coordinator began to watch it.
        if state.connected:
            return Liveness.READY
        if now < fleet.grace_until or silent <= timing.lost_after_s:
            return Liveness.NEVER_SEEN
        return Liveness.LOST
    if silent <= timing.suspect_after_s:
        return Liveness.READY
    if now < max(fleet.grace_until, state.grace_until):
        return state.liveness
    if silent > timing.lost_after_s:
        return Liveness.LOST
    return Liveness.LOST if state.liveness is Liveness.LOST else Liveness.SUSPECT


def _mass_silence(fleet: Fleet, doubtful: Sequence[NodeState], now: Elapsed) -> MassSilence | None:
    """Begins when at least 3 nodes, and at least a third of those alive, fell silent in one window. Ends when all are
    back, or two windows later.

    As soon as the first node is suspect, late nodes count too. Otherwise the first would be replaced before the third
    is suspect. Where nodes were only late, it ends with their next heartbeat.
    doubtful: of the fleet, all nodes but some that are ready.
    """
    window = fleet.timing.lost_after_s
    ongoing = fleet.mass_silence
    if ongoing is not None and now >= ongoing.since + 2 * window:
        return None
    since = ongoing.since if ongoing is not None else now
    first = since - window - fleet.timing.suspect_after_s
    silent = [
        state.name
        for state in doubtful
        if state.liveness in (Liveness.SUSPECT, Liveness.LOST)
        and state.epoch > 0
        and state.heard_at >= first
        and not state.revoked
    ]
    if not silent:
        return None
    alive = [state for state in fleet.nodes.values() if state.liveness is Liveness.READY]
    late = [
        state.name
        for state in alive
        if now - state.heard_at > LATE_HEARTBEATS * fleet.timing.heartbeat_s and now >= state.grace_until
    ]
    enough = max(MASS_SILENCE_NODES, MASS_SILENCE_SHARE * (len(alive) + len(silent)))
    sure = len(silent) >= enough or (ongoing is not None and ongoing.is_confirmed)
    if not sure and len(silent) + len(late) < enough:
        return None
    return MassSilence(since, tuple(sorted([*silent, *late])), sure)

"""Who is silent for how long, judged by an observer that first doubts itself."""

from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness, LivenessChange, MassSilence, NodeState
from shoal.types.units import Elapsed, Seconds

MASS_NODES = 3
MASS_SHARE = 1 / 3
LATE_BEATS = 1.75
"""A beat is missing for sure. Who falls silent at once with a node that is suspect by now is late by now: their last
beats were less than one apart."""


def judge(fleet: Fleet, now: Elapsed) -> tuple[Fleet, tuple[LivenessChange, ...]]:
    """Liveness of every node at `now`; the changes, by name.

    An observer whose own last tick is more than a suspect window ago was paused itself: the messages that it did not
    read prove nothing, and nobody becomes suspect or lost before one more window. Likewise a node that it could not
    hear for want of a carrier. Raises nothing.
    """
    timing = fleet.timing
    if fleet.ticked_at is not None and now - fleet.ticked_at > timing.suspect_after_s:
        fleet = replace(fleet, patient_until=Elapsed(max(fleet.patient_until, now + timing.lost_after_s)))
    nodes = dict(fleet.nodes)
    changes = list[LivenessChange]()
    for name in sorted(nodes):
        state = nodes[name]
        after = _liveness(state, fleet, now)
        if after is not state.liveness:
            nodes[name] = replace(state, liveness=after, since=now)
            changes.append(LivenessChange(name, state.liveness, after, Seconds(now - state.heard_at)))
    judged = replace(fleet, nodes=nodes, ticked_at=now)
    return replace(judged, mass_silence=_mass_silence(judged, now)), tuple(changes)


def held(fleet: Fleet, now: Elapsed) -> frozenset[str]:
    """Silent nodes whose replicas are not to be replaced yet.

    In a mass silence nothing is replaced for one and a half `lost_after` (an observer at fault may be cut off for one,
    and then be called again by all), then node after node, evenly over the other half: a real loss is made good within
    two of them, a false one costs little.
    """
    mass = fleet.mass_silence
    if mass is None:
        return frozenset()
    first = mass.since + 1.5 * fleet.timing.lost_after_s
    step = 0.5 * fleet.timing.lost_after_s / len(mass.nodes)
    return frozenset(name for index, name in enumerate(mass.nodes) if now < first + index * step)


def _liveness(state: NodeState, fleet: Fleet, now: Elapsed) -> Liveness:
    if state.revoked:
        return Liveness.LOST
    timing = fleet.timing
    silent = now - state.heard_at
    if state.epoch == 0 or state.liveness is Liveness.NEVER_SEEN:
        # Known from the store or enrolment alone: heard_at is when this coordinator began to watch it.
        if state.connected:
            return Liveness.READY
        if now < fleet.patient_until or silent <= timing.lost_after_s:
            return Liveness.NEVER_SEEN
        return Liveness.LOST
    if silent <= timing.suspect_after_s:
        return Liveness.READY
    if now < max(fleet.patient_until, state.excused_until):
        return state.liveness
    if silent > timing.lost_after_s:
        return Liveness.LOST
    return Liveness.LOST if state.liveness is Liveness.LOST else Liveness.SUSPECT


def _mass_silence(fleet: Fleet, now: Elapsed) -> MassSilence | None:
    """Begins when >= 3 nodes and >= a third of those alive fell silent in one window; ends when all are back, or
    two windows later.

    With the first that is suspect the late ones count too, or it would be replaced before the third is suspect; where
    they were only late it ends with the next beat.
    """
    window = fleet.timing.lost_after_s
    ongoing = fleet.mass_silence
    if ongoing is not None and now >= ongoing.since + 2 * window:
        return None
    since = ongoing.since if ongoing is not None else now
    first = since - window - fleet.timing.suspect_after_s
    fallen = [
        state.name
        for state in fleet.nodes.values()
        if state.liveness in (Liveness.SUSPECT, Liveness.LOST)
        and state.epoch > 0
        and state.heard_at >= first
        and not state.revoked
    ]
    if not fallen:
        return None
    alive = [state for state in fleet.nodes.values() if state.liveness is Liveness.READY]
    late = [
        state.name
        for state in alive
        if now - state.heard_at > LATE_BEATS * fleet.timing.heartbeat_s and now >= state.excused_until
    ]
    enough = max(MASS_NODES, MASS_SHARE * (len(alive) + len(fallen)))
    sure = len(fallen) >= enough or (ongoing is not None and ongoing.sure)
    if not sure and len(fallen) + len(late) < enough:
        return None
    return MassSilence(since, tuple(sorted([*fallen, *late])), sure)

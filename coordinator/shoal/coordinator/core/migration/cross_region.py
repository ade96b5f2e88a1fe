"""Moves between this region and another: the same state machine, between all local replicas and an agreement there.

The trade makes and keeps the agreement (core/negotiation/trade.py). CrossRegionState tells the trade, placement and
routes how far the migration is. Verification and the guard observe from this region: the other region answers as it
answers any client.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.budget import (
    DEFERRABLE_CAUSES,
    REGION_MOST,
    HoldReason,
    MoveHold,
    cross_region_hold,
)
from shoal.coordinator.core.migration.effects import WRONG_ANSWER_CODES, has_wrong_answers
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    DoneState,
    DrainingState,
    GapState,
    Migration,
    MoveProposal,
    PlannedState,
    PreparingState,
    ReplicaObservation,
    ReplicaPlace,
    RequestStats,
    ReturningState,
    RollingBackState,
    ShiftingState,
    place_of,
)
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.workloads.cross_region_state import (
    CrossRegionState,
    DrainingHere,
    DrainingThere,
    MoveBackFailed,
    MovedForGood,
    MoveOutFailed,
    MovingBack,
    MovingOut,
    ReturnCooldown,
)
from shoal.coordinator.core.workloads.model import (
    Decision,
    DelegatedWorkload,
    DesiredContent,
    RegionState,
)
from shoal.coordinator.core.workloads.routes import gateways
from shoal.coordinator.core.workloads.service_reports import agreement_counts
from shoal.types import latency
from shoal.types.agreement import GUEST_TENANT, local_traffic_key
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, Verdict, Verification
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, WorkloadKey

INITIAL_STATE = PlannedState(Elapsed(0.0), Elapsed(0.0))


def cross_region_states(migrations: Iterable[Migration], now: Elapsed) -> Mapping[WorkloadKey, CrossRegionState]:
    """State of each workload that is moving between regions, or was brought back recently."""
    found = {key: _cross_region_state(each, now) for key, each in _newest(migrations).items()}
    return {key: state for key, state in found.items() if state is not None}


def served_agreements(migrations: Iterable[Migration]) -> frozenset[str]:
    """Agreements under which another region has served: moves ended at them, or came back from them."""
    inward = {each.source.assignment for each in migrations if each.is_cross_region and not each.leaves_region}
    return frozenset(inward) | {
        each.target.assignment
        for each in migrations
        if each.leaves_region and isinstance(each.state, DoneState) and each.target is not None
    }


def new_migrations(
    world: RegionState, migrations: Collection[Migration], decision: Decision, now: Elapsed, wall: Wall
) -> tuple[tuple[Migration, ...], tuple[MoveHold, ...]]:
    """Automatic moves between regions that begin now, and what holds back the others. Either another region got the
    workload while local replicas serve it, or the workload is to come back from the region that serves it. A
    workload that is to leave waits for its time before it is offered to any region (`may_leave`)."""
    if not world.delegations:
        return (), ()
    newest, intents = _newest(migrations), {intent.key: intent for intent in world.intents}
    begins, held = list[Migration](), list[MoveHold]()
    for key, away in sorted(world.delegations.items()):
        intent, last = intents.get(key), newest.get(key)
        if intent is None or key.tenant == GUEST_TENANT or intent.session:
            continue  # a session's state never leaves the region
        if last is not None and _blocks_new_move(last, away, now):
            continue
        there = str(key) in world.memory.away
        source = next(_serving_replicas(key, decision.desired, world.fleet), None)
        found: MoveProposal | None = None
        if away.is_wanted and not away.return_reason:
            if not there and source is not None:
                node, one = source
                place = place_of(world.fleet, node, one)
                why = "it is better elsewhere" if _has_local_place(decision, key) else "home has no place for all of it"
                found = MoveProposal(key, place, Aim(region=away.region), Cause.COST, why)
        elif away.return_reason and away.is_ready and away.model in {model.digest for model in intent.models}:
            cause = Cause.FAILBACK if away.is_wanted else Cause.NOTICE
            if away.is_wanted or _has_local_place(decision, key):
                found = MoveProposal(key, remote_place(away), Aim(region=world.region.name), cause, away.return_reason)
        if found is None:
            continue
        hold = cross_region_hold(key, intent.migration, [*migrations, *begins], now, wall)
        if hold is not None and (found.cause is Cause.FAILBACK or hold[0] is HoldReason.OTHERS):
            held.append(MoveHold(found, *hold))
        else:
            begins.append(_new_migration(away, intent, found, last))
    return tuple(begins), tuple(held)


def queue_refusal(migration: Migration, migrations: Iterable[Migration]) -> Refusal | None:
    """Why a planned move does not search for a place yet: the limit of deferrable moves between regions is reached.
    None: it searches now."""
    before = [
        each
        for each in migrations
        if each.is_cross_region and not (each.is_over or isinstance(each.state, PlannedState))
    ]
    if (
        migration.cause not in DEFERRABLE_CAUSES
        or sum(each.cause in DEFERRABLE_CAUSES for each in before) < REGION_MOST
    ):
        return None
    return Refusal(Code.WAITING_FOR_TURN, f"{REGION_MOST} moves between regions are under way")


def region_exclusions(migrations: Iterable[Migration]) -> Mapping[WorkloadKey, frozenset[tuple[str, str]]]:
    """(region, model digest) of wrong answers, by workload: these regions do not get the workload with that model
    again until an operator clears the model."""
    found = dict[WorkloadKey, frozenset[tuple[str, str]]]()
    for each in migrations:
        if each.leaves_region and has_wrong_answers(each) and each.target is not None:
            found[each.workload] = found.get(each.workload, frozenset()) | {(each.target.region, each.target.model)}
    return found


def remote_place(away: DelegatedWorkload) -> ReplicaPlace:
    stand_in = away.bid.stand_in if away.bid is not None else ""
    return ReplicaPlace(
        away.agreement, away.region, "", away.model, away.precision, region=away.region, stand_in=stand_in
    )


def target_of(
    migration: Migration, world: RegionState, decision: Decision
) -> tuple[str, Assignment] | ReplicaPlace | None:
    """The place of a move that waits for one: an agreement with that region, or a local replica; None: none yet."""
    away = world.delegations.get(migration.workload)
    if migration.leaves_region:
        return (
            remote_place(away) if away is not None and away.region == migration.aim.region and away.is_wanted else None
        )
    return next(_request_replicas(migration.workload, decision.desired), None)


def replicas_of(key: WorkloadKey, fleet: Fleet, decision: Decision) -> tuple[ReplicaPlace, ...]:
    """All local replicas that take requests, or are to."""
    return tuple(place_of(fleet, node, one) for node, one in _request_replicas(key, decision.desired))


def agreement_observation(
    place: ReplicaPlace, migration: Migration, world: RegionState, wall: Wall
) -> ReplicaObservation:
    """An agreement as if it were a replica; a broken one as a replica that is gone."""
    away = world.delegations.get(migration.workload)
    if away is None or away.agreement != place.assignment or away.is_broken:
        return ReplicaObservation()
    observed = Observed(
        assignment=place.assignment,
        workload=migration.workload,
        model=place.model,
        device="",
        phase=Phase.READY if away.is_ready else Phase.FETCHING,
        since=wall,
        code=None,
        reason="" if away.is_ready else f"{away.region} makes ready",
        retry_at=None,
        gives_up_at=None,
        in_flight=0,
        restarts=0,
        measured=None,
        served=(),
        verdict=_verdict_at(migration.source, world.fleet),
    )
    return ReplicaObservation(
        is_assigned=True, is_current=True, observed=observed, stats=remote_stats(world.fleet, away)
    )


def remote_stats(fleet: Fleet, away: DelegatedWorkload) -> RequestStats:
    """Requests to the other region, as this region's gateways count them."""
    return _stats(fleet, away.agreement, away.rtt_s)


def local_stats(fleet: Fleet, migration: Migration) -> RequestStats | None:
    """Requests to the local replicas, as the same gateways count them. None before there is an agreement to count
    under."""
    away = migration.target if migration.leaves_region else migration.source
    return _stats(fleet, local_traffic_key(away.assignment), Seconds(0.0)) if away is not None else None


def counts_since(fleet: Fleet) -> Elapsed | None:
    """Since when all working gateways of this region have counted without a break that this coordinator knows of;
    its own start is one. None: no gateway works."""
    counting = (fleet.nodes[each.name] for each in gateways(fleet) if _is_ready(fleet, each.name))
    return max((state.counts_since for state in counting), default=None)


def is_locally_complete(migration: Migration, decision: Decision, fleet: Fleet) -> bool:
    """True if all replicas wanted locally serve, for a workload that comes back."""
    plan = next((plan for plan in decision.plan.workloads if plan.workload == migration.workload), None)
    ready = sum(1 for _ in _serving_replicas(migration.workload, decision.desired, fleet))
    return plan is not None and ready >= plan.wanted > 0


def verification_of(usual: Verification, migration: Migration, fleet: Fleet) -> Verification | None:
    """What the local replica has to compare: its own answers with those under the agreement. None: nothing."""
    away = migration.target if migration.leaves_region else migration.source
    leads = next((each for each in gateways(fleet) if _is_ready(fleet, each.name)), None)
    if usual.against is Against.NONE or away is None or leads is None:
        return None
    return replace(
        usual,
        against=Against.SOURCE,
        recording=None,
        source="",
        source_node=leads.name,
        source_address=leads.address,
        agreement=away.assignment,
        beside=migration.leaves_region or _was_ready_before(migration, fleet),
    )


def _was_ready_before(migration: Migration, fleet: Fleet) -> bool:
    """True if the target replica was ready before it had anything to verify: a node verifies before a replica is
    ready, or else beside its service."""
    target = migration.target
    state = fleet.nodes.get(target.node) if target is not None else None
    observed = state.observed.get(target.assignment) if target is not None and state is not None else None
    if observed is None or observed.phase is not Phase.READY:
        return False
    return observed.verdict is None or observed.verdict.migration != migration.id


def ending_refusal(migration: Migration, world: RegionState) -> Refusal | None:
    """Why the agreement that it moves to will not last; None: it will."""
    away, target = world.delegations.get(migration.workload), migration.target
    if (
        away is None
        or target is None
        or away.agreement != target.assignment
        or (away.is_wanted and not away.return_reason)
    ):
        return None
    return Refusal(Code.AGREEMENT_ENDED, f"{target.assignment} ends: {away.return_reason or 'it is broken'}")


def placement_refusal(migration: Migration, last_refusals: Mapping[WorkloadKey, Refusal]) -> Refusal:
    """Why it has no place yet. last_refusals: why the last trade of each workload found no region."""
    if not migration.leaves_region:
        return Refusal(Code.NO_CANDIDATE, "no place at home yet", "one for all its replicas")
    unheard = Refusal(Code.NO_BID, f"{migration.aim.region} has not answered yet", "an offer that fits")
    return last_refusals.get(migration.workload) or unheard


def _stats(fleet: Fleet, agreement: str, way_s: Seconds) -> RequestStats:
    counted = tuple(agreement_counts(fleet, agreement))
    return RequestStats(
        requests=sum(each.attributable_requests for each in counted),
        errors=sum(each.errors for each in counted),
        late=sum(each.late for each in counted),
        latencies=latency.merge(*(each.latencies for each in counted)),
        way_s=way_s,
    ).with_p95()


def _newest(migrations: Iterable[Migration]) -> Mapping[WorkloadKey, Migration]:
    moves = sorted((each for each in migrations if each.is_cross_region), key=lambda each: (each.stages[0].at, each.id))
    return {each.workload: each for each in moves}


def _cross_region_state(migration: Migration, now: Elapsed) -> CrossRegionState | None:
    return _outbound_state(migration, now) if migration.leaves_region else _inbound_state(migration, now)


def _outbound_state(migration: Migration, now: Elapsed) -> CrossRegionState | None:
    region, by_operator = migration.aim.region, migration.cause is Cause.OPERATOR
    agreement = migration.target.assignment if migration.target is not None else ""
    match migration.state:
        case PlannedState() | PreparingState():
            return MovingOut(region, agreement, 0.0)
        case ShiftingState(step=step):
            return MovingOut(region, agreement, migration.rule.steps[step])
        case DrainingState():
            return DrainingHere(region, agreement, is_permanent=by_operator)
        case DoneState():
            return MovedForGood(region, agreement) if by_operator else None
        case RollingBackState(refusal=refusal):
            return MoveOutFailed(region, agreement, refusal.code in WRONG_ANSWER_CODES, is_over=False)
        case AbortedState(refusal=refusal, at=at):
            if now >= at + migration.rule.cooldown_s:
                return None
            return MoveOutFailed(region, agreement, refusal.code in WRONG_ANSWER_CODES, is_over=True)
        case GapState() | ReturningState():
            return None  # these need a gap, which moves between regions never have


def _inbound_state(migration: Migration, now: Elapsed) -> CrossRegionState | None:
    region, agreement = migration.source.region, migration.source.assignment
    match migration.state:
        case PlannedState() | PreparingState():
            return MovingBack(region, agreement, 1.0)
        case ShiftingState(step=step):
            return MovingBack(region, agreement, 1.0 - migration.rule.steps[step])
        case DrainingState():
            return DrainingThere(region, agreement)
        case DoneState(at=at):
            rests = bool(migration.asked) or now < at + migration.rule.cooldown_s
            is_noticed = migration.cause is Cause.NOTICE
            return ReturnCooldown(region, agreement, migration.asked) if rests and not is_noticed else None
        case RollingBackState():
            return MoveBackFailed(region, agreement)
        case AbortedState():
            return None
        case GapState() | ReturningState():
            return None  # these need a gap, which moves between regions never have


def _blocks_new_move(last: Migration, away: DelegatedWorkload, now: Elapsed) -> bool:
    """True if the last move blocks another: it is under way, or was rolled back too recently or for good."""
    if not last.is_over:
        return True
    if isinstance(last.state, AbortedState):
        for_good = not away.is_wanted and last.source.assignment == away.agreement
        return for_good or now < last.state.at + last.rule.cooldown_s
    return (
        last.target is not None
        and last.target.assignment == away.agreement
        and away.is_wanted
        and not away.return_reason
    )


def _new_migration(away: DelegatedWorkload, intent: Intent, asked: MoveProposal, last: Migration | None) -> Migration:
    """last: the workload's last move between regions, so that a second attempt gets another id."""
    named = "\0".join((away.agreement, asked.aim.region, last.id if last is not None else ""))
    name = f"m-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    return Migration(
        name, intent.key, asked.cause, "", asked.source, asked.aim, intent.migration, INITIAL_STATE, reason=asked.reason
    )


def _has_local_place(decision: Decision, key: WorkloadKey) -> bool:
    plan = next((plan for plan in decision.plan.workloads if plan.workload == key), None)
    return plan is not None and plan.refusal is None and plan.wanted > 0


def _request_replicas(key: WorkloadKey, desired: Mapping[str, DesiredContent]) -> Iterator[tuple[str, Assignment]]:
    """Replicas for requests, by node."""
    for node in sorted(desired):
        for one in desired[node].assignments:
            if one.workload == key and not (one.draining or one.standby):
                yield node, one


def _serving_replicas(
    key: WorkloadKey, desired: Mapping[str, DesiredContent], fleet: Fleet
) -> Iterator[tuple[str, Assignment]]:
    for node, one in _request_replicas(key, desired):
        state = fleet.nodes.get(node)
        observed = state.observed.get(one.id) if state is not None else None
        if _is_ready(fleet, node) and observed is not None and observed.phase is Phase.READY:
            yield node, one


def _is_ready(fleet: Fleet, node: str) -> bool:
    state = fleet.nodes.get(node)
    return state is not None and state.liveness is Liveness.READY and state.has_full_status and state.front_ready


def _verdict_at(source: ReplicaPlace, fleet: Fleet) -> Verdict | None:
    """Verdict of a local replica that verifies another region's answers."""
    state = fleet.nodes.get(source.node)
    observed = state.observed.get(source.assignment) if state is not None else None
    return observed.verdict if observed is not None else None

"""Moves between this region and another: the same machine, between all replicas here and an agreement there.

The trade makes and keeps the agreement (core/negotiation/trade.py); how far a workload is on its way is told to it, to
placement and to the routes by its `Course`. What is compared, and what the guard reads, is seen from here: the other
region answers as it answers any client.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration.budget import CAN_WAIT, REGION_MOST, Held, Hold, holds_at_home
from shoal.coordinator.core.migration.model import (
    Aborted,
    Alone,
    Cause,
    Done,
    Draining,
    Figures,
    Migration,
    Place,
    Planned,
    Preparing,
    Proposal,
    Returning,
    RollingBack,
    Shifting,
    Sight,
)
from shoal.coordinator.core.migration.moves import WRONG, forbids
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.workloads.delivered import crossed
from shoal.coordinator.core.workloads.model import Content, Course, Decision, Delegated, World
from shoal.coordinator.core.workloads.routes import gateways
from shoal.types import latency
from shoal.types.agreement import GUESTS, home_side
from shoal.types.assignment import Assignment, Observed, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, Verdict, Verification
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, WorkloadKey

UNDECIDED = Planned(Elapsed(0.0), Elapsed(0.0))


def courses_of(migrations: Iterable[Migration], now: Elapsed) -> Mapping[WorkloadKey, Course]:
    """Of workloads that are on their way, or were taken back from it lately."""
    found = {key: _course(each, now) for key, each in _newest(migrations).items()}
    return {key: course for key, course in found.items() if course is not None}


def crossed_of(migrations: Iterable[Migration]) -> frozenset[str]:
    """Agreements that moves ended at, or came home from: under them another region has served."""
    inward = {each.source.assignment for each in migrations if each.crosses and not each.leaves_home}
    return frozenset(inward) | {
        each.target.assignment
        for each in migrations
        if each.leaves_home and isinstance(each.state, Done) and each.target is not None
    }


def begun(
    world: World, migrations: Collection[Migration], decision: Decision, now: Elapsed, wall: Wall
) -> tuple[tuple[Migration, ...], tuple[Held, ...]]:
    """Moves that nobody asked for by name: a workload was given to another region while home serves it, or is to come
    home from one that serves it; and what holds back those that could begin. A workload that is to leave waits for its
    time before it is offered to anybody (`may_leave`)."""
    newest, intents = _newest(migrations), {intent.key: intent for intent in world.intents}
    begins, held = list[Migration](), list[Held]()
    for key, away in sorted(world.delegated.items()):
        intent, last = intents.get(key), newest.get(key)
        if intent is None or key.tenant == GUESTS or intent.session:
            continue  # a session's state goes to no other region
        if last is not None and _stands_in_the_way(last, away, now):
            continue
        there = str(key) in world.memory.away
        source = next(_serving(key, decision.desired, world.fleet), None)
        found: Proposal | None = None
        if away.wanted and not away.returns:
            if not there and source is not None:
                node, one = source
                place = Place(one.id, node, one.device, one.model, one.precision)
                why = "it is better elsewhere" if _placed(decision, key) else "home has no place for all of it"
                found = Proposal(key, place, Aim(region=away.region), Cause.COST, why)
        elif away.returns and away.ready and away.model in {model.digest for model in intent.models}:
            cause = Cause.FAILBACK if away.wanted else Cause.NOTICE
            if away.wanted or _placed(decision, key):
                found = Proposal(key, abroad(away), Aim(region=world.region.name), cause, away.returns)
        if found is None:
            continue
        hold = holds_at_home(key, intent.migration, [*migrations, *begins], now, wall)
        if hold is not None and (found.cause is Cause.FAILBACK or hold[0] is Hold.OTHERS):
            held.append(Held(found, *hold))
        else:
            begins.append(_move(away, intent, found, last))
    return tuple(begins), tuple(held)


def queued(migration: Migration, migrations: Iterable[Migration]) -> Refusal | None:
    """Why one that is planned does not look for its place yet: as many as may move between regions and can wait do."""
    before = [each for each in migrations if each.crosses and not (each.is_over or isinstance(each.state, Planned))]
    if migration.cause not in CAN_WAIT or sum(each.cause in CAN_WAIT for each in before) < REGION_MOST:
        return None
    return Refusal(Code.WAITING_FOR_TURN, f"{REGION_MOST} moves between regions are under way")


def barred_of(migrations: Iterable[Migration]) -> Mapping[WorkloadKey, frozenset[tuple[str, str]]]:
    """Regions whose answers with a model, by digest, were wrong: they get the workload with it no more, until an
    operator clears the model."""
    found = dict[WorkloadKey, frozenset[tuple[str, str]]]()
    for each in migrations:
        if each.leaves_home and forbids(each) and each.target is not None:
            found[each.workload] = found.get(each.workload, frozenset()) | {(each.target.region, each.target.model)}
    return found


def abroad(away: Delegated) -> Place:
    return Place(away.agreement, away.region, "", away.model, away.precision, region=away.region)


def target_of(migration: Migration, world: World, decision: Decision) -> tuple[str, Assignment] | Place | None:
    """Where a move that waits for a place has one now: an agreement with that region, or a replica here."""
    away = world.delegated.get(migration.workload)
    if migration.leaves_home:
        return abroad(away) if away is not None and away.region == migration.aim.region and away.wanted else None
    return next(_held(migration.workload, decision.desired), None)


def replicas_of(key: WorkloadKey, decision: Decision) -> tuple[Place, ...]:
    """All that take requests at home, or are to."""
    held = _held(key, decision.desired)
    return tuple(Place(one.id, node, one.device, one.model, one.precision) for node, one in held)


def sight_of(place: Place, migration: Migration, world: World, wall: Wall) -> Sight:
    """An agreement, as a replica would be seen; a broken one as one that is gone."""
    away = world.delegated.get(migration.workload)
    if away is None or away.agreement != place.assignment or away.is_broken:
        return Sight()
    observed = Observed(
        assignment=place.assignment,
        workload=migration.workload,
        model=place.model,
        device="",
        phase=Phase.READY if away.ready else Phase.FETCHING,
        since=wall,
        code=None,
        reason="" if away.ready else f"{away.region} makes ready",
        retry_at=None,
        gives_up_at=None,
        in_flight=0,
        restarts=0,
        measured=None,
        served=(),
        verdict=_verdict_at(migration.source, world.fleet),
    )
    return Sight(assigned=True, seen=True, observed=observed, figures=figures_abroad(world.fleet, away))


def figures_abroad(fleet: Fleet, away: Delegated) -> Figures:
    """Of the other region, as this one's gateways count what they send there."""
    return _figures(fleet, away.agreement, away.way_s)


def figures_at_home(fleet: Fleet, migration: Migration) -> Figures | None:
    """Of the replicas here, as the same gateways count. None before there is an agreement to count under."""
    away = migration.target if migration.leaves_home else migration.source
    return _figures(fleet, home_side(away.assignment), Seconds(0.0)) if away is not None else None


def counts_since(fleet: Fleet) -> Elapsed | None:
    """Since when all of this region's gateways that work have counted, without a break that this coordinator knows of,
    its own beginning among them. None: none works."""
    counting = (fleet.nodes[each.name] for each in gateways(fleet) if _is_ready(fleet, each.name))
    return max((state.counts_since for state in counting), default=None)


def is_whole(migration: Migration, decision: Decision, fleet: Fleet) -> bool:
    """Whether all that is wanted at home serves there, for a workload that comes home."""
    plan = next((plan for plan in decision.plan.workloads if plan.workload == migration.workload), None)
    ready = sum(1 for _ in _serving(migration.workload, decision.desired, fleet))
    return plan is not None and ready >= plan.wanted > 0


def verification_of(usual: Verification, migration: Migration, fleet: Fleet) -> Verification | None:
    """What the replica here has to compare: its own answers with those under the agreement. None: nothing."""
    away = migration.target if migration.leaves_home else migration.source
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
        beside=migration.leaves_home or _stood_by(migration, fleet),
    )


def _stood_by(migration: Migration, fleet: Fleet) -> bool:
    """Whether the replica that it comes home to was ready before it had anything to show: a node compares before it is
    ready, or beside."""
    target = migration.target
    state = fleet.nodes.get(target.node) if target is not None else None
    observed = state.observed.get(target.assignment) if target is not None and state is not None else None
    if observed is None or observed.phase is not Phase.READY:
        return False
    return observed.verdict is None or observed.verdict.migration != migration.id


def ends(migration: Migration, world: World) -> Refusal | None:
    """Why the agreement that it goes towards will not last."""
    away, target = world.delegated.get(migration.workload), migration.target
    if away is None or target is None or away.agreement != target.assignment or (away.wanted and not away.returns):
        return None
    return Refusal(Code.AGREEMENT_ENDED, f"{target.assignment} ends: {away.returns or 'it is broken'}")


def refusal_of(migration: Migration, turned: Mapping[WorkloadKey, Refusal]) -> Refusal:
    """Why it has no place yet. turned: why the last trade of each workload came to nothing."""
    if not migration.leaves_home:
        return Refusal(Code.NO_CANDIDATE, "no place at home yet", "one for all its replicas")
    unheard = Refusal(Code.NO_BID, f"{migration.aim.region} has not answered yet", "an offer that fits")
    return turned.get(migration.workload) or unheard


def _figures(fleet: Fleet, agreement: str, way_s: Seconds) -> Figures:
    counted = tuple(crossed(fleet, agreement))
    return Figures(
        requests=sum(each.requests for each in counted),
        errors=sum(each.errors for each in counted),
        latencies=latency.together(*(each.latencies for each in counted)),
        way_s=way_s,
    ).with_p95()


def _newest(migrations: Iterable[Migration]) -> Mapping[WorkloadKey, Migration]:
    crossing = sorted((each for each in migrations if each.crosses), key=lambda each: (each.story[0].at, each.id))
    return {each.workload: each for each in crossing}


def _course(migration: Migration, now: Elapsed) -> Course | None:
    """Outwards all requests are home's at first, inwards the other region's."""
    found = _course_by_state(migration, now)
    there = migration.target if migration.leaves_home else migration.source
    if found is None:
        return None
    return replace(found, agreement=there.assignment if there is not None else "", over=migration.is_over)


def _course_by_state(migration: Migration, now: Elapsed) -> Course | None:
    out = migration.leaves_home
    region = migration.aim.region if out else migration.source.region
    match migration.state:
        case Planned() | Preparing():
            return Course(region, 0.0 if out else 1.0, home=True, goes=out)
        case Shifting(step=step):
            share = migration.rule.steps[step]
            return Course(region, share if out else 1.0 - share, home=True, goes=out)
        case Draining():
            if not out:
                return Course(region, 0.0, home=True, leaves=True)
            return Course(region, 1.0, home=False, goes=True, stays=migration.cause is Cause.OPERATOR)
        case RollingBack(refusal=refusal):
            given_up = Course(region, 0.0, home=True, leaves=True, wrong=refusal.code in WRONG)
            return given_up if out else Course(region, 1.0, home=False)
        case Aborted(refusal=refusal, at=at):
            late = not out or now >= at + migration.rule.cooldown_s
            return None if late else Course(region, 0.0, home=True, leaves=True, wrong=refusal.code in WRONG)
        case Done() if out and migration.cause is Cause.OPERATOR:
            return Course(region, 1.0, home=False, goes=True, stays=True)
        case Done(at=at) if not out and migration.cause is not Cause.NOTICE:
            rests = bool(migration.asked) or now < at + migration.rule.cooldown_s
            return Course(region, 0.0, home=True, rests=True, asked=migration.asked) if rests else None
        case Done() | Alone() | Returning():  # the latter two are of moves with a gap, which none of these has
            return None


def _stands_in_the_way(last: Migration, away: Delegated, now: Elapsed) -> bool:
    """It is under way; or was taken back so lately, or for good, that it is not begun again."""
    if not last.is_over:
        return True
    if isinstance(last.state, Aborted):
        for_good = not away.wanted and last.source.assignment == away.agreement
        return for_good or now < last.state.at + last.rule.cooldown_s
    return last.target is not None and last.target.assignment == away.agreement and away.wanted and not away.returns


def _move(away: Delegated, intent: Intent, asked: Proposal, last: Migration | None) -> Migration:
    """last: of the workload's moves between regions, so that a second attempt is another one."""
    named = "\0".join((away.agreement, asked.aim.region, last.id if last is not None else ""))
    name = f"m-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    return Migration(
        name, intent.key, asked.cause, "", asked.source, asked.aim, intent.migration, UNDECIDED, reason=asked.reason
    )


def _placed(decision: Decision, key: WorkloadKey) -> bool:
    plan = next((plan for plan in decision.plan.workloads if plan.workload == key), None)
    return plan is not None and plan.refusal is None and plan.wanted > 0


def _held(key: WorkloadKey, desired: Mapping[str, Content]) -> Iterator[tuple[str, Assignment]]:
    """Replicas for requests, by node."""
    for node in sorted(desired):
        for one in desired[node].assignments:
            if one.workload == key and not (one.draining or one.standby):
                yield node, one


def _serving(key: WorkloadKey, desired: Mapping[str, Content], fleet: Fleet) -> Iterator[tuple[str, Assignment]]:
    for node, one in _held(key, desired):
        state = fleet.nodes.get(node)
        observed = state.observed.get(one.id) if state is not None else None
        if _is_ready(fleet, node) and observed is not None and observed.phase is Phase.READY:
            yield node, one


def _is_ready(fleet: Fleet, node: str) -> bool:
    state = fleet.nodes.get(node)
    return state is not None and state.liveness is Liveness.READY and state.reported and state.front_ready


def _verdict_at(source: Place, fleet: Fleet) -> Verdict | None:
    """Of a replica here that another region's answers are judged by."""
    state = fleet.nodes.get(source.node)
    observed = state.observed.get(source.assignment) if state is not None else None
    return observed.verdict if observed is not None else None

"""One step of the region's reconciling, from everything known to everything asked."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import Fleet, Timing
from shoal.coordinator.core.placement.model import Inputs, Plan, Trial
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads import sleep
from shoal.coordinator.core.workloads.model import (
    Content,
    Course,
    Decision,
    Delegated,
    Happened,
    Memory,
    Remembered,
    Table,
    Wait,
    World,
)
from shoal.coordinator.core.workloads.reconcile import reconcile
from shoal.coordinator.core.workloads.replacing import Moving
from shoal.coordinator.core.workloads.routes import at_home, is_gateway, routes, served_here, shares_of, tables
from shoal.coordinator.core.workloads.schedule import holding, is_timely, lead_s
from shoal.coordinator.core.workloads.trouble import broken, crashes, poisoned
from shoal.types.agreement import GUESTS
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, PartitionRule, WorkloadKey


def decide(world: World, now: Elapsed, wall: Wall) -> Decision:
    """One step of the region: what broke, where things shall run (`place`), what to do next (`reconcile`), and routes.

    Pure. The caller persists `decision.desired` where it differs (new generation) with `decision.memory` and the events
    in one transaction, then sends. Called again with what it answered and the same fleet, it changes nothing.
    """
    desired = {node: world.desired.get(node, Content()).assignments for node in sorted(world.fleet.nodes)}
    memory = replace(
        world.memory,
        crashes=crashes(world.memory, world.fleet, desired, now),
        measured=_remember(world.memory, world.fleet),
    )
    inputs = inputs_of(replace(world, memory=memory), now, wall)
    plan = place(inputs, explain=False)
    settled = _Settled(memory, Elapsed(now - world.fleet.timing.settle_s))
    elsewhere = frozenset(key for key in inputs.elsewhere if settled.away(key))
    outcome = reconcile(
        plan, desired, world.fleet, world.profiles, inputs.broken, memory, now, wall, elsewhere,
        Moving(world.moves, {intent.key: _at_once(world, intent) for intent in world.intents}),
    )  # fmt: skip
    courses = {key: course for key in world.delegated if (course := _course_of(world, key)) is not None}
    shares, abroad = shares_of(world.moves), {key: each.share for key, each in courses.items()}
    here = served_here(world.delegated, outcome.desired, world.fleet, memory.tables, shares)
    unshown = _unshown(world)
    delegated = {
        key: each
        for key, each in world.delegated.items()
        if _serves(key, each)
        and _is_routed(
            each,
            courses.get(key),
            here=key in here,
            back=settled.back(key),
            shown=key not in unshown,
        )
    }
    tables_now = tables(plan, outcome.desired, world.fleet, memory.tables, delegated, shares, abroad)
    lacking = {str(each.workload) for each in plan.workloads if (each.refusal or each.no_standby) is not None}
    short = _since(memory.short, lacking, now)
    dark = {str(each.workload) for each in plan.workloads if not tables_now[str(each.workload)].endpoints}
    after = replace(
        memory,
        issued=outcome.issued,
        marks=outcome.marks,
        tables=tables_now,
        short=short,
        without_ready=_since(memory.without_ready, dark, now),
        away=_since(
            memory.away,
            {str(key) for key, each in delegated.items() if each.wanted and abroad.get(key, 1.0) >= 1.0},
            now,
        ),
        back=_since(memory.back, _home_again(plan, tables_now, world.delegated), now),
        idle=sleep.idle(world.fleet, outcome.desired, world.reserved, memory.idle, now),
    )
    heartbeat_s = timing(world.intents).heartbeat_s
    sleeping = sleep.asleep(after.idle, world.region.sleep_after_s, now)
    contents = {
        node: Content(
            assignments=assignments,
            routes=routes(node, plan, tables_now, assignments, world.fleet.nodes.get(node), shares),
            pins=tuple(sorted({assignment.model for assignment in assignments})),
            heartbeat_s=heartbeat_s,
            peers=world.peers if is_gateway(world.fleet.nodes.get(node)) else (),
            asleep=sleeping.get(node, ()),
        )
        for node, assignments in outcome.desired.items()
    }
    waits = tuple(_dated(wait, short, now, wall) for wait in outcome.waits)
    slept = sleep.told(world.fleet, world.desired, contents)
    events = outcome.events + _poisonings(world.memory, memory) + slept
    return Decision(plan, contents, after, waits, events, outcome.replaced)


def inputs_of(world: World, now: Elapsed, wall: Wall) -> Inputs:
    """What placement looks at, for `decide` and for `plan` and `explain` (with `place(inputs)`)."""
    desired = {node: content.assignments for node, content in world.desired.items()}
    awaited = {key for key in _unshown(world) if _is_served(world.memory.tables.get(str(key)))}
    return Inputs(
        region=world.region,
        fleet=world.fleet,
        intents=tuple(
            holding(intent, world.region, wall, lead_s(intent, world.fleet, world.memory.measured))
            if is_timely(intent)
            else intent
            for intent in world.intents
        ),
        profiles=world.profiles,
        desired=desired,
        now=now,
        wall=wall,
        seed=world.seed,
        documents=world.documents,
        quotas=world.quotas,
        terms={name: mark.terms for name, mark in world.memory.marks.items()},
        broken=broken(world.memory, world.fleet, desired, now),
        poisoned=poisoned(world.memory.crashes),
        measured={each.trial: each.measured for each in world.memory.measured},
        costs=world.costs,
        rtt_s=world.rtt_s,
        signatures=world.signatures,
        elsewhere=frozenset(
            key
            for key, each in world.delegated.items()
            if each.wanted and _serves(key, each) and key not in awaited and not _is_home(_course_of(world, key))
        ),
        reserved=world.reserved,
        moves=world.moves,
        blocked=world.blocked,
    )


def timing(intents: tuple[Intent, ...]) -> Timing:
    """The shortest heartbeat and loss that any workload's `partition` rule asks for; the defaults without workloads."""
    rules = [intent.partition for intent in intents] or [PartitionRule()]
    return Timing(
        Seconds(min(rule.heartbeat_s for rule in rules)),
        Seconds(min(rule.lost_after_s for rule in rules)),
    )


def _serves(key: WorkloadKey, delegated: Delegated) -> bool:
    """What runs here for another region goes to no third."""
    return delegated.ready and bool(delegated.gateways) and key.tenant != GUESTS


def _unshown(world: World) -> frozenset[WorkloadKey]:
    """Workloads that another region is to run and has not run yet: a move begins that."""
    sessions = {intent.key for intent in world.intents if intent.session}
    return frozenset(
        key
        for key, each in world.delegated.items()
        if not (key in sessions or str(key) in world.memory.away or each.agreement in world.crossed)
    )


def _is_served(table: Table | None) -> bool:
    return table is not None and at_home(table.endpoints) > 0


def _at_once(world: World, intent: Intent) -> int:
    """How many of its replicas may move: none while it moves as a whole."""
    course = world.courses.get(intent.key)
    return intent.migration.max_concurrent if course is None or course.over else 0


def _is_home(course: Course | None) -> bool:
    return course is not None and course.home


def _course_of(world: World, key: WorkloadKey) -> Course | None:
    """Of the very agreement that it has now. Once that is broken only what is wrong there counts of it: home serves
    with what it has."""
    course, away = world.courses.get(key), world.delegated.get(key)
    if course is None or away is None or away.region != course.region or (away.is_broken and not course.wrong):
        return None
    return course if course.agreement in ("", away.agreement) else None


def _is_routed(delegated: Delegated, course: Course | None, *, here: bool, back: bool, shown: bool) -> bool:
    """here: home has a replica that takes requests. back: it has had all of them in the routes for a while. shown: this
    agreement served before, or nothing is to be shown."""
    if course is not None and course.wrong:
        return False
    if not here:
        return True
    if course is not None:
        return not (course.leaves and course.share <= 0)
    return shown if delegated.wanted else not back


class _Settled:
    """What has been in the routes since `before`, the time that they take to reach every front."""

    def __init__(self, memory: Memory, before: Elapsed) -> None:
        self._memory = memory
        self._before = before

    def away(self, key: WorkloadKey) -> bool:
        return self._is_old(self._memory.away.get(str(key)))

    def back(self, key: WorkloadKey) -> bool:
        return self._is_old(self._memory.back.get(str(key)))

    def _is_old(self, since: Elapsed | None) -> bool:
        return since is not None and since <= self._before


def _home_again(plan: Plan, tables: Mapping[str, Table], delegated: Mapping[WorkloadKey, Delegated]) -> set[str]:
    """Workloads that are to come home, and whose replicas are all in the routes."""
    wanted = {each.workload: each.wanted for each in plan.workloads}
    return {
        str(key)
        for key, each in delegated.items()
        if not each.wanted and key in wanted and at_home(tables[str(key)].endpoints) >= wanted[key] > 0
    }


def _remember(memory: Memory, fleet: Fleet) -> tuple[Remembered, ...]:
    """Warm-up figures by (model, node, device); the newest stay when their replica is gone."""
    known = {each.trial: each for each in memory.measured}
    for state in fleet.nodes.values():
        for _, observed in sorted(state.observed.items()):  # two may be of one trial: in whatever order they came
            if observed.measured is not None:
                new = Remembered(Trial(observed.model, state.name, observed.device), observed.measured)
                if repr(known.get(new.trial)) != repr(new):  # NaN is not equal to itself: an unknown joule is no news
                    known[new.trial] = new
    return tuple(known[trial] for trial in sorted(known))


def _since(before: Mapping[str, Elapsed], names: set[str], now: Elapsed) -> Mapping[str, Elapsed]:
    return {name: before.get(name, now) for name in sorted(names)}


def _dated(wait: Wait, short: Mapping[str, Elapsed], now: Elapsed, wall: Wall) -> Wait:
    """A wait of a whole workload began when its replicas came to be missing."""
    if wait.assignment:
        return wait
    return replace(wait, since=Wall(wall - (now - short.get(str(wait.workload), now))))


def _poisonings(before: Memory, after: Memory) -> tuple[Happened, ...]:
    fresh = poisoned(after.crashes) - poisoned(before.crashes)
    return tuple(
        Happened("POISONED", triple.model, f"{triple.provider} {triple.runtime_version}", "", None)
        for triple in sorted(fresh)
    )

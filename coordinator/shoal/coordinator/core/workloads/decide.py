"""One step of the region's reconciliation, from its full state to its full decision."""

from collections.abc import Mapping
from dataclasses import replace

from shoal.coordinator.core.fleet.state import LivenessTiming
from shoal.coordinator.core.placement.model import Inputs, PlacementPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads import sleep
from shoal.coordinator.core.workloads.budgets import budget_events, over_budget
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
    has_wrong_answers,
    is_over,
    is_wanted_here,
    remote_share,
)
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.failures import (
    broken_assignments,
    count_crashes,
    describe_poisoning,
    load_refusals,
    poisonings,
    record_unloadable,
)
from shoal.coordinator.core.workloads.model import (
    Decision,
    DelegatedWorkload,
    DesiredContent,
    MigrationEffects,
    ReconcilerMemory,
    RegionEvent,
    RegionState,
    RouteTable,
    WorkloadWait,
)
from shoal.coordinator.core.workloads.reconcile import reconcile
from shoal.coordinator.core.workloads.replacements import MovesUnderWay
from shoal.coordinator.core.workloads.routes import (
    is_gateway,
    local_replica_count,
    locally_served,
    routes,
    shares_of,
    tables,
)
from shoal.coordinator.core.workloads.schedule import effective_intent, is_time_dependent, lead_s
from shoal.coordinator.core.workloads.tenant_shares import tenant_limits
from shoal.coordinator.core.workloads.warm_ups import remember_warm_ups
from shoal.types.agreement import GUEST_TENANT
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import Intent, PartitionRule, WorkloadKey


def decide(world: RegionState, migrations: MigrationEffects, now: Elapsed, wall: Wall) -> Decision:
    """One step of the region: failures, placement (`place`), the next changes (`reconcile`), and routes.

    Pure. The caller persists `decision.desired` where it differs (new generation) with `decision.memory` and the
    events in one transaction, then sends. Called again with its own result and the same fleet, it changes nothing.
    """
    desired = {node: world.desired.get(node, DesiredContent()).assignments for node in sorted(world.fleet.nodes)}
    memory = replace(
        world.memory,
        crashes=count_crashes(world.memory, world.fleet, desired, now),
        measured=remember_warm_ups(world, desired),
        unloadable=record_unloadable(world.memory, world.fleet, desired, world.profiles.keys()),
    )
    inputs = inputs_of(replace(world, memory=memory), migrations, now, wall)
    plan = place(inputs, explain=False)
    settled = _SettledRoutes(memory, Elapsed(now - world.fleet.timing.route_propagation_s))
    elsewhere = frozenset(key for key in inputs.elsewhere if settled.is_away(key))
    limits = {intent.key: _max_concurrent_moves(migrations, intent) for intent in world.intents}
    outcome = reconcile(
        plan, desired, world.fleet, world.profiles, inputs.broken_assignments, memory, now, wall, elsewhere,
        MovesUnderWay(migrations.moves, limits),
    )  # fmt: skip
    cross_region = {
        key: state for key in world.delegations if (state := _cross_region_state(world, migrations, key)) is not None
    }
    shares, abroad = shares_of(migrations.moves), {key: remote_share(each) for key, each in cross_region.items()}
    here = locally_served(world.delegations, outcome.desired, world.fleet, memory.tables, shares)
    unshown = _unserved_delegations(world, migrations)
    delegated = {
        key: each
        for key, each in world.delegations.items()
        if _is_served_remotely(key, each)
        and _is_routed(
            each,
            cross_region.get(key),
            is_served_here=key in here,
            is_back=settled.is_back(key),
            has_served=key not in unshown,
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
            {str(key) for key, each in delegated.items() if each.is_wanted and abroad.get(key, 1.0) >= 1.0},
            now,
        ),
        back=_since(memory.back, _returned_workloads(plan, tables_now, world.delegations), now),
        idle=sleep.idle_since(world.fleet, outcome.desired, world.reserved, memory.idle, now),
        over_budget=over_budget(memory.over_budget, plan.budgets, now),
    )
    heartbeat_s = timing(world.intents).heartbeat_s
    sleeping = sleep.devices_to_sleep(after.idle, world.region.sleep_after_s, now)
    entries = EntryPoints(world.fleet, outcome.desired, [each.workload for each in plan.workloads], world.delegations)
    limits_of = tenant_limits(*(world.quotas, entries, world.fleet, world.desired, world.demands, world.confirmed))
    contents = {
        node: DesiredContent(
            assignments=assignments,
            routes=routes(*(node, tables_now, assignments, world.fleet.nodes.get(node), shares), entries=entries),
            pins=tuple(sorted({assignment.model for assignment in assignments})),
            heartbeat_s=heartbeat_s,
            peers=world.peers if is_gateway(world.fleet.nodes.get(node)) else (),
            asleep=sleeping.get(node, ()),
            forwarding=entries.forwarding(node),
            tenants=limits_of.get(node, ()),
        )
        for node, assignments in outcome.desired.items()
    }
    waits = tuple(_with_start(wait, short, now, wall) for wait in outcome.waits)
    slept = sleep.sleep_events(world.fleet, world.desired, contents)
    events = outcome.events + _poisonings(world.memory, memory) + slept
    events += budget_events(memory.over_budget, plan.budgets)
    return Decision(plan, contents, after, waits, events, outcome.replacements)


def inputs_of(world: RegionState, migrations: MigrationEffects, now: Elapsed, wall: Wall) -> Inputs:
    """Input of placement, for `decide` and for `plan` and `explain` (with `place(inputs)`)."""
    desired = {node: content.assignments for node, content in world.desired.items()}
    unserved = _unserved_delegations(world, migrations)
    awaited = {key for key in unserved if _has_local_route(world.memory.tables.get(str(key)))}
    return Inputs(
        region=world.region,
        fleet=world.fleet,
        intents=tuple(
            effective_intent(intent, world.region, wall, lead_s(intent, world.fleet, world.memory.measured))
            if is_time_dependent(intent)
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
        broken_assignments=broken_assignments(world.memory, world.fleet, desired, now),
        poisoned=poisonings(world.memory.crashes),
        unloadable=load_refusals(world.memory.unloadable),
        measured={each.trial: each.measured for each in world.memory.measured},
        residuals=tuple(each.residual for each in world.memory.measured if each.residual is not None),
        costs=world.costs,
        rtt_s=world.rtt_s,
        signatures=world.signatures,
        elsewhere=frozenset(
            key
            for key, each in world.delegations.items()
            if each.is_wanted
            and _is_served_remotely(key, each)
            and key not in awaited
            and not ((state := _cross_region_state(world, migrations, key)) is not None and is_wanted_here(state))
        ),
        awarded=world.awarded,
        reserved=world.reserved,
        moves=migrations.moves,
        blocked=migrations.blocked,
    )


def timing(intents: tuple[Intent, ...]) -> LivenessTiming:
    """The shortest heartbeat and loss time that any workload's `partition` rule asks for; the defaults without
    workloads."""
    rules = [intent.partition for intent in intents] or [PartitionRule()]
    return LivenessTiming(
        Seconds(min(rule.heartbeat_s for rule in rules)),
        Seconds(min(rule.lost_after_s for rule in rules)),
    )


def _is_served_remotely(key: WorkloadKey, delegated: DelegatedWorkload) -> bool:
    """True if requests may go there. A guest of another region never goes to a third one."""
    return delegated.is_ready and bool(delegated.gateways) and key.tenant != GUEST_TENANT


def _unserved_delegations(world: RegionState, migrations: MigrationEffects) -> frozenset[WorkloadKey]:
    """Workloads that another region is to run but has not served yet: a move starts that."""
    sessions = {intent.key for intent in world.intents if intent.session}
    return frozenset(
        key
        for key, each in world.delegations.items()
        if not (key in sessions or str(key) in world.memory.away or each.agreement in migrations.served_agreements)
    )


def _has_local_route(table: RouteTable | None) -> bool:
    return table is not None and local_replica_count(table.endpoints) > 0


def _max_concurrent_moves(migrations: MigrationEffects, intent: Intent) -> int:
    """How many of its replicas may move at once: none while it moves as a whole."""
    state = migrations.cross_region_states.get(intent.key)
    return intent.migration.max_concurrent if state is None or is_over(state) else 0


def _cross_region_state(world: RegionState, migrations: MigrationEffects, key: WorkloadKey) -> CrossRegionState | None:
    """State of its cross-region migration, if it is about its current agreement. After a breach it only matters if
    the answers there are wrong: otherwise the local region serves with what it has."""
    state, away = migrations.cross_region_states.get(key), world.delegations.get(key)
    if state is None or away is None or away.region != state.region:
        return None
    if away.is_broken and not has_wrong_answers(state):
        return None
    return state if state.agreement in ("", away.agreement) else None


def _is_routed(
    delegated: DelegatedWorkload,
    state: CrossRegionState | None,
    *,
    is_served_here: bool,
    is_back: bool,
    has_served: bool,
) -> bool:
    """True if the route leads to the other region. is_served_here: a local replica takes requests. is_back: all
    local replicas have been in the routes for a while. has_served: this agreement served before, or needs no
    verification."""
    match state:
        case MoveOutFailed(has_wrong_answers=True):
            return False
        case MoveOutFailed() | DrainingThere():
            return not is_served_here
        case MovingOut() | DrainingHere() | MovedForGood() | MovingBack() | MoveBackFailed() | ReturnCooldown():
            return True
        case None:
            return not is_served_here or (has_served if delegated.is_wanted else not is_back)


class _SettledRoutes:
    """Entries that have been in the routes since `before`, so that every front has them."""

    def __init__(self, memory: ReconcilerMemory, before: Elapsed) -> None:
        self._memory = memory
        self._before = before

    def is_away(self, key: WorkloadKey) -> bool:
        return self._is_old(self._memory.away.get(str(key)))

    def is_back(self, key: WorkloadKey) -> bool:
        return self._is_old(self._memory.back.get(str(key)))

    def _is_old(self, since: Elapsed | None) -> bool:
        return since is not None and since <= self._before


def _returned_workloads(
    plan: PlacementPlan, tables: Mapping[str, RouteTable], delegated: Mapping[WorkloadKey, DelegatedWorkload]
) -> set[str]:
    """Workloads that are to come back and whose local replicas are all in the routes."""
    wanted = {each.workload: each.wanted for each in plan.workloads}
    return {
        str(key)
        for key, each in delegated.items()
        if not each.is_wanted and key in wanted and local_replica_count(tables[str(key)].endpoints) >= wanted[key] > 0
    }


def _since(before: Mapping[str, Elapsed], names: set[str], now: Elapsed) -> Mapping[str, Elapsed]:
    return {name: before.get(name, now) for name in sorted(names)}


def _with_start(wait: WorkloadWait, short: Mapping[str, Elapsed], now: Elapsed, wall: Wall) -> WorkloadWait:
    """A wait of a whole workload starts when its replicas became too few."""
    if wait.assignment:
        return wait
    return replace(wait, since=Wall(wall - (now - short.get(str(wait.workload), now))))


def _poisonings(before: ReconcilerMemory, after: ReconcilerMemory) -> tuple[RegionEvent, ...]:
    fresh = poisonings(after.crashes) - poisonings(before.crashes)
    return tuple(
        RegionEvent("POISONED", each.triple.model, describe_poisoning(each), "", None) for each in sorted(fresh)
    )

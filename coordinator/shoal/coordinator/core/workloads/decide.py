"""One step of the region's reconciliation, from its full state to its full decision."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

from immutables import Map

from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.placement.allocations import NOTHING_STANDS, StandingReplicas
from shoal.coordinator.core.placement.columns import DeviceColumns
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
from shoal.coordinator.core.workloads.kept import KeptDecisions, StepPart
from shoal.coordinator.core.workloads.model import (
    Decision,
    DelegatedWorkload,
    DesiredContent,
    Mark,
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
    GatewayRoutes,
    RoutesBefore,
    answering,
    is_gateway,
    local_replica_count,
    locally_served,
    routes,
    shares_of,
    tables,
)
from shoal.coordinator.core.workloads.schedule import effective_intent, is_time_dependent, lead_s
from shoal.coordinator.core.workloads.tenant_shares import TenantShares
from shoal.coordinator.core.workloads.warm_ups import remember_warm_ups
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment
from shoal.types.units import Elapsed, Wall
from shoal.types.workload import Intent, WorkloadKey

T = TypeVar("T")
REFUTED: Final = "decided again, it comes out otherwise though nothing that should matter changed: a defect of Shoal"


def decide(
    world: RegionState,
    migrations: MigrationEffects,
    now: Elapsed,
    wall: Wall,
    kept: KeptDecisions | None = None,
    most_new: int | None = None,
) -> Decision:
    """One step of the region: failures, placement (`place`), the next changes (`reconcile`), and routes.

    The caller persists `decision.desired` where it differs (new generation) with `decision.memory` and the
    events in one transaction, then sends. Called again with its own result and the same fleet, it changes nothing.
    What warm-ups of this step teach about other places counts from the next step on.

    kept: what earlier steps decided; the step decides about what changed since, and comes to the same. It is pure
    without that, and looks at every device. With it, the caller adopts the decision there once it is stored.
    most_new: new workloads that it decides about where it need not decide about everything; None: all.
    """
    is_kept = kept is not None
    kept = KeptDecisions() if kept is None else kept
    part = kept.open(world, migrations, most_new)
    residuals = kept.residuals_of(world.memory)
    warm_ups = remember_warm_ups(world, world.fleet.nodes if part.is_whole else part.nodes, kept.intents, residuals)
    desired = part.desired
    memory = replace(
        world.memory,
        crashes=count_crashes(world.memory, world.fleet, desired, now, world.profiles.keys()),
        measured=warm_ups.measured,
        unloadable=record_unloadable(world.memory, world.fleet, desired, world.profiles.keys()),
    )
    own_marks = {one.id: mark for one in _all(desired) if (mark := memory.marks.get(one.id)) is not None}
    inputs = _inputs_of(replace(world, memory=memory), migrations, now, wall, part, own_marks)
    columns = kept.columns if is_kept else None
    if columns is not None:
        columns.update(inputs, world.memory.measured, warm_ups.nodes)
    plan = place(inputs, explain=False, standing=kept.standing, columns=columns)
    settled = _SettledRoutes(memory, Elapsed(now - world.fleet.timing.route_propagation_s))
    elsewhere = frozenset(key for key in inputs.elsewhere if settled.is_away(key))
    limits = {intent.key: _max_concurrent_moves(migrations, intent) for intent in part.intents}
    outcome = reconcile(
        plan, desired, world.fleet, world.profiles, inputs.broken_assignments, memory, own_marks, now, wall, elsewhere,
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
    own_tables = tables(plan, outcome.desired, world.fleet, memory.tables, delegated, shares, abroad)
    tables_now = _with_tables(memory.tables, own_tables, part)
    lacking = {str(each.workload) for each in plan.workloads if (each.refusal or each.no_standby) is not None}
    short = _since(memory.short, lacking, now)
    dark = {
        str(each.workload)
        for each in plan.workloads
        if not answering(own_tables[str(each.workload)].endpoints, world.fleet)
    }
    assigned = _with_kept_assignments(world, part, outcome.desired, kept)
    marks = _with_marks(memory.marks, own_marks, outcome.marks, part)
    after = replace(
        memory,
        residuals=warm_ups.residuals,
        issued=outcome.issued,
        marks=marks,
        tables=tables_now,
        short=short,
        without_ready=_since(memory.without_ready, dark, now),
        away=_since(
            memory.away,
            {str(key) for key, each in delegated.items() if each.is_wanted and abroad.get(key, 1.0) >= 1.0},
            now,
        ),
        back=_since(memory.back, _returned_workloads(plan, own_tables, world.delegations, world.fleet), now),
        idle=_idle(world, kept, assigned, now),
        over_budget=over_budget(memory.over_budget, plan.budgets, now),
    )
    remembered = _remembered(world.memory, after, part, outcome.desired)
    entries, tenant_shares, concerned, rerouted = _entries(world, kept, part, assigned, memory.tables, own_tables)
    sleeping = sleep.devices_to_sleep(after.idle, world.region.sleep_after_s, now)
    tenants = tenant_shares.decide(world.quotas, world.fleet, world.desired, world.demands, world.confirmed, part.nodes)
    heartbeat_s = kept.heartbeat_s
    concerned |= {
        node
        for node, found in assigned.items()
        if node not in world.desired or found != world.desired[node].assignments
    }
    looked_at = _nodes_to_look_at(world, kept, part, concerned, sleeping, tenants.changed)
    held = {node: assigned[node] if node in assigned else world.desired[node].assignments for node in looked_at}
    of_gateways = GatewayRoutes()
    contents = {
        node: DesiredContent(
            assignments=held[node],
            routes=routes(
                node,
                tables_now,
                held[node],
                world.fleet.nodes.get(node),
                shares,
                entries,
                of_gateways,
                _routes_before(world, node, held[node], entries, rerouted),
            ),
            pins=tuple(sorted({assignment.model for assignment in held[node]})),
            heartbeat_s=heartbeat_s,
            peers=world.peers if is_gateway(world.fleet.nodes.get(node)) else (),
            asleep=sleeping.get(node, ()),
            forwarding=entries.forwarding(node),
            tenants=tenants.of.get(node, ()),
            routes_on_demand=entries.is_on_demand(node),
        )
        for node in looked_at
    }
    waits = tuple(_with_start(wait, short, now, wall) for wait in outcome.waits)
    slept = sleep.sleep_events(world.fleet, world.desired, contents)
    events = outcome.events + _poisonings(world.memory, memory) + slept
    events += budget_events(memory.over_budget, plan.budgets)
    decision = Decision(
        *(plan, contents, after, waits, events, outcome.replacements, part.is_whole, remembered, warm_ups.trials),
        rerouted=None if rerouted is None else frozenset(rerouted),
        absurd=warm_ups.absurd,
    )
    return _with_audit(decision, part, kept.find_refuted(world, decision, now))


def _with_audit(decision: Decision, part: StepPart, refuted: tuple[str, ...]) -> Decision:
    if not (part.audited or refuted):
        return decision
    events = tuple(RegionEvent("DECISION_REFUTED", each, REFUTED, "", None) for each in refuted)
    return replace(decision, events=decision.events + events, audited=len(part.audited), refuted=refuted)


def inputs_of(world: RegionState, migrations: MigrationEffects, now: Elapsed, wall: Wall) -> Inputs:
    """Input of placement, for `plan` and `explain` (with `place(inputs)`)."""
    desired = {node: content.assignments for node, content in world.desired.items()}
    part = StepPart(True, world.intents, desired, set())
    return _inputs_of(world, migrations, now, wall, part, world.memory.marks)


def inputs_of_part(
    world: RegionState, migrations: MigrationEffects, now: Elapsed, wall: Wall, part: StepPart
) -> Inputs:
    """The same, of some workloads."""
    marks = {one.id: mark for one in _all(part.desired) if (mark := world.memory.marks.get(one.id)) is not None}
    return _inputs_of(world, migrations, now, wall, part, marks)


class NextPlacement(NamedTuple):
    """What placement would be asked if a step began now. Nothing in it changes any more, so that it may be asked in a
    thread, once."""

    inputs: Inputs
    # What the workloads take that are not among the inputs.
    standing: StandingReplicas = NOTHING_STANDS
    # The devices of the inputs; None: each has to be looked at.
    columns: DeviceColumns | None = None

    def plan(self, explain: bool | Collection[WorkloadKey]) -> PlacementPlan:
        """As `place` has it. Of workloads that stay as they are, it may say nothing."""
        return place(self.inputs, explain=explain, standing=self.standing, columns=self.columns)


def next_placement(
    world: RegionState, migrations: MigrationEffects, now: Elapsed, wall: Wall, kept: KeptDecisions
) -> NextPlacement:
    """Of what is not settled, as far as that is known. kept: as in `decide`; it does not change."""
    found = kept.preview(world, migrations)
    if found is None:
        return NextPlacement(inputs_of(world, migrations, now, wall))
    inputs = inputs_of_part(world, migrations, now, wall, found.part)
    found.columns.update(inputs, world.memory.measured, ())
    return NextPlacement(inputs, found.standing, found.columns)


def _inputs_of(
    world: RegionState,
    migrations: MigrationEffects,
    now: Elapsed,
    wall: Wall,
    part: StepPart,
    marks: Mapping[str, Mark],
) -> Inputs:
    """Of what a step decides about. marks: of its assignments."""
    desired = part.desired
    unserved = _unserved_delegations(world, migrations)
    awaited = {key for key in unserved if _has_local_route(world, key)}
    return Inputs(
        region=world.region,
        fleet=world.fleet,
        intents=tuple(
            effective_intent(intent, world.region, wall, lead_s(intent, world.fleet, world.memory.measured))
            if is_time_dependent(intent)
            else intent
            for intent in part.intents
        ),
        profiles=world.profiles,
        desired=desired,
        now=now,
        wall=wall,
        seed=world.seed,
        documents=world.documents,
        quotas=world.quotas,
        terms={name: mark.terms for name, mark in marks.items()},
        left_out=frozenset(name for name, mark in marks.items() if mark.is_left_out),
        broken_assignments=broken_assignments(world.memory, world.fleet, desired, now),
        poisoned=poisonings(world.memory.crashes),
        unloadable=load_refusals(world.memory.unloadable),
        measured=world.memory.measured,
        residuals=world.memory.known_residuals,
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
        move_overheads=migrations.overheads,
    )


def _is_served_remotely(key: WorkloadKey, delegated: DelegatedWorkload) -> bool:
    """True if requests may go there. A guest of another region never goes to a third one."""
    return delegated.is_ready and bool(delegated.gateways) and key.tenant != GUEST_TENANT


def _unserved_delegations(world: RegionState, migrations: MigrationEffects) -> frozenset[WorkloadKey]:
    """Workloads that another region is to run but has not served yet: a move starts that."""
    if not world.delegations:
        return frozenset()
    sessions = {intent.key for intent in world.intents if intent.session}
    return frozenset(
        key
        for key, each in world.delegations.items()
        if not (key in sessions or str(key) in world.memory.away or each.agreement in migrations.served_agreements)
    )


def _has_local_route(world: RegionState, key: WorkloadKey) -> bool:
    table = world.memory.tables.get(str(key))
    return table is not None and local_replica_count(table.endpoints, world.fleet) > 0


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
    plan: PlacementPlan,
    tables: Mapping[str, RouteTable],
    delegated: Mapping[WorkloadKey, DelegatedWorkload],
    fleet: Fleet,
) -> set[str]:
    """Workloads that are to come back and whose local replicas are all in the routes."""
    wanted = {each.workload: each.wanted for each in plan.workloads}
    return {
        str(key)
        for key, each in delegated.items()
        if not each.is_wanted
        and key in wanted
        and local_replica_count(tables[str(key)].endpoints, fleet) >= wanted[key] > 0
    }


def _all(desired: Mapping[str, tuple[Assignment, ...]]) -> Iterator[Assignment]:
    return (one for assignments in desired.values() for one in assignments)


def _with_tables(before: Map[str, RouteTable], own: Mapping[str, RouteTable], part: StepPart) -> Map[str, RouteTable]:
    """All tables, with those of the workloads that were decided about, and without those of deleted ones."""
    if part.is_whole:
        is_same = len(before) == len(own) and all(before.get(key) is each for key, each in own.items())
        return before if is_same else Map(own)
    changed = {name: table for name, table in own.items() if before.get(name) is not table}
    gone = [name for key in part.come_and_gone if (name := str(key)) not in own and name in before]
    return _with_changes(before, changed, gone)


def _with_marks(
    before: Map[str, Mark], own: Mapping[str, Mark], after: Mapping[str, Mark], part: StepPart
) -> Map[str, Mark]:
    """All marks, with those after the step of the assignments that it decided about, and without those of removed
    nodes."""
    changed = {name: mark for name, mark in after.items() if before.get(name) != mark}
    known = before if part.is_whole else {*own, *(name for name in part.removed if name in before)}
    gone = [name for name in known if name not in after]
    return _with_changes(before, changed, gone)


def _with_changes(before: Map[str, T], changed: Mapping[str, T], gone: Sequence[str]) -> Map[str, T]:
    """The same map where nothing changed."""
    if not (changed or gone):
        return before
    after = before.mutate()
    after.update(changed)
    for name in gone:
        del after[name]
    return after.finish()


def _with_kept_assignments(
    world: RegionState, part: StepPart, decided: Mapping[str, tuple[Assignment, ...]], kept: KeptDecisions
) -> dict[str, tuple[Assignment, ...]]:
    """By node, all assignments after the step, of nodes with any that it decided about or whose set may change."""
    if part.is_whole:
        return dict(decided)
    found = dict[str, tuple[Assignment, ...]]()
    for node in {*part.nodes, *decided}:
        before = world.desired[node].assignments if node in world.desired else ()
        left = {one.id: one for one in decided.get(node, ())}
        stays = [one if kept.is_settled(one.workload) else left.pop(one.id, None) for one in before]
        found[node] = (*(one for one in stays if one is not None), *left.values())
    return found


def _remembered(
    before: ReconcilerMemory, after: ReconcilerMemory, part: StepPart, decided: Mapping[str, tuple[Assignment, ...]]
) -> frozenset[WorkloadKey]:
    """Workloads whose marks or tables are others than before."""
    tables_of = {each.key for each in part.intents} | part.come_and_gone
    found = {key for key in tables_of if before.tables.get(str(key)) is not after.tables.get(str(key))}
    if before.marks is not after.marks:
        every = {one.id: one.workload for desired in (part.desired, decided) for one in _all(desired)}
        found |= {key for name, key in every.items() if before.marks.get(name) != after.marks.get(name)}
    if part.is_whole:
        known = {str(each.key) for each in part.intents}
        found |= {WorkloadKey(*name.split("/", 1)) for name in before.tables if name not in known}
    return frozenset(found)


def _idle(
    world: RegionState, kept: KeptDecisions, assigned: Mapping[str, tuple[Assignment, ...]], now: Elapsed
) -> Mapping[str, Elapsed]:
    fleet = kept.sleepers()
    if not fleet.nodes:
        return world.memory.idle if not world.memory.idle else {}
    desired = {
        node: assigned[node] if node in assigned else world.desired[node].assignments if node in world.desired else ()
        for node in fleet.nodes
    }
    return sleep.idle_since(fleet, desired, world.reserved, world.memory.idle, now)


def _entries(
    world: RegionState,
    kept: KeptDecisions,
    part: StepPart,
    assigned: Mapping[str, tuple[Assignment, ...]],
    before: Mapping[str, RouteTable],
    own_tables: Mapping[str, RouteTable],
) -> tuple[EntryPoints, TenantShares, set[str], set[WorkloadKey] | None]:
    """The region's entries after the step, and the shares of tenants there; nodes whose routes or forwarding are
    concerned, and by which workloads; None: by any."""
    entries, tenant_shares = kept.entries, kept.tenant_shares
    if entries is None or tenant_shares is None:
        held = {node: content.assignments for node, content in world.desired.items()}
        keys = kept.intents.keys()
        subscribed = {
            name: _subscribed(world, name) for name, each in world.fleet.nodes.items() if each.node.subscribes
        }
        kept.entries = EntryPoints(world.fleet, {**held, **assigned}, keys, world.delegations, subscribed)
        kept.tenant_shares = TenantShares(kept.entries, world.fleet)
        return kept.entries, kept.tenant_shares, set(world.fleet.nodes), None
    concerned = set[str]()
    moved = set[WorkloadKey]()
    for key in part.come_and_gone:
        (entries.add if str(key) in own_tables else entries.remove)(key)
    for node, assignments in assigned.items():
        if entries.is_on_demand(node):
            entries.subscribe(node, _subscribed(world, node))
        if others := entries.put(node, assignments):
            moved |= others
            concerned.add(node)
    rerouted = {each.key for each in part.intents if before.get(name := str(each.key)) is not own_tables.get(name)}
    rerouted |= moved | part.come_and_gone
    for key in rerouted:
        concerned.update(entries.dependents(key))
    return entries, tenant_shares, concerned, rerouted


def _subscribed(world: RegionState, node: str) -> Collection[WorkloadKey]:
    """What a node subscribes to. Until it has said so, that is what it has routes of, so that a restart of the
    coordinator takes none away."""
    state, content = world.fleet.nodes.get(node), world.desired.get(node)
    if state is not None and state.subscriptions is not None:
        return state.subscriptions.workloads
    return () if content is None else [route.workload for route in content.routes]


def _routes_before(
    world: RegionState, node: str, held: Sequence[Assignment], entries: EntryPoints, rerouted: set[WorkloadKey] | None
) -> RoutesBefore | None:
    """None where any route may be another."""
    known = world.desired.get(node)
    if rerouted is None or known is None:
        return None
    return RoutesBefore(known.routes, rerouted, not (known.assignments or held or entries.is_on_demand(node)))


def _nodes_to_look_at(
    world: RegionState,
    kept: KeptDecisions,
    part: StepPart,
    concerned: set[str],
    sleeping: Mapping[str, tuple[str, ...]],
    limited: AbstractSet[str],
) -> Sequence[str]:
    """Nodes whose desired set may differ from the one before, in order. limited: those with other limits of tenants."""
    if part.is_whole:
        return sorted({*world.fleet.nodes, *concerned})
    nodes = part.nodes | concerned | limited
    for node in {*kept.sleepers().nodes, *sleeping}:
        if node in world.desired and world.desired[node].asleep != sleeping.get(node, ()):
            nodes.add(node)
    return sorted(node for node in nodes if node in world.fleet.nodes)


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

"""One step of the region with its migrations: the decision, each migration's next state, the replicas' instructions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import is_

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration import cross_region, machine
from shoal.coordinator.core.migration.budget import MoveHold, MoveSelection, select_moves
from shoal.coordinator.core.migration.durations import move_overheads
from shoal.coordinator.core.migration.effects import (
    blocked_placements,
    had_outage,
    has_wrong_answers,
    is_block_outdated,
    moves_of,
)
from shoal.coordinator.core.migration.model import (
    AbortedState,
    ActualOutcome,
    Cause,
    DrainingState,
    GapState,
    Migration,
    MigrationEvent,
    MigrationLimits,
    MigrationObservation,
    MigrationStage,
    PlannedState,
    PreparingState,
    ReplicaObservation,
    ReplicaPlace,
    RollingBackState,
    ShiftingState,
    place_of,
)
from shoal.coordinator.core.migration.outcomes import (
    actual_outcome,
    actual_remote_outcome,
    expected_outcome_between,
    expected_remote_outcome,
    fetched_bytes,
    is_outcome_due,
)
from shoal.coordinator.core.migration.reference import needs_recording, recorders, with_reference
from shoal.coordinator.core.migration.triggers import scan
from shoal.coordinator.core.migration.triggers.view import NO_TURNS, TriggerView, Turns
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Aim, WorkloadPlan
from shoal.coordinator.core.workloads.decide import decide, inputs_of, inputs_of_part
from shoal.coordinator.core.workloads.failures import broken_assignments
from shoal.coordinator.core.workloads.kept import KeptDecisions
from shoal.coordinator.core.workloads.model import (
    NO_MIGRATIONS,
    AssignmentStage,
    Decision,
    DesiredContent,
    MigrationEffects,
    ReconcilerMemory,
    References,
    RegionEvent,
    RegionState,
    Replacement,
)
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import (
    Against,
    Handover,
    InputsFrom,
    MigrationRule,
    Recording,
    SessionSource,
    Verification,
    Verifier,
    has_answers,
)
from shoal.types.tolerance import with_defaults
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, show_gain
from shoal.types.workload import Intent, WorkloadKey

MigrationsById = Mapping[str, Migration]


@dataclass(frozen=True, slots=True)
class AdvanceResult:
    """Result of one step. The caller persists the changes in one transaction with the decision and steps again at
    once, because the next step acts on what the changed migrations ask for."""

    # The decision, with the instructions for replicas that move.
    decision: Decision
    # Migrations that are new or changed, by id.
    changed: MigrationsById
    # Proposed moves that do not start, and why; None: triggers did not run.
    move_holds: tuple[MoveHold, ...] | None = None
    # Those of them that have another obstacle than the one reported last.
    new_holds: tuple[MoveHold, ...] = ()
    # The turns that replicas have had, for the next step.
    turns: Turns = field(default_factory=dict)


def migration_effects(world: RegionState, migrations: MigrationsById, now: Elapsed) -> MigrationEffects:
    """What the migrations ask of one step of the region."""
    every = migrations.values()
    places = {place.node for each in every for place in (each.source, each.target) if place is not None}
    desired = {node: world.desired[node].assignments for node in places if node in world.desired}
    failed = broken_assignments(world.memory, world.fleet, desired, now)
    return MigrationEffects(
        moves=moves_of(every, world.fleet, desired),
        blocked=blocked_placements(every, world.intents, world.fleet, desired, failed, now, world.delegations),
        cross_region_states=cross_region.cross_region_states(every, now),
        served_agreements=cross_region.served_agreements(every),
        overheads=move_overheads(every),
    )


def advance(
    world: RegionState,
    migrations: MigrationsById,
    now: Elapsed,
    wall: Wall,
    *,
    run_triggers: bool = True,
    kept: KeptDecisions | None = None,
    most_new: int | None = None,
    turns: Turns = NO_TURNS,
) -> AdvanceResult:
    """`decide` with what the migrations ask for; then each migration's step on the result; then, with `run_triggers`,
    the automatic moves that start.

    Pure and level-triggered: called again with its own result, the same fleet and the same turns, it changes nothing.
    kept, most_new: as in `decide`. turns: as the last step left them.
    """
    kept = KeptDecisions() if kept is None else kept
    decision = decide(world, migration_effects(world, migrations, now), now, wall, kept, most_new)
    # Moves are judged by what is reported this moment.
    world = replace(world, fleet=world.live) if world.live is not None else world

    @cache
    def scope() -> Scope:
        # Moves under way do not count, but what was learnt from those that are over.
        learnt = replace(NO_MIGRATIONS, overheads=move_overheads(migrations.values()))
        return Scope(inputs_of(world, learnt, now, wall))

    @cache
    def effective_intents() -> Mapping[WorkloadKey, Intent]:
        return {intent.key: intent for intent in scope().inputs.intents}

    limits = MigrationLimits(route_propagation_s=world.fleet.timing.route_propagation_s)
    intents = kept.intents
    changed, told = dict[str, Migration](), list[RegionEvent]()

    def note(migration: Migration, events: Sequence[MigrationEvent]) -> None:
        changed[migration.id] = migration
        told.extend(_migration_event(migration, event) for event in events)

    for replaced in decision.replacements:
        known = migrations.get(replaced.migration)
        if known is None:
            known, events = machine.start(
                _new_migration(world.fleet, replaced, intents[replaced.workload]), now, wall, limits
            )
            note(known, events)
        target = place_of(world.fleet, replaced.target_node, replaced.target)
        if known.expected is None:
            expected = expected_outcome_between(scope(), effective_intents()[known.workload], known.source, target)
            known = replace(known, expected=expected)
        note(*machine.reserve(known, target, now, wall, limits, gap=replaced.target.staged))
    for settled, brought in _actual_outcomes(migrations, world, scope, effective_intents, now, wall):
        note(replace(settled, came=brought), (_outcome_event(settled, brought),))
    begins, at_home = cross_region.new_migrations(world, migrations.values(), decision, now, wall)
    for each in begins:
        note(*machine.start(each, now, wall, limits))
    for each in [each for each in migrations.values() if each.is_cross_region and isinstance(each.state, PlannedState)]:
        found = cross_region.target_of(each, world, decision)
        if found is not None and cross_region.queue_refusal(each, {**migrations, **changed}.values()) is None:
            place = found if isinstance(found, ReplicaPlace) else place_of(world.fleet, *found)
            away, intent = world.delegations.get(each.workload), effective_intents().get(each.workload)
            if away is not None and intent is not None:
                home = cross_region.replicas_of(each.workload, world.fleet, decision)
                each = replace(each, expected=expected_remote_outcome(scope(), intent, each, home, away))
            note(*machine.reserve(each, place, now, wall, limits))
    assigned = _AssignmentsAfter(world, decision)
    moving = [each for each in {**migrations, **changed}.values() if not each.is_over]
    there = {each.target.node: assigned.of(each.target.node) for each in moving if each.target is not None}
    failing = broken_assignments(decision.memory, world.fleet, there, now)
    scene = _Observer(world, {**migrations, **changed}, decision, assigned, failing, wall)
    for name in sorted(migrations):
        if name not in changed and not migrations[name].is_over:
            after, events = machine.step(migrations[name], scene.observe(migrations[name]), now, wall, limits)
            if after != migrations[name]:
                note(after, events)
        if name not in changed and _should_clear(migrations[name], intents, assigned, world.fleet):
            note(replace(migrations[name], cleared=True), ())
    held: tuple[MoveHold, ...] | None = None
    news: tuple[MoveHold, ...] = ()
    if run_triggers and not (kept.has_automatic or decision.memory.pending):
        held = at_home  # there is nothing that triggers could propose
    elif run_triggers:
        held_now = decision.desired if decision.is_whole else {**world.desired, **decision.desired}
        as_decided = replace(world, desired=held_now, memory=decision.memory)
        every = {**migrations, **changed}
        view = automatic_view(as_decided, every, kept, decision.desired, now, wall, turns)
        allotted, turns = _run_triggers(view, as_decided, every, intents, now, wall)
        for begun, events in allotted.started_moves:
            note(begun, events)
        held, news = (*at_home, *allotted.move_holds), allotted.new_holds
        told += [_hold_event(each) for each in news]
        decision = replace(decision, memory=replace(decision.memory, pending=allotted.pending))
    told_of = _with_migration_instructions(decision, {**migrations, **changed}, intents, world, limits)
    equipped = replace(decision, desired=told_of, events=(*decision.events, *told))
    return AdvanceResult(equipped, changed, held, news, turns)


def _should_clear(
    migration: Migration, intents: Mapping[WorkloadKey, Intent], assigned: "_AssignmentsAfter", fleet: Fleet
) -> bool:  # fmt: skip
    """True if the block on its target no longer applies."""
    if has_wrong_answers(migration):
        return migration.workload not in intents or is_block_outdated(migration, fleet)
    return had_outage(migration) and assigned.find(migration.source) is None


def trigger_view(
    world: RegionState, migrations: MigrationsById, now: Elapsed, wall: Wall, only: WorkloadKey | None = None
) -> TriggerView:  # fmt: skip
    """The whole region as triggers see it."""
    inputs = inputs_of(world, migration_effects(world, migrations, now), now, wall)
    return TriggerView(inputs, world.memory.pending, migrations, only=only)


def automatic_view(
    world: RegionState, migrations: MigrationsById, kept: KeptDecisions, decided: Iterable[str], now: Elapsed,
    wall: Wall, turns: Turns,
) -> TriggerView:  # fmt: skip
    """What triggers need to see of it: the cost does not grow with workloads that stay where they are. What these take
    counts as it does for steps. world: after the decision of the step that began last. decided: nodes whose assignments
    it may have changed."""
    part, standing = kept.automatic_part(world, decided)
    inputs = inputs_of_part(world, migration_effects(world, migrations, now), now, wall, part)
    held = {node: content.assignments for node, content in world.desired.items()}
    inputs = replace(inputs, all_desired=held)
    return TriggerView(inputs, world.memory.pending, migrations, standing, turns)


def _run_triggers(
    view: TriggerView, world: RegionState, migrations: MigrationsById, intents: Mapping[WorkloadKey, Intent],
    now: Elapsed, wall: Wall,
) -> tuple[MoveSelection, Turns]:  # fmt: skip
    found, pending = scan(view), world.memory.pending
    names = {key.partition(" ")[0] for key in pending}
    held = (one.id for content in world.desired.values() for one in content.assignments) if names else ()
    assigned = frozenset(name for name in held if name in names)
    return select_moves(found, pending, assigned, migrations, intents, now, wall), found.turns


def _actual_outcomes(
    migrations: MigrationsById, world: RegionState, scope: Callable[[], Scope],
    effective_intents: Callable[[], Mapping[WorkloadKey, Intent]], now: Elapsed, wall: Wall,
) -> Iterator[tuple[Migration, ActualOutcome]]:  # fmt: skip
    """Moves whose outcome can be measured now."""
    for name in sorted(migrations):
        each = migrations[name]
        known = each.came is not None or each.expected is None
        if known or each.target is None or not is_outcome_due(each, world.region.sleep_after_s, now):
            continue
        away = world.delegations.get(each.workload) if each.leaves_region else None
        if each.leaves_region:
            observed = cross_region.agreement_observation(each.target, each, world, wall).observed
        else:
            state = world.fleet.nodes.get(each.target.node)
            observed = state.observed.get(each.target.assignment) if state is not None else None
        if (
            observed is not None
            and observed.phase is Phase.READY
            and (intent := effective_intents().get(each.workload))
        ):
            fetched = fetched_bytes(world, each)
            if away is not None:
                brought = actual_remote_outcome(
                    intent, each, away, cross_region.remote_stats(world.fleet, away), now, fetched
                )
            else:
                brought = actual_outcome(scope(), intent, each, observed, now, fetched)
            if brought is not None:
                yield each, brought


class _AssignmentsAfter:
    """What each node has after a decision."""

    def __init__(self, world: RegionState, decision: Decision) -> None:
        self._world = world
        self._decision = decision

    def of(self, node: str) -> tuple[Assignment, ...]:
        content = self._decision.desired.get(node)
        if content is None and not self._decision.is_whole:
            content = self._world.desired.get(node)
        return content.assignments if content is not None else ()

    def find(self, place: ReplicaPlace) -> Assignment | None:
        return next((one for one in self.of(place.node) if one.id == place.assignment), None)


class _Observer:
    """Builds the observations of one step."""

    def __init__(
        self,
        world: RegionState,
        migrations: MigrationsById,
        decision: Decision,
        assigned: "_AssignmentsAfter",
        failures: Mapping[str, Refusal],
        wall: Wall,
    ) -> None:
        self._world = world
        self._migrations = migrations
        self._decision = decision
        self._wall = wall
        self._fleet = world.fleet
        self._failures = failures
        self._plans = {plan.workload: plan for plan in decision.plan.workloads}
        self._assigned = assigned

    def observe(self, migration: Migration) -> MigrationObservation:
        plan = self._plans.get(migration.workload)
        target = migration.target
        if migration.is_cross_region:
            return self._observe_cross_region(plan, migration)
        return MigrationObservation(
            self._observe_replica(migration.source, leaving=isinstance(migration.state, DrainingState)),
            self._observe_replica(target, leaving=True) if target is not None else ReplicaObservation(),
            self._failures.get(target.assignment) if target is not None else None,
            _obsolete_reason(plan, migration, self._fleet),
            plan.unplaced_moves.get(migration.id) if plan is not None else None,
            plan is not None and migration.id not in plan.unplaced_moves,
        )

    def _observe_cross_region(self, plan: WorkloadPlan | None, migration: Migration) -> MigrationObservation:
        """Any local replica stands for all of the workload."""
        source, target = migration.source, migration.target
        gone = Refusal(Code.WORKLOAD_UNKNOWN, f"{migration.workload} was deleted")
        deleted = gone if plan is None else None
        turn = (
            cross_region.queue_refusal(migration, self._migrations.values())
            if migration.stage is MigrationStage.PLANNED
            else None
        )
        waits = turn or cross_region.placement_refusal(migration, self._world.last_refusals)
        if migration.leaves_region:
            here = self._with_gateway_stats(
                self._observe_replica(source, leaving=isinstance(migration.state, DrainingState)), migration
            )
            there = (
                cross_region.agreement_observation(target, migration, self._world, self._wall)
                if target is not None
                else ReplicaObservation()
            )
            turns = isinstance(migration.state, PreparingState | ShiftingState)
            ends = cross_region.ending_refusal(migration, self._world) if turns else None
            return MigrationObservation(
                here, there, ends, deleted, waits, turn is not None, cross_region.counts_since(self._fleet)
            )
        there = cross_region.agreement_observation(source, migration, self._world, self._wall)
        here = self._observe_replica(target, leaving=True) if target is not None else ReplicaObservation()
        # While it drains: the worker's counters, because the outcome after the move is read from those.
        if not isinstance(migration.state, DrainingState):
            here = self._with_gateway_stats(here, migration)
        away = self._world.delegations.get(migration.workload)
        if isinstance(migration.state, RollingBackState) and not (away is not None and away.is_wanted):
            here = ReplicaObservation()  # the other region ends it anyway: the local replicas have to do
        observed = here.observed
        if (
            observed is not None
            and observed.phase is Phase.READY
            and not cross_region.is_locally_complete(migration, self._decision, self._fleet)
        ):
            here = replace(here, observed=replace(observed, phase=Phase.WARMING))
        broken = self._failures.get(target.assignment) if target is not None else None
        return MigrationObservation(
            there, here, broken, deleted, waits, turn is not None, cross_region.counts_since(self._fleet)
        )

    def _with_gateway_stats(self, sight: ReplicaObservation, migration: Migration) -> ReplicaObservation:
        return replace(sight, stats=cross_region.local_stats(self._fleet, migration))

    def _observe_replica(self, place: ReplicaPlace, *, leaving: bool) -> ReplicaObservation:
        """leaving: it counts as assigned until it is gone; otherwise only until it drains."""
        state = self._fleet.nodes.get(place.node)
        assignment = self._assigned.find(place)
        if state is None:
            return ReplicaObservation(is_lost=True)
        return ReplicaObservation(
            is_assigned=assignment is not None and (leaving or not assignment.draining),
            is_lost=state.liveness is Liveness.LOST or state.revoked or state.device(place.device) is None,
            is_current=state.liveness is Liveness.READY and state.has_full_status,
            observed=state.observed.get(place.assignment),
            is_stateful=assignment is not None and bool(assignment.session),
            is_counted=state.front_ready,
        )


def _obsolete_reason(plan: WorkloadPlan | None, migration: Migration, fleet: Fleet) -> Refusal | None:
    if plan is None:
        return Refusal(Code.WORKLOAD_UNKNOWN, f"{migration.workload} was deleted")
    if plan.elsewhere:
        return Refusal(Code.DELEGATED, f"{migration.workload} runs in another region")
    target = migration.target
    if target is None or not isinstance(migration.state, PreparingState | GapState | ShiftingState):
        return None
    if any(each.existing_assignment == target.assignment for each in plan.targets):
        return None
    state = fleet.nodes.get(target.node)
    if state is not None and state.liveness is Liveness.SUSPECT:
        return Refusal(Code.NODE_SUSPECT, f"{target.node} is silent", "a node that reports")
    return Refusal(Code.CONFLICT, f"{target.where} is not where the plan has it now")


def _new_migration(fleet: Fleet, replaced: Replacement, intent: Intent) -> Migration:
    """A move that the plan asks for; its id derives from the new replica's."""
    source = replaced.source
    place = place_of(fleet, replaced.source_node, source)
    to = Aim(replaced.target_node, replaced.target.device, replaced.target.variant)
    name = "m-" + replaced.target.id.removeprefix("a-")
    state = PlannedState(Elapsed(0.0), Elapsed(0.0))
    asked = Migration(name, replaced.workload, Cause.DOCUMENTS, "", place, to, intent.migration, state)
    left = source.model not in {model.digest for model in intent.models}
    if not (intent.back and left and asked.rule.against is Against.SOURCE):
        return asked
    why = "a rollback: the answers of what it leaves are no measure for what served before"
    against = Against.REFERENCE if has_answers(asked.rule) else Against.NONE
    return replace(asked, rule=replace(asked.rule, against=against), reason=why)


def _with_migration_instructions(
    decision: Decision,
    migrations: MigrationsById,
    intents: Mapping[WorkloadKey, Intent],
    world: RegionState,
    limits: MigrationLimits,
) -> Mapping[str, DesiredContent]:
    """Adds instructions to the assignments: what a new replica has to verify, while it has to; the verifier that an old
    one may answer meanwhile; and where sessions are handed over.

    A rolled-back replica keeps its verification until it drains: without it, its node would let it serve unverified.
    """
    desired, memory, fleet, references = decision.desired, decision.memory, world.fleet, world.references
    shows, answers = dict[str, Verification](), dict[str, Verifier]()
    handovers, sources = dict[str, Handover](), dict[str, SessionSource]()
    # The rules of replicas that move; the others follow their documents.
    ruled = dict[str, MigrationRule]()
    # Assignments that take over from a replica whose model a node prepared.
    after_prepared = set[str]()
    for migration in migrations.values():
        if migration.is_cross_region:
            shows |= _cross_region_verification(migration, fleet, limits, references)
            continue
        for source, target in _handovers(migration):
            state = fleet.nodes.get(target.node)
            if state is not None:
                handovers[source.assignment] = Handover(
                    migration.id, target.assignment, target.node, state.node.data_address
                )
                sources[target.assignment] = SessionSource(migration.id, source.node)
        if _has_lost_source(migration) and migration.target is not None and has_answers(migration.rule):
            ruled[migration.target.assignment] = replace(migration.rule, against=Against.REFERENCE)
        if isinstance(migration.state, PreparingState | GapState | RollingBackState) and migration.target is not None:
            ruled[migration.target.assignment] = migration.rule
            shows[migration.target.assignment] = _verification(migration, fleet, limits, references)
            if migration.source.prepared:
                after_prepared.add(migration.target.assignment)
        if isinstance(migration.state, PreparingState) and migration.target is not None:
            answers[migration.source.assignment] = Verifier(migration.id, migration.target.node)

    def rule_of(one: Assignment) -> MigrationRule | None:
        known = ruled.get(one.id)
        return known or (intents[one.workload].migration if one.workload in intents else None)

    recording = recorders(desired, fleet, rule_of, references)

    def with_instructions(node: str, one: Assignment) -> Assignment:
        verifiers = (answers[one.id],) if one.id in answers else ()
        show = shows.get(one.id)
        is_recording = one.id in recording
        may_show = is_recording or (show is None and _is_starting(one, memory))
        if may_show and (rule := rule_of(one)) is not None:
            arithmetic = fleet.arithmetic(node, one.device, one.precision)
            if show is None:
                show = _reference_verification(one, with_reference(rule, one.variant, references), arithmetic, limits)
            if show is not None and is_recording and show.against is Against.REFERENCE:
                show = _recording_verification(show.migration, rule, arithmetic, limits, beside=recording[one.id])
        if show is not None and (one.preparation is not None or one.id in after_prepared):
            show = _with_samples(show, one)
        handover = handovers.get(one.id) if one.session else None
        handover_sources = (sources[one.id],) if one.session and one.id in sources else ()
        if (one.verification, one.verifiers, one.handover, one.handover_sources) == (
            show,
            verifiers,
            handover,
            handover_sources,
        ):
            return one
        return replace(
            one, verification=show, verifiers=verifiers, handover=handover, handover_sources=handover_sources
        )

    def with_all_instructions(node: str, content: DesiredContent) -> DesiredContent:
        found = tuple(with_instructions(node, one) for one in content.assignments)
        return content if all(map(is_, found, content.assignments)) else replace(content, assignments=found)

    return {node: with_all_instructions(node, content) for node, content in desired.items()}


def _with_samples(show: Verification, one: Assignment) -> Verification:
    """A comparison with a prepared model, on samples: generated inputs lie outside the ranges that it was quantised by.
    Unchanged where the policy asks for captured requests."""
    if not one.samples or show.inputs is not InputsFrom.GENERATED or show.against is not Against.SOURCE:
        return show
    return replace(
        show,
        inputs=InputsFrom.SAMPLES,
        samples=min(show.samples, one.samples_count),
        pack=one.samples,
        pack_bytes=one.samples_bytes,
    )


def _has_lost_source(migration: Migration) -> bool:
    """True if the old replica was lost before the new one had verified anything; the new one continues by itself."""
    state = migration.state
    lost = isinstance(state, AbortedState) and state.refusal.code is Code.NODE_LOST
    return lost and migration.verdict is None and migration.rule.against is Against.SOURCE


def _is_starting(one: Assignment, memory: ReconcilerMemory) -> bool:
    mark = memory.marks.get(one.id)
    return not one.draining and (mark is None or mark.stage is AssignmentStage.STARTING)


def _reference_verification(
    one: Assignment, rule: MigrationRule, arithmetic: str, limits: MigrationLimits
) -> Verification | None:
    """Verification of a replica without a live predecessor: a workload's first replica, an additional one, or the
    replacement of a lost one. arithmetic: the precision in which it computes."""
    if rule.against is not Against.REFERENCE:
        return None
    return _base_verification(f"r-{one.id.removeprefix('a-')}", rule, arithmetic, arithmetic, limits)


def _recording_verification(
    name: str, rule: MigrationRule, arithmetic: str, limits: MigrationLimits, *, beside: bool
) -> Verification:
    """Instruction for the replica that records the reference, even if there is one by now."""
    asked = _base_verification(name, rule, arithmetic, arithmetic, limits)
    within_s = limits.verify_timeout_s(asked.samples)
    return replace(asked, recording=Recording.HERE, within_s=within_s, beside=beside)


def _base_verification(
    name: str, rule: MigrationRule, before: str, after: str, limits: MigrationLimits
) -> Verification:
    """before, after: precisions in which the two compute. Inputs from the workload's samples are marked as such."""
    referring = rule.against is Against.REFERENCE
    pack = rule.pack if referring or (rule.inputs is InputsFrom.SAMPLES and rule.against is Against.SOURCE) else None
    samples = min(rule.samples, pack.count) if pack is not None and referring else rule.samples
    within_s, recording = limits.verify_timeout_s(samples), None
    if needs_recording(rule):  # the recorder is chosen later; the others wait longer than it may take
        within_s, recording = Seconds(2 * within_s), Recording.AWAITED
    return Verification(
        migration=name,
        against=rule.against,
        inputs=InputsFrom.SAMPLES if pack is not None else rule.inputs,
        samples=samples,
        tolerances=with_defaults(rule.tolerances, before, after),
        within_s=within_s,
        advisory=rule.advisory,
        pack=pack.digest if pack is not None else "",
        pack_bytes=pack.size_bytes if pack is not None else Bytes(0),
        recording=recording,
    )


def _handovers(migration: Migration) -> tuple[tuple[ReplicaPlace, ReplicaPlace], ...]:
    """(from, to) pairs of replicas that hand over sessions now: the old one does once all new sessions start at the
    other, unless they end with it."""
    source, target, state = migration.source, migration.target, migration.state
    if target is None:
        return ()
    if isinstance(state, ShiftingState) and state.stateful and migration.rule.steps[state.step] >= 1.0:
        return ((source, target),)
    return ((target, source),) if isinstance(state, RollingBackState) and state.handing else ()


def _cross_region_verification(
    migration: Migration, fleet: Fleet, limits: MigrationLimits, references: References
) -> Mapping[str, Verification]:  # fmt: skip
    """What the local replica of the two has to verify or compare."""
    shown = PreparingState if migration.leaves_region else PreparingState | RollingBackState
    here = migration.source if migration.leaves_region else migration.target
    if here is None or migration.target is None or not isinstance(migration.state, shown):
        return {}
    if migration.leaves_region and migration.stage is not MigrationStage.VERIFYING:
        return {}  # the other region does not answer yet
    asked = cross_region.verification_of(_verification(migration, fleet, limits, references), migration, fleet)
    return {here.assignment: asked} if asked is not None else {}


def _verification(migration: Migration, fleet: Fleet, limits: MigrationLimits, references: References) -> Verification:
    source, target = migration.source, migration.target
    rule = with_reference(migration.rule, target.variant if target is not None else source.variant, references)
    before, after = (fleet.arithmetic(each.node, each.device, each.precision) for each in (source, target or source))
    state = fleet.nodes.get(source.node)
    asks = rule.against is Against.SOURCE
    return replace(
        _base_verification(migration.id, rule, before, after, limits),
        source=source.assignment if asks else "",
        source_node=source.node if asks else "",
        source_address=state.node.data_address if asks and state is not None else "",
    )


def _outcome_event(migration: Migration, brought: ActualOutcome) -> MigrationEvent:
    expected = migration.expected.gain if migration.expected is not None else 0.0
    if not brought.requests:
        return MigrationEvent(
            "MIGRATION_BROUGHT", f"no requests in {brought.over_s:.0f} s, {show_gain(expected)} was expected"
        )
    return MigrationEvent("MIGRATION_BROUGHT", f"{show_gain(brought.gain)}, {show_gain(expected)} was expected")


def _hold_event(held: MoveHold) -> RegionEvent:
    one = held.proposal
    return RegionEvent(Code.MOVE_HELD, one.source.assignment, str(held), one.source.node, one.workload)


def _migration_event(migration: Migration, told: MigrationEvent) -> RegionEvent:
    place = migration.target or migration.source
    return RegionEvent(told.code, migration.id, told.message, "" if place.region else place.node, migration.workload)

"""One step of the region with its migrations: what to do, what becomes of each, and what both replicas are told."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from shoal.coordinator.core.fleet.state import Fleet, Liveness
from shoal.coordinator.core.migration import crossing, machine
from shoal.coordinator.core.migration.budget import Allotted, Held, allot
from shoal.coordinator.core.migration.expected import (
    came,
    came_abroad,
    expected_abroad,
    expected_between,
    fetched_for,
    is_settled,
)
from shoal.coordinator.core.migration.model import (
    Aborted,
    Alone,
    Came,
    Cause,
    Draining,
    Limits,
    Migration,
    Place,
    Planned,
    Preparing,
    RollingBack,
    Seen,
    Shifting,
    Sight,
    Stage,
    Told,
)
from shoal.coordinator.core.migration.moves import blocked, forbids, left_dark, moves_of, outlived
from shoal.coordinator.core.migration.reference import recorders, records, referred
from shoal.coordinator.core.migration.tolerance import completed
from shoal.coordinator.core.migration.triggers import look as look_at
from shoal.coordinator.core.migration.triggers.view import View
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Aim, WorkloadPlan
from shoal.coordinator.core.workloads.decide import decide, inputs_of
from shoal.coordinator.core.workloads.model import Content, Decision, Happened, Memory, References, Replaced, World
from shoal.coordinator.core.workloads.model import Stage as Began
from shoal.coordinator.core.workloads.trouble import broken
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import (
    Against,
    Giver,
    Handover,
    InputsFrom,
    MigrationRule,
    Recording,
    Verification,
    Verifier,
    has_answers,
)
from shoal.types.units import Bytes, Elapsed, Seconds, Wall
from shoal.types.workload import Intent, WorkloadKey

Migrations = Mapping[str, Migration]


@dataclass(frozen=True, slots=True)
class Advanced:
    """changed: migrations that are new or have another state now, by id. The caller persists them in one transaction
    with the decision, and steps again at once: what they ask of the region now, the next step reads. held: what speaks
    for moves that do not begin, and why they do not; None where that was not looked at. news: of those, what was not
    told before."""

    decision: Decision
    changed: Migrations
    held: tuple[Held, ...] | None = None
    news: tuple[Held, ...] = ()


def moving(world: World, migrations: Migrations, now: Elapsed) -> World:
    """The world as its migrations want it."""
    desired = {node: content.assignments for node, content in world.desired.items()}
    every = migrations.values()
    courses = crossing.courses_of(every, now)
    failed = broken(world.memory, world.fleet, desired, now)
    return replace(
        world,
        moves=moves_of(every),
        blocked=blocked(every, world.intents, world.fleet, desired, failed, now, world.delegated),
        courses=courses,
        crossed=crossing.crossed_of(every),
    )


def advance(world: World, migrations: Migrations, now: Elapsed, wall: Wall, *, look: bool = True) -> Advanced:
    """`decide`, for the region as its migrations want it; then each migration, by what is seen and was decided; then
    (look) what speaks for moves that nobody asked for, and which of them begin.

    Pure, and level-triggered: called again with what it answered and the same fleet, it changes nothing.
    """
    decision = decide(moving(world, migrations, now), now, wall)

    @cache
    def scope() -> Scope:
        return Scope(inputs_of(world, now, wall))

    @cache
    def holding() -> Mapping[WorkloadKey, Intent]:
        return {intent.key: intent for intent in scope().inputs.intents}

    limits = Limits(settle_s=world.fleet.timing.settle_s)
    intents = {intent.key: intent for intent in world.intents}
    changed, told = dict[str, Migration](), list[Happened]()

    def note(migration: Migration, events: Sequence[Told]) -> None:
        changed[migration.id] = migration
        told.extend(_happened(migration, event) for event in events)

    for replaced in decision.replaced:
        known = migrations.get(replaced.migration)
        if known is None:
            known, events = machine.planned(_asked(replaced, intents[replaced.workload]), now, wall, limits)
            note(known, events)
        target = _place(world.fleet, replaced.target_node, replaced.target)
        if known.expected is None:
            hoped = expected_between(scope(), holding()[known.workload], known.source, target)
            known = replace(known, expected=hoped)
        note(*machine.placed(known, target, now, wall, limits, gap=replaced.target.staged))
    for settled, brought in _settled(migrations, world, scope, holding, now, wall):
        note(replace(settled, came=brought), (_brought(settled, brought),))
    begins, at_home = crossing.begun(world, migrations.values(), decision, now, wall)
    for each in begins:
        note(*machine.planned(each, now, wall, limits))
    for each in [each for each in migrations.values() if each.crosses and isinstance(each.state, Planned)]:
        found = crossing.target_of(each, world, decision)
        if found is not None and crossing.queued(each, {**migrations, **changed}.values()) is None:
            place = found if isinstance(found, Place) else _place(world.fleet, *found)
            away, intent = world.delegated.get(each.workload), holding().get(each.workload)
            if away is not None and intent is not None:
                home = crossing.replicas_of(each.workload, decision)
                each = replace(each, expected=expected_abroad(scope(), intent, each, home, away))
            note(*machine.placed(each, place, now, wall, limits))
    assigned = frozenset(one.id for each in _assignments(decision).values() for one in each)
    failing = broken(decision.memory, world.fleet, _assignments(decision), now)
    scene = _Scene(world, {**migrations, **changed}, decision, failing, wall)
    for name in sorted(migrations):
        if name not in changed and not migrations[name].is_over:
            after, events = machine.step(migrations[name], scene.seen(migrations[name]), now, wall, limits)
            if after != migrations[name]:
                note(after, events)
        if name not in changed and _forgiven(migrations[name], intents, assigned, world.fleet):
            note(replace(migrations[name], cleared=True), ())
    held: tuple[Held, ...] | None = None
    news: tuple[Held, ...] = ()
    if look:
        there = replace(world, desired=decision.desired, memory=decision.memory)
        allotted = _looked(there, {**migrations, **changed}, intents, now, wall)
        for begun, events in allotted.begun:
            note(begun, events)
        held, news = (*at_home, *allotted.held), allotted.news
        told += [_holding(each) for each in news]
        decision = replace(decision, memory=replace(decision.memory, pending=allotted.pending))
    rules = {key: intent.migration for key, intent in intents.items()}
    told_of = _told(decision, {**migrations, **changed}, rules, world, limits)
    equipped = replace(decision, desired=told_of, events=(*decision.events, *told))
    return Advanced(equipped, changed, held, news)


def _forgiven(
    migration: Migration, intents: Mapping[WorkloadKey, Intent], assigned: Collection[str], fleet: Fleet
) -> bool:  # fmt: skip
    """What is held against its target says nothing any more."""
    if forbids(migration):
        return migration.workload not in intents or outlived(migration, fleet)
    return left_dark(migration) and migration.source.assignment not in assigned


def view(
    world: World, migrations: Migrations, now: Elapsed, wall: Wall, only: WorkloadKey | None = None
) -> View:  # fmt: skip
    """The region as triggers look at it."""
    inputs = inputs_of(moving(world, migrations, now), now, wall)
    return View(inputs, world.memory.pending, migrations, only)


def _looked(
    world: World, migrations: Migrations, intents: Mapping[WorkloadKey, Intent], now: Elapsed, wall: Wall
) -> Allotted:  # fmt: skip
    assigned = frozenset(one.id for content in world.desired.values() for one in content.assignments)
    found = look_at(view(world, migrations, now, wall))
    return allot(found, world.memory.pending, assigned, migrations, intents, now, wall)


def _settled(
    migrations: Migrations, world: World, scope: Callable[[], Scope],
    holding: Callable[[], Mapping[WorkloadKey, Intent]], now: Elapsed, wall: Wall,
) -> Iterator[tuple[Migration, Came]]:  # fmt: skip
    """Moves of which it can be said now what they brought."""
    for name in sorted(migrations):
        each = migrations[name]
        known = each.came is not None or each.expected is None
        if known or each.target is None or not is_settled(each, world.region.sleep_after_s, now):
            continue
        away = world.delegated.get(each.workload) if each.leaves_home else None
        if each.leaves_home:
            observed = crossing.sight_of(each.target, each, world, wall).observed
        else:
            state = world.fleet.nodes.get(each.target.node)
            observed = state.observed.get(each.target.assignment) if state is not None else None
        if observed is not None and observed.phase is Phase.READY and (intent := holding().get(each.workload)):
            fetched = fetched_for(world, each)
            if away is not None:
                brought = came_abroad(intent, each, away, crossing.figures_abroad(world.fleet, away), now, fetched)
            else:
                brought = came(scope(), intent, each, observed, now, fetched)
            if brought is not None:
                yield each, brought


class _Scene:
    """What the machine is shown of one step."""

    def __init__(
        self, world: World, migrations: Migrations, decision: Decision, broken: Mapping[str, Refusal], wall: Wall
    ) -> None:  # fmt: skip
        self._world = world
        self._migrations = migrations
        self._decision = decision
        self._wall = wall
        self._fleet = world.fleet
        self._broken = broken
        self._plans = {plan.workload: plan for plan in decision.plan.workloads}
        self._assigned = {
            (node, one.id): one for node, content in decision.desired.items() for one in content.assignments
        }

    def seen(self, migration: Migration) -> Seen:
        plan = self._plans.get(migration.workload)
        target = migration.target
        if migration.crosses:
            return self._crossing(plan, migration)
        return Seen(
            self._sight(migration.source, leaving=isinstance(migration.state, Draining)),
            self._sight(target, leaving=True) if target is not None else Sight(),
            self._broken.get(target.assignment) if target is not None else None,
            _unwanted(plan, migration, self._fleet),
            plan.unmoved.get(migration.id) if plan is not None else None,
            plan is not None and migration.id not in plan.unmoved,
        )

    def _crossing(self, plan: WorkloadPlan | None, migration: Migration) -> Seen:
        """Here any replica of the workload stands for all of them."""
        source, target = migration.source, migration.target
        gone = Refusal(Code.WORKLOAD_UNKNOWN, f"{migration.workload} was deleted")
        deleted = gone if plan is None else None
        turn = crossing.queued(migration, self._migrations.values()) if migration.stage is Stage.PLANNED else None
        waits = turn or crossing.refusal_of(migration, self._world.turned)
        if migration.leaves_home:
            here = self._from_gateways(self._sight(source, leaving=isinstance(migration.state, Draining)), migration)
            there = crossing.sight_of(target, migration, self._world, self._wall) if target is not None else Sight()
            turns = isinstance(migration.state, Preparing | Shifting)
            ends = crossing.ends(migration, self._world) if turns else None
            return Seen(here, there, ends, deleted, waits, turn is not None, crossing.counts_since(self._fleet))
        there = crossing.sight_of(source, migration, self._world, self._wall)
        here = self._sight(target, leaving=True) if target is not None else Sight()
        if not isinstance(migration.state, Draining):  # what it did after is read at its worker: so from the same count
            here = self._from_gateways(here, migration)
        away = self._world.delegated.get(migration.workload)
        if isinstance(migration.state, RollingBack) and not (away is not None and away.wanted):
            here = Sight()  # that region gives it up in any case: home has to do with what it has
        observed = here.observed
        if (
            observed is not None
            and observed.phase is Phase.READY
            and not crossing.is_whole(migration, self._decision, self._fleet)
        ):
            here = replace(here, observed=replace(observed, phase=Phase.WARMING))
        broken = self._broken.get(target.assignment) if target is not None else None
        return Seen(there, here, broken, deleted, waits, turn is not None, crossing.counts_since(self._fleet))

    def _from_gateways(self, sight: Sight, migration: Migration) -> Sight:
        return replace(sight, figures=crossing.figures_at_home(self._fleet, migration))

    def _sight(self, place: Place, *, leaving: bool) -> Sight:
        """leaving: it counts until it is gone; else until it begins to go."""
        state = self._fleet.nodes.get(place.node)
        assignment = self._assigned.get((place.node, place.assignment))
        if state is None:
            return Sight(lost=True)
        return Sight(
            assigned=assignment is not None and (leaving or not assignment.draining),
            lost=state.liveness is Liveness.LOST or state.revoked or state.device(place.device) is None,
            seen=state.liveness is Liveness.READY and state.reported,
            observed=state.observed.get(place.assignment),
            stateful=assignment is not None and bool(assignment.session),
            counted=state.front_ready,
        )


def _unwanted(plan: WorkloadPlan | None, migration: Migration, fleet: Fleet) -> Refusal | None:
    if plan is None:
        return Refusal(Code.WORKLOAD_UNKNOWN, f"{migration.workload} was deleted")
    if plan.elsewhere:
        return Refusal(Code.DELEGATED, f"{migration.workload} runs in another region")
    target = migration.target
    if target is None or not isinstance(migration.state, Preparing | Alone | Shifting):
        return None
    if any(each.keeps == target.assignment for each in plan.targets):
        return None
    state = fleet.nodes.get(target.node)
    if state is not None and state.liveness is Liveness.SUSPECT:
        return Refusal(Code.NODE_SUSPECT, f"{target.node} is silent", "a node that reports")
    return Refusal(Code.CONFLICT, f"{target.where} is not where the plan has it now")


def _asked(replaced: Replaced, intent: Intent) -> Migration:
    """A move that the plan wants: its id is that of the replica that it brings."""
    source = replaced.source
    place = Place(source.id, replaced.source_node, source.device, source.model, source.precision)
    to = Aim(replaced.target_node, replaced.target.device, replaced.target.model)
    name = "m-" + replaced.target.id.removeprefix("a-")
    state = Planned(Elapsed(0.0), Elapsed(0.0))
    asked = Migration(name, replaced.workload, Cause.DOCUMENTS, "", place, to, intent.migration, state)
    left = source.model not in {model.digest for model in intent.models}
    if not (intent.back and left and asked.rule.against is Against.SOURCE):
        return asked
    why = "a rollback: the answers of what it leaves are no measure for what served before"
    against = Against.REFERENCE if has_answers(asked.rule) else Against.NONE
    return replace(asked, rule=replace(asked.rule, against=against), reason=why)


def _place(fleet: Fleet, node: str, assignment: Assignment) -> Place:
    state = fleet.nodes.get(node)
    receipt = state.receipts.get(assignment.device) if state is not None else None
    measured_at = receipt.measured_at if receipt is not None else Wall(0.0)
    return Place(assignment.id, node, assignment.device, assignment.model, assignment.precision, measured_at)


def _told(
    decision: Decision, migrations: Migrations, rules: Mapping[WorkloadKey, MigrationRule], world: World, limits: Limits
) -> Mapping[str, Content]:  # fmt: skip
    """With what a new replica has to show, as long as it has to, and whom an old one may then answer; and where the
    sessions of either go.

    One that is taken back has to show it until it drains: without, its node would let it serve as it is."""
    desired, memory, fleet, references = decision.desired, decision.memory, world.fleet, world.references
    shows, answers = dict[str, Verification](), dict[str, Verifier]()
    hands, takes = dict[str, Handover](), dict[str, Giver]()
    ruled = dict[str, MigrationRule]()
    """By what those of a move are judged; the rest by what their documents say."""
    for migration in migrations.values():
        if migration.crosses:
            shows |= _crossing(migration, fleet, limits, references)
            continue
        for giver, taker in _handing(migration):
            state = fleet.nodes.get(taker.node)
            if state is not None:
                hands[giver.assignment] = Handover(migration.id, taker.assignment, taker.node, state.node.grpc_address)
                takes[taker.assignment] = Giver(migration.id, giver.node)
        if _alone_left(migration) and migration.target is not None and has_answers(migration.rule):
            ruled[migration.target.assignment] = replace(migration.rule, against=Against.REFERENCE)
        if isinstance(migration.state, Preparing | Alone | RollingBack) and migration.target is not None:
            ruled[migration.target.assignment] = migration.rule
            shows[migration.target.assignment] = _verification(migration, fleet, limits, references)
        if isinstance(migration.state, Preparing) and migration.target is not None:
            answers[migration.source.assignment] = Verifier(migration.id, migration.target.node)

    def rule_of(one: Assignment) -> MigrationRule | None:
        return ruled.get(one.id) or rules.get(one.workload)

    recording = recorders(desired, fleet, rule_of, references)

    def told(one: Assignment) -> Assignment:
        verifiers = (answers[one.id],) if one.id in answers else ()
        show, rule = shows.get(one.id), rule_of(one)
        if show is None and rule is not None and (one.id in recording or _starts(one, memory)):
            show = _by_itself(one, referred(rule, one.model, references), limits)
        if show is not None and rule is not None and one.id in recording and show.against is Against.REFERENCE:
            show = _recording(show.migration, rule, one.precision, limits, beside=recording[one.id])
        handover = hands.get(one.id) if one.session else None
        givers = (takes[one.id],) if one.session and one.id in takes else ()
        if (one.verification, one.verifiers, one.handover, one.givers) == (show, verifiers, handover, givers):
            return one
        return replace(one, verification=show, verifiers=verifiers, handover=handover, givers=givers)

    return {
        node: replace(content, assignments=tuple(map(told, content.assignments))) for node, content in desired.items()
    }


def _alone_left(migration: Migration) -> bool:
    """Its old replica was lost before the new one had shown anything: that goes on by itself."""
    state = migration.state
    lost = isinstance(state, Aborted) and state.refusal.code is Code.NODE_LOST
    return lost and migration.verdict is None and migration.rule.against is Against.SOURCE


def _starts(one: Assignment, memory: Memory) -> bool:
    mark = memory.marks.get(one.id)
    return not one.draining and (mark is None or mark.stage is Began.STARTING)


def _by_itself(one: Assignment, rule: MigrationRule, limits: Limits) -> Verification | None:
    """What a replica has to show that takes over from none that could be asked: the first one of its workload, one more
    of it, or one in the place of what was lost."""
    if rule.against is not Against.REFERENCE:
        return None
    return _asked_of(f"r-{one.id.removeprefix('a-')}", rule, one.precision, one.precision, limits)


def _recording(name: str, rule: MigrationRule, precision: str, limits: Limits, *, beside: bool) -> Verification:
    """Of who makes the reference, also where there is one by now."""
    asked = _asked_of(name, rule, precision, precision, limits)
    within_s = limits.verify_within(asked.samples)
    return replace(asked, recording=Recording.HERE, within_s=within_s, beside=beside)


def _asked_of(name: str, rule: MigrationRule, before: str, after: str, limits: Limits) -> Verification:
    """before, after: precisions. What is read from the workload's samples is said so."""
    referring = rule.against is Against.REFERENCE
    pack = rule.pack if referring or (rule.inputs is InputsFrom.SAMPLES and rule.against is Against.SOURCE) else None
    samples = min(rule.samples, pack.count) if pack is not None and referring else rule.samples
    within_s, recording = limits.verify_within(samples), None
    if records(rule):  # by whom is said later; who waits for it waits longer than that may take
        within_s, recording = Seconds(2 * within_s), Recording.AWAITED
    return Verification(
        migration=name,
        against=rule.against,
        inputs=InputsFrom.SAMPLES if pack is not None else rule.inputs,
        samples=samples,
        tolerances=completed(rule.tolerances, before, after),
        within_s=within_s,
        advisory=rule.advisory,
        pack=pack.digest if pack is not None else "",
        pack_bytes=pack.size_bytes if pack is not None else Bytes(0),
        recording=recording,
    )


def _handing(migration: Migration) -> tuple[tuple[Place, Place], ...]:
    """Which of its replicas hands its sessions to which now: once new ones all begin at the other."""
    source, target, state = migration.source, migration.target, migration.state
    if target is None:
        return ()
    if isinstance(state, Shifting) and migration.rule.steps[state.step] >= 1.0:
        return ((source, target),)
    return ((target, source),) if isinstance(state, RollingBack) and state.handing else ()


def _crossing(
    migration: Migration, fleet: Fleet, limits: Limits, references: References
) -> Mapping[str, Verification]:  # fmt: skip
    """What the one of the two that is here has to show, or to compare."""
    shown = Preparing if migration.leaves_home else Preparing | RollingBack
    here = migration.source if migration.leaves_home else migration.target
    if here is None or migration.target is None or not isinstance(migration.state, shown):
        return {}
    if migration.leaves_home and migration.stage is not Stage.VERIFYING:
        return {}  # there is nobody to ask yet
    asked = crossing.verification_of(_verification(migration, fleet, limits, references), migration, fleet)
    return {here.assignment: asked} if asked is not None else {}


def _verification(migration: Migration, fleet: Fleet, limits: Limits, references: References) -> Verification:
    source, target = migration.source, migration.target
    rule = referred(migration.rule, target.model if target is not None else source.model, references)
    precision = target.precision if target is not None else source.precision
    state = fleet.nodes.get(source.node)
    asks = rule.against is Against.SOURCE
    return replace(
        _asked_of(migration.id, rule, source.precision, precision, limits),
        source=source.assignment if asks else "",
        source_node=source.node if asks else "",
        source_address=state.node.grpc_address if asks and state is not None else "",
    )


def _assignments(decision: Decision) -> Mapping[str, tuple[Assignment, ...]]:
    return {node: content.assignments for node, content in decision.desired.items()}


def _brought(migration: Migration, brought: Came) -> Told:
    hoped = migration.expected.gain if migration.expected is not None else 0.0
    if not brought.requests:
        return Told("MIGRATION_BROUGHT", f"no requests in {brought.over_s:.0f} s, {hoped:.0%} better was expected")
    return Told("MIGRATION_BROUGHT", f"{brought.gain:.0%} better where {hoped:.0%} was expected")


def _holding(held: Held) -> Happened:
    one = held.proposal
    return Happened(Code.MOVE_HELD, one.source.assignment, str(held), one.source.node, one.workload)


def _happened(migration: Migration, told: Told) -> Happened:
    place = migration.target or migration.source
    return Happened(told.code, migration.id, told.message, "" if place.region else place.node, migration.workload)

"""A live move's machine: its laws over any history, and the ways that matter one by one."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.agent_values import assignment
from harness.builders.coordinator_core import DIGEST, SMALL, counts_of, node
from shoal.coordinator import codec
from shoal.coordinator.core.fleet.state import Fleet, NodeState
from shoal.coordinator.core.migration.advance import _handovers
from shoal.coordinator.core.migration.effects import move_of, moves_of
from shoal.coordinator.core.migration.guard import evaluate_step
from shoal.coordinator.core.migration.machine import LIMITS, cancel, reserve, start, step
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    DoneState,
    DrainingState,
    ExpectedOutcome,
    Migration,
    MigrationObservation,
    MigrationStage,
    PlannedState,
    PreparingState,
    ReplicaObservation,
    ReplicaPlace,
    RequestStats,
    RollingBackState,
    ServiceFigures,
    ShiftingState,
)
from shoal.coordinator.core.placement.model import Aim
from shoal.types.assignment import Observed, Phase, Served
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import EnergySource
from shoal.types.migration import Against, InputsFrom, MigrationRule, Verdict
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "ocr")
WALL = Wall(1_700_000_000.0)
SOURCE = ReplicaPlace("a-source", "edge-1", "cpu0", DIGEST, "fp32")
TARGET = ReplicaPlace("a-target", "edge-2", "cpu0", DIGEST, "fp32")
STEPS = (0.25, 0.5, 1.0)
OTHER = {"model": SMALL}
MADE = {"precision": "int8", "prepared": True}


def at(seconds: float) -> Elapsed:
    return Elapsed(seconds)


def begin_migration(now: float = 0.0, **rule: Any) -> Migration:
    asked = MigrationRule(**{"steps": STEPS, **rule})
    new = Migration("m-1", KEY, Cause.OPERATOR, "ops", SOURCE, Aim("edge-2"), asked, PlannedState(at(0), at(0)))
    return start(new, at(now), WALL)[0]


def verdict(migration: str = "m-1", *, passed: bool = True) -> Verdict:
    code = None if passed else Code.VERIFY_FAILED
    return Verdict(migration, passed, code, "" if passed else "too far", Against.SOURCE, InputsFrom.GENERATED, 8)


def make_observed(
    phase: Phase = Phase.READY, *, requests: int = 0, errors: int = 0, p95: float = 0.01, **more: Any
) -> Observed:
    """p95: of all that it answered, each of which took so long, where `latencies` are not given."""
    served = (Served("edge-1", requests, errors, Seconds(p95 / 2), Seconds(p95), Joules(0.0), EnergySource.ESTIMATED),)
    latencies = counts_of([p95] * (requests - errors))
    base = Observed(
        assignment="a", workload=KEY, model=DIGEST, device="cpu0", phase=phase, since=WALL, code=None, reason="",
        retry_at=None, gives_up_at=None, in_flight=0, restarts=0, measured=None, served=served,
        latencies=latencies,
    )  # fmt: skip
    return replace(base, **more)


def sight(seen: Observed | None, **more: Any) -> ReplicaObservation:
    return ReplicaObservation(**{"is_assigned": True, "is_current": True, "observed": seen, **more})


def scene(target: Observed | None = None, source: Observed | None = None, **more: Any) -> MigrationObservation:
    return MigrationObservation(sight(source or make_observed()), sight(target), **more)


READY = make_observed(verdict=verdict())


def shifting() -> Migration:
    moving, _ = step(reserve(begin_migration(), TARGET, at(1), WALL)[0], scene(READY), at(2), WALL)
    assert moving.stage is MigrationStage.SHIFTING
    return moving


# -- laws --------------------------------------------------------------------------------------------------------------

sights = st.builds(
    ReplicaObservation,
    is_assigned=st.booleans() | st.just(True),
    is_lost=st.sampled_from([False, False, False, True]),
    is_current=st.sampled_from([True, True, False]),
    observed=st.none()
    | st.builds(
        make_observed,
        st.sampled_from(list(Phase)),
        requests=st.integers(0, 200),
        errors=st.integers(0, 3),
        p95=st.sampled_from([0.0, 0.001, 0.01, 1.0]),
        code=st.sampled_from([None, Code.FETCH_FAILED, Code.VERIFY_FAILED, Code.VERIFY_IMPOSSIBLE]),
        verdict=st.sampled_from([None, verdict(), verdict(passed=False), verdict("m-other")]),
    ),
)
refusals = st.sampled_from([None, None, None, None, None, Refusal(Code.LOAD_TIMEOUT, "broken")])
scenes = st.builds(
    MigrationObservation, sights, sights, refusals, refusals, refusals, st.sampled_from([False, False, True])
)
histories = st.lists(st.tuples(scenes, st.sampled_from([0.0, 0.5, 2.5, 60.0, 1000.0])), max_size=30)
operators = st.sampled_from(["", "", "", "", "place", "cancel"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(scenes, st.sampled_from([0.0, 0.5, 2.5, 20.0, 1000.0]), operators), max_size=40))
def test_its_laws_hold_over_any_history(history: list[tuple[MigrationObservation, float, str]]) -> None:
    now, migration = 0.0, begin_migration()
    for seen, passes, act in history:
        now += passes
        before = migration
        if act == "place" and isinstance(migration.state, PlannedState):
            migration, _ = reserve(migration, TARGET, at(now), WALL)
        if act == "cancel" and isinstance(migration.state, PlannedState | PreparingState | ShiftingState):
            migration, _ = cancel(migration, "ops", at(now), WALL)
            assert migration.stage in (MigrationStage.ROLLING_BACK, MigrationStage.ABORTED)
        migration, told = step(migration, seen, at(now), WALL)
        # A replay changes nothing, but where a step of shifting has more than one thing to say in one moment.
        again, nothing = step(migration, seen, at(now), WALL)
        while again != migration:
            assert not again.is_over or not before.is_over
            migration, (again, nothing) = again, step(again, seen, at(now), WALL)
        assert nothing == ()
        assert codec.load(Migration, codec.dump(migration)) == migration
        assert migration.stages[: len(before.stages)] == before.stages
        if before.is_over:
            assert (migration, told) == (before, ())
        if migration.stage in (MigrationStage.SHIFTING, MigrationStage.DRAINING, MigrationStage.DONE):
            assert migration.verdict is not None
            assert migration.verdict.passed
            assert migration.verdict.migration == migration.id
        state = migration.state
        if not isinstance(state, DoneState | AbortedState):
            assert state.since <= now < state.until
        move = move_of(migration)
        assert (move is None) == migration.is_over
        if move is not None:
            assert (move.share > 0) == isinstance(state, ShiftingState | DrainingState)
            assert move.leaving == {DrainingState: SOURCE.assignment, RollingBackState: TARGET.assignment}.get(
                type(state), ""
            )


@settings(max_examples=200, deadline=None)
@given(histories)
def test_left_alone_it_ends_by_the_sum_of_its_deadlines(history: list[tuple[MigrationObservation, float]]) -> None:
    now, migration = 0.0, begin_migration()
    migration, _ = reserve(migration, TARGET, at(now), WALL)
    for seen, passes in history:
        now += passes
        migration, _ = step(migration, seen, at(now), WALL)
    for _ in range(20):
        if migration.is_over:
            break
        assert not isinstance(migration.state, DoneState | AbortedState)
        now = max(now, migration.state.until)
        migration, _ = step(migration, scene(make_observed(Phase.LOADING)), at(now), WALL)
    assert migration.is_over
    if isinstance(migration.state, AbortedState):
        assert migration.state.refusal.code


# -- ways --------------------------------------------------------------------------------------------------------------


def test_the_whole_way() -> None:
    moving = begin_migration()
    moving, _ = reserve(moving, TARGET, at(1), WALL)
    now = 1.0
    for phase in (Phase.FETCHING, Phase.LOADING, Phase.WARMING, Phase.VERIFYING):
        now += 1
        moving, _ = step(moving, scene(make_observed(phase)), at(now), WALL)
    shares = []
    for _ in range(20):
        now += 1
        moving, _ = step(moving, scene(READY), at(now), WALL)
        move = move_of(moving)
        assert move is not None
        shares.append(move.share)
        if isinstance(moving.state, DrainingState):
            break
    assert sorted(set(shares)) == list(STEPS)
    moving, told = step(moving, MigrationObservation(ReplicaObservation(), sight(READY)), at(now + 1), WALL)
    assert moving.stage is MigrationStage.DONE
    assert told[0].code == "MIGRATION_DONE"
    stages = [entry.stage for entry in moving.stages]
    assert stages == [
        MigrationStage.PLANNED,
        MigrationStage.RESERVED,
        MigrationStage.STAGING,
        MigrationStage.WARMING,
        MigrationStage.VERIFYING,
        MigrationStage.SHIFTING,
        MigrationStage.SHIFTING,
        MigrationStage.SHIFTING,
        MigrationStage.DRAINING,
        MigrationStage.DONE,
    ]
    assert [(reading.share, reading.passed) for reading in moving.readings] == [(share, True) for share in STEPS]


@pytest.mark.parametrize("seen", [verdict(passed=False), verdict("m-another"), None])
def test_ready_without_its_own_passed_verdict_takes_no_requests(seen: Verdict | None) -> None:
    moving, _ = reserve(begin_migration(), TARGET, at(1), WALL)
    target = make_observed(verdict=seen)
    for now in (2.0, 3.0, 4.0 + LIMITS.verify_s + LIMITS.report_s):
        moving, _ = step(moving, scene(target), at(now), WALL)
    assert isinstance(moving.state, RollingBackState)
    failed = seen is not None and not seen.passed
    assert moving.state.refusal.code is (Code.VERIFY_FAILED if failed else Code.MOVE_TIMEOUT)


def test_answers_that_differ_are_told_and_it_goes_on_where_the_policy_says_so() -> None:
    moving, _ = reserve(begin_migration(advisory=True), TARGET, at(1), WALL)
    differs = verdict(passed=False)
    moving, told = step(moving, scene(make_observed(verdict=differs)), at(2), WALL)
    assert (moving.stage, moving.verdict) == (MigrationStage.SHIFTING, differs)
    assert [(one.code, one.message) for one in told] == [
        ("MIGRATION_DIFFERS", "too far"),
        ("MIGRATION_SHIFTING", "shifting 25%"),
    ]
    assert step(moving, scene(make_observed(verdict=differs)), at(3), WALL)[0] == moving, "told once"
    crashed = replace(differs, samples=0)
    other, _ = reserve(begin_migration(advisory=True), TARGET, at(1), WALL)
    unseen, _ = step(other, scene(make_observed(verdict=crashed)), at(2), WALL)
    assert isinstance(unseen.state, RollingBackState)


def test_what_waits_for_room_says_why_it_ended() -> None:
    moving = begin_migration()
    short = Refusal(Code.MEMORY_SHORT, "1 GiB free on edge-2/cpu0", "2 GiB")
    moving, _ = step(
        moving,
        MigrationObservation(sight(READY), ReplicaObservation(), placement_refusal=short),
        at(LIMITS.planned_s),
        WALL,
    )
    assert isinstance(moving.state, AbortedState)
    assert moving.state.refusal.code is Code.NO_ROOM_FOR_BOTH
    assert "MEMORY_SHORT" in moving.state.refusal.found


@pytest.mark.parametrize(
    ("requests", "errors", "p95", "after", "trips"),
    [
        (100, 0, 0.01, 3.0, False),
        (100, 1, 0.01, 3.0, False),
        (100, 2, 0.01, 3.0, True),
        (100, 8, 0.01, 0.5, True),  # at once
        (100, 2, 0.01, 0.5, False),  # not yet
        (100, 0, 0.04, 3.0, True),
        (100, 0, 0.04, 0.5, False),
        (10, 0, 0.04, 3.0, False),  # too few to tell
    ],
)
def test_the_guard(requests: int, errors: int, p95: float, after: float, *, trips: bool) -> None:
    moving = shifting()
    target = make_observed(requests=requests, errors=errors, p95=p95, verdict=verdict())
    after_step, _ = step(moving, scene(target, make_observed(requests=300, p95=0.01)), at(2 + after), WALL)
    assert isinstance(after_step.state, RollingBackState) == trips
    if isinstance(after_step.state, RollingBackState):
        assert after_step.state.refusal.code is Code.GUARD_TRIPPED
        move = move_of(after_step)
        assert move is not None
        assert (move.share, move.leaving) == (0.0, TARGET.assignment)
        assert not after_step.readings[-1].passed


def with_faults(seen: Observed, *, refused: int = 0, late: int = 0) -> Observed:
    """With so many requests more that got no answer, through no fault of the replica."""
    (served,) = seen.served
    return replace(
        seen, served=(replace(served, requests=served.requests + refused + late, refused=refused, late=late),)
    )


def test_a59_what_clients_got_wrong_trips_no_guard_and_hides_no_failure() -> None:
    source = make_observed(requests=300, p95=0.01)
    for target, trips in (
        (with_faults(make_observed(requests=100, verdict=verdict()), refused=1000), False),
        (with_faults(make_observed(requests=100, errors=8, verdict=verdict()), refused=10_000), True),
    ):
        after, _ = step(shifting(), scene(target, source), at(5), WALL)
        assert isinstance(after.state, RollingBackState) == trips


@pytest.mark.parametrize(("old_late", "new_late", "trips"), [(150, 50, False), (0, 50, True), (30, 14, False)])
def test_a59_deadlines_that_neither_meets_are_their_clients_affair(
    old_late: int, new_late: int, *, trips: bool
) -> None:
    """300 answers of the old one and 100 of the new one, besides."""
    source = with_faults(make_observed(requests=300, p95=0.01), late=old_late)
    target = with_faults(make_observed(requests=100, p95=0.01, verdict=verdict()), late=new_late)
    after, _ = step(shifting(), scene(target, source), at(5), WALL)
    assert isinstance(after.state, RollingBackState) == trips


@pytest.mark.parametrize(
    ("target", "is_judged"),
    [
        (make_observed(verdict=verdict()), False),
        (with_faults(make_observed(verdict=verdict()), refused=50), False),
        (with_faults(make_observed(verdict=verdict()), late=5), False),
        (make_observed(requests=1, verdict=verdict()), True),
    ],
)
def test_a_step_that_saw_no_request_was_not_judged(target: Observed, *, is_judged: bool) -> None:
    after, _ = step(shifting(), scene(target, make_observed(requests=300)), at(5), WALL)
    assert not isinstance(after.state, RollingBackState)
    assert after.readings[-1].is_conclusive == is_judged


@pytest.mark.parametrize(("p95", "passes"), [(0.038, True), (0.076, False)])
def test_the_few_requests_that_are_left_to_the_old_one_are_no_measure(p95: float, *, passes: bool) -> None:
    """It took 25 ms while it had most of them, and 4 ms for the last."""
    now, before, few = at(0), [0.025] * 96, [0.046] * 19
    last = ShiftingState(1, stats_of(before), stats_of(few), now, now, now)
    source, target = stats_of(before + [0.004] * 38), stats_of(few + [p95] * 134)
    found = evaluate_step(MigrationRule(steps=STEPS), last, source, target, None, Seconds(2.0))
    assert found.passed == passes
    assert found.source.p95_s == pytest.approx(0.025, rel=0.025)


STEADY = [0.01] * 1000


@pytest.mark.parametrize(
    ("before", "since", "passes"),
    [
        ([0.01] * 10_000, [0.1] * 100, False),  # what was good for long hides nothing of this step
        ([0.1] * 500, [0.01] * 100, True),  # what was slow as it began says nothing of this step
        ([], [0.01] * 18 + [0.5] * 2, True),  # two of so few show no p95
        ([], [0.01] * 180 + [0.5] * 20, False),
    ],
)
def test_a_step_is_judged_by_its_own_requests(before: list[float], since: list[float], *, passes: bool) -> None:
    now = at(0)
    one = ShiftingState(0, stats_of(STEADY), stats_of(before), now, now, now)
    found = evaluate_step(
        MigrationRule(steps=STEPS), one, stats_of(STEADY * 2), stats_of(before + since), None, Seconds(2.0)
    )
    assert found.passed == passes
    assert found.target.requests == len(since)


@pytest.mark.parametrize(
    ("chosen_s", "way_s", "shown_s", "passes"),
    [
        (0.04, 0.0, 0.03, True),  # as slow as it was chosen to be, and fifteen times as slow as the old one
        (0.04, 0.0, 0.13, False),  # slower than anybody thought
        (0.04, 0.03, 0.025, True),  # what crosses is expected with its way, and read without
        (0.04, 0.03, 0.04, False),
        (math.nan, 0.0, 0.03, False),  # nobody knew: the old one is the measure
        (0.001, 0.0, 0.0055, True),  # faster than the old one, it was thought: the old one is the measure
        (0.001, 0.0, 0.03, False),
    ],
)
def test_what_was_chosen_slower_may_be_slower(chosen_s: float, way_s: float, shown_s: float, *, passes: bool) -> None:
    now = at(0)
    one = ShiftingState(0, stats_of([0.002] * 1000), RequestStats(), now, now, now)
    chosen = ExpectedOutcome(ServiceFigures(0.001), ServiceFigures(chosen_s), 0.0, Bytes(0), Seconds(0.0))
    target = replace(stats_of([shown_s + way_s] * 100), way_s=way_s)
    found = evaluate_step(MigrationRule(steps=STEPS), one, stats_of([0.002] * 2000), target, chosen, Seconds(2.0))
    assert found.passed == passes
    assert found.source.p95_s == pytest.approx(0.002, rel=0.05), "a reading is what was seen"


@pytest.mark.parametrize(
    ("cause", "model", "trips"),
    [
        (Cause.DRAIN, DIGEST, False),
        (Cause.DRAIN, SMALL, False),  # a variant that the policy allows
        (Cause.DOCUMENTS, DIGEST, False),  # a policy that prefers another place
        (Cause.DOCUMENTS, SMALL, True),
    ],
)
def test_a_new_version_is_held_to_the_old_one_alone(cause: Cause, model: str, *, trips: bool) -> None:
    chosen = ExpectedOutcome(ServiceFigures(0.01), ServiceFigures(0.05), 0.0, Bytes(0), Seconds(0.0))
    moving = replace(shifting(), cause=cause, target=replace(TARGET, model=model), expected=chosen)
    target = make_observed(requests=100, p95=0.05, verdict=verdict())
    after, _ = step(moving, scene(target, make_observed(requests=300, p95=0.01)), at(5), WALL)
    assert isinstance(after.state, RollingBackState) == trips
    if isinstance(after.state, RollingBackState):
        assert after.state.refusal.asked.endswith("3 x 9.87ms"), "as its bin of latencies says"


def test_a_node_that_counts_no_latencies_is_judged_by_its_errors_alone() -> None:
    """One of the version before."""
    now = at(0)
    one = ShiftingState(0, stats_of(STEADY), RequestStats(), now, now, now)
    rule, after = MigrationRule(steps=STEPS), stats_of(STEADY * 2)
    assert evaluate_step(rule, one, after, RequestStats(200), None, Seconds(2.0)).passed
    assert not evaluate_step(rule, one, after, RequestStats(200, 20), None, Seconds(2.0)).passed


def test_a_replica_that_began_anew_and_fails_is_seen_to() -> None:
    """Its worker was killed in the step: it has answered nothing since."""
    now = at(0)
    one = ShiftingState(0, stats_of(STEADY), stats_of([0.01] * 100), now, now, now)
    found = evaluate_step(
        MigrationRule(steps=STEPS), one, stats_of(STEADY * 2), RequestStats(30, 30), None, Seconds(2.0)
    )
    assert (found.passed, found.target.errors) == (False, 30)


def stats_of(seconds: list[float]) -> RequestStats:
    return RequestStats(len(seconds), latencies=counts_of(seconds)).with_p95()


def test_a_source_that_is_lost_sends_a_verified_target_on_and_gives_up_another() -> None:
    lost = sight(None, is_lost=True)
    onward, _ = step(shifting(), MigrationObservation(lost, sight(READY)), at(3), WALL)
    assert onward.stage is MigrationStage.DRAINING
    young, _ = reserve(begin_migration(), TARGET, at(1), WALL)
    given_up, _ = step(young, MigrationObservation(lost, sight(make_observed(Phase.LOADING))), at(2), WALL)
    assert isinstance(given_up.state, AbortedState), "the new one stays as a plain replica: it is not rolled back"
    assert move_of(given_up) is None


def test_a_source_that_is_only_silent_is_no_reason_to_serve_unverified() -> None:
    young, _ = reserve(begin_migration(), TARGET, at(1), WALL)
    code = Code.VERIFY_IMPOSSIBLE
    unjudged = make_observed(Phase.FAILED, code=code, verdict=replace(verdict(passed=False), code=code))
    back, _ = step(
        young, MigrationObservation(replace(sight(make_observed()), is_current=False), sight(unjudged)), at(2), WALL
    )
    assert isinstance(back.state, RollingBackState)
    assert back.state.refusal.code is code
    move = move_of(back)
    assert move is not None
    assert move.leaving == TARGET.assignment


def test_more_samples_have_more_time() -> None:
    young, _ = reserve(begin_migration(samples=4096), TARGET, at(1), WALL)
    verifying, _ = step(young, scene(make_observed(Phase.VERIFYING)), at(2), WALL)
    assert verifying.stage is MigrationStage.VERIFYING
    still, _ = step(verifying, scene(make_observed(Phase.VERIFYING)), at(4000), WALL)
    assert still.stage is MigrationStage.VERIFYING


def test_what_drains_cannot_be_cancelled() -> None:
    draining, _ = step(shifting(), MigrationObservation(sight(None, is_lost=True), sight(READY)), at(3), WALL)
    with pytest.raises(ShoalError) as refused:
        cancel(draining, "ops", at(4), WALL)
    assert refused.value.code is Code.CONFLICT


def test_those_that_have_a_place_come_first() -> None:
    several = [replace(begin_migration(), id=f"m-{index}") for index in range(3)]
    several[2] = reserve(several[2], TARGET, at(1), WALL)[0]
    fleet = Fleet({SOURCE.node: NodeState(node(SOURCE.node))})
    held = {SOURCE.node: (assignment(SOURCE.assignment),)}
    assert [move.migration for move in moves_of(several, fleet, held)] == ["m-2", "m-0", "m-1"]
    assert [move.migration for move in moves_of(several, fleet, {})] == ["m-2"], "nothing is left of their sources"


def test_waiting_for_its_turn_costs_a_move_no_time() -> None:
    queued = begin_migration()
    for now in (200.0, 400.0, LIMITS.planned_s + 1, 2 * LIMITS.planned_s):
        queued, told = step(
            queued, MigrationObservation(sight(READY), ReplicaObservation(), is_queued=True), at(now), WALL
        )
        assert (queued.stage, told) == (MigrationStage.PLANNED, ())
    now += LIMITS.planned_s + 1
    ended, _ = step(queued, MigrationObservation(sight(READY), ReplicaObservation()), at(now), WALL)
    assert ended.stage is MigrationStage.ABORTED


# -- stateful workloads ------------------------------------------------------------------------------------------------


def stateful(target: int = 0, source: int = 0, **more: Any) -> MigrationObservation:
    """How many sessions each has."""
    seen = (
        sight(make_observed(sessions=source), is_stateful=True),
        sight(replace(READY, sessions=target), is_stateful=True),
    )
    return MigrationObservation(*seen, **more)


def last_step() -> Migration:
    moving, _ = step(reserve(begin_migration(steps=(1.0,)), TARGET, at(1), WALL)[0], stateful(), at(2), WALL)
    assert isinstance(moving.state, ShiftingState)
    return moving


def test_the_old_replica_goes_only_when_it_has_handed_every_session_over() -> None:
    moving = last_step()
    held, _ = step(moving, stateful(target=3, source=2), at(10), WALL)
    assert held == moving
    unseen = replace(stateful(), source=replace(sight(make_observed(), is_stateful=True), is_current=False))
    assert step(moving, unseen, at(10), WALL)[0].stage is MigrationStage.SHIFTING
    assert step(moving, stateful(target=5), at(10), WALL)[0].stage is MigrationStage.DRAINING


def test_sessions_that_no_front_counts_may_be_there() -> None:
    """A supervisor that has just started says 0 before its first word from the front."""
    moving = last_step()
    blind = replace(stateful(target=3), source=replace(sight(make_observed(), is_stateful=True), is_counted=False))
    assert step(moving, blind, at(10), WALL)[0] == moving
    back, _ = step(moving, stateful(target=3, source=2), at(1000), WALL)
    blind = replace(stateful(source=5), target=replace(sight(READY, is_stateful=True), is_counted=False))
    waits, _ = step(back, blind, at(1005), WALL)
    assert waits == back


@pytest.mark.parametrize(
    ("changes", "shown", "goes_over"),
    [
        ({}, None, True),
        (MADE, None, False),  # what a node made of the same model answers otherwise, and so may its state be
        (MADE, verdict(), True),
        (OTHER, None, False),  # nothing was compared, because the policy says so
        (OTHER, verdict(passed=False), False),  # a difference that the policy only advises on
        (OTHER, replace(verdict(), against=Against.REFERENCE), False),
        (OTHER, replace(verdict(), samples=0), False),
        (OTHER, verdict("m-0"), False),
        (OTHER, verdict(), True),  # it answers as the old one does, from the same state
    ],
)
def test_sessions_end_with_a_model_whose_state_the_next_one_may_not_read(
    changes: dict[str, Any], shown: Verdict | None, *, goes_over: bool
) -> None:
    begun = begin_migration(steps=(1.0,), against=Against.NONE, advisory=True)
    new = replace(TARGET, **changes)
    reserved, _ = reserve(begun, new, at(1), WALL)

    def observation(source: int) -> MigrationObservation:
        found = stateful(source=source)
        observed = replace(READY, sessions=1, verdict=shown)
        return replace(found, target=replace(found.target, observed=observed))

    moving, _ = step(reserved, observation(2), at(2), WALL)
    assert isinstance(moving.state, ShiftingState)
    assert [(source.model, target) for source, target in _handovers(moving)] == [(DIGEST, new)] * goes_over
    after, _ = step(moving, observation(2), at(10), WALL)
    assert after.stage is (MigrationStage.SHIFTING if goes_over else MigrationStage.DRAINING)
    if not goes_over:
        assert after.stages[-1].note == "2 sessions end: the new replica has another model"
        back, _ = step(moving, replace(observation(2), obsolete_reason=Refusal(Code.PLAN_STALE, "gone")), at(3), WALL)
        assert isinstance(back.state, RollingBackState)
        assert not _handovers(back), "nor does the old one go on with the new one's"


def test_sessions_go_over_after_a_verdict_that_the_new_replica_no_longer_reports() -> None:
    begun = begin_migration(steps=(0.5, 1.0))
    reserved, _ = reserve(begun, replace(TARGET, model=SMALL), at(1), WALL)

    def observe(shown: Verdict | None) -> MigrationObservation:
        found = stateful(source=2)
        return replace(found, target=replace(found.target, observed=replace(READY, sessions=1, verdict=shown)))

    half, _ = step(reserved, observe(verdict()), at(2), WALL)
    assert isinstance(half.state, ShiftingState)
    whole, _ = step(half, observe(None), half.state.due, WALL)  # its node has restarted, and was asked for no verdict
    assert isinstance(whole.state, ShiftingState)
    assert (whole.state.step, whole.state.stateful) == (1, True)
    assert len(_handovers(whole)) == 1
    waits, _ = step(whole, observe(None), whole.state.due, WALL)
    assert waits.stage is MigrationStage.SHIFTING, "the old replica stays until its sessions went over"


def test_sessions_that_do_not_go_over_in_time_take_the_move_back() -> None:
    after, _ = step(last_step(), stateful(target=3, source=2), at(1000), WALL)
    assert isinstance(after.state, RollingBackState)
    assert (after.state.refusal.code, after.state.handing) == (Code.HANDOVER_FAILED, True)
    assert "2 sessions left" in after.state.refusal.found
    move = move_of(after)
    assert move is not None
    assert (move.leaving, move.defers_drain, move.share) == (TARGET.assignment, True, 0.0)
    waits, _ = step(after, stateful(target=1, source=4), at(1005), WALL)
    assert waits == after
    back, _ = step(after, stateful(source=5), at(1005), WALL)
    assert isinstance(back.state, RollingBackState)
    assert not back.state.handing
    late, _ = step(after, stateful(target=1), at(1000 + LIMITS.handover_s), WALL)
    assert isinstance(late.state, RollingBackState)
    assert not late.state.handing

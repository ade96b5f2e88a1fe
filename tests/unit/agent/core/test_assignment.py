"""The state machine of one assignment: its table, its deadlines, and the laws that hold for any story."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.agent_values import assignment, at, measurement, verdict, verification
from shoal.agent.core.assignment.events import (
    AwaitIdle,
    BytesDiscarded,
    DiscardBytes,
    DrainRequested,
    Event,
    Exited,
    FetchFailed,
    Idle,
    LoadFailed,
    ModelFetched,
    NoVerdict,
    PreparationQueued,
    PreparationStarted,
    ResumeRequested,
    StartFetch,
    StartVerify,
    StartWorker,
    StopFetch,
    StopVerify,
    StopWorker,
    TimerFired,
    Unused,
    VerdictReached,
    WakeAt,
    WakeRequested,
    Warmed,
    WarmupStarted,
)
from shoal.agent.core.assignment.machine import adopt, begin, step
from shoal.agent.core.assignment.report import observe, phase
from shoal.agent.core.assignment.states import (
    AssignmentLimits,
    AssignmentRecord,
    Draining,
    Failed,
    Fetching,
    Gone,
    LoadedModel,
    Loading,
    Poisoned,
    Ready,
    Rejected,
    ScaledToZero,
    Staged,
    State,
    Unloading,
    Verifying,
    Waking,
    Warming,
)
from shoal.agent.core.assignment.unloading import KEPT_LOADS, record_load, wake_time
from shoal.types.assignment import Assignment, Phase, Preparation
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.migration import Against, Recording, Verifier
from shoal.types.units import Elapsed, Seconds, Wall

LIMITS = AssignmentLimits()
ASKED = assignment()
SERVICE = LoadedModel(measurement(), (), ())
CRASH = Exited(own_fault=True, refusal=Refusal(Code.WORKER_CRASHED, "SIGSEGV"))
KILL = Exited(own_fault=False, refusal=Refusal(Code.WORKER_KILLED, "SIGKILL from outside"))
NOT_FOUND = Refusal(Code.FETCH_FAILED, "unreachable")

FETCHING, _ = begin(ASKED, at(0), LIMITS)
LOADING = Loading(ASKED, AssignmentRecord(), at(1), at(100))
WARMING = Warming(ASKED, AssignmentRecord(), at(2), at(200))
READY = Ready(ASKED, AssignmentRecord(), at(3), SERVICE)
DRAINING = Draining(ASKED, AssignmentRecord(), at(4), SERVICE, at(4.5), at(34))
FAILED = Failed(ASKED, AssignmentRecord(attempts=1), at(5), NOT_FOUND, at(50))
POISONED = Poisoned(ASKED, AssignmentRecord(crashes=3), at(5), Refusal(Code.POISONED))
GONE = Gone(ASKED, AssignmentRecord(), at(6))
VERIFICATION = verification()
MOVING = assignment(verification=VERIFICATION)
PASSED, DIFFERS = verdict(), verdict(passed=False)
SILENT = Refusal(Code.REPLICA_UNREACHABLE, "no connection")
VERIFYING = Verifying(MOVING, AssignmentRecord(), at(3), at(33), SERVICE, VERIFICATION)
REJECTED = Rejected(
    MOVING, AssignmentRecord(verdict=DIFFERS), at(5), Refusal(Code.VERIFY_FAILED, "differs"), VERIFICATION
)
SCALED = replace(ASKED, to_zero_after_s=Seconds(600.0))
UNLOADING = Unloading(SCALED, AssignmentRecord(), at(4), SERVICE, at(34))
AT_ZERO = ScaledToZero(SCALED, AssignmentRecord(), at(5), SERVICE)
WAKING = Waking(Loading(SCALED, AssignmentRecord(), at(6), at(100)), at(5.5), SERVICE)
STATES: tuple[State, ...] = (
    FETCHING, LOADING, WARMING, VERIFYING, READY, UNLOADING, AT_ZERO, WAKING, DRAINING, FAILED, POISONED, REJECTED,
    GONE,
)  # fmt: skip


def test_a_preparation_has_a_time_of_its_own_and_says_what_it_does() -> None:
    made = assignment(precision="int8", preparation=Preparation(()))
    fetching, _ = begin(made, at(0), LIMITS)
    queued, _ = step(fetching, PreparationQueued(), at(5), LIMITS)
    assert observe(queued, epoch_wall=Seconds(0.0)).code is Code.WAITING_FOR_PREPARE
    waited, _ = step(queued, TimerFired(), at(5 + LIMITS.prepare_queue_s), LIMITS)
    assert isinstance(waited, Failed), "others held it up; it queues again"
    preparing, effects = step(queued, PreparationStarted(), at(10), LIMITS)
    assert isinstance(preparing, Fetching)
    assert effects == (WakeAt(at(10 + LIMITS.prepare_s)),)
    told = observe(preparing, epoch_wall=Seconds(0.0))
    assert (told.phase, told.code) == (Phase.FETCHING, Code.WAITING_FOR_PREPARE)
    assert "int8" in told.reason
    loading, _ = step(preparing, ModelFetched("/cache/model"), at(500), LIMITS)
    assert isinstance(loading, Loading), "longer than any fetch may take"
    late, effects = step(preparing, TimerFired(), at(10 + LIMITS.prepare_s), LIMITS)
    assert isinstance(late, Poisoned), "it would take as long again"
    assert (late.refusal.code, effects) == (Code.PREPARE_FAILED, (StopFetch(),))


def test_what_cannot_be_prepared_is_not_tried_again() -> None:
    refusal = Refusal(Code.PREPARE_FAILED, "cosine 0.9", "at least 0.99")
    state, effects = step(FETCHING, FetchFailed(refusal), at(10), LIMITS)
    assert isinstance(state, Poisoned)
    assert effects == ()


@pytest.mark.parametrize("code", sorted(PERMANENT_LOAD_FAILURES))
def test_what_no_other_try_changes_is_final_at_the_first(code: Code) -> None:
    refusal = Refusal(code, "no kernel for Add(6)", "one in onnxruntime", "export it again")
    state, effects = step(LOADING, LoadFailed(refusal), at(10), LIMITS)
    assert effects == (StopWorker(),), "and no wake-up"
    assert step(state, TimerFired(), at(10_000), LIMITS) == (state, ())
    told = observe(state, epoch_wall=Seconds(1000.0))
    assert (told.phase, told.code, told.retry_at, told.gives_up_at) == (Phase.FAILED, code, None, Wall(1010.0))
    assert told.reason == "found: no kernel for Add(6); wanted: one in onnxruntime; try: export it again", (
        "the code stands beside it"
    )
    assert step(state, DrainRequested(), at(11), LIMITS)[0] == Gone(ASKED, AssignmentRecord(), at(11))


def test_the_whole_way_up_and_down() -> None:
    state, effects = begin(ASKED, at(0), LIMITS)
    assert isinstance(state, Fetching)
    assert effects == (StartFetch(), WakeAt(state.until))
    state, effects = step(state, ModelFetched("/cache/x"), at(1), LIMITS)
    assert isinstance(state, Loading)
    assert effects == (StartWorker("/cache/x"), WakeAt(state.until))
    state, effects = step(state, WarmupStarted(), at(2), LIMITS)
    assert isinstance(state, Warming)
    assert effects == (WakeAt(state.until),)
    state, effects = step(state, Warmed(SERVICE), at(3), LIMITS)
    assert (state, effects) == (Ready(ASKED, AssignmentRecord(), at(3), SERVICE), ())
    state, effects = step(state, DrainRequested(), at(4), LIMITS)
    assert isinstance(state, Draining)
    assert effects == (AwaitIdle(), WakeAt(state.until))
    assert step(state, Idle(), at(4.1), LIMITS) == (state, ()), "peers may still hold the old routes"
    assert step(state, Idle(), at(5), LIMITS) == (Gone(ASKED, AssignmentRecord(), at(5)), (StopWorker(),))


@pytest.mark.parametrize(
    ("state", "event", "expected", "effects"),
    [
        (FETCHING, DrainRequested(), Gone(ASKED, AssignmentRecord(), at(10)), (StopFetch(),)),
        (LOADING, DrainRequested(), Gone(ASKED, AssignmentRecord(), at(10)), (StopWorker(),)),
        (WARMING, DrainRequested(), Gone(ASKED, AssignmentRecord(), at(10)), (StopWorker(),)),
        (FAILED, DrainRequested(), Gone(ASKED, AssignmentRecord(attempts=1), at(10)), ()),
        (POISONED, DrainRequested(), Gone(ASKED, AssignmentRecord(crashes=3), at(10)), ()),
        (LOADING, Warmed(SERVICE), Ready(ASKED, AssignmentRecord(), at(10), SERVICE), ()),
        (DRAINING, ResumeRequested(ASKED), Ready(ASKED, AssignmentRecord(), at(10), SERVICE), ()),
        (DRAINING, KILL, Gone(ASKED, AssignmentRecord(), at(10)), ()),
        (DRAINING, CRASH, Gone(ASKED, AssignmentRecord(), at(10)), ()),
        (READY, ModelFetched("late"), READY, ()),
        (READY, Warmed(SERVICE), READY, ()),
        (READY, Warmed(replace(SERVICE, note="more")), replace(READY, loaded_model=replace(SERVICE, note="more")), ()),
        (GONE, CRASH, GONE, ()),
        (FETCHING, CRASH, FETCHING, ()),
        (READY, Unused(), READY, ()),
        (UNLOADING, WakeRequested(), Ready(SCALED, AssignmentRecord(), at(10), SERVICE), ()),
        (UNLOADING, Idle(), replace(AT_ZERO, since=at(10)), (StopWorker(),)),
        (UNLOADING, ResumeRequested(ASKED), Ready(ASKED, AssignmentRecord(), at(10), SERVICE), ()),
        (AT_ZERO, DrainRequested(), Gone(SCALED, AssignmentRecord(), at(10)), ()),
        (AT_ZERO, CRASH, AT_ZERO, ()),
        (WAKING, WakeRequested(), WAKING, ()),
        (WAKING, DrainRequested(), Gone(SCALED, AssignmentRecord(), at(10)), (StopWorker(),)),
        (WAKING, Warmed(SERVICE), Ready(SCALED, AssignmentRecord(loads=(Seconds(4.5),)), at(10), SERVICE), ()),
    ],
)
def test_table(state: State, event: Event, expected: State, effects: tuple[object, ...]) -> None:
    assert step(state, event, at(10), LIMITS) == (expected, effects)


@pytest.mark.parametrize(
    ("state", "code", "first"),
    [
        (FETCHING, Code.FETCH_FAILED, StopFetch()),
        (LOADING, Code.LOAD_TIMEOUT, StopWorker()),
        (WARMING, Code.WARMUP_FAILED, StopWorker()),
    ],
)
def test_a_transitional_state_past_its_deadline_fails_and_says_when_it_tries_again(
    state: Fetching | Loading | Warming, code: Code, first: object
) -> None:
    failed, effects = step(state, TimerFired(), state.until, LIMITS)
    assert isinstance(failed, Failed)
    assert failed.refusal.code is code
    assert effects == (first, WakeAt(failed.retry_at))
    again, effects = step(failed, TimerFired(), failed.retry_at, LIMITS)
    assert isinstance(again, Fetching)
    assert again.record == AssignmentRecord(attempts=1, restarts=1)
    assert effects[0] == StartFetch()


def test_draining_ends_by_its_deadline_with_requests_in_flight() -> None:
    assert step(DRAINING, TimerFired(), DRAINING.until, LIMITS) == (
        Gone(ASKED, AssignmentRecord(), at(34)),
        (StopWorker(),),
    )


def test_time_is_looked_at_before_the_event() -> None:
    late, effects = step(LOADING, Warmed(SERVICE), LOADING.until, LIMITS)
    assert isinstance(late, Failed), "readiness that comes after the deadline is not readiness"
    assert effects[0] == StopWorker()


def test_a_kill_from_outside_reloads_at_once_and_counts_nothing() -> None:
    state: State = READY
    for number in range(1, 11):
        state, effects = step(state, KILL, at(10 * number), LIMITS)
        assert isinstance(state, Fetching)
        assert state.record == AssignmentRecord(restarts=number)
        assert effects[0] == StartFetch()
        state, _ = step(state, ModelFetched("x"), at(10 * number), LIMITS)
        state, _ = step(state, Warmed(SERVICE), at(10 * number), LIMITS)
    assert isinstance(state, Ready)


def test_f39_three_crashes_of_its_own_poison_it_for_good() -> None:
    state: State = LOADING
    now = 10.0
    for crash in (1, 2):
        state, effects = step(state, CRASH, at(now), LIMITS)
        assert isinstance(state, Failed)
        assert state.refusal.code is Code.WORKER_CRASHED
        assert state.record.crashes == crash
        assert effects == (WakeAt(state.retry_at),)
        now = state.retry_at
        state, _ = step(state, TimerFired(), at(now), LIMITS)
        state, _ = step(state, ModelFetched("x"), at(now), LIMITS)
    state, effects = step(state, CRASH, at(now), LIMITS)
    assert isinstance(state, Poisoned)
    assert state.refusal.code is Code.POISONED
    assert effects == (), "nothing is tried again by itself"
    assert step(state, TimerFired(), at(now + 1e6), LIMITS) == (state, ())
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code, observed.retry_at) == (Phase.FAILED, Code.POISONED, None)


@pytest.mark.parametrize(
    ("crashes_at_load", "told"),
    [((True, True, True), True), ((False, False, False), False), ((True, False, True), False)],
)
def test_a56_only_crashes_at_load_are_the_models_own(crashes_at_load: tuple[bool, ...], told: bool) -> None:
    state: State = LOADING
    now = 10.0
    for at_load in crashes_at_load:
        state, _ = step(state, replace(CRASH, at_load=at_load), at(now), LIMITS)
        assert observe(state, epoch_wall=Seconds(0.0)).crashed_at_load is (told or (at_load and now == 10.0))
        if isinstance(state, Failed):
            now = state.retry_at
            state, _ = step(state, TimerFired(), at(now), LIMITS)
            state, _ = step(state, ModelFetched("x"), at(now), LIMITS)
    assert isinstance(state, Poisoned)


def test_long_good_service_forgives_earlier_crashes() -> None:
    crashed = replace(READY, record=AssignmentRecord(attempts=4, crashes=2, restarts=7))
    soon, _ = step(crashed, CRASH, at(READY.since + 1), LIMITS)
    assert isinstance(soon, Poisoned)
    later, _ = step(crashed, CRASH, at(READY.since + LIMITS.crash_reset_s), LIMITS)
    assert isinstance(later, Failed)
    assert later.record == AssignmentRecord(attempts=1, crashes=1, restarts=7)
    idle, _ = step(replace(crashed, assignment=SCALED), Unused(), at(READY.since + LIMITS.crash_reset_s), LIMITS)
    assert idle.record == AssignmentRecord(restarts=7), "its next service begins with its wake"


def test_running_out_of_memory_backs_off_and_is_no_crash() -> None:
    killed = Exited(own_fault=False, refusal=Refusal(Code.OUT_OF_MEMORY, "killed by the kernel"))
    state, effects = step(READY, killed, at(10), LIMITS)
    assert isinstance(state, Failed)
    assert state.record.crashes == 0
    assert effects == (WakeAt(state.retry_at),)


def test_f33_bytes_that_are_not_the_model_are_set_aside_before_the_next_fetch() -> None:
    state, effects = step(LOADING, LoadFailed(Refusal(Code.MODEL_DIGEST, "other bytes")), at(10), LIMITS)
    assert isinstance(state, Failed)
    assert effects == (StopWorker(), DiscardBytes(), WakeAt(state.retry_at))


def test_f33_what_is_staged_is_fetched_again_once_its_bytes_are_set_aside() -> None:
    asked, _ = begin(replace(ASKED, staged=True), at(0), LIMITS)
    staged, _ = step(asked, ModelFetched("x"), at(10), LIMITS)
    assert phase(staged) is Phase.STAGED
    fetching, effects = step(staged, BytesDiscarded(), at(20), LIMITS)
    assert isinstance(fetching, Fetching)
    assert effects == (StartFetch(), WakeAt(fetching.until))
    assert phase(step(fetching, ModelFetched("x"), at(21), LIMITS)[0]) is Phase.STAGED
    for other in (READY, LOADING):
        assert step(other, BytesDiscarded(), other.since, LIMITS) == (other, ()), "it has read them"


def test_f33_who_may_have_found_the_bytes_already_looks_again() -> None:
    fetching, effects = step(FETCHING, BytesDiscarded(), at(5), LIMITS)
    assert isinstance(fetching, Fetching)
    assert effects == (StopFetch(), StartFetch(), WakeAt(fetching.until))
    assert fetching.since == at(5)


def test_f33_who_drains_meanwhile_fetches_before_it_is_staged() -> None:
    draining: State = replace(DRAINING, assignment=replace(ASKED, staged=True))
    assert phase(step(draining, CRASH, at(5), LIMITS)[0]) is Phase.STAGED
    without, effects = step(draining, BytesDiscarded(), at(5), LIMITS)
    assert isinstance(without, Draining)
    assert effects == ()
    ends: tuple[tuple[Event, tuple[StopWorker, ...]], ...] = (
        (Idle(), (StopWorker(),)),
        (CRASH, ()),
        (TimerFired(), (StopWorker(),)),
    )
    for event, stopped in ends:
        now = at(40) if isinstance(event, TimerFired) else at(6)
        fetching, effects = step(without, event, now, LIMITS)
        assert isinstance(fetching, Fetching)
        assert effects == (*stopped, StartFetch(), WakeAt(fetching.until))
    assert isinstance(step(replace(without, assignment=ASKED), CRASH, at(6), LIMITS)[0], Gone)


def test_f33_a_preparation_that_finds_the_bytes_corrupt_sets_them_aside() -> None:
    state, effects = step(FETCHING, FetchFailed(Refusal(Code.MODEL_DIGEST, "other bytes")), at(5), LIMITS)
    assert isinstance(state, Failed)
    assert effects == (DiscardBytes(), WakeAt(state.retry_at))


def test_back_off_doubles_up_to_its_cap_and_differs_by_assignment() -> None:
    waits: list[float] = []
    state: State = FETCHING
    now = at(0)
    for _ in range(12):
        state, _ = step(state, FetchFailed(NOT_FOUND), now, LIMITS)
        assert isinstance(state, Failed)
        waits.append(state.retry_at - now)
        now = state.retry_at
        state, _ = step(state, TimerFired(), now, LIMITS)
    for attempt, wait in enumerate(waits):
        ceiling = min(LIMITS.retry_cap_s, LIMITS.retry_base_s * 2**attempt)
        assert ceiling / 2 <= wait <= ceiling
    other, _ = begin(assignment("a-2"), at(0), LIMITS)
    other, _ = step(other, FetchFailed(NOT_FOUND), at(0), LIMITS)
    assert isinstance(other, Failed)
    assert other.retry_at != waits[0]


def test_adopted_as_it_is() -> None:
    assert adopt(ASKED, SERVICE, at(7), LIMITS) == (Ready(ASKED, AssignmentRecord(), at(7), SERVICE), ())
    state, effects = adopt(ASKED, None, at(7), LIMITS)
    assert isinstance(state, Loading)
    assert effects == (WakeAt(state.until),), "nothing is started: the worker is already at it"


def test_a_replica_that_takes_over_is_ready_once_it_has_passed() -> None:
    warming = replace(WARMING, assignment=MOVING)
    state, effects = step(warming, Warmed(SERVICE), at(3), LIMITS)
    assert (state, effects) == (VERIFYING, (StartVerify(VERIFICATION), WakeAt(at(33))))
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code) == (Phase.VERIFYING, Code.WAITING_FOR_VERIFY)
    assert observed.gives_up_at == Wall(VERIFYING.until)
    state, effects = step(state, VerdictReached(PASSED), at(4), LIMITS)
    assert (state, effects) == (Ready(MOVING, AssignmentRecord(verdict=PASSED), at(4), SERVICE), ())
    assert observe(state, epoch_wall=Seconds(0.0)).verdict == PASSED


def test_what_is_staged_stops_at_its_bytes_and_loads_them_when_it_is_to_serve() -> None:
    asked = replace(ASKED, staged=True)
    state, _ = begin(asked, at(0), LIMITS)
    state, effects = step(state, ModelFetched("p"), at(1), LIMITS)
    assert (phase(state), effects) == (Phase.STAGED, ())
    state, effects = step(state, ResumeRequested(ASKED), at(50), LIMITS)
    assert isinstance(state, Fetching)
    assert effects[0] == StartFetch(), "which finds the bytes where they are"
    state, effects = step(state, ModelFetched("p"), at(50), LIMITS)
    assert effects[0] == StartWorker("p")


def test_one_that_serves_lets_go_of_its_worker_when_it_is_to_be_staged() -> None:
    ready = Ready(ASKED, AssignmentRecord(), at(0), SERVICE)
    state, effects = step(ready, ResumeRequested(replace(ASKED, staged=True)), at(1), LIMITS)
    assert (phase(state), effects[0]) == (Phase.DRAINING, AwaitIdle())
    staged, effects = step(state, Idle(), at(2), LIMITS)
    assert (phase(staged), effects) == (Phase.STAGED, (StopWorker(),))
    back, _ = step(state, ResumeRequested(ASKED), at(2), LIMITS)
    assert phase(back) is Phase.READY
    unwanted, _ = step(state, DrainRequested(), at(2), LIMITS)
    gone, _ = step(unwanted, Idle(), at(3), LIMITS)
    assert phase(gone) is Phase.GONE


def test_without_a_verification_nothing_is_verified() -> None:
    for state in (LOADING, WARMING):
        assert step(state, Warmed(SERVICE), at(3), LIMITS) == (Ready(ASKED, AssignmentRecord(), at(3), SERVICE), ())


def test_what_differs_is_refused_for_good_and_another_verification_begins_anew() -> None:
    state, effects = step(VERIFYING, VerdictReached(DIFFERS), at(4), LIMITS)
    assert isinstance(state, Rejected)
    assert effects == (StopWorker(),)
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code, observed.verdict) == (Phase.FAILED, Code.VERIFY_FAILED, DIFFERS)
    assert observed.retry_at is None
    assert step(state, TimerFired(), at(1e6), LIMITS) == (state, ()), "nothing is tried again by itself"
    assert step(state, ResumeRequested(replace(MOVING, revision=2)), at(5), LIMITS)[1] == (), "the same verification"
    for other in (None, verification("m-2")):
        again, effects = step(state, ResumeRequested(replace(MOVING, verification=other)), at(5), LIMITS)
        assert isinstance(again, Fetching)
        assert again.record == AssignmentRecord(), "what was is not held against it"
        assert effects[0] == StartFetch()


def test_what_differs_is_let_in_where_the_policy_only_wants_to_know() -> None:
    advised = replace(VERIFICATION, advisory=True)
    moving = replace(MOVING, verification=advised)
    verifying = replace(VERIFYING, assignment=moving, verification=advised)
    state, effects = step(verifying, VerdictReached(DIFFERS), at(4), LIMITS)
    assert (state, effects) == (Ready(moving, AssignmentRecord(verdict=DIFFERS), at(4), SERVICE), ())
    assert observe(state, epoch_wall=Seconds(0.0)).verdict == DIFFERS
    again = replace(WARMING, assignment=moving, record=AssignmentRecord(verdict=DIFFERS))
    assert isinstance(step(again, Warmed(SERVICE), at(9), LIMITS)[0], Ready), "known after a restart of its worker too"
    for unseen in (
        replace(DIFFERS, code=Code.VERIFY_IMPOSSIBLE),
        replace(DIFFERS, samples=0),  # it crashed
    ):
        assert isinstance(step(verifying, VerdictReached(unseen), at(4), LIMITS)[0], Rejected)


def test_what_cannot_be_compared_yet_is_tried_again_until_its_time_is_over() -> None:
    state: State = VERIFYING
    effects: tuple[object, ...] = ()
    now, tries = at(3), 0
    while isinstance(state, Verifying):
        state, effects = step(state, NoVerdict(SILENT), now, LIMITS)
        assert isinstance(state, Verifying)
        assert state.retry_at is not None
        assert effects == (WakeAt(min(state.retry_at, VERIFYING.until)),)
        assert step(state, NoVerdict(SILENT), now, LIMITS) == (state, ()), "none is under way"
        now = at(min(state.retry_at, VERIFYING.until))
        state, effects = step(state, TimerFired(), now, LIMITS)
        tries += effects[:1] == (StartVerify(VERIFICATION),)
    assert tries > 5
    assert isinstance(state, Rejected)
    assert effects == (StopVerify(), StopWorker())
    assert state.refusal.code is Code.VERIFY_IMPOSSIBLE
    assert state.record.verdict is not None
    assert not state.record.verdict.passed
    assert "no connection" in state.record.verdict.reason


@pytest.mark.parametrize("within_s", [0.0, -1.0, float("nan")])
def test_a_verification_without_time_ends_at_once(within_s: float) -> None:
    asked = assignment(verification=verification(within_s=Seconds(within_s)))
    state, _ = step(replace(WARMING, assignment=asked), Warmed(SERVICE), at(3), LIMITS)
    state, _ = step(state, TimerFired(), at(3), LIMITS)
    assert isinstance(state, Rejected)


def test_a_passed_verdict_outlives_its_worker_and_its_supervisor() -> None:
    state, _ = step(VERIFYING, VerdictReached(PASSED), at(4), LIMITS)
    state, _ = step(state, KILL, at(5), LIMITS)
    state, _ = step(state, ModelFetched("x"), at(6), LIMITS)
    state, effects = step(state, Warmed(SERVICE), at(7), LIMITS)
    assert (type(state), effects) == (Ready, ()), "it loaded the same: its source may be gone by now"
    state, effects = adopt(MOVING, SERVICE, at(8), LIMITS, PASSED)
    assert (type(state), effects) == (Ready, ())
    for other in (None, DIFFERS, verdict("m-2")):
        state, effects = adopt(MOVING, SERVICE, at(8), LIMITS, other)
        assert isinstance(state, Verifying), "judged for another move, or not at all"
        assert effects[0] == StartVerify(VERIFICATION)
    loading, _ = adopt(MOVING, None, at(8), LIMITS, PASSED)
    assert step(loading, Warmed(SERVICE), at(9), LIMITS)[0] == Ready(
        MOVING, AssignmentRecord(verdict=PASSED), at(9), SERVICE
    )


@pytest.mark.parametrize(
    ("event", "expected", "effects"),
    [
        (DrainRequested(), Gone(MOVING, AssignmentRecord(), at(10)), (StopVerify(), StopWorker())),
        (VerdictReached(verdict("m-2")), VERIFYING, ()),
        (ResumeRequested(replace(MOVING, revision=2)), replace(VERIFYING, assignment=replace(MOVING, revision=2)), ()),
        (ResumeRequested(ASKED), Ready(ASKED, AssignmentRecord(), at(10), SERVICE), (StopVerify(),)),
    ],
)
def test_while_it_is_verified(event: Event, expected: State, effects: tuple[object, ...]) -> None:
    assert step(VERIFYING, event, at(10), LIMITS) == (expected, effects)


def test_another_verification_meanwhile_takes_the_place_of_the_first() -> None:
    other = verification("m-2")
    state, effects = step(VERIFYING, ResumeRequested(replace(MOVING, verification=other)), at(10), LIMITS)
    assert isinstance(state, Verifying)
    assert effects == (StopVerify(), StartVerify(other), WakeAt(state.until))
    assert step(state, VerdictReached(PASSED), at(11), LIMITS) == (state, ()), "that was the first one's"


def test_a_crash_while_it_is_verified_is_a_verdict_and_poisons_no_model() -> None:
    state, effects = step(VERIFYING, CRASH, at(10), LIMITS)
    assert isinstance(state, Rejected)
    assert state.record.crashes == 0
    assert effects[0] == StopVerify()
    assert state.refusal.code is Code.VERIFY_FAILED
    assert "SIGSEGV" in state.refusal.found


def test_a_kill_from_outside_while_it_is_verified_loads_it_again() -> None:
    state, effects = step(VERIFYING, KILL, at(10), LIMITS)
    assert isinstance(state, Fetching)
    assert effects[:2] == (StopVerify(), StartFetch())


HERE = verification("r-1", against=Against.REFERENCE, recording=Recording.HERE)
AWAITED = replace(HERE, recording=Recording.AWAITED)
BESIDE = replace(HERE, beside=True)


def test_one_that_waits_for_a_reference_compares_nothing_before_it_is_there() -> None:
    asked = assignment(verification=AWAITED)
    waiting, effects = step(replace(WARMING, assignment=asked), Warmed(SERVICE), at(5), LIMITS)
    assert isinstance(waiting, Verifying)
    assert effects == (WakeAt(waiting.until),)
    assert "recorded first" in observe(waiting, epoch_wall=Seconds(0.0)).reason
    chosen, effects = step(waiting, ResumeRequested(assignment(verification=HERE)), at(6), LIMITS)
    assert isinstance(chosen, Verifying)
    assert effects == (StopVerify(), StartVerify(HERE), WakeAt(chosen.until))
    late, _ = step(waiting, TimerFired(), waiting.until, LIMITS)
    assert isinstance(late, Rejected)
    assert late.refusal.code is Code.VERIFY_IMPOSSIBLE


def test_one_that_serves_records_beside_that_and_again_where_it_was_dropped() -> None:
    beside = assignment(verification=BESIDE)
    state, effects = step(READY, ResumeRequested(beside), at(4), LIMITS)
    assert effects == (StartVerify(BESIDE),)
    state, _ = step(state, VerdictReached(verdict("r-1")), at(5), LIMITS)
    state, effects = step(state, ResumeRequested(ASKED), at(6), LIMITS)
    assert effects == ()
    state, effects = step(state, ResumeRequested(beside), at(7), LIMITS)
    assert (type(state), effects) == (Ready, (StartVerify(BESIDE),))


def test_what_ended_while_it_was_recorded_is_not_recorded_once_more() -> None:
    ready = Ready(assignment(verification=BESIDE), AssignmentRecord(), at(0), SERVICE)
    state, _ = step(ready, KILL, at(1), LIMITS)
    assert state.record.verdict is None
    state, _ = step(ready, CRASH, at(1), LIMITS)
    assert isinstance(state, Failed)
    assert state.record.verdict is not None
    assert not state.record.verdict.passed
    again, effects = step(
        replace(WARMING, assignment=state.assignment, record=state.record), Warmed(SERVICE), at(5), LIMITS
    )
    assert (type(again), effects) == (Ready, ())


def test_down_to_zero_and_up_again() -> None:
    ready = replace(READY, assignment=SCALED)
    unloading, effects = step(ready, Unused(), at(700), LIMITS)
    assert isinstance(unloading, Unloading)
    assert effects == (AwaitIdle(), WakeAt(unloading.until))
    assert observe(unloading, epoch_wall=Seconds(0.0)).phase is Phase.READY
    zero, _ = step(unloading, Idle(), at(701), LIMITS)
    told = observe(zero, epoch_wall=Seconds(0.0))
    assert (told.phase, told.code, told.is_unloaded) == (Phase.READY, Code.SCALED_TO_ZERO, True)
    assert told.measured == SERVICE.measured, "its place is predicted by it on"
    waking, effects = step(zero, WakeRequested(), at(900), LIMITS)
    assert isinstance(waking, Waking)
    assert effects[0] == StartFetch()
    told = observe(waking, epoch_wall=Seconds(0.0))
    assert (told.phase, told.code, told.is_unloaded) == (Phase.READY, Code.WAITING_FOR_WAKE, True)
    assert told.gives_up_at is not None
    for event in (ModelFetched("x"), WarmupStarted(), Warmed(SERVICE)):
        waking, _ = step(waking, event, at(902), LIMITS)
    assert waking == Ready(SCALED, AssignmentRecord(loads=(Seconds(2.0),)), at(902), SERVICE)


def test_what_is_still_in_use_is_ready_again() -> None:
    again, effects = step(UNLOADING, TimerFired(), UNLOADING.until, LIMITS)
    assert (type(again), effects) == (Ready, ())


def test_a_wake_that_fails_is_a_failed_load_and_a_kill_from_outside_loads_it_again() -> None:
    failed, effects = step(WAKING, LoadFailed(Refusal(Code.MEMORY_SHORT, "1 MiB free")), at(10), LIMITS)
    assert isinstance(failed, Failed)
    assert effects[0] == StopWorker()
    again, effects = step(WAKING, KILL, at(10), LIMITS)
    assert isinstance(again, Waking)
    assert (again.since, effects[0]) == (WAKING.since, StartFetch())
    late, _ = step(WAKING, TimerFired(), at(100), LIMITS)
    assert isinstance(late, Failed)


@pytest.mark.parametrize(
    "asked",
    [ASKED, replace(SCALED, standby=True), replace(SCALED, verifiers=(Verifier("m-1", "n-2"),))],
)
def test_what_has_to_be_loaded_is_loaded_at_once(asked: Assignment) -> None:
    woken, effects = step(AT_ZERO, ResumeRequested(asked), at(10), LIMITS)
    assert isinstance(woken, Waking)
    assert effects[0] == StartFetch()
    assert step(replace(READY, assignment=asked), Unused(), at(10_000), LIMITS)[1] == ()


def test_nothing_is_unloaded_before_it_has_recorded_what_it_was_asked_for() -> None:
    beside = Ready(replace(SCALED, verification=BESIDE), AssignmentRecord(), at(0), SERVICE)
    assert step(beside, Unused(), at(700), LIMITS) == (beside, ())
    recorded, _ = step(beside, VerdictReached(verdict("r-1")), at(701), LIMITS)
    assert isinstance(step(recorded, Unused(), at(702), LIMITS)[0], Unloading)


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=40))
def test_a_wake_is_the_median_of_the_last_loads(loads: list[float]) -> None:
    kept: tuple[Seconds, ...] = ()
    for took in loads:
        kept = record_load(kept, Seconds(took))
    assert kept == tuple(loads[-KEPT_LOADS:])
    takes = wake_time(AssignmentRecord(loads=kept), SERVICE)
    assert min(kept) == takes.least_s <= takes.median_s <= max(kept)


events = st.one_of(
    st.just(Unused()),
    st.just(WakeRequested()),
    st.just(ResumeRequested(SCALED)),
    st.just(VerdictReached(PASSED)),
    st.just(VerdictReached(DIFFERS)),
    st.just(NoVerdict(SILENT)),
    st.just(ResumeRequested(MOVING)),
    st.just(ModelFetched("x")),
    st.just(FetchFailed(NOT_FOUND)),
    st.just(LoadFailed(Refusal(Code.LOAD_FAILED, "bad"))),
    st.just(LoadFailed(Refusal(Code.MODEL_DIGEST, "bad"))),
    st.just(WarmupStarted()),
    st.just(Warmed(SERVICE)),
    st.just(CRASH),
    st.just(KILL),
    st.just(DrainRequested()),
    st.just(ResumeRequested(ASKED)),
    st.just(ResumeRequested(replace(ASKED, staged=True))),
    st.just(Idle()),
    st.just(BytesDiscarded()),
    st.just(TimerFired()),
)
stories = st.lists(st.tuples(st.floats(0.0, 200.0), events), max_size=40)


@given(st.sampled_from((ASKED, MOVING, SCALED, replace(ASKED, staged=True))), stories)
def test_laws_of_any_story(asked: Assignment, story: list[tuple[float, Event]]) -> None:
    """Workers, fetches and verifications are started and stopped in pairs; every wait has an end that somebody wakes
    for; and what has to be verified is never ready without a verdict that it passed."""
    now = 0.0
    state, effects = begin(asked, at(now), LIMITS)
    worker = fetch = verify = False
    wake: Elapsed | None = None
    for passed, event in ((0.0, TimerFired()), *story):
        now += passed
        if isinstance(event, ModelFetched | FetchFailed) and not fetch:
            event = TimerFired()  # only a fetch that runs can end
        if isinstance(event, VerdictReached | NoVerdict) and not verify:
            event = TimerFired()
        state_before = state
        state, more = step(state, event, at(now), LIMITS)
        effects = effects + more
        if isinstance(event, Exited):
            worker = False
        if isinstance(event, ModelFetched | FetchFailed):
            fetch = False
        if isinstance(event, VerdictReached | NoVerdict):
            verify = False
        for effect in effects:
            match effect:
                case StartFetch():
                    fetch = True
                case StopFetch():
                    fetch = False
                case StartWorker():
                    assert not worker, "two workers of one assignment"
                    worker, fetch = True, False
                case StopWorker():
                    worker = False
                case StartVerify():
                    assert worker, "nothing there to verify"
                    verify = True
                case StopVerify():
                    verify = False
                case WakeAt(when):
                    wake = when
                case AwaitIdle() | DiscardBytes():
                    pass
        effects = ()
        match state:
            case Fetching() | Loading() | Warming() | Draining():
                assert wake == state.until > now or isinstance(event, Exited)
            case Unloading():
                assert wake == state.until > now
                assert state.assignment.to_zero_after_s is not None
            case ScaledToZero():
                assert not worker
                assert not fetch
            case Waking():
                assert wake == state.loading.until > now or isinstance(event, Exited)
            case Verifying():
                assert wake == min(state.until, state.retry_at or state.until) > now
                assert verify == (state.retry_at is None)
            case Failed():
                assert wake == state.retry_at
                assert not worker
            case Gone():
                assert not worker or isinstance(state_before, Gone)
                assert not fetch
                assert not verify
            case Ready():
                judged, asked_for = state.record.verdict, state.assignment.verification
                came_up = not isinstance(state_before, Ready | Draining | Unloading)
                assert not state.assignment.staged
                assert not came_up or asked_for is None or (judged is not None and judged.passed)
            case Staged():
                assert state.assignment.staged
                assert not worker
                assert not fetch
                assert not verify
            case Poisoned() | Rejected():
                assert not verify
        assert state.record.crashes <= LIMITS.poison_after
        assert (state.record.crashes == LIMITS.poison_after) == isinstance(state, Poisoned) or isinstance(state, Gone)


@given(st.sampled_from(STATES), events, st.floats(0.0, 1e4))
def test_replaying_an_event_changes_nothing_more(state: State, event: Event, now: float) -> None:
    once, _ = step(state, event, at(now), LIMITS)
    twice, effects = step(once, event, at(now), LIMITS)
    if isinstance(event, DrainRequested | ResumeRequested | TimerFired | ModelFetched | WarmupStarted):
        assert phase(twice) == phase(once)
        if not isinstance(event, WarmupStarted):
            assert effects == ()


@given(st.sampled_from(STATES), st.floats(-1e9, 1e9))
def test_every_wait_and_failure_says_why(state: State, offset: float) -> None:
    observed = observe(state, epoch_wall=Seconds(offset), in_flight=3)
    assert observed.phase == phase(state)
    assert observed.since == state.since + offset
    if observed.phase in (Phase.READY, Phase.STAGED, Phase.GONE) and not observed.is_unloaded:
        assert observed.code is None
    else:
        assert observed.code is not None
        assert observed.reason
    assert (observed.measured is not None) == isinstance(
        state, Verifying | Ready | Unloading | ScaledToZero | Waking | Draining
    )

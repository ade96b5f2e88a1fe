"""The state machine of one assignment: its table, its deadlines, and the laws that hold for any story."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.samples import assignment, at, measured, verdict, verification
from shoal.agent.core.assignment import (
    AwaitIdle,
    DiscardBytes,
    Drain,
    Draining,
    Event,
    Exited,
    Failed,
    Fetch,
    Fetched,
    FetchFailed,
    Fetching,
    Gone,
    Idle,
    Judged,
    Limits,
    LoadFailed,
    Loading,
    Poisoned,
    Ready,
    Record,
    Rejected,
    Resume,
    Service,
    Staged,
    StartWorker,
    State,
    StopFetch,
    StopVerify,
    StopWorker,
    Tick,
    Unjudged,
    Verify,
    Verifying,
    WakeAt,
    Warmed,
    Warming,
    Warmup,
    adopt,
    begin,
    observe,
    phase,
    step,
)
from shoal.types.assignment import Assignment, Phase
from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, Recording
from shoal.types.units import Elapsed, Seconds, Wall

LIMITS = Limits()
ASKED = assignment()
SERVICE = Service(measured(), (), ())
CRASH = Exited(own_fault=True, refusal=Refusal(Code.WORKER_CRASHED, "SIGSEGV"))
KILL = Exited(own_fault=False, refusal=Refusal(Code.WORKER_KILLED, "SIGKILL from outside"))
NOT_FOUND = Refusal(Code.FETCH_FAILED, "unreachable")

FETCHING, _ = begin(ASKED, at(0), LIMITS)
LOADING = Loading(ASKED, Record(), at(1), at(100))
WARMING = Warming(ASKED, Record(), at(2), at(200))
READY = Ready(ASKED, Record(), at(3), SERVICE)
DRAINING = Draining(ASKED, Record(), at(4), SERVICE, at(4.5), at(34))
FAILED = Failed(ASKED, Record(attempts=1), at(5), NOT_FOUND, at(50))
POISONED = Poisoned(ASKED, Record(crashes=3), at(5), Refusal(Code.POISONED))
GONE = Gone(ASKED, Record(), at(6))
VERIFICATION = verification()
MOVING = assignment(verification=VERIFICATION)
PASSED, DIFFERS = verdict(), verdict(passed=False)
SILENT = Refusal(Code.REPLICA_UNREACHABLE, "no connection")
VERIFYING = Verifying(MOVING, Record(), at(3), at(33), SERVICE, VERIFICATION)
REJECTED = Rejected(MOVING, Record(verdict=DIFFERS), at(5), Refusal(Code.VERIFY_FAILED, "differs"), VERIFICATION)
STATES: tuple[State, ...] = (
    FETCHING, LOADING, WARMING, VERIFYING, READY, DRAINING, FAILED, POISONED, REJECTED, GONE,
)  # fmt: skip


def test_the_whole_way_up_and_down() -> None:
    state, effects = begin(ASKED, at(0), LIMITS)
    assert isinstance(state, Fetching)
    assert effects == (Fetch(), WakeAt(state.until))
    state, effects = step(state, Fetched("/cache/x"), at(1), LIMITS)
    assert isinstance(state, Loading)
    assert effects == (StartWorker("/cache/x"), WakeAt(state.until))
    state, effects = step(state, Warmup(), at(2), LIMITS)
    assert isinstance(state, Warming)
    assert effects == (WakeAt(state.until),)
    state, effects = step(state, Warmed(SERVICE), at(3), LIMITS)
    assert (state, effects) == (Ready(ASKED, Record(), at(3), SERVICE), ())
    state, effects = step(state, Drain(), at(4), LIMITS)
    assert isinstance(state, Draining)
    assert effects == (AwaitIdle(), WakeAt(state.until))
    assert step(state, Idle(), at(4.1), LIMITS) == (state, ()), "peers may still hold the old routes"
    assert step(state, Idle(), at(5), LIMITS) == (Gone(ASKED, Record(), at(5)), (StopWorker(),))


@pytest.mark.parametrize(
    ("state", "event", "expected", "effects"),
    [
        (FETCHING, Drain(), Gone(ASKED, Record(), at(10)), (StopFetch(),)),
        (LOADING, Drain(), Gone(ASKED, Record(), at(10)), (StopWorker(),)),
        (WARMING, Drain(), Gone(ASKED, Record(), at(10)), (StopWorker(),)),
        (FAILED, Drain(), Gone(ASKED, Record(attempts=1), at(10)), ()),
        (POISONED, Drain(), Gone(ASKED, Record(crashes=3), at(10)), ()),
        (LOADING, Warmed(SERVICE), Ready(ASKED, Record(), at(10), SERVICE), ()),
        (DRAINING, Resume(ASKED), Ready(ASKED, Record(), at(10), SERVICE), ()),
        (DRAINING, KILL, Gone(ASKED, Record(), at(10)), ()),
        (DRAINING, CRASH, Gone(ASKED, Record(), at(10)), ()),
        (READY, Fetched("late"), READY, ()),
        (READY, Warmed(SERVICE), READY, ()),
        (GONE, CRASH, GONE, ()),
        (FETCHING, CRASH, FETCHING, ()),
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
    failed, effects = step(state, Tick(), state.until, LIMITS)
    assert isinstance(failed, Failed)
    assert failed.refusal.code is code
    assert effects == (first, WakeAt(failed.retry_at))
    again, effects = step(failed, Tick(), failed.retry_at, LIMITS)
    assert isinstance(again, Fetching)
    assert again.record == Record(attempts=1, restarts=1)
    assert effects[0] == Fetch()


def test_draining_ends_by_its_deadline_with_requests_in_flight() -> None:
    assert step(DRAINING, Tick(), DRAINING.until, LIMITS) == (Gone(ASKED, Record(), at(34)), (StopWorker(),))


def test_time_is_looked_at_before_the_event() -> None:
    late, effects = step(LOADING, Warmed(SERVICE), LOADING.until, LIMITS)
    assert isinstance(late, Failed), "readiness that comes after the deadline is not readiness"
    assert effects[0] == StopWorker()


def test_a_kill_from_outside_reloads_at_once_and_counts_nothing() -> None:
    state: State = READY
    for number in range(1, 11):
        state, effects = step(state, KILL, at(10 * number), LIMITS)
        assert isinstance(state, Fetching)
        assert state.record == Record(restarts=number)
        assert effects[0] == Fetch()
        state, _ = step(state, Fetched("x"), at(10 * number), LIMITS)
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
        state, _ = step(state, Tick(), at(now), LIMITS)
        state, _ = step(state, Fetched("x"), at(now), LIMITS)
    state, effects = step(state, CRASH, at(now), LIMITS)
    assert isinstance(state, Poisoned)
    assert state.refusal.code is Code.POISONED
    assert effects == (), "nothing is tried again by itself"
    assert step(state, Tick(), at(now + 1e6), LIMITS) == (state, ())
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code, observed.retry_at) == (Phase.FAILED, Code.POISONED, None)


def test_long_good_service_forgives_earlier_crashes() -> None:
    crashed = replace(READY, record=Record(attempts=4, crashes=2, restarts=7))
    soon, _ = step(crashed, CRASH, at(READY.since + 1), LIMITS)
    assert isinstance(soon, Poisoned)
    later, _ = step(crashed, CRASH, at(READY.since + LIMITS.settled_s), LIMITS)
    assert isinstance(later, Failed)
    assert later.record == Record(attempts=1, crashes=1, restarts=7)


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


def test_back_off_doubles_up_to_its_cap_and_differs_by_assignment() -> None:
    waits: list[float] = []
    state: State = FETCHING
    now = at(0)
    for _ in range(12):
        state, _ = step(state, FetchFailed(NOT_FOUND), now, LIMITS)
        assert isinstance(state, Failed)
        waits.append(state.retry_at - now)
        now = state.retry_at
        state, _ = step(state, Tick(), now, LIMITS)
    for attempt, wait in enumerate(waits):
        ceiling = min(LIMITS.retry_cap_s, LIMITS.retry_base_s * 2**attempt)
        assert ceiling / 2 <= wait <= ceiling
    other, _ = begin(assignment("a-2"), at(0), LIMITS)
    other, _ = step(other, FetchFailed(NOT_FOUND), at(0), LIMITS)
    assert isinstance(other, Failed)
    assert other.retry_at != waits[0]


def test_adopted_as_it_is() -> None:
    assert adopt(ASKED, SERVICE, at(7), LIMITS) == (Ready(ASKED, Record(), at(7), SERVICE), ())
    state, effects = adopt(ASKED, None, at(7), LIMITS)
    assert isinstance(state, Loading)
    assert effects == (WakeAt(state.until),), "nothing is started: the worker is already at it"


def test_a_replica_that_takes_over_is_ready_once_it_has_passed() -> None:
    warming = replace(WARMING, asked=MOVING)
    state, effects = step(warming, Warmed(SERVICE), at(3), LIMITS)
    assert (state, effects) == (VERIFYING, (Verify(VERIFICATION), WakeAt(at(33))))
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code) == (Phase.VERIFYING, Code.WAITING_FOR_VERIFY)
    assert observed.gives_up_at == Wall(VERIFYING.until)
    state, effects = step(state, Judged(PASSED), at(4), LIMITS)
    assert (state, effects) == (Ready(MOVING, Record(verdict=PASSED), at(4), SERVICE), ())
    assert observe(state, epoch_wall=Seconds(0.0)).verdict == PASSED


def test_what_is_staged_stops_at_its_bytes_and_loads_them_when_it_is_to_serve() -> None:
    asked = replace(ASKED, staged=True)
    state, _ = begin(asked, at(0), LIMITS)
    state, effects = step(state, Fetched("p"), at(1), LIMITS)
    assert (phase(state), effects) == (Phase.STAGED, ())
    state, effects = step(state, Resume(ASKED), at(50), LIMITS)
    assert isinstance(state, Fetching)
    assert effects[0] == Fetch(), "which finds the bytes where they are"
    state, effects = step(state, Fetched("p"), at(50), LIMITS)
    assert effects[0] == StartWorker("p")


def test_one_that_serves_lets_go_of_its_worker_when_it_is_to_be_staged() -> None:
    ready = Ready(ASKED, Record(), at(0), SERVICE)
    state, effects = step(ready, Resume(replace(ASKED, staged=True)), at(1), LIMITS)
    assert (phase(state), effects[0]) == (Phase.DRAINING, AwaitIdle())
    staged, effects = step(state, Idle(), at(2), LIMITS)
    assert (phase(staged), effects) == (Phase.STAGED, (StopWorker(),))
    back, _ = step(state, Resume(ASKED), at(2), LIMITS)
    assert phase(back) is Phase.READY
    unwanted, _ = step(state, Drain(), at(2), LIMITS)
    gone, _ = step(unwanted, Idle(), at(3), LIMITS)
    assert phase(gone) is Phase.GONE


def test_without_a_verification_nothing_is_verified() -> None:
    for state in (LOADING, WARMING):
        assert step(state, Warmed(SERVICE), at(3), LIMITS) == (Ready(ASKED, Record(), at(3), SERVICE), ())


def test_what_differs_is_refused_for_good_and_another_verification_begins_anew() -> None:
    state, effects = step(VERIFYING, Judged(DIFFERS), at(4), LIMITS)
    assert isinstance(state, Rejected)
    assert effects == (StopWorker(),)
    observed = observe(state, epoch_wall=Seconds(0.0))
    assert (observed.phase, observed.code, observed.verdict) == (Phase.FAILED, Code.VERIFY_FAILED, DIFFERS)
    assert observed.retry_at is None
    assert step(state, Tick(), at(1e6), LIMITS) == (state, ()), "nothing is tried again by itself"
    assert step(state, Resume(replace(MOVING, revision=2)), at(5), LIMITS)[1] == (), "the same verification"
    for other in (None, verification("m-2")):
        again, effects = step(state, Resume(replace(MOVING, verification=other)), at(5), LIMITS)
        assert isinstance(again, Fetching)
        assert again.record == Record(), "what was is not held against it"
        assert effects[0] == Fetch()


def test_what_differs_is_let_in_where_the_policy_only_wants_to_know() -> None:
    advised = replace(VERIFICATION, advisory=True)
    moving = replace(MOVING, verification=advised)
    verifying = replace(VERIFYING, asked=moving, verification=advised)
    state, effects = step(verifying, Judged(DIFFERS), at(4), LIMITS)
    assert (state, effects) == (Ready(moving, Record(verdict=DIFFERS), at(4), SERVICE), ())
    assert observe(state, epoch_wall=Seconds(0.0)).verdict == DIFFERS
    again = replace(WARMING, asked=moving, record=Record(verdict=DIFFERS))
    assert isinstance(step(again, Warmed(SERVICE), at(9), LIMITS)[0], Ready), "known after a restart of its worker too"
    for unseen in (
        replace(DIFFERS, code=Code.VERIFY_IMPOSSIBLE),
        replace(DIFFERS, samples=0),  # it crashed
    ):
        assert isinstance(step(verifying, Judged(unseen), at(4), LIMITS)[0], Rejected)


def test_what_cannot_be_compared_yet_is_tried_again_until_its_time_is_over() -> None:
    state: State = VERIFYING
    effects: tuple[object, ...] = ()
    now, tries = at(3), 0
    while isinstance(state, Verifying):
        state, effects = step(state, Unjudged(SILENT), now, LIMITS)
        assert isinstance(state, Verifying)
        assert state.again_at is not None
        assert effects == (WakeAt(min(state.again_at, VERIFYING.until)),)
        assert step(state, Unjudged(SILENT), now, LIMITS) == (state, ()), "none is under way"
        now = at(min(state.again_at, VERIFYING.until))
        state, effects = step(state, Tick(), now, LIMITS)
        tries += effects[:1] == (Verify(VERIFICATION),)
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
    state, _ = step(replace(WARMING, asked=asked), Warmed(SERVICE), at(3), LIMITS)
    state, _ = step(state, Tick(), at(3), LIMITS)
    assert isinstance(state, Rejected)


def test_a_passed_verdict_outlives_its_worker_and_its_supervisor() -> None:
    state, _ = step(VERIFYING, Judged(PASSED), at(4), LIMITS)
    state, _ = step(state, KILL, at(5), LIMITS)
    state, _ = step(state, Fetched("x"), at(6), LIMITS)
    state, effects = step(state, Warmed(SERVICE), at(7), LIMITS)
    assert (type(state), effects) == (Ready, ()), "it loaded the same: its source may be gone by now"
    state, effects = adopt(MOVING, SERVICE, at(8), LIMITS, PASSED)
    assert (type(state), effects) == (Ready, ())
    for other in (None, DIFFERS, verdict("m-2")):
        state, effects = adopt(MOVING, SERVICE, at(8), LIMITS, other)
        assert isinstance(state, Verifying), "judged for another move, or not at all"
        assert effects[0] == Verify(VERIFICATION)
    loading, _ = adopt(MOVING, None, at(8), LIMITS, PASSED)
    assert step(loading, Warmed(SERVICE), at(9), LIMITS)[0] == Ready(MOVING, Record(verdict=PASSED), at(9), SERVICE)


@pytest.mark.parametrize(
    ("event", "expected", "effects"),
    [
        (Drain(), Gone(MOVING, Record(), at(10)), (StopVerify(), StopWorker())),
        (Judged(verdict("m-2")), VERIFYING, ()),
        (Resume(replace(MOVING, revision=2)), replace(VERIFYING, asked=replace(MOVING, revision=2)), ()),
        (Resume(ASKED), Ready(ASKED, Record(), at(10), SERVICE), (StopVerify(),)),
    ],
)
def test_while_it_is_verified(event: Event, expected: State, effects: tuple[object, ...]) -> None:
    assert step(VERIFYING, event, at(10), LIMITS) == (expected, effects)


def test_another_verification_meanwhile_takes_the_place_of_the_first() -> None:
    other = verification("m-2")
    state, effects = step(VERIFYING, Resume(replace(MOVING, verification=other)), at(10), LIMITS)
    assert isinstance(state, Verifying)
    assert effects == (StopVerify(), Verify(other), WakeAt(state.until))
    assert step(state, Judged(PASSED), at(11), LIMITS) == (state, ()), "that was the first one's"


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
    assert effects[:2] == (StopVerify(), Fetch())


HERE = verification("r-1", against=Against.REFERENCE, recording=Recording.HERE)
AWAITED = replace(HERE, recording=Recording.AWAITED)
BESIDE = replace(HERE, beside=True)


def test_one_that_waits_for_a_reference_compares_nothing_before_it_is_there() -> None:
    asked = assignment(verification=AWAITED)
    waiting, effects = step(replace(WARMING, asked=asked), Warmed(SERVICE), at(5), LIMITS)
    assert isinstance(waiting, Verifying)
    assert effects == (WakeAt(waiting.until),)
    assert "recorded first" in observe(waiting, epoch_wall=Seconds(0.0)).reason
    chosen, effects = step(waiting, Resume(assignment(verification=HERE)), at(6), LIMITS)
    assert isinstance(chosen, Verifying)
    assert effects == (StopVerify(), Verify(HERE), WakeAt(chosen.until))
    late, _ = step(waiting, Tick(), waiting.until, LIMITS)
    assert isinstance(late, Rejected)
    assert late.refusal.code is Code.VERIFY_IMPOSSIBLE


def test_one_that_serves_records_beside_that_and_again_where_it_was_dropped() -> None:
    beside = assignment(verification=BESIDE)
    state, effects = step(READY, Resume(beside), at(4), LIMITS)
    assert effects == (Verify(BESIDE),)
    state, _ = step(state, Judged(verdict("r-1")), at(5), LIMITS)
    state, effects = step(state, Resume(ASKED), at(6), LIMITS)
    assert effects == ()
    state, effects = step(state, Resume(beside), at(7), LIMITS)
    assert (type(state), effects) == (Ready, (Verify(BESIDE),))


def test_what_ended_while_it_was_recorded_is_not_recorded_once_more() -> None:
    ready = Ready(assignment(verification=BESIDE), Record(), at(0), SERVICE)
    state, _ = step(ready, KILL, at(1), LIMITS)
    assert state.record.verdict is None
    state, _ = step(ready, CRASH, at(1), LIMITS)
    assert isinstance(state, Failed)
    assert state.record.verdict is not None
    assert not state.record.verdict.passed
    again, effects = step(replace(WARMING, asked=state.asked, record=state.record), Warmed(SERVICE), at(5), LIMITS)
    assert (type(again), effects) == (Ready, ())


events = st.one_of(
    st.just(Judged(PASSED)),
    st.just(Judged(DIFFERS)),
    st.just(Unjudged(SILENT)),
    st.just(Resume(MOVING)),
    st.just(Fetched("x")),
    st.just(FetchFailed(NOT_FOUND)),
    st.just(LoadFailed(Refusal(Code.LOAD_FAILED, "bad"))),
    st.just(LoadFailed(Refusal(Code.MODEL_DIGEST, "bad"))),
    st.just(Warmup()),
    st.just(Warmed(SERVICE)),
    st.just(CRASH),
    st.just(KILL),
    st.just(Drain()),
    st.just(Resume(ASKED)),
    st.just(Resume(replace(ASKED, staged=True))),
    st.just(Idle()),
    st.just(Tick()),
)
stories = st.lists(st.tuples(st.floats(0.0, 200.0), events), max_size=40)


@given(st.sampled_from((ASKED, MOVING, replace(ASKED, staged=True))), stories)
def test_laws_of_any_story(asked: Assignment, story: list[tuple[float, Event]]) -> None:
    """Workers, fetches and verifications are started and stopped in pairs; every wait has an end that somebody wakes
    for; and what has to be verified is never ready without a verdict that it passed."""
    now = 0.0
    state, effects = begin(asked, at(now), LIMITS)
    worker = fetch = verify = False
    wake: Elapsed | None = None
    for passed, event in ((0.0, Tick()), *story):
        now += passed
        if isinstance(event, Fetched | FetchFailed) and not fetch:
            event = Tick()  # only a fetch that runs can end
        if isinstance(event, Judged | Unjudged) and not verify:
            event = Tick()
        state_before = state
        state, more = step(state, event, at(now), LIMITS)
        effects = effects + more
        if isinstance(event, Exited):
            worker = False
        if isinstance(event, Fetched | FetchFailed):
            fetch = False
        if isinstance(event, Judged | Unjudged):
            verify = False
        for effect in effects:
            match effect:
                case Fetch():
                    fetch = True
                case StopFetch():
                    fetch = False
                case StartWorker():
                    assert not worker, "two workers of one assignment"
                    worker, fetch = True, False
                case StopWorker():
                    worker = False
                case Verify():
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
            case Verifying():
                assert wake == min(state.until, state.again_at or state.until) > now
                assert verify == (state.again_at is None)
            case Failed():
                assert wake == state.retry_at
                assert not worker
            case Gone():
                assert not worker or isinstance(state_before, Gone)
                assert not fetch
                assert not verify
            case Ready():
                judged, asked_for = state.record.verdict, state.asked.verification
                came_up = not isinstance(state_before, Ready | Draining)
                assert not state.asked.staged
                assert not came_up or asked_for is None or (judged is not None and judged.passed)
            case Staged():
                assert state.asked.staged
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
    if isinstance(event, Drain | Resume | Tick | Fetched | Warmup):
        assert phase(twice) == phase(once)
        if not isinstance(event, Warmup):
            assert effects == ()


@given(st.sampled_from(STATES), st.floats(-1e9, 1e9))
def test_every_wait_and_failure_says_why(state: State, offset: float) -> None:
    observed = observe(state, epoch_wall=Seconds(offset), in_flight=3)
    assert observed.phase == phase(state)
    assert observed.since == state.since + offset
    if observed.phase in (Phase.READY, Phase.STAGED, Phase.GONE):
        assert observed.code is None
    else:
        assert observed.code is not None
        assert observed.reason
    assert (observed.measured is not None) == isinstance(state, Verifying | Ready | Draining)

"""The state machine of one assignment on one node.

The path is fetching -> loading -> warming -> (verifying ->) ready -> draining -> gone, and failed(code, retry_at) on
the way. A staged assignment stops when its bytes are on disk: fetching -> staged.

`step` is the whole behaviour. The supervisor passes it events and performs the effects that it returns. Every
transitional state has a deadline, and each state requests its own wake-up when it is entered.
"""

from dataclasses import dataclass, replace

from shoal.types.assignment import Assignment, Measured, Observed, Phase, Served
from shoal.types.backoff import delay
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.latency import Counts
from shoal.types.migration import DRAIN_S, Against, Recording, Verdict, Verification, admits
from shoal.types.profile import TensorSpec
from shoal.types.units import Elapsed, Seconds, Wall


@dataclass(frozen=True, slots=True)
class AssignmentLimits:
    """Deadlines and back-off of one assignment. Fetching and loading get more time for a larger model."""

    # Base time to fetch, seconds; the model's size over `fetch_bytes_per_s` comes on top.
    fetch_s: float = 120.0
    # Slowest fetch that is still in time, bytes per second.
    fetch_bytes_per_s: float = 256 * 1024
    # Base time to load, seconds; the model's size over `load_bytes_per_s` comes on top.
    load_s: float = 120.0
    # Slowest load that is still in time, bytes per second.
    load_bytes_per_s: float = 10e6
    # Longest warm-up, seconds.
    warm_s: float = 300.0
    # Longest drain, seconds; then the worker is stopped whatever is in flight.
    drain_s: float = DRAIN_S
    # Shortest drain, seconds: peers may still use the routes of a moment ago.
    drain_grace_s: float = 0.5
    # Base of the back-off after a failure, seconds; it doubles with each failure in a row.
    retry_base_s: float = 0.5
    # Longest back-off after a failure, seconds.
    retry_cap_s: float = 60.0
    # Base of the back-off between two attempts to verify, seconds; attempts end with the verification's deadline.
    verify_retry_base_s: float = 0.25
    # Longest back-off between two attempts to verify, seconds.
    verify_retry_cap_s: float = 2.0
    # Crashes by its own fault after which the assignment is poisoned on this node.
    poison_after: int = 3
    # Seconds in READY after which earlier crashes and failures no longer count.
    crash_reset_s: float = 600.0


@dataclass(frozen=True, slots=True)
class AssignmentRecord:
    """Counters and verdict of an assignment that outlive its phases."""

    # Failures in a row.
    attempts: int = 0
    # Crashes of the worker by its own fault.
    crashes: int = 0
    # All reloads, whatever their cause.
    restarts: int = 0
    # Result of its verification, None before one. It holds for every worker that loads the same here.
    verdict: Verdict | None = None
    # True if every one of `crashes` was during a load, with no request in flight; False where there was none.
    crashed_at_load: bool = False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the worker reported when it became ready."""

    # What loading and warming cost here.
    measured: Measured
    # The model's inputs, as the runtime lists them.
    inputs: tuple[TensorSpec, ...]
    # The model's outputs, as the runtime lists them.
    outputs: tuple[TensorSpec, ...]
    # Why it serves without a warm-up; empty where it had one.
    no_warmup_reason: str = ""


@dataclass(frozen=True, slots=True)
class Fetching:
    """Waits for the model's bytes; it fails with FETCH_FAILED at `until` (elapsed clock)."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Loading:
    """Waits for the worker to load the model; it fails with LOAD_TIMEOUT at `until` (elapsed clock)."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Warming:
    """The worker runs its warm-up; it fails with WARMUP_FAILED at `until` (elapsed clock)."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Verifying:
    """Warm; takes no request before it has passed `verification`."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # Deadline of the verification, elapsed clock.
    until: Elapsed
    # What its worker reported.
    loaded_model: LoadedModel
    # The verification that it must pass.
    verification: Verification
    # Attempts that came to no verdict.
    tries: int = 0
    # Why the last attempt came to no verdict; None before the first such attempt.
    last_refusal: Refusal | None = None
    # When the next attempt begins, elapsed clock; None while one runs.
    retry_at: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Takes requests. If `assignment.verification.beside` is set, its answers are also the reference for another
    replica."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # What its worker reported.
    loaded_model: LoadedModel
    # Attempts at the comparison that runs while it serves, without a verdict.
    tries: int = 0
    # When the next attempt at that comparison begins, elapsed clock; None while one runs or none is needed.
    retry_at: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The bytes are on disk and nothing is loaded, as desired."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed


@dataclass(frozen=True, slots=True)
class Draining:
    """Finishes what is in flight. Afterwards it is Staged if `assignment.staged`, else Gone."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # What its worker reported; the drain may be cancelled and it is Ready again.
    loaded_model: LoadedModel
    # Earliest end of the drain, elapsed clock, even where nothing is in flight.
    not_before: Elapsed
    # Latest end of the drain, elapsed clock.
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Failed:
    """Waits for its next attempt, with or without the bytes on disk."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When it failed, elapsed clock.
    since: Elapsed
    # Why it failed.
    refusal: Refusal
    # When the next attempt begins, elapsed clock.
    retry_at: Elapsed


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Failed for good on this node, by crashes or by an error that does not go away. Only another desired
    set ends it."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Rejected:
    """Did not pass its verification. It is tried here only with another verification, or with none."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase, with the verdict.
    record: AssignmentRecord
    # When it was rejected, elapsed clock.
    since: Elapsed
    # Why it was rejected.
    refusal: Refusal
    # The verification that it did not pass.
    verification: Verification


@dataclass(frozen=True, slots=True)
class Gone:
    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed


State = Fetching | Loading | Warming | Verifying | Ready | Staged | Draining | Failed | Poisoned | Rejected | Gone


@dataclass(frozen=True, slots=True)
class ModelFetched:
    path: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Not admitted, or refused by the runtime; the worker process itself did not die."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class WarmupStarted:
    """The model is loaded; the worker runs its warm-up."""


@dataclass(frozen=True, slots=True)
class Warmed:
    loaded_model: LoadedModel


@dataclass(frozen=True, slots=True)
class VerdictReached:
    """The verification ended, passed or not."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class NoVerdict:
    """The attempt to verify came to no verdict: the replica or reference to compare with does not answer,
    or not yet."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker process ended."""

    # False if it was killed from outside, which does not count as a crash.
    own_fault: bool
    refusal: Refusal
    # True if it was loading or warming up, with no request in flight in its process.
    at_load: bool = False


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The assignment is not desired here."""


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """The assignment is desired with these terms, again or still."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Idle:
    """No request is in flight to the worker."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


Event = (
    ModelFetched
    | FetchFailed
    | LoadFailed
    | WarmupStarted
    | Warmed
    | VerdictReached
    | NoVerdict
    | Exited
    | DrainRequested
    | ResumeRequested
    | Idle
    | TimerFired
)


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Fetch and verify the model's bytes; the supervisor answers with ModelFetched or FetchFailed."""


@dataclass(frozen=True, slots=True)
class StopFetch:
    pass


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Admit by live memory, then start; the supervisor answers with LoadFailed, WarmupStarted, Warmed or Exited."""

    path: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    pass


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Start a verification, in place of one that runs; the supervisor answers with VerdictReached or NoVerdict."""

    verification: Verification


@dataclass(frozen=True, slots=True)
class StopVerify:
    pass


@dataclass(frozen=True, slots=True)
class AwaitIdle:
    """Send Idle whenever no request is in flight to the worker, until it is gone."""


@dataclass(frozen=True, slots=True)
class DiscardBytes:
    """The cached bytes do not match the model's digest: set them aside."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send TimerFired at `at`. A later WakeAt replaces an earlier one."""

    at: Elapsed


Effect = (
    StartFetch | StopFetch | StartWorker | StopWorker | StartVerify | StopVerify | AwaitIdle | DiscardBytes | WakeAt
)
Step = tuple[State, tuple[Effect, ...]]


def begin(
    assignment: Assignment, now: Elapsed, limits: AssignmentLimits, record: AssignmentRecord | None = None
) -> Step:
    """Start a new assignment, or one more attempt, with the fetch."""
    until = Elapsed(now + limits.fetch_s + assignment.model_bytes / limits.fetch_bytes_per_s)
    return Fetching(assignment, record or AssignmentRecord(), now, until), (StartFetch(), WakeAt(until))


def adopt(
    assignment: Assignment,
    loaded_model: LoadedModel | None,
    now: Elapsed,
    limits: AssignmentLimits,
    verdict: Verdict | None = None,
) -> Step:
    """The state of an assignment whose worker an earlier supervisor started: ready, to be verified, or still loading.

    `loaded_model` is None while that worker still loads. `verdict` is the earlier result of its verification.
    """
    record = AssignmentRecord(verdict=verdict)
    if assignment.staged:
        return Staged(assignment, record, now), (StopWorker(),)
    if loaded_model is not None:
        return _after_warmup(assignment, record, loaded_model, now)
    until = _load_deadline(assignment, now, limits)
    return Loading(assignment, record, now, until), (WakeAt(until),)


def step(state: State, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    """Return the next state and the effects to perform.

    Deadlines are checked before the event is applied. An event that does not matter to a state changes nothing.
    """
    state, due = _expire(state, now, limits)
    state, effects = _apply(state, event, now, limits)
    return state, due + effects


def _expire(state: State, now: Elapsed, limits: AssignmentLimits) -> Step:
    match state:
        case Fetching() if now >= state.until:
            return _fail(state, Refusal(Code.FETCH_FAILED, "not fetched in time"), now, limits, StopFetch())
        case Loading() if now >= state.until:
            return _fail(state, Refusal(Code.LOAD_TIMEOUT, "not loaded in time"), now, limits, StopWorker())
        case Warming() if now >= state.until:
            return _fail(state, Refusal(Code.WARMUP_FAILED, "not warm in time"), now, limits, StopWorker())
        case Verifying() if now >= state.until:
            why = f"not verified within {state.verification.within_s:g}s: {state.last_refusal or 'no answer yet'}"
            return _give_up_verifying(state, Code.VERIFY_IMPOSSIBLE, why, now)
        case Verifying(retry_at=again_at) if again_at is not None and now >= again_at:
            return replace(state, retry_at=None), (StartVerify(state.verification), WakeAt(state.until))
        case Ready(retry_at=again_at) if again_at is not None and now >= again_at:
            return replace(state, retry_at=None), _verify_while_serving(state.assignment, state.record)
        case Draining() if now >= state.until:
            return _after_drain(state, now), (StopWorker(),)
        case Failed() if now >= state.retry_at:
            return begin(state.assignment, now, limits, replace(state.record, restarts=state.record.restarts + 1))
        case (
            Fetching()
            | Loading()
            | Warming()
            | Verifying()
            | Ready()
            | Staged()
            | Draining()
            | Failed()
            | Poisoned()
            | Rejected()
            | Gone()
        ):
            return state, ()


def _apply(state: State, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match state:
        case Fetching():
            match event:
                case ModelFetched() if state.assignment.staged:
                    return Staged(state.assignment, state.record, now), ()
                case ModelFetched(path):
                    until = _load_deadline(state.assignment, now, limits)
                    return Loading(state.assignment, state.record, now, until), (StartWorker(path), WakeAt(until))
                case FetchFailed(refusal):
                    return _fail(state, refusal, now, limits)
                case DrainRequested():
                    return Gone(state.assignment, state.record, now), (StopFetch(),)
                case ResumeRequested(asked):
                    return replace(state, assignment=asked), ()
                case (
                    LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Exited()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Loading() | Warming():
            match event:
                case WarmupStarted():
                    until = Elapsed(now + limits.warm_s)
                    return Warming(state.assignment, state.record, now, until), (WakeAt(until),)
                case Warmed(service):
                    return _after_warmup(state.assignment, state.record, service, now)
                case LoadFailed(refusal) if refusal.code is Code.MODEL_DIGEST:
                    return _fail(state, refusal, now, limits, StopWorker(), DiscardBytes())
                case LoadFailed(refusal) if refusal.code in PERMANENT_LOAD_FAILURES:
                    return Poisoned(state.assignment, state.record, now, refusal), (StopWorker(),)
                case LoadFailed(refusal):
                    return _fail(state, refusal, now, limits, StopWorker())
                case Exited():
                    return _on_exit(state, event, now, limits)
                case DrainRequested():
                    return Gone(state.assignment, state.record, now), (StopWorker(),)
                case ResumeRequested(asked) if asked.staged:
                    return Staged(asked, state.record, now), (StopWorker(),)
                case ResumeRequested(asked):
                    return replace(state, assignment=asked), ()
                case ModelFetched() | FetchFailed() | VerdictReached() | NoVerdict() | Idle() | TimerFired():
                    return state, ()
        case Verifying():
            match event:
                case VerdictReached(verdict) if verdict.migration == state.verification.migration:
                    return _apply_verdict(state, verdict, now)
                case NoVerdict(refusal) if state.retry_at is None:
                    wait = delay(
                        state.assignment.id,
                        state.tries,
                        base_s=limits.verify_retry_base_s,
                        cap_s=limits.verify_retry_cap_s,
                    )
                    again_at = Elapsed(now + wait)
                    state = replace(state, tries=state.tries + 1, last_refusal=refusal, retry_at=again_at)
                    return state, (WakeAt(Elapsed(min(again_at, state.until))),)
                case Exited(own_fault, refusal) if own_fault and refusal.code is not Code.OUT_OF_MEMORY:
                    # A generated input may have caused the crash, so it does not count towards poisoning the model.
                    return _give_up_verifying(
                        state, Code.VERIFY_FAILED, f"it ended while it was compared: {refusal}", now
                    )
                case Exited():
                    after, effects = _on_exit(state, event, now, limits)
                    return after, (StopVerify(), *effects)
                case DrainRequested():
                    return Gone(state.assignment, state.record, now), (StopVerify(), StopWorker())
                case ResumeRequested(asked) if asked.staged:
                    return Staged(asked, state.record, now), (StopVerify(), StopWorker())
                case ResumeRequested(asked) if asked.verification == state.verification:
                    return replace(state, assignment=asked), ()
                case ResumeRequested(asked):
                    after, effects = _after_warmup(asked, state.record, state.loaded_model, now)
                    return after, (StopVerify(), *effects)
                case (
                    VerdictReached()
                    | NoVerdict()
                    | ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Ready():
            match event:
                case Exited(own_fault):
                    if now - state.since >= limits.crash_reset_s:
                        state = replace(
                            state, record=replace(state.record, attempts=0, crashes=0, crashed_at_load=False)
                        )
                    verification = state.assignment.verification
                    if own_fault and verification is not None and verification.recording is Recording.HERE:
                        verdict = _failed_verdict(verification, Code.VERIFY_FAILED, "it ended while it was recorded")
                        state = replace(state, record=replace(state.record, verdict=verdict))
                    return _on_exit(state, event, now, limits)
                case DrainRequested():
                    return _drain(state, now, limits)
                case ResumeRequested(asked) if asked.staged:
                    return _drain(replace(state, assignment=asked), now, limits)
                case ResumeRequested(asked) if (
                    asked.verification != state.assignment.verification and _should_verify_while_serving(asked)
                ):
                    return replace(state, assignment=asked, tries=0, retry_at=None), _verify_while_serving(
                        asked, state.record
                    )
                case ResumeRequested(asked):
                    return replace(state, assignment=asked), ()
                case VerdictReached(verdict) if _should_verify_while_serving(state.assignment, verdict.migration):
                    return replace(state, record=replace(state.record, verdict=verdict)), ()
                case NoVerdict() if _should_verify_while_serving(state.assignment) and state.retry_at is None:
                    wait = delay(
                        state.assignment.id,
                        state.tries,
                        base_s=limits.verify_retry_base_s,
                        cap_s=limits.verify_retry_cap_s,
                    )
                    again_at = Elapsed(now + wait)
                    return replace(state, tries=state.tries + 1, retry_at=again_at), (WakeAt(again_at),)
                case (
                    ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Staged():
            match event:
                case DrainRequested():
                    return Gone(state.assignment, state.record, now), ()
                case ResumeRequested(asked) if asked.staged:
                    return replace(state, assignment=asked), ()
                case ResumeRequested(asked):
                    return begin(asked, now, limits, state.record)
                case (
                    ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Exited()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Draining():
            match event:
                case Idle() if now >= state.not_before:
                    return _after_drain(state, now), (StopWorker(),)
                case Exited():
                    return _after_drain(state, now), ()
                case DrainRequested():
                    return replace(state, assignment=replace(state.assignment, staged=False)), ()
                case ResumeRequested(asked) if asked.staged:
                    return replace(state, assignment=asked), ()
                case ResumeRequested(asked):
                    return Ready(asked, state.record, now, state.loaded_model), ()
                case (
                    ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Failed() | Poisoned() | Rejected():
            match event:
                case DrainRequested():
                    return Gone(state.assignment, state.record, now), ()
                case ResumeRequested(asked) if isinstance(state, Rejected) and asked.verification != state.verification:
                    return begin(asked, now, limits)
                case ResumeRequested(asked):
                    return replace(state, assignment=asked), ()
                case (
                    ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Exited()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()
        case Gone():
            match event:
                case ResumeRequested(asked):
                    return begin(asked, now, limits)
                case (
                    ModelFetched()
                    | FetchFailed()
                    | LoadFailed()
                    | WarmupStarted()
                    | Warmed()
                    | VerdictReached()
                    | NoVerdict()
                    | Exited()
                    | DrainRequested()
                    | Idle()
                    | TimerFired()
                ):
                    return state, ()


def _load_deadline(assignment: Assignment, now: Elapsed, limits: AssignmentLimits) -> Elapsed:
    return Elapsed(now + limits.load_s + assignment.model_bytes / limits.load_bytes_per_s)


def _after_warmup(assignment: Assignment, record: AssignmentRecord, loaded_model: LoadedModel, now: Elapsed) -> Step:
    """Ready, unless a verification must pass first."""
    if _should_verify_while_serving(assignment):
        return Ready(assignment, record, now, loaded_model), _verify_while_serving(assignment, record)
    verification = assignment.verification
    if verification is not None and verification.against is Against.NONE:
        verification = None
    if verification is None or _has_passed(verification, record.verdict):
        return Ready(assignment, record, now, loaded_model), ()
    within_s = verification.within_s if verification.within_s > 0 else 0.0  # NaN is no deadline
    until = Elapsed(now + within_s)
    warm = Verifying(assignment, record, now, until, loaded_model, verification)
    if verification.recording is Recording.AWAITED:
        return warm, (WakeAt(until),)
    return warm, (StartVerify(verification), WakeAt(until))


def _has_passed(verification: Verification, verdict: Verdict | None) -> bool:
    if verdict is None or verdict.migration != verification.migration:
        return False
    return admits(verdict, advisory=verification.advisory)


def _should_verify_while_serving(assignment: Assignment, migration: str = "") -> bool:
    """Whether this replica judges another's answers by its own while it serves; of `migration` only, if given."""
    verification = assignment.verification
    return verification is not None and verification.beside and migration in ("", verification.migration)


def _verify_while_serving(assignment: Assignment, record: AssignmentRecord) -> tuple[Effect, ...]:
    """Start the verification that runs while the replica serves, unless it is done.

    A recording that passed is requested again, because its reference may have been removed.
    """
    verification, verdict = assignment.verification, record.verdict
    if verification is None:
        return ()
    if verdict is None or verdict.migration != verification.migration:
        return (StartVerify(verification),)
    return (StartVerify(verification),) if verdict.passed and verification.recording is Recording.HERE else ()


def _apply_verdict(state: Verifying, verdict: Verdict, now: Elapsed) -> Step:
    record = replace(state.record, verdict=verdict)
    if admits(verdict, advisory=state.verification.advisory):
        return Ready(state.assignment, record, now, state.loaded_model), ()
    code = verdict.code or Code.VERIFY_FAILED
    refusal = Refusal(code, verdict.reason, "the answers of what it takes over from", "see the verdict; move elsewhere")
    return Rejected(state.assignment, record, now, refusal, state.verification), (StopWorker(),)


def _give_up_verifying(state: Verifying, code: Code, why: str, now: Elapsed) -> Step:
    """End the verification without a comparison."""
    after, effects = _apply_verdict(state, _failed_verdict(state.verification, code, why), now)
    return after, (StopVerify(), *effects)


def _failed_verdict(verification: Verification, code: Code, why: str) -> Verdict:
    """A verdict after which nothing was compared."""
    return Verdict(verification.migration, False, code, why, verification.against, verification.inputs, 0)


def _fail(state: State, refusal: Refusal, now: Elapsed, limits: AssignmentLimits, *first: Effect) -> Step:
    """Go to Failed; the back-off doubles with each failure in a row."""
    record = replace(state.record, attempts=state.record.attempts + 1)
    wait = delay(state.assignment.id, record.attempts - 1, base_s=limits.retry_base_s, cap_s=limits.retry_cap_s)
    retry_at = Elapsed(now + wait)
    return Failed(state.assignment, record, now, refusal, retry_at), (*first, WakeAt(retry_at))


def _on_exit(
    state: Loading | Warming | Verifying | Ready, event: Exited, now: Elapsed, limits: AssignmentLimits
) -> Step:
    if event.refusal.code is Code.OUT_OF_MEMORY:
        return _fail(state, event.refusal, now, limits)
    if not event.own_fault:
        return begin(state.assignment, now, limits, replace(state.record, restarts=state.record.restarts + 1))
    before = state.record
    at_load = event.at_load and (before.crashed_at_load or before.crashes == 0)
    crashed = replace(state, record=replace(before, crashes=before.crashes + 1, crashed_at_load=at_load))
    if crashed.record.crashes < limits.poison_after:
        return _fail(crashed, event.refusal, now, limits)
    refusal = Refusal(
        Code.POISONED,
        f"{crashed.record.crashes} crashes of its own, the last: {event.refusal}",
        f"{state.assignment.model} on {state.assignment.provider}",
        "another model, provider or runtime version; or clear the model",
    )
    return Poisoned(state.assignment, crashed.record, now, refusal), ()


def _drain(state: Ready, now: Elapsed, limits: AssignmentLimits) -> Step:
    not_before, until = Elapsed(now + limits.drain_grace_s), Elapsed(now + limits.drain_s)
    draining = Draining(state.assignment, state.record, now, state.loaded_model, not_before, until)
    return draining, (AwaitIdle(), WakeAt(until))


def _after_drain(state: Draining, now: Elapsed) -> State:
    if state.assignment.staged:
        return Staged(state.assignment, state.record, now)
    return Gone(state.assignment, state.record, now)


def phase(state: State) -> Phase:
    match state:
        case Fetching():
            return Phase.FETCHING
        case Loading():
            return Phase.LOADING
        case Warming():
            return Phase.WARMING
        case Verifying():
            return Phase.VERIFYING
        case Ready():
            return Phase.READY
        case Staged():
            return Phase.STAGED
        case Draining():
            return Phase.DRAINING
        case Failed() | Poisoned() | Rejected():
            return Phase.FAILED
        case Gone():
            return Phase.GONE


def observe(
    state: State, *, epoch_wall: Seconds, in_flight: int = 0, served: tuple[Served, ...] = (), sessions: int = 0,
    latencies: Counts = (),
) -> Observed:  # fmt: skip
    """The assignment as the node reports it. `epoch_wall` is the wall clock minus the elapsed clock, both read now."""

    def to_wall(at: Elapsed) -> Wall:
        return Wall(at + epoch_wall)

    code, reason, retry_at, gives_up_at, service = _explain(state)
    return Observed(
        assignment=state.assignment.id,
        workload=state.assignment.workload,
        model=state.assignment.model,
        device=state.assignment.device,
        phase=phase(state),
        since=to_wall(state.since),
        code=code,
        reason=reason,
        retry_at=None if retry_at is None else to_wall(retry_at),
        gives_up_at=None if gives_up_at is None else to_wall(gives_up_at),
        in_flight=in_flight,
        restarts=state.record.restarts,
        measured=service.measured if service else None,
        served=served,
        inputs=service.inputs if service else (),
        outputs=service.outputs if service else (),
        verdict=state.record.verdict,
        sessions=sessions,
        latencies=latencies,
        crashed_at_load=state.record.crashed_at_load,
    )


_Explanation = tuple[Code | None, str, Elapsed | None, Elapsed | None, LoadedModel | None]


def _explain(state: State) -> _Explanation:
    match state:
        case Fetching():
            return Code.WAITING_FOR_FETCH, "fetching the model", None, state.until, None
        case Loading():
            return Code.WAITING_FOR_LOAD, "loading the model", None, state.until, None
        case Warming():
            return Code.WAITING_FOR_WARMUP, "warming up", None, state.until, None
        case Verifying():
            awaits = state.verification.recording is Recording.AWAITED
            why = "its reference is recorded first" if awaits else "comparing its answers"
            why = why if state.last_refusal is None else f"to be compared: {state.last_refusal}"
            return Code.WAITING_FOR_VERIFY, why, state.retry_at, state.until, state.loaded_model
        case Ready():
            return None, state.loaded_model.no_warmup_reason, None, None, state.loaded_model
        case Staged():
            return None, "", None, None, None
        case Draining():
            return Code.WAITING_FOR_DRAIN, "finishing what is in flight", None, state.until, state.loaded_model
        case Failed():
            return state.refusal.code, state.refusal.words, state.retry_at, None, None
        case Poisoned() | Rejected():
            return state.refusal.code, state.refusal.words, None, state.since, None
        case Gone():
            return None, "", None, None, None

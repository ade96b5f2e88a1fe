"""The transitions of an assignment. `step` is the whole behaviour.

The supervisor passes it events and performs the effects that it returns. Every transitional state has a deadline, and
each state requests its own wake-up when it is entered.
"""

from dataclasses import replace

from shoal.agent.core.assignment.events import (
    AwaitIdle,
    BytesDiscarded,
    DiscardBytes,
    DrainRequested,
    Effect,
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
    Preparing,
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
from shoal.agent.core.assignment.unloading import may_unload, record_load
from shoal.types.assignment import Assignment
from shoal.types.backoff import delay
from shoal.types.codes import PERMANENT_LOAD_FAILURES, Code, Refusal
from shoal.types.migration import Against, Recording, Verdict, Verification, admits
from shoal.types.units import Elapsed, Seconds

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
        case Fetching(preparing=Preparing.RUNNING) if now >= state.until:
            refusal = Refusal(Code.PREPARE_FAILED, f"not prepared within {limits.prepare_s:g}s", "a smaller model")
            return Poisoned(state.assignment, state.record, now, refusal), (StopFetch(),)
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
        case Unloading() if now >= state.until:
            return Ready(state.assignment, state.record, now, state.loaded_model), ()
        case Draining() if now >= state.until:
            after, effects = _after_drain(state, now, limits)
            return after, (StopWorker(), *effects)
        case Failed() if now >= state.retry_at:
            return begin(state.assignment, now, limits, replace(state.record, restarts=state.record.restarts + 1))
        case (
            Fetching()
            | Loading()
            | Warming()
            | Verifying()
            | Ready()
            | Unloading()
            | ScaledToZero()
            | Waking()
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
            return _when_fetching(state, event, now, limits)
        case Loading() | Warming():
            return _when_loading(state, event, now, limits)
        case Verifying():
            return _when_verifying(state, event, now, limits)
        case Ready():
            return _when_ready(state, event, now, limits)
        case Unloading():
            return _when_unloading(state, event, now, limits)
        case ScaledToZero():
            return _when_scaled_to_zero(state, event, now, limits)
        case Waking():
            return _when_waking(state, event, now, limits)
        case Staged():
            return _when_staged(state, event, now, limits)
        case Draining():
            return _when_draining(state, event, now, limits)
        case Failed() | Poisoned() | Rejected():
            return _when_failed(state, event, now, limits)
        case Gone():
            return _when_gone(state, event, now, limits)


def _when_fetching(state: Fetching, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case ModelFetched() if state.assignment.staged:
            return Staged(state.assignment, state.record, now), ()
        case ModelFetched(path):
            until = _load_deadline(state.assignment, now, limits)
            return Loading(state.assignment, state.record, now, until), (StartWorker(path), WakeAt(until))
        case PreparationQueued():
            until = Elapsed(now + limits.prepare_queue_s)
            return replace(state, until=until, preparing=Preparing.QUEUED), (WakeAt(until),)
        case PreparationStarted():
            until = Elapsed(now + limits.prepare_s)
            return replace(state, until=until, preparing=Preparing.RUNNING), (WakeAt(until),)
        case BytesDiscarded():  # it may have found them already, and wait for something else
            after, effects = begin(state.assignment, now, limits, state.record)
            return after, (StopFetch(), *effects)
        case FetchFailed(refusal) if refusal.code is Code.MODEL_DIGEST:
            return _fail(state, refusal, now, limits, DiscardBytes())
        case FetchFailed(refusal) if refusal.code in PERMANENT_LOAD_FAILURES:
            return Poisoned(state.assignment, state.record, now, refusal), ()
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
            | Unused()
            | WakeRequested()
            | Idle()
            | TimerFired()
        ):
            return state, ()


def _when_loading(state: Loading | Warming, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case WarmupStarted():
            until = Elapsed(now + limits.warm_s)
            return Warming(state.assignment, state.record, now, until, _load_began(state)), (WakeAt(until),)
        case Warmed(service):
            return _after_warmup(state.assignment, _with_load(state, now), service, now)
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
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | VerdictReached()
            | NoVerdict()
            | Unused()
            | WakeRequested()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _when_verifying(state: Verifying, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case VerdictReached(verdict) if verdict.migration == state.verification.migration:
            return _apply_verdict(state, verdict, now)
        case Warmed(loaded_model):  # it has more to say of itself
            return replace(state, loaded_model=loaded_model), ()
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
            return _give_up_verifying(state, Code.VERIFY_FAILED, f"it ended while it was compared: {refusal}", now)
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
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Unused()
            | WakeRequested()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _when_ready(state: Ready, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case Exited(own_fault):
            state = _forgive_crashes(state, now, limits)
            verification = state.assignment.verification
            if own_fault and verification is not None and verification.recording is Recording.HERE:
                verdict = _failed_verdict(verification, Code.VERIFY_FAILED, "it ended while it was recorded")
                state = replace(state, record=replace(state.record, verdict=verdict))
            return _on_exit(state, event, now, limits)
        case DrainRequested():
            return _drain(state, now, limits)
        case Unused() if may_unload(state.assignment, state.record):
            until = Elapsed(now + limits.drain_s)
            record = _forgive_crashes(state, now, limits).record
            unloading = Unloading(state.assignment, record, now, state.loaded_model, until)
            return unloading, (AwaitIdle(), WakeAt(until))
        case ResumeRequested(asked) if asked.staged:
            return _drain(replace(state, assignment=asked), now, limits)
        case ResumeRequested(asked) if (
            asked.verification != state.assignment.verification and _should_verify_while_serving(asked)
        ):
            return replace(state, assignment=asked, tries=0, retry_at=None), _verify_while_serving(asked, state.record)
        case ResumeRequested(asked):
            return replace(state, assignment=asked), ()
        case Warmed(loaded_model):  # it has more to say of itself
            return replace(state, loaded_model=loaded_model), ()
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
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | VerdictReached()
            | NoVerdict()
            | Unused()
            | WakeRequested()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _forgive_crashes(state: Ready, now: Elapsed, limits: AssignmentLimits) -> Ready:
    """After long good service earlier crashes and failures no longer count."""
    if now - state.since < limits.crash_reset_s:
        return state
    return replace(state, record=replace(state.record, attempts=0, crashes=0, crashed_at_load=False))


def _when_unloading(state: Unloading, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    ready = Ready(state.assignment, state.record, now, state.loaded_model)
    match event:
        case Idle():
            return ScaledToZero(state.assignment, state.record, now, state.loaded_model), (StopWorker(),)
        case WakeRequested():
            return ready, ()
        case ResumeRequested(asked) if may_unload(asked, state.record):
            return replace(state, assignment=asked), ()
        case ResumeRequested() | DrainRequested() | Exited():
            return _when_ready(ready, event, now, limits)
        case Warmed(loaded_model):  # it has more to say of itself
            return replace(state, loaded_model=loaded_model), ()
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | VerdictReached()
            | NoVerdict()
            | Unused()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _when_scaled_to_zero(state: ScaledToZero, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case WakeRequested():
            return _wake(state, now, limits)
        case ResumeRequested(asked) if asked.staged:
            return Staged(asked, state.record, now), ()
        case ResumeRequested(asked) if may_unload(asked, state.record):
            return replace(state, assignment=asked), ()
        case ResumeRequested(asked):
            return _wake(replace(state, assignment=asked), now, limits)
        case DrainRequested():
            return Gone(state.assignment, state.record, now), ()
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Warmed()
            | VerdictReached()
            | NoVerdict()
            | Exited()
            | Unused()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _when_waking(state: Waking, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    """As any load; what comes of it is as if it had never been unloaded."""
    loading, effects = step(state.loading, event, now, limits)
    if isinstance(loading, Fetching | Loading | Warming):
        return replace(state, loading=loading), effects
    if isinstance(loading, Ready):  # the fetch, and a load that was interrupted, count too
        loads = record_load(state.record.loads, Seconds(now - state.since))
        return replace(loading, record=replace(loading.record, loads=loads)), effects
    return loading, effects


def _when_staged(state: Staged, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case DrainRequested():
            return Gone(state.assignment, state.record, now), ()
        case ResumeRequested(asked) if asked.staged:
            return replace(state, assignment=asked), ()
        case ResumeRequested(asked):
            return begin(asked, now, limits, state.record)
        case BytesDiscarded():
            return begin(state.assignment, now, limits, state.record)
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Warmed()
            | VerdictReached()
            | NoVerdict()
            | Exited()
            | Unused()
            | WakeRequested()
            | Idle()
            | TimerFired()
        ):
            return state, ()


def _when_draining(state: Draining, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case Idle() if now >= state.not_before:
            after, effects = _after_drain(state, now, limits)
            return after, (StopWorker(), *effects)
        case Exited():
            return _after_drain(state, now, limits)
        case BytesDiscarded():
            return replace(state, has_bytes=False), ()
        case DrainRequested():
            return replace(state, assignment=replace(state.assignment, staged=False)), ()
        case ResumeRequested(asked) if asked.staged:
            return replace(state, assignment=asked), ()
        case ResumeRequested(asked):
            return Ready(asked, state.record, now, state.loaded_model), ()
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Warmed()
            | VerdictReached()
            | NoVerdict()
            | Unused()
            | WakeRequested()
            | Idle()
            | TimerFired()
        ):
            return state, ()


def _when_failed(state: Failed | Poisoned | Rejected, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case DrainRequested():
            return Gone(state.assignment, state.record, now), ()
        case ResumeRequested(asked) if isinstance(state, Rejected) and asked.verification != state.verification:
            return begin(asked, now, limits)
        case ResumeRequested(asked):
            return replace(state, assignment=asked), ()
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Warmed()
            | VerdictReached()
            | NoVerdict()
            | Exited()
            | Unused()
            | WakeRequested()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _when_gone(state: Gone, event: Event, now: Elapsed, limits: AssignmentLimits) -> Step:
    match event:
        case ResumeRequested(asked):
            return begin(asked, now, limits)
        case (
            ModelFetched()
            | PreparationQueued()
            | PreparationStarted()
            | FetchFailed()
            | LoadFailed()
            | WarmupStarted()
            | Warmed()
            | VerdictReached()
            | NoVerdict()
            | Exited()
            | DrainRequested()
            | Unused()
            | WakeRequested()
            | Idle()
            | BytesDiscarded()
            | TimerFired()
        ):
            return state, ()


def _wake(state: ScaledToZero, now: Elapsed, limits: AssignmentLimits) -> Step:
    loading, effects = begin(state.assignment, now, limits, state.record)
    assert isinstance(loading, Fetching)
    return Waking(loading, now, state.loaded_model), effects


def _with_load(state: Loading | Warming, now: Elapsed) -> AssignmentRecord:
    """Its record, with the load that ends now."""
    began = _load_began(state)
    if began is None:
        return state.record
    return replace(state.record, loads=record_load(state.record.loads, Seconds(now - began)))


def _load_began(state: Loading | Warming) -> Elapsed | None:
    if isinstance(state, Warming):
        return state.load_began
    return None if state.assignment.to_zero_after_s is None else state.since


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


def _after_drain(state: Draining, now: Elapsed, limits: AssignmentLimits) -> Step:
    if not state.assignment.staged:
        return Gone(state.assignment, state.record, now), ()
    if not state.has_bytes:
        return begin(state.assignment, now, limits, state.record)
    return Staged(state.assignment, state.record, now), ()

"""One assignment on one node: fetching -> loading -> warming -> (verifying ->) ready -> draining -> gone, and
failed(code, retry_at). One that is only to be staged stops at its bytes: fetching -> staged.

`step` is the whole behaviour. The supervisor feeds it what happened and carries out what it asks; every transitional
state has a deadline, and each state asks for its own wake-up when it is entered.
"""

from dataclasses import dataclass, replace

from shoal.agent.core.backoff import delay
from shoal.types.assignment import Assignment, Measured, Observed, Phase, Served
from shoal.types.codes import Code, Refusal
from shoal.types.latency import Counts
from shoal.types.migration import DRAIN_S, Against, Recording, Verdict, Verification, admits
from shoal.types.profile import TensorSpec
from shoal.types.units import Elapsed, Seconds, Wall


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines and back-off of one assignment; fetching and loading get more in proportion to the model's bytes."""

    fetch_s: float = 120.0
    fetch_bytes: float = 256 * 1024
    load_s: float = 120.0
    load_bytes: float = 10e6
    warm_s: float = 300.0
    drain_s: float = DRAIN_S
    drain_grace_s: float = 0.5
    """A draining replica stays at least this long: peers may hold the routes of a moment ago."""
    retry_base_s: float = 0.5
    retry_cap_s: float = 60.0
    ask_base_s: float = 0.25
    ask_cap_s: float = 2.0
    """Between attempts to verify, while its time lasts."""
    poison_after: int = 3
    settled_s: float = 600.0
    """Ready for so long: earlier crashes and failures no longer count."""


@dataclass(frozen=True, slots=True)
class Record:
    """What outlives the phases. attempts: failures in a row; crashes: of its own fault; restarts: all reloads. verdict:
    of its verification, which counts for every worker that loads the same here."""

    attempts: int = 0
    crashes: int = 0
    restarts: int = 0
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """What the worker said when it became ready."""

    measured: Measured
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Fetching:
    asked: Assignment
    record: Record
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Loading:
    asked: Assignment
    record: Record
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Warming:
    asked: Assignment
    record: Record
    since: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Verifying:
    """Warm; takes no request before it has passed `verification`. tries: that came to no verdict, the last for `why`;
    again_at: when the next one begins, None while one is under way."""

    asked: Assignment
    record: Record
    since: Elapsed
    until: Elapsed
    service: Service
    verification: Verification
    tries: int = 0
    why: Refusal | None = None
    again_at: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """tries, again_at: as in Verifying, of a comparison that it serves beside."""

    asked: Assignment
    record: Record
    since: Elapsed
    service: Service
    tries: int = 0
    again_at: Elapsed | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The bytes are here, and nothing is loaded: as asked for."""

    asked: Assignment
    record: Record
    since: Elapsed


@dataclass(frozen=True, slots=True)
class Draining:
    """asked.staged: it only lets go of its worker; else it goes."""

    asked: Assignment
    record: Record
    since: Elapsed
    service: Service
    not_before: Elapsed
    until: Elapsed


@dataclass(frozen=True, slots=True)
class Failed:
    """Waits for `retry_at`, with the bytes or without."""

    asked: Assignment
    record: Record
    since: Elapsed
    refusal: Refusal
    retry_at: Elapsed


@dataclass(frozen=True, slots=True)
class Poisoned:
    """Failed for good on this node: only another desired set ends it."""

    asked: Assignment
    record: Record
    since: Elapsed
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Rejected:
    """It did not pass its verification: only another one, or none, has it tried again here."""

    asked: Assignment
    record: Record
    since: Elapsed
    refusal: Refusal
    verification: Verification


@dataclass(frozen=True, slots=True)
class Gone:
    asked: Assignment
    record: Record
    since: Elapsed


State = Fetching | Loading | Warming | Verifying | Ready | Staged | Draining | Failed | Poisoned | Rejected | Gone


@dataclass(frozen=True, slots=True)
class Fetched:
    path: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Not admitted, or the runtime refused; the worker process itself did not die."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Warmup:
    """Loaded; the worker now runs its warm-up."""


@dataclass(frozen=True, slots=True)
class Warmed:
    service: Service


@dataclass(frozen=True, slots=True)
class Judged:
    """The verification is over, passed or not."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Unjudged:
    """This attempt to verify came to no verdict: whoever is to be asked does not answer, or not yet."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Exited:
    """The worker process ended. own_fault False: killed from outside, which counts nothing."""

    own_fault: bool
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Drain:
    """No longer wanted here."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Wanted, with these terms (again, or still)."""

    asked: Assignment


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is in flight to the worker."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Fetched | FetchFailed | LoadFailed | Warmup | Warmed | Judged | Unjudged | Exited | Drain | Resume | Idle | Tick


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have the model's verified bytes here; answer Fetched or FetchFailed."""


@dataclass(frozen=True, slots=True)
class StopFetch:
    pass


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Admit by live memory, then start; answer LoadFailed, Warmup, Warmed or Exited."""

    path: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    pass


@dataclass(frozen=True, slots=True)
class Verify:
    """Instead of what is under way, if anything; answer Judged or Unjudged."""

    verification: Verification


@dataclass(frozen=True, slots=True)
class StopVerify:
    pass


@dataclass(frozen=True, slots=True)
class AwaitIdle:
    """Say Idle whenever nothing is in flight to it, until it is gone."""


@dataclass(frozen=True, slots=True)
class DiscardBytes:
    """The cached bytes are not the model: set them aside."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Tick at `at`. The latest one counts."""

    at: Elapsed


Effect = Fetch | StopFetch | StartWorker | StopWorker | Verify | StopVerify | AwaitIdle | DiscardBytes | WakeAt
Step = tuple[State, tuple[Effect, ...]]


def begin(asked: Assignment, now: Elapsed, limits: Limits, record: Record | None = None) -> Step:
    """A new assignment, or one more attempt: bytes first."""
    until = Elapsed(now + limits.fetch_s + asked.model_bytes / limits.fetch_bytes)
    return Fetching(asked, record or Record(), now, until), (Fetch(), WakeAt(until))


def adopt(
    asked: Assignment, service: Service | None, now: Elapsed, limits: Limits, verdict: Verdict | None = None
) -> Step:
    """A worker of an earlier supervisor holds it: ready as it is, to be verified, or still loading. verdict: what it
    was judged before."""
    record = Record(verdict=verdict)
    if asked.staged:
        return Staged(asked, record, now), (StopWorker(),)
    if service is not None:
        return _warm(asked, record, service, now)
    until = _load_until(asked, now, limits)
    return Loading(asked, record, now, until), (WakeAt(until),)


def step(state: State, event: Event, now: Elapsed, limits: Limits) -> Step:
    """The next state and what to do. Time is looked at first; what no longer matters to a state changes nothing."""
    state, due = _expire(state, now, limits)
    state, effects = _take(state, event, now, limits)
    return state, due + effects


def _expire(state: State, now: Elapsed, limits: Limits) -> Step:
    match state:
        case Fetching() if now >= state.until:
            return _fail(state, Refusal(Code.FETCH_FAILED, "not fetched in time"), now, limits, StopFetch())
        case Loading() if now >= state.until:
            return _fail(state, Refusal(Code.LOAD_TIMEOUT, "not loaded in time"), now, limits, StopWorker())
        case Warming() if now >= state.until:
            return _fail(state, Refusal(Code.WARMUP_FAILED, "not warm in time"), now, limits, StopWorker())
        case Verifying() if now >= state.until:
            why = f"not verified within {state.verification.within_s:g}s: {state.why or 'no answer yet'}"
            return _unproven(state, Code.VERIFY_IMPOSSIBLE, why, now)
        case Verifying(again_at=again_at) if again_at is not None and now >= again_at:
            return replace(state, again_at=None), (Verify(state.verification), WakeAt(state.until))
        case Ready(again_at=again_at) if again_at is not None and now >= again_at:
            return replace(state, again_at=None), _beside(state.asked, state.record)
        case Draining() if now >= state.until:
            return _left(state, now), (StopWorker(),)
        case Failed() if now >= state.retry_at:
            return begin(state.asked, now, limits, replace(state.record, restarts=state.record.restarts + 1))
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


def _take(state: State, event: Event, now: Elapsed, limits: Limits) -> Step:
    match state:
        case Fetching():
            match event:
                case Fetched() if state.asked.staged:
                    return Staged(state.asked, state.record, now), ()
                case Fetched(path):
                    until = _load_until(state.asked, now, limits)
                    return Loading(state.asked, state.record, now, until), (StartWorker(path), WakeAt(until))
                case FetchFailed(refusal):
                    return _fail(state, refusal, now, limits)
                case Drain():
                    return Gone(state.asked, state.record, now), (StopFetch(),)
                case Resume(asked):
                    return replace(state, asked=asked), ()
                case LoadFailed() | Warmup() | Warmed() | Judged() | Unjudged() | Exited() | Idle() | Tick():
                    return state, ()
        case Loading() | Warming():
            match event:
                case Warmup():
                    until = Elapsed(now + limits.warm_s)
                    return Warming(state.asked, state.record, now, until), (WakeAt(until),)
                case Warmed(service):
                    return _warm(state.asked, state.record, service, now)
                case LoadFailed(refusal) if refusal.code is Code.MODEL_DIGEST:
                    return _fail(state, refusal, now, limits, StopWorker(), DiscardBytes())
                case LoadFailed(refusal):
                    return _fail(state, refusal, now, limits, StopWorker())
                case Exited():
                    return _exit(state, event, now, limits)
                case Drain():
                    return Gone(state.asked, state.record, now), (StopWorker(),)
                case Resume(asked) if asked.staged:
                    return Staged(asked, state.record, now), (StopWorker(),)
                case Resume(asked):
                    return replace(state, asked=asked), ()
                case Fetched() | FetchFailed() | Judged() | Unjudged() | Idle() | Tick():
                    return state, ()
        case Verifying():
            match event:
                case Judged(verdict) if verdict.migration == state.verification.migration:
                    return _judge(state, verdict, now)
                case Unjudged(refusal) if state.again_at is None:
                    wait = delay(state.asked.id, state.tries, base_s=limits.ask_base_s, cap_s=limits.ask_cap_s)
                    again_at = Elapsed(now + wait)
                    state = replace(state, tries=state.tries + 1, why=refusal, again_at=again_at)
                    return state, (WakeAt(Elapsed(min(again_at, state.until))),)
                case Exited(own_fault, refusal) if own_fault and refusal.code is not Code.OUT_OF_MEMORY:
                    # on an input that is made up, perhaps: that is no crash to poison its model for
                    return _unproven(state, Code.VERIFY_FAILED, f"it ended while it was compared: {refusal}", now)
                case Exited():
                    after, effects = _exit(state, event, now, limits)
                    return after, (StopVerify(), *effects)
                case Drain():
                    return Gone(state.asked, state.record, now), (StopVerify(), StopWorker())
                case Resume(asked) if asked.staged:
                    return Staged(asked, state.record, now), (StopVerify(), StopWorker())
                case Resume(asked) if asked.verification == state.verification:
                    return replace(state, asked=asked), ()
                case Resume(asked):
                    after, effects = _warm(asked, state.record, state.service, now)
                    return after, (StopVerify(), *effects)
                case (
                    Judged()
                    | Unjudged()
                    | Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Idle()
                    | Tick()
                ):
                    return state, ()
        case Ready():
            match event:
                case Exited(own_fault):
                    if now - state.since >= limits.settled_s:
                        state = replace(state, record=replace(state.record, attempts=0, crashes=0))
                    verification = state.asked.verification
                    if own_fault and verification is not None and verification.recording is Recording.HERE:
                        verdict = _without(verification, Code.VERIFY_FAILED, "it ended while it was recorded")
                        state = replace(state, record=replace(state.record, verdict=verdict))
                    return _exit(state, event, now, limits)
                case Drain():
                    return _drain(state, now, limits)
                case Resume(asked) if asked.staged:
                    return _drain(replace(state, asked=asked), now, limits)
                case Resume(asked) if asked.verification != state.asked.verification and _is_beside(asked):
                    return replace(state, asked=asked, tries=0, again_at=None), _beside(asked, state.record)
                case Resume(asked):
                    return replace(state, asked=asked), ()
                case Judged(verdict) if _is_beside(state.asked, verdict.migration):
                    return replace(state, record=replace(state.record, verdict=verdict)), ()
                case Unjudged() if _is_beside(state.asked) and state.again_at is None:
                    wait = delay(state.asked.id, state.tries, base_s=limits.ask_base_s, cap_s=limits.ask_cap_s)
                    again_at = Elapsed(now + wait)
                    return replace(state, tries=state.tries + 1, again_at=again_at), (WakeAt(again_at),)
                case (
                    Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Judged()
                    | Unjudged()
                    | Idle()
                    | Tick()
                ):
                    return state, ()
        case Staged():
            match event:
                case Drain():
                    return Gone(state.asked, state.record, now), ()
                case Resume(asked) if asked.staged:
                    return replace(state, asked=asked), ()
                case Resume(asked):
                    return begin(asked, now, limits, state.record)
                case (
                    Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Judged()
                    | Unjudged()
                    | Exited()
                    | Idle()
                    | Tick()
                ):
                    return state, ()
        case Draining():
            match event:
                case Idle() if now >= state.not_before:
                    return _left(state, now), (StopWorker(),)
                case Exited():
                    return _left(state, now), ()
                case Drain():
                    return replace(state, asked=replace(state.asked, staged=False)), ()
                case Resume(asked) if asked.staged:
                    return replace(state, asked=asked), ()
                case Resume(asked):
                    return Ready(asked, state.record, now, state.service), ()
                case (
                    Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Judged()
                    | Unjudged()
                    | Idle()
                    | Tick()
                ):
                    return state, ()
        case Failed() | Poisoned() | Rejected():
            match event:
                case Drain():
                    return Gone(state.asked, state.record, now), ()
                case Resume(asked) if isinstance(state, Rejected) and asked.verification != state.verification:
                    return begin(asked, now, limits)
                case Resume(asked):
                    return replace(state, asked=asked), ()
                case (
                    Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Judged()
                    | Unjudged()
                    | Exited()
                    | Idle()
                    | Tick()
                ):
                    return state, ()
        case Gone():
            match event:
                case Resume(asked):
                    return begin(asked, now, limits)
                case (
                    Fetched()
                    | FetchFailed()
                    | LoadFailed()
                    | Warmup()
                    | Warmed()
                    | Judged()
                    | Unjudged()
                    | Exited()
                    | Drain()
                    | Idle()
                    | Tick()
                ):
                    return state, ()


def _load_until(asked: Assignment, now: Elapsed, limits: Limits) -> Elapsed:
    return Elapsed(now + limits.load_s + asked.model_bytes / limits.load_bytes)


def _warm(asked: Assignment, record: Record, service: Service, now: Elapsed) -> Step:
    """Ready, unless it has yet to pass a verification."""
    if _is_beside(asked):
        return Ready(asked, record, now, service), _beside(asked, record)
    verification = asked.verification
    if verification is not None and verification.against is Against.NONE:
        verification = None
    if verification is None or _has_shown(verification, record.verdict):
        return Ready(asked, record, now, service), ()
    within_s = verification.within_s if verification.within_s > 0 else 0.0  # NaN is no deadline
    until = Elapsed(now + within_s)
    warm = Verifying(asked, record, now, until, service, verification)
    if verification.recording is Recording.AWAITED:
        return warm, (WakeAt(until),)
    return warm, (Verify(verification), WakeAt(until))


def _has_shown(verification: Verification, verdict: Verdict | None) -> bool:
    if verdict is None or verdict.migration != verification.migration:
        return False
    return admits(verdict, advisory=verification.advisory)


def _is_beside(asked: Assignment, migration: str = "") -> bool:
    """Whether another's answers are to be judged by its own while it serves on; of that migration, if given."""
    verification = asked.verification
    return verification is not None and verification.beside and migration in ("", verification.migration)


def _beside(asked: Assignment, record: Record) -> tuple[Effect, ...]:
    """Unless that was done. What was recorded is asked for again where it was removed."""
    verification, verdict = asked.verification, record.verdict
    if verification is None:
        return ()
    if verdict is None or verdict.migration != verification.migration:
        return (Verify(verification),)
    return (Verify(verification),) if verdict.passed and verification.recording is Recording.HERE else ()


def _judge(state: Verifying, verdict: Verdict, now: Elapsed) -> Step:
    record = replace(state.record, verdict=verdict)
    if admits(verdict, advisory=state.verification.advisory):
        return Ready(state.asked, record, now, state.service), ()
    code = verdict.code or Code.VERIFY_FAILED
    refusal = Refusal(code, verdict.reason, "the answers of what it takes over from", "see the verdict; move elsewhere")
    return Rejected(state.asked, record, now, refusal, state.verification), (StopWorker(),)


def _unproven(state: Verifying, code: Code, why: str, now: Elapsed) -> Step:
    """It is over without a comparison."""
    after, effects = _judge(state, _without(state.verification, code, why), now)
    return after, (StopVerify(), *effects)


def _without(asked: Verification, code: Code, why: str) -> Verdict:
    """Nothing was compared."""
    return Verdict(asked.migration, False, code, why, asked.against, asked.inputs, 0)


def _fail(state: State, refusal: Refusal, now: Elapsed, limits: Limits, *first: Effect) -> Step:
    """Back-off doubles with each failure in a row."""
    record = replace(state.record, attempts=state.record.attempts + 1)
    wait = delay(state.asked.id, record.attempts - 1, base_s=limits.retry_base_s, cap_s=limits.retry_cap_s)
    retry_at = Elapsed(now + wait)
    return Failed(state.asked, record, now, refusal, retry_at), (*first, WakeAt(retry_at))


def _exit(state: Loading | Warming | Verifying | Ready, event: Exited, now: Elapsed, limits: Limits) -> Step:
    if event.refusal.code is Code.OUT_OF_MEMORY:
        return _fail(state, event.refusal, now, limits)
    if not event.own_fault:
        return begin(state.asked, now, limits, replace(state.record, restarts=state.record.restarts + 1))
    crashed = replace(state, record=replace(state.record, crashes=state.record.crashes + 1))
    if crashed.record.crashes < limits.poison_after:
        return _fail(crashed, event.refusal, now, limits)
    refusal = Refusal(
        Code.POISONED,
        f"{crashed.record.crashes} crashes of its own, the last: {event.refusal}",
        f"{state.asked.model} on {state.asked.provider}",
        "another model, provider or runtime version; or clear the model",
    )
    return Poisoned(state.asked, crashed.record, now, refusal), ()


def _drain(state: Ready, now: Elapsed, limits: Limits) -> Step:
    not_before, until = Elapsed(now + limits.drain_grace_s), Elapsed(now + limits.drain_s)
    return Draining(state.asked, state.record, now, state.service, not_before, until), (AwaitIdle(), WakeAt(until))


def _left(state: Draining, now: Elapsed) -> State:
    if state.asked.staged:
        return Staged(state.asked, state.record, now)
    return Gone(state.asked, state.record, now)


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
    """What the node reports. epoch_wall: wall clock minus elapsed clock, both read now."""

    def wall(at: Elapsed) -> Wall:
        return Wall(at + epoch_wall)

    code, reason, retry_at, gives_up_at, service = _why(state)
    return Observed(
        assignment=state.asked.id,
        workload=state.asked.workload,
        model=state.asked.model,
        device=state.asked.device,
        phase=phase(state),
        since=wall(state.since),
        code=code,
        reason=reason,
        retry_at=None if retry_at is None else wall(retry_at),
        gives_up_at=None if gives_up_at is None else wall(gives_up_at),
        in_flight=in_flight,
        restarts=state.record.restarts,
        measured=service.measured if service else None,
        served=served,
        inputs=service.inputs if service else (),
        outputs=service.outputs if service else (),
        verdict=state.record.verdict,
        sessions=sessions,
        latencies=latencies,
    )


_Why = tuple[Code | None, str, Elapsed | None, Elapsed | None, Service | None]


def _why(state: State) -> _Why:
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
            why = why if state.why is None else f"to be compared: {state.why}"
            return Code.WAITING_FOR_VERIFY, why, state.again_at, state.until, state.service
        case Ready():
            return None, "", None, None, state.service
        case Staged():
            return None, "", None, None, None
        case Draining():
            return Code.WAITING_FOR_DRAIN, "finishing what is in flight", None, state.until, state.service
        case Failed():
            return state.refusal.code, str(state.refusal), state.retry_at, None, None
        case Poisoned() | Rejected():
            return state.refusal.code, str(state.refusal), None, None, None
        case Gone():
            return None, "", None, None, None

"""An assignment as its node reports it."""

from shoal.agent.core.assignment.states import (
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
from shoal.agent.core.assignment.unloading import wake_time
from shoal.types.assignment import Observed, Phase, Served
from shoal.types.codes import Code
from shoal.types.latency import Counts
from shoal.types.migration import Recording
from shoal.types.units import Elapsed, Seconds, Wall


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
        case Ready() | Unloading() | ScaledToZero() | Waking():
            return Phase.READY  # it takes requests, which wait where they have to
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
        case Fetching(preparing=Preparing.QUEUED):
            return Code.WAITING_FOR_PREPARE, "others are prepared first", None, state.until, None
        case Fetching(preparing=Preparing.RUNNING):
            return Code.WAITING_FOR_PREPARE, f"making it in {state.assignment.precision}", None, state.until, None
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
            return None, state.loaded_model.note, None, None, state.loaded_model
        case Unloading():
            return None, state.loaded_model.note, None, None, state.loaded_model
        case ScaledToZero():
            why = f"no request for {state.assignment.to_zero_after_s or 0.0:g}s; the next one waits {_wake(state)}"
            return Code.SCALED_TO_ZERO, why, None, None, state.loaded_model
        case Waking():
            why = f"loading for requests that wait, which takes {_wake(state)}"
            return Code.WAITING_FOR_WAKE, why, None, state.loading.until, state.loaded_model
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


def _wake(state: ScaledToZero | Waking) -> str:
    """How long a wake takes, as people read it."""
    return f"{wake_time(state.record, state.loaded_model).median_s:.2g}s"

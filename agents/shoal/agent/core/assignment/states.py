"""The states of an assignment, what outlives them, and its deadlines."""

from dataclasses import dataclass
from enum import Enum, auto

from shoal.types.assignment import Assignment, Measured
from shoal.types.codes import Refusal
from shoal.types.migration import DRAIN_S, Verdict, Verification
from shoal.types.profile import TensorSpec
from shoal.types.units import Elapsed, Seconds


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
    # Longest preparation of a model, seconds.
    prepare_s: float = 600.0
    # Longest wait for the preparations of others, seconds; then it queues again.
    prepare_queue_s: float = 3600.0
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
    # Seconds of its last loads, from the start of the worker, or from the request that woke it, until it was ready.
    # Empty for one that stays loaded.
    loads: tuple[Seconds, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the worker reported when it became ready."""

    # What loading and warming cost here.
    measured: Measured
    # The model's inputs, as the runtime lists them.
    inputs: tuple[TensorSpec, ...]
    # The model's outputs, as the runtime lists them.
    outputs: tuple[TensorSpec, ...]
    # As in WorkerReady.
    note: str = ""


class Preparing(Enum):
    """How far the preparation of a model is."""

    # None was asked for, or the pushed model is not here yet.
    NO = auto()
    # Others are prepared first.
    QUEUED = auto()
    RUNNING = auto()


@dataclass(frozen=True, slots=True)
class Fetching:
    """Waits for the model's bytes, and then for its preparation where one is asked."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # When it fails, elapsed clock: for good where the preparation runs, else with FETCH_FAILED.
    until: Elapsed
    # How far the preparation is.
    preparing: Preparing = Preparing.NO


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

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # When it fails, elapsed clock.
    until: Elapsed
    # When its load began, elapsed clock; None where it is not timed, as it stays loaded.
    load_began: Elapsed | None = None


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
class Unloading:
    """Had no request for as long as its policy says. The front holds new requests back, and the worker ends once
    nothing is in flight; a request makes it Ready again."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # What its worker reported.
    loaded_model: LoadedModel
    # When it is Ready again although nobody asked it, elapsed clock: something is in flight, or the front is silent.
    until: Elapsed


@dataclass(frozen=True, slots=True)
class ScaledToZero:
    """Nothing is loaded, as nobody asks. It takes requests: the next one loads it again."""

    # The assignment as last desired.
    assignment: Assignment
    # Counters that outlive this phase.
    record: AssignmentRecord
    # When this phase began, elapsed clock.
    since: Elapsed
    # What its last worker reported.
    loaded_model: LoadedModel


@dataclass(frozen=True, slots=True)
class Waking:
    """Loads again, as requests wait for it."""

    # How far the load is.
    loading: Fetching | Loading | Warming
    # When the first request asked for it, elapsed clock.
    since: Elapsed
    # What its last worker reported.
    loaded_model: LoadedModel

    @property
    def assignment(self) -> Assignment:
        return self.loading.assignment

    @property
    def record(self) -> AssignmentRecord:
        return self.loading.record


@dataclass(frozen=True, slots=True)
class Staged:
    """The bytes are on disk and nothing is loaded, as desired."""

    assignment: Assignment
    record: AssignmentRecord
    since: Elapsed


@dataclass(frozen=True, slots=True)
class Draining:
    """Finishes what is in flight. Afterwards it is Staged if `assignment.staged`, or fetches for that; else Gone."""

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
    # Whether nobody found the model's bytes on disk corrupt meanwhile.
    has_bytes: bool = True


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


State = (
    Fetching
    | Loading
    | Warming
    | Verifying
    | Ready
    | Unloading
    | ScaledToZero
    | Waking
    | Staged
    | Draining
    | Failed
    | Poisoned
    | Rejected
    | Gone
)

"""What happens to an assignment, and what its state machine requests from the supervisor."""

from dataclasses import dataclass

from shoal.agent.core.assignment.states import LoadedModel
from shoal.types.assignment import Assignment
from shoal.types.codes import Refusal
from shoal.types.migration import Verdict, Verification
from shoal.types.units import Elapsed


@dataclass(frozen=True, slots=True)
class ModelFetched:
    path: str


@dataclass(frozen=True, slots=True)
class PreparationQueued:
    """The pushed model is here. The node will make another of it, after those that it was asked for before."""


@dataclass(frozen=True, slots=True)
class PreparationStarted:
    """The node makes another model of the pushed one."""


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
class Unused:
    """It had no request for as long as its policy says, and no session is open."""


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """A request waits for it."""


@dataclass(frozen=True, slots=True)
class Idle:
    """No request is in flight to the worker."""


@dataclass(frozen=True, slots=True)
class BytesDiscarded:
    """A load, of any assignment, found that the cached bytes are not the model's, and they were set aside."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


Event = (
    ModelFetched
    | PreparationQueued
    | PreparationStarted
    | FetchFailed
    | LoadFailed
    | WarmupStarted
    | Warmed
    | VerdictReached
    | NoVerdict
    | Exited
    | DrainRequested
    | ResumeRequested
    | Unused
    | WakeRequested
    | Idle
    | BytesDiscarded
    | TimerFired
)


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Fetch and verify the model's bytes, and prepare the model where that is asked; the supervisor answers with
    PreparationQueued, PreparationStarted, ModelFetched or FetchFailed."""


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
    """Send Idle whenever no request is in flight to the worker, while it drains or is unloaded. The front must hold
    new ones back by then."""


@dataclass(frozen=True, slots=True)
class DiscardBytes:
    """Cached bytes do not match their digest: set those aside that do not. If they are the model's, send BytesDiscarded
    to all assignments of the model."""


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send TimerFired at `at`. A later WakeAt replaces an earlier one."""

    at: Elapsed


Effect = (
    StartFetch | StopFetch | StartWorker | StopWorker | StartVerify | StopVerify | AwaitIdle | DiscardBytes | WakeAt
)

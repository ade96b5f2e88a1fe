"""Requests for replicas that are scaled to zero: which replicas they wake, who waits, and who is refused at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.agent.core.routing import AdmissionRefusal
from shoal.types.codes import Code, Refusal
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

RETRY_S: Final = Seconds(1.0)
"""When a caller may retry whose replica failed to load: its node tries again after a back-off of its own."""
_LEAST_RETRY_S: Final = Seconds(0.01)


@dataclass(frozen=True, slots=True)
class UnloadedReplica:
    """A replica of this node without a worker, that is scaled to zero, loads for its first requests, or failed to."""

    # Id of the assignment.
    assignment: str
    # The workload that it serves.
    workload: WorkloadKey
    # How long it usually takes until it is ready.
    wake_s: Seconds = Seconds(0.0)
    # How long it takes at least; 0 where that is unknown.
    least_wake_s: Seconds = Seconds(0.0)
    # True: it loads already.
    is_waking: bool = False
    # Why it failed to load; None: requests may wait for it.
    failure: Refusal | None = None


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What a request has to do with unloaded replicas before it is sent anywhere."""

    # Assignments to wake for it.
    wake: tuple[str, ...] = ()
    # True: it waits until something of that changes.
    waits: bool = False
    # Why it is refused; None where it is not.
    refused: AdmissionRefusal | None = None


NO_WAKE: Final = WakePlan()


def plan_wake(
    unloaded: Iterable[UnloadedReplica],
    requested_at: Mapping[str, Elapsed],
    expires_at: Elapsed,
    now: Elapsed,
    *,
    has_other: bool,
) -> WakePlan:
    """What a request does for whose route these replicas are `unloaded`.

    All of them are woken. The request waits only where no other replica takes it (`has_other`), and is refused where
    even the shortest load that was measured would end after its deadline. `requested_at`: since when this front has
    asked for each; one that is missing and loads already was asked for by an earlier front, and no deadline is too
    short for it.
    """
    known = tuple(unloaded)
    asleep = [each for each in known if each.failure is None]
    wake = tuple(each.assignment for each in asleep if each.assignment not in requested_at and not each.is_waking)
    if has_other:
        return WakePlan(wake)
    if not asleep:
        failure = next((each.failure for each in known if each.failure is not None), None)
        return NO_WAKE if failure is None else WakePlan(refused=AdmissionRefusal(failure, RETRY_S))
    soonest = min(asleep, key=lambda each: _left_s(each, each.least_wake_s, requested_at, now))
    least_s = _left_s(soonest, soonest.least_wake_s, requested_at, now)
    left_s = expires_at - now
    if least_s <= left_s:
        return WakePlan(wake, waits=True)
    usual_s = max(least_s, _left_s(soonest, soonest.wake_s, requested_at, now), _LEAST_RETRY_S)
    refusal = Refusal(
        Code.SCALED_TO_ZERO,
        f"{soonest.workload} is loaded again, in {usual_s:.2f}s",
        f"an answer within {max(0.0, left_s):.2f}s",
        "retry after the time given, or allow a longer deadline",
    )
    return WakePlan(wake, refused=AdmissionRefusal(refusal, Seconds(usual_s)))


def _left_s(
    replica: UnloadedReplica, wake_s: Seconds, requested_at: Mapping[str, Elapsed], now: Elapsed
) -> Seconds:  # fmt: skip
    """Seconds until it is ready, if it takes `wake_s` in all."""
    at = requested_at.get(replica.assignment)
    if at is None:
        return Seconds(0.0) if replica.is_waking else wake_s
    return Seconds(max(0.0, wake_s - (now - at)))

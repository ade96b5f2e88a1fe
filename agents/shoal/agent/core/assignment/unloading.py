"""Scale to zero: which replica may be unloaded, since when nobody asks it, and how long its loads took here."""

import statistics
from dataclasses import dataclass
from typing import Final

from shoal.agent.core.assignment.states import AssignmentRecord, LoadedModel
from shoal.types.assignment import Assignment
from shoal.types.units import Elapsed, Seconds

KEPT_LOADS: Final = 15
"""Loads of which the median is a replica's wake: an odd number, so that it is one of them."""


@dataclass(frozen=True, slots=True)
class WakeTime:
    """How long a replica takes from its first request until it is ready."""

    # Median of its loads here.
    median_s: Seconds
    # The shortest of them; 0 where none was timed.
    least_s: Seconds


def may_unload(asked: Assignment, record: AssignmentRecord) -> bool:
    """Whether the replica may be unloaded while nobody asks it: its policy says so, it has nothing else to do, and no
    other replica is compared with it or takes over from it."""
    if asked.to_zero_after_s is None or asked.standby or asked.staged or asked.verifiers or asked.handover is not None:
        return False
    if asked.verification is None or not asked.verification.beside:
        return True
    return record.verdict is not None and record.verdict.migration == asked.verification.migration


def is_unused(asked: Assignment, last_request_at: Elapsed, now: Elapsed) -> bool:
    """Whether the last request is as long ago as the policy says."""
    return asked.to_zero_after_s is not None and now - last_request_at >= asked.to_zero_after_s


def record_load(loads: tuple[Seconds, ...], took_s: Seconds) -> tuple[Seconds, ...]:
    """`loads` with the newest one; the oldest one goes."""
    return (*loads, took_s)[-KEPT_LOADS:]


def wake_time(record: AssignmentRecord, loaded_model: LoadedModel) -> WakeTime:
    """By the loads that this supervisor timed; before the first, by what the worker says of its own."""
    if not record.loads:
        return WakeTime(loaded_model.measured.load_s, Seconds(0.0))
    return WakeTime(Seconds(statistics.median(record.loads)), Seconds(min(record.loads)))

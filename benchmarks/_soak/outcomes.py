"""How each request of the load ended, and what is made of it. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

CRASHED: Final = frozenset({"WORKER_CRASHED", "WORKER_KILLED", "REQUEST_CRASHED_WORKER"})
"""What a request is told that a worker had when it ended."""
SESSION: Final = "session"
"""The lane of sessions that nobody meant to lose."""
SESSION_LOST: Final = "SESSION_LOST"


class Outcome(StrEnum):
    ANSWERED = "answered"
    """As ONNX Runtime answers it in process."""
    WRONG = "wrong"
    """Answered otherwise, or answered although it should have been refused."""
    REFUSED = "refused"
    """With a code that this request may be refused with."""
    CANCELLED = "cancelled"
    """By its client."""
    CRASHED = "crashed"
    """Not repeated any more, because two workers that had it were killed."""
    LOST = "lost"
    """It failed for good."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, with all its repetitions. Times are seconds of the machine's monotonic clock."""

    # Which part of the load it belongs to.
    lane: str
    # Name of the front that was asked.
    door: str
    # The workload.
    model: str
    # When it was first sent.
    start: float
    # When it was over.
    end: float
    # How.
    outcome: Outcome
    # The code of a refusal; what was found, of an answer that is wrong; empty otherwise.
    detail: str = ""
    # (when, code) of each attempt that was repeated.
    failures: tuple[tuple[float, str], ...] = ()

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> "RequestRecord":
        said = json.loads(line)
        failures = tuple((float(at), str(code)) for at, code in said.pop("failures"))
        return cls(**said | {"outcome": Outcome(said["outcome"]), "failures": failures})


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """What became of one lane's requests."""

    # How many ended how.
    outcomes: Mapping[Outcome, int]
    # Attempts that were repeated.
    repeated: int
    # Median seconds to an answer, repetitions included; NaN without answers.
    p50_s: float
    # 99th percentile of the same.
    p99_s: float
    # Longest of these.
    most_s: float

    @property
    def requests(self) -> int:
        return sum(self.outcomes.values())


@dataclass(slots=True)
class FailedAttempts:
    """Attempts that failed, or sessions that ended, by code."""

    # While a fault was on, or the region not yet whole after it.
    explained: Counter[str] = field(default_factory=Counter)
    # At all other times: (when, lane, code).
    unexplained: list[tuple[float, str, str]] = field(default_factory=list)


def summarise(records: Iterable[RequestRecord]) -> dict[str, LaneSummary]:
    """By lane, in the order of names."""
    by_lane = dict[str, list[RequestRecord]]()
    for record in records:
        by_lane.setdefault(f"{record.lane} {record.model} {record.door}", []).append(record)
    return {lane: _summary(each) for lane, each in sorted(by_lane.items())}


def longest_gaps(records: Iterable[RequestRecord], rests: Sequence[tuple[float, float]] = ()) -> dict[str, float]:
    """Longest time between two answers to anybody, in seconds, by door. rests: from when to when nobody asked."""
    ends = dict[str, list[float]]()
    for record in records:
        if record.outcome is Outcome.ANSWERED:
            ends.setdefault(record.door, []).append(record.end)
    return {
        door: max(
            (
                later - earlier
                for earlier, later in pairwise(sorted(each))
                if not any(earlier < until and since < later for since, until in rests)
            ),
            default=0.0,
        )
        for door, each in ends.items()
    }


def under_way(records: Iterable[RequestRecord], kills: Sequence[tuple[float, str]]) -> Counter[Outcome]:
    """How requests ended that were under way when a worker of their workload was killed: (when, workload)."""
    return Counter(
        record.outcome
        for record in records
        if any(record.model == model and record.start <= at < record.end for at, model in kills)
    )


def _summary(records: Sequence[RequestRecord]) -> LaneSummary:
    answered = [record for record in records if record.outcome is Outcome.ANSWERED]
    took = np.array([record.end - record.start for record in answered])
    p50, p99, most = np.quantile(took, (0.5, 0.99, 1.0)) if answered else (np.nan, np.nan, np.nan)
    return LaneSummary(
        Counter(record.outcome for record in records),
        sum(len(record.failures) for record in records),
        float(p50),
        float(p99),
        float(most),
    )


def explain(records: Iterable[RequestRecord], faults: Sequence[tuple[float, float]]) -> FailedAttempts:
    """faults: from when until when each one hurt."""
    found = FailedAttempts()
    for record in records:
        failures = [(at, at, code) for at, code in record.failures]
        if (record.lane, record.detail) == (SESSION, SESSION_LOST):
            failures.append((record.start, record.end, SESSION_LOST))  # it was lost at some time before it was asked
        for began, ended, code in failures:
            if any(since <= ended and began <= until for since, until in faults):
                found.explained[code] += 1
            else:
                found.unexplained.append((ended, f"{record.lane} {record.model} {record.door}", code))
    return found

"""What a load found: figures of its requests, as values."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load."""

    # Seconds from when it was due to its end.
    took_s: float
    # The code that it was refused with; empty: it was answered.
    refused: str = ""


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One level of a load."""

    # What was asked for: requests in flight, or a rate.
    level: str
    # Requests that were answered.
    answers: int
    # Answers a second.
    per_s: float
    # Seconds until an answer, of half of the requests; NaN without one.
    p50_s: float
    # Of nine in ten.
    p90_s: float
    # Of ninety-nine in a hundred.
    p99_s: float
    # Requests by the code that they were refused with.
    refused: dict[str, int]
    # Share of one core that this client used. Near 1 it measured itself.
    client_core: float


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; NaN of none. ordered: ascending."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def figures_of(level: str, requests: Sequence[LoadRequest], seconds: float, client_cpu_s: float) -> LoadFigures:
    """seconds: from the first request to the end of the last one; above 0. client_cpu_s: this process's, meanwhile."""
    answered = sorted(each.took_s for each in requests if not each.refused)
    p50_s, p90_s, p99_s = (quantile(answered, share) for share in (0.5, 0.9, 0.99))
    refused = dict(Counter(each.refused for each in requests if each.refused).most_common())
    return LoadFigures(
        level, len(answered), len(answered) / seconds, p50_s, p90_s, p99_s, refused, client_core=client_cpu_s / seconds
    )  # fmt: skip

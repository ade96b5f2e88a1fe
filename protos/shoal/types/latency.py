"""Latency histograms: buckets 5 % apart from 1 us to 10^4 s.

Histograms of two moments can be subtracted, and those of two places summed; quantiles can be neither.
"""

import math
from collections.abc import Iterable
from itertools import accumulate, zip_longest
from typing import Final

Counts = tuple[int, ...]
"""Number of values in each bucket; buckets beyond its end are empty."""

LOWEST_S: Final = 1e-6
_GROWTH: Final = math.log(1.05)
BUCKETS: Final = math.ceil(math.log(1e4 / LOWEST_S) / _GROWTH) + 1


def bucket_of(seconds: float) -> int:
    """Values out of range count in the first or last bucket."""
    return 0 if seconds <= LOWEST_S else min(BUCKETS - 1, math.floor(math.log(seconds / LOWEST_S) / _GROWTH))


def quantile(counts: Iterable[tuple[int, int]], total: int, share: float) -> float:
    """Seconds below which `share` (0 to 1) of `total` values lie, to within 2.5 %; NaN when there are none.

    counts: (bucket, number) in ascending order; empty buckets may be left out.
    """
    if not total:
        return math.nan
    seen = accumulate(counts, lambda before, each: (each[0], before[1] + each[1]))
    at = next(bucket for bucket, up_to in seen if up_to > share * (total - 1))
    return LOWEST_S * math.exp((at + 0.5) * _GROWTH)


def merge(*each: Counts) -> Counts:
    return tuple(map(sum, zip_longest(*each, fillvalue=0)))


def subtract(after: Counts, before: Counts) -> Counts | None:
    """What was counted after `before`; None where the counting restarted in between."""
    found = tuple(a - b for a, b in zip_longest(after, before, fillvalue=0))
    return found if min(found, default=0) >= 0 else None

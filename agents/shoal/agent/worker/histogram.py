"""A streaming histogram of seconds: constant memory, quantiles to within 2.5 %, exact counts."""

import math
from collections.abc import Iterable
from typing import Final

_LOWEST_S: Final = 1e-6
_GROWTH: Final = math.log(1.05)
_BUCKETS: Final = math.ceil(math.log(1e4 / _LOWEST_S) / _GROWTH)


class Histogram:
    """Buckets 5 % apart from 1 us to 10^4 s; what lies outside counts in the first or last."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total_s = 0.0
        for value in seconds:
            self.add(value)

    def add(self, seconds: float) -> None:
        at = 0 if seconds <= _LOWEST_S else min(_BUCKETS, math.floor(math.log(seconds / _LOWEST_S) / _GROWTH))
        self._counts[at] = self._counts.get(at, 0) + 1
        self.count += 1
        self.total_s += seconds

    def quantile(self, share: float) -> float:
        """Seconds below which `share` of the values lie; NaN when there are none. `share` in 0..1."""
        if not self.count:
            return math.nan
        rank = share * (self.count - 1)
        seen = 0
        at = 0
        for at in sorted(self._counts):
            seen += self._counts[at]
            if seen > rank:
                break
        return _LOWEST_S * math.exp((at + 0.5) * _GROWTH)

"""A streaming histogram of seconds: constant memory, quantiles within 2.5 %, exact counts."""

from collections.abc import Iterable

from shoal.types.latency import Counts, bucket_of, quantile


class Histogram:
    """Counts values in the buckets of `shoal.types.latency`."""

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        for value in seconds:
            self.add(value)

    @classmethod
    def of(cls, parts: Iterable["Histogram"]) -> "Histogram":
        """The sum of several histograms."""
        found = cls()
        for part in parts:
            found.count += part.count
            for at, count in part._counts.items():
                found._counts[at] = found._counts.get(at, 0) + count
        return found

    def add(self, seconds: float) -> None:
        at = bucket_of(seconds)
        self._counts[at] = self._counts.get(at, 0) + 1
        self.count += 1

    @property
    def counts(self) -> Counts:
        return tuple(self._counts.get(at, 0) for at in range(max(self._counts, default=-1) + 1))

    def quantile(self, share: float) -> float:
        """Seconds below which `share` (0..1) of the values lie; NaN when there are none."""
        return quantile(sorted(self._counts.items()), self.count, share)

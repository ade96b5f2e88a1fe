"""The time after which a run counts as stuck. A limit is needed because a runtime does not report progress."""

import threading
from typing import Final

from shoal.agent.core.histogram import Histogram

MIN_LIMIT_S: Final = 1.5
FACTOR: Final = 4.0
"""Limit as a multiple of the p99. With one more p99 as grace, and the retry, a caller waits at most max(2 s, 5 x
p99)."""
MIN_GRACE_S: Final = 0.25
"""Least time for a run to end after it was told to terminate. A single operator cannot be interrupted."""
_QUANTILE: Final = 0.99


class RunTimeouts:
    """Time limits of one loaded model.

    Sizes are elements of all inputs together. A run is expected to take the p99 of seconds per element, times its size.
    Beyond the largest input ever answered the estimate grows quadratically, as attention does.
    """

    def __init__(self, size: int, seconds: float) -> None:
        """The warm-up run of `size` elements took `seconds`."""
        self._lock = threading.Lock()
        self._element_times = Histogram()
        self._largest_size = 1
        self.record_run(size, seconds)

    def record_run(self, size: int, seconds: float) -> None:
        """Record a run that was answered. Callable from any thread."""
        size = max(1, size)
        with self._lock:
            self._largest_size = max(self._largest_size, size)
            self._element_times.add(seconds / size)

    def limit_s(self, size: int) -> float:
        """Seconds after which a run is told to terminate."""
        return max(MIN_LIMIT_S, FACTOR * self._estimate_s(size))

    def grace_s(self, size: int) -> float:
        """Seconds after that until the process exits."""
        return max(MIN_GRACE_S, self._estimate_s(size))

    def _estimate_s(self, size: int) -> float:
        with self._lock:
            return self._element_times.quantile(_QUANTILE) * max(1, size) * max(1.0, size / self._largest_size)

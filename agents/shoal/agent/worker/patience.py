"""How long a run may take before it counts as stuck: a runtime does not say whether it makes progress."""

import threading
from typing import Final

from shoal.agent.core.histogram import Histogram

LEAST_S: Final = 1.5
FACTOR: Final = 4.0
"""Times the p99. With one p99 more for the run to obey, and the retry, a caller waits at most max(2 s, 5 x p99)."""
GRACE_S: Final = 0.25
"""At least so long a run has to obey once it was told to terminate; a single operator cannot be interrupted."""
_SHARE: Final = 0.99


class Patience:
    """Of one loaded model. Sizes are elements of all inputs together; a run is expected to take its share of the p99 of
    seconds an element, and quadratically more beyond the largest input that was ever answered (attention does)."""

    def __init__(self, size: int, seconds: float) -> None:
        """One run of `size` elements took `seconds` at warm-up."""
        self._lock = threading.Lock()
        self._of_element = Histogram()
        self._largest = 1
        self.ran(size, seconds)

    def ran(self, size: int, seconds: float) -> None:
        """A run was answered. From any thread."""
        size = max(1, size)
        with self._lock:
            self._largest = max(self._largest, size)
            self._of_element.add(seconds / size)

    def limit_s(self, size: int) -> float:
        """After so many seconds a run is told to terminate."""
        return max(LEAST_S, FACTOR * self._expected_s(size))

    def grace_s(self, size: int) -> float:
        """So long after that it has to obey."""
        return max(GRACE_S, self._expected_s(size))

    def _expected_s(self, size: int) -> float:
        with self._lock:
            return self._of_element.quantile(_SHARE) * max(1, size) * max(1.0, size / self._largest)

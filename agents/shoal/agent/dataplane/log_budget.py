"""Bounds the log lines that clients can cause."""

from typing import Final

LINES: Final = 10
WINDOW_S: Final = 60.0


class LogBudget:
    """At most LINES lines in WINDOW_S; suppressed ones are counted."""

    def __init__(self) -> None:
        self._start = float("-inf")
        self._lines = 0
        self._suppressed = 0

    def take(self, now: float) -> int | None:
        """None: write no line. Else the number of lines suppressed before this one. `now` is seconds of a monotonic
        clock."""
        if now - self._start >= WINDOW_S:
            self._start, self._lines = now, 0
        if self._lines >= LINES:
            self._suppressed += 1
            return None
        self._lines += 1
        left_out, self._suppressed = self._suppressed, 0
        return left_out

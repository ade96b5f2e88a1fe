"""Where a request runs: on the event loop, or in a runner's thread. Decisions on measured seconds.

A thread keeps the loop free while the model runs, and costs a hop: two wake-ups, and the interpreter's lock passed on
twice. What the hop hides is at most the run, in which alone the runtime leaves that lock. So a run that is shorter than
the hop runs on the loop. A process that has one processor hides nothing: what the loop would do meanwhile waits for
that processor anyway. There a run goes to a thread only to let the loop in, when it would hold the loop for longer than
HOLD_S.
"""

from typing import Final

HOLD_S: Final = 0.004
"""How late the loop may be with pings, cancellations and other models. A hundredth of the time between two pings of a
front (`dataplane.upstream.PING_EVERY_S`)."""
_NEWEST_WEIGHT: Final = 0.2
"""Of the newest run in the mean: a change of machine or model shows after five that are timed."""
_TIMED_FIRST: Final = 8
"""Each of the first runs of a size is timed: the first of all, which is slow, has a fifth of the mean then."""
_TIMED_EVERY: Final = 8
"""Of those that follow one of so many is: the kernel tells a thread's processor time, and to ask it twice takes a
fourteenth of a compiled worker's time for 64 floats (by `perf`). All are again, after one that took longer by the clock
than a run on the loop may: else what comes by turns with shorter ones would be the one that is never timed."""


def inline_limit_s(hop_s: float, processors: int) -> float:
    """The longest run for the event loop. `hop_s`: measured cost of a hop. `processors`: those of this process."""
    return max(hop_s, HOLD_S) if processors == 1 else hop_s


_MOST_SHAPES: Final = 1024
"""Of requests that are remembered: when there are more, all run in a thread once more. A choice."""
Shapes = tuple[tuple[int, ...], ...]
"""Of all inputs of a request."""


class RunPlace:
    """Chooses by the measured time of runs of like size: requests whose bytes have the same number of binary digits. Of
    these only those whose shapes have run before and were short the last time, since shapes can make a run long that
    takes no more bytes."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: as `inline_limit_s`; 0: nothing runs on the loop."""
        self.limit_s = limit_s
        self._means: dict[int, float] = {}
        # Runs by size, timed or not.
        self._counts: dict[int, int] = {}
        # Whose last run was short enough.
        self._short: set[Shapes] = set()

    def is_to_be_timed(self, size: int) -> bool:
        """Whether the processor time of this run of a request of `size` bytes is to be recorded. Counts the run. Where
        nothing runs on the loop, no time decides anything."""
        if self.limit_s == 0:
            return False
        key = size.bit_length()
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return count <= _TIMED_FIRST or count % _TIMED_EVERY == 0

    def record_untimed(self, size: int, clock_s: float) -> None:
        """A run whose processor time was not recorded took `clock_s` by the clock."""
        if 0 < self.limit_s < clock_s:
            self._counts[size.bit_length()] = 0

    def is_inline(self, size: int) -> bool:
        """Whether a request of `size` bytes runs on the loop. One of a size that has not run yet does not."""
        mean = self._means.get(size.bit_length())
        return mean is not None and mean <= self.limit_s

    def is_short(self, shapes: Shapes) -> bool:
        """Whether a request of these shapes has run, and was short enough for the loop the last time."""
        return shapes in self._short

    def record_shapes(self, shapes: Shapes, clock_s: float) -> None:
        """A run of them took `clock_s` by the clock."""
        if clock_s > self.limit_s:
            self._short.discard(shapes)
        elif shapes not in self._short:
            if len(self._short) >= _MOST_SHAPES:
                self._short.clear()
            self._short.add(shapes)

    def record(self, size: int, seconds: float) -> None:
        """The run of a request of `size` bytes took `seconds` of its thread's processor time, wherever it ran."""
        key = size.bit_length()
        mean = self._means.get(key, seconds)
        self._means[key] = mean + _NEWEST_WEIGHT * (seconds - mean)

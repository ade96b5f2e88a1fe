"""How long a peer has been silent, counting only the time in which the observer ran.

A supervisor that was stopped or starved finds, when it runs again, that all its peers have been silent for as long:
their answers are unread in its sockets. So time in which the observer did not run must not count. Pure: a shell ticks
it while a request is open, and checks `is_expired` after it has read what arrived.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

from shoal.types.units import Seconds

STARVED: Final = 0.75
"""Share of a tick. A peer that ran for the other quarter of 2 s had half a second; any healthy one answers in that."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """One peer that owes an answer. All times `now` must be of the same monotonic clock."""

    # A longer silence means that the peer is stuck.
    limit_s: Seconds
    # Planned time between two ticks; a longer gap counts only this much.
    period_s: Seconds
    # Time of the last tick, or of the request.
    ticked_at: float
    # Silence so far, without the observer's own gaps.
    silent_s: Seconds = Seconds(0.0)

    def on_tick(self, now: float, starved_s: float = 0.0) -> Self:
        """The observer ran, and no answer has arrived yet.

        starved_s: how long the peer waited for a processor since the last tick. Where that was nearly the whole gap,
        the tick counts only the time in which the peer ran.
        """
        gap_s = max(0.0, now - self.ticked_at)
        counted = min(gap_s, self.period_s)
        if starved_s >= STARVED * gap_s and starved_s > 0:
            counted = min(max(0.0, gap_s - starved_s), counted)
        return replace(self, ticked_at=now, silent_s=Seconds(self.silent_s + counted))

    def on_sign(self, now: float) -> Self:
        """The peer answered, or showed progress."""
        return replace(self, ticked_at=now, silent_s=Seconds(0.0))

    @property
    def is_expired(self) -> bool:
        # a sum of a hundred periods may differ from their product by a few units in the last place
        return self.silent_s >= self.limit_s - 1e-9

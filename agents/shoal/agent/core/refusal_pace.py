"""When callers that are over their tenant's limits hear of it, so that a flood of them does not fill the front's time.

A client that asks again as soon as it is refused would otherwise be refused as fast as the front can. Refusals beyond a
few at once are spaced, one caller after the other: one that floods delays its own. What waits is bounded: beyond
that a refusal leaves at once, the caller's oldest.
"""

from collections import deque
from typing import Final, Generic, TypeVar

from shoal.types.units import Elapsed

SPACING_S: Final = 0.002
"""Seconds between two refusals. One takes a front some 60 us of CPU, reading the next request of the same client
included (docs/decisions/0029-tenants.md), which makes 3 % of a core."""
AT_ONCE: Final = 8
"""Refusals that may leave together, half a millisecond of CPU."""
MAX_WAITING: Final = 1024
"""Refusals that wait, of all callers. Each holds a call, whose request is dropped."""
MAX_WAITING_OF_CALLER: Final = 256
"""As many as the calls of one connection."""
_T = TypeVar("_T")


class RefusalPace(Generic[_T]):
    """The refusals of one front that wait. It belongs to one thread."""

    def __init__(self) -> None:
        self._free_at = Elapsed(0.0)
        """When the next refusal has its turn, if none had left at once."""
        self._waiting: dict[str, deque[_T]] = {}
        """By caller, the next first."""
        self._count = 0

    @property
    def waiting(self) -> int:
        return self._count

    def enter(self, now: Elapsed) -> bool:
        """Whether a refusal leaves at once; otherwise it is to `wait`."""
        if self._count or self._free_at - now > (AT_ONCE - 0.5) * SPACING_S:
            return False
        self._free_at = Elapsed(max(self._free_at, now) + SPACING_S)
        return True

    def wait(self, caller: str, refusal: _T) -> _T | None:
        """After `enter` refused. Returns the refusal that leaves in its place, if too many wait."""
        own = self._waiting.setdefault(caller, deque())
        own.append(refusal)
        self._count += 1
        if len(own) > MAX_WAITING_OF_CALLER or self._count > MAX_WAITING:
            return self._pop(caller)
        return None

    def withdraw(self, caller: str, refusal: _T) -> None:
        """Nobody waits for it any more. Idempotent."""
        own = self._waiting.get(caller)
        if own is not None and refusal in own:
            own.remove(refusal)
            self._count -= 1
            if not own:
                del self._waiting[caller]

    def next_at(self) -> Elapsed | None:
        """When the next refusal that waits has its turn; None: none waits."""
        return self._free_at if self._count else None

    def next(self, now: Elapsed) -> _T | None:
        """The refusal that has its turn now, of the caller that waits longest for one; None: it is too early."""
        if not self._count or now < self._free_at:
            return None
        self._free_at = Elapsed(now + SPACING_S)
        caller = next(iter(self._waiting))
        refusal = self._pop(caller)
        if (own := self._waiting.pop(caller, None)) is not None:
            self._waiting[caller] = own  # behind the others
        return refusal

    def _pop(self, caller: str) -> _T:
        own = self._waiting[caller]
        self._count -= 1
        refusal = own.popleft()
        if not own:
            del self._waiting[caller]
        return refusal

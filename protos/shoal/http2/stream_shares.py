"""Who gets the streams of a connection, where its peer allows no more than a number of them.

A payer may take a stream while it holds fewer than `LEFT_FACTOR` times those that are left (dynamic thresholds:
Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). So one payer alone gets three quarters, and
whoever comes next finds some: a call cannot be taken back. Four payers that take all they may leave one stream of 256
to a fifth.

Beyond that calls wait, those of a payer in their order. A stream that is free goes to the payer that holds fewest, and
between those that hold as many in turn. Nothing waits that may have a stream.
"""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

LEFT_FACTOR: Final = 3
"""Streams of a payer for each that is left. 1 leaves half of them unused by a payer alone, 3 a quarter; with 3 the
second payer finds 48 of 256, with 7 it finds 28."""

Waiter = TypeVar("Waiter")


class StreamShares(Generic[Waiter]):
    """The streams of one connection, and what waits for them. A waiter is any object, compared by identity or value."""

    def __init__(self, *, is_shared: bool) -> None:
        """`is_shared`: several payers use it. Otherwise one gets every stream."""
        self._is_shared = is_shared
        self._held: dict[str, int] = {}
        """Streams by payer, of those that hold any."""
        self.total = 0
        """Streams of all payers, those that are granted to a waiter included. To be read only."""
        self.lines: dict[str, OrderedDict[Waiter, None]] = {}
        """What waits by payer, of those that wait; whose turn comes first stands first. To be read only."""

    def may_take(self, payer: str, most: int) -> bool:
        """Whether the payer's next call needs not wait. `most`: streams that the peer allows now."""
        left = most - self.total  # not by `_has_share`: every call comes here
        has_share = left > 0 and (not self._is_shared or self._held.get(payer, 0) < LEFT_FACTOR * left)
        return has_share and payer not in self.lines

    def take(self, payer: str) -> None:
        """A call that may has a stream now, until `leave`."""
        self._held[payer] = self._held.get(payer, 0) + 1
        self.total += 1

    def leave(self, payer: str) -> None:
        """Its call is over. Then others may be granted its stream."""
        rest = self._held[payer] - 1
        if rest:
            self._held[payer] = rest
        else:
            del self._held[payer]
        self.total -= 1

    def wait(self, payer: str, waiter: Waiter) -> None:
        """Have it wait until `grant` returns it, unless it withdraws."""
        self.lines.setdefault(payer, OrderedDict())[waiter] = None

    def withdraw(self, payer: str, waiter: Waiter) -> bool:
        """It waits no longer; False: it did not any more."""
        line = self.lines.get(payer)
        if line is None or waiter not in line:
            return False
        del line[waiter]
        if not line:
            del self.lines[payer]
        return True

    def grant(self, most: int) -> tuple[str, Waiter] | None:
        """The next waiter and its payer, which has a stream now until it is to `leave`; None: no other may have one."""
        if not self.lines:
            return None
        payer = min(self.lines, key=self._held_by)
        if not self._has_share(payer, most - self.total):
            return None  # nor may those that hold more
        line = self.lines.pop(payer)
        waiter, _ = line.popitem(last=False)
        if line:
            self.lines[payer] = line
        self.take(payer)
        return payer, waiter

    def end_waits(self) -> list[Waiter]:
        """Nothing waits any more; what did."""
        found = [waiter for line in self.lines.values() for waiter in line]
        self.lines.clear()
        return found

    def _has_share(self, payer: str, left: int) -> bool:
        return left > 0 and (not self._is_shared or self._held.get(payer, 0) < LEFT_FACTOR * left)

    def _held_by(self, payer: str) -> int:
        return self._held.get(payer, 0)

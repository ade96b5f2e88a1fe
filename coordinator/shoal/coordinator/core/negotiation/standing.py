"""How far a region is believed when it asks: whether the room that others hold for it comes to anything.

The other half of `reputation`, which judges who promises. Imports nothing of a region, so that a delegate and a
federation judge alike.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code

NEWEST: Final = 0.1
"""Weight of one hold against all before it: several are lost together when their origin crashes."""
LEAST: Final = 0.1
HALF_LIFE_S: Final = 120.0
"""What is held against it weighs half as much after so long: a share too small for anything would else be for ever."""


@dataclass(frozen=True, slots=True)
class Standing:
    """value: in [LEAST, 1], at the time `at` (s, of any clock that goes on)."""

    value: float
    at: float


def value(standing: Standing | None, now: float) -> float:
    """1 of who never held anything."""
    if standing is None:
        return 1.0
    faded = 0.5 ** (max(0.0, now - standing.at) / HALF_LIFE_S)
    return float(standing.value**faded)


def after(standing: Standing | None, wasted: float, now: float) -> Standing:
    """With one more hold. wasted: share of its time that it kept others out for nothing: 0 awarded, 1 never claimed."""
    share = max(LEAST, 1.0 - wasted)
    before = value(standing, now)
    return Standing(math.exp((1 - NEWEST) * math.log(before) + NEWEST * math.log(share)), now)


AWARDED_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Askers:
    """What one region's ledger says of those who had it hold room.

    awarded: agreements that others run for it, of which no outcome is known: they are no holds of its own."""

    standings: Mapping[str, Standing] = field(default_factory=dict)
    awarded: tuple[str, ...] = ()


def read(askers: Askers, entries: Iterable[LedgerEntry], now: float) -> Askers:
    """With new entries of that ledger, oldest first. One that was released says not how long it stood."""
    standings, awarded = dict(askers.standings), dict.fromkeys(askers.awarded)
    for entry in entries:
        if entry.what == "awarded":
            awarded[entry.agreement] = None
        elif entry.agreement in awarded:
            del awarded[entry.agreement]
        elif entry.what == "granted" or (entry.what, entry.code) == ("expired", Code.HOLD_EXPIRED):
            wasted = 1.0 if entry.what == "expired" else 0.0
            standings[entry.counterpart] = after(standings.get(entry.counterpart), wasted, min(entry.at, now))
    return Askers(standings, tuple(awarded)[-AWARDED_KEPT:])

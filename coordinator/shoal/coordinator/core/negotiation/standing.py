"""A region's standing as an origin: whether the room that delegates hold for it ends in awards.

The counterpart of `reputation`, which judges promises. Imports nothing of a region, so that a delegate and a
federation judge alike.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code

NEWEST: Final = 0.1
"""Weight of one hold against all earlier ones: several are lost together when their origin crashes."""
LEAST: Final = 0.1
HALF_LIFE_S: Final = 120.0
"""Time in which the weight of past holds halves. Otherwise a share too small for any hold would stay that small for
ever."""


@dataclass(frozen=True, slots=True)
class RegionStanding:
    """A region's standing at one time."""

    # In [LEAST, 1]; lower after holds that were never claimed.
    value: float
    # When it had this value, in s of any clock that does not stop.
    at: float


def value(standing: RegionStanding | None, now: float) -> float:
    """The standing at `now`; 1 for a region that never held anything."""
    if standing is None:
        return 1.0
    faded = 0.5 ** (max(0.0, now - standing.at) / HALF_LIFE_S)
    return float(standing.value**faded)


def with_hold(standing: RegionStanding | None, wasted: float, now: float) -> RegionStanding:
    """The standing after one more hold. wasted: share of its time that it blocked others in vain: 0 awarded, 1 never
    claimed."""
    share = max(LEAST, 1.0 - wasted)
    before = value(standing, now)
    return RegionStanding(math.exp((1 - NEWEST) * math.log(before) + NEWEST * math.log(share)), now)


AWARDED_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class LedgerStandings:
    """Standings of the regions for which one region held room, by its ledger."""

    # By name of the region that the room was held for.
    standings: Mapping[str, RegionStanding] = field(default_factory=dict)
    # Agreements that others run for it and whose result is unknown; they are not its own holds.
    awarded: tuple[str, ...] = ()


def with_entries(known: LedgerStandings, entries: Iterable[LedgerEntry], now: float) -> LedgerStandings:
    """The standings after new ledger entries, oldest first. A released hold does not count, because its duration is
    not recorded."""
    standings, awarded = dict(known.standings), dict.fromkeys(known.awarded)
    for entry in entries:
        if entry.what == "awarded":
            awarded[entry.agreement] = None
        elif entry.agreement in awarded:
            del awarded[entry.agreement]
        elif entry.what == "granted" or (entry.what, entry.code) == ("expired", Code.HOLD_EXPIRED):
            wasted = 1.0 if entry.what == "expired" else 0.0
            standings[entry.counterpart] = with_hold(standings.get(entry.counterpart), wasted, min(entry.at, now))
    return LedgerStandings(standings, tuple(awarded)[-AWARDED_KEPT:])

"""Who has others hold room for nothing is believed less, and is forgiven in minutes (A28)."""

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.negotiation.standing import (
    HALF_LIFE_S,
    LEAST,
    LedgerStandings,
    RegionStanding,
    value,
    with_entries,
    with_hold,
)
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code
from shoal.types.units import Wall


def of(*wasted: float, every_s: float = 10.0) -> float:
    standing: RegionStanding | None = None
    for number, each in enumerate(wasted):
        standing = with_hold(standing, each, number * every_s)
    return value(standing, (len(wasted) - 1) * every_s)


def entry(what: str, agreement: str, *, code: str = "", by: str = "greedy", at: float = 100.0) -> LedgerEntry:
    return LedgerEntry(1, Wall(at), what, agreement, by, "shop/m", code, "", "", "")


def read_entries(*entries: LedgerEntry, now: float = 100.0) -> LedgerStandings:
    return with_entries(LedgerStandings(), entries, now)


def test_a28_standing_falls_with_holds_that_come_to_nothing() -> None:
    assert value(None, 0.0) == of(0.0) == of(*[0.0] * 50) == 1.0
    assert of(1.0) > 0.75, "one that was lost ruins nobody"
    assert of(*[1.0] * 40, every_s=0.1) < 1.2 * LEAST
    assert of(*[1.0] * 40) < 0.25, "though each is forgiven in part while the next one lasts"
    assert of(*[0.03] * 100) > 0.9, "releasing at once what another won costs little"
    assert of(*[0.95] * 40) < 0.25, "releasing at the last moment is no better than never"


def test_a28_awards_and_time_win_it_back() -> None:
    bad = reduce(lambda known, _: with_hold(known, 1.0, 0.0), range(40), RegionStanding(1.0, 0.0))
    good = reduce(lambda known, _: with_hold(known, 0.0, 0.0), range(20), bad)
    assert value(good, 0.0) > 0.7
    assert value(bad, HALF_LIFE_S) == value(bad, 0.0) ** 0.5
    assert value(bad, 10 * HALF_LIFE_S) > 0.99


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 100)), max_size=50))
def test_standing_is_a_share(holds: list[tuple[float, float]]) -> None:
    standing, now = None, 0.0
    for wasted, later in holds:
        now += later
        standing = with_hold(standing, wasted, now)
        assert LEAST <= value(standing, now) <= 1.0


def test_a28_a_ledger_tells_of_holds_that_expired_and_of_awards() -> None:
    expired = [entry("expired", f"b-{n}", code=Code.HOLD_EXPIRED) for n in range(3)]
    lost = read_entries(*expired).standings["greedy"].value
    assert lost < 0.6
    assert read_entries(*expired, entry("granted", "g-1")).standings["greedy"].value > lost
    assert read_entries(entry("offered", "b-1"), entry("released", "b-1")).standings == {}


def test_what_a_region_had_awarded_itself_is_no_hold_of_the_other() -> None:
    own = read_entries(entry("awarded", "g-1", by="paris"))
    assert own.awarded == ("g-1",)
    assert with_entries(own, [entry("granted", "g-1", by="paris")], 100.0) == LedgerStandings()
    assert with_entries(own, [entry("expired", "g-1", by="paris", code=Code.HOLD_EXPIRED)], 100.0) == LedgerStandings()
    assert "greedy" in with_entries(own, [entry("granted", "g-2")], 100.0).standings


def test_a_clock_that_is_ahead_keeps_nothing_from_fading() -> None:
    ahead = read_entries(entry("expired", "b-1", code=Code.HOLD_EXPIRED, at=1e9), now=100.0)
    assert ahead.standings["greedy"].at == 100.0

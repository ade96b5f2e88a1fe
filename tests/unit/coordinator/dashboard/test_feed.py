"""The live tables: whoever reads now and then has in the end what whoever reads everything has."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.api.dashboard import feed
from shoal.coordinator.api.dashboard.feed import Changes, Feed, RowChange, RowKey

TABLES = ("nodes", "events")
change = st.tuples(
    st.tuples(st.sampled_from(TABLES), st.sampled_from("abcdef")), st.one_of(st.none(), st.sampled_from(["1", "2"]))
)


def apply(known: dict[RowKey, str], told: Changes) -> None:
    if told.is_whole:
        known.clear()
    for key, row in told.rows:
        if row is None:
            known.pop(key, None)
        else:
            known[key] = row


@given(
    rounds=st.lists(st.tuples(st.lists(change, max_size=6), st.booleans()), max_size=12),
    tables=st.sets(st.sampled_from(TABLES)),
    kept=st.integers(0, 3),
)
@settings(deadline=None)
def test_a_reader_that_skips_rounds_ends_with_the_same_rows(
    rounds: Sequence[tuple[list[RowChange], bool]], tables: set[str], kept: int
) -> None:
    live, most = Feed(), feed.GONE_KEPT
    feed.GONE_KEPT = kept  # type: ignore[misc] # so few removals that they are forgotten
    try:
        truth: dict[RowKey, str] = {}
        known: dict[RowKey, str] = {}
        version = 0
        for changes, reads in [*rounds, ([], True)]:
            live.publish(changes)
            for key, row in changes:
                truth.pop(key, None)
                if row is not None:
                    truth[key] = row
            if reads:
                told = live.since(version, frozenset(tables))
                apply(known, told)
                version = told.version
        assert known == {key: row for key, row in truth.items() if key[0] in tables}
        assert len(live) == len(truth)
    finally:
        feed.GONE_KEPT = most  # type: ignore[misc]


def test_a_row_that_is_as_it_was_is_no_change() -> None:
    live = Feed()
    assert live.publish([(("nodes", "a"), "1")])
    assert not live.publish([(("nodes", "a"), "1"), (("nodes", "b"), None)])
    told = live.since(1, frozenset(TABLES))
    assert (told.rows, told.is_whole, told.version) == ([], False, 1)


def test_a_number_from_another_coordinator_starts_again() -> None:
    live = Feed()
    live.publish([(("nodes", "a"), "1")])
    assert live.since(99, frozenset(TABLES)).is_whole


def test_who_is_two_thousand_events_behind_goes_on_where_it_was() -> None:
    """An event takes the place of an older one in two tables."""
    live = Feed()
    tables = frozenset({"events", "latest_events"})
    live.publish(((table, "0"), "1") for table in tables)
    for number in range(1, 2_001):
        live.publish(((table, str(at)), row) for table in tables for at, row in ((number, "1"), (number - 1, None)))
    told = live.since(2, tables)
    assert not told.is_whole
    assert len(told.rows) == 2 * 2_001


def test_removed_rows_take_no_memory_for_ever() -> None:
    live = Feed()
    for number in range(3 * feed.GONE_KEPT):
        live.publish([(("events", str(number)), "1")])
        live.publish([(("events", str(number)), None)])
    assert len(live._rows) <= feed.GONE_KEPT + 1
    assert len(live) == 0

"""Which value of a signal counts, what of it is news, and how a feed's text reads."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.core.signals.decide import (
    CHANGE_SHARE,
    MAX_SKEW_S,
    ReportedSignal,
    current_signal,
    describe_source,
    poll_interval_s,
    signal_events,
)
from shoal.coordinator.core.signals.feed import parse_readings
from shoal.coordinator.core.signals.model import (
    BY_HAND,
    CONSTANT,
    MAX_VALUES,
    Signal,
    SignalName,
    SignalOverride,
    SignalReading,
    SignalRule,
)
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds, Wall

PRICE, CARBON = SignalName.PRICE, SignalName.CARBON
NOW = Wall(1_800_000_000.0)
HOUR = 3600.0
FEED = SignalRule(source="./carbon.csv", stale_after_s=Seconds(2 * HOUR))
SAFE = SignalRule(source="./carbon.csv", stale_after_s=Seconds(2 * HOUR), fallback=350.0)


def ago(seconds: float) -> Wall:
    return Wall(NOW - seconds)


def read(*pairs: tuple[float, float]) -> tuple[SignalReading, ...]:
    """(seconds ago, value), oldest first."""
    return tuple(SignalReading(value, ago(seconds)) for seconds, value in pairs)


AN_HOUR_OLD = read((5 * HOUR, 90.0), (HOUR, 100.0), (-HOUR, 110.0))
OLD = read((9 * HOUR, 80.0), (3 * HOUR, 90.0))
WORD = SignalOverride(12.0, ago(99 * HOUR), "shoal://eu/operator/ann")


@pytest.mark.parametrize(
    ("rule", "feed", "word", "wanted"),
    [
        (None, (), None, None),
        (SignalRule(constant=0.0), (), None, Signal(CARBON, 0.0, CONSTANT)),
        (FEED, AN_HOUR_OLD, None, Signal(CARBON, 100.0, FEED.source, ago(HOUR))),
        (SAFE, AN_HOUR_OLD, None, Signal(CARBON, 100.0, FEED.source, ago(HOUR))),
        (FEED, OLD, None, Signal(CARBON, 90.0, FEED.source, ago(3 * HOUR), stale=True)),
        (SAFE, OLD, None, Signal(CARBON, 350.0, FEED.source, ago(3 * HOUR), stale=True, fallback=True)),
        (FEED, (), None, None),
        (SAFE, (), None, Signal(CARBON, 350.0, FEED.source, None, stale=True, fallback=True)),
        (FEED, read((-2 * MAX_SKEW_S, 1.0)), None, None),
        (FEED, read((-MAX_SKEW_S / 2, 1.0)), None, Signal(CARBON, 1.0, FEED.source, ago(-MAX_SKEW_S / 2))),
        (None, (), WORD, Signal(CARBON, 12.0, BY_HAND, WORD.at)),
        (SignalRule(constant=7.0), (), WORD, Signal(CARBON, 12.0, BY_HAND, WORD.at)),
        (SAFE, AN_HOUR_OLD, WORD, Signal(CARBON, 12.0, BY_HAND, WORD.at)),
    ],
)
def test_what_counts(
    rule: SignalRule | None, feed: Sequence[SignalReading], word: SignalOverride | None, wanted: Signal | None
) -> None:
    assert current_signal(CARBON, rule, feed, word, NOW) == wanted


VALUES = st.floats(min_value=0, max_value=1000)
FEEDS = st.lists(st.tuples(st.floats(-1e5, 1e5), VALUES), max_size=6).map(
    lambda rows: read(*sorted(rows, key=lambda row: -row[0]))
)
RULES = st.builds(
    SignalRule, source=st.just("./x"), stale_after_s=st.floats(1, 1e5).map(Seconds), fallback=st.none() | VALUES
)


@given(RULES, FEEDS, st.floats(-1e5, 1e5))
def test_never_an_old_value_without_its_mark(rule: SignalRule, feed: tuple[SignalReading, ...], later: float) -> None:
    wall = Wall(NOW + later)
    begun = [each for each in feed if each.at <= wall + MAX_SKEW_S]
    signal = current_signal(CARBON, rule, feed, None, wall)
    if signal is None:
        assert not begun
        assert rule.fallback is None
        return
    newest = max((each.at for each in begun), default=None)
    assert signal.taken_at == newest, "of what the source said last, whether or not it counts"
    fresh = newest is not None and wall - newest <= rule.stale_after_s
    assert signal.stale is not fresh
    assert signal.fallback == (signal.stale and rule.fallback is not None)
    assert signal.value == (rule.fallback if signal.fallback else next(e.value for e in begun[::-1] if e.at == newest))
    assert ("stale" in describe_source(signal, wall) or "nothing yet" in describe_source(signal, wall)) == signal.stale


SIGNALS = st.none() | st.builds(
    Signal, st.just(PRICE), VALUES, st.just("./x"), st.just(NOW), stale=st.booleans(), fallback=st.just(False)
)


@given(st.lists(SIGNALS, max_size=12))
def test_news_come_once_each_way_and_never_for_a_little(seen: list[Signal | None]) -> None:
    told: ReportedSignal | None = None
    codes: list[str] = []
    for signal in seen:
        before = told
        told, found = signal_events(told, signal, NOW)
        codes += [each.code for each in found if each.code != "SIGNAL_CHANGED"]
        assert signal_events(told, signal, NOW)[1] == (), "what was told is not told again"
        if signal is not None and before is not None and told is not None:
            changed = any(each.code == "SIGNAL_CHANGED" for each in found)
            assert changed == (abs(signal.value - before.value) > CHANGE_SHARE * before.value)
            assert abs(told.value - signal.value) <= CHANGE_SHARE * told.value, "nobody is left with another picture"
    assert all(one != other for one, other in pairwise(codes)), "stale and back take turns"
    assert codes[:1] in ([], [Code.SIGNAL_STALE])


def test_news_say_what_why_and_before() -> None:
    fresh = Signal(CARBON, 100.0, "./carbon.csv", ago(120))
    told, (first,) = signal_events(None, fresh, NOW)
    assert (first.code, first.message) == ("SIGNAL_CHANGED", "carbon 100 gCO2/kWh (./carbon.csv, 2m ago)")
    stale = Signal(CARBON, 350.0, "./carbon.csv", ago(3 * HOUR), stale=True, fallback=True)
    told, found = signal_events(told, stale, NOW)
    assert [each.code for each in found] == [Code.SIGNAL_STALE, "SIGNAL_CHANGED"]
    assert found[1].message == ("carbon 350 gCO2/kWh (fallback: ./carbon.csv is stale, 3h ago), before 100 gCO2/kWh")
    _, found = signal_events(told, Signal(CARBON, 351.0, "./carbon.csv", NOW), NOW)
    assert [each.code for each in found] == ["SIGNAL_BACK"], "351 is no news after 350"


def test_a_file_is_looked_at_often_a_server_seldom() -> None:
    assert poll_interval_s(FEED) == 1.0
    assert poll_interval_s(SignalRule(source="https://x/y", stale_after_s=Seconds(7200.0))) == 300.0
    assert poll_interval_s(SignalRule(source="https://x/y", stale_after_s=Seconds(60.0))) == 15.0
    assert poll_interval_s(SignalRule(source="https://x/y", stale_after_s=Seconds(1.0))) == 10.0


AT_6 = Wall(1_795_240_800.0)  # 2026-11-21T06:00:00Z


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (PRICE, "0.40 USD/h\n", [(0.4, NOW)]),
        (PRICE, "\ufeff12 USD/d", [(0.5, NOW)]),
        (CARBON, "350 gCO2/kWh", [(350.0, NOW)]),
        (PRICE, "at,value\n2026-11-21T06:00:00Z, 0.40 USD/h\n", [(0.4, AT_6)]),
        (CARBON, "at,gCO2/kWh,zone\n2026-11-21T07:00:00+01:00,350,FR\n", [(350.0, AT_6)]),
        (CARBON, "gCO2/kWh,at\r\n70,2026-11-21T07:00:00Z\r\n60,2026-11-21T06:00:00Z\r\n",
         [(60.0, AT_6), (70.0, AT_6 + HOUR)]),
        (CARBON, "at,gCO2/kWh\n2026-11-21T06:00:00Z,60\n2026-11-21T06:00:00Z,61\n", [(61.0, AT_6)]),
        (CARBON, '{"value": "350 gCO2/kWh"}', [(350.0, NOW)]),
        (CARBON, '{"gCO2/kWh": 350.5, "at": "2026-11-21T06:00:00Z", "zone": "FR"}', [(350.5, AT_6)]),
        (PRICE, '[{"at": "2026-11-21T06:00:00Z", "value": "1 USD/h"}]', [(1.0, AT_6)]),
    ],
)  # fmt: skip
def test_a_feed_reads(name: SignalName, text: str, wanted: list[tuple[float, float]]) -> None:
    assert [(each.value, each.at) for each in parse_readings(name, text, NOW)] == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "350", "350 kWh", "-1 gCO2/kWh", "nan gCO2/kWh", "1e5 gCO2/kWh", "at,value\n", "at,value\n2026-11-21,1\n",
        "at,gCO2/kWh\n2026-11-21T06:00:00,60\n", "at,gCO2/kWh\n,60\n", "at,gCO2/kWh\n2026-11-21T06:00:00Z,\n",
        "at,gCO2/kWh\n2026-11-21T06:00:00Z,60,61\n", "at,gCO2/kWh,value\n2026-11-21T06:00:00Z,60,60 gCO2/kWh\n",
        "when,gCO2/kWh\n2026-11-21T06:00:00Z,60\n", "at,USD/h\n2026-11-21T06:00:00Z,60\n",
        "at,gCO2/kWh\nsoon,60\n", "at,gCO2/kWh\n2026-11-21T06:00:00Z,60\n2026-11-21T07:00:00Z,x\n",
        "[]", "[1]", "{}", "{", '{"gCO2/kWh": true}', '{"gCO2/kWh": NaN}', '{"value": 350}', '{"at": 5, "gCO2/kWh": 1}',
        "[" * 100_000, "<html>\n<body>no</body></html>",
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_one_mistake_and_nothing_of_it_counts(text: str) -> None:
    with pytest.raises(ShoalError) as caught:
        parse_readings(CARBON, text, NOW)
    assert caught.value.code == Code.SIGNAL_INVALID
    assert caught.value.refusal.remedy


@given(st.text() | st.text(alphabet='[]{},:"0123456789.eE+-TZ at\n', max_size=200))
def test_any_text_is_readings_or_a_coded_refusal(text: str) -> None:
    found, refused = tuple[SignalReading, ...](), None
    try:
        found = parse_readings(CARBON, text, NOW)
    except ShoalError as error:
        refused = error.code
    assert found or refused == Code.SIGNAL_INVALID
    assert all(0 <= each.value <= MAX_VALUES[CARBON] for each in found)
    assert all(one.at < other.at for one, other in pairwise(found))

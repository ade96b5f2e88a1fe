"""Which value of a signal counts, and which changes are reported as events."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.core.signals.model import (
    BY_HAND,
    CONSTANT,
    Signal,
    SignalName,
    SignalOverride,
    SignalReading,
    SignalRule,
)
from shoal.types.codes import Code
from shoal.types.units import Seconds, Wall, show_seconds

MAX_SKEW_S = 60.0
"""A reading may be this far ahead of the coordinator's clock and still count. Anything later is a forecast."""
CHANGE_SHARE = 0.01
"""A change by more than this share of the last reported value is an event."""
FILE_POLL_S = Seconds(1.0)
URL_POLL_RANGE_S = (Seconds(10.0), Seconds(300.0))


def current_signal(
    name: SignalName,
    rule: SignalRule | None,
    readings: Sequence[SignalReading],
    override: SignalOverride | None,
    wall: Wall,
) -> Signal | None:
    """The value that counts at `wall`. The first of these that exists: an operator's override, the document's constant,
    the feed's newest reading that is not a forecast, the fallback, that reading marked as stale. A reading older than
    `stale_after_s` yields to the fallback.

    readings: in order of time. Returns None where nothing gives a value: it is unknown.
    """
    if override is not None:
        return Signal(name, override.value, BY_HAND, override.at)
    if rule is None:
        return None
    if rule.constant is not None:
        return Signal(name, rule.constant, CONSTANT)
    begun = bisect.bisect_right(readings, wall + MAX_SKEW_S, key=lambda reading: reading.at)
    last = readings[begun - 1] if begun else None
    if last is not None and wall - last.at <= rule.stale_after_s:
        return Signal(name, last.value, rule.source, last.at)
    if rule.fallback is not None:
        return Signal(name, rule.fallback, rule.source, last.at if last else None, stale=True, fallback=True)
    return Signal(name, last.value, rule.source, last.at, stale=True) if last is not None else None


@dataclass(frozen=True, slots=True)
class ReportedSignal:
    """What the last events said about a signal."""

    # Value in SI at the last SIGNAL_CHANGED.
    value: float
    # True where it was stale.
    stale: bool


@dataclass(frozen=True, slots=True)
class SignalEvent:
    """An event to record: its code, and a message for people."""

    code: str
    message: str


def signal_events(
    reported: ReportedSignal | None, signal: Signal | None, wall: Wall
) -> tuple[ReportedSignal | None, tuple[SignalEvent, ...]]:
    """SIGNAL_STALE and SIGNAL_BACK once for each transition; SIGNAL_CHANGED where the value moved by more than
    CHANGE_SHARE."""
    if signal is None:
        return reported, ()
    shown = f"{signal.name} {signal.name.show(signal.value)} ({describe_source(signal, wall)})"
    found = []
    if signal.stale and not (reported is not None and reported.stale):
        found.append(SignalEvent(Code.SIGNAL_STALE, shown))
    if reported is not None and reported.stale and not signal.stale:
        found.append(SignalEvent("SIGNAL_BACK", shown))
    moved = reported is None or abs(signal.value - reported.value) > CHANGE_SHARE * reported.value
    if moved:
        before = f", before {signal.name.show(reported.value)}" if reported is not None else ""
        found.append(SignalEvent("SIGNAL_CHANGED", shown + before))
    value = signal.value if reported is None or moved else reported.value
    return ReportedSignal(value, signal.stale), tuple(found)


def describe_source(signal: Signal, wall: Wall) -> str:
    """Where a value comes from and how old it is: `./prices.csv, 3m ago`, `fallback: https://.. is stale, 3h ago`."""
    age = f", {show_seconds(max(0.0, wall - signal.taken_at))} ago" if signal.taken_at is not None else ""
    if signal.fallback:
        return f"fallback: {signal.source} {'is stale' if age else 'gave nothing yet'}{age}"
    return f"{signal.source}{' is stale' if signal.stale else ''}{age}"


def poll_interval_s(rule: SignalRule) -> Seconds:
    """How often to poll a source. A file is checked every FILE_POLL_S; a server is polled four times within
    `stale_after_s`, within URL_POLL_RANGE_S, so that it gets no needless load."""
    low, high = URL_POLL_RANGE_S
    return Seconds(min(high, max(low, rule.stale_after_s / 4))) if "://" in rule.source else FILE_POLL_S

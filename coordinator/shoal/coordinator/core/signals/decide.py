"""Which value of a signal counts, and what of it is news."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.coordinator.core.signals.model import BY_HAND, CONSTANT, ByHand, Reading, Rule, Signal, SignalName
from shoal.types.codes import Code
from shoal.types.units import Seconds, Wall, show_seconds

SKEW_S = 60.0
"""A reading may be this far ahead of the coordinator's clock and count; what is further ahead is a forecast."""
NEWS = 0.01
"""A change by more than this share is an event."""
FILE_EVERY_S = Seconds(1.0)
URL_EVERY_S = (Seconds(10.0), Seconds(300.0))


def current(
    name: SignalName, rule: Rule | None, readings: Sequence[Reading], by_hand: ByHand | None, wall: Wall
) -> Signal | None:
    """What counts at `wall`: an operator's word, else the document's constant, else the feed's newest reading that is
    not ahead, else (none, or an older one than `stale_after_s`) the fallback, else that old reading, marked.

    readings: in order of time. None: nobody says, and the value is unknown."""
    if by_hand is not None:
        return Signal(name, by_hand.value, BY_HAND, by_hand.at)
    if rule is None:
        return None
    if rule.constant is not None:
        return Signal(name, rule.constant, CONSTANT)
    begun = bisect.bisect_right(readings, wall + SKEW_S, key=lambda reading: reading.at)
    last = readings[begun - 1] if begun else None
    if last is not None and wall - last.at <= rule.stale_after_s:
        return Signal(name, last.value, rule.source, last.at)
    if rule.fallback is not None:
        return Signal(name, rule.fallback, rule.source, last.at if last else None, stale=True, fallback=True)
    return Signal(name, last.value, rule.source, last.at, stale=True) if last is not None else None


@dataclass(frozen=True, slots=True)
class Told:
    """What the events said last of a signal."""

    value: float
    stale: bool


@dataclass(frozen=True, slots=True)
class News:
    """An event to be: code and message."""

    code: str
    message: str


def news(told: Told | None, signal: Signal | None, wall: Wall) -> tuple[Told | None, tuple[News, ...]]:
    """SIGNAL_STALE and SIGNAL_BACK once each way, SIGNAL_CHANGED where the value moved by more than `NEWS`."""
    if signal is None:
        return told, ()
    shown = f"{signal.name} {signal.name.show(signal.value)} ({described(signal, wall)})"
    found = []
    if signal.stale and not (told is not None and told.stale):
        found.append(News(Code.SIGNAL_STALE, shown))
    if told is not None and told.stale and not signal.stale:
        found.append(News("SIGNAL_BACK", shown))
    moved = told is None or abs(signal.value - told.value) > NEWS * told.value
    if moved:
        before = f", before {signal.name.show(told.value)}" if told is not None else ""
        found.append(News("SIGNAL_CHANGED", shown + before))
    value = signal.value if told is None or moved else told.value
    return Told(value, signal.stale), tuple(found)


def described(signal: Signal, wall: Wall) -> str:
    """Where a value comes from and how old it is: `./prices.csv, 3m ago`, `fallback: https://.. is stale, 3h ago`."""
    age = f", {show_seconds(max(0.0, wall - signal.taken_at))} ago" if signal.taken_at is not None else ""
    if signal.fallback:
        return f"fallback: {signal.source} {'is stale' if age else 'gave nothing yet'}{age}"
    return f"{signal.source}{' is stale' if signal.stale else ''}{age}"


def every_s(rule: Rule) -> Seconds:
    """How often to look at a source: a file is looked at for a change, a server is not asked more than it needs."""
    low, high = URL_EVERY_S
    return Seconds(min(high, max(low, rule.stale_after_s / 4))) if "://" in rule.source else FILE_EVERY_S

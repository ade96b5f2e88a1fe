"""Price and carbon of the region: feeds polled in the background, operators' overrides stored, changes reported.

The current value is computed on every read, so that a value never counts as fresh merely because nobody checked. The
store keeps an operator's override, the last reading, and what was last reported.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec, metrics
from shoal.coordinator.controllers.log.context import RegionContext
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.core.catalog.model import Catalog
from shoal.coordinator.core.signals.decide import ReportedSignal, current_signal, poll_interval_s, signal_events
from shoal.coordinator.core.signals.feed import check_value
from shoal.coordinator.core.signals.model import Signal, SignalName, SignalOverride, SignalReading, SignalRule
from shoal.coordinator.ports import Signals, StaleRevision
from shoal.types.codes import Refusal, ShoalError
from shoal.types.units import Elapsed, Seconds, parse_unbounded

SIGNALS: Final = "signals/"
POLL_S: Final = Seconds(1.0)


@dataclass(frozen=True, slots=True)
class StoredSignal:
    """A signal as stored."""

    # What events last reported; None: nothing yet.
    told: ReportedSignal | None = None
    # An operator's override; None: none.
    by_hand: SignalOverride | None = None
    # The source of `last`; empty: none.
    source: str = ""
    # The newest reading of `source` that was in force at the last report; None: none.
    last: SignalReading | None = None


@dataclass(slots=True)
class _Feed:
    """What this process knows of one signal."""

    # What the store holds.
    record: StoredSignal = StoredSignal()
    # The source that `readings` came from.
    source: str = ""
    # All readings of the last successful poll, in order of time, forecasts included. After a restart only the stored
    # `last`.
    readings: tuple[SignalReading, ...] = ()
    # When the source is polled next; None: at once.
    due: Elapsed | None = None
    # Why the last poll failed; None if it succeeded.
    refusal: Refusal | None = None
    # Code of the refusal that an event last reported; empty: none.
    last_refusal_code: str = ""


class SignalsController:
    """Polls the feeds, keeps operators' overrides, and computes current values."""

    def __init__(
        self,
        context: RegionContext,
        sources: Signals,
        catalog: Callable[[], Catalog],
        *,
        on_change: Callable[[], None],
    ) -> None:
        """on_change: called when a plan may change."""
        self._region = context.name
        self._store = context.store
        self._fence = context.fence
        self._clock = context.clock
        self._meter = context.meter
        self._sources = sources
        self._catalog = catalog
        self._on_change = on_change
        self._feeds = {name: _Feed() for name in SignalName}
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        for name, feed in self._feeds.items():
            if (found := await self._store.read(SIGNALS + name)) is not None:
                feed.record = codec.load(StoredSignal, found.value)
                feed.source = feed.record.source
                feed.readings = (feed.record.last,) if feed.record.last is not None else ()

    def current(self, catalog: Catalog | None = None) -> dict[SignalName, Signal]:
        """Each signal that has a value now, under the documents of `catalog`, or the applied ones.

        A source that was never read has no value yet.
        """
        rules = (catalog or self._catalog()).rules(self._region)
        found = {name: self._current(name, rules.get(name)) for name in SignalName}
        return {name: signal for name, signal in found.items() if signal is not None}

    @property
    def refusals(self) -> dict[SignalName, Refusal]:
        """Why the last poll failed, of the sources where it did."""
        return {name: feed.refusal for name, feed in self._feeds.items() if feed.refusal is not None}

    async def set_override(self, name: SignalName, text: str, actor: str) -> Signal:
        """Sets an operator's value, which takes precedence until it is cleared.

        Raises ShoalError(UNIT_MISSING | UNIT_WRONG | QUANTITY_INVALID | SIGNAL_INVALID | STORE_*).
        """
        value = check_value(name, parse_unbounded(text, name.dimension))
        by_hand = SignalOverride(value, self._clock.wall(), actor)
        await self._store_override(
            name, by_hand, LogEvent("SIGNAL_SET", self._subject, f"{name} {name.show(value)}", actor)
        )
        signal = self._current(name, None)
        assert signal is not None, "an operator said so"
        return signal

    async def clear_override(self, name: SignalName, actor: str) -> bool:
        """Returns to the document's value. False: there was no override. Raises ShoalError(STORE_*)."""
        if self._feeds[name].record.by_hand is None:
            return False
        await self._store_override(name, None, LogEvent("SIGNAL_CLEARED", self._subject, name, actor))
        return True

    async def run(self) -> None:
        """Polls every feed, for ever. Each has its own tasks, so that a source that hangs delays neither the other
        feeds nor the report that its value is stale.
        """
        async with asyncio.TaskGroup() as group:
            for name in SignalName:
                group.create_task(self._poll_forever(self._read_if_due, name))
                group.create_task(self._poll_forever(self._report_news, name))

    async def poll(self, name: SignalName) -> None:
        """Reads the source if that is due, and reports changes."""
        await self._read_if_due(name)
        await self._report_news(name)

    async def _poll_forever(self, work: Callable[[SignalName], Awaitable[None]], name: SignalName) -> None:
        while True:
            await work(name)
            await self._clock.sleep(POLL_S)

    async def _read_if_due(self, name: SignalName) -> None:
        feed, rule = self._feeds[name], self._catalog().rules(self._region).get(name)
        if rule is None or not rule.source:
            feed.due, feed.refusal, feed.last_refusal_code = None, None, ""
        elif feed.due is None or self._clock.now() >= feed.due or feed.source != rule.source:
            await self._read(name, feed, rule)

    async def _read(self, name: SignalName, feed: _Feed, rule: SignalRule) -> None:
        try:
            readings = await self._sources.read(name, rule.source)
        except ShoalError as error:
            feed.refusal = error.refusal
            self._meter.count(metrics.SIGNALS_REFUSED, signal=name, code=error.code)
            readings = feed.readings if feed.source == rule.source else ()
        else:
            feed.refusal, feed.last_refusal_code = None, ""
        if (rule.source, readings) != (feed.source, feed.readings):
            self._on_change()
        feed.source, feed.readings = rule.source, readings
        feed.due = Elapsed(self._clock.now() + poll_interval_s(rule))

    def _current(self, name: SignalName, rule: SignalRule | None) -> Signal | None:
        feed = self._feeds[name]
        readings = feed.readings if rule is not None and rule.source == feed.source else ()
        return current_signal(name, rule, readings, feed.record.by_hand, self._clock.wall())

    async def _report_news(self, name: SignalName) -> None:
        """Events are committed with the values that later changes are compared with, so that a restart reports nothing
        twice.
        """
        async with self._writing:
            feed, wall = self._feeds[name], self._clock.wall()
            signal = self._current(name, self._catalog().rules(self._region).get(name))
            told, found = signal_events(feed.record.told, signal, wall)
            events = [LogEvent(each.code, self._subject, each.message) for each in found]
            refused = feed.refusal
            if refused is not None and feed.last_refusal_code != refused.code:
                events.append(LogEvent(refused.code, self._subject, f"{name}: {refused.found}: {refused.remedy}"))
            if not events:
                return
            begun = [each for each in feed.readings if signal is not None and each.at == signal.taken_at]
            stored = replace(feed.record, told=told, source=feed.source, last=begun[-1] if begun else None)
            try:
                await self._fence.commit({SIGNALS + name: codec.dump(stored)}, events=events)
            except (ShoalError, StaleRevision):
                self._meter.count(metrics.SIGNAL_WRITES_FAILED, signal=name)  # the next poll reports it
                return
            feed.record, feed.last_refusal_code = stored, refused.code if refused is not None else ""
        self._on_change()

    async def _store_override(self, name: SignalName, by_hand: SignalOverride | None, event: LogEvent) -> None:
        async with self._writing:
            feed = self._feeds[name]
            stored = replace(feed.record, by_hand=by_hand)
            await self._fence.commit({SIGNALS + name: codec.dump(stored)}, events=[event])
            feed.record = stored
        self._on_change()

    @property
    def _subject(self) -> str:
        return f"region {self._region}"

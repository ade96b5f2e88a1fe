"""Price and carbon of the region: feeds read beside everything else, an operator's word kept, news told.

What counts is computed whenever it is asked for, so that a value is never taken for fresh because nobody looked. A
restart finds an operator's word, the last value that was told, and what was said of it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import Catalog
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.core.signals.decide import Told, current, every_s, news
from shoal.coordinator.core.signals.feed import checked
from shoal.coordinator.core.signals.model import ByHand, Reading, Rule, Signal, SignalName
from shoal.coordinator.ports import Clock, Meter, Signals, StaleRevision, Store
from shoal.types.codes import Refusal, ShoalError
from shoal.types.units import Elapsed, Seconds, parse_quantity

SIGNALS: Final = "signals/"
LOOK_S: Final = Seconds(1.0)


@dataclass(frozen=True, slots=True)
class StoredSignal:
    """last: the newest reading of `source` that had begun when something of it was told."""

    told: Told | None = None
    by_hand: ByHand | None = None
    source: str = ""
    last: Reading | None = None


@dataclass(slots=True)
class _Feed:
    """What is known of one signal. source: whose readings these are. refused: why the last look at it failed."""

    stored: StoredSignal = StoredSignal()
    source: str = ""
    readings: tuple[Reading, ...] = ()
    due: Elapsed | None = None
    refused: Refusal | None = None
    told_refusal: str = ""


class SignalsController:
    def __init__(
        self,
        region: str,
        store: Store,
        truth: Truth,
        clock: Clock,
        meter: Meter,
        sources: Signals,
        catalog: Callable[[], Catalog],
        *,
        changed: Callable[[], None],
    ) -> None:
        """changed: called when a plan may come out otherwise."""
        self._region = region
        self._store = store
        self._truth = truth
        self._clock = clock
        self._meter = meter
        self._sources = sources
        self._catalog = catalog
        self._changed = changed
        self._feeds = {name: _Feed() for name in SignalName}
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Raises ShoalError(STATE_CORRUPT | STORE_UNAVAILABLE)."""
        for name, feed in self._feeds.items():
            if (found := await self._store.read(SIGNALS + name)) is not None:
                feed.stored = records.load(StoredSignal, found.value)
                feed.source = feed.stored.source
                feed.readings = (feed.stored.last,) if feed.stored.last is not None else ()

    def now(self, catalog: Catalog | None = None) -> dict[SignalName, Signal]:
        """Each signal that has a value at this moment, under the documents of `catalog` (those applied, without one).

        A source that was never read has none yet."""
        rules = (catalog or self._catalog()).rules(self._region)
        found = {name: self._current(name, rules.get(name)) for name in SignalName}
        return {name: signal for name, signal in found.items() if signal is not None}

    @property
    def refusals(self) -> dict[SignalName, Refusal]:
        """Why the last look at a source failed, of those where it did."""
        return {name: feed.refused for name, feed in self._feeds.items() if feed.refused is not None}

    async def set(self, name: SignalName, text: str, actor: str) -> Signal:
        """An operator's word counts until it is cleared.

        Raises ShoalError(UNIT_MISSING | UNIT_WRONG | QUANTITY_INVALID | SIGNAL_INVALID | STORE_*)."""
        value = checked(name, parse_quantity(text, name.dimension))
        by_hand = ByHand(value, self._clock.wall(), actor)
        await self._keep_word(name, by_hand, Event("SIGNAL_SET", self._subject, f"{name} {name.show(value)}", actor))
        signal = self._current(name, None)
        assert signal is not None, "an operator said so"
        return signal

    async def clear(self, name: SignalName, actor: str) -> bool:
        """What the document says counts again. False: no operator's word was there. Raises ShoalError(STORE_*)."""
        if self._feeds[name].stored.by_hand is None:
            return False
        await self._keep_word(name, None, Event("SIGNAL_CLEARED", self._subject, name, actor))
        return True

    async def run(self) -> None:
        """Follows every feed, for ever. Each on its own: a source that hangs keeps no other from being read, and nobody
        from being told that its value is old."""
        async with asyncio.TaskGroup() as group:
            for name in SignalName:
                group.create_task(self._every_look(self._read_if_due, name))
                group.create_task(self._every_look(self._tell, name))

    async def look(self, name: SignalName) -> None:
        """Reads the source if that is due, and tells what is new."""
        await self._read_if_due(name)
        await self._tell(name)

    async def _every_look(self, work: Callable[[SignalName], Awaitable[None]], name: SignalName) -> None:
        while True:
            await work(name)
            await self._clock.sleep(LOOK_S)

    async def _read_if_due(self, name: SignalName) -> None:
        feed, rule = self._feeds[name], self._catalog().rules(self._region).get(name)
        if rule is None or not rule.source:
            feed.due, feed.refused, feed.told_refusal = None, None, ""
        elif feed.due is None or self._clock.now() >= feed.due or feed.source != rule.source:
            await self._read(name, feed, rule)

    async def _read(self, name: SignalName, feed: _Feed, rule: Rule) -> None:
        try:
            readings = await self._sources.read(name, rule.source)
        except ShoalError as error:
            feed.refused = error.refusal
            self._meter.count("signals_refused", signal=name, code=error.code)
            readings = feed.readings if feed.source == rule.source else ()
        else:
            feed.refused, feed.told_refusal = None, ""
        if (rule.source, readings) != (feed.source, feed.readings):
            self._changed()
        feed.source, feed.readings = rule.source, readings
        feed.due = Elapsed(self._clock.now() + every_s(rule))

    def _current(self, name: SignalName, rule: Rule | None) -> Signal | None:
        feed = self._feeds[name]
        readings = feed.readings if rule is not None and rule.source == feed.source else ()
        return current(name, rule, readings, feed.stored.by_hand, self._clock.wall())

    async def _tell(self, name: SignalName) -> None:
        """In the store with what it is compared with, so that a restart says nothing twice."""
        async with self._writing:
            feed, wall = self._feeds[name], self._clock.wall()
            signal = self._current(name, self._catalog().rules(self._region).get(name))
            told, found = news(feed.stored.told, signal, wall)
            events = [Event(each.code, self._subject, each.message) for each in found]
            refused = feed.refused
            if refused is not None and feed.told_refusal != refused.code:
                events.append(Event(refused.code, self._subject, f"{name}: {refused.found}: {refused.remedy}"))
            if not events:
                return
            begun = [each for each in feed.readings if signal is not None and each.at == signal.taken_at]
            stored = replace(feed.stored, told=told, source=feed.source, last=begun[-1] if begun else None)
            try:
                await self._truth.commit({SIGNALS + name: records.dump(stored)}, events=events)
            except (ShoalError, StaleRevision):
                self._meter.count("signals_untold", signal=name)  # and told at the next look
                return
            feed.stored, feed.told_refusal = stored, refused.code if refused is not None else ""
        self._changed()

    async def _keep_word(self, name: SignalName, by_hand: ByHand | None, event: Event) -> None:
        async with self._writing:
            feed = self._feeds[name]
            stored = replace(feed.stored, by_hand=by_hand)
            await self._truth.commit({SIGNALS + name: records.dump(stored)}, events=[event])
            feed.stored = stored
        self._changed()

    @property
    def _subject(self) -> str:
        return f"region {self._region}"

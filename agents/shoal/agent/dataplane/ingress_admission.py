"""Limits on what one caller may hold of a front: calls, bytes, and slots for messages being read.

A transport cannot tell a message's size before it has the message. This module bounds how many are read at once, and
`memory` bounds their bytes. A slow reader or sender keeps its slot only while no call waits for it. Every method of
every transport passes through here. Unauthenticated callers have separate limits.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sized
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Final, NamedTuple

from shoal.agent.dataplane.call_places import CallPlace, CallPlaces
from shoal.agent.dataplane.memory import Limit, MemoryCharge, MessageMemory, MessageRead, always, shed_refusal
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.metrics import FRONT_LIMIT_REFUSALS, HeldLimit
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.metric import MetricReadings

READ_SLOTS: Final = 32
READ_SLOTS_PER_CALLER: Final = 8
READ_SLOTS_PER_PAYER: Final = 3 * READ_SLOTS // 4
"""A tenant may have many credentials: what it leaves is as many as one other caller may have, so that no message of
another tenant waits for those of one."""
HEAD_CALLS: Final = 1024
"""Concurrent calls that are answered from their head alone, as readiness is; they do not count in CALLS, so that a
front with many calls still says that it is ready. They hold nothing but their response, until it is taken. A choice."""
HEAD_CALLS_PER_CALLER: Final = HEAD_CALLS // 4
HEAD_CALLS_PER_PAYER: Final = 3 * HEAD_CALLS // 4
ANONYMOUS_CALLS: Final = 256
"""Concurrent calls of all unauthenticated callers; they do not count in CALLS."""
ANONYMOUS_PER_ADDRESS: Final = 64
WATCHES: Final = 1024
"""Concurrent watches of all callers; they do not count in CALLS. Each takes 28 KiB (measured with 800)."""
WATCHES_PER_CALLER: Final = 256
WATCHES_PER_PAYER: Final = 3 * WATCHES // 4
GRACE_S: Final = 10.0
"""Seconds for one message when another waits for its slot."""
SLOT_WAIT_S: Final = GRACE_S + 2.0
"""Seconds to wait for a slot: by then every message that was inside when the wait began has been ended."""
MAX_READ_S: Final = 60.0
"""Seconds for one message in any case."""
FIRST_READ_SPACING_S: Final = 1.0
"""Seconds between two reads of a caller whose first message has not arrived: by then `memory` has measured what the
previous one brings."""
SMALL_BYTES: Final = 16 * 2**10
SMALL_S: Final = 10.0
"""Seconds for the request, and for the answer, of any method but an inference."""
STREAM_S: Final = 300.0
"""Seconds for the next message of a stream: longer than any request may take."""


class _Reader(NamedTuple):
    """Who reads a message, or waits for a slot to read it."""

    caller: str
    payer: str


class _ReadSlots:
    """A bounded number of read slots, and of these as many as one payer may have. Where a reader waits, each read
    inside whose end would let it in has at most GRACE_S from its start.

    A freed slot goes to the waiting payer that has the fewest, and of that to the caller that has the fewest: whoever
    has many reads does not delay others, whatever the number of its credentials.
    """

    def __init__(self, count: int, most_per_payer: int, places: CallPlaces) -> None:
        """places: count what is refused."""
        self._places = places
        self._free = count
        self._most_per_payer = most_per_payer
        self._by_caller: Counter[str] = Counter()
        self._by_payer: Counter[str] = Counter()
        self._waiting: list[tuple[_Reader, asyncio.Future[None]]] = []
        self._inside: dict[Limit, tuple[_Reader, float]] = {}
        """Who reads under each limit, and since when."""

    @asynccontextmanager
    async def hold(self, reader: _Reader) -> AsyncIterator[bool]:
        """Hold a slot; yields whether it had to wait. Raises CallRefused(OVERLOADED) when none is freed in
        SLOT_WAIT_S."""
        is_full = self.is_full_for(reader)
        if is_full:
            await self._wait(reader)
        else:
            self._take(reader)
        try:
            yield is_full
        finally:
            self._release(reader)

    def is_full_for(self, reader: _Reader) -> bool:
        return not self._free or self._has_share(reader)

    def take_free(self, reader: _Reader, limit: Limit) -> bool:
        """As `hold` and `track`, until `give_back`; False, and nothing is held, where it would have to wait."""
        if self.is_full_for(reader):
            return False
        self._take(reader)
        self._inside[limit] = reader, asyncio.get_running_loop().time()
        return True

    def begin_wait(self, reader: _Reader) -> asyncio.Future[None]:
        """Done once a slot is held: then `begin_track` it, until `give_back`. Before that, `end_wait`."""
        loop = asyncio.get_running_loop()
        now, has_share = loop.time(), self._has_share(reader)
        for limit, (inside, since) in self._inside.items():
            if not has_share or inside.payer == reader.payer:  # the end of this one lets the reader in
                limit.end_by(max(now, since + GRACE_S))
        turn = loop.create_future()
        self._waiting.append((reader, turn))
        return turn

    def end_wait(self, reader: _Reader, turn: asyncio.Future[None]) -> None:
        """Nobody waits any more; a slot that was assigned at the same moment is freed."""
        if turn.done() and not turn.cancelled():
            self._release(reader)
        else:
            self._waiting.remove((reader, turn))
            turn.cancel()

    def refuse(self) -> CallRefused:
        """For one that waited in vain."""
        return self._places.refuse(HeldLimit.MESSAGES, "messages that do not arrive, in every place", "a free place")

    def begin_track(self, reader: _Reader, limit: Limit) -> None:
        """A read begins that has a slot."""
        now = asyncio.get_running_loop().time()
        self._inside[limit] = reader, now
        # Others may have begun to wait after this one got its slot and before it was tracked.
        for other, turn in self._waiting:
            if not turn.done() and (other.payer == reader.payer or not self._has_share(other)):
                limit.end_by(now + GRACE_S)
                break

    def give_back(self, reader: _Reader, limit: Limit) -> None:
        del self._inside[limit]
        self._release(reader)

    @contextmanager
    def track(self, reader: _Reader, limit: Limit) -> Iterator[None]:
        self.begin_track(reader, limit)
        try:
            yield
        finally:
            del self._inside[limit]

    async def _wait(self, reader: _Reader) -> None:
        """Return with a slot taken."""
        turn = self.begin_wait(reader)
        try:
            async with asyncio.timeout(SLOT_WAIT_S):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            self.end_wait(reader, turn)
            if isinstance(error, TimeoutError):
                raise self.refuse() from error
            raise

    def _has_share(self, reader: _Reader) -> bool:
        """Whether its payer has as many slots as it may have."""
        return self._by_payer[reader.payer] >= self._most_per_payer

    def _take(self, reader: _Reader) -> None:
        self._free -= 1
        self._by_caller[reader.caller] += 1
        self._by_payer[reader.payer] += 1

    def _release(self, reader: _Reader) -> None:
        self._free += 1
        _decrement(self._by_caller, reader.caller)
        _decrement(self._by_payer, reader.payer)
        if not self._waiting:
            return
        waiting = [each for each in self._waiting if not each[1].done() and not self._has_share(each[0])]
        if not waiting:
            return
        first = min(waiting, key=lambda each: (self._by_payer[each[0].payer], self._by_caller[each[0].caller]))
        self._waiting.remove(first)
        other, turn = first
        self._take(other)
        turn.set_result(None)


class ReadLimits:
    """Times for messages that no task reads. One timer serves all: nearly every message arrives before its own."""

    def __init__(self) -> None:
        self._open: dict[ReadLimit, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, when: float, on_expired: Callable[[], None]) -> "ReadLimit":
        """`when`: by the event loop's clock."""
        added = ReadLimit(self, when, on_expired)
        self._open[added] = None
        self.on_change(when)
        return added

    def on_change(self, when: float) -> None:
        """A limit ends at that time now."""
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(when, self._end_late)

    def remove(self, limit: "ReadLimit") -> None:
        """Idempotent."""
        self._open.pop(limit, None)

    def _end_late(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            for limit in [each for each in self._open if each.when <= now]:
                if limit in self._open:  # another's end may have removed it
                    on_expired = limit.on_expired
                    limit.cancel()
                    try:
                        on_expired()
                    except Exception as error:  # the others' time is over too
                        context = {"message": "a read that took too long did not end", "exception": error}
                        loop.call_exception_handler(context)
        finally:
            if self._open:
                self.on_change(min(each.when for each in self._open))


class ReadLimit:
    """The time for one message that no task reads, until it expires or is cancelled. It is a `memory.Limit`.

    From then on it does not refer to who is told: that one refers to it, and would keep its message in memory until
    cycles are searched.
    """

    __slots__ = ("_limits", "on_expired", "when")

    def __init__(self, limits: ReadLimits, when: float, on_expired: Callable[[], None]) -> None:
        self._limits = limits
        self.when = when
        self.on_expired = on_expired

    def end_by(self, when: float) -> None:
        if when < self.when:
            self.when = when
            self._limits.on_change(when)

    def cancel(self) -> None:
        """Idempotent."""
        self._limits.remove(self)
        self.on_expired = _tell_nobody


def _tell_nobody() -> None:
    pass


class _TaskLimit:
    """The same of a message that a task reads."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout

    def end_by(self, when: float) -> None:
        at = self._timeout.when()
        if not self._timeout.expired() and (at is None or when < at):
            self._timeout.reschedule(when)


class _FirstReads:
    """Reads of a caller that has sent no message yet: one at a time, or one every FIRST_READ_SPACING_S while none
    ends."""

    def __init__(self) -> None:
        self._open = 0
        self._latest = 0.0
        """When the last read was opened, by the event loop's clock."""
        self._read_ended = asyncio.Event()

    @asynccontextmanager
    async def turn(self, is_known: Callable[[], bool]) -> AsyncIterator[None]:
        """Wait for the caller's turn to read. `is_known` tells whether a message of the caller has arrived since."""
        loop = asyncio.get_running_loop()
        while not is_known() and self._open and (left_s := self._latest + FIRST_READ_SPACING_S - loop.time()) > 0:
            self._read_ended.clear()
            await wait_or_timeout(self._read_ended, left_s)
        self._open += 1
        self._latest = loop.time()
        try:
            yield
        finally:
            self._open -= 1
            self._read_ended.set()


class _CallerReads:
    """Messages of one caller that do not arrive at once."""

    def __init__(self, places: CallPlaces) -> None:
        # A caller that forwards has requests of many tenants: none of them waits for another's.
        self.slots = _ReadSlots(READ_SLOTS_PER_PAYER, READ_SLOTS_PER_CALLER, places)
        """For inference requests."""
        self.small_slots = _ReadSlots(READ_SLOTS_PER_PAYER, READ_SLOTS_PER_CALLER, places)
        """For requests of other methods."""
        self.first = _FirstReads()


class IngressAdmission:
    """Admission of one transport.

    A `caller` is the verified name whose limits apply. A `payer` is the tenant that its limits are part of, and that is
    charged for a message's memory; by default the caller.
    """

    def __init__(self, memory: MessageMemory | None = None) -> None:
        """`memory` is shared by all transports of a process; by default this one has its own."""
        self._memory = memory or MessageMemory()
        self.places = CallPlaces(self._memory)
        """Of all calls but those that are answered from their head, or that watch."""
        self._slots = _ReadSlots(READ_SLOTS, READ_SLOTS_PER_PAYER, self.places)
        self._small_slots = _ReadSlots(READ_SLOTS, READ_SLOTS_PER_PAYER, self.places)
        self._limits = ReadLimits()
        self._head_calls: Counter[str] = Counter()
        self._head_calls_by_payer: Counter[str] = Counter()
        self._anonymous: Counter[str] = Counter()
        self._watches: dict[str, dict[str, dict[asyncio.Timeout, None]]] = {}
        """Watches by payer and caller, the oldest first."""
        self._watches_of: Counter[str] = Counter()
        """Watches of each caller, whatever tenants it names."""

    @property
    def watch_count(self) -> int:
        """Open watches of all callers."""
        return sum(map(_total, self._watches.values()))

    def readings(self) -> MetricReadings:
        """What the front's page says of what is held."""
        return {FRONT_LIMIT_REFUSALS: {(limit,): count for limit, count in tuple(self.places.refusal_counts.items())}}

    def _reads_of(self, caller: str) -> _CallerReads:
        """Of a caller with a place."""
        held = self.places.usage[caller]
        if held.reads is None:
            held.reads = _CallerReads(self.places)
        reads: _CallerReads = held.reads
        return reads

    @contextmanager
    def head_call(self, caller: str, payer: str) -> Iterator[None]:
        """As `CallPlaces.take`, for one that is answered from its head alone. Raises CallRefused(OVERLOADED)."""
        mine, of_payer = self._head_calls[caller], self._head_calls_by_payer[payer] if payer else 0
        total = self._head_calls.total()
        if mine >= HEAD_CALLS_PER_CALLER or of_payer >= HEAD_CALLS_PER_PAYER or total >= HEAD_CALLS:
            found = f"{mine} responses that this caller does not take, {of_payer} of its tenant, {total} of all"
            asked = f"at most {HEAD_CALLS_PER_CALLER}, {HEAD_CALLS_PER_PAYER} and {HEAD_CALLS} at once"
            raise self.places.refuse(HeldLimit.READINESS, found, asked)
        with _counted(self._head_calls, caller), _counted(self._head_calls_by_payer, payer):
            yield

    @contextmanager
    def anonymous(self, address: str) -> Iterator[None]:
        """As `CallPlaces.take`, for an unauthenticated caller; none of its messages is read. Raises
        CallRefused(OVERLOADED)."""
        if self._anonymous[address] >= ANONYMOUS_PER_ADDRESS or self._anonymous.total() >= ANONYMOUS_CALLS:
            found = f"{self._anonymous[address]} calls without credentials, {self._anonymous.total()} of all addresses"
            asked = f"at most {ANONYMOUS_PER_ADDRESS} and {ANONYMOUS_CALLS} at once"
            raise self.places.refuse(HeldLimit.ANONYMOUS, found, asked)
        with _counted(self._anonymous, address):
            yield

    @asynccontextmanager
    async def watch(self, caller: str, payer: str = "") -> AsyncIterator[None]:
        """Count a call that waits for updates, once its request was read.

        A watch holds no message and does not count as a call. Where all are taken, or all that a payer may have, the
        oldest watch of the payer with the most ends, of its caller with the most. Raises CallRefused(OVERLOADED).
        """
        payer = payer or caller
        self._make_room_for_watch(caller, payer)
        try:
            async with asyncio.timeout(None) as limit:
                self._watches.setdefault(payer, {}).setdefault(caller, {})[limit] = None
                self._watches_of[caller] += 1
                try:
                    yield
                finally:
                    self._remove_watch(caller, payer, limit)
        except TimeoutError as error:
            found = "a watch of whoever has most, while all are taken"
            asked = f"at most {WATCHES} of all, {WATCHES_PER_PAYER} of a tenant"
            raise self.places.refuse(HeldLimit.WATCHES, found, asked) from error

    def _make_room_for_watch(self, caller: str, payer: str) -> None:
        """Raises CallRefused(OVERLOADED) where nobody else has more than this one would then have."""
        by_payer = {each: _total(held) for each, held in self._watches.items()}
        own, ours = len(self._watches.get(payer, {}).get(caller, ())), by_payer.get(payer, 0)
        if (of_caller := self._watches_of[caller]) >= WATCHES_PER_CALLER:
            asked = f"at most {WATCHES_PER_CALLER} at once"
            raise self.places.refuse(HeldLimit.WATCHES, f"{of_caller} watches of this caller", asked)
        is_tenant_full, is_full = ours >= WATCHES_PER_PAYER, sum(by_payer.values()) >= WATCHES
        if not is_tenant_full and not is_full:
            return
        most = max(by_payer, key=by_payer.__getitem__)
        if is_tenant_full or by_payer[most] <= ours + 1:
            most = payer  # others keep theirs
            if all(len(each) <= own + 1 for each in self._watches.get(payer, {}).values()):
                found = f"{ours} watches of this tenant, {sum(by_payer.values())} of all callers"
                asked = f"at most {WATCHES_PER_PAYER} and {WATCHES} at once"
                raise self.places.refuse(HeldLimit.WATCHES, found, asked)
        of_most = self._watches[most]
        loser = max(of_most, key=lambda each: len(of_most[each]))
        oldest = next(iter(of_most[loser]))
        self._remove_watch(loser, most, oldest)
        oldest.reschedule(asyncio.get_running_loop().time())

    def _remove_watch(self, caller: str, payer: str, limit: asyncio.Timeout) -> None:
        """Remove a watch; idempotent."""
        of_payer = self._watches.get(payer, {})
        own = of_payer.get(caller, {})
        if limit in own:
            del own[limit]
            _decrement(self._watches_of, caller)
        if not own:
            of_payer.pop(caller, None)
        if not of_payer:
            self._watches.pop(payer, None)

    @asynccontextmanager
    async def read_slot(
        self, caller: str, max_s: float = MAX_READ_S, size: int | None = None, payer: str = ""
    ) -> AsyncIterator[None]:
        """Hold a slot, for a call with a place, while one message is read; `size` is None where its head does not say.

        Raises ShoalError(TOO_SLOW) when the read takes too long, CallRefused(OVERLOADED) when there is no slot or no
        memory.
        """
        own, memory, payer = self._reads_of(caller), self._memory, payer or caller
        reader = _Reader(caller, payer)
        async with AsyncExitStack() as inside:
            mine = await inside.enter_async_context(own.slots.hold(reader))
            ours = await inside.enter_async_context(self._slots.hold(reader))
            if size is None and not memory.has_seen(caller):
                await inside.enter_async_context(own.first.turn(lambda: memory.has_seen(caller)))
            expected = memory.expected_bytes(caller) if size is None else size
            await memory.wait_for_room(payer, expected, SLOT_WAIT_S)
            with memory.hold_expected(caller, payer, size):
                limit_s = GRACE_S if mine or ours else max_s
                slots = own.slots, self._slots
                async with self._read_limit(reader, limit_s, slots, is_charged=size is not None):
                    yield

    def begin_read(
        self,
        caller: str,
        size: int,
        payer: str,
        on_expired: Callable[[ShoalError], None],
        on_turn: Callable[[bool], None],
    ) -> "MessagePlace | None":
        """As `CallPlaces.take` and `read_slot`, for one message of `size` bytes that no task reads; None where it is to
        be refused, or where more than a slot of its caller is missing. `on_expired` gets why the read is to end, at
        most once. `on_turn` is told of one that waits for a slot, once, whether it may be read now; if not, it is to be
        asked for with `read_slot`."""
        if not self._memory.has_room(payer, size):
            return None
        try:
            place = self.places.take(caller, payer, is_trial=True)
        except CallRefused:
            return None
        slots = self._reads_of(caller).slots, self._slots
        found = MessagePlace(self._memory, self._limits, place, slots, (caller, payer, size), on_expired)
        if not found.begin(on_turn):
            place.leave()
            return None
        return found

    @asynccontextmanager
    async def small_read_slot(self, caller: str, payer: str = "") -> AsyncIterator[None]:
        """As `read_slot`, for a method with small requests. Its slots are separate, so that these do not delay
        inferences."""
        own, shared = self._reads_of(caller).small_slots, self._small_slots
        reader = _Reader(caller, payer or caller)
        async with own.hold(reader), shared.hold(reader), self._read_limit(reader, SMALL_S, (own, shared)):
            yield

    @asynccontextmanager
    async def stream_read(
        self, caller: str, payer: str = "", has_begun: Callable[[], bool] = always
    ) -> AsyncIterator[None]:
        """As `read_slot`, for a stream's next message. `has_begun`: whether a part of it has arrived."""
        async with self._read_limit(_Reader(caller, payer or caller), STREAM_S, (), has_begun):
            yield

    @asynccontextmanager
    async def _read_limit(
        self,
        reader: _Reader,
        limit_s: float,
        slots: tuple[_ReadSlots, ...],
        has_begun: Callable[[], bool] = always,
        *,
        is_charged: bool = False,
    ) -> AsyncIterator[None]:
        reading = None
        try:
            async with asyncio.timeout(limit_s) as timeout:
                limit = _TaskLimit(timeout)
                with ExitStack() as noted:
                    for each in slots:
                        noted.enter_context(each.track(reader, limit))
                    reading = self._memory.begin_read(*reader, limit, has_begun, is_charged=is_charged)
                    noted.callback(self._memory.end_read, reading)
                    yield
        except TimeoutError as error:
            if reading is not None and reading.is_shed:
                raise shed_refusal() from error
            raise _too_slow() from error


class MessagePlace:
    """The place of one message that is being read, or waits for a slot of its caller, until `leave`."""

    __slots__ = (
        "_call", "_charge", "_limit", "_limits", "_memory", "_on_expired", "_reader", "_reading", "_size", "_slots",
        "_turn",
    )  # fmt: skip

    def __init__(
        self,
        memory: MessageMemory,
        limits: ReadLimits,
        call: "CallPlace",
        slots: tuple[_ReadSlots, _ReadSlots],
        message: tuple[str, str, int],
        on_expired: Callable[[ShoalError], None],
    ) -> None:
        """slots: the caller's, and those of all. message: its caller, its payer, and its bytes."""
        self._memory = memory
        self._limits = limits
        self._call = call
        self._slots = slots
        caller, payer, self._size = message
        self._reader = _Reader(caller, payer)
        self._on_expired = on_expired
        self._limit: ReadLimit | None = None
        self._turn: asyncio.Future[None] | None = None
        """While it waits: done once a slot is held."""
        self._charge: MemoryCharge | None = None
        self._reading: MessageRead | None = None

    @property
    def is_waiting(self) -> bool:
        return self._turn is not None

    def begin(self, on_turn: Callable[[bool], None]) -> bool:
        """Whether there is a place, now or once `on_turn` is told; otherwise nothing is held."""
        own, _ = self._slots
        now = asyncio.get_running_loop().time()
        if not own.is_full_for(self._reader):
            limit = self._limits.add(now + MAX_READ_S, self._expire)
            return own.take_free(self._reader, limit) and self._begin_read(limit)
        self._turn = turn = own.begin_wait(self._reader)
        self._limit = self._limits.add(now + SLOT_WAIT_S, lambda: self._on_expired(own.refuse()))
        turn.add_done_callback(lambda _: self._on_turn(turn, on_turn))
        return True

    def leave(self) -> None:
        """The message has arrived, or will not. Idempotent but for the call's place."""
        own, shared = self._slots
        if self._limit is not None:
            self._limit.cancel()
        if self._turn is not None:
            turn, self._turn = self._turn, None
            own.end_wait(self._reader, turn)
        if self._reading is not None and self._limit is not None:
            self._memory.end_read(self._reading)
            self._reading = None
            own.give_back(self._reader, self._limit)
            shared.give_back(self._reader, self._limit)
        if self._charge is not None:
            self._charge.release()
        self._call.leave()

    def _on_turn(self, turn: asyncio.Future[None], on_turn: Callable[[bool], None]) -> None:
        if self._turn is not turn:
            return  # it has left
        self._turn = None
        if self._limit is not None:
            self._limit.cancel()
        limit = self._limits.add(asyncio.get_running_loop().time() + GRACE_S, self._expire)
        self._slots[0].begin_track(self._reader, limit)
        on_turn(self._begin_read(limit))

    def _begin_read(self, limit: ReadLimit) -> bool:
        """With a slot of the caller's: whether there are one of all, and memory; otherwise the slot is given back."""
        own, shared = self._slots
        caller, payer = self._reader
        if self._memory.has_room(payer, self._size) and shared.take_free(self._reader, limit):
            self._limit = limit
            self._charge = self._memory.hold(payer, self._size)
            self._reading = self._memory.begin_read(caller, payer, limit, is_charged=True)
            return True
        own.give_back(self._reader, limit)
        limit.cancel()
        return False

    def _expire(self) -> None:
        is_shed = self._reading is not None and self._reading.is_shed
        self._on_expired(shed_refusal() if is_shed else _too_slow())


def _too_slow() -> ShoalError:
    return refuse(Code.TOO_SLOW, "a message that does not arrive", "bytes in time", "send it faster")


@contextmanager
def _counted(counts: Counter[str], name: str) -> Iterator[None]:
    """One more under that name, which is kept no longer than any is."""
    counts[name] += 1
    try:
        yield
    finally:
        _decrement(counts, name)


def _decrement(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _total(held: Mapping[str, Sized]) -> int:
    return sum(map(len, held.values()))

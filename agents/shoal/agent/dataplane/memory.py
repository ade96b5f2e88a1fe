"""Limits on the memory that messages may hold in a front: in total, and for one tenant.

A message is charged with all its copies from its read until its answer is sent. A transport cannot tell a message's
size before it has the message. So a caller's next message is expected to be as large as its recent largest one. The
excess over that expectation is measured: while a read is open, the process's own memory is sampled. Where it exceeds
the budget, reads are ended, those of the tenant with the most reads first.
"""

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused
from shoal.host import memory as machine
from shoal.host.event_wait import wait_or_timeout
from shoal.types.codes import Code, Refusal
from shoal.types.units import Seconds
from shoal.types.workload import SESSION_BYTES

COPIES: Final = 2
"""Copies charged for a held message: its bytes and as many for its answer; for an answer, its bytes and the socket's
copy."""
MAX_BUDGET_BYTES: Final = 16 * MAX_MESSAGE
"""Largest budget for all messages, whatever memory the machine has."""
SHARE_OF_LIMIT: Final = 0.5
"""Share of the process's memory limit for code and messages. The supervisor, and what arrives between two samples, need
the rest."""
MIN_BUDGET_BYTES: Final = COPIES * MAX_MESSAGE
"""Smallest budget: one message always has room."""
BASELINE_BYTES: Final = 80 * 2**20
"""Memory of a front without messages (42 to 44 MiB, by `tests/integration/dataplane/test_a57_held_calls.py`), and room
for routes and connections."""
CHECK_EVERY_S: Final = 0.025
"""Seconds between two samples while reads are open."""
TRIM_S: Final = 0.25
KEPT_BYTES: Final = 16 * 2**20
"""Freed memory that a front keeps while requests arrive: a request of 4 MiB, or four of 1 MiB, with all their copies.
1 MiB in and out took 3.2 ms of its CPU without, and 2.1 with it."""
IDLE_S: Final = 1.0
"""Seconds without a read until it is given back."""
UNEXPLAINED_BYTES: Final = 16 * 2**20
"""Bytes not explained by held messages below which no read is ended."""
MIN_READ_AGE_S: Final = 0.05
"""Reads younger than this are not ended: a small request is read in a few milliseconds. Eight streams on loopback
brought 350 MiB in 0.1 s."""
DEFAULT_EXPECTED_BYTES: Final = 64 * 2**10
"""Expected size for a caller that has sent nothing yet: the bytes that a transport buffers before anybody reads."""
SPARE_BYTES: Final = COPIES * DEFAULT_EXPECTED_BYTES
"""Charges up to which nobody counts as holding anything."""
MAX_CALLERS: Final = 4096
"""Callers whose message sizes are remembered."""

_log = structlog.get_logger(__name__)


def budget_bytes(limit: int | None = None) -> int:
    """Bytes for messages and their copies, from the memory limit of this process."""
    limit = machine.limit_bytes() if limit is None else limit
    return max(MIN_BUDGET_BYTES, min(MAX_BUDGET_BYTES, int(limit * SHARE_OF_LIMIT) - BASELINE_BYTES))


def session_budget_bytes(limit: int, budget: int) -> int:
    """Bytes for what sessions keep, of a process that may take `limit` and has `budget` for messages: half as many,
    and no more than a small limit leaves beside these, but the bytes of the largest session at least."""
    return max(SESSION_BYTES, min(budget // 2, limit - BASELINE_BYTES - budget))


class Limit(Protocol):
    """Ends a read at its time."""

    def end_by(self, when: float) -> None:
        """End it at `when` (the event loop's clock) at the latest; nothing where it has ended."""
        ...


def always() -> bool:
    return True


@dataclass(eq=False)
class MessageRead:
    """One message being read."""

    # Verified name of its caller.
    caller: str
    # Whom its memory is charged to.
    payer: str
    # What ends the read.
    limit: Limit
    # When the read began, by the event loop's clock.
    since: float
    # Whether a part of the message has arrived, as far as its transport knows.
    has_begun: Callable[[], bool]
    # Whether its head said its size, which its payer is charged with.
    is_charged: bool = False
    # True if it was ended because reads took too much memory.
    is_shed: bool = False


@dataclass(eq=False)
class MessageMemory:
    """Memory accounting of one front, shared by all its transports."""

    # Bytes for all messages and their copies.
    budget: int = field(default_factory=budget_bytes)
    # Reads the bytes of this process in RAM.
    resident_bytes: Callable[[], int] = machine.resident_bytes
    # Reads the heap bytes that it has not freed; None where the C library does not report them.
    allocated_bytes: Callable[[], int | None] = machine.heap_bytes
    # Reads the bytes that the process keeps for sessions, which are no messages.
    session_bytes: Callable[[], int] = lambda: 0
    # Bytes charged to all payers, copies included.
    held_bytes: int = 0
    # Reads ended because of their memory.
    shed_count: int = 0
    # Bytes charged to each payer, copies included.
    _by_payer: dict[str, int] = field(default_factory=dict)
    # Reads that are open.
    _readings: list[MessageRead] = field(default_factory=list)
    # Expected size in bytes of each caller's next message, least recently seen first.
    _sizes: OrderedDict[str, int] = field(default_factory=OrderedDict)
    # Resident bytes of the process without messages and sessions.
    _idle_resident: int = 0
    # Allocated heap bytes without these; None where not reported.
    _idle_allocated: int | None = None
    # Set when a charge is released.
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    # Set when a read opens; it wakes `watch`.
    _opened: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def payer_share(self) -> int:
        """Largest share of one payer, bytes."""
        return self.budget // 2

    def expected_bytes(self, caller: str) -> int:
        """Expected bytes of the caller's next message, from its earlier ones."""
        return self._sizes.get(caller, DEFAULT_EXPECTED_BYTES)

    def has_seen(self, caller: str) -> bool:
        """Whether a message of the caller has arrived recently."""
        return caller in self._sizes

    def has_room(self, payer: str, size: int) -> bool:
        """Whether a message of `size` fits beside what is held. A payer that holds next to nothing always fits its own
        share: else a message made from a small one that is held (it refers to shared memory) would never fit."""
        charge, own = COPIES * size, self._by_payer.get(payer, 0)
        fits = self.held_bytes <= SPARE_BYTES or self.held_bytes + charge <= self.budget
        return fits and (own <= SPARE_BYTES or own + charge <= self.payer_share)

    def hold(self, payer: str, size: int) -> "MemoryCharge":
        """Charge a message of `size` bytes, until the charge is released. Raises CallRefused(OVERLOADED)."""
        return MemoryCharge(self, payer, self.take(payer, size))

    def hold_answer(self, payer: str, size: int) -> "MemoryCharge":
        """As `hold`, for an answer that its model has computed: only then its size is known."""
        return MemoryCharge(self, payer, self.take(payer, size, is_answer=True))

    def take(self, payer: str, size: int, *, is_answer: bool = False) -> int:
        """Of `MemoryCharge`: the bytes charged. Raises CallRefused(OVERLOADED)."""
        if not self.has_room(payer, size):
            own, total = self._by_payer.get(payer, 0) // COPIES, self.held_bytes // COPIES
            found = f"{size} bytes beside {own} of this tenant and {total} of all"
            asked = f"at most {self.payer_share // COPIES} and {self.budget // COPIES}"
            raise _no_room_for_answer(found, asked) if is_answer else _no_room(found, asked)
        charge = COPIES * size
        if charge:
            self._by_payer[payer] = self._by_payer.get(payer, 0) + charge
            self.held_bytes += charge
        return charge

    def hold_expected(self, caller: str, payer: str, size: int | None = None) -> "MemoryCharge":
        """Charge a message while it is read; `size` is None where its head does not say. Raises
        CallRefused(OVERLOADED)."""
        return self.hold(payer, self.expected_bytes(caller) if size is None else size)

    def release(self, payer: str, charge: int) -> None:
        """Of `MemoryCharge`."""
        self.held_bytes -= charge
        left = self._by_payer[payer] - charge
        if left:
            self._by_payer[payer] = left
        else:
            del self._by_payer[payer]
        self._freed.set()

    async def wait_for_room(self, payer: str, size: int, timeout_s: float) -> None:
        """Return when a message of `size` fits, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.has_room(payer, size):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return

    def record_size(self, caller: str, size: int) -> None:
        """Record a message that arrived. The next is expected to be as large, less a tenth for each smaller one."""
        known = self._sizes.get(caller, 0)
        expected = max(DEFAULT_EXPECTED_BYTES, size, int(0.9 * known))
        if expected != known:
            self._sizes[caller] = expected
        self._sizes.move_to_end(caller)
        if len(self._sizes) > MAX_CALLERS:
            self._sizes.popitem(last=False)

    def begin_read(
        self,
        caller: str,
        payer: str,
        limit: Limit,
        has_begun: Callable[[], bool] = always,
        *,
        is_charged: bool = False,
    ) -> MessageRead:
        """Track a read while a message arrives, until `end_read`. `is_charged`: as in `MessageRead`."""
        reading = MessageRead(caller, payer, limit, asyncio.get_running_loop().time(), has_begun, is_charged)
        self._readings.append(reading)
        self._opened.set()
        return reading

    def end_read(self, reading: MessageRead) -> None:
        self._readings.remove(reading)

    async def watch(self) -> None:
        """End reads while the process exceeds the budget. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        trimmed = loop.time()
        self._idle_resident, self._idle_allocated = self._resident(), self._allocated()
        while True:
            if not self._readings:
                self._opened.clear()
                if not self.held_bytes:
                    self._note_idle()
                if not await wait_or_timeout(self._opened, IDLE_S):
                    machine.trim()
                    await self._opened.wait()
            await asyncio.sleep(CHECK_EVERY_S)
            if self._resident() - self._idle_resident > self.budget and loop.time() - trimmed >= TRIM_S:
                machine.trim()
                trimmed = loop.time()
            self._shed_reads(loop.time())

    def _resident(self) -> int:
        return self.resident_bytes() - self.session_bytes()

    def _allocated(self) -> int | None:
        allocated = self.allocated_bytes()
        return None if allocated is None else allocated - self.session_bytes()

    def _note_idle(self) -> None:
        """Record the process's memory without messages. Memory of past messages that is not returned yet counts only
        step by step."""
        self._idle_resident = min(self._resident(), self._idle_resident + UNEXPLAINED_BYTES)
        allocated = self._allocated()
        if allocated is not None and self._idle_allocated is not None:
            self._idle_allocated = min(allocated, self._idle_allocated + UNEXPLAINED_BYTES)

    def _message_bytes(self) -> int:
        """Bytes of messages, derived from the process's memory."""
        taken = self._resident() - self._idle_resident
        if taken <= self.budget:
            return taken
        allocated = self._allocated()
        return taken if allocated is None or self._idle_allocated is None else allocated - self._idle_allocated

    def _shed_reads(self, now: float) -> None:
        """End reads while the process exceeds the budget and held messages do not explain it.

        Enough reads are ended to remove the excess, assuming that each brought as much. Reads of the payer with the
        most reads go first, of these the caller's with the most, the oldest first. Streams that wait for their next
        message have brought nothing; reads of a size that was charged, nothing that is not held. Those end only where
        there are no others.
        """
        taken = self._message_bytes()
        unknown = taken - self.held_bytes
        if taken <= self.budget or unknown <= UNEXPLAINED_BYTES:
            return
        begun = [each for each in self._readings if each.has_begun()]
        begun = [each for each in begun if not each.is_charged] or begun
        of_payer = Counter([each.payer for each in begun])
        of = Counter([each.caller for each in begun])
        old = [each for each in begun if not each.is_shed and now - each.since >= MIN_READ_AGE_S]
        old.sort(key=lambda each: (-of_payer[each.payer], -of[each.caller], each.since))
        for each in old[: math.ceil((taken - self.budget) * len(begun) / unknown)]:
            each.is_shed = True
            each.limit.end_by(now)
            self.shed_count += 1
            _log.warning("read_aborted", reads=len(self._readings), taken_bytes=taken, held_bytes=self.held_bytes)


class MemoryCharge:
    """Bytes that a payer is charged with, until `release` or the end of its context. Contexts made by generators cost a
    microsecond more each."""

    __slots__ = ("_charge", "_memory", "_payer")

    def __init__(self, memory: MessageMemory, payer: str, charge: int) -> None:
        self._memory = memory
        self._payer = payer
        self._charge = charge

    def release(self) -> None:
        """Idempotent."""
        if self._charge:
            self._memory.release(self._payer, self._charge)
            self._charge = 0

    def resize(self, size: int) -> None:
        """Charge a message of `size` bytes in place of what is charged: one that fits alone still fits. Raises
        CallRefused(OVERLOADED), and charges nothing then."""
        self.release()
        self._charge = self._memory.take(self._payer, size)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()


def shed_refusal() -> CallRefused:
    """The refusal for a read that was ended because of its memory."""
    return _no_room("messages on their way in that take more memory than there is for them", "room for all of them")


def _no_room(found: str, asked: str) -> CallRefused:
    return CallRefused(
        Refusal(Code.OVERLOADED, found, asked, "retry later, with fewer or smaller messages"), Seconds(1.0)
    )


def _no_room_for_answer(found: str, asked: str) -> CallRefused:
    remedy = "retry later: nothing is wrong with the request, which its model has run"
    return CallRefused(Refusal(Code.OVERLOADED, f"an answer of {found}", asked, remedy), Seconds(1.0))

"""Places of the calls inside a front, and what each caller holds by them: calls, streams, unread answers.

Every call takes one, whatever its method; `ingress_admission` counts what else a caller may hold.
"""

from collections import Counter
from typing import Any, Final

from shoal.agent.dataplane.memory import MemoryCharge, MessageMemory
from shoal.agent.dataplane.transport import MAX_MESSAGE, CallRefused
from shoal.agent.metrics import HeldLimit
from shoal.types.codes import Code, Refusal
from shoal.types.units import Seconds

CALLS: Final = 2048
"""Concurrent calls of all authenticated callers."""
CALLS_PER_CALLER: Final = 512
CALLS_PER_PAYER: Final = 3 * CALLS // 4
"""A tenant may have many credentials: what it leaves is as many as one other caller may have."""
STREAMS_PER_CALLER: Final = 8
BYTES_PER_CALLER: Final = 4 * MAX_MESSAGE
"""Bytes of answers that a caller has not read yet; one answer always has room."""


class CallerUsage:
    """What one caller holds now."""

    __slots__ = ("calls", "reads", "streams", "unread_bytes")

    def __init__(self) -> None:
        self.calls = 0
        """Open calls."""
        self.streams = 0
        """Open streams; each is also a call."""
        self.unread_bytes = 0
        """Bytes of answers that it has not read yet."""
        self.reads: Any = None
        """Its reads, for whoever reads; None before the first, because most requests are there when they are read."""


class CallPlaces:
    """Of one transport. A `caller` is the verified name whose limits apply. A `payer` is charged for a message's
    memory; by default the caller."""

    def __init__(self, memory: MessageMemory) -> None:
        self.most = CALLS
        self.most_per_caller = CALLS_PER_CALLER
        self.most_per_payer = CALLS_PER_PAYER
        self.calls = 0
        """Open calls."""
        self.usage: dict[str, CallerUsage] = {}
        """By caller."""
        self.by_payer: dict[str, int] = {}
        """Open calls of each payer that is known."""
        self.refusal_counts: Counter[HeldLimit] = Counter()
        """Calls refused or ended here, and by `ingress_admission`."""
        self._memory = memory

    def take(self, caller: str, payer: str = "", *, stream: bool = False, is_trial: bool = False) -> "CallPlace":
        """Count one call, from its head until it leaves its place: at the last byte of its answer. `payer`: empty where
        it is not known. `is_trial`: where it is refused, it is asked for again, and only that refusal counts. Raises
        CallRefused(OVERLOADED)."""
        held = self.usage.get(caller)
        if held is None:
            held = self.usage[caller] = CallerUsage()
        if held.calls >= self.most_per_caller:
            found = f"{held.calls} calls of this caller"
            raise self._refuse_call(found, self.most_per_caller, is_trial=is_trial)
        of_payer = self.by_payer.get(payer, 0) if payer else 0
        if self.calls >= self.most or of_payer >= self.most_per_payer:
            if not held.calls:
                del self.usage[caller]
            if of_payer >= self.most_per_payer:
                raise self._refuse_call(f"{of_payer} calls of this tenant", self.most_per_payer, is_trial=is_trial)
            raise self._refuse_call(f"{self.calls} calls of all callers", self.most, is_trial=is_trial)
        if stream and held.streams >= STREAMS_PER_CALLER:
            found = f"{held.streams} streams of this caller"
            raise self.refuse(HeldLimit.STREAMS, found, f"at most {STREAMS_PER_CALLER} at once")
        held.calls += 1
        held.streams += stream
        self.calls += 1
        if payer:
            self.by_payer[payer] = of_payer + 1
        return CallPlace(self, caller, payer, held, is_stream=stream)

    def refuse(self, limit: HeldLimit, found: str, asked: str) -> CallRefused:
        """Count a call that is refused or ended, and tell why."""
        self.refusal_counts[limit] += 1
        return _overload(found, asked)

    def _refuse_call(self, found: str, most: int, *, is_trial: bool) -> CallRefused:
        self.refusal_counts[HeldLimit.CALLS] += not is_trial
        return _overload(found, f"at most {most} at once")

    def leave(self, caller: str, payer: str, *, stream: bool) -> None:
        """Of `CallPlace`."""
        held = self.usage[caller]
        if payer:
            left = self.by_payer[payer] - 1
            if left:
                self.by_payer[payer] = left
            else:
                del self.by_payer[payer]
        self.calls -= 1
        held.calls -= 1
        held.streams -= stream
        if held.calls == 0:
            del self.usage[caller]

    def hold_request(self, caller: str, size: int, payer: str = "") -> MemoryCharge:
        """Charge a request of `size` bytes, inside its place, until it is answered. Raises CallRefused(OVERLOADED)."""
        self._memory.record_size(caller, size)
        return self._memory.hold(payer or caller, size)

    def hold_answer(self, held: CallerUsage, size: int, payer: str) -> MemoryCharge:
        """Of `CallPlace`."""
        if held.unread_bytes and held.unread_bytes + size > BYTES_PER_CALLER:
            found = f"{held.unread_bytes} bytes of answers that this caller does not take"
            raise self.refuse(HeldLimit.ANSWERS, found, f"at most {BYTES_PER_CALLER}")
        charge = self._memory.hold_answer(payer, size)
        held.unread_bytes += size
        return charge


class CallPlace:
    """The place of one call, until `leave` or the end of its context."""

    __slots__ = ("_answer", "_answer_bytes", "_caller", "_has_left", "_held", "_is_stream", "_places", "payer")

    def __init__(self, places: CallPlaces, caller: str, payer: str, held: CallerUsage, *, is_stream: bool) -> None:
        self._places = places
        self._caller = caller
        self.payer = payer
        """Empty where it is not known."""
        self._held = held
        self._is_stream = is_stream
        self._answer: MemoryCharge | None = None
        self._answer_bytes = 0
        self._has_left = False

    def hold_answer(self, size: int, payer: str = "") -> None:
        """Charge an answer of `size` bytes until it is sent (`release_answer`, or the place is left), in place of what
        it was before. Raises CallRefused(OVERLOADED)."""
        if self._has_left:
            return  # nobody reads the answer
        self.release_answer()
        self._answer = self._places.hold_answer(self._held, size, payer or self._caller)
        self._answer_bytes = size

    def release_answer(self) -> None:
        """Idempotent."""
        if self._answer is not None:
            self._answer.release()
            self._answer = None
            self._held.unread_bytes -= self._answer_bytes

    def leave(self) -> None:
        """Idempotent."""
        if not self._has_left:
            self._has_left = True
            self.release_answer()
            self._places.leave(self._caller, self.payer, stream=self._is_stream)

    def __enter__(self) -> "CallPlace":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _overload(found: str, asked: str) -> CallRefused:
    """Why a call, or what it is to hold, is refused."""
    return CallRefused(Refusal(Code.OVERLOADED, found, asked, "retry later, with fewer calls at once"), Seconds(1.0))

"""Requests that wait for their turn between tenants: `core.fair_queue` decides, here they wait."""

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from shoal.agent.core.fair_queue import FairQueue, WaitingRequest
from shoal.agent.core.request_attempts import DEADLINE_REFUSAL
from shoal.agent.core.request_router import RequestRouter
from shoal.agent.dataplane.in_flight import InFlightRequest
from shoal.agent.ports import AgentClock
from shoal.types.codes import ShoalError
from shoal.types.units import Elapsed

RESIZE_S: Final = 0.05
"""Seconds between two counts of what is in transit, which take time with many replicas."""
LATE_CHECK_S: Final = 0.01
"""Least seconds between two looks for requests whose deadline has passed, each of which goes through all that wait."""


class TurnWaiter(Protocol):
    """Waits for a turn. Once one of these is called, the other is not, and neither raises."""

    def on_turn(self) -> None:
        """It goes on now, and is to `FairTurns.leave`."""
        ...

    def on_late(self) -> None:
        """Its deadline has passed, and it waits no longer."""
        ...


class _Waiting(NamedTuple):
    """One that waits."""

    waiter: TurnWaiter
    # Its deadline, elapsed clock.
    expires_at: Elapsed


class FairTurns:
    """Of one front. A request that another front of the region forwarded does not wait: it waited where it entered,
    and two fronts that wait for each other would not go on."""

    def __init__(self, router: RequestRouter, slots: int, clock: AgentClock) -> None:
        self._router = router
        self._slots = slots
        self._queue = FairQueue(slots)
        self._clock = clock
        self._resized_at = clock.now()
        self._waiting: dict[WaitingRequest, _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None
        """For the first deadline. One timer serves all that wait: nearly every one goes on before its own."""
        self._timer_at = Elapsed(0.0)

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def configure(self, weights: Mapping[str, float]) -> None:
        """Weights by payer."""
        self._queue.configure(weights)

    def enter(self, flight: InFlightRequest, now: Elapsed | None = None) -> bool:
        """Whether it goes on at once; otherwise it is to `wait`, or to `begin_wait`. `now`: by default when it
        arrived."""
        if not flight.caller.is_ingress:
            self._queue.force(flight.payer)
            return True
        payer, now = flight.payer, flight.arrived_at if now is None else now
        return self._queue.enter(payer, now) or (self._resize(now) and self._queue.enter(payer, now))

    def _resize(self, now: Elapsed) -> bool:
        """Add the requests in transit to the slots; whether it was time to."""
        if now - self._resized_at < RESIZE_S:
            return False
        self._resized_at = now
        self._queue.resize(self._slots + self._router.in_transit)
        return True

    def begin_wait(self, flight: InFlightRequest, waiter: TurnWaiter) -> WaitingRequest:
        """Have `waiter` wait until the request's turn or its deadline, unless it is to `end_wait`. On an event loop."""
        request = self._queue.wait(flight.payer)
        self._waiting[request] = _Waiting(waiter, flight.expires_at)
        self._set_timer(flight.expires_at)
        return request

    def end_wait(self, request: WaitingRequest) -> bool:
        """It waits no longer; False: it did not any more, because its turn has come or its deadline has passed."""
        if self._waiting.pop(request, None) is None:
            return False
        self._queue.withdraw(request)
        return True

    async def wait(self, flight: InFlightRequest) -> None:
        """Return when it goes on. Raises ShoalError(DEADLINE_EXCEEDED)."""
        turn = _TaskTurn()
        request = self.begin_wait(flight, turn)
        try:
            await turn.outcome
        except asyncio.CancelledError:
            if not self.end_wait(request) and not turn.is_late:
                self.leave(flight)  # its turn came at the same moment
            raise
        if turn.is_late:
            raise ShoalError(DEADLINE_REFUSAL)

    def leave(self, flight: InFlightRequest) -> None:
        """It ended, after `enter`, or after its turn came."""
        for request in self._queue.leave(flight.payer):
            self._waiting.pop(request).waiter.on_turn()

    def _set_timer(self, at: Elapsed) -> None:
        if self._timer is not None:
            if at >= self._timer_at:
                return
            self._timer.cancel()
        left_s = max(LATE_CHECK_S, at - self._clock.now())
        self._timer_at, self._timer = at, asyncio.get_running_loop().call_later(left_s, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        now = self._clock.now()
        late = [(request, each.waiter) for request, each in self._waiting.items() if each.expires_at <= now]
        for request, waiter in late:
            if self.end_wait(request):
                waiter.on_late()
        if self._waiting:
            self._set_timer(min(each.expires_at for each in self._waiting.values()))


class _TaskTurn:
    """A task that waits."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_late = False

    def on_turn(self) -> None:
        if not self.outcome.done():
            self.outcome.set_result(None)

    def on_late(self) -> None:
        self.is_late = True
        self.on_turn()

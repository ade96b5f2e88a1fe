"""Requests that wait for their turn between tenants: `core.fair_queue` decides, here they wait."""

import asyncio
from collections.abc import Mapping
from typing import Final

from shoal.agent.core.fair_queue import FairQueue, WaitingRequest
from shoal.agent.core.request_attempts import DEADLINE_REFUSAL
from shoal.agent.core.request_router import RequestRouter
from shoal.agent.dataplane.in_flight import InFlightRequest
from shoal.agent.ports import AgentClock
from shoal.types.codes import ShoalError
from shoal.types.units import Elapsed

RESIZE_S: Final = 0.05
"""Seconds between two counts of what is in transit, which take time with many replicas."""


class FairTurns:
    """Of one front. A request that another front of the region forwarded does not wait: it waited where it entered,
    and two fronts that wait for each other would not go on."""

    def __init__(self, router: RequestRouter, slots: int, clock: AgentClock) -> None:
        self._router = router
        self._slots = slots
        self._queue = FairQueue(slots)
        self._clock = clock
        self._resized_at = clock.now()
        self._turns: dict[WaitingRequest, asyncio.Future[None]] = {}

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    def configure(self, weights: Mapping[str, float]) -> None:
        """Weights by payer."""
        self._queue.configure(weights)

    def enter(self, flight: InFlightRequest) -> bool:
        """Whether it goes on at once; otherwise it is to `wait`."""
        if not flight.caller.is_ingress:
            self._queue.force(flight.payer)
            return True
        payer, now = flight.payer, flight.arrived_at
        return self._queue.enter(payer, now) or (self._resize(now) and self._queue.enter(payer, now))

    def _resize(self, now: Elapsed) -> bool:
        """Add the requests in transit to the slots; whether it was time to."""
        if now - self._resized_at < RESIZE_S:
            return False
        self._resized_at = now
        self._queue.resize(self._slots + self._router.in_transit)
        return True

    async def wait(self, flight: InFlightRequest) -> None:
        """Return when it goes on. Raises ShoalError(DEADLINE_EXCEEDED)."""
        request = self._queue.wait(flight.payer)
        turn = self._turns[request] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(flight.expires_at - self._clock.now()):
                await turn
        except BaseException as error:
            if self._turns.pop(request, None) is not None:
                self._queue.withdraw(request)
            else:  # its turn came at the same moment
                self.leave(flight)
            if isinstance(error, TimeoutError):
                raise ShoalError(DEADLINE_REFUSAL) from error
            raise

    def leave(self, flight: InFlightRequest) -> None:
        """It ended, after `enter` or `wait`."""
        for request in self._queue.leave(flight.payer):
            turn = self._turns.pop(request)
            if not turn.done():
                turn.set_result(None)

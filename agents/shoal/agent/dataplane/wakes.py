"""Requests that wait until a replica which is scaled to zero is loaded again: `core.wakes` decides, here they wait."""

import asyncio
from collections.abc import Callable

from shoal.agent.core.request_attempts import DEADLINE_REFUSAL
from shoal.agent.core.request_router import RequestRouter
from shoal.agent.core.route_tables import RequestEntry
from shoal.agent.dataplane.auth import Caller
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.ports import AgentClock
from shoal.types.codes import ShoalError
from shoal.types.route import Route
from shoal.types.units import Elapsed


class Wakes:
    """Of one front. Who waits is inside the front and counts as any request there: against the limits of its workload
    and tenant, and of all bytes."""

    def __init__(self, router: RequestRouter, clock: AgentClock, request_wake: Callable[[str], None]) -> None:
        """`request_wake` asks the supervisor to load an assignment."""
        self._router = router
        self._clock = clock
        self._request_wake = request_wake
        self._change = asyncio.Event()

    def on_configured(self) -> None:
        """The router has another configuration: whoever waits looks again."""
        past, self._change = self._change, asyncio.Event()
        past.set()

    def is_asleep(self, route: Route) -> bool:
        """Whether all replicas of the route that would take a request are scaled to zero."""
        return self._router.wake_s(route, self._clock.now()) is not None

    async def wait(self, route: Route, caller: Caller, expires_at: Elapsed) -> Route:
        """Wake the route's replicas that are scaled to zero, and return once one of its replicas takes requests, or
        none will. Returns the route of that time.

        Raises CallRefused(SCALED_TO_ZERO, or the code with which the load failed) and ShoalError(DEADLINE_EXCEEDED).
        """
        while True:
            now = self._clock.now()
            plan = self._router.plan_wake(route, expires_at, now)
            for assignment in plan.wake:
                self._request_wake(assignment)
            if plan.refused is not None:
                raise CallRefused(plan.refused.refusal, plan.refused.retry_after_s)
            if not plan.waits:
                return route
            try:
                async with asyncio.timeout(expires_at - now):
                    await self._change.wait()
            except TimeoutError as error:
                raise ShoalError(DEADLINE_REFUSAL) from error
            route = self._router.tables.find(route.workload, _entry_of(caller)) or route


def _entry_of(caller: Caller) -> RequestEntry:
    if not caller.hop:
        return RequestEntry.CLIENT
    return RequestEntry.GUEST if caller.region else RequestEntry.FORWARD

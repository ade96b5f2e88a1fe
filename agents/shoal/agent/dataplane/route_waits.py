"""Requests that wait until the region has said where their workload is."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from shoal.agent.core.awaited_routes import AwaitedRoutes, no_answer
from shoal.agent.dataplane.transport import CallRefused
from shoal.agent.ports import AgentClock
from shoal.host.event_wait import wait_or_timeout
from shoal.types.route import Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

RETRY_S: Final = Seconds(1.0)
"""After which a caller may come again, as with every refusal of a front that has too much to do."""


class RouteWaits:
    """Of one front. `on_ask` is called when it has something new to ask the region; it must not block."""

    def __init__(self, clock: AgentClock, on_ask: Callable[[], None]) -> None:
        self._clock = clock
        self._on_ask = on_ask
        self._awaited = AwaitedRoutes()
        self._change = asyncio.Event()

    @property
    def open_questions(self) -> tuple[WorkloadKey, ...]:
        """Workloads that requests wait for, or that clients asked for in vain."""
        return self._awaited.open_questions(self._clock.now())

    def configure(self, routes: Iterable[Route], *, is_on_demand: bool) -> None:
        """As `AwaitedRoutes.configure`; whoever waits looks again."""
        self._awaited.configure(routes, is_on_demand=is_on_demand)
        past, self._change = self._change, asyncio.Event()
        past.set()

    async def wait(self, key: WorkloadKey, within_s: Seconds) -> None:
        """Return when the region has answered, whatever it said: at once for what cannot exist. `within_s`: until the
        caller's deadline. While the region does not answer, only those wait who came first, so that waiting calls keep
        out no others.

        Raises CallRefused(OVERLOADED | MODEL_NOT_READY).
        """
        now, is_new = self._clock.now(), self._awaited.is_answered(key)
        if not self._awaited.may_exist(key):
            self._awaited.repeat(key, now)
            return
        refusal = self._awaited.ask(key, now)
        if refusal is not None:
            raise CallRefused(refusal, RETRY_S)
        if is_new:
            self._on_ask()
        until = min(now + within_s, self._awaited.due_at(key))
        while not self._awaited.is_answered(key):
            left = until - self._clock.now()
            if left <= 0 or not await wait_or_timeout(self._change, left):
                raise CallRefused(no_answer(key), RETRY_S)

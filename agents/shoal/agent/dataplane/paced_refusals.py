"""Holds refusals back until `core.refusal_pace` lets them go."""

import asyncio

from shoal.agent.core.refusal_pace import RefusalPace
from shoal.agent.ports import AgentClock
from shoal.types.units import Elapsed


class PacedRefusals:
    """Of one front, whatever transport a request came by."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._pace = RefusalPace[asyncio.Future[None]]()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return self._pace.waiting

    async def wait(self, caller: str) -> None:
        """Return when a refusal of the caller may be sent."""
        if self._pace.enter(self._clock.now()):
            return
        turn = asyncio.get_running_loop().create_future()
        self._end(self._pace.wait(caller, turn))
        self._set_timer()
        try:
            await turn
        finally:
            self._pace.withdraw(caller, turn)

    def _set_timer(self) -> None:
        at = self._pace.next_at()
        if at is not None and self._timer is None:
            left_s = at - self._clock.now()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left_s), self._on_turn)

    def _on_turn(self) -> None:
        self._timer = None
        self._end(self._pace.next(Elapsed(self._clock.now())))
        self._set_timer()

    def _end(self, turn: "asyncio.Future[None] | None") -> None:
        if turn is not None and not turn.done():
            turn.set_result(None)

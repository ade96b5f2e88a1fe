"""Notices of this region to the origins of agreements that it ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from shoal.coordinator.controllers.federation.bids import BidRepository
from shoal.coordinator.core.negotiation.hold import StoppingBid
from shoal.coordinator.ports import Clock, PeerRegions
from shoal.types.agreement import Notice
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds

RETRY_S: Final = Seconds(1.0)


class NoticeSender:
    """A task for each stopping bid whose origin does not know of it yet."""

    def __init__(
        self,
        region: str,
        bids: BidRepository,
        peers: PeerRegions,
        clock: Clock,
        on_acknowledged: Callable[[str], Awaitable[None]],
    ) -> None:
        """on_acknowledged: called with a bid once its origin has received the notice; if it raises ShoalError, the
        notice is sent again.
        """
        self._region = region
        self._bids = bids
        self._peers = peers
        self._clock = clock
        self._on_acknowledged = on_acknowledged
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start_due(self) -> None:
        """Starts what is due, and waits for nothing."""
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        for name, bid in self._bids.open.items():
            if isinstance(bid.state, StoppingBid) and not bid.state.told and name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._send(name))

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _send(self, name: str) -> None:
        """Retries until the origin received it, or the agreement is over."""
        while (bid := self._bids.all.get(name)) is not None and isinstance(state := bid.state, StoppingBid):
            if state.told:
                return
            left = Seconds(max(0.0, state.ends - self._clock.now()))
            notice = Notice(state.granted.award.agreement, self._region, state.code, left)
            try:
                await self._notify(bid.offer.origin, notice)
                await self._on_acknowledged(name)
            except ShoalError:
                await self._clock.sleep(RETRY_S)

    async def _notify(self, origin: str, notice: Notice) -> None:
        """Any answer, even a refusal, means that the origin received it. Raises ShoalError(PEER_UNREACHABLE)."""
        try:
            await self._peers.notify(origin, notice)
        except ShoalError as error:
            if error.code is Code.PEER_UNREACHABLE:
                raise

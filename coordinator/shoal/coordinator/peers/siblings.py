"""The other coordinators of one region: asked by the one that leads whether another was elected since.

Who is cut off from the store but not from its agents would not know otherwise, and keep them from the new leader.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import grpc.aio

from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.ports import Clock
from shoal.types.codes import ShoalError
from shoal.types.device import Role
from shoal.types.units import Seconds
from shoal.v1 import operator_pb2, operator_pb2_grpc
from shoal.wire import cancelled
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import dns_of

EVERY_S: Final = Seconds(2.0)
ANSWERS_S: Final = 1.0


class Siblings:
    """addresses: of the others. roots: the region's CAs. identity: this coordinator's."""

    def __init__(
        self,
        region: str,
        addresses: Sequence[str],
        roots: Callable[[], Sequence[str]],
        identity: Callable[[], Enrolled],
        clock: Clock,
    ) -> None:
        self._server = dns_of(region, Role.COORDINATOR, "coordinator")
        self._addresses = addresses
        self._roots = roots
        self._clock = clock
        self._channels = Channels(identity, target=str)

    async def replaced(self, term: int) -> None:
        """Returns when one of them leads in a later term than this."""
        while not any(await asyncio.gather(*(self._leads_after(term, each) for each in self._addresses))):
            await self._clock.sleep(EVERY_S)

    async def close(self) -> None:
        await self._channels.close()

    async def _leads_after(self, term: int, address: str) -> bool:
        with suppress(grpc.RpcError, OSError, ShoalError), cancelled.as_refusal():
            channel = self._channels.to(address, self._roots(), self._server, address)
            stub: operator_pb2_grpc.OperatorAsyncStub = operator_pb2_grpc.OperatorStub(channel)
            reply = await stub.WhoAmI(operator_pb2.WhoAmIRequest(), timeout=ANSWERS_S)
            return not reply.follows and reply.term > term
        return False

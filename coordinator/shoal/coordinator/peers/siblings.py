"""The other coordinators of one region: the leader asks them whether another one was elected since.

A leader that is cut off from the store, but not from its agents, would not know otherwise and would keep them from the
new leader.
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
from shoal.wire import grpc_cancellation
from shoal.wire.identity import dns_of
from shoal.wire.member_files import Enrolled

EVERY_S: Final = Seconds(2.0)
ANSWERS_S: Final = 1.0


class Siblings:
    """addresses: of the other coordinators. roots: the region's CAs. identity: this coordinator's."""

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

    async def wait_for_later_term(self, term: int) -> None:
        """Returns when a sibling leads in a later term than `term`."""
        while not any(await asyncio.gather(*(self._has_later_term(term, each) for each in self._addresses))):
            await self._clock.sleep(EVERY_S)

    async def close(self) -> None:
        await self._channels.close()

    async def _has_later_term(self, term: int, address: str) -> bool:
        with suppress(grpc.RpcError, OSError, ShoalError), grpc_cancellation.as_refusal():
            channel = self._channels.to(address, self._roots(), self._server, address)
            stub: operator_pb2_grpc.OperatorAsyncStub = operator_pb2_grpc.OperatorStub(channel)
            reply = await stub.WhoAmI(operator_pb2.WhoAmIRequest(), timeout=ANSWERS_S)
            return not reply.follows and reply.term > term
        return False

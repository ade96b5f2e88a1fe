"""mTLS channels to other coordinators and to the federation, one each, and what their failures mean."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from shoal.types.codes import Code, Refusal, ShoalError
from shoal.wire import cancelled
from shoal.wire.enrol import Enrolled
from shoal.wire.limits import LINK_BYTES, PEER, channel_options
from shoal.wire.outbound import target_of_peer
from shoal.wire.status import refusal_of

T = TypeVar("T")

_UNKNOWN: Final = frozenset(
    {
        Code.COORDINATOR_UNREACHABLE,
        Code.DEADLINE_EXCEEDED,
        Code.CANCELLED,
        Code.INTERNAL,
        Code.STORE_UNAVAILABLE,
        Code.CONFLICT,
    }
)
"""After these it may have been done."""
CLOSE_S: Final = 1.0


class Channels:
    """identity: this region's own newest certificate; what hangs on it is opened anew when it changes. target: what is
    dialled for an address; addresses that this region's own operator gave need no rule."""

    def __init__(self, identity: Callable[[], Enrolled], target: Callable[[str], str] = target_of_peer) -> None:
        self._identity = identity
        self._target = target
        self._open: dict[str, tuple[tuple[Any, ...], grpc.aio.Channel]] = {}
        self._closing = set[asyncio.Task[None]]()

    def to(self, address: str, roots: Sequence[str], server_name: str, slot: str = "") -> grpc.aio.Channel:
        """roots: the CAs (PEM) of the region that is called, and no other's. slot: of which one stays
        open; the server's. Raises ShoalError(SOURCE_DENIED) as `target` does."""
        own = self._identity()
        made_of = (address, tuple(roots), own.certificate_pem)
        known = self._open.get(slot or server_name)
        if known is not None and known[0] == made_of:
            return known[1]
        credentials = grpc.ssl_channel_credentials("".join(roots).encode(), own.key_pem, own.certificate_pem)
        options = channel_options(LINK_BYTES, server_name=server_name, patience=PEER)
        channel = grpc.aio.secure_channel(self._target(address), credentials, options)
        self._open[slot or server_name] = (made_of, channel)
        if known is not None:
            closing = asyncio.create_task(known[1].close(CLOSE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return channel

    async def close(self) -> None:
        channels = [channel for _, channel in self._open.values()]
        self._open.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels), *self._closing)


async def answered(call: Awaitable[T], unreachable: Code, whom: str) -> T:
    """What a call returns. Raises ShoalError: `unreachable` where its outcome is unknown, else as it was refused."""
    try:
        with cancelled.as_refusal():
            return await call
    except (grpc.RpcError, ShoalError) as cause:
        raise failed(cause, unreachable, whom) from cause


def failed(cause: grpc.RpcError | ShoalError, unreachable: Code, whom: str) -> ShoalError:
    refusal = cause.refusal if isinstance(cause, ShoalError) else refusal_of(cause)
    if refusal.code not in _UNKNOWN:
        return ShoalError(refusal)
    return ShoalError(Refusal(unreachable, f"{whom}: {refusal.found}", "an answer", "it is tried again by itself"))

"""mTLS channels to other coordinators and to the federation, one each, and the meaning of their failures."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from shoal.host.egress_guard import target_of_peer
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.wire import grpc_cancellation
from shoal.wire.grpcio_status import refusal_of
from shoal.wire.limits import LINK_BYTES, PEER, channel_options
from shoal.wire.member_files import Enrolled

T = TypeVar("T")

_OUTCOME_UNKNOWN: Final = frozenset(
    {
        Code.COORDINATOR_UNREACHABLE,
        Code.DEADLINE_EXCEEDED,
        Code.CANCELLED,
        Code.INTERNAL,
        Code.STORE_UNAVAILABLE,
        Code.CONFLICT,
    }
)
"""After these the call may have been executed."""
_VERIFY_FAILED: Final = "CERTIFICATE_VERIFY_FAILED"
_OF_DATES: Final = ("has expired", "not yet valid")
"""BoringSSL's words, crypto/x509/x509_txt.c: X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID."""
CLOSE_S: Final = 1.0


class Channels:
    """identity: this region's newest certificate; channels are reopened when it changes. target: the address to dial
    for an address. The default checks it; addresses that this region's own operator gave need no check."""

    def __init__(self, identity: Callable[[], Enrolled], target: Callable[[str], str] = target_of_peer) -> None:
        self._identity = identity
        self._target = target
        self._open: dict[str, tuple[tuple[Any, ...], grpc.aio.Channel]] = {}
        self._closing = set[asyncio.Task[None]]()

    def to(self, address: str, roots: Sequence[str], server_name: str, slot: str = "") -> grpc.aio.Channel:
        """roots: the CAs (PEM) of the called region, and no other's. slot: at most one channel per slot stays open; the
        server name unless given. Raises ShoalError(SOURCE_DENIED) as `target` does."""
        own = self._identity()
        made_of = (address, tuple(roots), own.certificate_pem)
        known = self._open.get(slot or server_name)
        if known is not None and known[0] == made_of:
            return known[1]
        credentials = grpc.ssl_channel_credentials("".join(roots).encode(), own.key_pem, own.certificate_pem)
        options = channel_options(LINK_BYTES, server_name=server_name, keepalive=PEER)
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


async def await_answer(call: Awaitable[T], unreachable: Code, callee: str) -> T:
    """The call's result. Raises ShoalError: `unreachable` if the outcome is unknown, else the peer's refusal."""
    try:
        with grpc_cancellation.as_refusal():
            return await call
    except (grpc.RpcError, ShoalError) as cause:
        raise call_error(cause, unreachable, callee) from cause


def has_unknown_issuer(refusal: Refusal) -> bool:
    """Whether the call failed since no trusted CA vouches for the server's certificate, whatever its dates are. grpc
    says so in the text of the error alone."""
    return _VERIFY_FAILED in refusal.found and not any(each in refusal.found for each in _OF_DATES)


def call_error(cause: grpc.RpcError | ShoalError, unreachable: Code, callee: str) -> ShoalError:
    refusal = cause.refusal if isinstance(cause, ShoalError) else refusal_of(cause)
    if refusal.code not in _OUTCOME_UNKNOWN:
        return ShoalError(refusal)
    return ShoalError(Refusal(unreachable, f"{callee}: {refusal.found}", "an answer", "it is tried again by itself"))

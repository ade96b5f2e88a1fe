"""F18: a half-open connection, where packets vanish without a reset. Keepalive finds it within seconds, and does not
give up on a peer that is merely far away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from harness.crypto.pki import Authority
from harness.faults.tcp_proxy import tcp_proxy
from shoal.agent.clock import SystemClock
from shoal.http2.keepalive import Keepalive
from shoal.types.device import Role
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK, LIVENESS, PEER, channel_options, server_options

FAR_S = 0.15
"""One way; a satellite is a quarter of a second up and down."""
SLACK_S = 1.0
"""For a machine with other things to do."""
PATIENCE = pytest.mark.parametrize("patience", [LINK, PEER, LIVENESS], ids=["link", "peer", "life"])


@asynccontextmanager
async def server(authority: Authority) -> AsyncIterator[int]:
    """Its port. `/x/Echo` answers at once, `/x/Hang` never."""

    async def echo(request: bytes, _context: Any) -> bytes:
        return request

    async def hang(_request: bytes, _context: Any) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    certificate, key, ca = authority.issue(Role.COORDINATOR, "coordinator").read()
    found = grpc.aio.server(options=server_options(2**20))
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo), "Hang": grpc.unary_unary_rpc_method_handler(hang)}
    found.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", methods),))
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    port = found.add_secure_port("127.0.0.1:0", credentials)
    await found.start()
    try:
        yield port
    finally:
        await found.stop(None)


def channel(authority: Authority, port: int, patience: Keepalive) -> grpc.aio.Channel:
    certificate, key, ca = authority.issue(Role.AGENT, "edge").read()
    name = dns_of(authority.region, Role.COORDINATOR, "coordinator")
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = channel_options(2**20, server_name=name, keepalive=patience)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "eu", SystemClock().wall())


@PATIENCE
async def test_far_away_is_no_fault(authority: Authority, patience: Keepalive) -> None:
    """TCP, TLS and HTTP/2 take six ways there and back before the first answer."""
    async with (
        server(authority) as port,
        tcp_proxy(port, delay_s=FAR_S) as way,
        channel(authority, way.port, patience) as to,
    ):
        assert await to.unary_unary("/x/Echo", None, None)(b"hello", timeout=30.0) == b"hello"


@PATIENCE
@pytest.mark.parametrize("method", ["Echo", "Hang"])
async def test_f18_peer_that_takes_everything_and_answers_nothing(
    authority: Authority, patience: Keepalive, method: str
) -> None:
    """Stopped, or behind something that swallows: its kernel acknowledges, so only an unanswered ping tells.

    method: called after the way broke, or inside when it does."""
    async with server(authority) as port, tcp_proxy(port) as way, channel(authority, way.port, patience) as to:
        assert await to.unary_unary("/x/Echo", None, None)(b"hello", timeout=30.0) == b"hello"
        inside = to.unary_unary("/x/Hang", None, None)(b"", timeout=60.0) if method == "Hang" else None
        if inside is not None:
            assert await to.unary_unary("/x/Echo", None, None)(b"after it", timeout=30.0) == b"after it"
        way.is_stalled = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (inside or to.unary_unary("/x/Echo", None, None)(b"lost", timeout=60.0))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        # grpc sends no two pings within a second
        assert loop.time() - start <= max(1.0, patience.ping_interval_s) + patience.ping_timeout_s + SLACK_S

"""The port for probes: apart from clients, and theirs to ask whatever strangers hold there."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from harness.clients.oip import Response, read_response
from shoal.agent.dataplane.health import MAX_CONNECTIONS, HealthPort
from shoal.types.units import Seconds


@dataclass
class ProbeTarget:
    live: bool = True
    ready: bool = False
    port: int = 0

    async def ask(self, path: str, method: str = "GET") -> Response:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            response = await read_response(reader)
            writer.close()
            return response


@pytest.fixture
async def probe_target() -> AsyncIterator[ProbeTarget]:
    found = ProbeTarget()
    transport = HealthPort(lambda: found.live, lambda: found.ready, "127.0.0.1", 0)
    found.port = await transport.start()
    yield found
    await transport.stop(Seconds(0.0))


async def test_live_and_ready_are_told_to_anybody(probe_target: ProbeTarget) -> None:
    assert (
        (await probe_target.ask("/v2/health/live")).json(),
        (await probe_target.ask("/v2/health/ready")).status,
    ) == (
        {"live": True},
        503,
    )
    probe_target.ready = True
    ready = await probe_target.ask("/v2/health/ready?verbose=1")
    assert (ready.status, ready.json()) == (200, {"ready": True})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2", 404), ("GET", "/v2/models/x", 404), ("POST", "/v2/health/live", 405), ("GET", "*", 404)],
)
async def test_nothing_else_is_there(probe_target: ProbeTarget, method: str, path: str, status: int) -> None:
    assert (await probe_target.ask(path, method)).status == status


@pytest.mark.parametrize("sent", [b"", b"GET /v2/health/live HT", b"x" * 4000])
async def test_a24_who_holds_every_connection_of_it_keeps_no_probe_out(probe_target: ProbeTarget, sent: bytes) -> None:
    held = []
    for _ in range(2 * MAX_CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", probe_target.port)
        writer.write(sent)
        held.append(writer)
        del reader
    for _ in range(3):
        assert (await probe_target.ask("/v2/health/live")).json() == {"live": True}
    for each in held:
        each.close()


async def test_too_long_a_head_ends_the_connection(probe_target: ProbeTarget) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", probe_target.port)
    writer.write(b"GET /" + b"x" * 100_000)
    async with asyncio.timeout(3):
        try:
            assert not await reader.read()
        except ConnectionResetError:
            pass
    writer.close()

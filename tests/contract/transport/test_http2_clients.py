"""HTTP/2 clients of others against this project's gRPC server: curl, nghttp and h2load."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.crypto.pki import Authority
from harness.servers.grpc_port import GrpcPort
from shoal.agent.clock import SystemClock
from shoal.host.grpc_server import CallFailure, GrpcServerLimits, ServerCall, ServerMethod
from shoal.http2.grpc_messages import GrpcStatus, frame_message
from shoal.types.device import Role

MAX_BYTES = 2**22
GRPC = ("-H", "content-type: application/grpc", "-H", "te: trailers")


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """Of a server that answers `/x/Echo` with what it was sent, and refuses anything else."""
    files = Authority(tmp_path, "eu", SystemClock().wall()).issue(Role.AGENT, "n1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])

    async def echo(call: ServerCall) -> bytes | None:
        return await call.read(MAX_BYTES)

    async def refuse(call: ServerCall) -> bytes | None:
        raise CallFailure(GrpcStatus.UNIMPLEMENTED, "no such method")

    limits = GrpcServerLimits(100, MAX_BYTES, 10.0, 2.0, 30.0)
    server = GrpcPort(lambda path: ServerMethod(echo if path == "/x/Echo" else refuse), limits, lambda: context)
    yield f"https://127.0.0.1:{await server.start()}"
    await server.stop(0.0)


async def run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        shown, _ = await process.communicate()
    assert process.returncode == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
async def test_curl_gets_back_what_it_sent(url: str, size: int, tmp_path: Path) -> None:
    body, answer = tmp_path / "body", tmp_path / "answer"
    body.write_bytes(frame_message(bytes(range(256)) * (size // 256)))
    shown = await run(
        "curl", "-sk", "--http2", "-o", str(answer), "-w", "%{http_version} %{http_code}", *GRPC,
        "--data-binary", f"@{body}", f"{url}/x/Echo",
    )  # fmt: skip
    assert shown == "2 200"
    assert answer.read_bytes() == body.read_bytes()


async def test_curl_is_told_that_this_is_grpc(url: str) -> None:
    assert await run("curl", "-sk", "--http2", "-w", "%{http_code}", f"{url}/") == "415"


async def test_nghttp_reads_every_frame(url: str, tmp_path: Path) -> None:
    body = tmp_path / "body"
    body.write_bytes(frame_message(b"x"))
    for path, status in (("/x/Echo", "0"), ("/x/Nothing", "12")):
        shown = await run("nghttp", "-nv", *GRPC, "-d", str(body), f"{url}{path}")
        assert f"grpc-status: {status}" in shown
        assert "error_code=NO_ERROR" in shown
        assert "PROTOCOL_ERROR" not in shown


@pytest.mark.parametrize(("size", "clients", "in_flight"), [(100, 1, 100), (100, 20, 10), (300_000, 4, 8)])
async def test_h2load_loses_nothing(url: str, size: int, clients: int, in_flight: int, tmp_path: Path) -> None:
    body, count = tmp_path / "body", 1_000 if size < 1_000 else 100
    body.write_bytes(frame_message(bytes(size)))
    shown = await run(
        "h2load", "-t", "1", "-n", str(count), "-c", str(clients), "-m", str(in_flight), "-d", str(body), *GRPC,
        f"{url}/x/Echo",
    )  # fmt: skip
    assert f"{count} succeeded, 0 failed, 0 errored, 0 timeout" in shown, shown
    sent = re.search(r"(\d+)\) data", shown)
    assert sent is not None
    assert int(sent[1]) == count * (size + 5)

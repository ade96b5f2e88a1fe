"""A39: rapid resets; and A40 to A42: floods and smuggling in HTTP/2 and HTTP/1.1, at the data port of a real front.

Each ends with the attacker's connection, and another client's calls go on meanwhile.
"""

import asyncio
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from harness.clients import http2
from harness.clients.http2 import Http2Connection, frame, request_block
from harness.clients.oip import RestClient, Tensor, read_response
from harness.cluster.dataplane_node import DataPlaneNode
from harness.report import record
from harness.wait import until
from shoal.http2.frames import ErrorCode
from shoal.types.codes import Code
from shoal.types.device import Role

INFER = "/inference.GRPCInferenceService/ModelInfer"
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
MOST = 60_000
"""Frames after which a flood that nobody ended has failed to be ended."""
AT_ONCE = 500
PIECE = 16_000
LONGEST_S = 2.0
OPEN = http2.END_HEADERS
STREAMS = range(1, 2**31, 2)


def resets() -> Iterator[bytes]:
    for stream in STREAMS:
        cancel = frame(http2.RST_STREAM, 0, stream, struct.pack(">I", 8))
        yield frame(http2.HEADERS, OPEN, stream, request_block(INFER)) + cancel


def provoked_resets() -> Iterator[bytes]:
    """The server resets what gets a window of nothing (CVE-2025-8671)."""
    for stream in STREAMS:
        nothing = frame(http2.WINDOW_UPDATE, 0, stream, bytes(4))
        yield frame(http2.HEADERS, OPEN, stream, request_block(INFER)) + nothing


def continuations() -> Iterator[bytes]:
    yield frame(http2.HEADERS, 0, 1, b"")
    while True:
        yield frame(http2.CONTINUATION, 0, 1, b"\x00\x01a\x01b")


def empty_data() -> Iterator[bytes]:
    yield frame(http2.HEADERS, OPEN, 1, request_block(INFER))
    while True:
        yield frame(http2.DATA, 0, 1, b"")


def repeat_frame(kind: int, stream: int, payload: bytes) -> Callable[[], Iterator[bytes]]:
    def frames() -> Iterator[bytes]:
        while True:
            yield frame(kind, 0, stream, payload)

    return frames


FLOODS: dict[str, tuple[str, Callable[[], Iterator[bytes]]]] = {
    "resets": ("A39", resets),
    "provoked resets": ("A39", provoked_resets),
    "CONTINUATION": ("A40", continuations),
    "empty DATA": ("A40", empty_data),
    "PING": ("A40", repeat_frame(http2.PING, 0, bytes(8))),
    "SETTINGS": ("A40", repeat_frame(http2.SETTINGS, 0, b"")),
    "PRIORITY": ("A40", repeat_frame(http2.PRIORITY, 1, bytes(5))),
    "WINDOW_UPDATE": ("A40", repeat_frame(http2.WINDOW_UPDATE, 0, struct.pack(">I", 1))),
}


def indexed_bomb() -> bytes:
    """A field of 4 KiB in the table, and 16,000 references to it: 64 MB of 20 kB (CVE-2016-6581)."""
    value = bytes(4000)
    return b"\x40\x01a\x7f" + bytes([len(value) - 127 & 0x7F | 0x80, len(value) - 127 >> 7]) + value + b"\xbe" * 16_000


BOMBS = {
    "references to a large field": indexed_bomb(),
    "references to the static table": b"\x88" * 16_000,
    "many empty fields": b"\x00\x01a\x00" * 4_000,
    "a number without an end": b"\xff" * 100 + b"\x80" * 1_000,
    "churn of the table": b"\x40\x01a\x01b" * 3_000,
}


async def connect(node: DataPlaneNode) -> Http2Connection:
    client = node.rest_client(node.authority.issue(Role.TENANT, "evil"))
    return await Http2Connection.connect(f"127.0.0.1:{node.front.config.port}", client.context(), "localhost")


async def longest_call(node: DataPlaneNode, during: asyncio.Future[Any]) -> float:
    """Of another tenant's calls meanwhile, none of which may fail; there is at least one."""
    victim = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    loop = asyncio.get_running_loop()
    longest = 0.0
    try:
        while True:
            start = loop.time()
            await victim.infer("relu", X)
            longest = max(longest, loop.time() - start)
            if during.done():
                return longest
    finally:
        await victim.close()


@pytest.mark.parametrize("kind", FLOODS)
async def test_a39_a40_a_flood_ends_its_connection(node: DataPlaneNode, kind: str) -> None:
    row, frames_of = FLOODS[kind]
    connection = await connect(node)
    sent = 0

    async def pour() -> None:
        nonlocal sent
        for each in frames_of():
            connection.send(each)
            sent += 1
            if sent % AT_ONCE == 0:
                await asyncio.sleep(0)  # noqa: TID251 - the turn of the reader and of the other client
                if connection.closed.is_set() or sent >= MOST:
                    return

    pouring = asyncio.ensure_future(pour())
    longest = await longest_call(node, pouring)
    await until(connection.closed.is_set, 10, f"the end of {kind}")
    if row == "A40":
        assert connection.goaway_error in (ErrorCode.ENHANCE_YOUR_CALM, None), "None: it was closed before we read"

    async def is_idle() -> bool:
        return all(count == 0 for _, count in (await node.front.stats()).in_flight)

    await until(is_idle, 5, "no orphaned work")
    await connection.close()
    assert longest < LONGEST_S
    record(row, "P", 1, **{f"{kind} frames until closed, at most": sent}, victim_longest_ms=round(longest * 1e3))


@pytest.mark.parametrize("kind", BOMBS)
async def test_a41_a_bomb_in_header_blocks_is_not_unpacked(node: DataPlaneNode, kind: str) -> None:
    block = BOMBS[kind]
    connection = await connect(node)
    pieces = [block[at : at + PIECE] for at in range(0, len(block), PIECE)]
    flags = [0] * (len(pieces) - 1) + [http2.END_HEADERS]
    connection.send(frame(http2.HEADERS, 0, 1, b""))
    for flag, piece in zip(flags, pieces, strict=True):
        connection.send(frame(http2.CONTINUATION, flag, 1, piece))
    ended = asyncio.ensure_future(until(lambda: connection.is_ended(1), 10, f"the end of {kind}"))
    longest = await longest_call(node, ended)
    await ended
    await connection.close()
    assert longest < LONGEST_S
    record("A41", "P", 1, what=kind, bytes=len(block), victim_longest_ms=round(longest * 1e3))


async def test_a42_fields_of_http2_cannot_carry_a_line(node: DataPlaneNode) -> None:
    for name, value in ((b"x", b"a\r\nhost: b"), (b"x\r\ny", b"a"), (b"X", b"a"), (b"x", b" a"), (b"a:b", b"c")):
        connection = await connect(node)
        block = request_block(INFER) + b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        connection.send(frame(http2.HEADERS, OPEN | http2.END_STREAM, 1, block))
        await until(partial(connection.is_ended, 1), 5, f"the end of {name!r}")
        assert not connection.header_blocks(1), "reset, and not answered"
        await connection.close()
    record("A42", "P", 5, what="HTTP/2")


HEAD = b"POST /v2/models/relu/infer HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = {
    "both lengths": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 4\r\ncontent-length: 5\r\n\r\n12345",
    "a signed length": HEAD + b"content-length: +4\r\n\r\n1234",
    "another coding": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before the colon": HEAD + b"content-length : 4\r\n\r\n1234",
    "a bare CR": HEAD + b"x: a\rcontent-length: 4\r\n\r\n1234",
    "a NUL": HEAD + b"x: a\x00b\r\n\r\n",
    "a chunk's size that is none": HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
}


@pytest.mark.parametrize("kind", SMUGGLED)
async def test_a42_a_request_of_two_meanings_is_refused(node: DataPlaneNode, kind: str) -> None:
    client: RestClient = node.rest_client(node.authority.issue(Role.TENANT, "acme"))
    reader, writer = await client.connect()
    writer.write(SMUGGLED[kind])
    async with asyncio.timeout(10):
        response = await read_response(reader)
        assert not await reader.read(), "the connection is closed"
    writer.close()
    assert response.status in (400, 501), response
    assert response.json()["code"] in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)


async def test_a42_a_million_tiny_chunks_are_not_read(node: DataPlaneNode) -> None:
    client = node.rest_client(node.authority.issue(Role.TENANT, "acme"))
    reader, writer = await client.connect()
    writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")

    async def pour() -> None:
        for _ in range(1000):
            writer.write(b"1\r\n \r\n" * 1000)
            await writer.drain()

    pouring = asyncio.ensure_future(pour())
    answered = asyncio.ensure_future(read_response(reader))
    longest = await longest_call(node, answered)
    response = await answered
    pouring.cancel()
    writer.transport.abort()
    assert (response.status, response.json()["code"]) == (400, Code.INVALID_ARGUMENT)
    assert longest < LONGEST_S
    record("A42", "P", 1, what="tiny chunks", victim_longest_ms=round(longest * 1e3))

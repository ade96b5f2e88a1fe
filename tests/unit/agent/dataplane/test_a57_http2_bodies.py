"""A57: what unfinished messages hold of a front. Bodies of REST over HTTP/2 that come in small frames."""

import asyncio
import tracemalloc
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final, cast

import pytest

from harness.fakes.inference import EchoingService
from harness.wait import until
from shoal.agent.dataplane.http2 import RestStream, RestStreams
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.agent.dataplane.rest import FREE_PIECES, ClientIdentity, RestMethods, RestRequest, RestResponse
from shoal.host.grpc_server import GrpcSession
from shoal.http2.connection import Stream
from shoal.http2.header_blocks import HeaderList

WINDOW: Final = 2**16 - 1
BODY: Final = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1.0]}]}'


class Methods(RestMethods):
    """Methods of a front that notes how it answered."""

    def __init__(self) -> None:
        super().__init__(EchoingService(), IngressAdmission())
        self.may_read = asyncio.Event()
        self.responses: list[RestResponse] = []

    async def answer(self, request: RestRequest, held: ExitStack) -> RestResponse:
        await self.may_read.wait()
        response = await super().answer(request, held)
        self.responses.append(response)
        return response


@dataclass
class Wire:
    """A stream of a connection that sends nothing."""

    methods: Methods = field(default_factory=Methods)
    stream: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(receive_window=WINDOW, is_remote_open=True))

    def open(self) -> RestStream:
        connection = SimpleNamespace(
            widen=lambda *_: None, send_headers=lambda *_: None, send_data=lambda *_: None, end=lambda *_: None
        )
        loop = asyncio.get_running_loop()
        session = SimpleNamespace(loop=loop, certificate=None, connection=connection, flush_soon=lambda: None)
        headers = HeaderList(
            ((b":method", b"POST"), (b":path", b"/v2/models/m/infer"), (b"authorization", b"Bearer t"))
        )
        server = RestStreams(self.methods, lambda _: ClientIdentity())
        return RestStream(server, cast("GrpcSession", session), cast("Stream", self.stream), headers)

    def end(self, stream: RestStream) -> None:
        self.stream.is_remote_open = False
        stream.on_data(memoryview(b""))

    async def response(self) -> RestResponse:
        self.methods.may_read.set()
        await until(lambda: self.methods.responses, 10.0, "the request to be answered")
        self.methods.close()
        return self.methods.responses[0]


def _send(stream: RestStream, body: bytes, piece: int) -> None:
    for at in range(0, len(body), piece):
        stream.on_data(memoryview(body)[at : at + piece])


async def test_a_body_in_tiny_frames_takes_no_more_than_its_bytes() -> None:
    wire = Wire()
    stream = wire.open()
    tracemalloc.start()
    try:
        _send(stream, bytes(WINDOW), 2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 * WINDOW
    stream.on_closed()


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_body_in_tiny_frames_is_refused(is_whole: bool) -> None:
    wire = Wire()
    stream = wire.open()
    _send(stream, BODY + b" " * FREE_PIECES, 1)
    if is_whole:
        wire.end(stream)
    response = await wire.response()
    assert response.status == 400
    assert b"larger chunks" in response.body
    stream.on_closed()


@pytest.mark.parametrize("is_whole", [False, True])
async def test_a_body_in_small_frames_is_read(is_whole: bool) -> None:
    wire = Wire()
    stream = wire.open()
    _send(stream, BODY + b" " * 128 * FREE_PIECES, 128)
    if is_whole:
        wire.end(stream)
    else:
        wire.methods.may_read.set()
        await until(lambda: not stream._body, 10.0, "the first to be read")
        _send(stream, b" " * 128, 1)
        wire.end(stream)
    assert (await wire.response()).status == 200
    stream.on_closed()

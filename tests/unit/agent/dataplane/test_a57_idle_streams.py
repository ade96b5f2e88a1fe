"""A57: a stream that waits for its next message holds nothing of its last answer."""

import tracemalloc
from typing import Any

from harness.fakes.wire import Wire
from harness.wait import until
from shoal.agent.dataplane.data_port import _server_method
from shoal.agent.dataplane.grpc_methods import GrpcMethods
from shoal.agent.dataplane.ingress_admission import IngressAdmission
from shoal.host.grpc_server import GrpcServerLimits
from shoal.http2 import frames
from shoal.http2.grpc_messages import frame_message
from shoal.http2.header_blocks import encode

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
SIZE = 20 * 2**20
HEAD = encode(
    (
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":path", PATH.encode()),
        (b"content-type", b"application/grpc"),
        (b"authorization", b"Bearer x"),
    )
)
REQUEST = frame_message(b"\x0a\x01m")


class Taken(Wire):
    """The client takes all that is written."""

    taken = 0

    def write(self, data: Any) -> None:
        self.taken += len(data)


class Service:
    """It answers every request with so many bytes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def admit(self, call: object) -> str:
        return "acme"

    async def infer(self, call: object, request: object) -> bytes:
        return bytes(SIZE)


async def test_a57_an_idle_stream_has_let_go_of_its_answer() -> None:
    service: Any = Service()  # what a stream calls of it
    methods = GrpcMethods(service, IngressAdmission())
    wire = Taken()
    limits = GrpcServerLimits(
        streams=8, message_bytes=2 * SIZE, handshake_s=60.0, ping_interval_s=60.0, ping_timeout_s=60.0
    )
    session = wire.session(_server_method(methods.find(PATH)), limits)
    wide = frames.settings(((frames.INITIAL_WINDOW_SIZE, 2**31 - 1),)) + frames.window_update(0, 2**31 - 2**17)
    session.data_received(wide)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        session.data_received(frames.headers(1, HEAD, 2**14, end_stream=False))
        session.data_received(frames.head(len(REQUEST), frames.DATA, 0, 1) + REQUEST)
        await until(lambda: wire.taken > SIZE, 10.0, "the answer is taken")
        await until(lambda: tracemalloc.get_traced_memory()[0] - before < SIZE / 2, 5.0, "it is freed")
        assert session.connection.streams, "the stream waits for its next message"
    finally:
        tracemalloc.stop()
        session.connection_lost(None)

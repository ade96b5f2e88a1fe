"""What a client's connection says before anything else, and what is left of one that is given up."""

import asyncio
import gc
import ssl

import pytest

from harness.fakes.wire import Wire
from shoal.host.grpc_client import (
    ANSWER_FRAME_BYTES,
    ANSWER_WINDOW_BYTES,
    ChannelState,
    ClientSession,
    GrpcChannel,
    UnaryCall,
)
from shoal.http2 import frames
from shoal.http2.grpc_messages import RESPONSE_HEAD, TRAILERS_OK, frame_message
from shoal.http2.header_blocks import encode
from shoal.wire.limits import PEER


def settings_of(said: bytes) -> dict[int, int]:
    """What a client's first bytes ask for."""
    at = len(frames.PREFACE)
    high, low, kind, _, _ = frames.HEAD.unpack_from(said, at)
    at += frames.HEAD_BYTES
    assert kind == frames.SETTINGS
    return dict(frames.parse_settings(said[at : at + (high << 16 | low)]))


async def test_a_client_allows_large_answers_larger_frames() -> None:
    session = ClientSession(GrpcChannel("127.0.0.1:1", "localhost", None, PEER, 2**20), PEER)
    settings = settings_of(session.connection.take_output())
    assert settings[frames.MAX_FRAME_SIZE] == ANSWER_FRAME_BYTES == 65_536
    assert frames.INITIAL_WINDOW_SIZE not in settings, "who asks for no larger one has that of RFC 9113"


@pytest.mark.parametrize(("window", "has_to_ask"), [(ANSWER_WINDOW_BYTES, False), (frames.DEFAULT_WINDOW, True)])
async def test_an_answer_within_its_window_waits_for_nothing(window: int, *, has_to_ask: bool) -> None:
    session = ClientSession(GrpcChannel("127.0.0.1:1", "there", None, PEER, 2**22), PEER, answer_window=window)
    wire, answers = Wire(), list[bytes | None]()
    session.connection_made(wire)
    session.data_received(frames.settings(()))
    block = encode(((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"there")))
    call = UnaryCall(session, "", 2**22, lambda answer, _: answers.append(answer))
    session.begin(call, block, b"request")
    answer = frame_message(bytes(2**20))
    session.data_received(frames.headers(1, RESPONSE_HEAD, 2**14, end_stream=False))
    for at in range(0, len(answer), 2**14):
        part = answer[at : at + 2**14]
        session.data_received(frames.head(len(part), frames.DATA, 0, 1) + part)
    session.data_received(frames.headers(1, TRAILERS_OK, 2**14, end_stream=True))
    assert answers == [bytes(2**20)]
    assert settings_of(bytes(wire.sent)).get(frames.INITIAL_WINDOW_SIZE, frames.DEFAULT_WINDOW) == window
    del wire.sent[: len(frames.PREFACE)]
    assert (wire.window_updates() > 0) is has_to_ask


async def test_a_connection_that_fails_while_it_is_given_up_leaves_no_error_to_nobody() -> None:
    left, channels, closing = list[str](), list[GrpcChannel](), list[asyncio.Task[None]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context["message"]))

    class FailingHandshake(ssl.SSLObject):
        def do_handshake(self) -> None:
            """Fails, and the channel's user closes it at the same time."""
            closing.append(asyncio.create_task(channels[0].close()))
            raise ssl.SSLError(1, "made up")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslobject_class = FailingHandshake
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        channels.append(GrpcChannel(address, "localhost", lambda: context, PEER, 2**20))
        channels[0].connect()
        await asyncio.wait_for(channels[0].wait_for_change(ChannelState.CONNECTING), 10.0)
        await asyncio.gather(*closing)
    assert [each.state for each in channels] == [ChannelState.CLOSED]
    # Nothing may hold what an error would be told of: the garbage collector does not look into TLS's own objects.
    channels.clear()
    closing.clear()
    gc.collect()
    assert left == []

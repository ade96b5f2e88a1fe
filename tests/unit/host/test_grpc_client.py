"""What a client's connection says before anything else, and what is left of one that is given up."""

import asyncio
import gc
import ssl

from shoal.host.grpc_client import ANSWER_FRAME_BYTES, ChannelState, ClientSession, GrpcChannel
from shoal.http2 import frames
from shoal.wire.limits import PEER


async def test_a_client_allows_large_answers_larger_frames() -> None:
    session = ClientSession(GrpcChannel("127.0.0.1:1", "localhost", None, PEER, 2**20), PEER)
    said = session.connection.take_output()
    at = len(frames.PREFACE)
    high, low, kind, _, _ = frames.HEAD.unpack_from(said, at)
    at += frames.HEAD_BYTES
    assert kind == frames.SETTINGS
    settings = dict(frames.parse_settings(said[at : at + (high << 16 | low)]))
    assert settings[frames.MAX_FRAME_SIZE] == ANSWER_FRAME_BYTES == 65_536


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

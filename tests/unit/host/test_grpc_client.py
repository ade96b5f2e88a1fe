"""What a client's connection says before anything else."""

from shoal.host.grpc_client import ANSWER_FRAME_BYTES, ClientSession, GrpcChannel
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

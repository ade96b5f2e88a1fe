"""gzip of gRPC messages: expanded as far as a message may be large, and no further."""

import gzip
import tracemalloc

import pytest

from shoal.agent.dataplane import compression
from shoal.agent.dataplane.compression import expand, expanded_size
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError

MOST = 2**22


async def expand_message(message: bytes) -> bytes:
    return await expand(message, expanded_size(message, MOST))


def saying(message: bytes, size: int) -> bytes:
    """The same gzip with another size in its trailer."""
    return message[:-4] + size.to_bytes(4, "little")


@pytest.mark.parametrize("size", [0, 10, 2**20, MOST - 2**16])
@pytest.mark.parametrize("level", [0, 9])
async def test_a_message_is_the_same_compressed_or_not(size: int, level: int) -> None:
    message = oip.ModelInferRequest(model_name="m", raw_input_contents=[bytes(size)]).SerializeToString()
    assert await expand_message(message) == message
    assert expanded_size(gzip.compress(message, level), MOST) >= len(message)
    assert await expand_message(gzip.compress(message, level)) == message
    assert await expand_message(gzip.compress(b"", level)) == b""


BOMB = gzip.compress(bytes(2**28), 9)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (bytes(MOST + 1), Code.TOO_LARGE),
        (gzip.compress(bytes(MOST + 1), mtime=0), Code.TOO_LARGE),
        (BOMB, Code.TOO_LARGE),
        (saying(BOMB, 100), Code.INVALID_ARGUMENT),
        (saying(BOMB, MOST), Code.INVALID_ARGUMENT),
        (saying(gzip.compress(bytes(100), mtime=0), 99), Code.INVALID_ARGUMENT),
        (saying(gzip.compress(bytes(100), mtime=0), 101), Code.INVALID_ARGUMENT),
        (saying(gzip.compress(bytes(100), mtime=0)[:-8], 100), Code.INVALID_ARGUMENT),
        (saying(gzip.compress(bytes(100), mtime=0) + gzip.compress(bytes(100), mtime=0), 100), Code.INVALID_ARGUMENT),
        (b"\x1f\x8b", Code.INVALID_ARGUMENT),
        (b"\x1f\x8bnot gzip at all" + bytes(4), Code.INVALID_ARGUMENT),
    ],
)
async def test_a14_what_is_refused(message: bytes, code: Code) -> None:
    with pytest.raises(ShoalError) as refused:
        await expand_message(message)
    assert refused.value.code is code


@pytest.mark.parametrize("said", [100, MOST])
async def test_a14_a_bomb_that_lies_is_not_expanded_beyond_what_it_says(said: int) -> None:
    message = saying(BOMB, said)
    tracemalloc.start()
    with pytest.raises(ShoalError) as refused:
        await expand_message(message)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "more than the" in str(refused.value.refusal)
    size = max(said, len(message))
    assert peak < 1.25 * size + 3 * compression._CHUNK_BYTES, "the target, what it grows by, a piece of each side"

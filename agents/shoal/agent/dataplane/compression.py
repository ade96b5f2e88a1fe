"""gzip of gRPC messages. grpc checks the size of a compressed message before it expands it, and never after.

So the library leaves messages compressed (`grpc.per_message_decompression`), and they are expanded here. A gzip message
ends with its expanded size, which is checked and charged first; no further byte is expanded.

Answers are not compressed. Every client of the library announces that it can read gzip, none that it wants it. The
library compresses on the event loop, where 60 MiB of floats take 2.8 s of CPU.
"""

import asyncio
import io
import zlib
from typing import Final

from shoal.agent.dataplane.request import invalid, too_large

SERVER_OPTIONS: Final = (
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 0b101),  # none and gzip: raw deflate does not contain its size
)
_GZIP: Final = b"\x1f\x8b"
"""First bytes of gzip. No protobuf message begins with them: the first would be a field of wire type 7, which does not
exist."""
_MIN_GZIP_BYTES: Final = 18
"""Bytes of the shortest gzip: its header and its trailer."""
_CHUNK_BYTES: Final = 2**20
"""Bytes expanded at once, some 3 ms. A cancelled call wastes at most one chunk."""
_INLINE_BYTES: Final = 2**17
"""Larger messages are expanded in a thread; this many bytes hold the loop for less than 1 ms."""


def expanded_size(message: bytes, most: int) -> int:
    """Bytes of the message once expanded, from its trailer; `expand` accepts no other size. `most` is the limit.

    Raises ShoalError(TOO_LARGE | INVALID_ARGUMENT).
    """
    size = len(message)
    if message.startswith(_GZIP):
        if size < _MIN_GZIP_BYTES:
            raise invalid(f"gzip of {size} bytes", f"at least {_MIN_GZIP_BYTES}")
        size = max(size, int.from_bytes(message[-4:], "little"))
    if size > most:
        raise too_large(f"a message of {size} bytes", most)
    return size


async def expand(message: bytes, most: int) -> bytes:
    """The message, expanded if it was compressed. `most` is its `expanded_size`.

    Raises ShoalError(INVALID_ARGUMENT).
    """
    if not message.startswith(_GZIP):
        return message
    stream, target, view = zlib.decompressobj(wbits=31), io.BytesIO(), memoryview(message)
    for start in range(0, len(view), _CHUNK_BYTES):
        data: bytes | memoryview = view[start : start + _CHUNK_BYTES]
        while data and not stream.eof:
            # One byte more than allowed is requested, so that an excess is noticed and zlib's 0 for "all" never occurs.
            room = min(_CHUNK_BYTES, most + 1 - target.tell())
            piece = (
                _inflate(stream, data, room)
                if most <= _INLINE_BYTES
                else await asyncio.to_thread(_inflate, stream, data, room)
            )
            target.write(piece)
            if target.tell() > most:
                raise invalid(f"gzip of more than the {most} bytes that it says", "its size in its trailer")
            data = stream.unconsumed_tail
    if not stream.eof or stream.unused_data:
        raise invalid("gzip that does not end with the message", "one whole member")
    return target.getvalue()


def _inflate(stream: "zlib._Decompress", data: bytes | memoryview, room: int) -> bytes:
    try:
        return stream.decompress(data, room)
    except zlib.error as error:
        raise invalid(f"a message that is not gzip: {error}"[:200], "gzip, or no compression") from error

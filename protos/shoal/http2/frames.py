"""HTTP/2 frames (RFC 9113, sections 4 and 6): their numbers, and how they are written."""

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""First bytes of a client."""
HEAD_BYTES: Final = 9
"""Length, type, flags and stream of a frame."""
HEAD: Final = struct.Struct(">BHBBI")
"""The same; the length in two parts."""

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20
"""The flag PRIORITY of a HEADERS frame."""

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

DEFAULT_WINDOW: Final = 65_535
"""Bytes of a window, of the connection and of each stream, unless SETTINGS say otherwise."""
MAX_WINDOW: Final = 2**31 - 1
MIN_FRAME_BYTES: Final = 2**14
"""Least value of MAX_FRAME_SIZE, and its default."""
MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_STREAM_ID: Final = 2**31 - 1

_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")
_GOAWAY = struct.Struct(">II")


class ErrorCode(IntEnum):
    """Reasons for RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a frame's payload of `length` bytes."""
    return HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    payload = b"".join(_SETTING.pack(key, value) for key, value in values)
    return head(len(payload), SETTINGS, 0, 0) + payload


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """The payload's length is a multiple of six."""
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK: Final = head(0, SETTINGS, ACK, 0)


def ping(payload: bytes, *, ack: bool = False) -> bytes:
    """`payload` has eight bytes."""
    return head(8, PING, ACK if ack else 0, 0) + payload


def window_update(stream: int, increment: int) -> bytes:
    return head(4, WINDOW_UPDATE, 0, stream) + _UINT32.pack(increment)


def rst_stream(stream: int, error: int) -> bytes:
    return head(4, RST_STREAM, 0, stream) + _UINT32.pack(error)


def goaway(last_stream: int, error: int, debug: bytes = b"") -> bytes:
    return head(8 + len(debug), GOAWAY, 0, 0) + _GOAWAY.pack(last_stream, error) + debug


def headers(stream: int, block: bytes, max_frame: int, *, end_stream: bool) -> bytes:
    """HEADERS, with CONTINUATION frames where the block is larger than `max_frame` bytes."""
    flags = END_STREAM if end_stream else 0
    if len(block) <= max_frame:
        return head(len(block), HEADERS, flags | END_HEADERS, stream) + block
    pieces = [block[start : start + max_frame] for start in range(0, len(block), max_frame)]
    out = [head(len(pieces[0]), HEADERS, flags, stream), pieces[0]]
    for number, piece in enumerate(pieces[1:], start=2):
        out += (head(len(piece), CONTINUATION, END_HEADERS if number == len(pieces) else 0, stream), piece)
    return b"".join(out)

"""gRPC over HTTP/2, without I/O: messages within a stream's data, and the fields beside them.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import base64
import binascii
import io
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Final
from urllib.parse import quote_from_bytes, unquote

from shoal.http2.header_blocks import encode

MessageBytes = bytes | bytearray
"""What is sent; one that was received in place need not be copied for that."""
PREFIX_BYTES: Final = 5
"""Bytes before each message: a flag for compression, and the message's length."""
MAX_TIMEOUT_DIGITS: Final = 8
MAX_DETAILS_BYTES: Final = 4096
"""Bytes of the description of a status, before it is percent-encoded."""

_PREFIX = struct.Struct(">BI")
_TIMEOUT_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_UNESCAPED: Final = "".join(chr(each) for each in range(0x20, 0x7F) if chr(each) != "%")


class GrpcStatus(IntEnum):
    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class MessageMalformed(Exception):
    """What a stream carries is no sequence of messages."""


def prefix_of(message: MessageBytes) -> bytes:
    """What goes before a message."""
    return _PREFIX.pack(0, len(message))


def frame_message(message: MessageBytes) -> bytes:
    """The message with its prefix, in one piece."""
    return prefix_of(message) + message


class MessageReader:
    """Splits the data of one direction of a stream into messages.

    A message's length is known before the message, so a caller can check it and only then let the peer send the rest:
    `expect` gives the message the place where it is put together, of which the system holds no page before something
    arrives.
    """

    __slots__ = ("_buffer", "_target", "_whole", "is_compressed", "size")

    def __init__(self) -> None:
        self._buffer = bytearray()
        """What arrived and has no place yet."""
        self._target: io.BytesIO | None = None
        """Place of the next message, filled up to its position."""
        self._whole: bytes | None = None
        """A message that arrived whole and alone, which is what most calls send."""
        self.size: int | None = None
        """Bytes of the next message; None while its prefix has not arrived."""
        self.is_compressed = False
        """Whether the next message is compressed; known with its size."""

    @property
    def whole(self) -> bytes | None:
        """The next message, if it has arrived whole, and nothing after it. `take` takes it."""
        if self._whole is not None:
            return self._whole
        target = self._target
        if target is None or self._buffer or target.tell() != self.size:
            return None
        return target.getvalue()

    @property
    def held_bytes(self) -> int:
        """Bytes that have arrived and were not taken."""
        if self._whole is not None:
            return PREFIX_BYTES + len(self._whole)
        return len(self._buffer) + (0 if self._target is None else PREFIX_BYTES + self._target.tell())

    @property
    def missing_bytes(self) -> int:
        """Bytes of the next message, and of its prefix, that have not arrived yet."""
        return max(0, (self.size or 0) + PREFIX_BYTES - self.held_bytes)

    def expect(self) -> None:
        """Make room for the next message, whose size is known and accepted. Nothing where it has arrived."""
        size = self.size
        if size is None or self._whole is not None or self._target is not None or not self.missing_bytes:
            return
        target = self._target = io.BytesIO(bytes(size))  # it is the only one to refer to these: they are no copy
        target.write(memoryview(self._buffer)[PREFIX_BYTES:])
        self._buffer = bytearray()

    def has_taken(self, data: bytes | memoryview) -> bool:
        """Keep a copy of the data, if it is a part of the next message that has its place, and not its end: then there
        is nothing else to do."""
        target = self._target
        if target is None or target.tell() + len(data) >= (self.size or 0):
            return False
        target.write(data)
        return True

    def receive(self, data: bytes | memoryview) -> None:
        """Keep a copy of the data. Raises MessageMalformed."""
        target = self._target
        if target is not None:
            room = (self.size or 0) - target.tell()
            if len(data) > room:
                self._buffer += data[room:]
                data = data[:room]
            target.write(data)
            return
        if self._whole is not None:
            self._buffer += frame_message(self._whole)
            self._whole = None
        if not self._buffer and len(data) >= PREFIX_BYTES:
            self._set_prefix(*_PREFIX.unpack_from(data))
            if len(data) == PREFIX_BYTES + (self.size or 0):
                self._whole = bytes(data[PREFIX_BYTES:])
                return
        self._buffer += data
        if self.size is None:
            self._read_prefix()

    def take(self) -> bytes | None:
        """The next message if it has arrived whole. Raises MessageMalformed."""
        if self._whole is not None:
            message, self._whole, self.size = self._whole, None, None
            return message
        size, target = self.size, self._target
        if size is None:
            return None
        if target is not None:
            if target.tell() < size:
                return None
            self._target = None
            message = target.getvalue()  # no copy: all of it was written
        else:
            end = PREFIX_BYTES + size
            if len(self._buffer) < end:
                return None
            with memoryview(self._buffer) as view:
                message = bytes(view[PREFIX_BYTES:end])
            del self._buffer[:end]
        self.size = None
        self._read_prefix()
        return message

    def clear(self) -> None:
        """Hold nothing of what has arrived, whoever still refers to this: nobody reads on."""
        self._buffer = bytearray()
        self._target = self._whole = self.size = None
        self.is_compressed = False

    def _read_prefix(self) -> None:
        if len(self._buffer) >= PREFIX_BYTES:
            self._set_prefix(*_PREFIX.unpack_from(self._buffer))

    def _set_prefix(self, flag: int, size: int) -> None:
        if flag > 1:
            raise MessageMalformed(f"flag {flag} before a message")
        self.is_compressed, self.size = flag == 1, size


def parse_timeout(text: str) -> float | None:
    """Seconds of the field grpc-timeout; None: it is malformed."""
    digits, unit = text[:-1], _TIMEOUT_UNITS.get(text[-1:])
    if unit is None or not digits.isascii() or not digits.isdigit() or len(digits) > MAX_TIMEOUT_DIGITS:
        return None
    return int(digits) * unit


def format_timeout(seconds: float) -> str:
    """The field grpc-timeout, rounded up to microseconds, or to a coarser unit where the digits do not suffice."""
    for unit, size in (("u", 1e-6), ("m", 1e-3), ("S", 1.0), ("M", 60.0)):
        count = -int(-max(0.0, seconds) // size)
        if count < 10**MAX_TIMEOUT_DIGITS:
            return f"{count}{unit}"
    return f"{min(10**MAX_TIMEOUT_DIGITS - 1, -int(-seconds // 3600.0))}H"


def encode_details(text: str) -> bytes:
    """The field grpc-message: percent-encoded UTF-8."""
    return quote_from_bytes(text.encode()[:MAX_DETAILS_BYTES], safe=_UNESCAPED).encode()


def decode_details(value: bytes) -> str:
    return unquote(value.decode("ascii", "replace"), errors="replace")


def encode_metadata(key: str, value: str | bytes) -> tuple[bytes, bytes]:
    """One pair as a field. Values of keys that end in `-bin` are bytes."""
    content = base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode("latin-1", "replace")
    return key.encode(), content


def decode_binary(value: bytes) -> bytes:
    """The value of a field whose name ends in `-bin`. Raises MessageMalformed."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MessageMalformed(f"base64: {error}") from error


RESPONSE_HEAD: Final = encode(((b":status", b"200"), (b"content-type", b"application/grpc")))
"""Header block before a response's messages."""
TRAILERS_OK: Final = encode(((b"grpc-status", b"0"),))


def status_fields(
    status: int, details: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> tuple[tuple[bytes, bytes], ...]:
    """Fields that end a response."""
    fields = [(b"grpc-status", str(int(status)).encode())]
    if details:
        fields.append((b"grpc-message", encode_details(details)))
    fields += (encode_metadata(key, value) for key, value in metadata)
    return tuple(fields)

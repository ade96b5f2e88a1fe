"""The frame format without a socket: bytes to frames and back, and the two kinds of header.

A reader receives into buffers that it keeps. What one frame takes is bounded before it is held: a header by
`MAX_HEADER`, a payload by the limit that the caller gives, and what is kept between frames by `KEPT_BYTES`.
"""

import io
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from shoal.types.codes import Code, Refusal, refuse

MAX_HEADER: Final = 64 * 2**10
MAX_PAYLOAD: Final = 96 * 2**20
"""Above the 64 MiB limit of one request's expanded tensors, so that the worker refuses larger ones, not the
transport."""
SMALL_BYTES: Final = 32 * 2**10
"""A payload up to this size is copied out of the kept buffer; the rest of a larger one is received into its own."""
KEPT_BYTES: Final = 128 * 2**10
"""Holds the largest head and header with a small payload, and the head of the next frame."""

END_ALIGNMENT: Final = 16
"""A payload in a buffer of its own ends at a multiple of it: so an array of as many bytes at its end needs no copy for
the runtime, which takes 16 bytes at once."""

_MAGIC: Final = 0x5347
"""Changes with the format, so that no process of another version is adopted: its hello is no frame."""
_HEAD: Final = struct.Struct("!HBxIIQ")
_INFER: Final = struct.Struct("!dHHH")
"""Deadline, and the sizes of the three texts that follow: assignment, origin, trace."""
_MAX_TEXT: Final = 2**16 - 1

Header = Mapping[str, Any]
Payload = bytes | bytearray
"""Never changed by who holds it. That of a large `infer` or its answer is the buffer that it was received into."""


class FrameType(IntEnum):
    HELLO = 1
    WELCOME = 2
    CALL = 3
    REPLY = 4
    REFUSAL = 5
    CANCEL = 6
    PUSH = 7
    INFER = 8
    ANSWER = 9


_NOTHING: Final = memoryview(b"")
_TYPES: Final = {each.value: each for each in FrameType}


class FrameError(Exception):
    """The peer broke the frame format; the connection is closed."""


@dataclass(frozen=True, slots=True)
class FrameMessage:
    """One call, reply or push."""

    # What it is: the name of a handler, or the kind of a reply or push.
    kind: str
    # Small facts as JSON values.
    header: Header = field(default_factory=dict)
    # Raw bytes.
    payload: bytes = b""


class InferAnswer(NamedTuple):
    """The answer to one `infer` call."""

    # The serialized ModelInferResponse.
    payload: Payload
    # Facts about a traced request as JSON values; empty for any other.
    header: Header


class Frame(NamedTuple):
    """One frame as read from a socket."""

    # Type of the frame.
    frame_type: FrameType
    # Call id; 0 for hello, welcome and push.
    call: int
    # Header, not decoded.
    header: bytes
    # Empty if `oversized_bytes` is not 0.
    payload: Payload
    # Payload bytes that were declared, read and dropped because they exceeded the limit. 0: none.
    oversized_bytes: int = 0


class InferHeader(NamedTuple):
    """Header of an INFER frame."""

    # Id of the assignment that is to answer.
    assignment: str
    # Origin under which the request is metered.
    origin: str
    # `traceparent` if the request is traced; empty for nearly all.
    trace: str
    # Deadline on the machine's monotonic clock, which all its processes share.
    deadline: float


class FrameReader:
    """Frames out of the bytes of one peer.

    The caller receives into `buffer()`, says how much with `on_received`, and takes frames with `next_frame` until
    there is none.
    """

    def __init__(self) -> None:
        self._kept = bytearray(KEPT_BYTES)
        self._view = memoryview(self._kept)
        # Unread bytes of `_kept`.
        self._start = 0
        self._end = 0
        # The frame whose payload is being received into a buffer of its own; None between two of those.
        self._large: Frame | None = None
        self._large_view = _NOTHING
        # The frame whose payload passes through `_kept`, how many bytes of it have yet to come, and where they go. No
        # sink: they are dropped.
        self._passing: Frame | None = None
        self._left_to_pass = 0
        self._sink: io.BytesIO | None = None

    def buffer(self) -> memoryview:
        """Where to receive next; never empty after `next_frame` returned None."""
        if self._large is not None:
            return self._large_view
        if self._start:
            left = self._end - self._start
            self._view[:left] = self._view[self._start : self._end]
            self._start, self._end = 0, left
        return self._view[self._end :]

    def release(self) -> None:
        """Nothing more is received: whoever still holds this reader holds no buffer."""
        self._kept, self._view, self._large_view = bytearray(), _NOTHING, _NOTHING
        self._large = self._passing = self._sink = None
        self._start = self._end = 0

    def on_received(self, count: int) -> None:
        """`count` bytes are in the buffer."""
        if self._large is not None:
            self._large_view = self._large_view[count:]
        else:
            self._end += count

    def next_frame(self, max_payload: int) -> Frame | None:
        """The next whole frame; None until more is received. Raises FrameError on anything malformed."""
        if self._large is not None:
            if len(self._large_view):
                return None
            frame, self._large, self._large_view = self._large, None, _NOTHING
            return frame
        if self._passing is not None:
            return self._pass_on(self._passing)
        start, end = self._start, self._end
        if end - start < _HEAD.size:
            return None
        magic, number, header_size, size, call = _HEAD.unpack_from(self._kept, start)
        frame_type = _TYPES.get(number)
        if magic != _MAGIC or header_size > MAX_HEADER or frame_type is None:
            raise FrameError("not a frame")
        at = start + _HEAD.size
        body = at + header_size
        if body > end:
            return None
        if size <= max_payload:
            after = body + size
            if after <= end and (size <= SMALL_BYTES or frame_type is not FrameType.INFER):
                self._start = after
                return Frame(frame_type, call, bytes(self._view[at:body]), bytes(self._view[body:after]))
            if size <= SMALL_BYTES:
                return None
        self._begin(frame_type, call, bytes(self._view[at:body]), body, size, max_payload)
        return self.next_frame(max_payload)

    def _begin(self, frame_type: FrameType, call: int, header: bytes, body: int, size: int, max_payload: int) -> None:
        """Begin a payload of which not all is here, or one that needs a buffer of its own: a tensor is received into
        that."""
        self._start = body
        if size > max_payload:
            self._passing, self._left_to_pass = Frame(frame_type, call, header, b"", size), size
        elif frame_type not in (FrameType.INFER, FrameType.ANSWER):
            self._passing, self._left_to_pass, self._sink = Frame(frame_type, call, header, b""), size, io.BytesIO()
        else:
            try:
                whole = _room_for(size)
            except MemoryError:
                self._passing, self._left_to_pass = Frame(frame_type, call, header, b"", size), size
                return
            view = memoryview(whole)
            here = min(self._end - body, size)
            view[:here] = self._view[body : body + here]
            self._start = body + here
            self._large, self._large_view = Frame(frame_type, call, header, whole), view[here:]

    def _pass_on(self, frame: Frame) -> Frame | None:
        size = min(self._end - self._start, self._left_to_pass)
        if self._sink is not None:
            self._sink.write(self._view[self._start : self._start + size])
        self._start += size
        self._left_to_pass -= size
        if self._left_to_pass:
            return None
        sink, self._sink, self._passing = self._sink, None, None
        return frame if sink is None else frame._replace(payload=sink.getvalue())  # its own buffer, not a copy


def _room_for(size: int) -> bytearray:
    """So many bytes, of which the end lies at a multiple of END_ALIGNMENT: to cut off a bytearray's beginning moves
    nothing. A request ends with its tensor. Raises MemoryError."""
    lead = -size % END_ALIGNMENT
    room = bytearray(lead + size)
    del room[:lead]
    return room


def encode_head(frame_type: FrameType, call: int, header: bytes, size: int) -> bytes:
    """Head and header of a frame with a payload of `size` bytes. Raises ShoalError(TOO_LARGE)."""
    if len(header) > MAX_HEADER or size > MAX_PAYLOAD:
        raise refuse(
            Code.TOO_LARGE,
            f"a frame of {len(header)} + {size} bytes",
            f"at most {MAX_HEADER} + {MAX_PAYLOAD}",
            "send less at once",
        )
    return _HEAD.pack(_MAGIC, frame_type, len(header), size, call) + header


def encode_json(header: Header) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def decode_json(header: bytes) -> dict[str, Any]:
    """Raises FrameError."""
    try:
        found = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise FrameError(str(error)) from error
    if not isinstance(found, dict):
        raise FrameError("the header is no object")
    return found


def encode_infer(header: InferHeader) -> bytes:
    """Raises ShoalError(TOO_LARGE) for a text of more than 65,535 bytes."""
    sizes, texts = _encode_texts(header.assignment, header.origin, header.trace)
    return _INFER.pack(header.deadline, *sizes) + texts


@lru_cache(maxsize=256)
def _encode_texts(*texts: str) -> tuple[tuple[int, ...], bytes]:
    """Their sizes and bytes: nearly all requests of a replica have the same texts."""
    encoded = [text.encode() for text in texts]
    if max(map(len, encoded)) > _MAX_TEXT:
        sizes = " + ".join(str(len(text)) for text in encoded)
        raise refuse(Code.TOO_LARGE, f"texts of {sizes} bytes", f"at most {_MAX_TEXT} each", "shorten them")
    return tuple(map(len, encoded)), b"".join(encoded)


def decode_infer(header: bytes) -> InferHeader:
    """Raises FrameError."""
    try:
        deadline, names, origins, traces = _INFER.unpack_from(header)
        origin = _INFER.size + names
        trace = origin + origins
        if trace + traces != len(header):
            raise FrameError("a header of another size than it says")
        return InferHeader(
            header[_INFER.size : origin].decode(),
            header[origin:trace].decode(),
            header[trace:].decode(),
            deadline,
        )
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(str(error)) from error


def read_message(frame: Frame) -> FrameMessage:
    """A call, reply or push. Raises FrameError."""
    header = decode_json(frame.header)
    return FrameMessage(
        str(header.pop("kind", "")), header, bytes(frame.payload)
    )  # a copy only of what is no `bytes` already


def read_refusal(header: bytes) -> Refusal:
    """Raises FrameError."""
    found = decode_json(header)
    text = {name: str(found.get(name, "")) for name in ("code", "found", "asked", "remedy")}
    try:
        code = Code(text["code"])
    except ValueError:
        code = Code.INTERNAL
    return Refusal(code, text["found"], text["asked"], text["remedy"])

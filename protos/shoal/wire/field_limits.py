"""Counts the fields of a serialized message before it is parsed.

Two bytes on the wire become an object in memory: 4 MiB of empty submessages are two million objects, in protobuf and
again in every Python loop over them. `check_counts` reads only the tags. It skips strings, bytes and packed arrays in
one step each, and follows only submessages that the descriptor declares. It stops at the first limit that is exceeded,
so its cost is bounded by `CountLimits.fields`, not by the size of the message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from shoal.types.codes import Code, Refusal, ShoalError
from shoal.wire.varint import varint

MAX_DEPTH: Final = 32
"""Limit of nesting; protobuf's own limit is 100."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED: Final = {_FIXED64: 8, _FIXED32: 4}
_FIXED_TYPES: Final = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
}
_VARINT_BYTES: Final = 10
_UNPACKABLE: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
_NOT_LAST: Final = bytes(range(0x80, 0x100))
"""All byte values that do not end a varint."""
_PIECE: Final = 64 * 2**10
"""Bytes of a packed array that are examined in one step."""

_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True)
class CountLimits:
    """How much one message may hold, submessages included. A count at the limit passes."""

    # All occurrences of all fields, declared or not; a packed array counts as one. Bounds the cost of the scan.
    fields: int
    # Elements of one repeated field, or occurrences of one submessage field, counted over the whole message.
    repeated: int
    # Limits that replace `repeated`, by the field's full name: `inference.ModelInferRequest.inputs`.
    by_field: Mapping[str, int] = field(default_factory=dict, hash=False)
    # Limit of nested submessages.
    depth: int = MAX_DEPTH


@dataclass(frozen=True, slots=True, eq=False)
class _Rule:
    """How to count one tag."""

    # Full name of the field.
    name: str
    # Limit of its count.
    most: int
    # Descriptor to follow, for a submessage; None otherwise.
    kind: Descriptor | None
    # For a packed array, bytes of an element on the wire, 0 for varints; -1 for any other field.
    item: int


def check_counts(descriptor: Descriptor, data: bytes | memoryview, limits: CountLimits) -> Refusal | None:
    """Why a message of this type must not be parsed, or None.

    Returns Refusal(FIELD_TOO_MANY), or Refusal(MESSAGE_INVALID) for bytes that no parser accepts (groups included,
    which proto3 does not have). None does not mean that the message parses.
    """
    rules = _rules(descriptor, limits)
    counts: dict[str, int] = {}
    outer: list[tuple[int, dict[int, _Rule]]] = []
    left = limits.fields
    at, end = 0, len(data)
    try:
        while True:
            if at >= end:
                if at > end:
                    return _invalid(descriptor)
                if not outer:
                    return None
                end, rules = outer.pop()
                continue
            if left == 0:
                return _too_many(f"more than {limits.fields} fields in one {descriptor.name}", limits.fields)
            left -= 1
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = _varint(data, at - 1)
            wire = tag & 7
            size = 0
            if wire == _BYTES:
                size = data[at]
                at += 1
                if size > 0x7F:
                    size, at = _varint(data, at - 1)
            elif wire == _VARINT:
                most = at + _VARINT_BYTES
                while data[at] > 0x7F:
                    at += 1
                    if at == most:
                        return _invalid(descriptor)
                at += 1
            elif wire in _FIXED:
                at += _FIXED[wire]
            else:
                return _invalid(descriptor)
            if tag < 8 or at + size > end:
                return _invalid(descriptor)
            rule = rules.get(tag)
            if rule is not None:
                count = 1 if rule.item < 0 else _elements(data, at, size, rule.item)
                count += counts.get(rule.name, 0)
                if count > rule.most:
                    return _too_many(f"more than {rule.most} of {rule.name}", rule.most)
                counts[rule.name] = count
                if rule.kind is not None:
                    if len(outer) == limits.depth:
                        return _too_many(f"{descriptor.name} nested deeper than {limits.depth}", limits.depth)
                    outer.append((end, rules))
                    end, rules = at + size, _rules(rule.kind, limits)
                    continue
            at += size
    except (IndexError, ValueError):
        return _invalid(descriptor)


def parse(kind: type[_M], data: bytes, limits: CountLimits) -> _M:
    """The parsed message, after its fields were counted. Raises ShoalError(FIELD_TOO_MANY | MESSAGE_INVALID)."""
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    refusal = check_counts(descriptor, data, limits)
    if refusal is not None:
        raise ShoalError(refusal)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ShoalError(_invalid(descriptor)) from error


def fields_of(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (number, start of the tag, start of the value, end of the value) of each field between `at` and `end`. The
    bytes must have passed `check_counts`."""
    while at < end:
        start = at
        tag, at = _varint(data, at)
        size = _FIXED.get(tag & 7, 0)
        if tag & 7 == _BYTES:
            size, at = _varint(data, at)
        elif tag & 7 == _VARINT:
            while data[at + size] > 0x7F:
                size += 1
            size += 1
        yield tag >> 3, start, at, at + size
        at += size


def encode_field(number: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """A length-delimited field whose value is the concatenation of `parts`."""
    return b"".join((encode_head(number, sum(map(len, parts))), *parts))


def encode_head(number: int, size: int) -> bytes:
    """What comes before the `size` bytes of a length-delimited field."""
    return varint(number << 3 | _BYTES) + varint(size)


@lru_cache(maxsize=1024)
def _rules(descriptor: Descriptor, limits: CountLimits) -> dict[int, _Rule]:
    """By tag: rules of every repeated field and every submessage."""
    found: dict[int, _Rule] = {}
    for each in descriptor.fields:
        kind = each.message_type if each.type == FieldDescriptor.TYPE_MESSAGE else None
        if not each.is_repeated and kind is None:
            continue
        most = limits.by_field.get(each.full_name, limits.repeated)
        number = each.number << 3
        if each.type in _UNPACKABLE:
            found[number | _BYTES] = _Rule(each.full_name, most, kind, -1)
        else:
            wire = _FIXED_TYPES.get(each.type, _VARINT)
            found[number | wire] = _Rule(each.full_name, most, None, -1)
            found[number | _BYTES] = _Rule(each.full_name, most, None, _FIXED.get(wire, 0))
    return found


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """A tag or a length, and the offset after it. Raises ValueError beyond five bytes, IndexError at the end of the
    data."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte <= 0x7F:
            return value, at
    raise ValueError("a varint of more than five bytes")


def _elements(data: bytes | memoryview, at: int, size: int, item: int) -> int:
    """Number of elements of a packed array."""
    if item:
        return size // item
    ends = at + size
    return sum(
        len(bytes(data[piece : min(piece + _PIECE, ends)]).translate(None, _NOT_LAST))
        for piece in range(at, ends, _PIECE)
    )


def _too_many(found: str, most: int) -> Refusal:
    return Refusal(Code.FIELD_TOO_MANY, found, f"at most {most}", "send fewer, or several messages")


def _invalid(descriptor: Descriptor) -> Refusal:
    return Refusal(
        Code.MESSAGE_INVALID,
        f"bytes that are no {descriptor.name}",
        "a whole protobuf message",
        "send what its API says",
    )

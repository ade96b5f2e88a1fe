"""Checks a file by its bytes, before a parser allocates anything for it.

One pass over protobuf's wire format, guided by ONNX's own schema. The schema tells which fields are messages, so bytes
of a weight are never mistaken for structure. The pass counts what a parser would have to allocate.
"""

from functools import cache
from typing import Any, Final

from onnx import ModelProto, NodeProto

from shoal.coordinator.core.graph.rules import Rules
from shoal.types.codes import Code, Refusal

_MAGIC: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"PK\x05\x06", "an empty zip archive"),
    (0, b"PK\x07\x08", "a split zip archive"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ\x00", "xz"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (0, b"Rar!\x1a\x07", "a rar archive"),
    (0, b"\x28\xb5\x2f\xfd", "zstandard"),
    (0, b"\x04\x22\x4d\x18", "lz4"),
    (257, b"ustar", "a tar archive"),
)

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MESSAGE_TYPE: Final = 11
"""FieldDescriptor.TYPE_MESSAGE of protobuf."""

Table = dict[int, Any]
"""Field number -> the table of the message that the field holds."""


def scan(content: bytes, rules: Rules) -> Refusal | None:
    """Refuses archives, files that are not protobuf, and protobuf that is too deep or has too many fields or nodes.

    Time is proportional to the number of fields, at most `rules.max_fields`; memory is proportional to the depth.
    """
    if len(content) > rules.max_size_bytes:
        return Refusal(
            Code.MODEL_TOO_LARGE,
            f"{len(content)} bytes",
            f"at most {rules.max_size_bytes} in one file",
            "a model in one protobuf file ends below 2 GiB: quantise it",
        )
    for at, magic, name in _MAGIC:
        if content[at : at + len(magic)] == magic:
            return Refusal(
                Code.MODEL_ARCHIVE, name, "an ONNX file", "archives are not accepted: unpack it and push the .onnx file"
            )
    if content[4:8] == b"ORTM":
        return _invalid("ONNX Runtime's own format (.ort)", "ONNX", "push the .onnx file that it was made from")
    if not content:
        return _invalid("an empty file", "an ONNX model", "push the .onnx file")
    return _fields(content, rules)


def _fields(content: bytes, rules: Rules) -> Refusal | None:
    """Walks the wire format with a stack of (end of message, its table). Fields that are not messages are skipped
    unread."""
    tables = _tables()
    node = tables[NodeProto.DESCRIPTOR.full_name]
    stack: list[tuple[int, Table]] = [(len(content), tables[ModelProto.DESCRIPTOR.full_name])]
    at = fields = nodes = 0
    while stack:
        end, table = stack[-1]
        if at == end:
            stack.pop()
            continue
        fields += 1
        if fields > rules.max_fields:
            return _invalid("too many protobuf fields", f"at most {rules.max_fields}", "export a plainer model")
        tag, at = _varint(content, at, end)
        kind = tag & 7
        if at > 0 and not tag >> 3:
            return _not_protobuf("a field without a number")
        if kind == _BYTES:
            length, at = _varint(content, at, end)
            if at < 0 or at + length > end:
                return _not_protobuf("a field claims more bytes than there are")
            inner = table.get(tag >> 3)
            if inner is None:
                at += length
                continue
            if inner is node:
                nodes += 1
                if nodes > rules.max_nodes:
                    return _invalid("too many nodes", f"at most {rules.max_nodes}", "export a plainer model")
            if len(stack) >= rules.max_depth:
                return _invalid(
                    "messages nested too deep", f"at most {rules.max_depth} levels", "export a model that nests less"
                )
            stack.append((at + length, inner))
            continue
        if kind == _VARINT:
            _, at = _varint(content, at, end)
        elif kind == _FIXED32:
            at += 4
        elif kind == _FIXED64:
            at += 8
        else:
            return _not_protobuf(f"wire type {kind}")
        if at < 0 or at > end:
            return _not_protobuf("a field is cut short")
    return None


def _varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """(value, position after it). The position is -1 where the number is cut short or longer than ten bytes."""
    if 0 <= at < end and (first := content[at]) < 0x80:
        return first, at + 1
    value = shift = 0
    while 0 <= at < end and shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1


@cache
def _tables() -> dict[str, Table]:
    """Tables by full name, for every message that a model can hold."""
    return _fill(ModelProto.DESCRIPTOR, {})


def _fill(descriptor: Any, tables: dict[str, Table]) -> dict[str, Table]:
    """Registers a table before it is filled, because messages contain each other."""
    if descriptor.full_name not in tables:
        mine = tables[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.type == _MESSAGE_TYPE:
                mine[field.number] = _fill(field.message_type, tables)[field.message_type.full_name]
    return tables


def _not_protobuf(found: str) -> Refusal:
    return _invalid(f"not protobuf: {found}", "an ONNX model in protobuf", "push the .onnx file, whole")


def _invalid(found: str, asked: str, remedy: str) -> Refusal:
    return Refusal(Code.MODEL_INVALID, found, asked, remedy)

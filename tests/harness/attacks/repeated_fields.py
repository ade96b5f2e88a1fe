"""Serialized messages with very many elements of one field, for every repeated field and submessage at any depth."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor

_WIRE: Final = {
    FieldDescriptor.TYPE_DOUBLE: 1,
    FieldDescriptor.TYPE_FIXED64: 1,
    FieldDescriptor.TYPE_SFIXED64: 1,
    FieldDescriptor.TYPE_FLOAT: 5,
    FieldDescriptor.TYPE_FIXED32: 5,
    FieldDescriptor.TYPE_SFIXED32: 5,
}
_VALUE: Final = {0: b"\0", 1: bytes(8), 5: bytes(4)}
_BY_LENGTH: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


@dataclass(frozen=True, slots=True)
class RepeatedField:
    """One repeated field, and how its elements are encoded."""

    # Field names from the message down, separated by dots, then `packed` or `unpacked` for scalars.
    path: str
    # Numbers of the enclosing submessage fields, outermost first.
    outer: tuple[int, ...]
    # The field's own number.
    number: int
    # Wire type of one element: 0 varint, 1 fixed64, 2 length-delimited, 5 fixed32.
    wire: int
    # True: the elements are sent as one array.
    is_packed: bool

    def message(self, size: int, *, spread: bool = False) -> bytes:
        """About `size` bytes. spread: put each element into its own submessage, not all into one."""
        value = b"\0" if self.wire == 2 else _VALUE[self.wire]
        if self.is_packed:
            content = value * (size // len(value))
            return self._within(_field(self.number, content))
        element = _varint(self.number << 3 | self.wire) + value
        if spread and self.outer:
            each = self._within(element)
            return each * (size // len(each))
        return self._within(element * (size // len(element)))

    def _within(self, content: bytes) -> bytes:
        for number in reversed(self.outer):
            content = _field(number, content)
        return content


def repeated_fields(descriptor: Descriptor) -> Iterator[RepeatedField]:
    """Every repeated field of a message of this type; a recursive type is followed once."""
    yield from _walk(descriptor, (), (), frozenset())


def methods(service: ServiceDescriptor) -> Iterator[tuple[str, Descriptor]]:
    """(`/package.Service/Method`, the type of its request) of every method."""
    for method in service.methods:
        yield f"/{service.full_name}/{method.name}", method.input_type


def _walk(
    descriptor: Descriptor, names: tuple[str, ...], outer: tuple[int, ...], inside: frozenset[str]
) -> Iterator[RepeatedField]:
    for each in descriptor.fields:
        path = ".".join((*names, each.name))
        message = each.message_type if each.type == FieldDescriptor.TYPE_MESSAGE else None
        if each.is_repeated or message is not None:
            if each.type in _BY_LENGTH:
                yield RepeatedField(path, outer, each.number, 2, is_packed=False)
            else:
                wire = _WIRE.get(each.type, 0)
                yield RepeatedField(f"{path} packed", outer, each.number, wire, is_packed=True)
                yield RepeatedField(f"{path} unpacked", outer, each.number, wire, is_packed=False)
        if message is not None and message.full_name not in inside:
            inner = inside | {message.full_name}
            yield from _walk(message, (*names, each.name), (*outer, each.number), inner)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    said = bytearray()
    while value > 0x7F:
        said.append(value & 0x7F | 0x80)
        value >>= 7
    said.append(value)
    return bytes(said)

"""Builds messages of any type from their descriptors: with every field filled, and with bytes corrupted."""

from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

TEXT = 48
"""Most characters or bytes in a field."""
DEPTH = 3
"""Most levels of nested messages."""


def fill_message(kind: Descriptor, rng: np.random.Generator, depth: int = 0) -> Message:
    """A message with something in every field."""
    made = GetMessageClass(kind)()
    for each in kind.fields:
        if each.message_type is not None and (depth > DEPTH or each.message_type.GetOptions().map_entry):
            continue
        if each.message_type is not None:
            inner = fill_message(each.message_type, rng, depth + 1)
            target = getattr(made, each.name)
            target.add().CopyFrom(inner) if each.is_repeated else target.CopyFrom(inner)
        elif each.is_repeated:
            getattr(made, each.name).append(random_value(each, rng))
        else:
            setattr(made, each.name, random_value(each, rng))
    return made


def random_value(field: FieldDescriptor, rng: np.random.Generator) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.bytes(int(rng.integers(TEXT)))
        case FieldDescriptor.CPPTYPE_STRING:
            return "".join(chr(each) for each in rng.integers(1, 0x2FF, int(rng.integers(TEXT))))
        case FieldDescriptor.CPPTYPE_BOOL:
            return bool(rng.integers(2))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return float(rng.choice([0.0, -1.0, 1e308, np.inf, np.nan, rng.normal()]))
        case FieldDescriptor.CPPTYPE_UINT32 | FieldDescriptor.CPPTYPE_UINT64:
            return int(rng.integers(2**31))
        case _:
            return int(rng.choice([0, -1, 2**31 - 1, -(2**31), int(rng.integers(1000))]))


def corrupt_message(message: bytes, rng: np.random.Generator) -> bytes:
    """Change one to three bytes, and truncate every third message."""
    changed = bytearray(message or b"\xff")
    for _ in range(int(rng.integers(4))):
        changed[int(rng.integers(len(changed)))] = int(rng.integers(256))
    return bytes(changed[: int(rng.integers(len(changed) + 1))] if rng.integers(3) == 0 else changed)

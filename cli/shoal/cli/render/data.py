"""Messages as data for programs: numbers are numbers, times are RFC 3339 in UTC, unknown values are null."""

import math
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shoal.cli.render.times import rfc3339

TIMES: Final = frozenset({"at", "since", "last_seen"})
"""Fields in seconds since 1970, in addition to all that end in `_at`; 0 means never."""


def as_data(message: Message) -> dict[str, Any]:
    """Every field by its name in the proto, even if it is empty."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_map(field):
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _value(value[key], inner, "") for key in sorted(value)}
    if field.is_repeated:
        return [_value(item, field, "") for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field, field.name)


def _value(value: Any, field: Any, name: str) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return as_data(value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return value.hex()
    if isinstance(value, float):
        if name in TIMES or name.endswith("_at"):
            return rfc3339(value)
        return value if math.isfinite(value) else None
    return value


def _is_map(field: Any) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def document_yaml(text: str) -> str:
    """A stored document as people write it, and as `apply` takes it."""
    import yaml  # seldom used, and slow to import

    return str(yaml.safe_dump(yaml.safe_load(text), sort_keys=False, allow_unicode=True))

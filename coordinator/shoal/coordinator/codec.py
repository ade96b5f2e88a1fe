"""Stored values: frozen dataclasses as JSON, validated when read. NaN stays NaN (an unmeasured rate is never 0)."""

import json
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from shoal.types.codes import Code, ShoalError, refuse

T = TypeVar("T")


def dump(value: object) -> bytes:
    return _encode(_adapter(type(value)).dump_python(value, mode="json")).encode()


_encode: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def load(kind: type[T], data: bytes) -> T:
    """Raises ShoalError(STATE_CORRUPT) when the bytes are not a stored `kind` of this version."""
    try:
        value: T = _adapter(kind).validate_python(json.loads(data))
    except (ValueError, ValidationError) as cause:
        raise unreadable(f"a stored {kind.__name__}") from cause
    return value


def unreadable(what: str, why: str = "") -> ShoalError:
    """A STATE_CORRUPT error. why: what exactly could not be read, for people."""
    return refuse(
        Code.STATE_CORRUPT,
        f"{what} that this version cannot read" + (f": {why}" if why else ""),
        "a value written by this version or an older one",
        "run the version that wrote it, or restore a copy of the store",
    )


_ADAPTERS: Final[dict[Any, TypeAdapter[Any]]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Cached for each class, because building an adapter takes milliseconds."""
    adapter = _ADAPTERS.get(kind)
    if adapter is None:
        adapter = _ADAPTERS[kind] = TypeAdapter(kind)
    return adapter

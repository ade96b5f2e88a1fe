"""Frozen dataclasses as JSON, between processes of one agent: the supervisor's with its workers and its drivers."""

import base64
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shoal.types.codes import Code, ShoalError, refuse

T = TypeVar("T")


def pack(noun: Any) -> bytes:
    """A frozen dataclass as one line of JSON. NaN stays NaN, because both ends use Python's json; bytes are base64."""
    return json.dumps(asdict(noun), separators=(",", ":"), default=_encode_other).encode()


def _encode_other(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return base64.b64encode(value).decode()


def unpack(kind: type[T], payload: bytes) -> T:
    """Inverse of `pack`, with checks. A field that an older program does not send gets its default.

    Raises ShoalError(MESSAGE_INVALID).
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _invalid(kind, error) from error
    return from_json(kind, value)


def from_json(kind: type[T], value: Any) -> T:
    """A frozen dataclass from JSON values, with checks. Raises ShoalError(MESSAGE_INVALID)."""
    try:
        return typing.cast(T, _read(kind, value))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _invalid(kind, error) from error


def _invalid(kind: type[Any], error: Exception) -> ShoalError:
    found = f"{type(error).__name__}: {error}"
    return refuse(Code.MESSAGE_INVALID, found, f"a {kind.__name__}", "run one version of the agent")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Cached, because resolving the hints took two thirds of the time to read an idle worker's report, every second."""
    return typing.get_type_hints(kind)


def _read(kind: Any, value: Any) -> Any:
    while isinstance(kind, typing.NewType):
        kind = kind.__supertype__
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _read(next(part for part in parts if part is not types.NoneType), value)
    if origin is tuple:
        if parts[-1] is not Ellipsis:
            return tuple(_read(part, item) for part, item in zip(parts, value, strict=True))
        return tuple(_read(parts[0], item) for item in value)
    if origin is Mapping:
        return {_read(parts[0], key): _read(parts[1], item) for key, item in value.items()}
    if is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        if not isinstance(value, dict):
            raise TypeError(f"{value!r:.40} is no {kind}")
        said = (field for field in fields(kind) if field.name in value or field.default is MISSING)
        values = {field.name: _read(hints[field.name], value[field.name]) for field in said}
        return typing.cast(Any, kind)(**values)
    if kind is bytes:
        return base64.b64decode(value, validate=True)
    if kind is Path:
        return Path(value)
    if issubclass(kind, Enum):
        return kind(value)
    if issubclass(kind, tuple):
        hints = _hints(kind)
        return kind(*(_read(hint, item) for hint, item in zip(hints.values(), value, strict=True)))
    if not isinstance(value, (int, float) if kind is float else kind):
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("a number that no message to the region can hold")
    if isinstance(value, str):
        value.encode()  # half a surrogate pair is not text
    return value

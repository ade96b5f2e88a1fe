"""Stored values: frozen dataclasses as JSON, read back checked. NaN stays NaN (an unmeasured rate is never 0)."""

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shoal.types.codes import Code, refuse

T = TypeVar("T")


def dump(value: object) -> bytes:
    return json.dumps(
        _adapter(type(value)).dump_python(value, mode="json"), sort_keys=True, separators=(",", ":")
    ).encode()


def load(kind: type[T], data: bytes) -> T:
    """Raises ShoalError(STATE_CORRUPT) when the bytes are not a stored `kind` of this version."""
    try:
        value: T = _adapter(kind).validate_python(json.loads(data))
    except (ValueError, ValidationError) as cause:
        raise refuse(
            Code.STATE_CORRUPT,
            f"a stored {kind.__name__} that this version cannot read",
            "a value written by this version or an older one",
            "run the version that wrote it, or restore a copy of the store",
        ) from cause
    return value


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

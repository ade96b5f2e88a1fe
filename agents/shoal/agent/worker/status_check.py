"""What a worker tells of itself, with checks: a model may have taken it over, and its node must go on.

What the region's reader would refuse in a node's status is refused here, with the worker that tells it.
"""

import math
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar

from shoal.agent.packing import unpack
from shoal.agent.worker.messages import WorkerReport, WorkerStatus
from shoal.types.codes import Code, refuse

T = TypeVar("T")

_MOST_ITEMS: Final = 1_024
"""Of a list: of inputs and outputs as many as a model may have, of origins and buckets more than there are."""
_MOST_TEXT: Final = 4_096
_MOST_TEXTS: Final = 256 * 1024
"""Characters of all texts of a worker: what names a thousand inputs and outputs, and says why a load failed."""
_MOST_NUMBER: Final = 2.0**53
"""Sums of these are numbers, too, and whole ones exact."""


def read_status(payload: bytes) -> WorkerStatus:
    """Raises ShoalError(MESSAGE_INVALID)."""
    return _read(WorkerStatus, payload)


def read_report(payload: bytes) -> WorkerReport:
    """Raises ShoalError(MESSAGE_INVALID)."""
    return _read(WorkerReport, payload)


def _read(kind: type[T], payload: bytes) -> T:
    found = unpack(kind, payload)
    if (characters := _characters(kind.__name__, found)) > _MOST_TEXTS:
        raise refuse(Code.MESSAGE_INVALID, f"{characters} characters of a worker", f"at most {_MOST_TEXTS}")
    return found


def _characters(where: str, value: Any) -> int:
    """Of all texts in it. Raises ShoalError(MESSAGE_INVALID) for what no worker says."""
    if is_dataclass(value):
        return sum(_characters(f"{where}.{field.name}", getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        if len(value) > _MOST_ITEMS:
            raise refuse(Code.MESSAGE_INVALID, f"{where} of {len(value)} items", f"at most {_MOST_ITEMS}")
        return sum(_characters(where, each) for each in value)
    if isinstance(value, str):
        if len(value) > _MOST_TEXT or "\0" in value:
            raise refuse(Code.MESSAGE_INVALID, f"{where} of {len(value)} characters", "a shorter text without NUL")
        return len(value)
    if isinstance(value, int | float) and not (math.isnan(value) or -1 <= value <= _MOST_NUMBER):
        raise refuse(Code.MESSAGE_INVALID, f"{where} {value!r:.40}", "a number from -1 to 2^53, or none")
    return 0

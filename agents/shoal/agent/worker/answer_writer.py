"""Answers as ModelInferResponse's bytes, in parts: the arrays are parts themselves, neither copied nor joined."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from shoal.agent.worker.request_reader import RequestNames
from shoal.agent.worker.tensors import Array, datatype_of, to_raw
from shoal.types.workload import SERVED_VERSION
from shoal.wire.varint import varint

_MODEL, _VERSION, _ID, _OUTPUT, _RAW = (bytes([number << 3 | 2]) for number in (1, 2, 3, 5, 6))
"""Tags of ModelInferResponse's fields."""
_NAME, _DATATYPE, _SHAPE = (bytes([number << 3 | 2]) for number in (1, 2, 3))
"""Tags of InferOutputTensor's fields."""
_SMALL_BYTES: Final = 4096
"""An array up to this size is copied into its neighbours' part: a part of its own costs more."""
_MAX_KNOWN: Final = 256
_SERVED: Final = SERVED_VERSION.encode()


class AnswerWriter:
    """Writes answers of one model. Callable from any thread."""

    def __init__(self) -> None:
        # Heads of output tensors: a model's outputs come in few shapes.
        self._known: dict[tuple[str, np.dtype[Any], tuple[int, ...]], bytes] = {}

    def write(self, names: RequestNames, outputs: Mapping[str, Array]) -> list[bytes | memoryview]:
        """The answer with raw contents, in the order of `outputs`. The arrays must not change any more."""
        parts: list[bytes | memoryview] = []
        small = [_field(_MODEL, names.model), _field(_VERSION, names.version or _SERVED), _field(_ID, names.id)]
        small += [self._head(name, array) for name, array in outputs.items()]
        for array in outputs.values():
            if array.dtype == np.object_ or array.nbytes <= _SMALL_BYTES:
                small.append(_raw_field(to_raw(array)))
                continue
            small.append(_RAW + varint(array.nbytes))
            parts += (b"".join(small), _bytes_of(array))
            small = []
        return [*parts, b"".join(small)]

    def _head(self, name: str, array: Array) -> bytes:
        key = (name, array.dtype, array.shape)
        head = self._known.get(key)
        if head is None:
            head = _head_of(name, array)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = head
        return head


def _head_of(name: str, array: Array) -> bytes:
    shape = b"".join(map(varint, array.shape))
    named = _field(_NAME, name.encode()) + _field(_DATATYPE, datatype_of(array).encode()) + _field(_SHAPE, shape)
    return _OUTPUT + varint(len(named)) + named


def _bytes_of(array: Array) -> memoryview:
    """The array's memory, row-major; a copy only if it lies otherwise."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _field(tag: bytes, value: bytes) -> bytes:
    """A field that is left out if it is empty, as proto3 has it."""
    return tag + varint(len(value)) + value if value else b""


def _raw_field(value: bytes) -> bytes:
    """An element of a repeated field, which may be empty."""
    return _RAW + varint(len(value)) + value

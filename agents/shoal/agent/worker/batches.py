"""Several requests as one batch, and its answers as theirs: arrays joined and split along the first axis."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from shoal.agent.worker.engine import reference_shapes
from shoal.agent.worker.padding import PaddedAxis
from shoal.agent.worker.request_reader import InferRequest
from shoal.agent.worker.tensors import DATATYPES, Array
from shoal.types.assignment import Work
from shoal.types.profile import TensorSpec

NO_ROWS: Final = 0


def has_batch_axis(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether the first axis of every input and output is open, and no input holds what must be read item by item:
    strings and booleans."""
    is_open = all(spec.shape and spec.shape[0] < 0 for spec in (*inputs, *outputs))
    return bool(inputs) and is_open and all(spec.dtype not in ("BYTES", "BOOL") for spec in inputs)


def rows_of(feeds: Mapping[str, Array]) -> int:
    """The length of the first axis, which all arrays have; NO_ROWS if they have not, or it is empty."""
    lengths = {array.shape[0] if array.shape else NO_ROWS for array in feeds.values()}
    return lengths.pop() if len(lengths) == 1 else NO_ROWS


def row_bytes(inputs: Sequence[TensorSpec], work: Work) -> int:
    """Bytes of one row at the reference shapes."""
    return sum(
        int(np.prod(shape[1:], dtype=np.int64)) * DATATYPES[spec.dtype].dtype.itemsize
        for spec, shape in reference_shapes(inputs, work.shapes)
    )


def group_of(request: InferRequest, axis: PaddedAxis | None = None) -> Hashable:
    """Requests of one group can be joined: their inputs differ in nothing but the first axis, and the length of `axis`;
    the same outputs are asked for in the same order."""
    shapes = {name: array.shape for name, array in request.feeds.items()}
    if axis is not None:
        shapes = {name: axis.open_shape(name, shape) for name, shape in shapes.items()}
    return tuple(request.outputs), tuple(sorted((name, shape[1:]) for name, shape in shapes.items()))


class Batch:
    """Several requests of one group, in their order, as one run."""

    def __init__(
        self, parts: Sequence[Mapping[str, Array]], rows: Sequence[int], axis: PaddedAxis | None = None
    ) -> None:
        """`parts`: their inputs, with so many rows each. `axis`: along which they may differ in length."""
        self.rows = rows
        self._parts = parts
        self._axis = axis
        # Their lengths. Empty without an axis.
        self._lengths = [axis.length(part) or 0 for part in parts] if axis is not None else []

    def join(self) -> dict[str, Array]:
        """Their inputs as those of one request."""
        columns = {name: [part[name] for part in self._parts] for name in self._parts[0]}
        if self._axis is None:
            return {name: np.concatenate(arrays) for name, arrays in columns.items()}
        longest = max(self._lengths)
        return {name: self._axis.join(name, arrays, longest) for name, arrays in columns.items()}

    def split(self, outputs: Mapping[str, Array]) -> list[dict[str, Array]] | None:
        """The outputs of the run as those of its requests. None: an output has another number of rows, or another
        length than the inputs. They are copies: an answer that is read slowly must not hold the memory of all."""
        total, axis = sum(self.rows), self._axis
        if any(not array.shape or array.shape[0] != total for array in outputs.values()):
            return None
        if axis is not None and not axis.has_length(outputs, max(self._lengths)):
            return None
        bounds = list(pairwise(accumulate(self.rows, initial=0)))
        parts = [{name: array[start:end] for name, array in outputs.items()} for start, end in bounds]
        if axis is not None:
            parts = [
                {name: axis.cut(name, array, length) for name, array in part.items()}
                for part, length in zip(parts, self._lengths, strict=True)
            ]
        return [{name: array.copy() for name, array in part.items()} for part in parts]

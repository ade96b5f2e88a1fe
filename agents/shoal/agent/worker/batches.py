"""Several requests as one batch, and its answers as theirs: arrays joined and split along the first axis."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np

from shoal.agent.worker.engine import reference_shapes
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


def group_of(request: InferRequest) -> Hashable:
    """Requests of one group can be joined: their inputs differ in nothing but the first axis, and the same outputs are
    asked for in the same order."""
    return tuple(request.outputs), tuple(sorted((name, array.shape[1:]) for name, array in request.feeds.items()))


def join(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The inputs of several requests of one group, in their order."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def split(outputs: Mapping[str, Array], rows: Sequence[int]) -> list[dict[str, Array]] | None:
    """The outputs of a batch as those of its requests, which had so many rows each. None: an output has another number
    of rows. They are copies: an answer that is read slowly must not hold the memory of all."""
    total = sum(rows)
    if any(not array.shape or array.shape[0] != total for array in outputs.values()):
        return None
    ends = list(accumulate(rows, initial=0))
    return [{name: array[start:end].copy() for name, array in outputs.items()} for start, end in pairwise(ends)]

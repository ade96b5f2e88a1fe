"""What an ONNX graph asks of a device: read from the graph, independent of any device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.types.units import Bytes

ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 40,
}
"""Bytes of one element once it is a tensor; of BYTES what an empty string costs as an object."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. dtype: the protocol's name (FP32, INT64, BYTES, ..). shape: -1 where it is dynamic."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """All nodes of one operator type, at the profile's reference shapes: FLOPs, bytes read and written."""

    operator: str
    nodes: int
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model by digest.

    costs: at batch 1 with dynamic axes at `reference_shapes` (input name -> shape used). flops of a multiply-add count
    as 2. activation_bytes: peak of live intermediate tensors in topological order, batch 1. precision: of most
    weight bytes. domains: operator domains in use with their opset. `confident` is False when a shape could not be
    inferred and a cost is a lower bound. below: of integer inputs that the graph takes as indices, as far as that can
    be told: what every value must be below.
    """

    digest: str
    size_bytes: Bytes
    ir_version: int
    opset: int
    domains: Mapping[str, int]
    producer: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    reference_shapes: Mapping[str, tuple[int, ...]]
    costs: tuple[OperatorCost, ...]
    weight_bytes: Bytes
    activation_bytes: Bytes
    confident: bool
    metadata: Mapping[str, str]
    below: Mapping[str, int] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)

    @property
    def bytes_moved(self) -> float:
        return sum(cost.bytes for cost in self.costs)

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(cost.operator for cost in self.costs)

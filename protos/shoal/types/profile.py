"""What an ONNX graph requires of a device: read from the graph, independent of any device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
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
"""Bytes of one element in a tensor. For BYTES: the cost of an empty string as an object."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    # The protocol's name (FP32, INT64, BYTES, ..).
    dtype: str
    # -1 for a dynamic axis.
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Sum over all nodes of one operator type, at the profile's reference shapes."""

    operator: str
    nodes: int
    # A multiply-add counts as 2.
    flops: float
    # Bytes read and written.
    bytes: float


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Sum over the kernels of one kind that are about equally intense, after the runtime's usual fusions, at the
    profile's reference shapes."""

    # One of `KERNEL_KINDS`; another one is of a newer version and counts as `elementwise`.
    kind: str
    # How often one is started; in the body of a loop, times its trips.
    launches: float
    # A multiply-add counts as 2.
    flops: float
    # Bytes read and written that grow with the inputs.
    bytes: float
    # Bytes of constants that they read.
    weight_bytes: float
    # FLOPs of zeros, beside `flops`, where the runtime keeps channels in blocks of each of `CHANNEL_BLOCKS` and fills
    # up the last one: its own provider does, on x86-64 and in fp32. Empty: none, and in a profile of an older version.
    padding_flops: tuple[float, ...] = ()


KERNEL_KINDS: Final = (
    "matmul", "vector", "attention", "recurrent", "conv", "pointwise", "grouped", "depthwise", "elementwise",
    "transcendental", "reduction", "pool", "gather", "copy",
)  # fmt: skip
"""matmul: products with constant weights; vector: the same of so few rows that reading the weights takes longest;
attention: products of what was computed; pointwise: a convolution with a kernel of 1; grouped and depthwise: in groups
of several channels, and of one; transcendental: exponentials and the like; reduction: softmax, norms, sums."""


CHANNEL_BLOCKS: Final[tuple[int, int]] = (8, 16)
"""Channels that ONNX Runtime keeps beside each other on x86-64 processors: 16 with AVX-512, else 8
(core/mlas/lib/platform.cpp)."""
RUN_BATCHES: Final = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Requests that run as one, of which a profile knows the memory."""
PROFILE_VERSION: Final = 4
"""Rises where a profile tells more of a model than before, or counts it otherwise: those of an older one are computed
again after a coordinator's start, and as a model is pushed again. Since 2 `run_bytes` are of two runs,
since 3 `inner_packed_bytes` and `folded_bytes` are known, since 4 `KernelCost.padding_flops`, and
`run_bytes` are of two orders of copies."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ModelProfile:
    """What the graph of one model says, by the model's digest."""

    # `sha256:<hex>` of the model.
    digest: str
    # Size of the model's artifact.
    size_bytes: Bytes
    # ONNX IR version.
    ir_version: int
    # Opset of ONNX's own domain.
    opset: int
    # Operator domains in use, each with its opset.
    domains: Mapping[str, int]
    # Program that wrote the model, as the model states it.
    producer: str
    # Precision of most weight bytes.
    precision: str
    # Inputs of the graph.
    inputs: tuple[TensorSpec, ...]
    # Outputs of the graph.
    outputs: tuple[TensorSpec, ...]
    # By input name: the shape used for dynamic axes; costs are at these shapes and batch 1.
    reference_shapes: Mapping[str, tuple[int, ...]]
    # Cost by operator type.
    costs: tuple[OperatorCost, ...]
    # Size of all weights.
    weight_bytes: Bytes
    # Peak of live intermediate tensors in topological order, at batch 1.
    activation_bytes: Bytes
    # False when a shape could not be inferred, so that a cost is a lower bound.
    confident: bool
    # The model's own metadata properties.
    metadata: Mapping[str, str]
    # By name of an integer input that the graph takes as indices: exclusive upper bound of its values, as far as it can
    # be inferred.
    below: Mapping[str, int] = field(default_factory=dict)
    # By operator of ONNX's own domains, named as in costs: version of the definition in force. Operators that ONNX
    # defines by other operators are left out, because a runtime computes them without a kernel of their own.
    definitions: Mapping[str, int] = field(default_factory=dict)
    # By name of an input that an operator takes as a shape, axes, sizes, scales or a constant to compare with: legal
    # elements at the reference shapes, row-major, for generated inputs.
    operands: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # What a runtime computes of it. Empty: a profile of an older version, of which only `costs` are known.
    kernels: tuple[KernelCost, ...] = ()
    # Size of the largest weight; 0 in a profile of an older version.
    largest_weight_bytes: Bytes = Bytes(0)
    # What one run takes at the reference shapes and batch 1: its inputs, and the blocks of its tensors in the runtime's
    # arena. 0 in a profile of an older version, of which `activation_bytes` stands for it.
    run_bytes: Bytes = Bytes(0)
    # What a load copies of constants beside the usual: those in Constant nodes once, and those of graphs inside nodes
    # twice for each level. 0 in a profile of an older version.
    copied_bytes: Bytes = Bytes(0)
    # What each further request of a batch of up to 32 takes at most beside `run_bytes`; 0 in a profile of an older
    # version: as much again.
    run_growth_bytes: Bytes = Bytes(0)
    # Size of the largest weight of a convolution; 0 without any, and in a profile of an older version.
    largest_convolution_bytes: Bytes = Bytes(0)
    # Tensors that the runtime copies between two layouts, where it keeps those of convolutions in blocks of channels:
    # its own provider does, on x86-64 and in fp32. No kernels of the model's own, which an older version would count
    # on every device. 0 in a profile of an older version.
    layout_copies: int = 0
    # What they read and write.
    layout_bytes: Bytes = Bytes(0)
    # `PROFILE_VERSION` of what computed it; 0 in a profile of an older version.
    version: int = 0
    # What one run of each of `RUN_BATCHES` takes; empty in a profile of an older version, of which `run_growth_bytes`
    # tells.
    batch_run_bytes: tuple[Bytes, ...] = ()
    # Weights of the main graph that one graph inside its nodes multiplies by, of the one that has most of them: the
    # runtime makes an ordered copy of all before it frees the first. 0 without any, and of an older profile.
    inner_packed_bytes: Bytes = Bytes(0)
    # Weights that the runtime computes from others as it loads the model, such as a transposed one, and of each graph
    # inside a node for itself: the others are there meanwhile. 0 without any, and of an older profile.
    folded_bytes: Bytes = Bytes(0)

    def memory_of_run(self, batch: float = 1) -> float:
        """What one run of so many requests takes: by `run_bytes`, or what stands for it. A batch below 1 is a request
        that is smaller than the reference shapes. Between two batches that are known a further request takes what it
        does in the one where it takes more."""
        one = self.run_bytes or self.activation_bytes
        growth = self.run_growth_bytes or one
        if batch < 1:
            return one * batch
        known = [(1, one), *zip(RUN_BATCHES, self.batch_run_bytes, strict=False)]
        for (below, least), (above, most) in pairwise(known):
            if batch <= above:
                grown = max((least - one) / (below - 1) if below > 1 else 0.0, (most - one) / (above - 1))
                return min(one + grown * (batch - 1), max(least, most))
        last, most = known[-1]
        return most + growth * (batch - last)

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)

    @property
    def bytes_moved(self) -> float:
        return sum(cost.bytes for cost in self.costs)

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(cost.operator for cost in self.costs)

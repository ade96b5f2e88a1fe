"""What a model demands of a device, by operator class: the rows of the roofline model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from shoal.coordinator.core.prediction.of_profiles import OfProfiles
from shoal.types.assignment import Work
from shoal.types.device import Device
from shoal.types.profile import CHANNEL_BLOCKS, RUN_BATCHES, KernelCost, ModelProfile, OperatorCost
from shoal.types.units import Bytes

_Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Shapes by input, as a key of what is remembered."""


class OperatorClass(StrEnum):
    """The measured rate that limits an operator."""

    MATMUL = "matmul"
    CONV = "conv"
    COPY = "copy"
    ELEMENTWISE = "elementwise"
    # Only of profiles that know their kernels (`profile.KERNEL_KINDS`).
    VECTOR = "vector"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    POINTWISE = "pointwise"
    GROUPED = "grouped"
    DEPTHWISE = "depthwise"
    TRANSCENDENTAL = "transcendental"
    REDUCTION = "reduction"
    POOL = "pool"
    GATHER = "gather"


_BY_NAME: Final = {kind.value: kind for kind in OperatorClass}
MATMUL = frozenset(
    {
        "Attention",
        "DynamicQuantizeMatMul",
        "Einsum",
        "FusedGemm",
        "FusedMatMul",
        "GRU",
        "Gemm",
        "GroupQueryAttention",
        "LSTM",
        "MatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "MultiHeadAttention",
        "QAttention",
        "QGemm",
        "QLinearMatMul",
        "RNN",
    }
)
CONV = frozenset({"Conv", "ConvInteger", "ConvTranspose", "DeformConv", "FusedConv", "NhwcConv", "QLinearConv"})
COPY = frozenset(
    {
        "Cast",
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Pad",
        "Reshape",
        "ReverseSequence",
        "ScatterElements",
        "ScatterND",
        "Shape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)


PROCESSOR: Final = "CPUExecutionProvider"
"""The runtime's own provider for processors, as ONNX Runtime names it: it brings no library and compiles nothing."""
_X86_64: Final = frozenset({"x86_64", "x86-64", "amd64"})
"""As `platform.machine` says it on Linux, macOS and Windows, in lower case."""
_PREPARED_SHARES: Final = {"int8": (8 / 32, 16 / 32), "fp16": (16 / 32, 16 / 32)}
"""By the precision that a node makes of a model in fp32: (its weights, its activations at most) in shares of the bytes
that they were."""
CONVOLUTIONS: Final = (OperatorClass.CONV, OperatorClass.POINTWISE, OperatorClass.GROUPED, OperatorClass.DEPTHWISE)
_WITH_WEIGHTS: Final = (OperatorClass.MATMUL, OperatorClass.CONV)


@dataclass(frozen=True, slots=True)
class DemandRow:
    """The demand of one operator class at batch 1, or of those of its kernels that are about equally intense."""

    # The operator class.
    kind: OperatorClass
    # Floating-point operations.
    flops: float
    # Bytes moved that grow with the batch.
    bytes: float
    # Bytes moved that do not grow with the batch: the weights, as often as a run reads them.
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model's profile summed up by operator class."""

    # Where kernels are known, several rows of one class may differ in FLOPs per byte.
    rows: tuple[DemandRow, ...]
    # Number of nodes, or of kernels that are started, in the whole graph.
    nodes: float


def class_of(operator: str) -> OperatorClass:
    if operator in MATMUL:
        return OperatorClass.MATMUL
    if operator in CONV:
        return OperatorClass.CONV
    return OperatorClass.COPY if operator in COPY else OperatorClass.ELEMENTWISE


def block_channels(device: Device, arch: str, precision: str) -> int:
    """Of `CHANNEL_BLOCKS`, in which the runtime keeps tensors of convolutions there, and copies between layouts; 0: it
    keeps none. The part that does (`blocked_layout`) is compiled for x86-64 alone. What a device emulates is another
    runtime's. arch: as nodes say it."""
    if device.provider != PROCESSOR or device.emulated or arch.lower() not in _X86_64 or precision != "fp32":
        return 0
    few, many = CHANNEL_BLOCKS
    return many if "avx512f" in device.attributes.get("isa", "").split() else few


def demand_of(profile: ModelProfile, block: int = 0) -> ModelDemand:
    """The kernels of the profile. Where it knows none, `profile.costs` by class, with the weights split over matrix
    products and convolutions in proportion to their bytes. block: `block_channels` of where it runs."""
    return _demands(profile, block)


def _demand_of(profile: ModelProfile, block: int) -> ModelDemand:
    if profile.kernels:
        images = _images(profile)
        rows = [_row(each, block, images) for each in profile.kernels]
        copies = profile.layout_copies if block else 0
        if copies:
            rows.append(DemandRow(OperatorClass.COPY, 0.0, profile.layout_bytes, 0.0))
        return ModelDemand(tuple(rows), sum(each.launches for each in profile.kernels) + copies)
    flops = dict.fromkeys(OperatorClass, 0.0)
    moved = dict.fromkeys(OperatorClass, 0.0)
    for cost in profile.costs:
        kind = class_of(cost.operator)
        flops[kind] += cost.flops
        moved[kind] += cost.bytes
    share = _weight_share(profile)
    found = [
        DemandRow(kind, flops[kind], moved[kind] - weights, weights)
        for kind in OperatorClass
        if flops[kind] > 0 or moved[kind] > 0
        for weights in (share * moved[kind] if kind in _WITH_WEIGHTS else 0.0,)
    ]
    return ModelDemand(tuple(found), sum(cost.nodes for cost in profile.costs))


def _row(kernel: KernelCost, block: int, images: int) -> DemandRow:
    """block: channels that are kept together, or 0. Then whole blocks are multiplied, of one image after the other,
    and each image reads all weights of a convolution (ONNX Runtime, core/mlas/lib/snchwc.cpp)."""
    kind, weight_bytes = _kind(kernel.kind), kernel.weight_bytes
    padding = dict(zip(CHANNEL_BLOCKS, kernel.padding_flops, strict=False)).get(block, 0.0)
    times = images if block and kind in CONVOLUTIONS else 1
    return DemandRow(kind, kernel.flops + padding, kernel.bytes, times * weight_bytes)


def _images(profile: ModelProfile) -> int:
    """That a run computes at the reference shapes: the first axis of inputs of four."""
    return max([1, *(shape[0] for shape in profile.reference_shapes.values() if len(shape) == 4)])


_demands = OfProfiles(_demand_of)


def _kind(name: str) -> OperatorClass:
    return _BY_NAME.get(name, OperatorClass.ELEMENTWISE)


def served_profile(profile: ModelProfile, shapes: Mapping[str, tuple[int, ...]], precision: str = "") -> ModelProfile:
    """The profile at the shapes that a workload serves, as it runs; the same object each time. precision: that a node
    makes of the pushed model; empty: it runs as it was pushed."""
    if not shapes and not precision:
        return profile
    return _served(profile, (tuple(shapes.items()), precision))


def _serve(profile: ModelProfile, asked: tuple[_Shapes, str]) -> ModelProfile:
    """Never the profile itself."""
    shapes, precision = asked
    found = at_shapes(profile, dict(shapes))
    return prepared_profile(found, precision) if precision else found


_served = OfProfiles(_serve)


def at_shapes(profile: ModelProfile, shapes: Mapping[str, tuple[int, ...]]) -> ModelProfile:
    """The profile with the open axes of its inputs at these lengths; -1, or an input that is not named, leaves them.

    Costs grow with the elements of all inputs together. That is exact for convolutions and elementwise operators, too
    low where attention grows with the square of a length, and too high where an input costs nothing.
    """
    if not shapes:
        return profile
    known = dict(profile.reference_shapes)
    for spec in profile.inputs:
        before, wanted = known.get(spec.name, spec.shape), shapes.get(spec.name, ())
        if len(wanted) == len(before):
            axes = zip(spec.shape, before, wanted, strict=True)
            known[spec.name] = tuple(length if axis < 0 <= length else now for axis, now, length in axes)
    ratio = _elements(known) / max(1, _elements(profile.reference_shapes))
    weights = _weight_share(profile)

    def scale(cost: OperatorCost) -> OperatorCost:
        kept = weights * cost.bytes if class_of(cost.operator) in _WITH_WEIGHTS else 0.0
        return replace(cost, flops=cost.flops * ratio, bytes=kept + (cost.bytes - kept) * ratio)

    return replace(
        profile,
        reference_shapes=known,
        costs=tuple(scale(cost) for cost in profile.costs),
        kernels=tuple(
            replace(
                each,
                flops=each.flops * ratio,
                bytes=each.bytes * ratio,
                padding_flops=tuple(padding * ratio for padding in each.padding_flops),
            )
            for each in profile.kernels
        ),
        layout_bytes=Bytes(int(profile.layout_bytes * ratio)),
        activation_bytes=Bytes(int(profile.activation_bytes * ratio)),
        run_bytes=Bytes(int(profile.memory_of_run(ratio)) if profile.run_bytes else 0),
        run_growth_bytes=Bytes(int(profile.run_growth_bytes * ratio)),
        batch_run_bytes=tuple(
            Bytes(int(profile.memory_of_run(count * ratio)))
            for count, _ in zip(RUN_BATCHES, profile.batch_run_bytes, strict=False)
        ),
    )


def prepared_profile(profile: ModelProfile, precision: str) -> ModelProfile:
    """The profile of what a node makes of this model in fp32: fewer bytes, and the same arithmetic. precision: one of
    `workload.PREPARABLE`. The memory of activations is left as it is, an upper bound."""
    weights = _weight_share(profile)
    weights_left, activations_left = _PREPARED_SHARES[precision]

    def shrink(cost: OperatorCost) -> OperatorCost:
        kept = weights * cost.bytes if class_of(cost.operator) in _WITH_WEIGHTS else 0.0
        return replace(cost, bytes=kept * weights_left + (cost.bytes - kept) * activations_left)

    return replace(
        profile,
        weight_bytes=Bytes(int(profile.weight_bytes * weights_left)),
        largest_weight_bytes=Bytes(int(profile.largest_weight_bytes * weights_left)),
        largest_convolution_bytes=Bytes(int(profile.largest_convolution_bytes * weights_left)),
        copied_bytes=Bytes(int(profile.copied_bytes * weights_left)),
        inner_packed_bytes=Bytes(int(profile.inner_packed_bytes * weights_left)),
        folded_bytes=Bytes(int(profile.folded_bytes * weights_left)),
        costs=tuple(shrink(cost) for cost in profile.costs),
        kernels=tuple(
            replace(each, bytes=each.bytes * activations_left, weight_bytes=each.weight_bytes * weights_left)
            for each in profile.kernels
        ),
    )


def open_axis(profile: ModelProfile, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first input with an axis that neither the model nor `shapes` fixes, with its shape; empty: none has one."""
    for spec in profile.inputs:
        wanted = shapes.get(spec.name, ())
        fixed = wanted if len(wanted) == len(spec.shape) else spec.shape
        if any(axis < 0 and length < 0 for axis, length in zip(spec.shape, fixed, strict=True)):
            return f"{spec.name} {list(spec.shape)}"
    return ""


def _weight_share(profile: ModelProfile) -> float:
    """The weights' part of the bytes that matrix products and convolutions move."""
    heavy = sum(cost.bytes for cost in profile.costs if class_of(cost.operator) in _WITH_WEIGHTS)
    return min(1.0, profile.weight_bytes / heavy) if heavy > 0 else 0.0


def _elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def work_of(profile: ModelProfile) -> Work:
    """The part of a model's profile that its assignments carry."""
    flops = dict.fromkeys(OperatorClass, 0.0)
    for cost in profile.costs:
        flops[class_of(cost.operator)] += cost.flops
    return Work(
        conv_flops=flops[OperatorClass.CONV],
        matmul_flops=flops[OperatorClass.MATMUL],
        other_flops=flops[OperatorClass.COPY] + flops[OperatorClass.ELEMENTWISE],
        bytes=profile.bytes_moved,
        nodes=sum(cost.nodes for cost in profile.costs),
        shapes=dict(profile.reference_shapes),
        below=dict(profile.below),
        operands=dict(profile.operands),
        node_flops={cost.operator: cost.flops / cost.nodes for cost in profile.costs if cost.flops > 0 < cost.nodes},
    )

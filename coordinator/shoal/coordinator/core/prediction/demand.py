"""What a model demands of a device, by operator class: the rows of the roofline model."""

from dataclasses import dataclass
from enum import StrEnum

from shoal.types.assignment import Work
from shoal.types.profile import ModelProfile


class OperatorClass(StrEnum):
    """The measured rate that limits an operator."""

    MATMUL = "matmul"
    CONV = "conv"
    COPY = "copy"
    ELEMENTWISE = "elementwise"


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


@dataclass(frozen=True, slots=True)
class DemandRow:
    """The demand of one operator class at batch 1."""

    # The operator class.
    kind: OperatorClass
    # Floating-point operations.
    flops: float
    # Bytes moved that grow with the batch.
    bytes: float
    # Bytes moved that do not grow with the batch: the weights.
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model's profile summed up by operator class."""

    # One row for each class that occurs.
    rows: tuple[DemandRow, ...]
    # Number of nodes in the whole graph.
    nodes: int


def class_of(operator: str) -> OperatorClass:
    if operator in MATMUL:
        return OperatorClass.MATMUL
    if operator in CONV:
        return OperatorClass.CONV
    return OperatorClass.COPY if operator in COPY else OperatorClass.ELEMENTWISE


def demand_of(profile: ModelProfile) -> ModelDemand:
    """Sums `profile.costs` by class. The weights are split over matrix products and convolutions in proportion to their
    bytes."""
    flops = dict.fromkeys(OperatorClass, 0.0)
    moved = dict.fromkeys(OperatorClass, 0.0)
    for cost in profile.costs:
        kind = class_of(cost.operator)
        flops[kind] += cost.flops
        moved[kind] += cost.bytes
    heavy = moved[OperatorClass.MATMUL] + moved[OperatorClass.CONV]
    share = min(1.0, profile.weight_bytes / heavy) if heavy > 0 else 0.0
    rows = [
        DemandRow(kind, flops[kind], moved[kind] - weights, weights)
        for kind in OperatorClass
        if flops[kind] > 0 or moved[kind] > 0
        for weights in (share * moved[kind] if kind in (OperatorClass.MATMUL, OperatorClass.CONV) else 0.0,)
    ]
    return ModelDemand(tuple(rows), sum(cost.nodes for cost in profile.costs))


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
    )

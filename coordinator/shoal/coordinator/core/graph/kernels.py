"""Which kernels a runtime starts for a graph: what it fuses, folds away, or computes by which kind of code.

Source: ONNX Runtime, docs/performance/model-optimizations/graph-optimizations.md (constant folding, eliminations,
Conv with BatchNormalization, Add and activation, MatMul with Add, Gelu), and core/optimizer for the conditions.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from onnx import NodeProto

from shoal.coordinator.core.graph.contents import domain_of, input_names
from shoal.coordinator.core.graph.flops import VIEWS, NodeSite

_CONVOLUTIONS: Final = frozenset(
    {"Conv", "ConvInteger", "ConvTranspose", "DeformConv", "FusedConv", "NhwcConv", "QLinearConv"}
)
_RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})
_ATTENTION: Final = frozenset({"Attention", "GroupQueryAttention", "MultiHeadAttention", "QAttention"})
_PRODUCTS: Final = frozenset(
    {
        "DynamicQuantizeMatMul", "Einsum", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger",
        "MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QLinearMatMul",
    }
)  # fmt: skip
_GATHER: Final = frozenset(
    {"Gather", "GatherElements", "GatherND", "OneHot", "ScatterElements", "ScatterND", "EmbedLayerNormalization"}
)
_COPY: Final = frozenset(
    {
        "Cast", "Concat", "DepthToSpace", "Expand", "Pad", "Resize", "ReverseSequence", "Slice", "SpaceToDepth",
        "Split", "Tile", "Transpose", "Upsample",
    }
)  # fmt: skip
_POOL: Final = frozenset({"AveragePool", "MaxPool", "LpPool", "QLinearAveragePool"})
_TRANSCENDENTAL: Final = frozenset(
    {
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BiasGelu", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp",
        "FastGelu", "Gelu", "Log", "Mish", "Pow", "QuickGelu", "Selu", "Sigmoid", "Sin", "Sinh", "Softplus", "Swish",
        "Tan", "Tanh",
    }
)  # fmt: skip
_REDUCTION: Final = frozenset(
    {
        "ArgMax", "ArgMin", "BiasSoftmax", "CumSum", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization",
        "Hardmax", "InstanceNormalization", "LayerNormalization", "LogSoftmax", "LpNormalization", "LRN",
        "MeanVarianceNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "Softmax", "TopK",
    }
)  # fmt: skip
_FREE: Final = VIEWS | {"Constant", "Shape", "Size"}
_ACTIVATIONS: Final = frozenset({"Relu", "LeakyRelu", "Clip", "Sigmoid", "Tanh", "HardSigmoid"})
"""core/optimizer/conv_activation_fusion.cc"""
_MATRIX: Final = 1
"""Least intensity of a product that reads its weights more than once: 2 FLOPs per byte, 4 rows of fp32."""


def kind_of(site: NodeSite, flops: float, moved: float) -> str:
    """One of `KERNEL_KINDS`; empty: no kernel of weight. moved: all bytes that the node reads and writes."""
    name = site.node.op_type
    if name in _FREE and not domain_of(site.node):
        return ""
    if name in _CONVOLUTIONS:
        return _kind_of_convolution(site)
    if name in _RECURRENT:
        return "recurrent"
    if name in _ATTENTION:
        return "attention"
    if name in _PRODUCTS:
        if not any(value.constant for value in site.inputs):
            return "attention"
        is_read_once = weight_bytes(site) > moved / 2 and intensity_of(flops, moved) < _MATRIX
        return "vector" if is_read_once else "matmul"
    for kind, names in (("gather", _GATHER), ("copy", _COPY), ("pool", _POOL), ("transcendental", _TRANSCENDENTAL)):
        if name in names:
            return kind
    return "reduction" if name in _REDUCTION or name.startswith("Reduce") else "elementwise"


def weight_bytes(site: NodeSite) -> float:
    """Of the constants that the node reads whole."""
    if site.node.op_type in _GATHER:
        return 0.0
    return float(sum(value.nbytes or 0 for value in site.inputs if value.constant))


def convolution_bytes(site: NodeSite) -> int:
    """Of a convolution's weights; 0 of another node, and where they are not constant."""
    if site.node.op_type not in _CONVOLUTIONS:
        return 0
    return max((value.nbytes or 0 for value in site.inputs if value.constant), default=0)


def intensity_of(flops: float, moved: float) -> int:
    """FLOPs per byte in steps of a factor of 4."""
    return round(math.log2(max(flops, 1.0) / max(moved, 1.0)) / 2)


def absorbed_nodes(nodes: Sequence[NodeProto], results: Collection[str]) -> frozenset[int]:
    """By index: nodes that become part of the kernel of an earlier one, which computes their input for them alone."""
    readers = Counter(name for node in nodes for name in input_names(node))
    readers.update(results)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output}
    # By index of a node that is absorbed: that of the first node of its kernel.
    heads: dict[int, int] = {}

    def head_of(name: str) -> NodeProto | None:
        index = maker.get(name)
        if index is None or readers[name] != 1:
            return None
        return nodes[heads.get(index, index)]

    for index, node in enumerate(nodes):
        if domain_of(node) or not node.input:
            continue
        for name in node.input[: 2 if node.op_type in ("Add", "Mul") else 1]:
            head = head_of(name)
            if head is not None and _absorbs(head.op_type, node.op_type, nodes[maker[name]].op_type):
                heads[index] = heads.get(maker[name], maker[name])
                break
        else:
            if _ends_gelu(index, nodes, maker):
                heads[index] = index
    return frozenset(heads)


def _absorbs(head: str, name: str, last: str) -> bool:
    """Whether the kernel that began with `head`, and has `last` as its last part, computes the operator too."""
    if head == "Conv":
        return (
            (name == "BatchNormalization" and last == "Conv")
            or (name == "Add" and last in ("Conv", "BatchNormalization"))
            or (name in _ACTIVATIONS and last in ("Conv", "BatchNormalization", "Add"))
        )
    if head in ("MatMul", "Gemm"):
        return (name == "Add" and last == "MatMul") or (name in _ACTIVATIONS and last == "Gemm")
    return head == "Erf" and (last, name) in (("Erf", "Add"), ("Add", "Mul"), ("Mul", "Mul"))


def _ends_gelu(index: int, nodes: Sequence[NodeProto], maker: Mapping[str, int]) -> bool:
    """Whether the node is the Mul of x * Sigmoid(x), which the runtime computes at once."""
    if nodes[index].op_type != "Mul" or len(nodes[index].input) != 2:
        return False
    one, other = nodes[index].input
    for gate, x in ((one, other), (other, one)):
        made = maker.get(gate)
        if made is not None and nodes[made].op_type == "Sigmoid" and list(nodes[made].input) == [x]:
            return True
    return False


def _kind_of_convolution(site: NodeSite) -> str:
    weights = site.inputs[1].shape if len(site.inputs) > 1 else None
    if weights is None:
        return "conv"
    groups = int(site.attributes.get("group", 1))
    if groups > 1:
        return "depthwise" if weights[1] == 1 else "grouped"
    return "pointwise" if math.prod(weights[2:]) == 1 else "conv"

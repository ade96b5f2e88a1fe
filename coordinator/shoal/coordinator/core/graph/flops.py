"""Floating-point operations and bytes of one node, from the shapes of its inputs and outputs.

Conventions: a multiply-add is 2 FLOPs, as vendors count peak rates. Any other scalar operation, including comparisons
and transcendental functions, is 1: this counts work, not instructions. Integer arithmetic of quantised operators is
counted the same way, so that a rate per precision applies to it. Moving, viewing or casting data is 0 FLOPs; its cost
is its bytes. The operators are those of the ONNX specification (Operators.md) and of ONNX Runtime's
ContribOperators.md. Each formula is the arithmetic of the operator's definition there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from onnx import NodeProto

from shoal.coordinator.core.graph.infer import attributes_of
from shoal.coordinator.core.graph.values import UNKNOWN, Value


class UnknownShape(Exception):
    """A formula needs a shape that is not known."""


@dataclass(frozen=True)
class NodeSite:
    """One node with the values of its inputs and outputs."""

    node: NodeProto
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    def has_input(self, index: int) -> bool:
        return index < len(self.node.input) and bool(self.node.input[index])

    def input_shape(self, index: int) -> tuple[int, ...]:
        """Shape of an input. Raises UnknownShape."""
        found = self.inputs[index].shape if index < len(self.inputs) else None
        if found is None:
            raise UnknownShape
        return found

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Shape of an output. Raises UnknownShape."""
        found = self.outputs[index].shape if index < len(self.outputs) else None
        if found is None:
            raise UnknownShape
        return found

    def int_attribute(self, name: str, default: int | None = None) -> int:
        """An integer attribute. Raises KeyError where it is absent and has no default."""
        return int(self.attributes[name] if default is None else self.attributes.get(name, default))

    def input_size(self, index: int = 0) -> int:
        return math.prod(self.input_shape(index))

    def output_size(self, index: int = 0) -> int:
        return math.prod(self.output_shape(index))


Formula = Callable[[NodeSite], float]


def flops(site: NodeSite) -> float | None:
    """FLOPs of the node. None where there is no formula or a needed shape is unknown: totals are then a lower bound."""
    name = site.node.op_type
    if name in FREE:
        return 0.0
    try:
        if name in FORMULAS:
            return float(FORMULAS[name](site))
        if name in PER_OUTPUT:
            return float(PER_OUTPUT[name] * site.output_size())
        if name in PER_INPUT:
            return float(PER_INPUT[name] * site.input_size())
    except (UnknownShape, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # an untrusted file may have attributes or ranks that contradict the operator
    return None


def memory_traffic(site: NodeSite) -> tuple[float, bool]:
    """(bytes read and written, whether all sizes were known). Each tensor counts once, as if no cache kept it.

    A view moves nothing; indexing reads only what it returns.
    """
    name = site.node.op_type
    if name in VIEWS or name in ("Shape", "Size", "Constant"):
        return 0.0, True
    if name in _INDEXED:
        sizes = [site.outputs[0].nbytes if site.outputs else None] * 2
        sizes += [value.nbytes for value in site.inputs[1:] if value is not UNKNOWN]
    else:
        sizes = [value.nbytes for index, value in enumerate(site.inputs) if site.has_input(index)]
        sizes += [value.nbytes for name, value in zip(site.node.output, site.outputs, strict=False) if name]
    return float(sum(size or 0 for size in sizes)), None not in sizes


VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
"""Operators whose output shares their input's memory under another shape (Dropout: at inference)."""

_INDEXED: Final = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Compress", "EmbedLayerNormalization"})

FREE: Final = frozenset({
    *VIEWS, *_INDEXED, "Shape", "Size", "Constant", "ConstantOfShape", "Cast", "CastLike", "BitCast", "Concat", "Split",
    "Transpose", "Pad", "Tile", "Expand", "Where", "Scatter", "ScatterElements", "ScatterND", "DepthToSpace",
    "SpaceToDepth", "OneHot", "EyeLike", "Range", "NonZero", "ReverseSequence", "Trilu", "Unique", "MaxUnpool",
    "MaxRoiPool", "CenterCropPad", "Col2Im", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceLength", "SplitToSequence", "ConcatFromSequence", "Optional", "OptionalGetElement",
    "OptionalHasElement", "StringNormalizer", "StringConcat", "StringSplit", "RegexFullMatch", "LabelEncoder",
    "CategoryMapper", "DictVectorizer", "ZipMap", "CastMap", "ArrayFeatureExtractor", "FeatureVectorizer",
    "QLinearConcat", "TensorScatter", "TfIdfVectorizer", "ImageDecoder",
}) - {"EmbedLayerNormalization"}  # fmt: skip
"""Operators that move data and compute nothing."""

PER_OUTPUT: Final[Mapping[str, float]] = {
    # one operation for each element made
    **dict.fromkeys((
        "Add", "Sub", "Mul", "Div", "Mod", "Pow", "And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual",
        "Less", "LessOrEqual", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Abs", "Neg",
        "Reciprocal", "Floor", "Ceil", "Round", "Sign", "Sqrt", "Exp", "Log", "Sin", "Cos", "Tan", "Asin", "Acos",
        "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Tanh", "Erf", "IsNaN", "IsInf", "Relu", "PRelu",
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Hardmax",
        "Binarizer", "Det", "BlackmanWindow", "HannWindow", "HammingWindow",
    ), 1.0),
    # LeakyRelu, ThresholdedRelu: compare, multiply. Clip: two comparisons. Scaler: subtract, multiply
    **dict.fromkeys(("LeakyRelu", "ThresholdedRelu", "Clip", "Shrink", "Scaler", "Imputer"), 2.0),
    # exp(-x), add, divide; HardSigmoid: a x + b and two comparisons; x / (1 + |x|); ln(1 + e^x); alpha (e^x - 1)
    "Sigmoid": 3, "HardSigmoid": 4, "Softsign": 3, "Softplus": 3, "Elu": 4, "Celu": 6, "Selu": 5,
    # x * HardSigmoid(x); x * Sigmoid(x); x * tanh(Softplus(x)); x/2 * (1 + erf(x / sqrt 2)); tanh approximations
    "HardSwish": 5, "Swish": 4, "QuickGelu": 5, "Mish": 5, "Gelu": 5, "BiasGelu": 6, "FastGelu": 9, "BiasSplitGelu": 7,
    # a x + b with a, b folded from mean, variance, scale and shift
    "BatchNormalization": 2,
    # QuantizeLinear: divide, round, add, saturate. DequantizeLinear: subtract, multiply
    "QuantizeLinear": 4, "DequantizeLinear": 2, "DynamicQuantizeLinear": 6,
    "QLinearAdd": 9, "QLinearMul": 9, "QLinearSigmoid": 9, "QLinearLeakyRelu": 8, "QLinearSoftmax": 11,
    # x cos + rotated x sin
    "RotaryEmbedding": 3,
}  # fmt: skip

PER_INPUT: Final[Mapping[str, float]] = {
    **dict.fromkeys((
        "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "GlobalAveragePool", "GlobalMaxPool",
        "ArgMax", "ArgMin", "CumSum", "CumProd", "QLinearGlobalAveragePool", "QLinearReduceMean",
    ), 1.0),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "GlobalLpPool"), 2.0),
    # max, subtract, exp, sum, divide (or subtract the logarithm)
    **dict.fromkeys(("Softmax", "LogSoftmax", "BiasSoftmax"), 5.0), "ReduceLogSumExp": 4,
    # mean, subtract, square, mean, divide by the deviation, scale, shift
    **dict.fromkeys((
        "LayerNormalization", "InstanceNormalization", "GroupNormalization", "GroupNorm", "MeanVarianceNormalization",
    ), 7.0),
    **dict.fromkeys(("SkipLayerNormalization", "SkipGroupNorm", "EmbedLayerNormalization"), 8.0),
    # square, mean, divide, scale
    **dict.fromkeys(("RMSNormalization", "SimplifiedLayerNormalization"), 4.0), "SkipSimplifiedLayerNormalization": 5,
    "LpNormalization": 3, "Normalizer": 3,
}  # fmt: skip


def _conv(weight: int, bias: int | None) -> Formula:
    """Y[n, m, ..] = b[m] + sum over C/group and the kernel of W[m, C/group, k..] X: 2 |Y| prod(W.shape[1:])."""

    def formula(site: NodeSite) -> float:
        biased = bias is not None and site.has_input(bias)
        return site.output_size() * (2 * math.prod(site.input_shape(weight)[1:]) + biased)

    return formula


def _conv_transpose(site: NodeSite) -> float:
    """Each element of X is multiplied with W[C, M/group, k..]: 2 |X| prod(W.shape[1:]), and a bias per output."""
    return 2 * site.input_size() * math.prod(site.input_shape(1)[1:]) + site.output_size() * site.has_input(2)


def _deform_conv(site: NodeSite) -> float:
    """A convolution where every tap is a bilinear sample: 7 more operations for each tap and channel."""
    taps = math.prod(site.input_shape(1)[1:])
    return site.output_size() * (2 * taps + site.has_input(3)) + 7 * site.input_size(2) / 2 * site.input_shape(0)[1]


def _matmul(site: NodeSite) -> float:
    """Y[.., m, n] = sum over k of A[.., m, k] B[.., k, n]: 2 |Y| k."""
    a = site.input_shape(0)
    return 2 * site.output_size() * a[-2 if site.int_attribute("transA", 0) and len(a) > 1 else -1]


def _qlinear_matmul(site: NodeSite) -> float:
    """As MatMul, plus 4 operations per output for requantisation."""
    return site.output_size() * (2 * site.input_shape(0)[-1] + 4)


def _gemm(site: NodeSite) -> float:
    """alpha A' B' + beta C: 2 M N K, plus M N each for C, for alpha != 1 and for beta != 1."""
    a, attributes = site.input_shape(0), site.attributes
    inner = a[0] if site.int_attribute("transA", 0) else a[1]
    scaled, weighted = attributes.get("alpha", 1.0) != 1.0, attributes.get("beta", 1.0) != 1.0
    extra = int(scaled) + int(site.has_input(2)) * (1 + int(weighted))
    return site.output_size() * (2 * inner + extra)


def _einsum(site: NodeSite) -> float:
    """One multiply-add for every combination of all indices, and one multiply more for each operand beyond two."""
    equation = site.attributes["equation"].decode().replace(" ", "")
    terms = equation.split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for index, term in enumerate(terms):
        shape = site.input_shape(index)
        named = len(term.replace("...", ""))
        labels: list[str] = []
        for part in term.replace("...", "."):
            labels += [f".{axis}" for axis in range(len(shape) - named)] if part == "." else [part]
        for label, length in zip(labels, shape, strict=False):
            lengths[label] = max(lengths.get(label, 1), length)
    return max(1, len(terms)) * math.prod(lengths.values())


def _recurrent(gates: int, pointwise: int) -> Formula:
    """Per step, direction and batch row: W x (gates h i) and R h (gates h h) as multiply-adds, then `pointwise` h.

    pointwise, from the cell's equations in Operators.md: LSTM 21 (three additions into each of 4 gates, 5 activations,
    f c + i g, o tanh(c)); GRU 17 (three into each of 3, 3 activations, r h, (1 - z) n + z h); RNN 4.
    """

    def formula(site: NodeSite) -> float:
        steps, batch, width = site.input_shape(0)
        directions, _, hidden = site.input_shape(2)
        return steps * batch * directions * (2 * gates * hidden * (width + hidden) + pointwise * hidden)

    return formula


def _pool(site: NodeSite) -> float:
    """One addition or comparison for each tap of the window: |Y| prod(kernel_shape)."""
    return site.output_size() * math.prod(int(length) for length in site.attributes["kernel_shape"])


def _resize(site: NodeSite) -> float:
    """nearest: 0. linear: 2^d multiplies and 2^d - 1 additions per output; cubic: 4^d. d: number of axes whose length
    changes."""
    taps = {"linear": 2, "cubic": 4}.get(site.attributes.get("mode", b"nearest").decode(), 1)
    axes = sum(before != after for before, after in zip(site.input_shape(0), site.output_shape(), strict=True))
    return site.output_size() * (2 * taps**axes - 1) if taps > 1 and axes else 0.0


def _grid_sample(site: NodeSite) -> float:
    """Unnormalises the coordinates (3 per axis), then samples as Resize does. Nearest samples are copies."""
    mode = site.attributes.get("mode", b"linear").decode()
    axes = len(site.input_shape(0)) - 2
    taps = math.prod([{"linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}.get(mode, 0)] * axes)
    return 3 * site.input_size(1) + site.output_size() * max(0, 2 * taps - 1)


def _roi_align(site: NodeSite) -> float:
    """Each output averages sampling_ratio^2 bilinear samples of 7 operations. Ratio 0 (adaptive) counts as 2."""
    ratio = site.int_attribute("sampling_ratio", 0) or 2
    return site.output_size() * ratio**2 * 8


def _nary(site: NodeSite) -> float:
    """Sum, Mean, Max, Min over n inputs: n - 1 operations per output, and one more for Mean."""
    return site.output_size() * (len(site.inputs) - 1 + (site.node.op_type == "Mean"))


def _lrn(site: NodeSite) -> float:
    """Square, a window sum of `size`, scale and add, power, divide."""
    return site.output_size() * (site.int_attribute("size") + 5)


def _top_k(site: NodeSite) -> float:
    """A heap of k: |X| log2(k + 1) comparisons."""
    axis = site.int_attribute("axis", -1)
    return site.input_size() * math.log2(site.output_shape()[axis] + 1)


def _attention(site: NodeSite) -> float:
    """softmax(Q K' / sqrt d) V, ai.onnx 23: 2 h q k (d + e) FLOPs of multiply-adds, and 6 per score (scale, softmax).

    Q is [b, h, q, d] or [b, q, h d]; K and V likewise. Past keys and values are part of the present outputs.
    """
    query, value = site.input_shape(0), site.input_shape(2)
    keys = site.output_shape(1)[-2] if len(site.outputs) > 1 and site.outputs[1].shape else site.input_shape(1)[-2]
    if len(query) == 4:
        heads, rows, width = query[1:]
        value_width = value[-1]
    else:
        heads = site.int_attribute("q_num_heads")
        rows, width = query[1], query[2] // heads
        value_width = value[2] // site.int_attribute("kv_num_heads")
    return query[0] * heads * rows * keys * (2 * (width + value_width) + 6)


def _fused_attention(site: NodeSite) -> float:
    """com.microsoft Attention: the projection of [b, s, i] by W [i, q + k + v], then attention over s (and past)."""
    batch, rows, width = site.input_shape(0)
    columns = site.input_shape(1)[-1]
    heads = site.int_attribute("num_heads")
    past = site.input_shape(4)[-2] if site.has_input(4) else 0
    scores = batch * rows * (rows + past)
    return 2 * batch * rows * width * columns + scores * (4 * columns / 3 + 6 * heads)


def _multi_head_attention(site: NodeSite) -> float:
    """com.microsoft MultiHeadAttention and GroupQueryAttention on [b, s, hidden]: 4 hidden + 6 heads for each pair of
    positions."""
    batch, rows, hidden = site.input_shape(0)[:3]
    keys = site.output_shape(1)[-2] if len(site.outputs) > 1 and site.outputs[1].shape else site.input_shape(1)[1]
    return batch * rows * keys * (4 * hidden + 6 * site.int_attribute("num_heads"))


def _dft(site: NodeSite) -> float:
    """5 n log2 n for each transform of n points (Cooley-Tukey, as FFTW counts)."""
    points = max(site.output_shape()[site.int_attribute("axis", 1)], 1)
    return site.output_size() / 2 * 5 * math.log2(points + 1)


def _stft(site: NodeSite) -> float:
    """Y [b, frames, bins, 2]: 5 n log2 n per frame, n = 2 (bins - 1) for one-sided spectra, and 1 per point for the
    window."""
    batch, frames, bins = site.output_shape()[:3]
    points = 2 * (bins - 1) if site.int_attribute("onesided", 1) else bins
    return batch * frames * points * (5 * math.log2(max(points, 2)) + 1)


def _non_max_suppression(site: NodeSite) -> float:
    """Worst case: every pair of boxes of a class is compared, with 12 operations per intersection over union."""
    batch, classes, boxes = site.input_shape(1)
    return batch * classes * boxes * (boxes - 1) / 2 * 12


def _trees(site: NodeSite) -> float:
    """One comparison per row, tree and level, then one addition. A tree of n nodes has about log2(n + 1) levels."""
    trees = site.attributes["nodes_treeids"]
    count = max(1, len(set(trees)))
    return site.input_shape(0)[0] * count * (math.log2(len(trees) / count + 1) + 1)


def _linear_model(site: NodeSite) -> float:
    """coefficients x features: one multiply-add each, per row."""
    return 2 * site.input_shape(0)[0] * len(site.attributes["coefficients"])


def _weight_only(site: NodeSite) -> float:
    """com.microsoft MatMulNBits: as MatMul, and the weights are dequantised once (2 per element)."""
    k, n = site.int_attribute("K"), site.int_attribute("N")
    return 2 * site.output_size() * k + 2 * k * n


FORMULAS: Final[Mapping[str, Formula]] = {
    "Conv": _conv(1, 2),
    "FusedConv": _conv(1, 2),
    "ConvInteger": _conv(1, None),
    "QLinearConv": _conv(3, 8),
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    **dict.fromkeys(
        (
            "MatMul",
            "MatMulInteger",
            "FusedMatMul",
            "TransposeMatMul",
            "DynamicQuantizeMatMul",
            "MatMulIntegerToFloat",
        ),
        _matmul,
    ),
    "QLinearMatMul": _qlinear_matmul,
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "QGemm": _gemm,
    "Einsum": _einsum,
    "MatMulNBits": _weight_only,
    "MatMulBnb4": _weight_only,
    "LSTM": _recurrent(4, 21),
    "GRU": _recurrent(3, 17),
    "RNN": _recurrent(1, 4),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool", "QLinearAveragePool"), _pool),
    "Resize": _resize,
    "Upsample": _resize,
    "GridSample": _grid_sample,
    "AffineGrid": lambda site: 6.0 * site.output_size(),
    "RoiAlign": _roi_align,
    "Sum": _nary,
    "Mean": _nary,
    "Max": _nary,
    "Min": _nary,
    "LRN": _lrn,
    "TopK": _top_k,
    "Attention": lambda site: _fused_attention(site) if site.node.domain else _attention(site),
    "MultiHeadAttention": _multi_head_attention,
    "GroupQueryAttention": _multi_head_attention,
    "DFT": _dft,
    "STFT": _stft,
    "NonMaxSuppression": _non_max_suppression,
    **dict.fromkeys(("TreeEnsembleClassifier", "TreeEnsembleRegressor"), _trees),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor"), _linear_model),
}

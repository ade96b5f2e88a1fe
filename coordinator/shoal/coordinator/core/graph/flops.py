"""Floating-point operations and bytes of one node, from the shapes of its inputs and outputs.

Conventions. A multiply-add is 2 FLOPs (as vendors count peak rates). Any other scalar operation, comparison and
transcendental included, is 1: a count of work, not of instructions. Integer arithmetic of quantised operators is
counted the same way, so that a rate per precision applies to it. Moving, viewing or casting data is 0 FLOPs; what it
costs is its bytes. Operators are read from the ONNX operator specification (Operators.md) and ONNX Runtime's
ContribOperators.md; each formula below is the arithmetic of its definition there.
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
class Site:
    """One node with what is known around it."""

    node: NodeProto
    inputs: Sequence[Value]
    outputs: Sequence[Value]

    @cached_property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    def given(self, index: int) -> bool:
        return index < len(self.node.input) and bool(self.node.input[index])

    def shape(self, index: int) -> tuple[int, ...]:
        """Raises UnknownShape."""
        found = self.inputs[index].shape if index < len(self.inputs) else None
        if found is None:
            raise UnknownShape
        return found

    def out(self, index: int = 0) -> tuple[int, ...]:
        """Raises UnknownShape."""
        found = self.outputs[index].shape if index < len(self.outputs) else None
        if found is None:
            raise UnknownShape
        return found

    def number(self, name: str, default: int | None = None) -> int:
        """An integer attribute. Raises KeyError when it is absent and has no default."""
        return int(self.attributes[name] if default is None else self.attributes.get(name, default))

    def read(self, index: int = 0) -> int:
        return math.prod(self.shape(index))

    def made(self, index: int = 0) -> int:
        return math.prod(self.out(index))


Formula = Callable[[Site], float]


def flops(site: Site) -> float | None:
    """FLOPs of the node. None: no formula, or a shape it needs is unknown; what is counted is then a lower bound."""
    name = site.node.op_type
    if name in FREE:
        return 0.0
    try:
        if name in FORMULAS:
            return float(FORMULAS[name](site))
        if name in PER_OUTPUT:
            return float(PER_OUTPUT[name] * site.made())
        if name in PER_INPUT:
            return float(PER_INPUT[name] * site.read())
    except (UnknownShape, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # attributes or ranks that contradict the operator: a stranger's file
    return None


def moved(site: Site) -> tuple[float, bool]:
    """(bytes read and written, whether that is all of it), each tensor once, as if nothing stayed in a cache.

    A view moves nothing; indexing reads only what it returns.
    """
    name = site.node.op_type
    if name in VIEWS or name in ("Shape", "Size", "Constant"):
        return 0.0, True
    if name in _INDEXED:
        sizes = [site.outputs[0].nbytes if site.outputs else None] * 2
        sizes += [value.nbytes for value in site.inputs[1:] if value is not UNKNOWN]
    else:
        sizes = [value.nbytes for index, value in enumerate(site.inputs) if site.given(index)]
        sizes += [value.nbytes for name, value in zip(site.node.output, site.outputs, strict=False) if name]
    return float(sum(size or 0 for size in sizes)), None not in sizes


VIEWS: Final = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
"""Operators whose output is their input's memory under another shape (Dropout: at inference)."""

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

    def formula(site: Site) -> float:
        biased = bias is not None and site.given(bias)
        return site.made() * (2 * math.prod(site.shape(weight)[1:]) + biased)

    return formula


def _conv_transpose(site: Site) -> float:
    """Each element of X meets W[C, M/group, k..]: 2 |X| prod(W.shape[1:]), and a bias per output."""
    return 2 * site.read() * math.prod(site.shape(1)[1:]) + site.made() * site.given(2)


def _deform_conv(site: Site) -> float:
    """A convolution whose every tap is a bilinear sample: 7 more operations a tap and channel."""
    taps = math.prod(site.shape(1)[1:])
    return site.made() * (2 * taps + site.given(3)) + 7 * site.read(2) / 2 * site.shape(0)[1]


def _matmul(site: Site) -> float:
    """Y[.., m, n] = sum over k of A[.., m, k] B[.., k, n]: 2 |Y| k."""
    a = site.shape(0)
    return 2 * site.made() * a[-2 if site.number("transA", 0) and len(a) > 1 else -1]


def _qlinear_matmul(site: Site) -> float:
    """As MatMul; requantising is 4 operations an output."""
    return site.made() * (2 * site.shape(0)[-1] + 4)


def _gemm(site: Site) -> float:
    """alpha A' B' + beta C: 2 M N K, M N more for each of C, alpha != 1, beta != 1."""
    a, attributes = site.shape(0), site.attributes
    inner = a[0] if site.number("transA", 0) else a[1]
    scaled, weighted = attributes.get("alpha", 1.0) != 1.0, attributes.get("beta", 1.0) != 1.0
    extra = int(scaled) + int(site.given(2)) * (1 + int(weighted))
    return site.made() * (2 * inner + extra)


def _einsum(site: Site) -> float:
    """One multiply-add (for each further operand one multiply) for every combination of all indices."""
    equation = site.attributes["equation"].decode().replace(" ", "")
    terms = equation.split("->")[0].split(",")
    lengths: dict[str, int] = {}
    for index, term in enumerate(terms):
        shape = site.shape(index)
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

    def formula(site: Site) -> float:
        steps, batch, width = site.shape(0)
        directions, _, hidden = site.shape(2)
        return steps * batch * directions * (2 * gates * hidden * (width + hidden) + pointwise * hidden)

    return formula


def _pool(site: Site) -> float:
    """One addition or comparison for each tap of the window: |Y| prod(kernel_shape)."""
    return site.made() * math.prod(int(length) for length in site.attributes["kernel_shape"])


def _resize(site: Site) -> float:
    """nearest: 0. linear: 2^d multiplies and 2^d - 1 adds an output, cubic 4^d, over the d axes that change length."""
    taps = {"linear": 2, "cubic": 4}.get(site.attributes.get("mode", b"nearest").decode(), 1)
    axes = sum(before != after for before, after in zip(site.shape(0), site.out(), strict=True))
    return site.made() * (2 * taps**axes - 1) if taps > 1 and axes else 0.0


def _grid_sample(site: Site) -> float:
    """Unnormalise the coordinates (3 an axis), then sample as Resize does; nearest samples are copies."""
    mode = site.attributes.get("mode", b"linear").decode()
    axes = len(site.shape(0)) - 2
    taps = math.prod([{"linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}.get(mode, 0)] * axes)
    return 3 * site.read(1) + site.made() * max(0, 2 * taps - 1)


def _roi_align(site: Site) -> float:
    """Each output averages sampling_ratio^2 bilinear samples of 7 operations; ratio 0 (adaptive) is taken as 2."""
    ratio = site.number("sampling_ratio", 0) or 2
    return site.made() * ratio**2 * 8


def _nary(site: Site) -> float:
    """Sum, Mean, Max, Min over n inputs: n - 1 operations an output, Mean one more."""
    return site.made() * (len(site.inputs) - 1 + (site.node.op_type == "Mean"))


def _lrn(site: Site) -> float:
    """Square, a window sum of `size`, scale and add, power, divide."""
    return site.made() * (site.number("size") + 5)


def _top_k(site: Site) -> float:
    """A heap of k: |X| log2(k + 1) comparisons."""
    axis = site.number("axis", -1)
    return site.read() * math.log2(site.out()[axis] + 1)


def _attention(site: Site) -> float:
    """softmax(Q K' / sqrt d) V, ai.onnx 23: 2 h q k (d + e) multiply-adds' FLOPs and 6 a score (scale, softmax).

    Q [b, h, q, d] or [b, q, h d], likewise K and V; past keys and values are in the present outputs.
    """
    query, value = site.shape(0), site.shape(2)
    keys = site.out(1)[-2] if len(site.outputs) > 1 and site.outputs[1].shape else site.shape(1)[-2]
    if len(query) == 4:
        heads, rows, width = query[1:]
        value_width = value[-1]
    else:
        heads = site.number("q_num_heads")
        rows, width = query[1], query[2] // heads
        value_width = value[2] // site.number("kv_num_heads")
    return query[0] * heads * rows * keys * (2 * (width + value_width) + 6)


def _fused_attention(site: Site) -> float:
    """com.microsoft Attention: the projection of [b, s, i] by W [i, q + k + v], then attention over s (and past)."""
    batch, rows, width = site.shape(0)
    columns = site.shape(1)[-1]
    heads = site.number("num_heads")
    past = site.shape(4)[-2] if site.given(4) else 0
    scores = batch * rows * (rows + past)
    return 2 * batch * rows * width * columns + scores * (4 * columns / 3 + 6 * heads)


def _multi_head_attention(site: Site) -> float:
    """com.microsoft MultiHeadAttention, GroupQueryAttention, [b, s, hidden]: 4 hidden + 6 heads a pair of positions."""
    batch, rows, hidden = site.shape(0)[:3]
    keys = site.out(1)[-2] if len(site.outputs) > 1 and site.outputs[1].shape else site.shape(1)[1]
    return batch * rows * keys * (4 * hidden + 6 * site.number("num_heads"))


def _dft(site: Site) -> float:
    """5 n log2 n for each transform of n points (Cooley-Tukey, as FFTW counts)."""
    points = max(site.out()[site.number("axis", 1)], 1)
    return site.made() / 2 * 5 * math.log2(points + 1)


def _stft(site: Site) -> float:
    """Y [b, frames, bins, 2]: 5 n log2 n a frame, n = 2 (bins - 1) for one-sided spectra; the window is 1 a point."""
    batch, frames, bins = site.out()[:3]
    points = 2 * (bins - 1) if site.number("onesided", 1) else bins
    return batch * frames * points * (5 * math.log2(max(points, 2)) + 1)


def _non_max_suppression(site: Site) -> float:
    """At worst every pair of boxes of a class is compared, 12 operations an intersection over union."""
    batch, classes, boxes = site.shape(1)
    return batch * classes * boxes * (boxes - 1) / 2 * 12


def _trees(site: Site) -> float:
    """Per row and tree one comparison a level; a tree of n nodes has about log2(n + 1) levels, then one addition."""
    trees = site.attributes["nodes_treeids"]
    count = max(1, len(set(trees)))
    return site.shape(0)[0] * count * (math.log2(len(trees) / count + 1) + 1)


def _linear_model(site: Site) -> float:
    """coefficients x features: a multiply-add each, a row at a time."""
    return 2 * site.shape(0)[0] * len(site.attributes["coefficients"])


def _weight_only(site: Site) -> float:
    """com.microsoft MatMulNBits: as MatMul, and the weights are dequantised (2 an element) once."""
    k, n = site.number("K"), site.number("N")
    return 2 * site.made() * k + 2 * k * n


FORMULAS: Final[Mapping[str, Formula]] = {
    "Conv": _conv(1, 2), "FusedConv": _conv(1, 2), "ConvInteger": _conv(1, None), "QLinearConv": _conv(3, 8),
    "ConvTranspose": _conv_transpose, "DeformConv": _deform_conv,
    **dict.fromkeys((
        "MatMul", "MatMulInteger", "FusedMatMul", "TransposeMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat",
    ), _matmul),
    "QLinearMatMul": _qlinear_matmul, "Gemm": _gemm, "FusedGemm": _gemm, "QGemm": _gemm, "Einsum": _einsum,
    "MatMulNBits": _weight_only, "MatMulBnb4": _weight_only,
    "LSTM": _recurrent(4, 21), "GRU": _recurrent(3, 17), "RNN": _recurrent(1, 4),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool", "QLinearAveragePool"), _pool),
    "Resize": _resize, "Upsample": _resize, "GridSample": _grid_sample, "AffineGrid": lambda site: 6.0 * site.made(),
    "RoiAlign": _roi_align, "Sum": _nary, "Mean": _nary, "Max": _nary, "Min": _nary, "LRN": _lrn, "TopK": _top_k,
    "Attention": lambda site: _fused_attention(site) if site.node.domain else _attention(site),
    "MultiHeadAttention": _multi_head_attention, "GroupQueryAttention": _multi_head_attention,
    "DFT": _dft, "STFT": _stft, "NonMaxSuppression": _non_max_suppression,
    **dict.fromkeys(("TreeEnsembleClassifier", "TreeEnsembleRegressor"), _trees),
    **dict.fromkeys(("LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor"), _linear_model),
}  # fmt: skip

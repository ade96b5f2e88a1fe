"""The models of `shoal bench prediction --live`: those that wheels bring, and common architectures built in code.

Weights are noise with a fixed seed. Batch axes are open. A family is held out as a whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from onnx import NodeProto, TensorProto, helper, numpy_helper

from harness.models.synthetic import real_models

_FLOAT, _INT64 = TensorProto.FLOAT, TensorProto.INT64
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model, and the shapes at which it is measured."""

    # Its key in `MODELS`.
    name: str
    # Models of one family are held out together.
    family: str
    # The model's file.
    content: bytes
    # Of its inputs, at batch 1. The first axis of `batched` grows with the batch.
    shapes: Shapes
    # Inputs whose first axis is the batch; empty: it takes batch 1 alone.
    batched: tuple[str, ...]

    def at_batch(self, batch: int) -> Shapes:
        return {name: (batch, *shape[1:]) if name in self.batched else shape for name, shape in self.shapes.items()}


class _Graph:
    """Builds a graph node by node. Every method returns the name of what it added."""

    def __init__(self, prefix: str = "t") -> None:
        self.nodes: list[NodeProto] = []
        self._prefix = prefix
        self._rng = np.random.default_rng(7)
        self._weights: list[TensorProto] = []
        self._inputs: dict[str, tuple[int, tuple[int, ...]]] = {}

    def input(self, name: str, *shape: int, dtype: int = _FLOAT) -> str:
        self._inputs[name] = dtype, shape
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape, np.float32) / math.sqrt(math.prod(shape[1:]) or 1))

    def constant(self, values: ArrayLike, dtype: type = np.float32) -> str:
        name = f"w{len(self._weights)}"
        self._weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def add(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{self._prefix}{len(self.nodes)}" + (f"_{n}" if n else "") for n in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0]

    def conv(
        self, x: str, inside: int, outside: int, kernel: int = 3, stride: int = 1, groups: int = 1, after: str = "Relu"
    ) -> str:
        """A convolution with its normalisation and activation."""
        around = kernel // 2
        weights = self.weight(outside, inside // groups, kernel, kernel)
        y = self.add("Conv", x, weights, group=groups, strides=[stride] * 2, pads=[around] * 4)
        ones, zeros = self.constant(np.ones(outside)), self.constant(np.zeros(outside))
        y = self.add("BatchNormalization", y, ones, zeros, zeros, ones)
        if after == "Relu6":
            return self.add("Clip", y, self.constant(0.0), self.constant(6.0))
        if after == "Silu":
            return self.add("Mul", y, self.add("Sigmoid", y))
        return self.add(after, y) if after else y

    def dense(self, x: str, inside: int, outside: int, after: str = "") -> str:
        y = self.add("Add", self.add("MatMul", x, self.weight(inside, outside)), self.weight(outside))
        return self.gelu(y) if after == "Gelu" else self.add(after, y) if after else y

    def gelu(self, x: str) -> str:
        """As exporters write it."""
        erf = self.add("Erf", self.add("Div", x, self.constant(math.sqrt(2))))
        return self.add("Mul", self.add("Mul", x, self.add("Add", erf, self.constant(1.0))), self.constant(0.5))

    def norm(self, x: str, width: int) -> str:
        gain, bias = self.constant(np.ones(width)), self.constant(np.zeros(width))
        return self.add("LayerNormalization", x, gain, bias, axis=-1)

    def heads(self, x: str, width: int, heads: int, length: int, order: Sequence[int]) -> str:
        shape = self.constant([-1, length, heads, width // heads], np.int64)
        return self.add("Transpose", self.add("Reshape", x, shape), perm=list(order))

    def encoder(self, x: str, width: int, heads: int, length: int, grow: int = 4) -> str:
        """One layer of a transformer's encoder, as exporters write it."""
        query, key, value = (self.dense(x, width, width) for _ in range(3))
        query = self.heads(query, width, heads, length, (0, 2, 1, 3))
        key = self.heads(key, width, heads, length, (0, 2, 3, 1))
        value = self.heads(value, width, heads, length, (0, 2, 1, 3))
        scores = self.add("Div", self.add("MatMul", query, key), self.constant(math.sqrt(width / heads)))
        mixed = self.add(
            "Transpose", self.add("MatMul", self.add("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3]
        )
        mixed = self.add("Reshape", mixed, self.constant([-1, length, width], np.int64))
        x = self.norm(self.add("Add", x, self.dense(mixed, width, width)), width)
        hidden = self.dense(x, width, grow * width, "Gelu")
        return self.norm(self.add("Add", x, self.dense(hidden, grow * width, width)), width)

    def classify(self, x: str, inside: int, outside: int) -> str:
        x = self.add("Flatten", self.add("GlobalAveragePool", x))
        return self.add("Gemm", x, self.weight(inside, outside), self.weight(outside))

    def model(self, name: str, family: str, result: str) -> LiveModel:
        inputs = [
            helper.make_tensor_value_info(each, dtype, ["n", *shape[1:]])
            for each, (dtype, shape) in self._inputs.items()
        ]
        output = helper.make_tensor_value_info(result, _FLOAT, None)
        graph = helper.make_graph(self.nodes, name, inputs, [output], self._weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        shapes = {each: shape for each, (_, shape) in self._inputs.items()}
        return LiveModel(name, family, made.SerializeToString(), shapes, tuple(shapes))


def _resnet(name: str, widths: Sequence[int], side: int) -> LiveModel:
    g = _Graph()
    x = g.add(
        "MaxPool", g.conv(g.input("x", 1, 3, side, side), 3, widths[0], 7, 2), kernel_shape=[3, 3], strides=[2, 2]
    )
    before = widths[0]
    for number, width in enumerate(widths):
        stride = 2 if number else 1
        for block in range(2):
            step, inside = (stride, before) if not block else (1, width)
            y = g.conv(g.conv(x, inside, width, 3, step), width, width, after="")
            short = x if inside == width and step == 1 else g.conv(x, inside, width, 1, step, after="")
            x = g.add("Relu", g.add("Add", y, short))
        before = width
    return g.model(name, "resnet", g.classify(x, before, 100))


def _mobilenet(name: str, widths: Sequence[int], side: int, grow: int = 4) -> LiveModel:
    g = _Graph()
    x, before = g.conv(g.input("x", 1, 3, side, side), 3, widths[0], 3, 2, after="Relu6"), widths[0]
    for number, width in enumerate(widths):
        for block in range(2):
            step, inside = (2 if number and not block else 1), (before if not block else width)
            wide = grow * inside
            y = g.conv(x, inside, wide, 1, after="Relu6")
            y = g.conv(y, wide, wide, 3, step, groups=wide, after="Relu6")
            y = g.conv(y, wide, width, 1, after="")
            x = g.add("Add", x, y) if step == 1 and inside == width else y
        before = width
    return g.model(name, "mobilenet", g.classify(x, before, 100))


def _efficientnet() -> LiveModel:
    g = _Graph()
    x, before = g.conv(g.input("x", 1, 3, 128, 128), 3, 24, 3, 2, after="Silu"), 24
    for width in (24, 40, 80, 112):
        wide, narrow = 4 * before, before // 4
        y = g.conv(g.conv(x, before, wide, 1, after="Silu"), wide, wide, 5, 2, groups=wide, after="Silu")
        squeezed = g.conv(g.add("GlobalAveragePool", y), wide, narrow, 1, after="Silu")
        y = g.add("Mul", y, g.conv(squeezed, narrow, wide, 1, after="Sigmoid"))
        x, before = g.conv(y, wide, width, 1, after=""), width
    return g.model("efficientnet", "efficientnet", g.classify(x, before, 100))


def _vgg() -> LiveModel:
    g = _Graph()
    x, before = g.input("x", 1, 3, 64, 64), 3
    for width in (32, 64, 128, 256):
        for _ in range(2):
            x, before = g.conv(x, before, width), width
        x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.dense(g.add("Flatten", x), 256 * 16, 512, "Relu")
    return g.model("vgg", "vgg", g.dense(x, 512, 100))


def _squeezenet() -> LiveModel:
    g = _Graph()
    x, before = g.conv(g.input("x", 1, 3, 128, 128), 3, 64, 3, 2), 64
    for number, narrow in enumerate((16, 16, 32, 48)):
        if number % 2 == 0:
            x = g.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2])
        y = g.conv(x, before, narrow, 1)
        x = g.add("Concat", g.conv(y, narrow, 4 * narrow, 1), g.conv(y, narrow, 4 * narrow), axis=1)
        before = 8 * narrow
    return g.model("squeezenet", "squeezenet", g.classify(x, before, 100))


def _densenet() -> LiveModel:
    g = _Graph()
    x, before = g.conv(g.input("x", 1, 3, 96, 96), 3, 48, 7, 2), 48
    for block in range(3):
        for _ in range(4):
            y = g.conv(g.conv(x, before, 96, 1), 96, 24)
            x, before = g.add("Concat", x, y, axis=1), before + 24
        if block < 2:
            x, before = g.conv(x, before, before // 2, 1), before // 2
            x = g.add("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    return g.model("densenet", "densenet", g.classify(x, before, 100))


def _shufflenet() -> LiveModel:
    g = _Graph()
    side, width, groups = 32, 96, 4
    x = g.conv(g.input("x", 1, 3, 4 * side, 4 * side), 3, width, 3, 4)
    split = g.constant([-1, groups, width // groups, side, side], np.int64)
    joined = g.constant([-1, width, side, side], np.int64)
    for _ in range(6):
        y = g.conv(x, width, width, 1, groups=groups)
        y = g.add("Transpose", g.add("Reshape", y, split), perm=[0, 2, 1, 3, 4])
        y = g.conv(g.add("Reshape", y, joined), width, width, 3, groups=width, after="")
        x = g.add("Relu", g.add("Add", x, g.conv(y, width, width, 1, groups=groups, after="")))
    return g.model("shufflenet", "shufflenet", g.classify(x, width, 100))


def _convnext() -> LiveModel:
    g = _Graph()
    width, x = 96, g.input("x", 1, 3, 96, 96)
    x = g.add("Conv", x, g.weight(width, 3, 4, 4), strides=[4, 4])
    for _ in range(4):
        y = g.add("Conv", x, g.weight(width, 1, 7, 7), group=width, pads=[3] * 4)
        y = g.norm(g.add("Transpose", y, perm=[0, 2, 3, 1]), width)
        y = g.dense(g.dense(y, width, 4 * width, "Gelu"), 4 * width, width)
        x = g.add("Add", x, g.add("Transpose", y, perm=[0, 3, 1, 2]))
    return g.model("convnext", "convnext", g.classify(x, width, 100))


def _unet() -> LiveModel:
    g = _Graph()
    widths, x, kept = (16, 32, 64), g.input("x", 1, 3, 96, 96), []
    before = 3
    for width in widths:
        x, before = g.conv(g.conv(x, before, width), width, width), width
        kept.append(x)
        x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x, before = g.conv(x, before, 128), 128
    for width, across in zip(widths[::-1], kept[::-1], strict=True):
        x = g.add("ConvTranspose", x, g.weight(before, width, 2, 2), strides=[2, 2])
        x, before = g.conv(g.add("Concat", x, across, axis=1), 2 * width, width), width
    return g.model("unet", "unet", g.conv(x, before, 4, 1, after="Sigmoid"))


def _super_resolution() -> LiveModel:
    g = _Graph()
    x = g.conv(g.input("x", 1, 1, 96, 96), 1, 64, 5, after="Tanh")
    x = g.conv(g.conv(x, 64, 32, after="Tanh"), 32, 9, after="")
    return g.model("super-resolution", "super-resolution", g.add("DepthToSpace", x, blocksize=3))


def _detector() -> LiveModel:
    """A pyramid of features with heads at three scales, joined."""
    g = _Graph()
    x, levels = g.conv(g.input("x", 1, 3, 160, 160), 3, 16, 3, 2, after="Silu"), []
    before = 16
    for width in (32, 64, 128):
        x = g.conv(g.conv(x, before, width, 3, 2, after="Silu"), width, width, 1, after="Silu")
        levels.append((x, width))
        before = width
    up, found = "", []
    for x, width in levels[::-1]:
        y = g.conv(x, width, 64, 1, after="Silu")
        if up:
            y = g.add("Add", y, g.add("Resize", up, "", g.constant([1, 1, 2, 2]), mode="nearest"))
        up = y
        head = g.conv(g.conv(y, 64, 64, after="LeakyRelu"), 64, 24, 1, after="Sigmoid")
        found.append(g.add("Reshape", head, g.constant([0, 24, -1], np.int64)))
    return g.model("detector", "detector", g.add("Concat", *found, axis=2))


def _bert(name: str, width: int, layers: int, length: int) -> LiveModel:
    g = _Graph()
    ids = g.input("ids", 1, length, dtype=_INT64)
    x = g.norm(g.add("Add", g.add("Gather", g.weight(4000, width), ids), g.weight(length, width)), width)
    for _ in range(layers):
        x = g.encoder(x, width, width // 32, length)
    return g.model(name, "bert", g.dense(g.add("ReduceMean", x, axes=[1], keepdims=0), width, 32))


def _vit() -> LiveModel:
    g = _Graph()
    width = 128
    x = g.add("Conv", g.input("x", 1, 3, 128, 128), g.weight(width, 3, 16, 16), strides=[16, 16])
    x = g.add("Transpose", g.add("Reshape", x, g.constant([-1, width, 64], np.int64)), perm=[0, 2, 1])
    for _ in range(3):
        x = g.encoder(x, width, 4, 64)
    return g.model("vit", "vit", g.dense(g.add("ReduceMean", x, axes=[1], keepdims=0), width, 100))


def _mixer() -> LiveModel:
    g = _Graph()
    width, length, x = 128, 64, g.input("x", 1, 64, 48)
    x = g.dense(x, 48, width)
    for _ in range(4):
        y = g.add("Transpose", g.norm(x, width), perm=[0, 2, 1])
        y = g.dense(g.dense(y, length, 128, "Gelu"), 128, length)
        x = g.add("Add", x, g.add("Transpose", y, perm=[0, 2, 1]))
        x = g.add("Add", x, g.dense(g.dense(g.norm(x, width), width, 512, "Gelu"), 512, width))
    return g.model("mixer", "mixer", g.dense(g.add("ReduceMean", x, axes=[1], keepdims=0), width, 100))


def _perceptron(name: str, width: int, layers: int) -> LiveModel:
    g = _Graph()
    x = g.input("x", 1, width)
    for _ in range(layers):
        x = g.add("Relu", g.add("Gemm", x, g.weight(width, width), g.weight(width)))
    return g.model(name, "perceptron", x)


def _recommender() -> LiveModel:
    """Embeddings of 16 categories, their products, and a perceptron."""
    g = _Graph()
    numbers, ids = g.input("numbers", 1, 13), g.input("ids", 1, 16, dtype=_INT64)
    rows = g.add(
        "Concat",
        g.add("Gather", g.weight(50000, 32), ids),
        g.add("Unsqueeze", g.dense(g.dense(numbers, 13, 64, "Relu"), 64, 32, "Relu"), g.constant([1], np.int64)),
        axis=1,
    )
    products = g.add("MatMul", rows, g.add("Transpose", rows, perm=[0, 2, 1]))
    flat = g.add("Reshape", products, g.constant([-1, 17 * 17], np.int64))
    return g.model("recommender", "recommender", g.dense(g.dense(flat, 289, 256, "Relu"), 256, 1, "Sigmoid"))


def _recurrent(operator: str, gates: int, width: int, steps: int) -> LiveModel:
    g = _Graph()
    x = g.add("Transpose", g.input("x", 1, steps, width), perm=[1, 0, 2])
    for _ in range(2):
        weights = g.weight(1, gates * width, width), g.weight(1, gates * width, width)
        y = g.add(operator, x, *weights, hidden_size=width)
        x = g.add("Squeeze", y, g.constant([1], np.int64))
    name = operator.lower()
    return g.model(name, name, g.dense(g.add("ReduceMean", x, axes=[0], keepdims=0), width, 32))


def _temporal() -> LiveModel:
    g = _Graph()
    x, width = g.input("x", 1, 64, 256), 64
    for dilation in (1, 2, 4, 8, 16):
        y = g.add("Conv", x, g.weight(width, width, 3), pads=[dilation] * 2, dilations=[dilation])
        x = g.add("Relu", g.add("Add", x, y))
    return g.model("temporal", "temporal", g.classify(x, width, 20))


def _loop() -> LiveModel:
    """24 trips of a perceptron over its own output."""
    g, inner = _Graph(), _Graph("inner")
    width = 128
    y = inner.add("Tanh", inner.add("Add", inner.add("MatMul", "state", g.weight(width, width)), "bias"))
    go = inner.add("Identity", "go_on")
    body = helper.make_graph(
        inner.nodes, "body",
        [helper.make_tensor_value_info("trip", _INT64, []),
         helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
         helper.make_tensor_value_info("state", _FLOAT, ["n", width])],
        [helper.make_tensor_value_info(go, TensorProto.BOOL, []),
         helper.make_tensor_value_info(y, _FLOAT, ["n", width])],
        [numpy_helper.from_array(np.full(width, 0.1, np.float32), "bias")],
    )  # fmt: skip
    x = g.add("Relu", g.input("x", 1, width))
    return g.model("loop", "loop", g.add("Loop", g.constant(24, np.int64), "", x, body=body))


def _scan() -> LiveModel:
    """A recurrent cell written out, over 32 steps."""
    g, inner = _Graph(), _Graph("inner")
    width, steps = 96, 32
    carried = inner.add("MatMul", "state", g.weight(width, width))
    y = inner.add("Tanh", inner.add("Add", carried, inner.add("MatMul", "step", g.weight(width, width))))
    out = inner.add("Identity", y)
    rows = [helper.make_tensor_value_info(name, _FLOAT, ["n", width]) for name in ("state", "step")]
    results = [helper.make_tensor_value_info(name, _FLOAT, ["n", width]) for name in (y, out)]
    body = helper.make_graph(inner.nodes, "body", rows, results)
    x = g.add("Transpose", g.input("x", 1, steps, width), perm=[1, 0, 2])
    start = g.add("ReduceMean", x, axes=[0], keepdims=0)
    return g.model("scan", "scan", g.add("Scan", start, x, outputs=2, body=body, num_scan_inputs=1))


def _branch() -> LiveModel:
    """One of two perceptrons, as the input's sum says."""
    g = _Graph()
    width = 256
    x = g.add("Relu", g.input("x", 1, width))
    branches = dict[str, Any]()
    for name, layers in (("then_branch", 6), ("else_branch", 2)):
        inner, y = _Graph(name), x
        for _ in range(layers):
            y = inner.add("Relu", inner.add("MatMul", y, g.weight(width, width)))
        result = helper.make_tensor_value_info(y, _FLOAT, ["n", width])
        branches[name] = helper.make_graph(inner.nodes, name, [], [result])
    condition = g.add("Greater", g.add("ReduceSum", x, keepdims=0), g.constant(0.0))
    return g.model("branch", "branch", g.add("If", condition, outputs=1, **branches))


def _spectrum() -> LiveModel:
    """Elementwise work on long rows, as in signal processing."""
    g = _Graph()
    x = g.input("x", 1, 256, 512)
    for _ in range(3):
        y = g.add("Sqrt", g.add("Add", g.add("Mul", x, x), g.constant(1e-3)))
        y = g.add("Sub", y, g.add("ReduceMean", y, axes=[-1], keepdims=1))
        x = g.add("Tanh", g.add("Div", y, g.add("Exp", g.add("Neg", x))))
    return g.model("spectrum", "spectrum", g.add("Softmax", x, axis=-1))


_WHEELS: Mapping[str, tuple[str, Shapes, tuple[str, ...]]] = {
    "det": ("paddle-ocr", {"x": (1, 3, 160, 256)}, ("x",)),
    "rec": ("paddle-ocr", {"x": (1, 3, 48, 160)}, ("x",)),
    "cls": ("paddle-ocr", {"x": (1, 3, 48, 192)}, ("x",)),
    "magika": ("magika", {"bytes": (1, 2048)}, ("bytes",)),
    "vad": ("silero-vad", {"input": (1, 576), "state": (2, 1, 128), "sr": ()}, ()),
}


def _from_wheel(name: str) -> LiveModel:
    family, shapes, batched = _WHEELS[name]
    return LiveModel(name, family, real_models()[name].read_bytes(), shapes, batched)


MODELS: Mapping[str, Callable[[], LiveModel]] = {
    **{name: partial(_from_wheel, name) for name in _WHEELS},
    "resnet": partial(_resnet, "resnet", (32, 64, 128), 112),
    "resnet-wide": partial(_resnet, "resnet-wide", (64, 128, 256, 512), 64),
    "mobilenet": partial(_mobilenet, "mobilenet", (16, 24, 40, 80), 128),
    "mobilenet-small": partial(_mobilenet, "mobilenet-small", (8, 16, 32), 96, 3),
    "efficientnet": _efficientnet,
    "vgg": _vgg,
    "squeezenet": _squeezenet,
    "densenet": _densenet,
    "shufflenet": _shufflenet,
    "convnext": _convnext,
    "unet": _unet,
    "super-resolution": _super_resolution,
    "detector": _detector,
    "bert": partial(_bert, "bert", 256, 2, 64),
    "bert-long": partial(_bert, "bert-long", 128, 3, 192),
    "vit": _vit,
    "mixer": _mixer,
    "perceptron": partial(_perceptron, "perceptron", 1024, 3),
    "perceptron-small": partial(_perceptron, "perceptron-small", 128, 4),
    "recommender": _recommender,
    "lstm": partial(_recurrent, "LSTM", 4, 128, 32),
    "gru": partial(_recurrent, "GRU", 3, 96, 48),
    "temporal": _temporal,
    "loop": _loop,
    "scan": _scan,
    "branch": _branch,
    "spectrum": _spectrum,
}
"""By name: what makes or reads the model."""

"""Small models of common architectures with open batch axes, which no wheel brings."""

import io
import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike
from onnx import NodeProto, TensorProto, helper, numpy_helper

from harness.models.engine_cases import model, value

Shapes = Mapping[str, tuple[int, ...]]


class _Weights:
    """Weights of a model: small, and the same at each call."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(5)
        self.tensors: list[TensorProto] = []

    def __call__(self, name: str, *shape: int) -> str:
        values = self._rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
        return self.keep(name, values)

    def keep(self, name: str, values: ArrayLike) -> str:
        self.tensors.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name


def perceptron() -> bytes:
    """Two dense layers."""
    w = _Weights()
    nodes = [
        helper.make_node("Gemm", ["x", w("w1", 16, 32), w("b1", 32)], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", w("w2", 32, 4), w("b2", 4)], ["y"]),
    ]
    return model(nodes, [value("x", "FP32", ["n", 16])], [value("y", "FP32", ["n", 4])], w.tensors)


def separable() -> bytes:
    """A depthwise convolution and a pointwise one, as in MobileNet."""
    w = _Weights()
    nodes = [
        helper.make_node("Conv", ["x", w("w1", 8, 1, 3, 3)], ["a"], group=8, pads=[1, 1, 1, 1]),
        helper.make_node("Clip", ["a", w.keep("low", 0), w.keep("high", 6)], ["c"]),
        helper.make_node("Conv", ["c", w("w2", 16, 8, 1, 1)], ["b"]),
        helper.make_node("GlobalAveragePool", ["b"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    return model(nodes, [value("x", "FP32", ["n", 8, 16, 16])], [value("y", "FP32", ["n", 16])], w.tensors)


def attention() -> bytes:
    """One head of self-attention, with layer normalisation."""
    w = _Weights()
    nodes: list[NodeProto] = [
        helper.make_node("MatMul", ["x", w(f"w_{name}", 16, 16)], [name]) for name in ("q", "k", "v")
    ]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Mul", ["scores", w.keep("scale", 0.25)], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["share"], axis=-1),
        helper.make_node("MatMul", ["share", "v"], ["mixed"]),
        helper.make_node("Add", ["mixed", "x"], ["sum"]),
        helper.make_node(
            "LayerNormalization",
            ["sum", w.keep("gain", np.ones(16)), w.keep("bias", np.zeros(16))],
            ["y"],
        ),
    ]
    return model(nodes, [value("x", "FP32", ["n", 12, 16])], [value("y", "FP32", ["n", 12, 16])], w.tensors)


def autoencoder() -> bytes:
    """Down by a strided convolution, up by a transposed one, with a connection across."""
    w = _Weights()
    nodes = [
        helper.make_node("Conv", ["x", w("w1", 8, 4, 3, 3)], ["d"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Sigmoid", ["d"], ["s"]),
        helper.make_node("ConvTranspose", ["s", w("w2", 8, 4, 2, 2)], ["u"], strides=[2, 2]),
        helper.make_node("Concat", ["u", "x"], ["y"], axis=1),
    ]
    return model(nodes, [value("x", "FP32", ["n", 4, 16, 16])], [value("y", "FP32", ["n", 8, 16, 16])], w.tensors)


def pyramid() -> bytes:
    """Pooled features at two scales, added up."""
    w = _Weights()
    nodes = [
        helper.make_node("Conv", ["x", w("w1", 4, 4, 3, 3)], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Resize", ["p", "", w.keep("scales", [1, 1, 2, 2])], ["u"], mode="nearest"),
        helper.make_node("Add", ["u", "a"], ["s"]),
        helper.make_node("LeakyRelu", ["s"], ["y"], alpha=0.1),
    ]
    return model(nodes, [value("x", "FP32", ["n", 4, 16, 16])], [value("y", "FP32", ["n", 4, 16, 16])], w.tensors)


def angles() -> bytes:
    """An operator that few accelerators have, between two that all have."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node("Acos", ["t"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    return model(nodes, [value("x", "FP32", ["n", 8])], [value("y", "FP32", ["n", 8])])


def samples_of(shape: tuple[int, ...], count: int = 16) -> bytes:
    """An .npz of inputs `x` of that shape, whose first axis is the batch: uniform noise, the same at each call."""
    file = io.BytesIO()
    np.savez(file, x=np.random.default_rng(3).random((count, *shape[1:]), dtype=np.float32))
    return file.getvalue()


ARCHITECTURES: Mapping[str, tuple[Callable[[], bytes], Shapes]] = {
    "perceptron": (perceptron, {"x": (1, 16)}),
    "separable": (separable, {"x": (1, 8, 16, 16)}),
    "attention": (attention, {"x": (1, 12, 16)}),
    "autoencoder": (autoencoder, {"x": (1, 4, 16, 16)}),
    "pyramid": (pyramid, {"x": (1, 4, 16, 16)}),
    "angles": (angles, {"x": (1, 8)}),
}
"""By name: what makes the model, and the shapes of its inputs."""

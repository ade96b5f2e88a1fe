"""Writes the small graphs of the capability probe into shoal/agent/worker/graphs; run with the `onnx` package at hand.

Weights are ConstantOfShape nodes, which the runtime folds into constants when it opens the graph: so the files stay a
few hundred bytes and the kernels run as with real weights (prepacked). Axis `n` is free, so that the probe can make the
work large enough for a fast device.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

OPSET = 18
IR_VERSION = 9
WIDTH = 768
"""K and N of the matrix product [n, K] x [K, N]."""
CHANNELS, SIDE = 64, 56
"""3x3 convolution over [n, CHANNELS, SIDE, SIDE] to as many channels: a layer of ResNet-50."""
CHAIN = 65
LOAD_ELEMENTS = 2**22


def constant(name: str, shape: list[int], kind: int, value: float) -> list[NodeProto]:
    dims = helper.make_node(
        "Constant", [], [f"{name}_shape"], value=helper.make_tensor("d", TensorProto.INT64, [len(shape)], shape)
    )
    fill = helper.make_tensor("v", kind, [1], [value])
    return [dims, helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=fill)]


def scalar(name: str, kind: int, value: float) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, [], [value]))


def quantisation(names: Iterable[str]) -> list[NodeProto]:
    nodes = []
    for name in names:
        nodes.append(scalar(f"{name}_scale", TensorProto.FLOAT, 0.02))
        nodes.append(scalar(f"{name}_zero", TensorProto.INT8 if name == "w" else TensorProto.UINT8, 0))
    return nodes


def matmul(kind: int) -> list[NodeProto]:
    return [*constant("w", [WIDTH, WIDTH], kind, 0.01), helper.make_node("MatMul", ["x", "w"], ["y"])]


def conv(kind: int) -> list[NodeProto]:
    weights = constant("w", [CHANNELS, CHANNELS, 3, 3], kind, 0.01)
    return [*weights, helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]


def matmul_int8() -> list[NodeProto]:
    names = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero"]
    return [
        *constant("w", [WIDTH, WIDTH], TensorProto.INT8, 3),
        *quantisation("xwy"),
        helper.make_node("QLinearMatMul", names, ["y"]),
    ]


def conv_int8() -> list[NodeProto]:
    names = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero"]
    return [
        *constant("w", [CHANNELS, CHANNELS, 3, 3], TensorProto.INT8, 3),
        *quantisation("xwy"),
        helper.make_node("QLinearConv", names, ["y"], pads=[1, 1, 1, 1]),
    ]


def chain(length: int) -> list[NodeProto]:
    names = ["x", *(f"h{n}" for n in range(length - 1)), "y"]
    return [helper.make_node("Neg", [a], [b]) for a, b in pairwise(names)]


def write(
    folder: Path, name: str, nodes: list[NodeProto], kind: int, shape: list[int | str], out: list[int | str]
) -> None:
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, out)],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="shoal"
    )
    onnx.checker.check_model(model, full_check=True)
    (folder / f"{name}.onnx").write_bytes(model.SerializeToString(deterministic=True))


def main(folder: Path) -> None:
    kinds = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16, "fp64": TensorProto.DOUBLE}
    rows: list[int | str] = ["n", WIDTH]
    images: list[int | str] = ["n", CHANNELS, SIDE, SIDE]
    for precision, kind in kinds.items():
        write(folder, f"matmul_{precision}", matmul(kind), kind, rows, rows)
        write(folder, f"conv_{precision}", conv(kind), kind, images, images)
    write(folder, "matmul_int8", matmul_int8(), TensorProto.UINT8, rows, rows)
    write(folder, "conv_int8", conv_int8(), TensorProto.UINT8, images, images)
    add = [helper.make_node("Add", ["x", "x"], ["y"])]
    write(folder, "elementwise", add, TensorProto.FLOAT, ["n"], ["n"])
    join = [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)]
    write(folder, "copy", join, TensorProto.FLOAT, ["n"], ["m"])
    write(folder, "launch", chain(1), TensorProto.FLOAT, [1], [1])
    write(folder, "chain", chain(CHAIN), TensorProto.FLOAT, [1], [1])
    # without its weights `w` [LOAD_ELEMENTS]: the probe appends them, to time how fast a model of some size is opened
    load = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "load",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [LOAD_ELEMENTS])],
    )
    model = helper.make_model(load, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    (folder / "load.onnx").write_bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main(Path(__file__).parent / "shoal/agent/worker/graphs")

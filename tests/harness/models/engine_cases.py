"""Small generated ONNX models, and real ones from installed wheels."""

import hashlib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

KINDS = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def value(name: str, kind: str, shape: Sequence[int | str | None] | None) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, KINDS[kind], shape)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
) -> bytes:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(constants))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return made.SerializeToString(deterministic=True)


def identity(kinds: Sequence[str]) -> bytes:
    """For each kind an input `x_KIND` [n, 3] that comes out as `y_KIND`."""
    nodes = [helper.make_node("Identity", [f"x_{kind}"], [f"y_{kind}"]) for kind in kinds]
    inputs = [value(f"x_{kind}", kind, ["n", 3]) for kind in kinds]
    return model(nodes, inputs, [value(f"y_{kind}", kind, ["n", 3]) for kind in kinds])


def add_one() -> bytes:
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    node = helper.make_node("Add", ["x", "one"], ["y"])
    return model([node], [value("x", "FP32", ["n"])], [value("y", "FP32", ["n"])], [one])


def layers(
    count: int, side: int, before: Sequence[NodeProto] = (), source: ValueInfoProto | None = None,
    tables: Sequence[TensorProto] = (), rows: str = "n",
) -> bytes:  # fmt: skip
    """`y`: `x` [n, side] after that many layers of side x side weights. A run of one row reads as many weights as a run
    of several, so that batches pay. `before` makes `h` of `source` with `tables`, and `h` takes the place of `x`;
    `rows` names the first axis of `y`."""
    rng = np.random.default_rng(0)
    names = ["h" if before else "x", *(f"h{index}" for index in range(1, count)), "y"]
    nodes, constants = list(before), list(tables)
    for index in range(count):
        nodes.append(helper.make_node("MatMul", [names[index], f"w{index}"], [names[index + 1]]))
        weights = rng.standard_normal((side, side), np.float32) / np.float32(np.sqrt(side))
        constants.append(numpy_helper.from_array(weights, f"w{index}"))
    taken = source or value("x", "FP32", ["n", side])
    return model(nodes, [taken], [value("y", "FP32", [rows, side])], constants)


def lookup(words: int, count: int, side: int) -> bytes:
    """`layers` of the row of a table that `i` [n] says. The runtime refuses another row than the table has."""
    table = numpy_helper.from_array(np.random.default_rng(1).random((words, side), np.float32), "table")
    before = [helper.make_node("Gather", ["table", "i"], ["h"])]
    return layers(count, side, before, value("i", "INT64", ["n"]), [table])


def mixing(how: str, count: int, side: int) -> bytes:
    """`layers` in which a row's answer depends on the other rows of its run: by their `mean`, or a `scale` that is
    taken over all, as models of dynamic int8 have it. Or (`twice`) there are more rows than came."""
    match how:
        case "mean":
            axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
            before = [
                helper.make_node("ReduceMean", ["x", "axes"], ["m"], keepdims=1),
                helper.make_node("Sub", ["x", "m"], ["h"]),
            ]
            return layers(count, side, before, tables=[axes])
        case "scale":
            before = [
                helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
                helper.make_node("DequantizeLinear", ["q", "s", "z"], ["h"]),
            ]
            return layers(count, side, before)
        case _:
            return layers(count, side, [helper.make_node("Concat", ["x", "x"], ["h"], axis=0)], rows="m")


def sequences(how: str, count: int, side: int) -> bytes:
    """`layers` of each item of `x` [n, s, side], and what is made of them along s: `each` [n, s, side], or [n, side]:
    their `sum`, `mean`, `max`, the `last`, or the mean of those that `mask` [n, s] says (`masked`). `nameless`: as
    `each`, but nobody knows how its axes are called. `two`: as `each`, of [n, s, t, side]. `words`: as `each`, of the
    rows of a table of 64 that `i` [n, s] says; the runtime refuses others."""
    rng = np.random.default_rng(0)
    nodes, constants = [], [numpy_helper.from_array(np.array([1], np.int64), "one")]
    names = ["x", *(f"h{index}" for index in range(count))]
    for index in range(count):
        nodes.append(helper.make_node("MatMul", [names[index], f"w{index}"], [names[index + 1]]))
        weights = rng.standard_normal((side, side), np.float32) / np.float32(np.sqrt(side))
        constants.append(numpy_helper.from_array(weights, f"w{index}"))
    h = names[-1]
    others: dict[str, list[int | str | None]] = {"nameless": ["n", None, side], "two": ["n", "s", "t", side]}
    shape = others.get(how, ["n", "s", side])
    inputs = [value("x", "FP32", shape)]
    pooled: list[int | str | None] = ["n", side]
    match how:
        case "words":
            table = np.random.default_rng(1).random((64, side), np.float32)
            constants.append(numpy_helper.from_array(table, "table"))
            nodes.insert(0, helper.make_node("Gather", ["table", "i"], ["x"]))
            nodes.append(helper.make_node("Identity", [h], ["y"]))
            inputs, pooled = [value("i", "INT64", ["n", "s"])], shape
        case "sum" | "mean" | "max":
            nodes.append(helper.make_node(f"Reduce{how.title()}", [h, "one"], ["y"], keepdims=0))
        case "last":
            constants.append(numpy_helper.from_array(np.array(-1, np.int64), "end"))
            nodes.append(helper.make_node("Gather", [h, "end"], ["y"], axis=1))
        case "masked":
            inputs.append(value("mask", "INT64", ["n", "s"]))
            constants.append(numpy_helper.from_array(np.array([2], np.int64), "two"))
            nodes += [
                helper.make_node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT),
                helper.make_node("Unsqueeze", ["m", "two"], ["weights"]),
                helper.make_node("Mul", [h, "weights"], ["weighted"]),
                helper.make_node("ReduceSum", ["weighted", "one"], ["sums"], keepdims=0),
                helper.make_node("ReduceSum", ["m", "one"], ["counts"], keepdims=1),
                helper.make_node("Div", ["sums", "counts"], ["y"]),
            ]
        case _:
            nodes.append(helper.make_node("Identity", [h], ["y"]))
            pooled = shape
    return model(nodes, inputs, [value("y", "FP32", pooled)], constants)


def summing(noise: float = 0.0) -> bytes:
    """`y`: the sum of every `x` of its session so far, which goes in as `s` and comes out as `sn`. noise: added to each
    step's `y`, for a wrong one."""
    nodes = [
        helper.make_node("Add", ["x", "s"], ["sn"]),
        helper.make_node("Add", ["sn", "noise"], ["y"]),
    ]
    constant = numpy_helper.from_array(np.full(1, noise, np.float32), "noise")
    inputs = [value("x", "FP32", [1, 2]), value("s", "FP32", [1, 2])]
    return model(nodes, inputs, [value("y", "FP32", [1, 2]), value("sn", "FP32", [1, 2])], [constant])


def fill() -> bytes:
    """`y`: as many zeros as `x` says. A small request that wants as much memory as it likes."""
    node = helper.make_node("ConstantOfShape", ["x"], ["y"])
    return model([node], [value("x", "INT64", [1])], [value("y", "FP32", ["m"])])


def heavy(megabytes: int) -> bytes:
    """x plus weights of that size in MiB."""
    weights = numpy_helper.from_array(np.ones(megabytes * 2**18, np.float32), "w")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    return model([node], [value("x", "FP32", [1])], [value("y", "FP32", [megabytes * 2**18])], [weights])


def loop(trips: int) -> bytes:
    """Doubles x as often as `trips` says, a trip at a time; `trips` -1: as often as the input `n` says."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["v", "v"], ["doubled"])],
        "body",
        [value("i", "INT64", []), value("go", "BOOL", []), value("v", "FP32", [1])],
        [value("go_on", "BOOL", []), value("doubled", "FP32", [1])],
    )
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    inputs = [value("x", "FP32", [1])]
    constants = []
    if trips < 0:
        inputs.append(value("n", "INT64", []))
    else:
        constants.append(helper.make_tensor("n", TensorProto.INT64, [], [trips]))
    return model([node], inputs, [value("y", "FP32", [1])], constants)


def square() -> bytes:
    """The sum of an n x n matrix of zeros times itself, n as the input says: one operator for n^3 multiplications."""
    nodes = [
        helper.make_node("ConstantOfShape", ["n"], ["a"]),
        helper.make_node("MatMul", ["a", "a"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    return model(nodes, [value("n", "INT64", [2])], [value("y", "FP32", [])])


def divide() -> bytes:
    """x / d in int32. The least integer over -1 raises SIGFPE inside the runtime on x86."""
    node = helper.make_node("Div", ["x", "d"], ["y"])
    kind = "INT32"
    return model([node], [value("x", kind, ["n"]), value("d", kind, ["n"])], [value("y", kind, ["n"])])


def crash_at_load() -> bytes:
    """The same division between constants: the runtime folds it when it opens the model."""
    least = helper.make_tensor("a", TensorProto.INT32, [1], [-(2**31)])
    minus = helper.make_tensor("b", TensorProto.INT32, [1], [-1])
    nodes = [helper.make_node("Div", ["a", "b"], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    return model(nodes, [value("x", "INT32", [1])], [value("y", "INT32", [1])], [least, minus])


def packaged_model(distribution: str, ending: str) -> Path:
    """A model file inside an installed wheel."""
    for path in metadata.files(distribution) or ():
        if str(path).endswith(ending):
            return Path(str(path.locate()))
    raise LookupError(f"{distribution} holds no {ending}")


def recogniser() -> Path:
    return packaged_model("rapidocr-onnxruntime", "ch_PP-OCRv4_rec_infer.onnx")


def magika() -> Path:
    return packaged_model("magika", "model.onnx")


def dense(seed: int = 1, *, noise: float = 0.0, kind: str = "FP32", activation: str = "Relu") -> bytes:
    """x [n, 16] through two dense layers to y [n, 8], and the best class. noise: of the weights, relative to each."""
    dice = np.random.default_rng(seed)
    weights = {"a": dice.standard_normal((16, 32)), "b": dice.standard_normal((32, 8))}
    dtype = helper.tensor_dtype_to_np_dtype(KINDS[kind])
    constants = [
        numpy_helper.from_array((w * (1 + noise * dice.standard_normal(w.shape))).astype(dtype), name)
        for name, w in weights.items()
    ]
    nodes = [
        helper.make_node("Cast", ["x"], ["x_"], to=KINDS[kind]),
        helper.make_node("MatMul", ["x_", "a"], ["h"]),
        helper.make_node(activation, ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["y_"]),
        helper.make_node("Cast", ["y_"], ["y"], to=TensorProto.FLOAT),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1),
    ]
    outputs = [value("y", "FP32", ["n", 8]), value("best", "INT64", ["n", 1])]
    return model(nodes, [value("x", "FP32", ["n", 16])], outputs, constants)


def perturb_weights(data: bytes, noise: float, seed: int = 1) -> bytes:
    """The same graph with its floating-point weights off by a relative error of `noise` each (normal, from `seed`)."""
    found = onnx.load_from_string(data)
    dice = np.random.default_rng(seed)
    for initializer in (*found.graph.initializer, *_constants(found)):
        weights = numpy_helper.to_array(initializer)
        if weights.dtype == np.float32 and weights.size > 1:
            off = weights * (1 + noise * dice.standard_normal(weights.shape))
            initializer.CopyFrom(numpy_helper.from_array(off.astype(np.float32), initializer.name))
    return found.SerializeToString(deterministic=True)


def _constants(found: onnx.ModelProto) -> list[TensorProto]:
    """Weights that an exporter left in Constant nodes."""
    nodes = (node for node in found.graph.node if node.op_type == "Constant")
    return [attribute.t for node in nodes for attribute in node.attribute if attribute.name == "value"]


def round_weights(data: bytes, kind: Any) -> bytes:
    """The same graph, its floating-point weights rounded to that type of number and back."""
    found = onnx.load_from_string(data)
    for initializer in (*found.graph.initializer, *_constants(found)):
        weights = numpy_helper.to_array(initializer)
        if weights.dtype == np.float32 and weights.size > 1:
            back = weights.astype(kind).astype(np.float32)
            initializer.CopyFrom(numpy_helper.from_array(back, initializer.name))
    return found.SerializeToString(deterministic=True)


def quantise_weights(data: bytes, folder: Path, *operators: str) -> bytes:
    """ONNX Runtime's own dynamic quantisation to int8 of the weights that these operators multiply, by default of
    MatMul. folder: for its files."""
    from onnxruntime.quantization import quantize_dynamic

    found = onnx.load_from_string(data)
    for node in [node for node in found.graph.node if node.op_type == "Constant" and node.attribute[0].name == "value"]:
        constant = node.attribute[0].t
        constant.name = node.output[0]
        found.graph.initializer.append(constant)
        found.graph.node.remove(node)
    whole, made = folder / "whole.onnx", folder / "int8.onnx"
    onnx.save(found, whole)
    quantize_dynamic(whole, made, op_types_to_quantize=operators or ["MatMul"])
    return made.read_bytes()


def replace_operator(data: bytes, operator: str, other: str, which: int = -1) -> bytes:
    """The same graph with one of its operators replaced by another that takes as many inputs."""
    found = onnx.load_from_string(data)
    node = [node for node in found.graph.node if node.op_type == operator][which]
    node.op_type = other
    del node.attribute[:]
    return found.SerializeToString(deterministic=True)


def wrong_recognisers(right: bytes, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of text: perturbed weights, wrong precision, broken operators."""
    for seed, noise in enumerate((0.001, 0.01, 0.1)):
        yield f"weights off by {noise:g}", perturb_weights(right, noise, seed)
    yield "weights of fp16", round_weights(right, np.float16)
    yield "weights of bf16", round_weights(right, ml_dtypes.bfloat16)
    yield "weights of int8", quantise_weights(right, folder)
    for operator, other, which in (
        ("Sigmoid", "Tanh", 0), ("Mul", "Add", -1), ("ReduceMean", "ReduceSum", 0), ("Relu", "Abs", 0),
    ):  # fmt: skip
        yield f"{operator} {which} made {other}", replace_operator(right, operator, other, which)


def wrong_classifiers(right: bytes, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of files: the same."""
    for seed, noise in enumerate((0.1, 0.2, 0.5)):
        yield f"weights off by {noise:g}", perturb_weights(right, noise, seed)
    yield "weights of fp8", round_weights(right, ml_dtypes.float8_e4m3fn)
    yield "weights of fp8 with two bits", round_weights(right, ml_dtypes.float8_e5m2)
    yield "weights of int8", quantise_weights(right, folder)
    for operator, other, which in (("Tanh", "Sigmoid", 0), ("Max", "Min", 1), ("Sub", "Add", 0), ("Add", "Sub", 5)):
        yield f"{operator} {which} made {other}", replace_operator(right, operator, other, which)

"""Small ONNX models made to measure, honest and hostile, and the real ones that come inside wheels."""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Axes = Sequence[int | str | None]
SLOW_FLOPS = 2 * 2 * 64 * 64 * 3 * 3


def tensor(name: str, shape: Axes | None, dtype: int = FLOAT) -> ValueInfoProto:
    """An input or output; an axis is a length, a symbol or None (open)."""
    return helper.make_tensor_value_info(name, dtype, shape)


def ints(name: str, values: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.int64), name)


def weight(name: str, shape: Sequence[int], dtype: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def graph(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
) -> GraphProto:
    return helper.make_graph(nodes, "crafted", inputs, outputs, constants)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
    *,
    opset: int = 18,
    domains: Mapping[str, int] | None = None,
    functions: Sequence[FunctionProto] = (),
    metadata: Mapping[str, str] | None = None,
) -> ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*item) for item in (domains or {}).items())]
    made = helper.make_model(
        graph(nodes, inputs, outputs, constants),
        opset_imports=imports,
        functions=functions,
        ir_version=10,
        producer_name="crafted",
    )
    helper.set_model_props(made, dict(metadata or {}))
    return made


def relu() -> ModelProto:
    """The smallest honest model: y = max(x, 0), x [N, 4]."""
    return model([helper.make_node("Relu", ["x"], ["y"])], [tensor("x", ["N", 4])], [tensor("y", ["N", 4])])


def stateful_sum() -> ModelProto:
    """The smallest one with state: y = x + state, which is the next state too; x [N, 2]."""
    nodes = [helper.make_node("Add", ["x", "state"], ["y"]), helper.make_node("Identity", ["y"], ["next"])]
    return model(
        nodes,
        [tensor("x", ["N", 2]), tensor("state", ["N", 2])],
        [tensor("y", ["N", 2]), tensor("next", ["N", 2])],
    )


def slow(side: int = 256) -> ModelProto:
    """y = x, x [1, 4, 1, 1], after two convolutions of 64 channels whose kernels change nothing: `SLOW_FLOPS` for each
    point of a square, by default 10 GFLOP."""
    kernel = np.zeros((64, 64, 3, 3), np.float32)
    kernel[:, :, 1, 1] = np.eye(64, dtype=np.float32)
    around = [1, 1, 1, 1]
    nodes = [
        helper.make_node("Tile", ["x", "times"], ["wide"]),
        helper.make_node("Conv", ["wide", "kernel"], ["once"], pads=around),
        helper.make_node("Conv", ["once", "kernel"], ["twice"], pads=around),
        helper.make_node("Slice", ["twice", "first", "last", "axes"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(kernel, "kernel"),
        ints("times", [1, 16, side, side]),
        ints("first", [0, side // 2, side // 2]),
        ints("last", [4, side // 2 + 1, side // 2 + 1]),
        ints("axes", [1, 2, 3]),
    ]
    return model(nodes, [tensor("x", [1, 4, 1, 1])], [tensor("y", [1, 4, 1, 1])], constants)


def padded_model(size: int) -> bytes:
    """relu() with an initializer of `size` bytes that nothing reads and no compression shortens."""
    noise = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return with_constant(numpy_helper.from_array(noise, "padding"))


def with_constant(stored: TensorProto) -> bytes:
    """relu() with one more initializer, whatever it is."""
    made = relu()
    made.graph.initializer.append(stored)
    return bytes(made.SerializeToString())


def length_delimited_field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field, for files that no library would write."""
    size, length = len(content), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def file_in(package: str, name: str) -> Path:
    """A file that comes with an installed package, which is not imported."""
    found = find_spec(package)
    places = found.submodule_search_locations if found else None
    assert places, f"{package} is not installed"
    return Path(places[0]) / name


def real_models() -> dict[str, Path]:
    return {
        "det": file_in("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
        "rec": file_in("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
        "cls": file_in("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
        "magika": file_in("magika", "models/standard_v3_3/model.onnx"),
        "vad": file_in("silero_vad", "data/silero_vad.onnx"),
    }

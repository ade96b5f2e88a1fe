"""Types and shapes of one node's outputs, from what is known of its inputs.

ONNX's own inference function of the operator is asked, one node at a time, with the content of small constants; what it
lacks (operators of com.microsoft, values computed from shapes) is added here.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from shoal.coordinator.core.graph.contents import domain_of
from shoal.coordinator.core.graph.values import SMALL, UNKNOWN, Value, constant_of, of_array, of_type

MICROSOFT: Final = "com.microsoft"

_FOLDED: Final = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "Reshape", "Round", "ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
"""Operators that exporters compute shapes with: cheap, and no larger than their inputs and inferred output."""

_GROW: Final = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})

_LIKE_FIRST: Final = frozenset({
    "BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu", "QuickGelu", "GroupNorm", "SkipGroupNorm", "LayerNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding",
    "MultiHeadAttention", "GroupQueryAttention", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
    "Inverse", "BiasSoftmax", "BiasDropout", "GatedRelativePositionBias", "DecoderMaskedMultiHeadAttention",
})  # fmt: skip
"""com.microsoft operators whose first output is like the first input (ONNX Runtime's ContribOperators.md)."""


def attributes_of(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@cache
def schema_of(operator: str, opset: int, domain: str) -> defs.OpSchema | None:
    """The operator's definition at this opset. None: ONNX does not define it."""
    try:
        return defs.get_schema(operator, opset, domain)
    except defs.SchemaError:
        return None


def infer(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    """Values of the node's outputs, in order; UNKNOWN where nothing can be said or its inputs contradict each other.

    inputs: one per name in `node.input`, UNKNOWN for those left out. Control flow and calls are not for this function.
    """
    if node.op_type == "Constant":
        return (constant_of(attributes_of(node)),)
    if node.op_type == "Shape" and inputs and inputs[0].shape is not None:
        attributes = attributes_of(node)
        axes = inputs[0].shape[attributes.get("start", 0) : attributes.get("end")]
        return (of_array(np.asarray(axes, np.int64)),)
    if node.op_type == "Size" and inputs and inputs[0].elements is not None:
        return (of_array(np.asarray(inputs[0].elements, np.int64)),)
    known = _typed(node, inputs, opsets)
    return _folded(node, inputs, known, opsets) or known


def _typed(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    schema = schema_of(node.op_type, opsets.get(domain_of(node), 1), domain_of(node))
    if schema is None or not schema.has_type_and_shape_inference_function:
        return _contributed(node, inputs, opsets)
    types: dict[str, TypeProto] = {}
    content = {}
    for name, value in zip(node.input, inputs, strict=True):
        if name:
            types[name] = value.type_proto()
            if value.data is not None:
                content[name] = numpy_helper.from_array(value.data, name)
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        found = shape_inference.infer_node_outputs(schema, node, types, content, opset_imports=imports)
    except (shape_inference.InferenceError, RuntimeError, ValueError):
        return (UNKNOWN,) * len(node.output)
    return tuple(of_type(found[name]) if name in found else UNKNOWN for name in node.output)


def _contributed(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    """Operators of com.microsoft, whose definitions `onnx` does not carry."""
    first: Value = UNKNOWN
    if node.domain == MICROSOFT and inputs:
        attributes = attributes_of(node)
        lead = inputs[0]
        standard = {"FusedConv": "Conv", "FusedGemm": "Gemm"}.get(node.op_type)
        if node.op_type in _LIKE_FIRST:
            first = Value(lead.dtype, lead.shape)
        elif node.op_type in ("MatMulNBits", "MatMulBnb4") and lead.shape:
            first = Value(lead.dtype, (*lead.shape[:-1], int(attributes["N"])))
        elif node.op_type in ("FusedMatMul", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "TransposeMatMul"):
            first = _product(lead, inputs[1], attributes)
        elif node.op_type in ("QLinearAdd", "QLinearMul") and len(inputs) > 3:
            first = _broadcast(lead, inputs[3])
        elif node.op_type == "Attention" and lead.shape is not None and len(inputs) > 1 and inputs[1].shape:
            hidden = attributes.get("qkv_hidden_sizes", (0, 0, inputs[1].shape[-1] // 3))[2]
            first = Value(lead.dtype, (*lead.shape[:-1], hidden))
        elif standard is not None:
            plain = NodeProto()
            plain.CopyFrom(node)
            plain.op_type, plain.domain = standard, ""
            del plain.input[3:], plain.output[1:]
            return _typed(plain, inputs[: len(plain.input)], opsets)
    return (first, *(UNKNOWN,) * (len(node.output) - 1))


def _product(a: Value, b: Value, attributes: Mapping[str, Any]) -> Value:
    """The matrix product's shape, numpy's rules, with transA and transB (com.microsoft FusedMatMul)."""
    if a.shape is None or b.shape is None or len(a.shape) < 2 or len(b.shape) < 2:
        return UNKNOWN
    rows = a.shape[-1] if attributes.get("transA") else a.shape[-2]
    columns = b.shape[-2] if attributes.get("transB") else b.shape[-1]
    batch = _broadcast(Value(a.dtype, a.shape[:-2]), Value(b.dtype, b.shape[:-2])).shape
    return Value(1 if a.dtype in (2, 3) else a.dtype, None if batch is None else (*batch, rows, columns))


def _broadcast(a: Value, b: Value) -> Value:
    if a.shape is None or b.shape is None:
        return Value(a.dtype)
    try:
        return Value(a.dtype, tuple(np.broadcast_shapes(a.shape, b.shape)))
    except ValueError:
        return Value(a.dtype)


def _folded(
    node: NodeProto, inputs: Sequence[Value], known: tuple[Value, ...], opsets: Mapping[str, int]
) -> tuple[Value, ...] | None:
    """The outputs' content when every input's is known. Bounded: inputs and outputs of at most SMALL elements."""
    if domain_of(node) or node.op_type not in _FOLDED:
        return None
    named = [(name, value.data) for name, value in zip(node.input, inputs, strict=True) if name]
    if (not named) or any(data is None for _, data in named):
        return None
    for value in known:
        elements = value.elements
        if (elements is None and node.op_type in _GROW) or (elements or 0) > SMALL:
            return None
    try:
        arrays = ReferenceEvaluator(_single(node, named, opsets)).run(None, dict(named))
    except Exception:
        return None
    if not isinstance(arrays, list) or any(not isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    return tuple(of_array(np.asarray(array)) for array in arrays)


def _single(node: NodeProto, named: Sequence[tuple[str, Any]], opsets: Mapping[str, int]) -> ModelProto:
    graph = helper.make_graph(
        [node],
        "fold",
        [helper.make_value_info(name, of_array(np.asarray(data)).type_proto()) for name, data in dict(named).items()],
        [helper.make_value_info(name, TypeProto()) for name in node.output],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opsets.get("", 1))])

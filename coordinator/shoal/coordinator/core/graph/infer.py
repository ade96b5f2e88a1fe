"""Types and shapes of one node's outputs, derived from what is known of its inputs.

The inference function of ONNX runs for one operator at a time, with the content of small constants. This module adds
what it lacks: operators of com.microsoft, and values computed from shapes.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto, checker, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from shoal.coordinator.core.graph.contents import domain_of
from shoal.coordinator.core.graph.values import (
    SMALL,
    UNKNOWN,
    Value,
    value_from_array,
    value_from_constant,
    value_from_type,
)

MICROSOFT: Final = "com.microsoft"

_FOLDABLE: Final = frozenset({
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "Flatten",
    "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual",
    "Max", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "Or", "Pow", "Range", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "Reshape", "Round", "ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
"""Operators that exporters use to compute shapes: cheap, with outputs no larger than the inputs and the inferred
output."""

_GROW: Final = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})

_LIKE_FIRST: Final = frozenset({
    "BiasGelu", "BiasSplitGelu", "FastGelu", "Gelu", "QuickGelu", "GroupNorm", "SkipGroupNorm", "LayerNormalization",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding",
    "MultiHeadAttention", "GroupQueryAttention", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
    "Inverse", "BiasSoftmax", "BiasDropout", "GatedRelativePositionBias", "DecoderMaskedMultiHeadAttention",
})  # fmt: skip
"""com.microsoft operators whose first output has the type and shape of the first input (ONNX Runtime's
ContribOperators.md)."""

_ACTIVATION_PREFIX: Final = "activation"
"""Prefix of the attributes that a fused operator has in addition to the standard operator's: the activation that
follows it, and its parameters (ONNX Runtime's ContribOperators.md, FusedConv and FusedGemm)."""


def attributes_of(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


@cache
def schema_of(operator: str, opset: int, domain: str) -> defs.OpSchema | None:
    """The operator's definition at this opset; None where ONNX does not define it."""
    try:
        return defs.get_schema(operator, opset, domain)
    except defs.SchemaError:
        return None


def infer(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    """Values of the node's outputs, in order; UNKNOWN where nothing can be inferred or the inputs contradict each
    other.

    inputs: one for each name in `node.input`, UNKNOWN for omitted ones. Does not handle control flow and function
    calls.
    """
    if node.op_type == "Constant":
        return (value_from_constant(attributes_of(node)),)
    if node.op_type == "Shape" and inputs and inputs[0].shape is not None:
        attributes = attributes_of(node)
        axes = inputs[0].shape[attributes.get("start", 0) : attributes.get("end")]
        return (value_from_array(np.asarray(axes, np.int64)),)
    if node.op_type == "Size" and inputs and inputs[0].elements is not None:
        return (value_from_array(np.asarray(inputs[0].elements, np.int64)),)
    known = _infer_types(node, inputs, opsets)
    return _fold_constants(node, inputs, known, opsets) or known


def _infer_types(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    schema = schema_of(node.op_type, opsets.get(domain_of(node), 1), domain_of(node))
    if schema is None or not schema.has_type_and_shape_inference_function:
        return _infer_microsoft(node, inputs, opsets)
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
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError, ValueError):
        return (UNKNOWN,) * len(node.output)
    return tuple(value_from_type(found[name]) if name in found else UNKNOWN for name in node.output)


def _infer_microsoft(node: NodeProto, inputs: Sequence[Value], opsets: Mapping[str, int]) -> tuple[Value, ...]:
    """Operators of com.microsoft, which the `onnx` package does not define."""
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
            del plain.input[3:], plain.output[1:], plain.attribute[:]
            plain.attribute.extend(each for each in node.attribute if not each.name.startswith(_ACTIVATION_PREFIX))
            return _infer_types(plain, inputs[: len(plain.input)], opsets)
    return (first, *(UNKNOWN,) * (len(node.output) - 1))


def _product(a: Value, b: Value, attributes: Mapping[str, Any]) -> Value:
    """Shape of a matrix product by numpy's rules, with transA and transB (com.microsoft FusedMatMul)."""
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


def _fold_constants(
    node: NodeProto, inputs: Sequence[Value], known: tuple[Value, ...], opsets: Mapping[str, int]
) -> tuple[Value, ...] | None:
    """The outputs' content where every input's content is known; else None. Inputs and outputs are limited to SMALL
    elements."""
    if domain_of(node) or node.op_type not in _FOLDABLE:
        return None
    named = [(name, value.data) for name, value in zip(node.input, inputs, strict=True) if name]
    if (not named) or any(data is None for _, data in named):
        return None
    for value in known:
        elements = value.elements
        if (elements is None and node.op_type in _GROW) or (elements or 0) > SMALL:
            return None
    try:
        arrays = ReferenceEvaluator(_single_node_model(node, named, opsets)).run(None, dict(named))
    except Exception:
        return None
    if not isinstance(arrays, list) or any(not isinstance(array, np.ndarray | np.generic) for array in arrays):
        return None
    return tuple(value_from_array(np.asarray(array)) for array in arrays)


def _single_node_model(node: NodeProto, named: Sequence[tuple[str, Any]], opsets: Mapping[str, int]) -> ModelProto:
    graph = helper.make_graph(
        [node],
        "fold",
        [
            helper.make_value_info(name, value_from_array(np.asarray(data)).type_proto())
            for name, data in dict(named).items()
        ],
        [helper.make_value_info(name, TypeProto()) for name in node.output],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opsets.get("", 1))])

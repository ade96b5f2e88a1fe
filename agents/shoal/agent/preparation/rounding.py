"""A model in fp32 that answers as one in fp16 does on a device that computes in it.

ONNX Runtime's provider for processors computes most of a model in fp16 in fp32, and rounds nothing between two such
operators. Magika in fp16 comes to a cosine of 1 there; on the NPU that Qualcomm's simulator computes it comes to 0.77,
because one of its sums reaches 126,000. Here every output of an operator is rounded, and what is beyond fp16 is
infinite.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from shoal.agent.preparation.answers import Feeds, answer_of, open_on_processor
from shoal.agent.worker.tensors import Array
from shoal.types.codes import ShoalError

LARGEST: Final = float(np.finfo(np.float16).max)
"""65504 (IEEE 754 binary16)."""


def round_outputs(simplified: ModelProto, halved: ModelProto) -> ModelProto:
    """The model in fp32 with the other's weights, and with every output of an operator rounded to fp16."""
    rounded = ModelProto()
    rounded.CopyFrom(simplified)
    halves = {each.name: each for each in halved.graph.initializer if each.data_type == TensorProto.FLOAT16}
    for weights in rounded.graph.initializer:
        if weights.name in halves:
            values = numpy_helper.to_array(halves[weights.name]).astype(np.float32)
            weights.CopyFrom(numpy_helper.from_array(values, weights.name))
    _round_graph(rounded.graph)
    return rounded


def _round_graph(graph: GraphProto) -> None:
    floats = _float_names(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                _round_graph(inner)
        for index, name in enumerate(node.output):
            if name in floats:  # the rounded value keeps the name, so that nothing that reads it changes
                exact, half = f"{name}/exact", f"{name}/half"
                node.output[index] = exact
                nodes.append(helper.make_node("Cast", [exact], [half], to=TensorProto.FLOAT16))
                nodes.append(helper.make_node("Cast", [half], [name], to=TensorProto.FLOAT))
    kept = [NodeProto.FromString(each.SerializeToString()) for each in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _float_names(graph: GraphProto) -> frozenset[str]:
    """Values of the graph that are known to be of fp32."""
    values = (*graph.value_info, *graph.output)
    return frozenset(each.name for each in values if each.type.tensor_type.elem_type == TensorProto.FLOAT)


def round_inputs(feeds: Feeds) -> Feeds:
    with np.errstate(over="ignore"):
        return {
            name: array.astype(np.float16).astype(np.float32) if array.dtype == np.float32 else array
            for name, array in feeds.items()
        }


def first_beyond(simplified: ModelProto, inputs: Sequence[Feeds]) -> str:
    """The first value of the model in fp32 that fp16 does not have, for people; empty for none, or if it cannot be
    found."""
    floats = _float_names(simplified.graph)
    names = [name for node in simplified.graph.node for name in node.output if name in floats]
    largest = [f"{name}/largest" for name in names]
    shown = ModelProto()
    shown.CopyFrom(simplified)
    for name, magnitude in zip(names, largest, strict=True):
        shown.graph.node.append(helper.make_node("Abs", [name], [f"{name}/size"]))
        shown.graph.node.append(helper.make_node("ReduceMax", [f"{name}/size"], [magnitude], keepdims=0))
        shown.graph.output.append(ValueInfoProto(name=magnitude))
    try:
        engine = open_on_processor(shown.SerializeToString())
        for feeds in inputs:
            found = answer_of(engine, feeds, largest)
            reached = {name: _largest(array) for name, array in feeds.items()}
            reached |= {name: _largest(found[magnitude]) for name, magnitude in zip(names, largest, strict=True)}
            for name, size in reached.items():
                if size > LARGEST:
                    return f"{name} reaches {size:.3g}, and fp16 ends at {LARGEST:g}"
    except ShoalError:  # an empty value has no largest element; the model is refused either way
        return ""
    return ""


def _largest(array: Array) -> float:
    """The largest finite magnitude of floats in 32 bits; 0 of others."""
    if array.dtype != np.float32:
        return 0.0
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))

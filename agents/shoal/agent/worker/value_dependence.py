"""Whether a request's size bounds the time of a run, or its values can make it long: by the operators of the graph."""

from collections.abc import Iterator
from typing import Final

from shoal.wire.field_limits import fields_of

_BY_VALUES: Final = frozenset(
    {
        "AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "DFT", "Expand", "HammingWindow",
        "HannWindow", "If", "Loop", "MaxUnpool", "MelWeightMatrix", "OneHot", "Pad", "Range", "Resize", "RoiAlign",
        "STFT", "Tile", "Upsample",
    }
)  # fmt: skip
"""Operators that run as often, or make a result as large, as the values of an input say (ONNX operator schemas, opset
25); RoiAlign reads as many points of a box as its sides are long. One that takes them from a constant counts too: to
tell would need the whole graph."""
_DOMAINS: Final = frozenset({"", "ai.onnx", "ai.onnx.ml"})
"""Of other operators nobody knows."""
_MODEL_GRAPH, _MODEL_FUNCTION = 7, 25
_GRAPH_NODE, _FUNCTION_NODE = 1, 7
_NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_GRAPHS: Final = (6, 11)
"""Field numbers of onnx.proto."""


def is_bounded_by_size(model: bytes) -> bool:
    """`model`: an ONNX model that the runtime has opened. False also for one that cannot be read here."""
    try:
        return all(domain in _DOMAINS and name not in _BY_VALUES for domain, name in _operators(memoryview(model)))
    except (IndexError, ValueError, RecursionError):
        return False


def _operators(model: memoryview) -> Iterator[tuple[str, str]]:
    """(domain, operator) of each node, also of functions and graphs inside nodes."""
    for number, part in _fields(model):
        if number == _MODEL_GRAPH:
            yield from _in_nodes(part, _GRAPH_NODE)
        elif number == _MODEL_FUNCTION:
            yield from _in_nodes(part, _FUNCTION_NODE)


def _in_nodes(part: memoryview, node: int) -> Iterator[tuple[str, str]]:
    for number, content in _fields(part):
        if number == node:
            yield from _in_node(content)


def _in_node(node: memoryview) -> Iterator[tuple[str, str]]:
    domain = name = ""
    for number, part in _fields(node):
        if number == _NODE_OPERATOR:
            name = bytes(part).decode()
        elif number == _NODE_DOMAIN:
            domain = bytes(part).decode()
        elif number == _NODE_ATTRIBUTE:
            for inner, graph in _fields(part):
                if inner in _ATTRIBUTE_GRAPHS:
                    yield from _in_nodes(graph, _GRAPH_NODE)
    yield domain, name


def _fields(part: memoryview) -> Iterator[tuple[int, memoryview]]:
    for number, _, at, end in fields_of(part, 0, len(part)):
        yield number, part[at:end]

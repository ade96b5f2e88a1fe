"""Upper bounds of integer inputs, as far as a graph implies them: for inputs that index a dimension of known length or
are one-hot encoded."""

from collections.abc import Iterable, Mapping
from typing import Final

from onnx import GraphProto, NodeProto

from shoal.coordinator.core.graph.contents import operator_name, subgraphs
from shoal.coordinator.core.graph.infer import attributes_of
from shoal.coordinator.core.graph.values import Value, value_from_constant, value_from_tensor

_VALUE_PRESERVING: Final = frozenset(
    {
        "Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Expand", "Tile",
        "Concat", "Split",
    }
)  # fmt: skip
"""Operators whose outputs hold only values of their first input (for Concat, of all inputs)."""
_SAME_SHAPE: Final = frozenset({"Identity", "Cast", "DequantizeLinear"})
_EMBED: Final = "com.microsoft:EmbedLayerNormalization"
"""Its inputs 0, 1 and 8 (ids, segments, positions) index the rows of its inputs 2, 4 and 3. Source: ONNX Runtime,
docs/ContribOperators.md."""

_Names = frozenset[str]


def index_bounds(graph: GraphProto, inputs: Iterable[str]) -> dict[str, int]:
    """By input, the smallest length that it indexes, directly or after operators that only rearrange it. An input that
    is never used as an index is absent. Subgraphs are followed, function bodies are not."""
    known: dict[str, Value] = {}
    found: dict[str, int] = {}
    _follow(graph, {name: frozenset({name}) for name in inputs}, known, found)
    return found


def _follow(graph: GraphProto, holds: Mapping[str, _Names], known: Mapping[str, Value], found: dict[str, int]) -> None:
    """holds: by tensor, the inputs whose values it carries. known: constants by name."""
    holds, known = dict(holds), {**known, **{tensor.name: value_from_tensor(tensor) for tensor in graph.initializer}}
    for node in graph.node:
        for index, length in _index_uses(node, known):
            for name in holds.get(index, frozenset()):
                found[name] = min(length, found.get(name, length))
        if node.op_type == "Constant":
            known[node.output[0]] = value_from_constant(attributes_of(node))
        elif node.op_type in _SAME_SHAPE and node.input and node.input[0] in known:
            known[node.output[0]] = Value(0, known[node.input[0]].shape)
        if node.op_type in _VALUE_PRESERVING and not node.domain:
            sources = node.input if node.op_type == "Concat" else node.input[:1]
            values = frozenset[str]().union(*(holds.get(name, frozenset()) for name in sources))
            holds.update((name, values) for name in node.output if values)
        for body in subgraphs(node):
            _follow(body, holds, known, found)


def _index_uses(node: NodeProto, known: Mapping[str, Value]) -> Iterable[tuple[str, int]]:
    """Pairs of (tensor of indices, length of the dimension that it indexes)."""
    pairs: tuple[tuple[int, int, int], ...]
    match operator_name(node):
        case "Gather" | "GatherElements":
            pairs = ((1, 0, int(attributes_of(node).get("axis", 0))),)
        case "OneHot":
            yield from _up_to(node.input[0], known.get(node.input[1]), 0)
            return
        case "Equal":  # JAX exporters write one-hot as a comparison with 0, 1, 2, ..
            for index, counted in ((0, 1), (1, 0)):
                yield from _up_to(node.input[index], known.get(node.input[counted]), 1)
            return
        case name if name == _EMBED:
            pairs = ((0, 2, 0), (1, 4, 0), (8, 3, 0))
        case _:
            return
    for index, table, axis in pairs:
        if max(index, table) >= len(node.input):
            continue
        shape = known[node.input[table]].shape if node.input[table] in known else None
        if shape is not None and -len(shape) <= axis < len(shape):
            yield node.input[index], shape[axis]


def _up_to(index: str, counted: Value | None, more: int) -> Iterable[tuple[str, int]]:
    """The bound that follows from integer constants: the largest of them plus `more`."""
    if counted is not None and counted.data is not None and counted.data.size and counted.data.dtype.kind in "iu":
        yield index, max(int(counted.data.max()) + more, 1)

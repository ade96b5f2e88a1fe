"""Whether the shapes of a request decide how long its run is, or its values can make it long: by the graph."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final, NamedTuple

from shoal.wire.field_limits import fields_of

_BY_VALUES: Final[Mapping[str, tuple[int, ...]]] = {
    "AffineGrid": (1,), "Attention": (6,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "DFT": (1, 2), "Expand": (1,), "GRU": (4,), "HammingWindow": (0,), "HannWindow": (0,), "LSTM": (4,),
    "MaxRoiPool": (1,), "MaxUnpool": (2,), "MelWeightMatrix": (0, 1, 2, 3, 4), "OneHot": (1,), "Pad": (1, 3),
    "RNN": (4,), "Range": (0, 1, 2), "Reshape": (1,), "Resize": (1, 2, 3), "RoiAlign": (1, 2), "STFT": (1, 3),
    "Slice": (1, 2, 3, 4), "Split": (1,), "SplitToSequence": (1,), "Tile": (1, 2), "TopK": (1,), "Upsample": (1,),
}  # fmt: skip
"""Operators that run as often, or make a result as large or of such a shape, as the values of these inputs say, by
position (ONNX operator schemas, opset 25); RoiAlign reads as many points of a box as its sides are long."""
_BY_ANY_VALUE: Final = frozenset(
    {"Compress", "If", "ImageDecoder", "Loop", "Mod", "NonMaxSuppression", "NonZero", "Unique"}
)
"""Operators whose result is as large, or that run as often, as the values say that they compute with; the fmod of two
numbers takes as many steps as their quotient has digits."""
_RANDOM: Final = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})
"""Operators whose result is another in each run."""
_DOMAINS: Final = frozenset({"", "ai.onnx", "ai.onnx.ml"})
"""Of other operators nobody knows."""
_MODEL_GRAPH, _MODEL_FUNCTION = 7, 25
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _FUNCTION_NODE = 1, 5, 11, 7
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 4, 5, 7
_TENSOR_NAME, _INPUT_NAME = 8, 1
_ATTRIBUTE_GRAPHS: Final = (6, 11)
"""Field numbers of onnx.proto."""
_BYTES: Final = 2
_NUMBERS: Final = (0, 1, 5)
"""Wire types of protobuf."""
_OF_SHAPES: Final = frozenset({"Shape", "Size"})
"""Operators whose results follow from shapes, as all shapes do where values decide none."""


class _Node(NamedTuple):
    domain: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    # Graphs inside it.
    graphs: tuple[memoryview, ...]

    def is_bounded(self, constants: Set[str]) -> bool:
        """Graphs inside it are not looked into. constants: tensors that no values of a request change; the empty name,
        of an input that is not there, among them."""
        if self.domain not in _DOMAINS or self.operator in _BY_ANY_VALUE:
            return False
        positions = _BY_VALUES.get(self.operator, ())
        return all(self.inputs[each] in constants for each in positions if each < len(self.inputs))

    def is_constant(self, constants: Set[str]) -> bool:
        """Whether its results are the same in every run of these shapes."""
        if self.operator == "Constant" or self.operator in _OF_SHAPES:
            return True
        return bool(self.inputs) and self.operator not in _RANDOM and all(each in constants for each in self.inputs)


def is_bounded_by_shapes(model: bytes) -> bool:
    """`model`: an ONNX model that the runtime has opened. What follows from constants and shapes is the same in every
    run of those shapes. False also for one that cannot be read here."""
    try:
        return all(_is_part_bounded(number, part) for number, part in _fields(memoryview(model)))
    except (IndexError, ValueError, RecursionError):
        return False


def _is_part_bounded(number: int, part: memoryview) -> bool:
    if number == _MODEL_GRAPH:
        return _is_graph_bounded(part)
    # A function may be called with anything.
    return number != _MODEL_FUNCTION or _are_bounded(_nodes(part, _FUNCTION_NODE))


def _is_graph_bounded(graph: memoryview) -> bool:
    """Nodes come in an order in which each is after those that it reads."""
    asked = set(_names(graph, _GRAPH_INPUT, _INPUT_NAME))
    # A caller may give an initializer that is an input too.
    constants = {"", *_names(graph, _GRAPH_INITIALIZER, _TENSOR_NAME)} - asked
    for node in _nodes(graph, _GRAPH_NODE):
        if not node.is_bounded(constants):
            return False
        if node.graphs:
            if not all(_are_bounded(_nodes(each, _GRAPH_NODE)) for each in node.graphs):
                return False
        elif node.is_constant(constants):
            constants.update(node.outputs)
    return True


def _are_bounded(nodes: Iterable[_Node]) -> bool:
    """Whatever they read."""
    return all(
        node.is_bounded({""}) and all(_are_bounded(_nodes(each, _GRAPH_NODE)) for each in node.graphs) for node in nodes
    )


def _nodes(part: memoryview, field: int) -> Iterator[_Node]:
    """field: of the nodes."""
    return (_node(content) for number, content in _fields(part) if number == field)


def _node(part: memoryview) -> _Node:
    domain = operator = ""
    inputs, outputs, graphs = list[str](), list[str](), list[memoryview]()
    for number, content in _fields(part):
        if number == _NODE_OPERATOR:
            operator = bytes(content).decode()
        elif number == _NODE_DOMAIN:
            domain = bytes(content).decode()
        elif number == _NODE_INPUT:
            inputs.append(bytes(content).decode())
        elif number == _NODE_OUTPUT:
            outputs.append(bytes(content).decode())
        elif number == _NODE_ATTRIBUTE:
            graphs += [graph for inner, graph in _fields(content) if inner in _ATTRIBUTE_GRAPHS]
    return _Node(domain, operator, tuple(inputs), tuple(outputs), tuple(graphs))


def _names(graph: memoryview, field: int, name: int) -> Iterator[str]:
    """Of all messages in a field of the graph. name: number of theirs."""
    for number, content in _fields(graph):
        if number == field:
            yield from (bytes(part).decode() for inner, part in _fields(content) if inner == name)


def _fields(part: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Those of bytes: a parser knows none of these numbers by another wire type. Raises ValueError for a group, which
    this would read as fields of its own."""
    for number, start, at, end in fields_of(part, 0, len(part)):
        wire_type = part[start] & 7
        if wire_type == _BYTES:
            yield number, part[at:end]
        elif wire_type not in _NUMBERS:
            raise ValueError(f"wire type {wire_type}")

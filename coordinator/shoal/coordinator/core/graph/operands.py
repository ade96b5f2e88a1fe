"""Legal values for inputs that an operator uses as a shape, axes, sizes, scales, counts or a constant to compare with.

They are derived from the input's role in the operator that reads it, and from the shapes that are known around it. Each
such input gets one legal value, for use in generated inputs. An input without such a role gets none here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from onnx import GraphProto, NodeProto

from shoal.coordinator.core.graph.contents import domain_of, subgraphs
from shoal.coordinator.core.graph.infer import attributes_of
from shoal.coordinator.core.graph.values import SMALL, Value, value_from_constant, value_from_tensor, value_from_type

Values = tuple[int, ...]

_ELEMENT_PRESERVING: Final = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""Operators whose output holds the elements of their first input, in the same order."""
_TO_THE_END: Final = 2**31 - 1
"""Slice accepts it as an end: beyond any axis, and within an int32."""
_BLOCKS_AT_MOST: Final = 4096
"""Kernels of Col2Im that are tried."""
_SHAPES: Final = frozenset({("Expand", 1), ("ConstantOfShape", 0), ("CenterCropPad", 1), ("MaxUnpool", 2)})
"""(operator, input index) where the input is the shape of the result."""


def operands(graph: GraphProto, inputs: Mapping[str, Value]) -> dict[str, Values]:
    """By input, its elements in row-major order. inputs: each with its reference shape."""
    found: dict[str, Values] = {}
    counts = {name: value.elements for name, value in inputs.items() if value.elements is not None}
    _follow(graph, {name: name for name in inputs}, dict(inputs), counts, found)
    return found


def _follow(
    graph: GraphProto,
    holds: Mapping[str, str],
    known: Mapping[str, Value],
    counts: Mapping[str, int],
    found: dict[str, Values],
) -> None:
    """holds: by tensor, the input whose elements it carries. known: shapes and constants by name. counts: number of
    elements by input."""
    holds = dict(holds)
    declared = {info.name: value_from_type(info.type) for info in (*graph.value_info, *graph.output)}
    known = {**declared, **known, **{tensor.name: value_from_tensor(tensor) for tensor in graph.initializer}}
    for node in graph.node:
        for index, name in enumerate(node.input):
            source = holds.get(name)
            count = counts.get(source) if source is not None else None
            if source is None or source in found or count is None or not 0 < count <= SMALL:
                continue
            values = None if domain_of(node) else _role_values(_Reader(node, known), index, count)
            if values is not None and len(values) == count:
                found[source] = tuple(int(value) for value in values)
        if node.op_type == "Constant" and not node.domain:
            known[node.output[0]] = value_from_constant(attributes_of(node))
        elif node.op_type in _ELEMENT_PRESERVING and not node.domain and node.input[0] in holds:
            holds[node.output[0]] = holds[node.input[0]]
        for body in subgraphs(node):
            _follow(body, holds, known, counts, found)


class _Reader:
    """Gives access to a node's attributes and to what is known of its tensors."""

    def __init__(self, node: NodeProto, known: Mapping[str, Value]) -> None:
        self.node = node
        self.attributes: dict[str, Any] = attributes_of(node)
        self._known = known

    def value(self, index: int) -> Value:
        names = self.node.input
        return self._known.get(names[index], Value()) if index < len(names) else Value()

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Static shape of an input; None where unknown."""
        return _static_shape(self.value(index))

    @property
    def result(self) -> tuple[int, ...] | None:
        """Static shape of the first output; None where unknown."""
        return _static_shape(self._known.get(self.node.output[0], Value()))

    @property
    def last(self) -> int:
        return len(self.node.input) - 1


def _static_shape(value: Value) -> tuple[int, ...] | None:
    return value.shape if value.shape is not None and all(length >= 0 for length in value.shape) else None


def _role_values(reader: _Reader, index: int, count: int) -> Sequence[int] | None:
    """`count` legal elements for that input of the node; None where the input has no such role."""
    operator = reader.node.op_type
    if (operator, index) in _SHAPES:
        return reader.result or (None if operator == "MaxUnpool" else (1,) * count)
    if operator.startswith("Reduce") and index == 1:
        return range(count)
    match operator, index:
        case "Reshape", 1:
            return reader.result or (-1, *(1,) * (count - 1))
        case "Resize", _ if index > 0:
            return _resize_values(reader, index, count)
        case ("Upsample" | "Tile" | "TopK", 1):
            return (1,) * count
        case "Pad", 1:
            return (0,) * count
        case ("Unsqueeze", 1) | ("Slice" | "Pad", 3):
            return range(count)
        case "Slice", 1:
            return (0,) * count
        case "Slice", 2:
            return (_TO_THE_END,) * count
        case "Slice", 4:
            return (1,) * count
        case "Squeeze", 1:
            shape = reader.shape(0) or ()
            return [axis for axis, length in enumerate(shape) if length == 1][:count]
        case ("Split" | "SplitToSequence", 1):
            return _split_lengths(reader, count)
        case "Range", _:
            return ((0, 1, 1)[index],)
        case "AffineGrid", 1:
            theta, grid = reader.shape(0), reader.result
            return (theta[0], 1, *(grid[1:-1] if grid else (1,) * (count - 2))) if theta else None
        case "Col2Im", (1 | 2):
            image = _col2im_shapes(reader)
            return image[index - 1] if image is not None else None
        case "Equal", _:
            return _comparison_values(reader.value(1 - index), count)
        case _:
            return None


def _resize_values(reader: _Reader, index: int, count: int) -> Sequence[int] | None:
    """Inputs of Resize are (X, scales) up to opset 10, and (X, roi, scales, sizes) from opset 11."""
    data, result = reader.shape(0), reader.result or reader.shape(0)
    if index == 1 and reader.last > 1:
        return (*(0,) * (count // 2), *(1,) * (count - count // 2))
    if index < 3:
        return (1,) * count
    axes = reader.attributes.get("axes") or range(len(data or ()))
    return [result[axis] for axis in axes] if result and len(axes) == count and max(axes) < len(result) else None


def _split_lengths(reader: _Reader, count: int) -> Sequence[int] | None:
    """Lengths whose sum is the length of the axis."""
    shape, axis = reader.shape(0), int(reader.attributes.get("axis", 0))
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    each, rest = divmod(shape[axis], count)
    return [each + (part < rest) for part in range(count)]


def _comparison_values(constant: Value, count: int) -> Sequence[int] | None:
    """The constant that the input is compared with, if it has one element: one of the few values that a graph expects,
    such as a rate or a mode."""
    data = constant.data
    if data is None or data.size != 1 or data.dtype.kind not in "iu":
        return None
    return (int(data.reshape(-1)[0]),) * count


def _col2im_shapes(reader: _Reader) -> tuple[Sequence[int], Sequence[int]] | None:
    """(image_shape, block_shape) of Col2Im: a block that fits into the image as often as there are columns. Source:
    ONNX, Operators.md, Col2Im."""
    columns, result = reader.shape(0), reader.result
    if columns is None or result is None or len(columns) != 3 or len(result) < 3 or not result[1]:
        return None
    image, rank = result[2:], len(result) - 2
    pads = reader.attributes.get("pads") or [0] * (2 * rank)
    strides = reader.attributes.get("strides") or [1] * rank
    dilations = reader.attributes.get("dilations") or [1] * rank
    room = [image[axis] + pads[axis] + pads[axis + rank] for axis in range(rank)]
    if math.prod(room) > _BLOCKS_AT_MOST:
        return None
    for block in product(*(range(1, length + 1) for length in room)):
        if math.prod(block) * result[1] == columns[1] and columns[2] == _block_count(block, room, strides, dilations):
            return image, block
    return None


def _block_count(block: Iterable[int], room: Iterable[int], strides: Iterable[int], dilations: Iterable[int]) -> int:
    """Number of positions where the block fits."""
    parts = zip(block, room, strides, dilations, strict=False)
    return math.prod(
        max(0, (free - apart * (size - 1) - 1) // step + 1) for size, free, step, apart in parts if step > 0
    )

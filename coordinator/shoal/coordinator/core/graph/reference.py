"""Reference lengths for the axes that a model leaves open, so that its cost can be stated for one definite size.

An axis keeps the length that the model gives it. Axes with the same symbol get the same length. For the other axes, the
first rule that applies counts:

1. a symbol that says what it is: `batch` is 1; `seq`, `len`, `time`, `frame`, `token`, `past` are the sequence length
   (for the last of two axes of floating point: samples);
2. the first axis is the batch: 1. So is the second of three axes where the first is fixed above 1 and the last is
   fixed: a recurrent state [layers, batch, hidden];
3. four axes are an image, channels first unless only the last axis is fixed at 1, 3 or 4: 3 channels, then height and
   width. The width beside a fixed height of at most 64 is 320 (a line of text). Five axes: a depth of 16 before them;
4. three axes are a sequence. Two axes are samples of a signal for floating point, a sequence of tokens for integers;
5. anything else: 1.

Networks differ in the sizes that they accept (a text recogniser may need a height of 48 without declaring it). There
are therefore several schemes, and the first under which every shape of the graph can be inferred is used.

Whoever pushes the model may say lengths instead (`check_shapes`). Those come before every rule.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto, TensorShapeProto, ValueInfoProto

from shoal.coordinator.core.graph.values import UNKNOWN, Value
from shoal.types.codes import Code, Refusal

Shapes = Mapping[str, tuple[int, ...]]
"""By input, the length of each axis; -1 leaves one to the rules."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Lengths for open axes."""

    # Image height in pixels.
    height: int
    # Image width in pixels.
    width: int
    # Tokens or frames of a sequence.
    sequence: int
    # Samples of a signal.
    samples: int


SCHEMES: Final = (
    Scheme(224, 224, 128, 512),
    Scheme(48, 320, 128, 576),
    Scheme(32, 320, 64, 16000),
    Scheme(640, 640, 1, 1024),
)
_LINE_HEIGHT: Final = 64
_LINE_WIDTH: Final = 320
_DEPTH: Final = 16
_CHANNELS: Final = (1, 3, 4)
_FLOATING: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NAMELESS: Final = "?"
"""Paddle's exporter calls every open axis so: two of that name may differ."""
_SEQUENCE_SYMBOLS: Final = ("seq", "len", "time", "frame", "token", "past")


def reference_inputs(
    inputs: Sequence[ValueInfoProto], scheme: Scheme, shapes: Shapes | None = None
) -> dict[str, Value]:
    """Each input's value under this scheme, without a shape where the model does not even fix the number of axes.

    shapes: lengths that were given, which `check_shapes` finds nothing in.
    """
    shapes = shapes or {}
    symbols = _given_symbols(inputs, shapes)
    found: dict[str, Value] = {}
    for given in inputs:
        tensor = given.type.tensor_type
        if given.type.WhichOneof("value") != "tensor_type":
            found[given.name] = UNKNOWN
        elif not tensor.HasField("shape"):
            found[given.name] = Value(tensor.elem_type, _whole(shapes.get(given.name)))
        else:
            fixed = axes_of(given)
            wanted = shapes.get(given.name) or (-1,) * len(fixed)
            shape = []
            for axis, dim in enumerate(tensor.shape.dim):
                length = fixed[axis] if fixed[axis] >= 0 else wanted[axis]
                if length < 0:
                    length = _open_length(axis, dim.dim_param, fixed, tensor.elem_type, scheme)
                    if symbol := _symbol_of(dim):
                        length = symbols.setdefault(symbol, length)
                shape.append(length)
            found[given.name] = Value(tensor.elem_type, tuple(shape))
    return found


def check_shapes(inputs: Sequence[ValueInfoProto], shapes: Shapes) -> Refusal | None:
    """Why these lengths are none of the model's; None: they are."""
    by_name = {given.name: given for given in inputs}
    symbols = dict[str, int]()
    for name, shape in shapes.items():
        given = by_name.get(name)
        if given is None:
            names = ", ".join(by_name)
            return Refusal(
                Code.INVALID_ARGUMENT, f"a shape of {name!r:.80}", f"one of {names:.200}", "correct the name"
            )
        if not given.type.tensor_type.HasField("shape"):
            continue
        axes = axes_of(given)
        if len(axes) != len(shape) or any(-1 < axis != length > -1 for axis, length in zip(axes, shape, strict=False)):
            return Refusal(
                Code.INVALID_ARGUMENT,
                f"{name:.80} {list(shape)}",
                f"lengths of {['?' if axis < 0 else axis for axis in axes]}",
                "shoal model inspect FILE",
            )
        for dim, length in zip(given.type.tensor_type.shape.dim, shape, strict=True):
            symbol = _symbol_of(dim)
            if symbol and length > -1 and symbols.setdefault(symbol, length) != length:
                return Refusal(
                    Code.INVALID_ARGUMENT,
                    f"{symbol:.80} of {symbols[symbol]}, and of {length} in {name:.80}",
                    "the same length wherever the graph names the same axis",
                    "shoal model inspect FILE",
                )
    return None


def _whole(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """A shape without open axes, if it is one."""
    return shape if shape is not None and all(length >= 0 for length in shape) else None


def _given_symbols(inputs: Iterable[ValueInfoProto], shapes: Shapes) -> dict[str, int]:
    """The lengths of symbols that follow from shapes, so that they hold in other inputs too."""
    return {
        symbol: length
        for given in inputs
        if given.name in shapes
        for dim, length in zip(given.type.tensor_type.shape.dim, shapes[given.name], strict=False)
        if (symbol := _symbol_of(dim)) and length >= 0
    }


def _symbol_of(dim: TensorShapeProto.Dimension) -> str:
    """The name by which an axis is the same as others; empty: it has none."""
    name: str = dim.dim_param
    return "" if name == _NAMELESS else name


def axes_of(given: ValueInfoProto) -> tuple[int, ...]:
    """The declared lengths; -1 where an axis is open (unset, symbolic or negative)."""
    dims = given.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else -1 for dim in dims)


def _open_length(axis: int, symbol: str, fixed: tuple[int, ...], dtype: int, scheme: Scheme) -> int:
    """Applies the rules of this module to one open axis. fixed: the declared lengths, -1 where open."""
    name, rank = symbol.lower(), len(fixed)
    if "batch" in name:
        return 1
    floating = dtype in _FLOATING
    if any(part in name for part in _SEQUENCE_SYMBOLS):
        return scheme.samples if floating and (rank, axis) == (2, 1) else scheme.sequence
    if axis == 0 or (rank == 3 and axis == 1 and fixed[0] > 1 and fixed[2] > 0):
        return 1
    match rank:
        case 2:
            return scheme.samples if floating else scheme.sequence
        case 3:
            return scheme.sequence
        case 4 | 5:
            return _image_length(axis, fixed, scheme)
    return 1


def _image_length(axis: int, fixed: tuple[int, ...], scheme: Scheme) -> int:
    """Rule 3: the length of an open axis of an image or a volume."""
    rank = len(fixed)
    channel = rank - 1 if fixed[-1] in _CHANNELS and fixed[1] not in _CHANNELS else 1
    width = rank - 2 if channel == rank - 1 else rank - 1
    if axis == channel:
        return 3
    if axis == width:
        return _LINE_WIDTH if 0 < fixed[width - 1] <= _LINE_HEIGHT else scheme.width
    return scheme.height if axis == width - 1 else _DEPTH

"""Requests of unequal lengths as one batch: inputs filled up with zeros at the end of one axis, outputs cut back.

The axis is one that the model leaves open and names, as in `[batch, sequence]`. Outputs are cut where they have an axis
of the same name. Whether answers stay the same, `padding_trial` finds out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shoal.agent.worker.tensors import Array

Axes = Mapping[str, Sequence[Any]]
"""By tensor: a length, the name of an open axis, or None for one without a name. As in ONNX Runtime's NodeArg."""

_NAMELESS: Final = ("", "?")
"""As in `shapes`."""


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """The axis along which a model's requests may differ in length."""

    # Its name in the model.
    name: str
    # Its places by input that has it.
    inputs: Mapping[str, tuple[int, ...]]
    # Its places by output that has it.
    outputs: Mapping[str, tuple[int, ...]]

    def length(self, feeds: Mapping[str, Array]) -> int | None:
        """The inputs' length. None: they have several, or it is 0."""
        lengths = {feeds[name].shape[axis] for name, axes in self.inputs.items() for axis in axes}
        return lengths.pop() or None if len(lengths) == 1 else None

    def open_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an input of any length: -1 at its places."""
        return _with_length(shape, self.inputs.get(name, ()), -1)

    def shorten(self, feeds: Mapping[str, Array], length: int) -> dict[str, Array]:
        """The beginning of the inputs."""
        return {name: _beginning(array, self.inputs.get(name, ()), length) for name, array in feeds.items()}

    def join(self, name: str, arrays: Sequence[Array], longest: int) -> Array:
        """Arrays of one input after each other, each filled up with zeros to the length `longest`."""
        axes = self.inputs.get(name, ())
        if all(array.shape[axis] == longest for array in arrays for axis in axes):
            return np.concatenate(arrays)
        rows = sum(array.shape[0] for array in arrays)
        joined = np.zeros((rows, *_with_length(arrays[0].shape, axes, longest)[1:]), arrays[0].dtype)
        start = 0
        for array in arrays:
            count, *sizes = array.shape
            joined[(slice(start, start + count), *(slice(size) for size in sizes))] = array
            start += count
        return joined

    def has_length(self, outputs: Mapping[str, Array], length: int) -> bool:
        """Whether the outputs are those of inputs of that length."""
        return all(
            array.shape[axis] == length for name, array in outputs.items() for axis in self.outputs.get(name, ())
        )

    def cut(self, name: str, array: Array, length: int) -> Array:
        """The part of an output that belongs to an input of that length."""
        return _beginning(array, self.outputs.get(name, ()), length)


@dataclass(frozen=True, slots=True)
class Padding:
    """How requests of unequal lengths share a batch."""

    # The axis that is filled up.
    axis: PaddedAxis
    # Shorter requests are answered sooner alone than in their share of a batch.
    shortest: int
    # Longer ones are longer than what was measured.
    longest: int

    def is_for(self, feeds: Mapping[str, Array]) -> bool:
        """Whether a request may be filled up, and share a batch with others that may."""
        found = self.axis.length(feeds)
        return found is not None and self.shortest <= found <= self.longest


def padded_axis(inputs: Axes, outputs: Axes) -> PaddedAxis | str:
    """The axis of a model whose first axes are the batch's. A text says why there is none."""
    places = list(_open_places(inputs))
    if not places:
        return "no input has an open axis beside the first"
    for tensor, axis, symbol in places:
        if not isinstance(symbol, str) or symbol in _NAMELESS:
            return f"axis {axis} of {tensor!r:.80} is open and has no name, so that no output can be cut back"
    names = sorted({symbol for _, _, symbol in places})
    if len(names) > 1:
        return f"more than one length may differ: {', '.join(names)!s:.200}"
    (symbol,) = names
    if any(axes[:1] == [symbol] for axes in map(list, (*inputs.values(), *outputs.values()))):
        return f"{symbol!r:.80} names a first axis too"
    return PaddedAxis(symbol, _places_of(symbol, inputs), _places_of(symbol, outputs))


def most_of_its_digits(length: int) -> int:
    """The largest number with as many binary digits: what was measured at `length` stands for all up to there, as
    `run_place` has it."""
    return (1 << length.bit_length()) - 1


def halves(length: int) -> list[int]:
    """A half, a quarter, .. of the length, down to 1."""
    return [length >> shift for shift in range(1, length.bit_length())]


def _open_places(tensors: Axes) -> Iterator[tuple[str, int, Any]]:
    """(tensor, axis, name) of each open axis but the first."""
    for name, axes in tensors.items():
        for axis, symbol in enumerate(axes):
            if axis and not (isinstance(symbol, int) and symbol >= 0):
                yield name, axis, symbol


def _places_of(symbol: str, tensors: Axes) -> dict[str, tuple[int, ...]]:
    found = {
        name: tuple(axis for axis, each in enumerate(axes) if axis and each == symbol) for name, axes in tensors.items()
    }
    return {name: axes for name, axes in found.items() if axes}


def _with_length(shape: Sequence[int], axes: Sequence[int], length: int) -> tuple[int, ...]:
    return tuple(length if axis in axes else size for axis, size in enumerate(shape))


def _beginning(array: Array, axes: Sequence[int], length: int) -> Array:
    if not axes:
        return array
    part: Array = array[tuple(slice(length if axis in axes else None) for axis in range(array.ndim))]
    return part

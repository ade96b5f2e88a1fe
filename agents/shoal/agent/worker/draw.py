"""Inputs that are made up to compare two replicas of a model: varied, within what its graph takes, the same again from
the same numbers."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal.agent.worker.engine import reference_shapes
from shoal.agent.worker.tensors import DATATYPES, Array
from shoal.types.profile import TensorSpec

_UNKNOWN = ((1, 1), (0, 1), (0, 15), (0, 0))
"""Least and most of integers about which nothing is known."""
_FEW = (0, 40, 8, 2)
"""From how many different indices an input is drawn; 0: from all."""
_WORDS = ("a", "the", "Shoal", "0", "-1.5", "x y", "ß", "")


def draw(
    inputs: Sequence[TensorSpec], shapes: Mapping[str, tuple[int, ...]], below: Mapping[str, int], seed: int, index: int
) -> dict[str, Array]:
    """Input number `index` of those that belong to `seed`.

    Floats are even over [0, 1) in one half of them and normal in the other: models are fed with pixels and with
    features. Integers are drawn from [0, below) where that is known: from all of it, or from a few of them, which is
    more like a text than noise is. Where it is not, an integer may be a length, a
    shape, a mask or a divisor: of four inputs one has 1 as a warm-up does, one 0 or 1, one up to 15, one 0.
    shapes: of inputs with dynamic axes; an axis that is not given is 1.
    """
    dice = np.random.default_rng([seed, index])
    feeds: dict[str, Array] = {}
    for spec, shape in reference_shapes(inputs, shapes):
        dtype = DATATYPES[spec.dtype].dtype
        if dtype == np.object_:
            feeds[spec.name] = dice.choice(np.array(_WORDS, dtype=np.object_), size=shape)
        elif dtype == np.bool_:
            feeds[spec.name] = dice.random(shape) < 0.5
        elif dtype.kind in "iu" and spec.name in below:
            most = min(below[spec.name], np.iinfo(dtype).max)
            few = _FEW[index % len(_FEW)]
            words = dice.integers(0, max(most, 1), size=few or shape, dtype=np.uint64)
            feeds[spec.name] = (dice.choice(words, size=shape) if few else words).astype(dtype)
        elif dtype.kind in "iu":
            least, most = _UNKNOWN[index % len(_UNKNOWN)]
            feeds[spec.name] = dice.integers(least, most, size=shape, endpoint=True).astype(dtype)
        else:
            numbers = dice.random(shape) if index % 2 == 0 else dice.standard_normal(shape)
            feeds[spec.name] = np.asarray(numbers).astype(dtype)
    return feeds

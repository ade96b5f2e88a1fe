"""Generated inputs for comparing two replicas of a model: varied, valid for its graph, and reproducible from (seed,
index)."""

import math
from collections.abc import Sequence

import numpy as np

from shoal.agent.worker.engine import reference_shapes
from shoal.agent.worker.tensors import DATATYPES, Array
from shoal.types.assignment import Work
from shoal.types.profile import TensorSpec

_UNKNOWN_RANGES = ((1, 1), (0, 1), (0, 15), (0, 0))
"""(minimum, maximum) of integers whose range is unknown."""
_DISTINCT_INDICES = (0, 40, 8, 2)
"""Number of distinct indices that an input is drawn from; 0: all of them."""
_WORDS = ("a", "the", "Shoal", "0", "-1.5", "x y", "ß", "")


def sample_input(inputs: Sequence[TensorSpec], work: Work, seed: int, index: int) -> dict[str, Array]:
    """Input number `index` of the series `seed`.

    Floats are uniform over [0, 1) for even indexes and normal for odd ones, because models take pixels or features.

    An integer with a known bound is drawn from [0, below): from the whole range, or from a few values, which is closer
    to a text than noise is. Without a bound it may be a length, a shape, a mask or a divisor. Of four inputs, one then
    has 1 as in a warm-up, one 0 or 1, one up to 15, one 0.

    An input that the graph takes as a shape, axes and the like always has the value that its constraints imply. `work`
    is the model's, with the shapes of inputs that have dynamic axes; an axis that is not given is 1.
    """
    rng = np.random.default_rng([seed, index])
    feeds: dict[str, Array] = {}
    below = work.below
    for spec, shape in reference_shapes(inputs, work.shapes):
        dtype = DATATYPES[spec.dtype].dtype
        given = work.operands.get(spec.name, ())
        if given and len(given) == math.prod(shape) and dtype != np.object_:
            feeds[spec.name] = np.array(given, np.int64).reshape(shape).astype(dtype)
        elif dtype == np.object_:
            feeds[spec.name] = rng.choice(np.array(_WORDS, dtype=np.object_), size=shape)
        elif dtype == np.bool_:
            feeds[spec.name] = rng.random(shape) < 0.5
        elif dtype.kind in "iu" and spec.name in below:
            most = min(below[spec.name], np.iinfo(dtype).max)
            few = _DISTINCT_INDICES[index % len(_DISTINCT_INDICES)]
            words = rng.integers(0, max(most, 1), size=few or shape, dtype=np.uint64)
            feeds[spec.name] = (rng.choice(words, size=shape) if few else words).astype(dtype)
        elif dtype.kind in "iu":
            least, most = _UNKNOWN_RANGES[index % len(_UNKNOWN_RANGES)]
            feeds[spec.name] = rng.integers(least, most, size=shape, endpoint=True).astype(dtype)
        else:
            numbers = rng.random(shape) if index % 2 == 0 else rng.standard_normal(shape)
            feeds[spec.name] = np.asarray(numbers).astype(dtype)
    return feeds

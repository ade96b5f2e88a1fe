"""Default limits for the difference between the new and the old replica's answers, where the policy sets none.

The coarser of the two precisions decides, because each of them rounds by itself. MAX_REL is relative to the output's
largest magnitude, so it holds for logits and probabilities alike. COSINE detects many small errors of which no single
one stands out; MAX_REL detects a scaled output, which COSINE does not.

Sources. fp32: ONNX's own backend tests (`onnx/backend/test/loader`: rtol 1e-3), which every provider is held to.
fp64: as fp32, because providers may compute in it. bf16, fp16: the unit roundoffs 2^-8 and 2^-11 (bfloat16 as in
ONNX's types, IEEE 754 binary16), times 64 for accumulation over layers: rounding only the weights of a text
recogniser (PP-OCRv4: 38 convolutions, attention, softmax) showed 24 of them, and activations round too. int8 and
below: a convention, not a theorem: post-training quantisation that keeps a model's accuracy within 1 % keeps the
cosine of its outputs above 0.99. `precision.tolerance` sets other limits. A cosine of 1 - e corresponds to a
relative L2 error of sqrt(2 e).
"""

from collections.abc import Sequence
from typing import Final

from shoal.types.migration import Metric, Tolerance

_BOUNDS: Final = (
    (frozenset({"fp64", "fp32"}), 1e-3, 0.9999),
    (frozenset({"fp16"}), 64 * 2**-11, 0.9995),
    (frozenset({"bf16"}), 64 * 2**-8, 0.995),
)
"""(precisions, upper limit of MAX_REL, lower limit of COSINE), from fine to coarse."""
_COARSEST: Final = (0.25, 0.99)


def default(source: str, target: str) -> tuple[Tolerance, ...]:
    """Limits for every output of a move between these precisions, named as in ModelProfile.precision and receipts."""
    (most, least), (other_most, other_least) = _bounds_of(source), _bounds_of(target)
    return (
        Tolerance("", Metric.MAX_REL, max(most, other_most)),
        Tolerance("", Metric.COSINE, min(least, other_least)),
    )


def with_defaults(asked: Sequence[Tolerance], source: str, target: str) -> tuple[Tolerance, ...]:
    """The policy's limits, and the default ones for outputs that it does not name, so that every output is compared."""
    every = any(not each.output for each in asked)
    return tuple(asked) if every else (*asked, *default(source, target))


def _bounds_of(precision: str) -> tuple[float, float]:
    return next(((most, least) for names, most, least in _BOUNDS if precision in names), _COARSEST)

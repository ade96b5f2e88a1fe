"""How far a new replica's answers may be from the old one's, where the policy does not say.

The coarser precision of the two rules, since each rounds by itself. MAX_REL is relative to the output's largest
magnitude, so these hold for logits and probabilities alike; COSINE beside it sees many small errors that no single one
shows, and MAX_REL what COSINE does not: an output that is scaled.

Sources. fp32: ONNX's own backend tests (`onnx/backend/test/loader`: rtol 1e-3), which every provider is held to. fp64
as fp32, since providers may compute in it. bf16, fp16: the unit roundoffs 2^-8 and 2^-11 (bfloat16 as in ONNX's types,
IEEE 754 binary16), times 64 for what accumulates over layers: rounding nothing but the weights of a text recogniser
(PP-OCRv4: 38 convolutions, attention, softmax) showed 24 of them, and activations round too. int8 and below: a
convention and no theorem: quantisation after training that keeps a model's accuracy within 1 % keeps the cosine of its
outputs above 0.99; whoever needs more or less says so with `precision.tolerance`. A cosine of 1 - e belongs to a
relative error (L2) of sqrt(2 e).
"""

from collections.abc import Sequence
from typing import Final

from shoal.types.migration import Metric, Tolerance

_BOUNDS: Final = (
    (frozenset({"fp64", "fp32"}), 1e-3, 0.9999),
    (frozenset({"fp16"}), 64 * 2**-11, 0.9995),
    (frozenset({"bf16"}), 64 * 2**-8, 0.995),
)
"""(precisions, most for MAX_REL, least for COSINE), from fine to coarse."""
_COARSEST: Final = (0.25, 0.99)


def default(source: str, target: str) -> tuple[Tolerance, ...]:
    """For every output of a move between these precisions, as ModelProfile.precision and receipts name them."""
    (most, least), (other_most, other_least) = _of(source), _of(target)
    return (
        Tolerance("", Metric.MAX_REL, max(most, other_most)),
        Tolerance("", Metric.COSINE, min(least, other_least)),
    )


def completed(asked: Sequence[Tolerance], source: str, target: str) -> tuple[Tolerance, ...]:
    """What a policy asks, and the default for the outputs that it does not name: none goes uncompared."""
    every = any(not each.output for each in asked)
    return tuple(asked) if every else (*asked, *default(source, target))


def _of(precision: str) -> tuple[float, float]:
    return next(((most, least) for names, most, least in _BOUNDS if precision in names), _COARSEST)

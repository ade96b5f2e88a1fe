"""How long an emulated device takes for a model: by published figures, of that model or of its nearest relative.

Pure functions: workers pace devices by them, and `agents/derive_profiles` tells their error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """What was published of one model on a device."""

    # The publisher's name of the model.
    model: str
    # Precision in which it ran. Empty: the vendor's compiler chose one, which is not told.
    precision: str
    # FLOPs of one inference; a multiply-add is 2.
    flops: float
    # Number of weights.
    weights: float
    # Whether most of its FLOPs are attention, or products of matrices like it; otherwise convolutions.
    attention: bool
    # Seconds of one inference.
    latency_s: float
    # Joules of one inference. NaN: not published.
    joules: float


def nearest(
    figures: Sequence[PublishedFigure], flops: float, weights: float, precision: str, *, attention: bool
) -> PublishedFigure:
    """The figure whose model is nearest: by the ratios of FLOPs and of weights, among those of the same precision and
    of the same kind (attention or convolution), as far as there are any.

    Of 159 models on Hailo-8 each was left out once: the time by its nearest relative was wrong by a median factor of
    2.1 by FLOPs alone, of 1.65 by FLOPs and weights, and of 1.5 within its kind.
    """

    def distance(figure: PublishedFigure) -> float:
        return abs(math.log(figure.flops / max(flops, 1.0))) + abs(math.log(figure.weights / max(weights, 1.0)))

    chosen = tuple(each for each in figures if each.precision in ("", precision)) or tuple(figures)
    alike = tuple(each for each in chosen if each.attention is attention) or chosen
    return min(alike, key=distance)


def seconds_of(relative: PublishedFigure, launch_s: float, flops: float) -> float:
    """Device seconds of one inference of `flops`: the relative's, of which what is beyond a launch grows with FLOPs."""
    return launch_s + (relative.latency_s - launch_s) * flops / relative.flops

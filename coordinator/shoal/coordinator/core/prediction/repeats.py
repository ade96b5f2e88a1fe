"""By how much two warm-ups of a model on one device differ: how well what was measured here is known."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

import numpy as np

from shoal.coordinator.core.prediction.groups import number_architectures, quantile_of_groups
from shoal.coordinator.core.prediction.model import Repeats
from shoal.coordinator.core.prediction.residuals import Residual
from shoal.coordinator.core.prediction.shared_covariance import mixes
from shoal.coordinator.core.prediction.shared_variances import COVERAGE, LEAST_GROUPS

_MOST: Final = math.log(2.0)
"""Further apart, the device is another one than it was (throttled, a new driver). The most of 94 pairs of medians of
`shoal bench prediction --live`, on two cores whose neighbours took as much as they liked: 0.6."""
_MOST_MODELS: Final = 256
"""That are looked at: distances of 256^2 mixes."""


def repeats_of(repeated: Sequence[Residual]) -> Repeats | None:
    """None where so few architectures were measured twice that not even the largest difference says how far a further
    one is. repeated: those of one device class, each with a `log_repeat`.

    Conformal prediction, with one score for each architecture, as `ResidualProcess` does it for other errors.
    """
    of_model = defaultdict[str, list[Residual]](list)
    for each in repeated:
        of_model[each.model].append(each)
    models = [of_model[name] for name in sorted(of_model)[:_MOST_MODELS]]
    if len(models) < LEAST_GROUPS:
        return None
    promised = mixes([rows[0] for rows in models])
    apart = ((promised[:, None] - promised) ** 2).sum(2)
    architectures = number_architectures([rows[0] for rows in models], apart)
    if int(architectures.max()) + 1 < LEAST_GROUPS:
        return None

    def factor(logs: Sequence[Sequence[float]]) -> float:
        scores = np.array([min(median(abs(each) for each in rows), _MOST) for rows in logs])
        return math.exp(quantile_of_groups(scores, architectures, COVERAGE))

    return Repeats(
        factor([[each.log_repeat for each in rows] for rows in models]),
        factor([[each.log_repeat_p95 for each in rows] for rows in models]),
    )

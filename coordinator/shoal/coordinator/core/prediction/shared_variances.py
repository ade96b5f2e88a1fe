"""By which variances measurements of models on devices are alike."""

import math
from typing import Final, NamedTuple

NORMAL_QUANTILE: Final = 1.645
"""Half an interval in standard deviations: what normal errors have at 90 %. Where errors within the region are wider,
these count."""
COVERAGE: Final = 0.9
"""Of intervals: the share of measurements that they are meant to hold."""
LEAST_GROUPS: Final = 9
"""Of the errors of fewer even the largest is no 90 % quantile of a further one's: 0.9 (n + 1) is more than n."""


class SharedVariances(NamedTuple):
    """Variances that two measurements share. The region's own errors scale them."""

    # Everywhere.
    region: float
    # With the same provider.
    provider: float
    # On the same device class.
    device_class: float
    # Of the same model.
    model: float
    # Of the same model with the same provider.
    model_and_provider: float
    # With the same provider, and as much as their operators are the same.
    operators: float = 0.0
    # With the same provider, times the product of their shares of the seconds: what kernels of a kind miss.
    kinds: float = 0.0

    @property
    def total(self) -> float:
        """Of one value, at most."""
        return math.fsum(self)

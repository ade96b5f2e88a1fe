"""How much longer the slowest of a model's runs take than the median: p95 over p50, learnt where it was seen.

The log of the log of the ratio is what is learnt: its errors are about symmetric, and p95 never falls below p50.
"""

import math
from typing import Final

from shoal.coordinator.core.prediction.model import Correction, Interval
from shoal.coordinator.core.prediction.shared_variances import NORMAL_QUANTILE, SharedVariances

_LEAST, _MOST = math.log(1.001), math.log(1000.0)
"""Logarithms of the ratios between which one is believed. The least of MLPerf's runs below is 1.0008."""
TAIL_MEAN: Final = -3.16
"""Of the log of log p95 / p50, before any was seen: a ratio of 1.043. It is the middle between two sources, which
differ by 1.7. MLPerf Inference v0.7, v1.0, v2.0, v3.0 and Mobile v3.1 (SingleStream summaries of tasks with inputs of
one size, 243 models on 99 machines that did nothing else): mean -4.0, deviation 0.8, ratios of 1.004 to 1.06. Warm-ups
of `shoal bench prediction --live` (32 models, twice, on two cores of an AMD EPYC that others kept busy): -2.3 and 0.5,
1.05 to 1.24."""
TAIL_NOISE: Final = 0.11
"""Variance between two warm-ups of a model on a device, in that benchmark."""
TAIL_SHARED: Final = SharedVariances(
    # Half each of what the two sources differ by: neither tells the one from the other.
    region=0.36,
    provider=0.36,
    # Between MLPerf's machines (analysis of variance, 80 with two models or more).
    device_class=0.18,
    # Between the benchmark's models on one device; half of it is taken to be the provider's own.
    model=0.08,
    model_and_provider=0.08,
)


def log_tail(p50_s: float, p95_s: float) -> float:
    """NaN where the two are none that could be."""
    if not 0 < p50_s <= p95_s < math.inf:
        return math.nan
    return math.log(min(max(math.log(p95_s / p50_s), _LEAST), _MOST))


def tail_ratios(log_tails: Interval) -> Interval:
    """p95 over p50 of an estimate of `log_tail`."""
    return Interval(*(math.exp(min(max(math.exp(each), _LEAST), _MOST)) for each in log_tails))


def tail_factors(median: Correction) -> Interval:
    """By what to multiply the promised seconds for p95. The errors of median and ratio have nothing to do with each
    other, so that their logarithms add as squares."""
    ratios, mid = median.tail, median.mid * median.tail.mid
    return Interval(
        mid / math.exp(math.hypot(math.log(median.mid / median.low), math.log(ratios.mid / ratios.low))),
        mid,
        mid * math.exp(math.hypot(math.log(median.high / median.mid), math.log(ratios.high / ratios.mid))),
    )


def _guess() -> Interval:
    half = NORMAL_QUANTILE * math.sqrt(TAIL_SHARED.total + TAIL_NOISE)
    return tail_ratios(Interval(TAIL_MEAN - half, TAIL_MEAN, TAIL_MEAN + half))


TAIL_GUESS: Final = _guess()
"""p95 over p50 before any was seen: 1.007, 1.043, 1.29."""

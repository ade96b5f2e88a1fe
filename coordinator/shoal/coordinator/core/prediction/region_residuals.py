"""What a region learns from its measurements: by how much they differ from what receipts promised, and where."""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from immutables import Map

from shoal.coordinator.core.prediction.load_law import (
    LoadEstimate,
    LoadLaw,
    LoadSeen,
    LoadSizes,
    LoadWait,
    memory_law,
    seconds_law,
    wait_of,
)
from shoal.coordinator.core.prediction.model import Correction
from shoal.coordinator.core.prediction.residual_process import ResidualProcess
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual
from shoal.coordinator.core.prediction.shared_variances import SharedVariances
from shoal.coordinator.core.prediction.tails import TAIL_MEAN, TAIL_NOISE, TAIL_SHARED, tail_ratios

MOST_RESIDUALS: Final = 256
"""Of models on device classes, that predictions are made from. Their covariance takes 256^3 operations, twice for each
change: 17 ms each on one core of an AMD EPYC."""
_MOST_REMEMBERED: Final = 4096
"""Answers kept, which are the same for all devices of a class."""
_RATIO_NOISE: Final = 0.005
"""Of the log ratio of measured to promised seconds: 7 % between devices of one class."""
_RATIO_SHARED: Final = SharedVariances(
    region=0.03, provider=0.04, operators=0.05, kinds=0.2, device_class=0.03, model=0.03, model_and_provider=0.015
)
"""Of the same. Without `kinds` their sum with the noise is 0.2: a factor of 2.1 to both sides, as a roofline has before
anything was measured (guide, section 3)."""


class RegionResiduals:
    """Predicts the error of a roofline, and the tail of latencies, from those that the region has seen."""

    def __init__(self, residuals: Iterable[Residual]) -> None:
        groups = defaultdict[tuple[str, DeviceClass], list[Residual]](list)
        for each in residuals:
            if each.is_plausible:
                groups[each.model, each.device_class].append(each)
        kept = [groups[key] for key in sorted(groups)[:MOST_RESIDUALS]]
        ratios = [_median(each.log_ratio for each in rows) for rows in kept]
        self._ratios = ResidualProcess([rows[0] for rows in kept], ratios, _RATIO_SHARED, _RATIO_NOISE)
        tails = [_median(each.log_tail for each in rows) for rows in kept]
        seen = [(rows[0], tail) for rows, tail in zip(kept, tails, strict=True) if math.isfinite(tail)]
        self._tails = ResidualProcess(
            [row for row, _ in seen], [tail for _, tail in seen], TAIL_SHARED, TAIL_NOISE, TAIL_MEAN
        )
        self._is_empty = not kept
        self._found = dict[Residual, Correction]()
        self._loads = [each for rows in groups.values() for each in rows if each.sizes is not None]
        self._memory_laws = dict[str, LoadLaw | None]()
        self._seconds_laws = dict[DeviceClass, tuple[LoadLaw, LoadWait] | None]()

    def load(self, device_class: DeviceClass, sizes: LoadSizes) -> LoadEstimate | None:
        """What loading a model of these sizes takes; None where the region has loaded too few on this class."""
        provider = device_class.provider
        if provider not in self._memory_laws:
            same = [each for each in self._loads if each.device_class.provider == provider]
            self._memory_laws[provider] = memory_law(_seen((each.sizes, each.memory_bytes) for each in same))
        if device_class not in self._seconds_laws:
            self._seconds_laws[device_class] = self._seconds_law(device_class)
        memory, seconds = self._memory_laws[provider], self._seconds_laws[device_class]
        if memory is None or seconds is None:
            return None
        law, wait = seconds
        work_s = law.estimate(sizes)
        return LoadEstimate(memory.estimate(sizes, never_under=True), wait.stretch(work_s), work_s)

    def _seconds_law(self, device_class: DeviceClass) -> tuple[LoadLaw, LoadWait] | None:
        """What loads on the class take of a processor where that is known, otherwise by the clock; and their waits."""
        same = [each for each in self._loads if each.device_class == device_class and 0 < each.load_s < math.inf]
        seen = [(each, each.load_cpu_s if 0 < each.load_cpu_s <= each.load_s else each.load_s) for each in same]
        law = seconds_law(_seen((each.sizes, work_s) for each, work_s in seen))
        return None if law is None else (law, wait_of([each.load_s / work_s for each, work_s in seen]))

    def correction(self, model: str, device_class: DeviceClass, mix: tuple[float, ...]) -> Correction | None:
        """By what to multiply the promised seconds; None where nothing was measured. mix: see `Residual`; taken in
        steps of a twentieth, so that the devices of a class share an answer."""
        if self._is_empty:
            return None
        asked = Residual(model, device_class, tuple(round(20 * share) / 20 for share in mix), 0.0)
        if asked not in self._found:
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
            self._found[asked] = self._correction(asked)
        return self._found[asked]

    def _correction(self, asked: Residual) -> Correction:
        low, mid, high = (math.exp(each) for each in self._ratios.estimate(asked))
        return Correction(low, mid, high, self._ratios.basis(asked), tail_ratios(self._tails.estimate(asked)))


def _median(values: Iterable[float]) -> float:
    """Of those that are numbers; NaN without any."""
    known = sorted(each for each in values if math.isfinite(each))
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else math.nan


def _seen(loads: Iterable[tuple[LoadSizes | None, float]]) -> list[LoadSeen]:
    """Those that could be."""
    return [LoadSeen(sizes, value) for sizes, value in loads if sizes is not None and 0 < value < math.inf]


@lru_cache(maxsize=8)
def region_residuals(residuals: Map[Any, Residual]) -> RegionResiduals:
    """Of all warm-ups, by any key. As a function of values, so that equal ones are not solved twice."""
    return RegionResiduals(residuals[key] for key in sorted(residuals))

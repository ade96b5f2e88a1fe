"""What a region learns from its measurements: by how much they differ from what receipts promised, and where."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from immutables import Map
from numpy.typing import NDArray

from shoal.coordinator.core.prediction.demand import ModelDemand, OperatorClass
from shoal.coordinator.core.prediction.load_law import (
    LoadEstimate,
    LoadLaw,
    LoadSeen,
    LoadSizes,
    memory_law,
    seconds_law,
)
from shoal.coordinator.core.prediction.model import Basis, Correction
from shoal.coordinator.core.prediction.predict import service_parts
from shoal.coordinator.core.prediction.transfer.process import ProcessSettings, robust_solution
from shoal.types.assignment import Measured
from shoal.types.device import Device
from shoal.types.receipt import Rates

MOST_RESIDUALS: Final = 256
"""Of models on device classes, that predictions are made from. Their covariance takes 256^3 operations, once for each
change: 17 ms on one core of an AMD EPYC."""
MOST_RATIO: Final = 1000.0
"""A measurement that differs by more from its roofline is not believed. The most that was seen is 69 (a Loop)."""
_QUANTILE: Final = 1.645
"""Half an interval in standard deviations: what normal errors have at 90 %. Where errors within the region are wider,
these count."""
_COVERAGE: Final = 0.9
_MOST_REMEMBERED: Final = 4096
"""Answers kept, which are the same for all devices of a class."""
_SETTINGS: Final = ProcessSettings(noise=0.005)
"""Noise: 7 % between devices of one class."""
_MOST_DEVIATIONS, _LEAST_DEVIATION = 3.0, 0.35
"""How far from the median one measurement may pull the predictions of other models; a deviation is 1.48 times the
median absolute one, and at least a factor of 1.4."""


class _Shared(NamedTuple):
    """Variances of the log ratio that two measurements share. Their sum with the noise is 0.2: a factor of 2.1 to both
    sides, as a roofline has before anything was measured (guide, section 3). The region's own errors scale it."""

    # Everywhere.
    region: float = 0.03
    # With the same provider.
    provider: float = 0.04
    # With the same provider, and as much as their operators are the same.
    operators: float = 0.05
    # With the same provider, times the product of their shares of the seconds: what kernels of a kind miss.
    kinds: float = 0.2
    # On the same device class.
    device_class: float = 0.03
    # Of the same model.
    model: float = 0.03
    # Of the same model with the same provider.
    model_and_provider: float = 0.015


_SHARED: Final = _Shared()
_REACH: Final = 0.3
"""Over which shares of the seconds two models are alike: a third of the time in other operators."""


class DeviceClass(NamedTuple):
    """Devices that should be equally fast."""

    # ONNX Runtime's name of the execution provider.
    provider: str
    # Maker and product.
    product: str


@dataclass(frozen=True, slots=True)
class Residual:
    """One measurement against what the device's receipt promised."""

    # The model variant.
    model: str
    # Provider and product of the device.
    device_class: DeviceClass
    # Shares of the roofline's seconds: launch and nodes, then each operator class.
    mix: tuple[float, ...]
    # Natural logarithm of measured over promised seconds.
    log_ratio: float
    # Of the model, at the warm-up's shapes; None in a record of an older version.
    sizes: LoadSizes | None = None
    # Growth of the worker's memory; NaN in such a record.
    memory_bytes: float = math.nan
    # What the load took; NaN in such a record.
    load_s: float = math.nan

    @property
    def is_plausible(self) -> bool:
        shares = len(self.mix) == 1 + len(OperatorClass) and all(0 <= share <= 1 for share in self.mix)
        return shares and abs(self.log_ratio) <= math.log(MOST_RATIO)


def class_of_device(device: Device) -> DeviceClass:
    return DeviceClass(device.provider, device.profile or f"{device.vendor} {device.model}")


def residual_of(
    model: str,
    device: Device,
    rates: Rates,
    precision: str,
    demand: ModelDemand,
    measured: Measured,
    sizes: LoadSizes | None = None,
) -> Residual | None:
    """None where the receipt promises nothing, or the measurement is none that could be."""
    measured_s = measured.latency_p50_s
    parts = service_parts(demand, rates, precision)
    promised = math.fsum(parts)
    if not (promised > 0 and 0 < measured_s < math.inf):
        return None
    mix = tuple(part / promised for part in parts)
    ratio = math.log(measured_s / promised)
    found = Residual(model, class_of_device(device), mix, ratio, sizes, measured.memory_bytes, measured.load_s)
    return found if found.is_plausible else None


class RegionResiduals:
    """Predicts the error of a roofline from those that the region has seen.

    The log ratio of measured to promised seconds is a Gaussian process over (model, device class): measurements share
    what they have in common (`_Shared`). Few measurements on a new class thus transfer to all its models, and those of
    a model to other classes.
    """

    def __init__(self, residuals: Iterable[Residual]) -> None:
        groups = defaultdict[tuple[str, DeviceClass], list[Residual]](list)
        for each in residuals:
            if each.is_plausible:
                groups[each.model, each.device_class].append(each)
        kept = sorted(groups)[:MOST_RESIDUALS]
        self._seen = [groups[key][0] for key in kept]
        self._ratios = np.array([np.median([each.log_ratio for each in groups[key]]) for key in kept], float)
        self._bounded = _bound(self._ratios)
        self._keys = frozenset(kept)
        self._classes = frozenset(each.device_class for each in self._seen)
        self._found = dict[Residual, Correction]()
        self._loads = [each for rows in groups.values() for each in rows if each.sizes is not None]
        self._memory_laws = dict[str, LoadLaw | None]()
        self._seconds_laws = dict[DeviceClass, LoadLaw | None]()

    def load(self, device_class: DeviceClass, sizes: LoadSizes) -> LoadEstimate | None:
        """What loading a model of these sizes takes; None where the region has loaded too few on this class."""
        provider = device_class.provider
        if provider not in self._memory_laws:
            same = [each for each in self._loads if each.device_class.provider == provider]
            self._memory_laws[provider] = memory_law(_seen((each.sizes, each.memory_bytes) for each in same))
        if device_class not in self._seconds_laws:
            same = [each for each in self._loads if each.device_class == device_class]
            self._seconds_laws[device_class] = seconds_law(_seen((each.sizes, each.load_s) for each in same))
        memory, seconds = self._memory_laws[provider], self._seconds_laws[device_class]
        if memory is None or seconds is None:
            return None
        return LoadEstimate(memory.estimate(sizes, never_under=True), seconds.estimate(sizes))

    def correction(self, model: str, device_class: DeviceClass, mix: tuple[float, ...]) -> Correction | None:
        """By what to multiply the promised seconds; None where nothing was measured. mix: see `Residual`; taken in
        steps of a twentieth, so that the devices of a class share an answer."""
        if not self._seen:
            return None
        asked = Residual(model, device_class, tuple(round(20 * share) / 20 for share in mix), 0.0)
        if asked not in self._found:
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
            self._found[asked] = self._correction(asked)
        return self._found[asked]

    def _correction(self, asked: Residual) -> Correction:
        inverse, scale = self._solution
        across = _covariance([asked], self._seen)[0]
        own_model = np.array([each.model == asked.model for each in self._seen])
        solved = inverse @ np.where(own_model, self._ratios, self._bounded)
        own = float(_covariance([asked], [asked])[0, 0])
        middle = float(across @ solved)
        variance = scale * (max(own - float(across @ inverse @ across), 0.0) + _SETTINGS.noise)
        basis = self._basis(asked.model, asked.device_class)
        half = self._quantiles[basis] * math.sqrt(variance)
        return Correction(math.exp(middle - half), math.exp(middle), math.exp(middle + half), basis)

    def _basis(self, model: str, device_class: DeviceClass) -> Basis:
        if (model, device_class) in self._keys:
            return Basis.SAME_CLASS
        return Basis.CALIBRATED if device_class in self._classes else Basis.TRANSFERRED

    @cached_property
    def _solution(self) -> tuple[NDArray[np.float64], float]:
        """The inverse of the covariance, and the scale of all variances."""
        inverse, _, scale = robust_solution(_SETTINGS, _covariance(self._seen, self._seen), self._bounded)
        return inverse, scale

    @cached_property
    def _quantiles(self) -> dict[Basis, float]:
        """Half an interval in standard deviations, by leaving out all of a model, or all of a device class."""
        models = self._left_out(lambda each: each.model)
        classes = self._left_out(lambda each: each.device_class.product)
        return {Basis.SAME_CLASS: _QUANTILE, Basis.CALIBRATED: models, Basis.TRANSFERRED: classes}

    def _left_out(self, group_of: Callable[[Residual], str]) -> float:
        """The quantile of errors in standard deviations, each group predicted from the others.

        Source: the leave-one-out residuals of a Gaussian process in closed form, here by block (Rasmussen, Williams,
        2006, equations 5.10 to 5.12).
        """
        groups = defaultdict[str, list[int]](list)
        for number, each in enumerate(self._seen):
            groups[group_of(each)].append(number)
        inverse, scale = self._solution
        solved = inverse @ self._bounded
        scores = []
        for rows in groups.values() if len(groups) > 1 else ():
            block = np.linalg.inv(inverse[np.ix_(rows, rows)])
            scores += [*(np.abs(block @ solved[rows]) / np.sqrt(scale * np.diag(block)))]
        if not scores:
            return _QUANTILE
        rank = min(len(scores), math.ceil(_COVERAGE * (len(scores) + 1)))
        return max(_QUANTILE, float(np.sort(scores)[rank - 1]))


def _seen(loads: Iterable[tuple[LoadSizes | None, float]]) -> list[LoadSeen]:
    """Those that could be."""
    return [LoadSeen(sizes, value) for sizes, value in loads if sizes is not None and 0 < value < math.inf]


def _bound(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ratios, none further from their median than what is believed of others: a model that is unlike all others, or
    a node that errs or lies, decides what is predicted of that model alone."""
    if not len(ratios):
        return ratios
    middle = np.median(ratios)
    most = _MOST_DEVIATIONS * max(1.4826 * float(np.median(np.abs(ratios - middle))), _LEAST_DEVIATION)
    bounded: NDArray[np.float64] = ratios.clip(middle - most, middle + most)
    return bounded


@lru_cache(maxsize=8)
def region_residuals(residuals: Map[Any, Residual]) -> RegionResiduals:
    """Of all warm-ups, by any key. As a function of values, so that equal ones are not solved twice."""
    return RegionResiduals(residuals[key] for key in sorted(residuals))


def _covariance(one: Sequence[Residual], other: Sequence[Residual]) -> NDArray[np.float64]:
    """(one, other): of the log ratios."""

    def same(key: Callable[[Residual], object]) -> NDArray[np.float64]:
        numbers: dict[object, int] = {}
        left = np.array([numbers.setdefault(key(each), len(numbers)) for each in one])
        right = np.array([numbers.setdefault(key(each), len(numbers)) for each in other])
        found: NDArray[np.float64] = (left[:, None] == right).astype(np.float64)
        return found

    mixes, others = np.array([each.mix for each in one]), np.array([each.mix for each in other])
    apart = ((mixes[:, None] - others) ** 2).sum(2)
    provider = same(lambda each: each.device_class.provider)
    model = same(lambda each: each.model)
    shared: NDArray[np.float64] = (
        _SHARED.region
        + provider * (_SHARED.provider + _SHARED.operators * np.exp(-apart / (2 * _REACH**2)))
        + provider * _SHARED.kinds * (mixes @ others.T)
        + same(lambda each: each.device_class) * _SHARED.device_class
        + model * (_SHARED.model + provider * _SHARED.model_and_provider)
    )
    return shared

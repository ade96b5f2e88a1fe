"""What a region learns from its measurements: by how much they differ from what receipts promised, and where."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

from immutables import Map

from shoal.coordinator.core.prediction.demand import PROCESSOR
from shoal.coordinator.core.prediction.load_law import (
    LEAST_LOADS,
    LoadEstimate,
    LoadLaw,
    LoadNeeds,
    LoadSeen,
    LoadSizes,
    LoadWait,
    memory_law,
    seconds_law,
    wait_of,
)
from shoal.coordinator.core.prediction.model import Correction, Interval, Repeats
from shoal.coordinator.core.prediction.repeats import repeats_of
from shoal.coordinator.core.prediction.residual_process import ResidualProcess
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual, holds_provider
from shoal.coordinator.core.prediction.shared_variances import SharedVariances
from shoal.coordinator.core.prediction.tails import TAIL_MEAN, TAIL_NOISE, TAIL_SHARED, tail_ratios

MOST_RESIDUALS: Final = 256
"""Of models on device classes, that predictions are made from. Products and inverses of matrices of 256^2 numbers:
`learn` takes 10 ms on one core of an AMD EPYC (median of 30; figures and tails of 32 models on 8 classes)."""
_MOST_REMEMBERED: Final = 4096
"""Answers kept, which are the same for all devices of a class."""
_MOST_LAWS: Final = 256
"""Laws kept: of memory one for each provider, and of seconds one for each device class."""
_MOST_WAIT: Final = 1000.0
"""A load that took longer than so many times its processor time says nothing of its work. A choice."""
_UNSEEN: Final[Mapping[str, Any]] = {
    "log_ratio": 0.0, "log_ratio_of_sum": 0.0, "load_sizes": None, "memory_bytes": 0.0, "load_s": 0.0,
    "load_cpu_s": 0.0, "log_tail": 0.0, "tail_runs": 0, "memory_sizes": None,
    "profile_version": 0, "provider_bytes": 0.0, "log_repeat": 0.0, "log_repeat_p95": 0.0,
}  # fmt: skip
"""Of a residual, what no prediction reads of the first of a kind."""
_RATIO_NOISE: Final = 0.005
"""Of the log ratio of measured to promised seconds: 7 % between devices of one class."""
_RATIO_SHARED: Final = SharedVariances(
    region=0.03, provider=0.04, operators=0.05, kinds=0.2, device_class=0.03, model=0.03, model_and_provider=0.015
)
"""Of the same. Without `kinds` their sum with the noise is 0.2: a factor of 2.1 to both sides, as a roofline has before
anything was measured. Kinds are beside it, since one may be off by more."""


class RegionResiduals:
    """Predicts the error of a roofline, and the tail of latencies, from those that the region has seen, and after them
    from those that other regions have."""

    def __init__(self, residuals: Iterable[Residual]) -> None:
        """residuals: its own measurements of a model on a class count instead of imported ones. Of several regions' the
        median does."""
        found = defaultdict[tuple[str, DeviceClass], list[Residual]](list)
        for each in residuals:
            if each.is_plausible:
                found[each.model, each.device_class].append(each)
        groups = {key: _own_or_all(rows) for key, rows in found.items()}
        of_sums = {key: of_sum for key, rows in groups.items() if (of_sum := [each for each in rows if each.is_of_sum])}
        order = sorted(of_sums, key=lambda key: (bool(of_sums[key][0].imported_from), key))
        kept = [of_sums[key] for key in order[:MOST_RESIDUALS]]
        self._errors = _errors_of(
            tuple(
                _Seen(
                    replace(rows[0], **_UNSEEN),
                    _median(each.log_ratio_of_sum for each in rows),
                    _median(each.log_tail for each in rows),
                )
                for rows in kept
            )
        )
        self._loads = [each for rows in groups.values() for each in rows if each.load_sizes is not None]
        self._repeated = [each for rows in groups.values() for each in rows if math.isfinite(each.log_repeat)]
        self._memory_laws = dict[str, _MemoryLaw | None]()
        self._seconds_laws = dict[DeviceClass, tuple[LoadLaw, LoadWait] | None]()
        self._estimates = dict[tuple[DeviceClass, LoadNeeds, float], LoadEstimate]()

    @cached_property
    def repeats(self) -> Mapping[DeviceClass, Repeats]:
        """By how much two warm-ups of a model differ on one device, by class; without those of which too few tell."""
        of_class = defaultdict[DeviceClass, list[Residual]](list)
        for each in self._repeated:
            of_class[each.device_class].append(each)
        known = {device_class: repeats_of(rows) for device_class, rows in of_class.items()}
        return {device_class: repeats for device_class, repeats in known.items() if repeats is not None}

    def learn(self) -> None:
        """Does now what the first predictions would wait for."""
        self._errors.learn()
        for device_class in {each.device_class for each in self._loads}:
            self._laws_of(device_class)
        _ = self.repeats

    def load(self, device_class: DeviceClass, needs: LoadNeeds, provider_bytes: float = 0.0) -> LoadEstimate | None:
        """What loading a model takes, in a worker of its own; None where the region has loaded too few on this class.
        provider_bytes: of the device's receipt."""
        # The law of the processor's own provider has it: devices of a class share an answer.
        key = device_class, needs, 0.0 if device_class.provider == PROCESSOR else provider_bytes
        known = self._estimates.get(key)  # plans ask from another thread than steps
        if known is None and (known := self._load(*key)) is not None:
            if len(self._estimates) >= _MOST_REMEMBERED:
                self._estimates.clear()
            self._estimates[key] = known
        return known

    def _load(self, device_class: DeviceClass, needs: LoadNeeds, provider_bytes: float) -> LoadEstimate | None:
        memory, seconds = self._laws_of(device_class)
        if memory is None or seconds is None:
            return None
        law, wait = seconds
        work_s = law.estimate(needs.sizes)
        held = memory.estimate(_memory_sizes(needs, device_class.provider), provider_bytes)
        return LoadEstimate(held, wait.stretch(work_s), work_s)

    def _work_law(self, device_class: DeviceClass) -> tuple[LoadLaw, LoadWait] | None:
        """What loads on the class take of a processor where that is known, otherwise by the clock; and their waits."""
        same = _own_if_enough(
            [each for each in self._loads if each.device_class == device_class and 0 < each.load_s < math.inf]
        )
        seen = [
            (each, each.load_cpu_s if each.load_s / _MOST_WAIT <= each.load_cpu_s <= each.load_s else each.load_s)
            for each in same
        ]
        law = _seconds_law(_seen((each.load_sizes, work_s, 0.0) for each, work_s in seen), device_class.provider)
        return None if law is None else (law, wait_of([each.load_s / work_s for each, work_s in seen]))

    def _laws_of(self, device_class: DeviceClass) -> tuple["_MemoryLaw | None", tuple[LoadLaw, LoadWait] | None]:
        """Of memory, which loads with one provider share, and of seconds."""
        provider = device_class.provider
        if provider not in self._memory_laws:
            same = _own_if_enough([each for each in self._loads if each.device_class.provider == provider])
            self._memory_laws[provider] = _memory_law_of(same, provider)
        if device_class not in self._seconds_laws:
            self._seconds_laws[device_class] = self._work_law(device_class)
        return self._memory_laws[provider], self._seconds_laws[device_class]

    def correction(self, model: str, device_class: DeviceClass, mix: tuple[float, ...]) -> Correction | None:
        """By what to multiply the promised seconds; None where nothing was measured. mix: see `Residual`; taken in
        steps of a twentieth, so that the devices of a class share an answer."""
        return self._errors.correction(
            Residual(model, device_class, tuple(round(20 * share) / 20 for share in mix), 0.0)
        )


def _own_or_all(rows: list[Residual]) -> list[Residual]:
    """Those of this region, where it measured the latency of the model on the class. rows: of one pair."""
    own = [each for each in rows if not each.imported_from]
    return own if any(each.is_of_sum for each in own) else rows


def _own_if_enough(loads: list[Residual]) -> list[Residual]:
    """Those of this region once a law can be made of them: a wrong one would have memory committed that is too little
    for what it loads itself."""
    own = [each for each in loads if not each.imported_from]
    return own if len(own) >= LEAST_LOADS else loads


class _MemoryLaw(NamedTuple):
    """What loads with one provider take."""

    law: LoadLaw
    # What the provider takes for itself where no receipt says it. 0: the law has that in it.
    provider_bytes: float
    # Of what the provider takes for itself, as probed, the part that every load took.
    own_share: float = 1.0

    def estimate(self, sizes: LoadSizes, provider_bytes: float) -> Interval:
        known = (provider_bytes or self.provider_bytes) if self.provider_bytes else 0.0
        return self.law.estimate(sizes, known=self.own_share * known, never_under=True)


def _memory_law_of(loads: Sequence[Residual], provider: str) -> _MemoryLaw | None:
    """What a provider takes for itself differs between its devices, by 100 MB and more. Where it is known of enough
    loads, the law is of what they took beside it. It is among the sizes of the processor's own provider already."""
    is_own = provider == PROCESSOR
    rows = [
        (_seen_sizes(each), each.memory_bytes, each.provider_bytes)
        for each in loads
        if is_own or holds_provider(each.memory_bytes, each.provider_bytes)  # an earlier version kept others
    ]
    told = [row for row in rows if row[2] > 0] if not is_own else []
    # A share, since a law would lay what is less to all models, whatever a device's provider takes.
    share = min([1.0, *(value / known for _, value, known in told)])
    law = _memory_law(_seen((sizes, value, share * known) for sizes, value, known in told), provider)
    if law is not None:
        return _MemoryLaw(law, _median(known for _, _, known in told), share)
    law = _memory_law(_seen((sizes, value, 0.0) for sizes, value, _ in rows), provider)
    return None if law is None else _MemoryLaw(law, 0.0)


def _memory_sizes(needs: LoadNeeds, provider: str) -> LoadSizes:
    """Of other providers' phases nothing is known."""
    return needs.memory_sizes if provider == PROCESSOR else needs.sizes


def _seen_sizes(seen: Residual) -> LoadSizes | None:
    """What the memory of the load is linear in."""
    if seen.load_sizes is None or seen.memory_sizes is None:
        return seen.load_sizes
    return _memory_sizes(LoadNeeds(seen.load_sizes, seen.memory_sizes), seen.device_class.provider)


class _Seen(NamedTuple):
    """What was measured of one model on one device class."""

    # Model, class and mix.
    place: Residual
    # Median of `Residual.log_ratio_of_sum`.
    log_ratio: float
    # Median of `Residual.log_tail`; NaN: unknown.
    log_tail: float


class _Errors:
    """By how much the seconds of models differ from their rooflines."""

    def __init__(self, seen: Sequence[_Seen]) -> None:
        self._ratios = ResidualProcess(
            [each.place for each in seen], [each.log_ratio for each in seen], _RATIO_SHARED, _RATIO_NOISE
        )
        tails = [each for each in seen if math.isfinite(each.log_tail)]
        self._tails = ResidualProcess(
            [each.place for each in tails], [each.log_tail for each in tails], TAIL_SHARED, TAIL_NOISE, TAIL_MEAN
        )
        self._is_empty = not seen
        self._found = dict[Residual, Correction]()

    def learn(self) -> None:
        self._ratios.learn()
        self._tails.learn()

    def correction(self, asked: Residual) -> Correction | None:
        if self._is_empty:
            return None
        known = self._found.get(asked)  # plans ask from another thread than steps
        if known is None:
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
            low, mid, high = (math.exp(each) for each in self._ratios.estimate(asked))
            tails = tail_ratios(self._tails.estimate(asked))
            known = self._found[asked] = Correction(low, mid, high, self._ratios.basis(asked), tails)
        return known


def _median(values: Iterable[float]) -> float:
    """Of those that are numbers; NaN without any."""
    known = sorted(each for each in values if math.isfinite(each))
    return (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else math.nan


def _seen(loads: Iterable[tuple[LoadSizes | None, float, float]]) -> tuple[LoadSeen, ...]:
    """Those that could be, of (sizes, value, known)."""
    return tuple(
        LoadSeen(sizes, value, known) for sizes, value, known in loads if sizes is not None and 0 < value < math.inf
    )


# As functions of values, so that what did not change is not solved twice.
_errors_of = lru_cache(maxsize=8)(_Errors)
_memory_law = lru_cache(maxsize=_MOST_LAWS)(memory_law)
_seconds_law = lru_cache(maxsize=_MOST_LAWS)(seconds_law)


@lru_cache(maxsize=8)
def region_residuals(residuals: Map[Any, Residual]) -> RegionResiduals:
    """Of all warm-ups, by any key."""
    return RegionResiduals(residuals[key] for key in sorted(residuals))

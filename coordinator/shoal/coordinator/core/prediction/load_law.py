"""What loading a model takes, in memory and time, by its sizes: linear laws, learnt from what the region loaded."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.coordinator.core.prediction.demand import PROCESSOR
from shoal.coordinator.core.prediction.model import Interval
from shoal.coordinator.core.prediction.of_profiles import OfProfiles
from shoal.types.profile import ModelProfile

LEAST_LOADS: Final = 8
"""From fewer no law is learnt: it has eight coefficients."""
_INNER_GRAPHS: Final = {"If": 2, "Loop": 1, "Scan": 1}
"""By operator: the graphs that a node has."""
_CONVOLUTIONS: Final = frozenset({"conv", "pointwise", "grouped", "depthwise"})
_ERROR: Final = 0.1
"""Relative error of a load that the law should explain; larger ones lose weight."""
_REWEIGHTINGS: Final = 5
_FREEDOM: Final = 4.0
_COVERAGE: Final = 0.9
_DEVIATIONS: Final = 1.645
"""Standard deviations to either side within which 90 % of a normal distribution lies."""
_MOST_OVER: Final = 3.0
"""One load may widen the upper end of memory to so many times half the interval."""
_LEAST_HALF: Final = 0.05
"""Half an interval at least, of the middle."""


class LoadSizes(NamedTuple):
    """What the memory and the time of a load are linear in."""

    # Always 1.
    session: float
    # Whether there are convolutions, whose weights the runtime orders otherwise: 0 or 1.
    convolutions: float
    # Bytes of the weights of convolutions.
    convolution_bytes: float
    # Bytes of the rest of the file, and a third of what is copied beside the usual (`ModelProfile.copied_bytes`): of
    # each byte of a file there are three copies at the peak.
    other_bytes: float
    # Of a run with as many requests as run together, what goes beyond the memory that a load has freed by then; of an
    # older profile, and in a record of an older version, the peak of live tensors.
    activation_bytes: float
    # Nodes of the graph.
    nodes: float
    # Of the largest weight, which is there once more while it is converted; 0 in a record of an older version.
    largest_weight_bytes: float = 0.0
    # Graphs inside nodes, each of which the runtime opens like a model; 0 in such a record.
    inner_graphs: float = 0.0


class LoadNeeds(NamedTuple):
    """What a load's laws ask for."""

    # What its time is linear in, and its memory where nothing is known of the runtime's phases.
    sizes: LoadSizes
    # What its memory is linear in with the runtime's own provider for processors: `other_bytes` are a third of what it
    # takes until it is ready, `activation_bytes` what a run takes beyond that; neither in proportion to weights.
    memory_sizes: LoadSizes


class LoadSeen(NamedTuple):
    """One load."""

    # Of the model.
    sizes: LoadSizes
    # Growth of the worker's memory, or seconds.
    value: float
    # The part of it that is known otherwise, and not linear in sizes.
    known: float = 0.0


class _Prior(NamedTuple):
    """Of a law's coefficients, before anything was loaded."""

    mean: LoadSizes
    deviation: LoadSizes


_PROCESSOR_MEMORY: Final = _Prior(
    LoadSizes(1e7, 2e6, 3.7, 3.0, 1.3, 6e3, 0.3, 1e4),
    LoadSizes(1e7, 2e6, 0.5, 0.25, 0.5, 6e3, 0.5, 1e5),
)
"""(mean, standard deviation) of the coefficients before anything was loaded: bytes. Of files: as many copies as ONNX
Runtime 1.32 makes at its peak (as read, as parsed, as tensors; ten models of over 4 MB had 2.7 to 3.05 in
`memory_sizes`, which count copies); of convolutions 0.6 to 1.1 more, since their weights are there in two orders. An
inner graph without weights took 11 KB.
The region's own loads decide."""
_MEMORY: Final = _PROCESSOR_MEMORY._replace(deviation=_PROCESSOR_MEMORY.deviation._replace(session=1e8))
"""The same of other providers: they bring libraries of 100 MB and more."""
_FILE_COPIES: Final = 3
_CODE_BYTES: Final = 8.1 * 2**20
"""Pages of the runtime's code that a first session touches once it has read its file: RssFile of fresh workers with
ONNX Runtime 1.32 on x86 rose from 29.4 to 37.1 .. 38.2 MiB with six of seven models while it optimised them. With the
seventh the peak came before."""
_OPERATOR_CODE_BYTES: Final = 8e4
"""Pages of code for each kind of operator in a graph: RssFile of such workers rose by 16.5 MiB with two kinds (a
perceptron), by 17.1 to 17.5 with seven to nine of eleven models, and by 17.6 to 18.6 with 18 to 24."""
_REORDER_COPIES: Final = 3
"""Of the convolution's weights that are being reordered: nchwc_transformer.cc holds them unpacked, in their new order,
and as a new tensor."""
_RUN_SHARE: Final = 1.25
"""Memory that a run takes for each byte of `ModelProfile.run_bytes`: what the region's law says of most models."""
_PROCESSOR_SECONDS: Final = _Prior(
    LoadSizes(5e-3, 2e-3, 5e-9, 5e-9, 1e-9, 1e-4, 0.0, 5e-5),
    LoadSizes(1e-2, 1e-2, 1e-8, 1e-8, 1e-9, 2e-4, 1e-9, 2e-4),
)
"""In seconds: a session, and a file at 200 MB/s. As wide as what ONNX Runtime 1.31 took on two processors."""
_SECONDS: Final = _PROCESSOR_SECONDS._replace(deviation=LoadSizes(0.3, 0.1, 1e-7, 1e-7, 1e-9, 5e-3, 1e-9, 2e-4))
"""The same of other providers: they may compile. QNN's took 0.1 to 1.2 s for models that the processor's loads in 5 to
70 ms."""


def seconds_before_loads(sizes: LoadSizes, provider: str, load_bytes: float) -> Interval:
    """Of a device on which the region loaded too few: the law before anything was loaded. load_bytes: per second, that
    the device's probe found a file of one weight to be opened at; where that is slower than the law, it counts."""
    prior = _PROCESSOR_SECONDS if provider == PROCESSOR else _SECONDS
    each, of_byte = np.array(sizes, float), 1 / load_bytes

    def at_least(coefficients: LoadSizes) -> NDArray[np.float64]:
        of_convolutions, of_others = coefficients.convolution_bytes, coefficients.other_bytes
        slower = coefficients._replace(
            convolution_bytes=max(of_convolutions, of_byte), other_bytes=max(of_others, of_byte)
        )
        return np.array(slower, float)

    middle = float(each @ at_least(prior.mean))
    # A rate is as much in doubt where it was probed: by one file, from memory.
    half = _DEVIATIONS * float(np.linalg.norm(each * at_least(prior.deviation)))
    return Interval(max(middle - half, 0.1 * middle), middle, middle + half)


class LoadEstimate(NamedTuple):
    """What a load will take."""

    # Bytes; `high` is as far above the law as any load of the region.
    memory_bytes: Interval
    # Seconds by the clock.
    load_s: Interval
    # Seconds of a processor, as far as the region's loads say them.
    work_s: Interval


def sizes_of(profile: ModelProfile, batch: int = 1) -> LoadSizes:
    """batch: most requests that run as one."""
    convolved = sum(each.weight_bytes for each in profile.kernels if each.kind in _CONVOLUTIONS)
    convolved = min(convolved, float(profile.weight_bytes))
    # What a load holds only until it ends: the file, and half of the further copies. A run uses that memory again. The
    # live tensors of an older profile are less than a run takes already.
    freed = profile.size_bytes + profile.copied_bytes / 2 if profile.run_bytes else 0.0
    return LoadSizes(
        session=1.0,
        convolutions=float(convolved > 0),
        convolution_bytes=convolved,
        other_bytes=max(0.0, profile.size_bytes - convolved) + profile.copied_bytes / _FILE_COPIES,
        activation_bytes=max(0.0, profile.memory_of_run(batch) - freed / _RUN_SHARE),
        nodes=float(sum(cost.nodes for cost in profile.costs)),
        largest_weight_bytes=float(profile.largest_weight_bytes),
        inner_graphs=float(sum(_INNER_GRAPHS.get(cost.operator, 0) * cost.nodes for cost in profile.costs)),
    )


def load_needs(profile: ModelProfile, batch: int = 1) -> LoadNeeds:
    """What a load of the model takes is linear in. batch: most requests that run as one."""
    return _needs(profile, batch)


def _load_needs(profile: ModelProfile, batch: int) -> LoadNeeds:
    """The peak until a load is ready is the larger of `read` and `optimised`: 42.7 MiB of a file of 10.4 MB in Constant
    nodes (PP-OCR's recogniser) by the first, 46.3 of one of 12.7 with a large product by the second.
    """
    sizes = sizes_of(profile, batch)
    if not profile.run_bytes:
        return LoadNeeds(sizes, sizes)
    file, kept = float(profile.size_bytes), float(profile.copied_bytes if sizes.inner_graphs else 0)
    read = _FILE_COPIES * file + profile.copied_bytes
    reordered = sizes.convolution_bytes + _REORDER_COPIES * _largest_convolution_bytes(profile)
    # The file as it was read, its tensors, and those that are made of them.
    made = max(sizes.largest_weight_bytes, reordered, float(profile.inner_packed_bytes))
    optimised = _CODE_BYTES + 2 * file + kept + float(profile.folded_bytes) + made
    ready = max(read, optimised)
    ran = _CODE_BYTES + file + kept + _RUN_SHARE * profile.memory_of_run(batch)
    memory_sizes = sizes._replace(
        convolution_bytes=0.0,
        other_bytes=(ready - _CODE_BYTES + _operator_code_bytes(profile)) / _FILE_COPIES,
        activation_bytes=max(0.0, ran - ready) / _RUN_SHARE,
        largest_weight_bytes=0.0,
    )
    return LoadNeeds(sizes, memory_sizes)


_needs = OfProfiles(_load_needs)


def _operator_code_bytes(profile: ModelProfile) -> float:
    return _OPERATOR_CODE_BYTES * len(profile.costs)


def _largest_convolution_bytes(profile: ModelProfile) -> float:
    """Of an older profile an upper bound: it tells the sum of kernels that are about equally intense."""
    most = max((each.weight_bytes for each in profile.kernels if each.kind in _CONVOLUTIONS), default=0.0)
    return float(profile.largest_convolution_bytes) or min(most, float(profile.largest_weight_bytes))


def file_bytes_at_peak(profile: ModelProfile) -> float:
    """What a load holds of the file, and of what is made of it, until it is ready; 0 of an older profile."""
    if not profile.run_bytes:
        return 0.0
    return _FILE_COPIES * load_needs(profile).memory_sizes.other_bytes - _operator_code_bytes(profile)


class LoadWait(NamedTuple):
    """What loads take by the clock, in parts of what they take of a processor: they wait for it, and for a disk. Each
    has the same chance of such a wait, whatever it loads."""

    # Nine of ten loads wait between low and high; mid is the median.
    parts: Interval

    def stretch(self, work_s: Interval) -> Interval:
        """By the clock. Both errors add as squares of logarithms, since neither knows of the other."""
        mid = work_s.mid * self.parts.mid

        def half(of_work: float, of_wait: float) -> float:
            return math.exp(math.hypot(math.log(of_work), math.log(of_wait)))

        low = half(work_s.mid / work_s.low, self.parts.mid / self.parts.low)
        return Interval(mid / low, mid, mid * half(work_s.high / work_s.mid, self.parts.high / self.parts.mid))


class _Spread(NamedTuple):
    """How far loads are from a law."""

    # Of what the law says.
    share: float
    # Besides, in the unit of the law's values: what a small model takes depends on what the worker held already.
    amount: float
    # The amount by which the load furthest above the law exceeds it.
    most: float


class _Fit(NamedTuple):
    """A weighted fit, in units of the prior's deviations and of each load's own error."""

    # (loads, coefficients): what each load says of the coefficients.
    rows: NDArray[np.float64]
    # (coefficients, coefficients): their covariance.
    inverse: NDArray[np.float64]
    # How far each coefficient is from the prior's mean.
    coefficients: NDArray[np.float64]
    # Of each load.
    residuals: NDArray[np.float64]


class LoadLaw:
    """A linear law with errors of a size and of a share. Ridge regression around the prior, with Student-t errors by
    reweighting, as in `transfer.process`."""

    def __init__(self, seen: Sequence[LoadSeen], prior: _Prior) -> None:
        """At least one."""
        mean, deviation = (np.array(each, float) for each in prior)
        values = np.array([each.value for each in seen], float)
        sizes = np.array([each.sizes for each in seen], float)
        known = np.array([each.known for each in seen], float)
        missing, scaled = values - known - sizes @ mean, sizes * deviation
        trust, amount = np.ones(len(seen)), 0.0

        def fit() -> _Fit:
            off = np.hypot(_ERROR * values, amount / _DEVIATIONS)
            rows = scaled / off[:, None]
            inverse, found = _ridge(rows, missing / off, trust)
            return _Fit(rows, inverse, found, missing / off - rows @ found)

        for _ in range(_REWEIGHTINGS):
            found = fit()
            apart = missing - scaled @ found.coefficients
            trust, amount = _trust_of(found.residuals), _spread(values - apart, apart).amount
        rows, inverse, coefficients, _ = fit()
        leverage = trust * np.einsum("ij,jk,ik->i", rows, inverse, rows)
        # Of each value from what the others say of it.
        apart = (missing - scaled @ coefficients) / np.clip(1 - leverage, 0.05, 1.0)
        # Not of what was learnt of a session, which may be below 0.
        self._least = 0.1 * prior.mean.session
        self._coefficients: NDArray[np.float64] = mean + deviation * coefficients
        self._covariance: NDArray[np.float64] = inverse * np.outer(deviation, deviation)
        self._spread = _spread(values - apart, apart)

    def estimate(self, sizes: LoadSizes, *, known: float = 0.0, never_under: bool = False) -> Interval:
        """known: as of a load. never_under: `high` is as far above the law as any value seen, within `_MOST_OVER`."""
        each = np.array(sizes, float)
        middle = max(known + float(each @ self._coefficients), self._least)
        # Beyond what was loaded the law itself is in doubt.
        unknown = _DEVIATIONS * math.sqrt(max(0.0, float(each @ self._covariance @ each)))
        share, amount, most = self._spread
        half = max(share * middle + amount, unknown)
        over = min(max(half, share * middle + most), _MOST_OVER * half) if never_under else half
        return Interval(max(middle - half, 0.1 * middle), middle, middle + over)


def _spread(said: NDArray[np.float64], apart: NDArray[np.float64]) -> _Spread:
    """said: by the law, of each load. apart: how far the load is above.

    Of the bytes (or seconds) that the law said, 90 % are within the share: large loads tell of it, and small ones, that
    are a multiple of what was said, do not. Of the loads, 90 % are within share and amount.
    """
    said = np.maximum(said, 1e-9)
    off = np.abs(apart) / said
    order = np.argsort(off)
    share = float(off[order][np.searchsorted(np.cumsum(said[order]), _COVERAGE * said.sum())])
    share = max(_LEAST_HALF, share)
    beyond = np.sort(np.abs(apart) - share * said)
    # Split conformal prediction.
    rank = min(len(beyond), math.ceil(_COVERAGE * (len(beyond) + 1)))
    return _Spread(share, max(0.0, float(beyond[rank - 1])), max(0.0, float((apart - share * said).max())))


def _ridge(
    rows: NDArray[np.float64], missing: NDArray[np.float64], trust: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The inverse of the penalised normal matrix, and the coefficients."""
    # Hermitian, since loads of absurd values make it near singular.
    normal = np.eye(rows.shape[1]) + rows.T @ (rows * trust[:, None])
    inverse = np.asarray(np.linalg.pinv(normal, hermitian=True), np.float64)
    return inverse, inverse @ (rows.T @ (trust * missing))


def _trust_of(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The weight of each load, by its error in standard deviations."""
    found: NDArray[np.float64] = (_FREEDOM + 1) / (_FREEDOM + errors**2)
    return found


def memory_law(seen: Sequence[LoadSeen], provider: str) -> LoadLaw | None:
    """Of loads with one provider; None of too few."""
    prior = _PROCESSOR_MEMORY if provider == PROCESSOR else _MEMORY
    return LoadLaw(seen, prior) if len(seen) >= LEAST_LOADS else None


def wait_of(parts: Sequence[float]) -> LoadWait:
    """parts: of each load, at least one, by the clock over processor time; at least 1."""
    low, mid, high = np.quantile(np.array(parts, float), ((1 - _COVERAGE) / 2, 0.5, (1 + _COVERAGE) / 2))
    return LoadWait(Interval(float(low), float(mid), float(high)))


def seconds_law(seen: Sequence[LoadSeen], provider: str) -> LoadLaw | None:
    """Of loads on one device class, which has this provider; None of too few."""
    prior = _PROCESSOR_SECONDS if provider == PROCESSOR else _SECONDS
    return LoadLaw(seen, prior) if len(seen) >= LEAST_LOADS else None

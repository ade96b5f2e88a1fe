"""What one warm-up teaches: its latency against what the device's receipt promised, its tail, memory and load."""

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shoal.coordinator.core.prediction.demand import PROCESSOR, ModelDemand, OperatorClass
from shoal.coordinator.core.prediction.load_law import LoadNeeds, LoadSizes
from shoal.coordinator.core.prediction.predict import LEAST_SPREAD
from shoal.coordinator.core.prediction.roofline import service_parts
from shoal.coordinator.core.prediction.tails import log_tail
from shoal.types.assignment import Measured, Served
from shoal.types.device import Device
from shoal.types.receipt import Rates

MOST_RATIO: Final = 1000.0
"""A measurement that differs by more from its roofline is not believed. The most that was seen is 69 (a Loop)."""
_OWN_SHARE: Final = 0.75
"""Of what the probe's model had a provider take, at least so much is taken with any other, which may have it open less
of its libraries: with QNN's simulator the smallest of 28 models took 0.84 of it, itself included."""
LEAST_TAIL_RUNS: Final = 20
"""Of fewer requests a 95th percentile is the slowest of them."""


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
    # Natural logarithm of measured over promised seconds in a record of an older version, whose roofline takes the
    # larger of arithmetic and movement: it tells nothing. Otherwise NaN: an older version then measures again instead
    # of taking `log_ratio_of_sum` for it.
    log_ratio: float
    # Of the model, at the warm-up's shapes; None in a record of an older version. Those know it as `sizes`, of six
    # numbers, and could not read eight.
    load_sizes: LoadSizes | None = None
    # Growth of a worker's memory, as that of its first model; NaN in such a record, and where it joined a worker whose
    # provider takes nobody knows what.
    memory_bytes: float = math.nan
    # What the load took; NaN in such a record.
    load_s: float = math.nan
    # `log_tail` of the warm-up, or of service since; NaN where neither was one, on an emulated device, and in such a
    # record.
    log_tail: float = math.nan
    # Runs and requests that it is of.
    tail_runs: int = 0
    # Processor time of the load; 0 where that is unknown.
    load_cpu_s: float = 0.0
    # `LoadNeeds.memory_sizes`; None in a record of an older version.
    memory_sizes: LoadSizes | None = None
    # Natural logarithm of measured over promised seconds, of a roofline whose arithmetic and movement add up, as `mix`
    # is; NaN in a record of an older version, of which memory and load count alone.
    log_ratio_of_sum: float = math.nan
    # `ModelProfile.version` of the profile that promised it.
    profile_version: int = 0
    # `Receipt.provider_bytes`, which are in `memory_bytes`; 0: unknown, as in a record of an older version.
    provider_bytes: float = 0.0
    # Natural logarithm of the median over that of the warm-up before, of the same model at the same shapes on the same
    # device; NaN without one, on an emulated device, and in a record of an older version.
    log_repeat: float = math.nan
    # The same of the 95th percentiles.
    log_repeat_p95: float = math.nan
    # The region that measured it; empty: this one.
    imported_from: str = ""

    @property
    def is_of_sum(self) -> bool:
        return not math.isnan(self.log_ratio_of_sum)

    @property
    def is_plausible(self) -> bool:
        shares = len(self.mix) == 1 + len(OperatorClass) and all(0 <= share <= 1 for share in self.mix)
        ratio = self.log_ratio_of_sum if self.is_of_sum else self.log_ratio
        return shares and abs(ratio) <= math.log(MOST_RATIO)


def class_of_device(device: Device) -> DeviceClass:
    return DeviceClass(device.provider, device.profile or f"{device.vendor} {device.model}")


def residual_of(
    model: str,
    device: Device,
    rates: Rates,
    precision: str,
    demand: ModelDemand,
    measured: Measured,
    needs: LoadNeeds | None = None,
    profile_version: int = 0,
    provider_bytes: float = 0.0,
) -> Residual | None:
    """None where the receipt promises nothing, or the measurement is none that could be. Whether it is believed says
    `is_plausible`. provider_bytes: of the receipt."""
    taken, own = _memory_alone(measured, provider_bytes, is_processor=device.provider == PROCESSOR)
    measured_s = measured.latency_p50_s
    parts = service_parts(demand, rates, precision)
    promised = math.fsum(parts)
    if not (promised > 0 and 0 < measured_s < math.inf):
        return None
    mix = tuple(part / promised for part in parts)
    ratio = math.log(measured_s / promised)
    # All runs of an emulated device take what its profile says, whose tail is unknown.
    tail = math.nan if device.emulated else log_tail(measured_s, measured.latency_p95_s)
    tail_runs = 0 if math.isnan(tail) else measured.samples
    return Residual(
        *(model, class_of_device(device), mix, math.nan, needs.sizes if needs else None),
        taken,
        *(measured.load_s, tail, tail_runs, measured.load_cpu_s),
        needs.memory_sizes if needs else None,
        ratio,
        profile_version,
        own,
    )


def _memory_alone(measured: Measured, provider_bytes: float, *, is_processor: bool) -> tuple[float, float]:
    """What the load takes in a worker of its own, and the part of it that is the provider's; NaN where that is
    unknown. is_processor: the provider is the processor's own, whose 10 MB are less than what loads differ by."""
    own = provider_bytes if measured.joined else 0.0
    if is_processor:
        return measured.memory_bytes + own, provider_bytes
    if measured.joined and provider_bytes <= 0:
        return math.nan, 0.0
    if not holds_provider(measured.memory_bytes + own, provider_bytes):
        # It joined another's worker, and a worker of an older agent does not say that.
        return math.nan, 0.0
    return measured.memory_bytes + own, provider_bytes


def holds_provider(memory_bytes: float, provider_bytes: float) -> bool:
    """Whether a load that took `memory_bytes` can have had the provider's own part in it. provider_bytes: as probed."""
    return memory_bytes >= _OWN_SHARE * provider_bytes


def with_repeat(residual: Residual, seen: Residual | None, measured: Measured, before: Measured | None) -> Residual:
    """By how much the newest warm-up differs from the one before. residual, seen: of both. An emulated device's runs
    take what its profile says, and tell nothing."""
    if seen is None or before is None or math.isnan(residual.log_tail) or residual.load_sizes != seen.load_sizes:
        return residual
    if math.isnan(log_tail(before.latency_p50_s, before.latency_p95_s)):
        return residual
    return replace(
        residual,
        log_repeat=math.log(measured.latency_p50_s / before.latency_p50_s),
        log_repeat_p95=math.log(measured.latency_p95_s / before.latency_p95_s),
    )


def with_service(
    residual: Residual, measured: Measured, served: tuple[Served, ...], *, is_emulated: bool = False
) -> Residual:
    """The tail of undisturbed service, where its requests are twice as many as what the tail was of before. Thus a
    replica's residual changes as often as the logarithm of its requests. measured: the warm-up. is_emulated: the device
    is, whose tail is its host's; none is learnt, and what an older version learnt is forgotten."""
    if is_emulated:
        return residual if math.isnan(residual.log_tail) else replace(residual, log_tail=math.nan, tail_runs=0)
    rows = [
        (tail, each.successes)
        for each in served
        if each.successes > 0
        and math.isfinite(tail := log_tail(each.latency_p50_s, each.latency_p95_s))
        and _is_undisturbed(each, measured)
    ]
    requests = sum(count for _, count in rows)
    if requests < max(LEAST_TAIL_RUNS, 2 * residual.tail_runs):
        return residual
    # Of each origin, since its requests may be larger ones.
    mean = math.fsum(tail * count for tail, count in rows) / requests
    return replace(residual, log_tail=mean, tail_runs=requests)


def _is_undisturbed(served: Served, measured: Measured) -> bool:
    """Whether the median of service is that of the warm-up, within its interval. Otherwise the tail is that of what
    else the node does, which another node does not."""
    half = max(LEAST_SPREAD, 1 / math.sqrt(max(1, measured.samples)))
    return abs(served.latency_p50_s - measured.latency_p50_s) <= half * measured.latency_p50_s

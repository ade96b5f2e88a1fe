"""Latency, memory, load time and energy of a model on a device, with intervals (docs/guides/prediction.md)."""

import math
from collections.abc import Set

from shoal.coordinator.core.prediction.demand import ModelDemand, demand_of
from shoal.coordinator.core.prediction.load_law import (
    LoadEstimate,
    file_bytes_at_peak,
    seconds_before_loads,
    sizes_of,
)
from shoal.coordinator.core.prediction.model import UNKNOWN, Basis, Correction, Interval, Prediction, Repeats
from shoal.coordinator.core.prediction.roofline import service_seconds, transfer_seconds
from shoal.coordinator.core.prediction.tails import TAIL_GUESS, tail_factors
from shoal.types.assignment import Measured, Served
from shoal.types.codes import Code, Refusal
from shoal.types.device import ESTIMATED_RANGE, Device, EnergySource
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Rates, Receipt

PROCESS_BYTES = Interval(9 * 2**20, 10 * 2**20, 16 * 2**20)
FILE_BYTES = Interval(2.3, 2.9, 5.0)
RUN_BYTES = Interval(0.5, 1.25, 2.0)
"""Memory of a worker's first model, for each byte of its file, and for each that a run takes: between low and high are
all of 32 models, at batches 1 and 4, with ONNX Runtime 1.32 on CPU. The nearest comes within 2 % of low and 10 % of
high; mid is within 10 % for two of three."""
ROOFLINE_FACTOR = 2.0
"""A roofline is a bound that real kernels do not reach: the interval spans this factor on both sides."""
UNCERTAIN_FACTOR = 3.0
"""The same factor for a profile whose shapes could not all be inferred."""
LEAST_SPREAD = 0.05


def predict(
    device: Device,
    receipt: Receipt | None,
    profile: ModelProfile,
    precision: str,
    batch: int = 1,
    measured: Measured | None = None,
    served: tuple[Served, ...] = (),
    demand: ModelDemand | None = None,
    correction: Correction | None = None,
    load: LoadEstimate | None = None,
    repeats: Repeats | None = None,
) -> Prediction | Refusal:
    """One model on one device, with one request at once.

    batch: most requests that it runs as one, which its memory must hold. Whether that makes them faster, only a worker
    measures, so latency and energy are of requests that run alone.
    measured: from the warm-up of this model on this device; it replaces the analytic figures. served: service since
    then, blended in by count. demand: `demand_of(profile)` where it runs; without it copies between layouts do not
    count. correction: of the receipt's promise, by what the region measured elsewhere. load: of this batch, by
    what the region loaded elsewhere. repeats: by how much a warm-up differs from an earlier one, by what the region
    measured twice. Refuses with CAPABILITY_UNMEASURED where neither a receipt nor a
    measurement says what the device can do.
    """
    spread = LEAST_SPREAD if receipt is None else max(receipt.spread, LEAST_SPREAD)
    transfer_s = transfer_seconds(device, profile)
    if measured is not None:
        # In its next worker it may be the first one.
        own = receipt.provider_bytes if receipt is not None and measured.joined else 0
        return _from_measurement(
            measured, served, profile, spread, batch, transfer_s, own, repeats, is_emulated=device.emulated
        )
    demand = demand_of(profile) if demand is None else demand
    seconds = math.nan if receipt is None else service_seconds(demand, receipt.rates, precision)
    if receipt is None or math.isnan(seconds):
        found = "no receipt" if receipt is None else f"no rate for {precision} in the receipt"
        remedy = "probe the device (`shoal-agent doctor` says why it was not)"
        return Refusal(Code.CAPABILITY_UNMEASURED, found, f"measured {precision} rates of {device.name}", remedy)
    factors = _correction(correction, profile.confident, spread)
    if load is None:
        load = _estimate_first_load(device, receipt, profile, batch)
    return _from_roofline(seconds, factors, receipt.rates, transfer_s, load)


def _correction(found: Correction | None, confident: bool, spread: float) -> Correction:
    """What to multiply a roofline by. Wider for the receipt's own spread, and for a profile whose shapes could not all
    be inferred."""
    known = found or Correction(1 / ROOFLINE_FACTOR, 1.0, ROOFLINE_FACTOR, Basis.GUESS, TAIL_GUESS)
    of_receipt = 1.0 if known.basis in (Basis.SAME_CLASS, Basis.CALIBRATED) else 1 + spread
    is_sure = confident or known.basis is Basis.SAME_CLASS
    wider = of_receipt * (1.0 if is_sure else UNCERTAIN_FACTOR / ROOFLINE_FACTOR)
    return known._replace(low=known.low / wider, high=known.high * wider)


def _from_roofline(
    seconds: float,
    factors: Correction,
    rates: Rates,
    transfer_s: float,
    load: LoadEstimate,
) -> Prediction:
    """A prediction from the receipt, which promises `seconds`."""
    latency = Interval(seconds * factors.low, seconds * factors.mid, seconds * factors.high)
    slow = tail_factors(factors)
    return Prediction(
        latency_p50_s=latency,
        latency_p95_s=Interval(seconds * slow.low, seconds * slow.mid, seconds * slow.high),
        memory_bytes=load.memory_bytes,
        load_s=_not_below(transfer_s, load.load_s),
        transfer_s=transfer_s,
        joules=_energy(_scale(latency, rates.active_w), {rates.energy_source}),
        energy_source=rates.energy_source,
        basis=factors.basis,
    )


def _estimate_first_load(device: Device, receipt: Receipt, profile: ModelProfile, batch: int) -> LoadEstimate:
    """Where the region loaded too few to know better. The seconds are unknown of a device that was not probed."""
    load_s, load_bytes = UNKNOWN, receipt.rates.load_bytes
    if not math.isnan(load_bytes):
        load_s = seconds_before_loads(sizes_of(profile, batch), device.provider, load_bytes)
    return LoadEstimate(_memory(profile, batch, receipt.provider_bytes), load_s, load_s)


def _memory(profile: ModelProfile, batch: int, provider_bytes: int) -> Interval:
    """Of the process, the file, and a run of the largest batch. The upper end of the interval is what is committed."""
    run, of_run = profile.memory_of_run(batch), _run_bytes(profile)
    low, mid, high = (file * profile.size_bytes for file in FILE_BYTES)
    # A file that is one convolution of many weights takes six times its size.
    of_file = Interval(low, mid, max(high, file_bytes_at_peak(profile)))
    # Models of other kernels than the probe's have a provider open more of its libraries: in proportion, as much more
    # as on a processor, whose own 10.7 MiB are within the interval.
    own = _scale(PROCESS_BYTES, max(1.0, provider_bytes / PROCESS_BYTES.mid))
    ends = zip(own, of_file, of_run, strict=True)
    return Interval(*(fixed + file + each * run for fixed, file, each in ends))


def _run_bytes(profile: ModelProfile) -> Interval:
    """Of an older profile, as many as its live tensors."""
    return RUN_BYTES if profile.run_bytes else Interval(1.0, 1.0, 1.0)


def _from_measurement(
    measured: Measured,
    served: tuple[Served, ...],
    profile: ModelProfile,
    spread: float,
    batch: int,
    transfer_s: float,
    own_bytes: int,
    repeats: Repeats | None,
    *,
    is_emulated: bool,
) -> Prediction:
    """Warm-up figures, blended with service by request counts: (n warm + m served) / (n + m). The intervals are what
    measurements differ by that the region repeated; before there are enough, half of one is the spread, or
    1 / sqrt(n + m) if that is more. All runs of an emulated device take what its profile says, so there it is the
    spread. own_bytes: what the provider takes for itself, where the measured memory is without it."""
    served = tuple(each for each in served if each.successes > 0 and not math.isnan(each.latency_p50_s))
    requests = sum(each.successes for each in served)
    samples = max(1, measured.samples)
    share = requests / (requests + samples)
    half = spread if is_emulated else max(spread, 1 / math.sqrt(samples + requests))

    def blend(warm: float, per_request: list[float]) -> float:
        if requests == 0:
            return warm
        mean = math.fsum(value * each.successes for value, each in zip(per_request, served, strict=True)) / requests
        return mean if math.isnan(warm) else warm if math.isnan(mean) else (1 - share) * warm + share * mean

    p50 = blend(measured.latency_p50_s, [each.latency_p50_s for each in served])
    p95 = max(blend(measured.latency_p95_s, [each.latency_p95_s for each in served]), p50)
    joules = blend(measured.joules, [each.joules / max(1, each.requests) for each in served])
    memory = _within(measured.memory_bytes + own_bytes, spread)
    # The warm-up is of one request; what others take beside it is still a prediction.
    further = profile.memory_of_run(batch) - profile.memory_of_run()
    ends = zip(memory, _run_bytes(profile), strict=True)
    sources = {measured.energy_source, *(each.energy_source for each in served)}
    return Prediction(
        latency_p50_s=_within(p50, half) if repeats is None else _times(p50, repeats.p50),
        latency_p95_s=_within(p95, half) if repeats is None else _times(p95, repeats.p95),
        memory_bytes=Interval(*(one + each * further for one, each in ends)),
        load_s=_within(measured.load_s, max(spread, 0.5)),
        # Faster than its link: then the link is another than it says, or not all weights pass it.
        transfer_s=transfer_s if transfer_s <= measured.load_s else math.nan,
        joules=_energy(_within(joules, half) if repeats is None else _times(joules, repeats.p50), sources),
        energy_source=next(iter(sources)) if len(sources) == 1 else EnergySource.ESTIMATED,
        basis=Basis.HERE,
    )


def _within(mid: float, half: float) -> Interval:
    """An interval of a share to both sides; never below 0."""
    return Interval(mid * max(0.0, 1 - half), mid, mid * (1 + half))


def _times(mid: float, factor: float) -> Interval:
    """An interval of a factor to both sides."""
    return Interval(mid / factor, mid, mid * factor)


def _not_below(least: float, interval: Interval) -> Interval:
    """The interval without what is below `least`, but never above its middle, which was measured. NaN: all of it."""
    return interval if math.isnan(least) else interval._replace(low=min(max(interval.low, least), interval.mid))


def _energy(joules: Interval, sources: Set[EnergySource]) -> Interval:
    """Wider where nothing counted a part of it: then the device's power is that of the median processor."""
    if EnergySource.ESTIMATED not in sources:
        return joules
    low, high = ESTIMATED_RANGE
    return Interval(joules.low * low, joules.mid, joules.high * high)


def _scale(interval: Interval, factor: float) -> Interval:
    return Interval(interval.low * factor, interval.mid * factor, interval.high * factor)

"""Latency, memory, load time and energy of a model on a device, with intervals (docs/guides/prediction.md)."""

import math

from shoal.coordinator.core.prediction.demand import ModelDemand, OperatorClass, demand_of
from shoal.coordinator.core.prediction.load_law import LoadEstimate
from shoal.coordinator.core.prediction.model import Basis, Correction, Interval, Prediction
from shoal.types.assignment import Measured, Served
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, EnergySource
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Rates, Receipt

PROCESS_BYTES = 16 * 2**20
FILE_LOW, FILE_MID, FILE_HIGH = 2.8, 4.6, 5.0
"""Memory per byte of model file, measured with ONNX Runtime 1.31 on CPU: 2.8 to 5.3, median 4.6 (guide, equation 4)."""
ROOFLINE_FACTOR = 2.0
"""A roofline is a bound that real kernels do not reach: the interval spans this factor on both sides (guide, section
3)."""
UNCERTAIN_FACTOR = 3.0
"""The same factor for load times, and for a profile whose shapes could not all be inferred."""
P95_OVER_P50 = 1.3
"""Assumed p95 over p50 with one request at a time, until both are measured."""
LEAST_SPREAD = 0.05
_PRODUCTS = (OperatorClass.MATMUL, OperatorClass.VECTOR, OperatorClass.ATTENTION, OperatorClass.RECURRENT)
_CONVOLUTIONS = (OperatorClass.CONV, OperatorClass.POINTWISE, OperatorClass.GROUPED, OperatorClass.DEPTHWISE)
_COPIES = (OperatorClass.COPY, OperatorClass.GATHER)


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
) -> Prediction | Refusal:
    """One model on one device, with one request at once.

    batch: most requests that it runs as one, which its memory must hold. Whether that makes them faster, only a worker
    measures, so latency and energy are of requests that run alone.
    measured: from the warm-up of this model on this device; it replaces the analytic figures. served: service since
    then, blended in by count. demand: `demand_of(profile)`, where the caller has
    it already. correction: of the receipt's promise, by what the region measured elsewhere. load: of this batch, by
    what the region loaded elsewhere. Refuses with
    CAPABILITY_UNMEASURED where neither a receipt nor a measurement says what the device can do.
    """
    demand = demand_of(profile) if demand is None else demand
    seconds = math.nan if receipt is None else service_seconds(demand, receipt.rates, precision)
    if math.isnan(seconds) and measured is None:
        found = "no receipt" if receipt is None else f"no rate for {precision} in the receipt"
        remedy = "probe the device (`shoal-agent doctor` says why it was not)"
        return Refusal(Code.CAPABILITY_UNMEASURED, found, f"measured {precision} rates of {device.name}", remedy)
    spread = LEAST_SPREAD if receipt is None else max(receipt.spread, LEAST_SPREAD)
    transfer_s = transfer_seconds(device, profile)
    if measured is None:
        assert receipt is not None
        factors = _correction(correction, profile.confident, spread)
        return _from_roofline(seconds, factors, profile, receipt.rates, spread, batch, transfer_s, load)
    return _from_measurement(measured, served, profile, spread, batch, transfer_s)


def service_seconds(demand: ModelDemand, rates: Rates, precision: str) -> float:
    """Equation 1: launch + sum over classes of max(flops / rate, bytes / bandwidth) + (nodes - 1) x time per node.

    Returns NaN where a rate that is needed was not measured.
    """
    return sum(service_parts(demand, rates, precision))


def service_parts(demand: ModelDemand, rates: Rates, precision: str) -> tuple[float, ...]:
    """The terms of `service_seconds`: launch and nodes, then one for each operator class. NaN: a rate is missing."""
    parts = dict.fromkeys(OperatorClass, 0.0)
    for row in demand.rows:
        moved = (row.bytes + row.weight_bytes) / _bandwidth(row.kind, rates)
        computed = row.flops / _flops(row.kind, rates, precision) if row.flops > 0 else 0.0
        parts[row.kind] += math.nan if math.isnan(moved) or math.isnan(computed) else max(moved, computed)
    return (rates.launch_s + max(0, demand.nodes - 1) * rates.node_s, *parts.values())


def arithmetic_seconds(demand: ModelDemand, rates: Rates, precision: str) -> float:
    """The part of `service_seconds` of one inference that arithmetic alone would take. NaN where it was not
    measured."""
    return math.fsum(row.flops / _flops(row.kind, rates, precision) for row in demand.rows if row.flops > 0)


def transfer_seconds(device: Device, profile: ModelProfile) -> float:
    """Equation 5a: the least seconds in which the model's weights pass the device's link to its host. NaN where that is
    unknown, or where the device works in the host's memory."""
    return profile.weight_bytes / device.host_bytes_per_s


def _flops(kind: OperatorClass, rates: Rates, precision: str) -> float:
    """FLOP/s of a class. Elementwise and copy work is limited by bytes. A class without its own rate takes the
    other's."""
    matmul, conv = rates.matmul_flops.get(precision, math.nan), rates.conv_flops.get(precision, math.nan)
    if kind in _PRODUCTS:
        return conv if math.isnan(matmul) else matmul
    if kind in _CONVOLUTIONS:
        return matmul if math.isnan(conv) else conv
    return math.inf


def _bandwidth(kind: OperatorClass, rates: Rates) -> float:
    """Bytes/s of a class: copy or elementwise bandwidth, or the other one where it was not measured."""
    if kind in _COPIES:
        return rates.elementwise_bytes if math.isnan(rates.copy_bytes) else rates.copy_bytes
    return rates.copy_bytes if math.isnan(rates.elementwise_bytes) else rates.elementwise_bytes


def _correction(found: Correction | None, confident: bool, spread: float) -> Correction:
    """What to multiply a roofline by. Wider for the receipt's own spread, and for a profile whose shapes could not all
    be inferred."""
    known = found or Correction(1 / ROOFLINE_FACTOR, 1.0, ROOFLINE_FACTOR, Basis.GUESS)
    wider = (1 + spread) * (1.0 if confident or known.basis is Basis.SAME_CLASS else UNCERTAIN_FACTOR / ROOFLINE_FACTOR)
    return known._replace(low=known.low / wider, high=known.high * wider)


def _from_roofline(
    seconds: float,
    factors: Correction,
    profile: ModelProfile,
    rates: Rates,
    spread: float,
    batch: int,
    transfer_s: float,
    load: LoadEstimate | None,
) -> Prediction:
    """A prediction from the receipt, which promises `seconds`."""
    if load is None:
        load_s = _around(profile.size_bytes / rates.load_bytes, UNCERTAIN_FACTOR * (1 + spread))
        load = LoadEstimate(_memory(profile, batch), load_s)
    latency = Interval(seconds * factors.low, seconds * factors.mid, seconds * factors.high)
    return Prediction(
        latency_p50_s=latency,
        latency_p95_s=_scale(latency, P95_OVER_P50),
        memory_bytes=load.memory_bytes,
        load_s=_not_below(transfer_s, load.load_s),
        transfer_s=transfer_s,
        joules=_scale(latency, rates.active_w),
        energy_source=rates.energy_source,
        basis=factors.basis,
    )


def _memory(profile: ModelProfile, batch: int) -> Interval:
    """Equation 4. The upper end of the interval is what is committed."""
    fixed = PROCESS_BYTES + profile.activation_bytes * batch
    return Interval(*(fixed + factor * profile.size_bytes for factor in (FILE_LOW, FILE_MID, FILE_HIGH)))


def _from_measurement(
    measured: Measured,
    served: tuple[Served, ...],
    profile: ModelProfile,
    spread: float,
    batch: int,
    transfer_s: float,
) -> Prediction:
    """Equation 6: warm-up figures, blended with service by request counts."""
    served = tuple(each for each in served if each.successes > 0 and not math.isnan(each.latency_p50_s))
    requests = sum(each.successes for each in served)
    samples = max(1, measured.samples)
    share = requests / (requests + samples)
    half = max(spread, 1 / math.sqrt(samples + requests))

    def blend(warm: float, per_request: list[float]) -> float:
        if requests == 0:
            return warm
        mean = math.fsum(value * each.successes for value, each in zip(per_request, served, strict=True)) / requests
        return mean if math.isnan(warm) else warm if math.isnan(mean) else (1 - share) * warm + share * mean

    p50 = blend(measured.latency_p50_s, [each.latency_p50_s for each in served])
    p95 = blend(measured.latency_p95_s, [each.latency_p95_s for each in served])
    joules = blend(measured.joules, [each.joules / max(1, each.requests) for each in served])
    memory = measured.memory_bytes + profile.activation_bytes * (batch - 1)
    sources = {measured.energy_source, *(each.energy_source for each in served)}
    return Prediction(
        latency_p50_s=_within(p50, half),
        latency_p95_s=_within(max(p95, p50), half),
        memory_bytes=_within(memory, spread),
        load_s=_within(measured.load_s, max(spread, 0.5)),
        # Faster than its link: then the link is another than it says, or not all weights pass it.
        transfer_s=transfer_s if transfer_s <= measured.load_s else math.nan,
        joules=_within(joules, half),
        energy_source=sources.pop() if len(sources) == 1 else EnergySource.ESTIMATED,
        basis=Basis.HERE,
    )


def _around(mid: float, factor: float) -> Interval:
    """An interval of a factor to both sides."""
    return Interval(mid / factor, mid, mid * factor)


def _within(mid: float, half: float) -> Interval:
    """An interval of a share to both sides; never below 0."""
    return Interval(mid * max(0.0, 1 - half), mid, mid * (1 + half))


def _not_below(least: float, interval: Interval) -> Interval:
    """The interval without what is below `least`, but never above its middle, which was measured. NaN: all of it."""
    return interval if math.isnan(least) else interval._replace(low=min(max(interval.low, least), interval.mid))


def _scale(interval: Interval, factor: float) -> Interval:
    return Interval(interval.low * factor, interval.mid * factor, interval.high * factor)

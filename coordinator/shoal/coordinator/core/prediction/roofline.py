"""What a receipt promises of a model: the roofline of its operator classes (Williams, Waterman, Patterson, Roofline: an
insightful visual performance model for multicore architectures, CACM 52(4), 2009), class by class.

Arithmetic and movement add up, since a core computes little while it waits for a cache line: the model of Stengel,
Treibig, Hager, Wellein, Quantifying performance bottlenecks of stencil computations using the
Execution-Cache-Memory model, ICS 2015, section 2, for all levels of memory at once.
"""

import math

from shoal.coordinator.core.prediction.demand import CONVOLUTIONS, ModelDemand, OperatorClass
from shoal.types.device import Device
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Rates

_PRODUCTS = (OperatorClass.MATMUL, OperatorClass.VECTOR, OperatorClass.ATTENTION, OperatorClass.RECURRENT)
_COPIES = (OperatorClass.COPY, OperatorClass.GATHER)


def service_seconds(demand: ModelDemand, rates: Rates, precision: str) -> float:
    """Of one inference: launch + sum over classes of (flops / rate + bytes / bandwidth) + (nodes - 1) x time per node.

    Returns NaN where a rate that is needed was not measured.
    """
    return sum(service_parts(demand, rates, precision))


def service_parts(demand: ModelDemand, rates: Rates, precision: str) -> tuple[float, ...]:
    """The terms of `service_seconds`: launch and nodes, then one for each operator class. NaN: a rate is missing."""
    parts = dict.fromkeys(OperatorClass, 0.0)
    for row in demand.rows:
        moved = (row.bytes + row.weight_bytes) / _bandwidth(row.kind, rates)
        computed = row.flops / _flops(row.kind, rates, precision) if row.flops > 0 else 0.0
        parts[row.kind] += moved + computed
    return (rates.launch_s + max(0, demand.nodes - 1) * rates.node_s, *parts.values())


def arithmetic_seconds(demand: ModelDemand, rates: Rates, precision: str) -> float:
    """The part of `service_seconds` of one inference that arithmetic alone would take. NaN where it was not
    measured."""
    return math.fsum(row.flops / _flops(row.kind, rates, precision) for row in demand.rows if row.flops > 0)


def transfer_seconds(device: Device, profile: ModelProfile) -> float:
    """The least seconds in which the model's weights pass the device's link to its host: part of a load, since its rate
    was measured over that link. NaN where that is unknown, or where the device works in the host's memory."""
    return profile.weight_bytes / device.host_bytes_per_s


def _flops(kind: OperatorClass, rates: Rates, precision: str) -> float:
    """FLOP/s of a class. Elementwise and copy work is limited by bytes. A class without its own rate takes the
    other's."""
    matmul, conv = rates.matmul_flops.get(precision, math.nan), rates.conv_flops.get(precision, math.nan)
    if kind in _PRODUCTS:
        return conv if math.isnan(matmul) else matmul
    if kind in CONVOLUTIONS:
        return matmul if math.isnan(conv) else conv
    return math.inf


def _bandwidth(kind: OperatorClass, rates: Rates) -> float:
    """Bytes/s of a class: copy or elementwise bandwidth, or the other one where it was not measured."""
    if kind in _COPIES:
        return rates.elementwise_bytes if math.isnan(rates.copy_bytes) else rates.copy_bytes
    return rates.copy_bytes if math.isnan(rates.elementwise_bytes) else rates.elementwise_bytes

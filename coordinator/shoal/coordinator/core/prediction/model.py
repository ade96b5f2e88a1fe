"""A prediction: intervals, and what they are based on."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.types.device import EnergySource


class Interval(NamedTuple):
    """An estimate with its bounds; all three are NaN where nothing is known."""

    low: float
    mid: float
    high: float


class Basis(StrEnum):
    """analytic: roofline from the receipt. warmup: measured while a replica warmed up. service: measured on
    requests."""

    ANALYTIC = "analytic"
    WARMUP = "warmup"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One model on one device."""

    # Median latency of one execution at the worker, without queueing or network.
    latency_p50_s: Interval
    # 95th percentile of the same.
    latency_p95_s: Interval
    # Memory of the replica; `high` is what is committed.
    memory_bytes: Interval
    # Time to load the model; NaN where the load rate is unknown.
    load_s: Interval
    # The part of it in which the weights pass the device's link to its host, at least. NaN where the link is unknown,
    # where there is none, and where a measured load was faster.
    transfer_s: float
    # Energy per inference; NaN where the device's power is unknown.
    joules: Interval
    # Whether the energy is measured, from a device profile, or estimated.
    energy_source: EnergySource
    # Where the figures come from.
    basis: Basis

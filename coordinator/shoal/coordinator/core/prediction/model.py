"""What a prediction is made of: intervals, and where they come from."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.types.device import EnergySource


class Interval(NamedTuple):
    """An estimate with its bounds; all three NaN where nothing is known."""

    low: float
    mid: float
    high: float


class Basis(StrEnum):
    """analytic: roofline from the receipt. warmup: measured as a replica warmed up. service: measured on requests."""

    ANALYTIC = "analytic"
    WARMUP = "warmup"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One model on one device at one batch size. Latency at the worker, once through; joules per inference."""

    latency_p50_s: Interval
    latency_p95_s: Interval
    memory_bytes: Interval
    load_s: Interval
    joules: Interval
    energy_source: EnergySource
    basis: Basis

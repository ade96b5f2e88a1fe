"""A prediction: intervals, and what they are based on."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from shoal.types.device import EnergySource


class Interval(NamedTuple):
    """An estimate with its bounds; all three are NaN where nothing is known."""

    low: float
    mid: float
    high: float


UNKNOWN: Final = Interval(math.nan, math.nan, math.nan)


class Basis(StrEnum):
    """How a prediction knows, the surest first."""

    # This model on this very device: at its warm-up, or on requests since.
    HERE = "measured here"
    # This model on another device of the class, scaled by the receipts of both.
    SAME_CLASS = "measured on the same class"
    # Other models on this class: the receipt's promise, corrected by what they took.
    CALIBRATED = "calibrated"
    # This or other models on other classes.
    TRANSFERRED = "transferred"
    # The receipt's promise alone: nothing was ever measured.
    GUESS = "guess"


class Correction(NamedTuple):
    """Times the seconds that a receipt promises: ends and middle of the interval."""

    low: float
    mid: float
    high: float
    # What it was learnt from.
    basis: Basis
    # p95 over p50.
    tail: Interval


class Repeats(NamedTuple):
    """Within what factor, 1 or more, 90 % of measurements are that repeat one: times it, or divided by it."""

    # The median.
    p50: float
    # The 95th percentile.
    p95: float


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

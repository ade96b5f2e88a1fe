"""Predictors to stand beside: a roofline, the nearest device, and ridge regression from the other devices."""

from itertools import combinations
from typing import Final

import numpy as np
from _prediction.architectures import Work

from shoal.coordinator.core.prediction.transfer.known import Floats, Indices, KnownLatencies, name_similarity

PENALTIES: Final = (0.01, 0.1, 1.0, 10.0)
"""Of ridge regression; leave-one-out on the measured models takes one."""


def fill_gaps(known: KnownLatencies) -> Floats:
    """The known log seconds, gaps filled by the model's mean and the device's offset."""
    table = known.log_seconds
    with np.errstate(invalid="ignore"):
        model = np.nanmean(table, 1, keepdims=True)
        found: Floats = np.where(np.isnan(table), model + np.nanmean(table - model, 0), table)
    return found


def ridge(table: Floats, rows: Indices, log_seconds: Floats, asked: Indices) -> Floats:
    """Log seconds from those on the other devices. Without a measurement: their mean."""
    if len(rows) == 0:
        mean: Floats = table[asked].mean(1)
        return mean
    centre, level = table[rows].mean(0), log_seconds.mean()
    inputs, targets = table[rows] - centre, log_seconds - level
    if len(rows) < 3:
        return np.full(len(asked), level)
    best: Floats = np.empty(0)
    least = np.inf
    for penalty in PENALTIES:
        inverse = np.linalg.inv(inputs.T @ inputs + penalty * np.eye(inputs.shape[1]))
        weights = inverse @ inputs.T @ targets
        leverage = np.einsum("ij,jk,ik->i", inputs, inverse, inputs) + 1 / len(rows)
        error = float(np.abs((targets - inputs @ weights) / np.maximum(1 - leverage, 1e-6)).mean())
        if error < least:
            least, best = error, weights
    found: Floats = level + (table[asked] - centre) @ best
    return found


def nearest_device(
    known: KnownLatencies, table: Floats, device: str, rows: Indices, log_seconds: Floats, asked: Indices
) -> Floats:
    """Log seconds of the known device whose latencies differ by the steadiest factor, times that factor. Without a
    measurement: of the one whose name is nearest."""
    if len(rows) == 0:
        near = np.array([name_similarity(device, name) for name in known.devices])
        named: Floats = table[asked][:, int(near.argmax())]
        return named
    factors = log_seconds[:, None] - table[rows]
    column = int(factors.std(0).argmin())
    found: Floats = table[asked][:, column] + np.median(factors[:, column])
    return found


def roofline(work: Work, rows: Indices, seconds: Floats, asked: Indices) -> Floats:
    """Seconds as launch + FLOPs / rate + bytes / bandwidth, these three fitted to what was measured: least relative
    error, none below 0."""
    terms = np.stack([np.ones(len(work.flops)), work.flops / 1e9, work.bytes / 1e9], 1)
    scaled = terms[rows] / seconds[:, None]
    least, best = np.inf, np.zeros(3)
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(rows)), rcond=None)
            error = float(((scaled[:, chosen] @ part - 1) ** 2).sum())
            if (part >= 0).all() and error < least:
                least, best = error, np.zeros(3)
                best[list(chosen)] = part
    found: Floats = terms[asked] @ best
    return found

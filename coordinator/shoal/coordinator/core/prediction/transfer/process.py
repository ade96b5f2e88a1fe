"""A Gaussian process over models: the latencies of a new device, given those that were measured on it."""

from dataclasses import dataclass

import numpy as np

from shoal.coordinator.core.prediction.transfer.known import Floats
from shoal.coordinator.core.prediction.transfer.space import ModelSpace

_REWEIGHTINGS = 4
"""Of robust settings. Expectation maximisation for a Student-t likelihood; weights settle within 10 % after 4."""
_GAUSSIAN = 50.0
"""Degrees of freedom from which errors count as normal."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Variances in squared logarithms of a latency.

    Defaults: of the values tried by leaving out one device at a time of the published tables (docs/benchmarks.md),
    those with the least mean log error. Two to ten times of one of them cost 1 to 9 % of the error.
    """

    # Times the known devices' own variance of being faster or slower on all models.
    offset: float = 1.0
    # The same for its share of large models against small ones.
    slope: float = 0.003
    # Times the known devices' own variance along each component.
    components: float = 1.0
    # Added to each of these, for a device unlike any known one.
    floor: float = 1e-5
    # Of what neighbours in the space share beyond that.
    nearby: float = 0.004
    # How near they are: a factor e of latency is 1.
    distance: float = 1.0
    # Of what models with the same features share.
    features: float = 0.001
    # Of one measurement.
    noise: float = 0.002
    # Degrees of freedom of its errors: with few of them, outliers do not decide.
    freedom: float = 100.0
    # Degrees of freedom with which the scale of all this is known before the first measurement.
    scale_freedom: float = 4.0


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is expected of each model, as deviations from the space's level."""

    mean: Floats
    # Of the latency itself.
    variance: Floats
    # Of one further measurement of it, beyond that.
    noise: float


def posterior(settings: ProcessSettings, measured: ModelSpace, deviations: Floats, asked: ModelSpace) -> Posterior:
    """measured: the models that were measured, with their deviations (n,) from the level. asked: those to predict.

    Source: Rasmussen, Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23 to 2.26; the scale of
    all variances is itself inferred (Shah, Wilson, Ghahramani, Student-t Processes, 2014).
    """
    prior = _own_variance(settings, asked)
    if len(deviations) == 0:
        return Posterior(np.zeros(len(prior)), prior, settings.noise)
    across = covariance(settings, measured, asked)
    inverse, solved, scale = robust_solution(settings, covariance(settings, measured, measured), deviations)
    reduced = np.maximum(prior - np.einsum("ij,ij->j", across, inverse @ across), 1e-12)
    return Posterior(across.T @ solved, scale * reduced, scale * settings.noise)


def covariance(settings: ProcessSettings, one: ModelSpace, other: ModelSpace) -> Floats:
    """(one, other): of the latencies of two lists of models on a new device, before anything was measured on it."""
    near, far = _coordinates(one) / settings.distance, _coordinates(other) / settings.distance
    squared = (near * near).sum(1)[:, None] + (far * far).sum(1) - 2 * near @ far.T
    shared: Floats = settings.nearby * np.exp(-np.maximum(squared, 0.0) / 2)
    return shared + _linear(settings, one) @ _linear(settings, other).T


def robust_solution(settings: ProcessSettings, given: Floats, deviations: Floats) -> tuple[Floats, Floats, float]:
    """The inverse of the covariance with noise, its product with the deviations, and the scale of all variances.

    Outliers lose weight by expectation maximisation for Student-t errors (Lange, Little, Taylor, 1989).
    """
    trust = np.ones(len(deviations))
    inverse, solved, scale = _solution(settings, given, deviations, trust)
    for _ in range(_REWEIGHTINGS if settings.freedom < _GAUSSIAN else 0):
        noise = settings.noise / trust
        unsure = np.maximum(noise - noise**2 * np.diag(inverse), 0.0)
        errors = ((noise * solved) ** 2 / scale + unsure) / settings.noise
        trust = (settings.freedom + 1) / (settings.freedom + errors)
        inverse, solved, scale = _solution(settings, given, deviations, trust)
    return inverse, solved, scale


def _solution(
    settings: ProcessSettings, given: Floats, deviations: Floats, trust: Floats
) -> tuple[Floats, Floats, float]:
    """As `robust_solution`, where the noise of each measurement is divided by its trust."""
    inverse = np.linalg.inv(given + np.diag(settings.noise / trust)).astype(np.float64)
    solved = inverse @ deviations
    scale = (settings.scale_freedom + float(deviations @ solved)) / (settings.scale_freedom + len(deviations))
    return inverse, solved, scale


def _linear(settings: ProcessSettings, space: ModelSpace) -> Floats:
    """(models, terms): coordinates whose products are the linear part of the covariance."""
    parts = [
        np.full((len(space.level), 1), np.sqrt(settings.offset * space.offset + settings.nearby)),
        np.sqrt(settings.slope) * (space.level - space.centre)[:, None],
        space.components * np.sqrt(settings.components * space.variances + settings.floor),
    ]
    if space.features.shape[1]:
        parts.append(space.features * np.sqrt(settings.features / space.features.shape[1]))
    return np.concatenate(parts, 1)


def _coordinates(space: ModelSpace) -> Floats:
    """(models, axes): where models are neighbours; one unit is a factor e of latency."""
    return np.concatenate([(space.level - space.centre)[:, None], space.components * np.sqrt(space.variances)], 1)


def _own_variance(settings: ProcessSettings, space: ModelSpace) -> Floats:
    own: Floats = (_linear(settings, space) ** 2).sum(1) + settings.nearby
    return own

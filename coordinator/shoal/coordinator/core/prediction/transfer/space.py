"""Where models lie by their latencies on the known devices: a mean, and the ways in which devices differ."""

from dataclasses import dataclass

import numpy as np

from shoal.coordinator.core.prediction.transfer.known import Floats, Indices, KnownLatencies, name_similarity

_ROUNDS = 20
"""Of the additive fit: after 20 the tables of AI Hub, up to two fifths of them gaps, change by less than 1e-7."""
_SMOOTHING = 1.0
"""Ridge on standardised features; between 0.1 and 10 the error on FBNet changes by less than 0.1 percentage points."""


@dataclass(frozen=True, slots=True)
class ModelSpace:
    """Coordinates of each model, and how much known devices vary along each."""

    # (models,): log seconds on the mean of the known devices; NaN where no known device ran the model.
    level: Floats
    # Mean of the level over all models.
    centre: float
    # Variance of the known devices' offsets: how much faster or slower one is on all models.
    offset: float
    # (models, components): how devices differ from the mean; each column has unit variance over models.
    components: Floats
    # (components,): variance of the known devices along each component.
    variances: Floats
    # (models, features): standardised.
    features: Floats

    def rows(self, models: Indices) -> "ModelSpace":
        return ModelSpace(
            self.level[models], self.centre, self.offset, self.components[models], self.variances, self.features[models]
        )


def space_for(known: KnownLatencies, device: str, kinship: float, smooth: bool) -> ModelSpace:
    """The space in which `device`, none of the known, is predicted.

    kinship: weight of a known device is 1 + kinship x name similarity, shared by its family. smooth: take latencies
    as the features explain them, which removes the noise of measurements where features tell the model well.
    """
    weights = _weights(known, device, kinship)
    item, offsets, residuals = _additive_fit(known.log_seconds, weights)
    features = _standardise(known.features)
    seen = ~np.isnan(item)
    if smooth:
        filled = np.where(seen[:, None], item[:, None] + offsets + residuals, np.nan)
        filled[seen] = _explained(features[seen], filled[seen])
        item, offsets, residuals = _additive_fit(filled, weights)
    scaled = residuals * np.sqrt(weights)
    covariance = scaled.T @ scaled / max(1, int(seen.sum()))
    variances, axes = np.linalg.eigh(covariance)
    kept = variances > max(1e-10, 1e-8 * float(variances.max(initial=0.0)))
    components = scaled @ axes[:, kept] / np.sqrt(variances[kept])
    centre = float(item[seen].mean()) if seen.any() else 0.0
    spread = float(weights @ offsets**2) / max(1 - float(weights @ weights), 1e-9)
    return ModelSpace(item, centre, spread, components, variances[kept], features)


def _weights(known: KnownLatencies, device: str, kinship: float) -> Floats:
    """One for each known device; their sum is 1."""
    sizes = {family: known.families.count(family) for family in known.families}
    near = np.array([1 + kinship * name_similarity(device, name) for name in known.devices])
    weights: Floats = near / np.array([sizes[family] for family in known.families])
    weights /= weights.sum()
    return weights


def _additive_fit(table: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """A table with gaps as model + device + residual: item effects, offsets of mean 0, residuals (0 in gaps)."""
    there = ~np.isnan(table)
    known = np.where(there, table, 0.0)
    shares = np.where(there, weights, 0.0)
    totals = shares.sum(1)
    offsets = np.zeros(table.shape[1])
    item = np.zeros(len(table))
    for _ in range(_ROUNDS if not there.all() else 2):
        item = (shares * (known - offsets)).sum(1) / np.maximum(totals, 1e-300)
        offsets = np.where(there, known - item[:, None], 0.0).sum(0) / np.maximum(there.sum(0), 1)
        offsets = offsets - offsets @ weights
    residuals = np.where(there, known - item[:, None] - offsets, 0.0)
    return np.where(totals > 0, item, np.nan), offsets, residuals


def _standardise(features: Floats) -> Floats:
    """Mean 0 and deviation 1; columns that do not vary are dropped."""
    spread = features.std(0)
    standard: Floats = (features[:, spread > 0] - features.mean(0)[spread > 0]) / spread[spread > 0]
    return standard


def _explained(features: Floats, table: Floats) -> Floats:
    """The part of each column that the features explain: ridge regression."""
    centred = features - features.mean(0)
    mean = table.mean(0)
    gram = centred.T @ centred + _SMOOTHING * np.eye(centred.shape[1])
    explained: Floats = mean + centred @ np.linalg.solve(gram, centred.T @ (table - mean))
    return explained

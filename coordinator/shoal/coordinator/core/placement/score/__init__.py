"""Score terms: what an objective weighs. One module each, with its `TERM`; everything else iterates over `TERMS`."""

from typing import Final

from shoal.coordinator.core.placement.score import carbon, cost, energy, latency
from shoal.coordinator.core.placement.score.term import ObjectiveTerm

TERMS: Final[tuple[ObjectiveTerm, ...]] = (latency.TERM, cost.TERM, energy.TERM, carbon.TERM)
"""In the order in which explanations show them. Read it as `score.TERMS`, so that there is one registry."""

"""What an hour of a node costs here, and what a kilowatt-hour emits: as the region's rule says it, as it is now."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.units import COST, INTENSITY, Dimension, Seconds, Wall, show_quantity


class SignalName(StrEnum):
    PRICE = "price"
    CARBON = "carbon"

    @property
    def dimension(self) -> Dimension:
        return DIMENSIONS[self]

    @property
    def unit(self) -> str:
        """Of values in SI."""
        return next(unit for unit, factor in self.dimension.factors.items() if factor == 1.0)

    def show(self, value: float) -> str:
        """For people, with its unit."""
        return show_quantity(float(f"{value:.4g}"), self.dimension)


DIMENSIONS: Final = {SignalName.PRICE: COST, SignalName.CARBON: INTENSITY}
MOST: Final = {SignalName.PRICE: 10_000.0, SignalName.CARBON: 5_000.0}
"""USD/h and gCO2/kWh: more is a mistake of whoever says so (the dirtiest grids emit about 1,000 gCO2/kWh), and no other
region believes it."""

CONSTANT: Final = "constant"
BY_HAND: Final = "by hand"


@dataclass(frozen=True, slots=True)
class Reading:
    """A value of a feed, in SI, and from when on it holds."""

    value: float
    at: Wall


@dataclass(frozen=True, slots=True)
class ByHand:
    """A value that an operator set. by: URI name of their certificate."""

    value: float
    at: Wall
    by: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What the Region document says of one signal: a constant, or a source (then `constant` is None)."""

    constant: float | None = None
    source: str = ""
    stale_after_s: Seconds = Seconds(7200.0)
    fallback: float | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """The value that counts now, SI, and why it does.

    source: `constant`, `by hand`, or the feed as the document writes it, also where its fallback counts. taken_at: from
    when the newest value of the source is; None of a constant, and of a feed that never gave one. stale: the source
    says nothing that is new enough, so that this is its last value, or (fallback) the document's.
    """

    name: SignalName
    value: float
    source: str
    taken_at: Wall | None = None
    stale: bool = False
    fallback: bool = False

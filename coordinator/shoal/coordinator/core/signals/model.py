"""The price of a node-hour and the carbon intensity of a kilowatt-hour: the region's rule, and the current value."""

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
        """Unit of values in SI."""
        return next(unit for unit, factor in self.dimension.factors.items() if factor == 1.0)

    def show(self, value: float) -> str:
        """A value with its unit, for people."""
        return show_quantity(float(f"{value:.4g}"), self.dimension)


DIMENSIONS: Final = {SignalName.PRICE: COST, SignalName.CARBON: INTENSITY}
MAX_VALUES: Final = {SignalName.PRICE: 10_000.0, SignalName.CARBON: 5_000.0}
"""USD/h and gCO2/kWh. A larger value is a mistake of its source (the dirtiest grids emit about 1,000 gCO2/kWh), and
other regions refuse it."""

CONSTANT: Final = "constant"
BY_HAND: Final = "by hand"


@dataclass(frozen=True, slots=True)
class SignalReading:
    """One value of a feed."""

    # In SI.
    value: float
    # The time from which it holds.
    at: Wall


@dataclass(frozen=True, slots=True)
class SignalOverride:
    """A value that an operator set."""

    # In SI.
    value: float
    # When it was set.
    at: Wall
    # URI name of the operator's certificate.
    by: str


@dataclass(frozen=True, slots=True)
class SignalRule:
    """What the Region document says about one signal: a constant or a source."""

    # Value in SI; None: a source gives the value.
    constant: float | None = None
    # Path or URL of the feed, as the document writes it; empty for a constant.
    source: str = ""
    # A reading older than this is stale.
    stale_after_s: Seconds = Seconds(7200.0)
    # Value in SI while the source is stale or has given nothing; None: its last value is kept.
    fallback: float | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """The value that counts now, and why it does."""

    # Which signal it is.
    name: SignalName
    # In SI: USD/h or gCO2/kWh.
    value: float
    # `constant`, `by hand`, or the feed as the document writes it, also where its fallback counts.
    source: str
    # Time of the source's newest value; None for a constant and for a feed that never gave one.
    taken_at: Wall | None = None
    # True where the source has no recent value, so that `value` is its last one or the fallback.
    stale: bool = False
    # True where `value` is the document's fallback.
    fallback: bool = False

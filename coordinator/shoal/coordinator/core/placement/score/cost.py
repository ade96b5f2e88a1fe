"""The price of the device that a replica occupies."""

import math
from typing import Final

from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.types.units import show_usd_per_hour

NAME: Final = "cost"

TERM: Final = ObjectiveTerm(
    name=NAME,
    unit="USD/h",
    label="cost",
    show=show_usd_per_hour,
    predict=lambda _scope, option, _intent, _replicas: option.cost,
    read=lambda served: served.cost,
    combine=math.fsum,
    least=0.001,  # about 9 USD a year: what is free is not infinitely better than what costs a little
)

"""The emissions of that energy, at the carbon intensity of the region's grid."""

import math
from typing import Final

from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.types.units import show_carbon

NAME: Final = "carbon"

TERM: Final = ObjectiveTerm(
    name=NAME,
    unit="gCO2/h",
    label="carbon",
    show=show_carbon,
    predict=lambda scope, option, intent, replicas: scope.emissions_g_per_h(
        scope.energy_j(option, intent, replicas), intent, replicas
    ),
    read=lambda served: served.carbon,
    combine=math.fsum,
    least=0.001,  # what 10 mW emit at 100 gCO2/kWh
)

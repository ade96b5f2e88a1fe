"""Which readings of a device can be true."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from shoal.types.codes import Code, Refusal
from shoal.types.device import Reading
from shoal.types.units import Bytes

MOST_WATTS: Final = 1e5
MOST_CELSIUS: Final = 250.0
LEAST_CELSIUS: Final = -60.0
_MOST_TOTAL: Final = 1e15
"""For joules and seconds since a driver was loaded: thirty million years, or what a power station gives in a week."""


def check_figures(reading: Reading, most_bytes: Bytes) -> Refusal | None:
    """TELEMETRY_ABSURD where a figure cannot be true. NaN means `not reported` and is accepted, but not of free memory.

    most_bytes: memory of the device.
    """
    bounds = (("free_bytes", float(reading.free_bytes), 0.0, float(most_bytes)), *_optional_figures(reading))
    for name, value, least, greatest in bounds:
        if math.isnan(value) and name != "free_bytes":
            continue
        if not least <= value <= greatest:
            return absurd_figure(reading.device, name, value, f"{least:g} to {greatest:g}")
    return None


def with_unknown_for_absurd(reading: Reading) -> tuple[Reading, Mapping[str, float]]:
    """The reading with NaN for each figure that cannot be true, and what these were, by their names. Free memory stays
    as it is: placement needs it, so that without it there is no reading."""
    absurd = {
        name: value
        for name, value, least, greatest in _optional_figures(reading)
        if not (math.isnan(value) or least <= value <= greatest)
    }
    unknown: dict[str, Any] = dict.fromkeys(absurd, math.nan)
    return replace(reading, **unknown) if unknown else reading, absurd


def _optional_figures(reading: Reading) -> tuple[tuple[str, float, float, float], ...]:
    """(name, value, least, greatest) of the figures that a device may leave out."""
    return (
        ("utilisation", reading.utilisation, 0.0, 1.0001),
        ("temperature_c", reading.temperature_c, LEAST_CELSIUS, MOST_CELSIUS),
        ("power_w", reading.power_w, 0.0, MOST_WATTS),
        ("energy_j", reading.energy_j, 0.0, _MOST_TOTAL),
        ("slept_s", reading.slept_s, 0.0, _MOST_TOTAL),
        ("saved_j", reading.saved_j, -_MOST_TOTAL, _MOST_TOTAL),
    )


def absurd_figure(subject: str, name: str, value: float, asked: str) -> Refusal:
    """TELEMETRY_ABSURD: what reports this of `subject` is broken."""
    return Refusal(Code.TELEMETRY_ABSURD, f"{subject}: {name} {value:g}", asked, "look at the node's sensors and agent")

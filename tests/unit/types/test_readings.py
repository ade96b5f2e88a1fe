"""Figures of a device that cannot be true."""

import math
from dataclasses import replace
from typing import Any

import pytest

from shoal.types.codes import Code
from shoal.types.device import Reading
from shoal.types.readings import check_figures, with_unknown_for_absurd
from shoal.types.units import Bytes, Seconds, Wall, Watts

MEMORY = Bytes(1000)
SOUND = Reading("cpu0", Bytes(600), 0.5, 61.0, Watts(15.0), 30.0, Wall(1.0), slept_s=Seconds(4.0), saved_j=-1.0)


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("temperature_c", -273.2),  # how ACPI reads a zone without a sensor
        ("temperature_c", 2147483.647),
        ("utilisation", 1.02),
        ("utilisation", -0.1),
        ("power_w", 524_000.0),
        ("power_w", math.inf),
        ("energy_j", 1e308),
        ("slept_s", -1.0),
        ("saved_j", -math.inf),
    ],
)
def test_an_optional_figure_that_cannot_be_true_is_unknown_and_the_others_stay(figure: str, value: float) -> None:
    figures: dict[str, Any] = {figure: value}
    odd = replace(SOUND, **figures)
    assert check_figures(odd, MEMORY) is not None
    known, absurd = with_unknown_for_absurd(odd)
    assert absurd == figures
    assert check_figures(known, MEMORY) is None
    assert math.isnan(getattr(known, figure))
    figures[figure] = getattr(SOUND, figure)
    assert replace(known, **figures) == SOUND


def test_what_can_be_true_stays() -> None:
    assert with_unknown_for_absurd(SOUND) == (SOUND, {})
    unknown = replace(SOUND, utilisation=math.nan, energy_j=math.nan)
    assert with_unknown_for_absurd(unknown) == (unknown, {})


@pytest.mark.parametrize("free", [-1, 1001, 2**62])
def test_free_memory_that_cannot_be_true_is_no_reading(free: int) -> None:
    known, absurd = with_unknown_for_absurd(replace(SOUND, free_bytes=Bytes(free)))
    found = check_figures(known, MEMORY)
    assert absurd == {}
    assert found is not None
    assert found.code is Code.TELEMETRY_ABSURD

"""How many new workloads a step takes up follows from how long steps take."""

import pytest

from shoal.coordinator.core.workloads.pace import FIRST_NEW, LEAST_MEASURED, LEAST_NEW, MOST_S, StepPace
from shoal.types.units import Seconds


def test_a_step_takes_up_what_fits_into_its_time() -> None:
    pace = StepPace()
    assert pace.most == FIRST_NEW
    assert pace.after(LEAST_MEASURED - 1, Seconds(9.0)) == pace, "a few say little"
    for _ in range(20):
        pace = pace.after(100, Seconds(0.05))
    assert pace.most == pytest.approx(MOST_S / 0.0005, abs=1)
    for _ in range(20):
        pace = pace.after(100, Seconds(100.0))
    assert pace.most == LEAST_NEW


def test_steps_that_take_no_time_take_up_everything() -> None:
    assert StepPace().after(100, Seconds(0.0)).most is None

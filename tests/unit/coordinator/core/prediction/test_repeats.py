"""How well a measurement is known: by what models that were measured twice differed."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import device, profile, warm
from shoal.coordinator import codec
from shoal.coordinator.core.prediction.demand import OperatorClass
from shoal.coordinator.core.prediction.load_law import load_needs
from shoal.coordinator.core.prediction.model import Prediction, Repeats
from shoal.coordinator.core.prediction.predict import LEAST_SPREAD, predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals
from shoal.coordinator.core.prediction.repeats import repeats_of
from shoal.coordinator.core.prediction.residuals import DeviceClass, Residual, with_repeat
from shoal.coordinator.core.prediction.shared_variances import LEAST_GROUPS
from shoal.types.assignment import Served
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds

BOARD, BOX = DeviceClass("CPUExecutionProvider", "maker board"), DeviceClass("CPUExecutionProvider", "maker box")
KINDS = 1 + len(OperatorClass)
SIZES = load_needs(profile()).sizes


def mix(number: int) -> tuple[float, ...]:
    """No two of the first hundred are near-copies."""
    first, second = number % KINDS, number // KINDS % KINDS
    shares = [0.0] * KINDS
    shares[first] += 0.7
    shares[second] += 0.3
    return tuple(shares)


def residual_of(log_repeat: float, number: int, where: DeviceClass = BOARD) -> Residual:
    return Residual(
        *(f"model{number:03}", where, mix(number), math.nan, SIZES),
        log_tail=-3.0,
        log_repeat=log_repeat,
        log_repeat_p95=2 * log_repeat,
        log_ratio_of_sum=0.0,
    )


def here(repeats: Repeats | None, samples: int = 400, served: tuple[Served, ...] = ()) -> Prediction:
    found = predict(device(), None, profile(), "fp32", measured=warm(samples=samples), served=served, repeats=repeats)
    assert isinstance(found, Prediction)
    return found


def factors(log_repeat: float) -> Repeats:
    return Repeats(math.exp(log_repeat), math.exp(2 * log_repeat))


def test_nine_in_ten_of_those_measured_twice_are_inside() -> None:
    seen = [residual_of(0.01 * number * (-1) ** number, number) for number in range(1, 20)]
    found = RegionResiduals(seen).repeats[BOARD]
    assert found == pytest.approx(factors(0.18)), "the 18th of 19, since a twentieth may be anything"
    assert BOX not in RegionResiduals(seen).repeats, "nothing was measured twice there"


def test_too_few_tell_nothing() -> None:
    seen = [residual_of(0.3, number) for number in range(LEAST_GROUPS)]
    assert repeats_of(seen) == pytest.approx(factors(0.3))
    assert repeats_of(seen[1:]) is None
    assert repeats_of([]) is None


def test_a_model_and_its_near_copies_count_once() -> None:
    seen = [residual_of(0.02, number) for number in range(20)]
    copies = [replace(residual_of(0.3, 3), model=f"copy{number}") for number in range(100)]
    assert repeats_of([*seen, *copies]) == pytest.approx(factors(0.02))
    often = [residual_of(0.3, 3) for _ in range(100)]
    assert repeats_of([*seen, *often]) == pytest.approx(factors(0.02))
    assert repeats_of(copies) is None


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=9, max_size=40))
def test_whatever_was_reported_an_interval_ends_at_a_factor_of_two(repeats: list[float]) -> None:
    seen = [residual_of(each, number) for number, each in enumerate(repeats)]
    found = RegionResiduals(seen).repeats[BOARD]
    assert all(1 <= each <= 2 + 1e-9 for each in found)


def test_an_interval_is_what_repeated_measurements_differ_by() -> None:
    """Before the region has repeated enough it is the receipt's spread, or what so few runs tell."""
    sure, few = here(None), here(None, samples=16)
    assert sure.latency_p50_s.high / sure.latency_p50_s.mid == pytest.approx(1 + LEAST_SPREAD)
    assert few.latency_p50_s.high / few.latency_p50_s.mid == pytest.approx(1.25)
    served = (Served("eu", 4000, 0, Seconds(0.02), Seconds(0.024), Joules(1600.0), EnergySource.ESTIMATED),)
    for each in (Repeats(1.4, 1.6), Repeats(1.03, 1.1)):
        for learnt in (here(each), here(each, samples=16), here(each, served=served)):
            for name, factor in (("latency_p50_s", each.p50), ("latency_p95_s", each.p95)):
                low, mid, high = getattr(learnt, name)
                assert (mid / low, high / mid) == (pytest.approx(factor), pytest.approx(factor))
                assert mid == pytest.approx(getattr(sure, name).mid)
            assert learnt.memory_bytes == sure.memory_bytes


def test_a_second_warm_up_is_compared_with_the_first() -> None:
    seen = residual_of(math.nan, 0)
    newest = replace(seen, log_ratio_of_sum=0.2)
    found = with_repeat(newest, seen, warm(p50=0.03), warm(p50=0.02))
    assert found.log_repeat == pytest.approx(math.log(1.5))
    assert found.log_repeat_p95 == pytest.approx(math.log(1.5))
    for unlike in (
        with_repeat(newest, None, warm(p50=0.03), None),
        with_repeat(newest, seen, warm(p50=0.03), warm(p50=0.0)),
        with_repeat(newest, replace(seen, load_sizes=None), warm(p50=0.03), warm(p50=0.02)),
        with_repeat(replace(newest, log_tail=math.nan), seen, warm(p50=0.03), warm(p50=0.02)),
    ):
        assert math.isnan(unlike.log_repeat), "another shape, an emulated device, or nothing to compare with"


def test_a_record_of_an_older_version_has_none() -> None:
    stored = json.loads(codec.dump(residual_of(0.1, 0)))
    assert codec.load(Residual, json.dumps(stored).encode()).log_repeat == 0.1
    del stored["log_repeat"], stored["log_repeat_p95"]
    assert math.isnan(codec.load(Residual, json.dumps(stored).encode()).log_repeat)

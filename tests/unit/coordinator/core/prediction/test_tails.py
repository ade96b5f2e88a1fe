"""How much longer the slowest runs take: assumed with its error, learnt from warm-ups, and from service since."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import device, node, profile, receipt, warm
from shoal.coordinator.core.prediction.demand import OperatorClass, demand_of
from shoal.coordinator.core.prediction.model import Basis, Correction, Interval, Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals
from shoal.coordinator.core.prediction.residuals import (
    LEAST_TAIL_RUNS,
    DeviceClass,
    Residual,
    residual_of,
    with_service,
)
from shoal.coordinator.core.prediction.tails import TAIL_GUESS, log_tail, tail_factors
from shoal.types.assignment import Served
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds

MIX = (1.0, *(0.0 for _ in OperatorClass))
BOARD, BOX = DeviceClass("CPUExecutionProvider", "maker board"), DeviceClass("CPUExecutionProvider", "maker box")
CARD = DeviceClass("CUDAExecutionProvider", "maker card")


def tail_of(ratio: float, model: str = "a", where: DeviceClass = BOARD) -> Residual:
    return Residual(model, where, MIX, math.nan, log_tail=log_tail(1.0, ratio), tail_runs=20, log_ratio_of_sum=0.0)


def tail(residuals: list[Residual], model: str, where: DeviceClass) -> Interval:
    found = RegionResiduals(residuals).correction(model, where, MIX)
    assert found is not None
    return found.tail


def service(requests: int, p50: float, p95: float) -> Served:
    return Served("eu", requests, 0, Seconds(p50), Seconds(p95), Joules(1.0), EnergySource.ESTIMATED)


def test_before_any_was_seen_the_ratio_is_that_of_its_sources() -> None:
    assert pytest.approx(Interval(1.007, 1.043, 1.286), abs=0.001) == TAIL_GUESS
    unknown = [replace(tail_of(2.0), log_tail=math.nan)]
    assert tail(unknown, "a", BOARD) == pytest.approx(TAIL_GUESS)
    assert TAIL_GUESS.low < 1.02 < 1.11 < TAIL_GUESS.high, "medians of MLPerf and of our own warm-ups"


def test_the_nearer_it_was_seen_the_more_it_counts() -> None:
    """A board whose slowest runs take half as long again, whatever the model."""
    residuals = [tail_of(1.5, model) for model in "abcdefgh"]
    here, box, card = (tail(residuals, "z", where) for where in (BOARD, BOX, CARD))
    assert here.mid == pytest.approx(1.5, rel=0.05)
    assert here.mid > box.mid > card.mid > TAIL_GUESS.mid
    doubts = [math.log(each.high) / math.log(each.low) for each in (here, box, card)]
    assert doubts == sorted(doubts)


def test_a_model_with_long_tails_takes_them_along() -> None:
    residuals = [tail_of(1.1, model, where) for model in "abcd" for where in (BOARD, BOX)]
    residuals += [tail_of(1.6, "long")]
    assert tail(residuals, "long", BOX).mid > tail(residuals, "other", BOX).mid


def test_one_liar_does_not_decide() -> None:
    honest = [tail_of(1.1 + 0.01 * number, model) for number, model in enumerate("abcdefgh")]
    lied = [*honest, tail_of(900.0, "z")]
    assert tail(lied, "q", BOARD).mid == pytest.approx(tail(honest, "q", BOARD).mid, rel=0.1)


def test_service_replaces_the_warm_up_once_it_is_twice_as_long() -> None:
    before, measured = tail_of(1.1), warm(p50=0.1)
    assert with_service(before, measured, ()) is before
    assert with_service(before, measured, (service(39, 0.1, 0.2),)) is before
    after = with_service(before, measured, (service(40, 0.1, 0.2),))
    assert math.exp(math.exp(after.log_tail)) == pytest.approx(2)
    assert after.tail_runs == 40
    assert with_service(after, measured, (service(79, 0.1, 0.3),)) is after
    few = replace(before, tail_runs=0)
    assert with_service(few, measured, (service(LEAST_TAIL_RUNS - 1, 0.1, 0.2),)) is few


def test_an_emulated_device_teaches_no_tail() -> None:
    """Its warm-up takes what its profile says each time, and what its service takes longer is its host's."""
    rates, demand, measured = receipt(node("n", device()), device()).rates, demand_of(profile()), warm(p50=0.1)
    real, emulated = (
        residual_of("a", device(emulated=is_emulated), rates, "fp32", demand, measured) for is_emulated in (False, True)
    )
    assert real is not None
    assert emulated is not None
    assert math.isfinite(real.log_tail)
    assert math.isnan(emulated.log_tail)
    assert (real.tail_runs, emulated.tail_runs) == (measured.samples, 0)
    served = (service(1000, 0.1, 0.2),)
    assert math.isfinite(with_service(real, measured, served).log_tail)
    assert with_service(emulated, measured, served, is_emulated=True) is emulated
    older = with_service(tail_of(1.002), measured, served, is_emulated=True)
    assert (math.isnan(older.log_tail), older.tail_runs) == (True, 0)
    assert tail([replace(emulated, device_class=CARD, mix=MIX)], "b", CARD) == pytest.approx(TAIL_GUESS)


def test_service_that_something_else_slows_down_teaches_nothing() -> None:
    before = tail_of(1.1)
    assert with_service(before, warm(p50=0.1), (service(1000, 0.3, 0.9),)) is before


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(), st.floats()), max_size=4), st.floats())
def test_service_that_cannot_be_teaches_nothing(rows: list[tuple[int, float, float]], p50: float) -> None:
    found = with_service(tail_of(1.1), warm(p50=p50), tuple(service(*each) for each in rows))
    assert math.isfinite(found.log_tail)


@given(st.floats(), st.floats())
def test_a_ratio_is_one_or_more_or_none(p50_s: float, p95_s: float) -> None:
    found = log_tail(p50_s, p95_s)
    assert math.isnan(found) or math.exp(math.exp(found)) >= 1.0


def test_p95_of_a_prediction_has_the_errors_of_both() -> None:
    host = node("n", device())
    learnt = Correction(0.5, 1.0, 2.0, Basis.CALIBRATED, Interval(1.1, 1.2, 1.5))
    found = predict(device(), receipt(host, device()), profile(), "fp32", correction=learnt)
    assert isinstance(found, Prediction)
    p50, p95 = found.latency_p50_s, found.latency_p95_s
    assert p95.mid == pytest.approx(1.2 * p50.mid)
    assert p50.high / p50.mid < p95.high / p95.mid < (p50.high / p50.mid) * 1.25
    sure = learnt._replace(low=1.0, high=1.0)
    assert tail_factors(sure) == pytest.approx(learnt.tail)

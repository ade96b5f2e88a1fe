"""`shoal bench prediction --moves`: how answers and durations are judged."""

import math
from typing import Any

import pytest

from harness.benchmark_modules import load_benchmark


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module."""
    return load_benchmark(monkeypatch, "_prediction", ("live_models", "moves"))["moves"]


def test_verdicts_and_seconds_are_judged_apart(moves: Any) -> None:
    trial = moves.MoveTrial
    moved = [trial("w", "b", "yes", "", expected_s, 10.0) for expected_s in (7.5, 12.9, 20.0)]
    refused = trial("w", "c", "no", "SELECTOR_MISMATCH", math.nan, math.nan)
    failed = trial("w", "b", "yes", "LOAD_FAILED", 10.0, math.nan)
    wrong = trial("w", "c", "no", "", 10.0, 10.0)
    assert [each.is_verdict_right for each in (moved[0], refused, failed, wrong)] == [True, True, False, False]
    line = moves.summary([*moved, refused, failed])
    assert (line["moves"], line["moved"]) == (5, 3)
    assert line["verdicts_right"] == pytest.approx(0.8)
    assert line["seconds_within_30"] == pytest.approx(2 / 3)
    assert line["seconds_median_error"] == pytest.approx(29.0)


def test_nothing_carried_out_is_no_success(moves: Any) -> None:
    line = moves.summary([])
    assert (line["moves"], line["verdicts_right"]) == (0, 0.0)
    assert math.isnan(line["seconds_median_error"])

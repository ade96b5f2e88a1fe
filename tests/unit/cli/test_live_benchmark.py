"""`shoal bench prediction --live`: which cases there are, and how measurements are judged."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.benchmark_modules import load_benchmark
from harness.builders.coordinator_core import device, node, receipt
from harness.models.synthetic import relu
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.demand import demand_of
from shoal.coordinator.core.prediction.model import Basis
from shoal.coordinator.core.prediction.roofline import service_seconds
from shoal.types.assignment import Measured
from shoal.types.device import EnergySource
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, Joules, Seconds

PARTS = ("live_models", "live")
MB = 2**20


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The benchmark's modules by name."""
    return load_benchmark(monkeypatch, "_prediction", PARTS)


def live_model(parts: dict[str, Any], name: str, family: str) -> Any:
    return parts["live_models"].LiveModel(name, family, relu().SerializeToString(), {"x": (1, 4)}, ("x",))


def warm_up(latency_s: float) -> Measured:
    return Measured(
        Seconds(0.1), Bytes(30 * MB), Seconds(latency_s), Seconds(latency_s), Joules(1.0), EnergySource.ESTIMATED, 20
    )


def errors_of(parts: dict[str, Any], factors: Sequence[tuple[str, str, tuple[float, ...]]]) -> list[Any]:
    """Models with their families, and by how much each round exceeds what the receipt promises."""
    live, box = parts["live"], device()
    found = receipt(node("n", box), box)
    measured = {}
    for name, family, times in factors:
        (case,) = live.CaseChoice((1,), (1,)).of([live_model(parts, name, family)], [box])
        promised = service_seconds(demand_of(case.profile), found.rates, "fp32")
        measured[case.name] = case, [warm_up(factor * promised) for factor in times]
    judged: list[Any] = live.live_errors({(box.name, 1): found}, measured)
    return judged


def test_there_are_enough_cases_on_one_device(parts: dict[str, Any]) -> None:
    built = len(parts["live_models"].MODELS)
    models = [live_model(parts, f"m{number}", "f") for number in range(built)]
    cases = list(parts["live"].CaseChoice().of(models, [device()]))
    assert len(cases) >= 40
    assert len({case.name for case in cases}) == len(cases)
    assert built >= 15
    assert {(case.batch, case.threads) for case in cases} == {(1, 1), (4, 1), (1, 2)}
    assert next(case for case in cases if case.batch == 4).profile.reference_shapes["x"] == (4, 4)


def test_a_family_is_predicted_from_the_others_alone(parts: dict[str, Any]) -> None:
    slow, slow_too, usual = errors_of(
        parts, [("a", "slow", (9.0, 9.0)), ("b", "slow", (9.0, 9.0)), ("c", "usual", (2.0, 2.0))]
    )
    assert {each.calibrated.basis for each in (slow, usual)} == {Basis.CALIBRATED}
    assert slow.calibrated.latency_p50_s.mid / slow.later_s == pytest.approx(2 / 9, rel=0.5)
    assert slow_too.calibrated.latency_p50_s == slow.calibrated.latency_p50_s
    assert usual.calibrated.latency_p50_s.mid / usual.later_s > 1.5


def test_the_first_warm_up_is_judged_by_later_ones(parts: dict[str, Any]) -> None:
    (found, _) = errors_of(parts, [("a", "f", (1.0, 2.0, 4.0, 2.0)), ("b", "g", (1.0, 1.0))])
    assert found.known.basis is Basis.HERE
    assert found.known.latency_p50_s.mid / found.later_s == pytest.approx(1 / 2)


def test_the_last_line(parts: dict[str, Any]) -> None:
    errors = errors_of(parts, [("a", "f", (1.0, 1.0)), ("b", "g", (1.0, 1.25))])
    errors[0] = replace(errors[0], measured=replace(errors[0].measured, memory_bytes=Bytes(10 * 2**30)))
    line = parts["live"].summary(errors)
    assert line["a_mape"] == pytest.approx(10, abs=0.1)
    assert (line["cases"], line["architectures"]) == (2, 2)
    assert 99 < line["memory_worst_under"] <= 100
    assert set(line) == {
        "a_mape", "b_mape", "b_within_15", "coverage_a", "coverage_b", "width_a", "width_b", "p95_mape", "coverage_p95",
        "memory_within_10", "memory_worst_under", "committed_worst_under", "load_within_30", "coverage_load",
            "load_cpu_within_30", "cases", "architectures",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "fastest"),
    [((2.0, 1.0, 4.0, 3.0), (1.0, 3.0)), ((2.0, 4.0, 1.0), (2.0, 1.0)), ((2.0,), (2.0,))],
)
def test_the_fastest_warm_ups_stand_for_a_machine_that_does_nothing_else(
    parts: dict[str, Any], rounds: tuple[float, ...], fastest: tuple[float, ...]
) -> None:
    """One of the first rounds, which is known, and one of the later ones, which judges."""
    live, box = parts["live"], device()
    (case,) = live.CaseChoice((1,), (1,)).of([live_model(parts, "a", "f")], [box])
    found = live.fastest_alone(live.LiveMeasured({}, {case.name: (case, [warm_up(each) for each in rounds])}))
    assert found == live.LiveMeasured({}, {case.name: (case, [warm_up(each) for each in fastest])})


def test_what_was_measured_is_judged_again_with_profiles_as_they_are_computed_now(
    parts: dict[str, Any], tmp_path: Path
) -> None:
    live, box = parts["live"], device()
    (case,) = live.CaseChoice((1,), (1,)).of([live_model(parts, "a", "f")], [box])
    stale = replace(case, profile=replace(case.profile, size_bytes=Bytes(1)))
    found = receipt(node("n", box), box)
    raw = tmp_path / "raw"
    raw.write_bytes(pickle.dumps(live.LiveMeasured({(box.name, 1): found}, {case.name: (stale, [warm_up(1.0)])})))
    receipts, cases = live.again(raw)
    assert receipts == {(box.name, 1): found}
    assert cases == {case.name: (case, [warm_up(1.0)])}


@pytest.mark.parametrize("name", ["loop", "scan", "branch"])
def test_models_with_control_flow_are_admitted(parts: dict[str, Any], name: str) -> None:
    made = parts["live_models"].MODELS[name]()
    profile = profile_of(made.content, "sha256:0")
    assert isinstance(profile, ModelProfile), profile
    assert {"loop": "Loop", "scan": "Scan", "branch": "If"}[name] in profile.operators

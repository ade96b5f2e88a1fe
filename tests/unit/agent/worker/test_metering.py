"""Latency histograms, joules and their sources, the pace of emulated devices."""

import fcntl
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.core.histogram import Histogram
from shoal.agent.devices.rapl import RAPL, RaplCounter
from shoal.agent.driver_port import DeviceAccess, EmulatedPace, EnergyCounter
from shoal.agent.emulation import PublishedFigure
from shoal.agent.ports import Batches
from shoal.agent.worker.energy import ConstantPower, CountedEnergy, CpuShare, energy_of, idle_watts
from shoal.agent.worker.metering import MAX_ORIGINS, OTHERS, Metering
from shoal.agent.worker.pace import element_count, hold_slot, model_pace, weights_of
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.receipt import Rates
from shoal.types.units import Bytes, Seconds, Watts


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_are_within_five_percent(values: list[float], share: float) -> None:
    histogram = Histogram(values)
    assert histogram.count == len(values)
    exact = float(np.quantile(values, share, method="lower"))
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.05)


def test_histogram_of_nothing_and_of_extremes() -> None:
    assert math.isnan(Histogram().quantile(0.5))
    histogram = Histogram([0.0, 1e9])
    assert histogram.quantile(0) == pytest.approx(1e-6, rel=0.05)
    assert histogram.quantile(1) == pytest.approx(1e4, rel=0.1)


def test_accounts_by_origin_are_bounded() -> None:
    metering = Metering(ConstantPower(10.0, EnergySource.PROFILE))
    for number in range(MAX_ORIGINS + 50):
        metering.record_answer(f"origin-{number}", 0.002, 0.001, pace_missed=number % 2 == 0)
    metering.record_failure("origin-0", 0.5, own_fault=True)
    metering.record_failure("origin-0", 0.0, own_fault=False)
    metering.record_failure("origin-0", 0.0, own_fault=True, is_late=True)
    served = {one.origin: one for one in metering.totals_by_origin()}
    assert len(served) == MAX_ORIGINS + 1
    assert served[OTHERS].requests == 50
    first = served["origin-0"]
    assert (first.requests, first.errors, first.refused, first.late, first.pace_missed) == (4, 1, 1, 1, 1)
    assert first.successes == 1
    assert first.joules == pytest.approx(0.501 * 10)
    assert first.energy_source is EnergySource.PROFILE
    assert first.latency_p95_s == pytest.approx(0.002, rel=0.05)
    assert metering.latencies() == Histogram([0.002] * (MAX_ORIGINS + 50)).counts, "of all, whatever their origin"


def test_inputs_of_a_request_are_counted_by_bounds() -> None:
    metering = Metering(ConstantPower(10.0, EnergySource.PROFILE))
    for batch in (1, 1, 2, 3, 128, 129, 0):
        metering.record_answer("", 0.001, 0.001, batch=batch)
    metering.record_failure("", 0.5, own_fault=True)
    assert metering.batches() == Batches((3, 1, 1, 0, 0, 0, 0, 1, 1), 264)


class Meter:
    """A device of these watts while nothing runs, and ten times as much in a run, which has half of it all."""

    def __init__(self, idle_w: float) -> None:
        self.idle_w, self.at, self.counted = idle_w, 0.0, 0.0

    def spend(self, seconds: float, *, busy: float = 0.0) -> None:
        self.at += seconds
        self.counted += self.idle_w * (seconds + 9 * busy)

    def read(self) -> tuple[int, int]:
        return 0, 0

    def between(self, then: tuple[int, int], now: tuple[int, int], busy: float) -> float:
        return 0.5 * min(1.0, busy)

    def energy(self) -> CountedEnergy:
        return CountedEnergy(lambda: self.counted, self, lambda: self.at)


def test_counted_energy_goes_to_who_was_busy() -> None:
    meter = Meter(1.0)
    energy = meter.energy()
    assert energy.source is EnergySource.MEASURED
    meter.spend(3.0, busy=3.0)
    # 30 J in the first window, half of it this process's, split 1:2
    assert energy.joules({"a": 1.0, "b": 2.0}) == pytest.approx({"a": 5.0, "b": 10.0})
    assert energy.joules({"a": 1.0, "b": 2.0}) == pytest.approx({"a": 5.0, "b": 10.0})


@pytest.mark.parametrize("idle_s", [0, 60, 3600])
def test_a_run_takes_nothing_of_the_time_before_it(idle_s: int) -> None:
    meter = Meter(1.0)
    energy = meter.energy()
    for _ in range(idle_s):
        meter.spend(1.0)
        energy.joules({"a": 0.0})
    meter.spend(1.0, busy=1.0)
    assert energy.joules({"a": 1.0}) == pytest.approx({"a": 5.0})


def test_a_run_over_several_calls_counts_whole() -> None:
    meter = Meter(1.0)
    energy = meter.energy()
    for _ in range(20):
        meter.spend(1.0)
        energy.joules({"a": 0.0})
    for _ in range(4):
        meter.spend(1.0, busy=1.0)
        energy.joules({"a": 0.0})  # it is told when it ends
    meter.spend(1.0, busy=1.0)
    assert energy.joules({"a": 5.0}) == pytest.approx({"a": 25.0})


@pytest.mark.parametrize("counted", [262_143.0 * 1000, -3.0, math.nan, math.inf])
def test_a_counter_that_was_set_counts_for_no_run(counted: float) -> None:
    meter = Meter(1.0)
    energy = meter.energy()
    meter.spend(1.0, busy=1.0)
    before = energy.joules({"a": 1.0})
    assert before == pytest.approx({"a": 5.0})
    meter.counted, kept = counted, meter.counted
    meter.at += 1.0
    assert energy.joules({"a": 2.0}) == before
    meter.counted = kept
    meter.spend(1.0)
    energy.joules({"a": 2.0})
    meter.spend(1.0, busy=1.0)
    assert energy.joules({"a": 3.0}) == pytest.approx({"a": 10.0})


def test_rapl_counters_wrap(tmp_path: Path) -> None:
    for name, value in (("energy_uj", 900_000), ("max_energy_range_uj", 1_000_000)):
        (tmp_path / name).write_text(f"{value}\n")
    counter = RaplCounter(str(tmp_path / "energy_uj"))
    assert counter() == 0
    (tmp_path / "energy_uj").write_text("100000\n")
    assert counter() == pytest.approx(0.2)


def test_joules_are_counted_by_what_the_driver_names(tmp_path: Path) -> None:
    for name, value in (("energy_uj", 0), ("max_energy_range_uj", 10**12)):
        (tmp_path / name).write_text(f"{value}\n")
    access = DeviceAccess(energy=EnergyCounter(RAPL, (str(tmp_path / "energy_uj"),), of_processors=False))
    energy = energy_of(access, 2)
    assert energy.source is EnergySource.MEASURED
    (tmp_path / "energy_uj").write_text("3000000\n")
    assert energy.joules({"a": 1e9}) == {"a": pytest.approx(3.0)}, "it was busy all the while"


def test_share_of_processor_time(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()

    def write(own: int, busy: int) -> None:
        (tmp_path / "self/stat").write_text(f"1 (a b) c) R {' '.join(['0'] * 10)} {own} 0 0 0\n")
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 5000 0 0 0 0 0 0\n")

    share = CpuShare(tmp_path)
    write(100, 1000)
    then = share.read()
    write(150, 1200)
    now = share.read()
    assert share.between(then, now, 1.0) == pytest.approx(0.25)
    assert share.between(now, now, 1.0) == 0.0


def test_without_counters_joules_are_estimated_and_say_so(tmp_path: Path) -> None:
    absent = str(tmp_path / "energy_uj")
    unreadable = DeviceAccess(energy=EnergyCounter(RAPL, (absent,), of_processors=True))
    no_gpu = EnergyCounter("shoal.agent.devices.nvidia:open_energy_counter", ("GPU-none",), of_processors=False)
    for access in (DeviceAccess(), unreadable, DeviceAccess(energy=no_gpu)):
        energy = energy_of(access, 2)
        assert energy.source is EnergySource.ESTIMATED
        assert energy.joules({"a": 2.0}) == {"a": pytest.approx(2 * 2 * 7.65)}
        assert idle_watts(access, 4) == 1.34


def figure(model: str, seconds: float, **more: Any) -> PublishedFigure:
    said: dict[str, Any] = {
        "precision": "fp32",
        "flops": 1000.0,
        "weights": 10.0,
        "attention": False,
        "joules": math.nan,
    }
    return PublishedFigure(model=model, latency_s=seconds, **{**said, **more})


def pace(*figures: PublishedFigure, launch_s: float = 0.5) -> EmulatedPace:
    unknown = math.nan
    rates = Rates(
        {}, {}, unknown, unknown, Seconds(0.0), Seconds(0.0), unknown, Watts(unknown), Watts(10.0), EnergySource.PROFILE
    )
    return EmulatedPace("p", "rows", figures, Seconds(launch_s), rates, 2.0, Bytes(2**30), Watts(10.0), Watts(unknown))


ON = pace(
    figure("small", 1.5),
    figure("large", 5.5, flops=1e5, weights=1e4),
    figure("small, attention", 9.5, attention=True),
    figure("small, int8", 0.9, precision="int8", joules=4.5),
)


@pytest.mark.parametrize(
    ("work", "weights", "precision", "relative", "seconds", "watts"),
    [
        (Work(conv_flops=1000, nodes=1), 10, "fp32", "small", 1.5, 10.0),
        (Work(conv_flops=1000, other_flops=9e9, nodes=1), 10, "fp32", "small", 1.5, 10.0),
        (Work(conv_flops=2000, nodes=1), 12, "fp32", "small", 2.5, 10.0),
        (Work(conv_flops=5e4, nodes=1), 1e4, "fp32", "large", 3.0, 10.0),
        (Work(conv_flops=400, matmul_flops=600, nodes=1), 10, "fp32", "small, attention", 9.5, 10.0),
        (Work(conv_flops=500, nodes=1), 10, "int8", "small, int8", 0.7, 5.0),
        # nobody measured bf16: as any other
        (Work(conv_flops=1000, nodes=1), 10, "bf16", "small", 1.5, 10.0),
        # no convolution and no product: as little as a launch takes
        (Work(other_flops=0, nodes=3), 1, "fp32", "small", 0.5, 10.0),
    ],
)
def test_a_model_takes_what_was_published_of_its_nearest_relative(
    work: Work, weights: float, precision: str, relative: str, seconds: float, watts: float
) -> None:
    found = model_pace(ON, work, weights, precision)
    assert found.relative.model == relative
    assert found.seconds() == pytest.approx(seconds)
    assert found.seconds(3.0) - 0.5 == pytest.approx(3 * (seconds - 0.5))
    assert found.watts == pytest.approx(watts)
    assert f"paced as {relative}, published: " in found.note


@given(st.floats(0.0, 1e15), st.floats(0.0, 1e12), st.sampled_from(("fp32", "int8", "fp64")), st.booleans())
def test_any_model_takes_at_least_a_launch(flops: float, weights: float, precision: str, attention: bool) -> None:
    kind = "matmul_flops" if attention else "conv_flops"
    found = model_pace(ON, Work(**{kind: flops}, nodes=1), weights, precision)  # type: ignore[arg-type]
    assert 0.5 <= found.seconds() < math.inf


def test_a_pace_needs_work() -> None:
    with pytest.raises(ShoalError) as refused:
        model_pace(ON, Work(), 1.0, "fp32")
    assert refused.value.code is Code.LOAD_FAILED


@pytest.mark.parametrize(("precision", "weights"), [("fp32", 25e6), ("fp16", 50e6), ("int8", 100e6), ("odd", 25e6)])
def test_weights_by_a_models_size(precision: str, weights: float) -> None:
    assert weights_of(Bytes(100_000_000), precision) == weights


def test_elements() -> None:
    assert element_count({"x": (1, 3, 4), "y": (), "z": (0, 5)}) == 13


def test_a_turn_is_held_by_one(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    with hold_slot((str(slot),)):
        handle = os.open(slot, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    with hold_slot(()):
        assert list(tmp_path.iterdir()) == [slot]

"""Emulated devices and the profiles they stand on."""

import json
import math
from importlib import resources
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from shoal.agent.devices.emulated import EmulatedDriver, profiles
from shoal.agent.driver_port import DriverOptions
from shoal.agent.worker.pace import device_seconds
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import DeviceKind, EnergySource, PowerState

RESNET50 = Work(conv_flops=8178368512.0, bytes=336765248.0, nodes=120)


@pytest.mark.parametrize(
    ("name", "kind", "latency_s", "joules", "row"),
    [
        ("nvidia-l4", DeviceKind.GPU, 0.329131e-3, 0.208145, "XR5610_L4x1_TRT_MaxQ/resnet50/SingleStream"),
        ("qualcomm-ai100-dm2", DeviceKind.NPU, 0.637299e-3, 0.009532, "gloria_highend/resnet50/singlestream"),
        ("rk3588s", DeviceKind.CPU, 117.988014e-3, 0.802935, "firefly-armnn-v22.11-neon/resnet50/singlestream"),
        ("orin-nx-16g", DeviceKind.GPU, 1.419325e-3, 0.019361, "Orin_NX_TRT_MaxQ/resnet50/SingleStream"),
    ],
)
def test_a_profile_gives_back_its_row(name: str, kind: DeviceKind, latency_s: float, joules: float, row: str) -> None:
    driver = EmulatedDriver(ManualClock(), DriverOptions((name,), 20.0))
    (device,) = driver.discover()
    assert (device.name, device.kind, device.emulated, device.time_scale) == (name, kind, True, 20.0)
    assert row in device.profile_source
    assert "MLCommons" in device.attributes["licence"]
    pace = driver.access(name).pace
    assert pace is not None
    assert device_seconds(pace, RESNET50, "fp32") == pytest.approx(latency_s, rel=1e-9)
    assert device_seconds(pace, RESNET50, "int8") * pace.active_w == pytest.approx(joules, rel=1e-9)
    assert pace.rates.energy_source is EnergySource.PROFILE
    # what nobody tells is unknown, not zero
    assert math.isnan(pace.idle_w) == (device.rest is None) == (name != "nvidia-l4")


def test_every_profile_names_source_and_licence() -> None:
    assert {"nvidia-l4", "qualcomm-ai100-dm2", "rk3588s"} <= set(profiles())
    for name in profiles():
        found = json.loads((resources.files("shoal.agent.devices") / "profiles" / f"{name}.json").read_text())
        assert found["name"] == name
        assert found["sources"]
        assert found["licence"]
        assert found["memory_bytes"] > 2**30


def test_a_server_sleeps_and_a_board_of_which_nobody_says_so_does_not() -> None:
    clock = ManualClock()
    driver = EmulatedDriver(clock, DriverOptions(("nvidia-l4", "rk3588s"), 10.0, wake_scale=0.01))
    server, board = driver.discover()
    assert server.rest is not None
    assert server.rest.idle_w == pytest.approx(632.4 * 16.4 / 104.0, rel=1e-3)
    assert server.rest.wake_s == pytest.approx(2.6)
    assert "assumed" in server.rest.source
    assert "0.01 times" in server.rest.source
    assert board.rest is None
    assert driver.set_sleep("rk3588s", True) == 0.0
    assert driver.read("rk3588s").power is None
    assert driver.set_sleep("nvidia-l4", True) == pytest.approx(2.6)
    clock.advance(100)
    asleep = driver.read("nvidia-l4")
    assert (asleep.power, asleep.slept_s, asleep.power_w) == (PowerState.ASLEEP, 100.0, 20.0)
    # the device's own joules: 100 s here are 10 of its seconds
    assert asleep.energy_j == pytest.approx(200)
    assert asleep.saved_j == pytest.approx((server.rest.idle_w - 20) * 10)
    assert driver.set_sleep("nvidia-l4", False) == pytest.approx(2.6)
    clock.advance(1)
    assert driver.read("nvidia-l4").power is PowerState.WAKING
    assert driver.set_sleep("nvidia-l4", False) == pytest.approx(1.6)
    clock.advance(1.7)
    assert driver.read("nvidia-l4").power is PowerState.AWAKE
    assert driver.set_sleep("nvidia-l4", False) == 0.0


def test_two_of_one_profile_have_their_own_names() -> None:
    driver = EmulatedDriver(ManualClock(), DriverOptions(("rk3588s", "nvidia-l4", "rk3588s")))
    assert [device.name for device in driver.discover()] == ["rk3588s", "nvidia-l4", "rk3588s-2"]


def test_readings_say_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000000 kB\nMemAvailable: 1000000 kB\n")
    driver = EmulatedDriver(ManualClock(), DriverOptions(("rk3588s",)), tmp_path)
    reading = driver.read("rk3588s")
    # the profile's 16 GB, but this machine has less
    assert reading.free_bytes == 1_000_000 * 1024
    assert all(map(math.isnan, (reading.utilisation, reading.temperature_c, reading.power_w, reading.energy_j)))
    with pytest.raises(ShoalError) as lost:
        driver.read("nvidia-l4")
    assert lost.value.code is Code.DEVICE_LOST


def test_it_is_as_the_file_says_until_that_is_gone(tmp_path: Path) -> None:
    said = tmp_path / "condition.json"
    driver = EmulatedDriver(ManualClock(), DriverOptions(("rk3588s",), emulated_state_file=said))
    assert math.isnan(driver.read("rk3588s").temperature_c)
    said.write_text('{"temperature_c": 97.0, "throttled": true}')
    hot = driver.read("rk3588s")
    assert (hot.temperature_c, hot.throttled) == (97.0, True)
    said.write_text('{"temperature_c": 40}')
    assert (driver.read("rk3588s").temperature_c, driver.read("rk3588s").throttled) == (40, False)
    for gone in ('{"answers": false}', "{", "[]", '{"heat": 1}', '{"answers": 0}', '{"temperature_c": "hot"}'):
        said.write_text(gone)
        with pytest.raises(ShoalError) as lost:
            driver.read("rk3588s")
        assert lost.value.code is Code.DEVICE_LOST
        assert [device.name for device in driver.discover()] == ["rk3588s"], "it is still on the bus"
    said.unlink()
    assert not driver.read("rk3588s").throttled


def test_one_is_started_with_less_memory_than_its_profile_says() -> None:
    driver = EmulatedDriver(ManualClock(), DriverOptions(("rk3588s=28MiB", "rk3588s")))
    small, whole = driver.discover()
    assert (small.name, small.profile, small.memory_bytes) == ("rk3588s", "rk3588s", 28 * 2**20)
    assert "28MiB of memory, as it was started" in small.profile_source
    assert (whole.name, whole.memory_bytes) == ("rk3588s-2", 16_000_000_000)
    assert driver.read("rk3588s").free_bytes <= 28 * 2**20
    for wrong in ("rk3588s=", "rk3588s=28", "rk3588s=lots"):
        with pytest.raises(ShoalError):
            EmulatedDriver(ManualClock(), DriverOptions((wrong,)))


@pytest.mark.parametrize(
    "options",
    [DriverOptions(("abacus",)), *(DriverOptions(("rk3588s",), scale) for scale in (0.0, -1.0, math.nan, math.inf))],
)
def test_settings_that_cannot_be_met(options: DriverOptions) -> None:
    with pytest.raises(ShoalError) as refused:
        EmulatedDriver(ManualClock(), options)
    assert refused.value.code is Code.FIELD_INVALID

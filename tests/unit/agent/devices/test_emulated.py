"""Emulated devices and the profiles they stand on."""

import json
import math
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from harness.fakes.clock import ManualClock
from shoal.agent.devices.emulated import EmulatedDriver, profiles
from shoal.agent.devices.host import Host
from shoal.agent.devices.published import pace_of
from shoal.agent.devices.topology import pcie_links
from shoal.agent.driver_port import DriverOptions
from shoal.agent.worker.pace import model_pace
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import DeviceKind, EnergySource, PowerState
from shoal.types.units import Bytes

RESNET50 = Work(conv_flops=8178368512.0, bytes=336765248.0, nodes=120)
WEIGHTS = 25.6e6
CARD_W = 72.0
"""NVIDIA L4, thermal design power."""


@pytest.mark.parametrize(
    ("name", "kind", "latency_s", "joules", "row"),
    [
        ("xr5610-l4", DeviceKind.GPU, 0.329131e-3, 0.208145, "XR5610_L4x1_TRT_MaxQ/resnet50/SingleStream"),
        ("nvidia-l4", DeviceKind.GPU, 0.329131e-3, CARD_W * 0.329131e-3, "XR5610_L4x1_TRT_MaxQ/resnet50/SingleStream"),
        ("qualcomm-ai100-dm2", DeviceKind.NPU, 0.637299e-3, 0.009532, "gloria_highend/resnet50/singlestream"),
        ("rk3588s", DeviceKind.CPU, 117.988014e-3, 0.802935, "71 models of edge_cloud_matrix.csv.gz"),
        ("orin-nx-16g", DeviceKind.GPU, 1.419325e-3, 0.019361, "Orin_NX_TRT_MaxQ/resnet50/SingleStream"),
    ],
)
def test_a_profile_gives_back_its_row(name: str, kind: DeviceKind, latency_s: float, joules: float, row: str) -> None:
    driver = EmulatedDriver(ManualClock(), DriverOptions((name,), 20.0))
    (device,) = driver.discover()
    assert (device.name, device.kind, device.emulated, device.time_scale) == (name, kind, True, 20.0)
    assert row in device.profile_source
    pace = driver.access(name).pace
    assert pace is not None
    found = model_pace(pace, RESNET50, WEIGHTS, "fp32")
    assert found.relative.model == "resnet50"
    assert found.seconds() == pytest.approx(latency_s, rel=1e-9)
    assert found.seconds() * found.watts == pytest.approx(joules, rel=1e-9)
    assert pace.rates.energy_source is EnergySource.PROFILE
    # what nobody tells is unknown, not zero
    assert math.isnan(pace.idle_w) == (device.rest is None) == (name != "xr5610-l4")
    assert bool(pace.system) == (name != "nvidia-l4"), "the watts of a card are not its server's"


def all_profiles() -> dict[str, dict[str, Any]]:
    folder = resources.files("shoal.agent.devices")
    found = {name: json.loads((folder / "profiles" / f"{name}.json").read_text()) for name in profiles()}
    return {**found, "htp-sim": json.loads((folder / "plugins" / "htp.json").read_text())}


def test_every_profile_names_source_and_licence() -> None:
    assert {"nvidia-l4", "xr5610-l4", "qualcomm-ai100-dm2", "rk3588s", "hailo-8", "rk3588-npu"} <= set(profiles())
    for name, found in all_profiles().items():
        assert found["name"] == name
        assert found["sources"]
        assert found["licence"]
        assert found["memory_bytes"] is None or found["memory_bytes"] > 2**30
        assert all(each["source"] for each in found["figures"])


@pytest.mark.parametrize(("name", "found"), all_profiles().items())
def test_what_the_region_predicts_from_paces_nothing(name: str, found: dict[str, Any]) -> None:
    paced = {each["source"].partition(":  ")[0] for each in found["figures"]}
    assert found["rates"]["rows"]
    assert not paced & set(found["rates"]["rows"])
    paced_models = {(each["model"], each["precision"]) for each in found["figures"]}
    assert len(paced_models) == len(found["figures"]), "each once"


@pytest.mark.parametrize(("name", "found"), all_profiles().items())
def test_every_published_model_runs_as_published(name: str, found: dict[str, Any]) -> None:
    pace = pace_of(found, Bytes(2**30))
    for figure in pace.figures:
        kind = "matmul_flops" if figure.attention else "conv_flops"
        work = Work(**{kind: figure.flops}, nodes=1)  # type: ignore[arg-type]
        assert pace.launch_s < figure.latency_s
        relative = model_pace(pace, work, figure.weights, figure.precision).relative
        assert (relative.flops, relative.weights) == (figure.flops, figure.weights), "itself, or one that is as large"


def test_a_server_sleeps_and_a_board_of_which_nobody_says_so_does_not() -> None:
    clock = ManualClock()
    driver = EmulatedDriver(clock, DriverOptions(("xr5610-l4", "rk3588s"), 10.0, wake_scale=0.01))
    server, board = driver.discover()
    assert server.rest is not None
    assert server.rest.idle_w == pytest.approx(632.4 * 16.4 / 104.0, rel=1e-3)
    assert server.rest.wake_s == pytest.approx(2.6)
    assert "assumed" in server.rest.source
    assert "0.01 times" in server.rest.source
    assert board.rest is None
    assert driver.set_sleep("rk3588s", True) == 0.0
    assert driver.read("rk3588s").power is None
    assert driver.set_sleep("xr5610-l4", True) == pytest.approx(2.6)
    clock.advance(100)
    asleep = driver.read("xr5610-l4")
    assert (asleep.power, asleep.slept_s, asleep.power_w) == (PowerState.ASLEEP, 100.0, 20.0)
    # the device's own joules: 100 s here are 10 of its seconds
    assert asleep.energy_j == pytest.approx(200)
    assert asleep.saved_j == pytest.approx((server.rest.idle_w - 20) * 10)
    assert driver.set_sleep("xr5610-l4", False) == pytest.approx(2.6)
    clock.advance(1)
    assert driver.read("xr5610-l4").power is PowerState.WAKING
    assert driver.set_sleep("xr5610-l4", False) == pytest.approx(1.6)
    clock.advance(1.7)
    assert driver.read("xr5610-l4").power is PowerState.AWAKE
    assert driver.set_sleep("xr5610-l4", False) == 0.0


def test_one_without_memory_of_its_own_works_in_its_hosts() -> None:
    hailo, board = EmulatedDriver(ManualClock(), DriverOptions(("hailo-8", "rk3588s"))).discover()
    assert (hailo.memory_in, board.memory_in) == ("cpu0", "")
    assert hailo.memory_bytes == Host(Path("/")).limit_bytes()


def test_a_card_has_the_link_that_its_maker_publishes_and_the_others_have_none() -> None:
    options = DriverOptions(profiles())
    devices = {device.name: device for device in EmulatedDriver(ManualClock(), options).discover()}
    known = {name: device.links for name, device in devices.items() if device.links}
    assert known.keys() == {"nvidia-l4", "xr5610-l4"}
    for (link,) in known.values():
        assert link.source.startswith("published: ")
        (computed,) = pcie_links(4, 16, link.source)
        assert replace(link, bytes_per_s=computed.bytes_per_s) == computed
        assert link.bytes_per_s == pytest.approx(computed.bytes_per_s)
    assert {device.numa for device in devices.values()} == {None}


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

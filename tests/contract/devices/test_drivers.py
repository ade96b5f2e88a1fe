"""What every driver that is installed (entry points of `shoal.devices`) must do, ours or not."""

import math
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

import pytest

from harness.fakes.clock import ManualClock
from shoal.agent.devices.topology import MAX_NUMA_NODE
from shoal.agent.driver_port import DeviceAccess, DeviceDriver, DriverFactory, DriverOptions
from shoal.agent.packing import pack, unpack
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Device, PowerState, Reading
from shoal.wire import nouns

DRIVERS = sorted(entry_points(group="shoal.devices"), key=lambda entry: entry.name)
OPTIONS = DriverOptions(emulate=("rk3588s", "xr5610-l4"), time_scale=3.0)


def test_our_drivers_are_installed() -> None:
    ours = {"amd", "ascend", "cpu", "emulated", "nvidia", "plugins"}
    assert ours <= {entry.name for entry in DRIVERS}


@pytest.fixture(params=DRIVERS, ids=lambda entry: str(entry.name))
def driver(request: pytest.FixtureRequest) -> DeviceDriver:
    entry: EntryPoint = request.param
    return cast(DriverFactory, entry.load())(ManualClock(), OPTIONS)


def test_discovery_is_repeatable_and_its_devices_travel(driver: DeviceDriver) -> None:
    devices = driver.discover()
    assert devices == driver.discover()
    assert len({device.name for device in devices}) == len(devices)
    for device in devices:
        assert nouns.decode(Device, nouns.encode(device)) == device
        assert device.memory_bytes > 0
        assert device.parallelism >= 1
        assert device.provider.endswith("ExecutionProvider")
        assert device.driver
        assert device.runtime_version
        assert device.emulated == bool(device.profile) == bool(device.profile_source)
        assert device.numa is None or 0 <= device.numa <= MAX_NUMA_NODE
        assert all(link.name and link.source for link in device.links)
        assert all(link.bytes_per_s is None or 0 < link.bytes_per_s < math.inf for link in device.links)


def test_readings_are_values_or_unknown(driver: DeviceDriver) -> None:
    for device in driver.discover():
        for _ in range(2):
            reading = driver.read(device.name)
            assert reading.device == device.name
            assert 0 <= reading.free_bytes <= device.memory_bytes
            for value in (reading.utilisation, reading.temperature_c, reading.power_w, reading.energy_j):
                assert math.isnan(value) or (math.isfinite(value) and value >= 0)
            assert math.isnan(reading.utilisation) or reading.utilisation <= 1
            # by text, since what is unknown (NaN) equals nothing
            assert repr(nouns.decode(Reading, nouns.encode(reading))) == repr(reading)


def test_a_device_that_is_not_there(driver: DeviceDriver) -> None:
    with pytest.raises(ShoalError) as lost:
        driver.read("no-such-device")
    assert lost.value.code is Code.DEVICE_LOST


def test_sleep_is_what_the_device_says_it_can(driver: DeviceDriver) -> None:
    for device in driver.discover():
        if device.rest is None:
            assert driver.set_sleep(device.name, True) == 0.0
            assert driver.read(device.name).power is None
            assert device.emulated or device.attributes["sleep"].startswith("no:")
            continue
        assert 0 <= device.rest.asleep_w < device.rest.idle_w
        assert device.rest.source
        assert driver.set_sleep(device.name, True) == device.rest.wake_s
        assert driver.read(device.name).power is PowerState.ASLEEP
        assert driver.set_sleep(device.name, True) == device.rest.wake_s
        assert driver.set_sleep(device.name, False) == device.rest.wake_s
        assert driver.read(device.name).power is PowerState.WAKING


def test_only_emulated_devices_are_paced(driver: DeviceDriver) -> None:
    for device in driver.discover():
        pace = driver.access(device.name).pace
        assert (pace is not None) == device.emulated
        if pace is not None:
            assert (pace.profile, pace.source, pace.time_scale) == (device.profile, device.profile_source, 3.0)
            assert pace.active_w > 0


def test_what_a_worker_needs_travels_and_can_be_opened(driver: DeviceDriver) -> None:
    """The worker is another process, which knows no family of devices."""
    for device in driver.discover():
        access = driver.access(device.name)
        assert repr(unpack(DeviceAccess, pack(access))) == repr(access), "by text, since NaN equals nothing"
        assert all(Path(file).is_char_device() for file in access.files)
        assert access.memory
        if access.energy is not None:
            first = pkgutil.resolve_name(access.energy.opener)(*access.energy.arguments)
            assert first() >= 0.0

"""F51: a driver that hangs, lies, crashes or is slow at any call costs its own devices, until it is sound again.

Real processes of a driver that does so on command (`harness.faults.faulty_driver`), and of our own drivers.
"""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from harness.fakes.log import RecordingLog
from harness.faults import faulty_driver
from harness.faults.faulty_driver import DEVICE, FAULT_FILE, WAKE_S, DriverFault
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.devices import process
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.installed import installed_drivers
from shoal.agent.devices.process import DriverProcess
from shoal.agent.driver_port import DriverOptions
from shoal.types.codes import Code, ShoalError

FACTORIES: Final = {**installed_drivers(cpu=True), "faulty": f"{faulty_driver.__name__}:FaultyDriver"}
NO_OPTIONS: Final = DriverOptions()
LIMIT_S: Final = 30.0
BACK_S: Final = 5.0
"""F51: the device is back so soon after its driver is."""


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says what the driver does."""
    path = tmp_path / "fault.json"
    faulty_driver.command(path)
    monkeypatch.setenv(FAULT_FILE, str(path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.setattr(process, "CALL_S", 1.0)
    monkeypatch.setattr(process, "DISCOVER_S", 3.0)
    return path


@asynccontextmanager
async def running(
    name: str, options: DriverOptions = NO_OPTIONS, on_devices: Callable[[], None] = lambda: None
) -> AsyncIterator[DriverProcess]:
    driver = DriverProcess(name, FACTORIES[name], options, SystemClock(), on_devices)
    task = asyncio.create_task(driver.run())
    try:
        await asyncio.wait_for(driver.wait_started(), LIMIT_S)
        yield driver
    finally:
        task.cancel()
        await asyncio.wait((task,))


def code_of(driver: DriverProcess) -> Code | None:
    """Why the device cannot be read; None if it can."""
    try:
        driver.read(DEVICE)
    except ShoalError as error:
        return error.refusal.code
    return None


async def wait_code(driver: DriverProcess, code: Code | None) -> float:
    """Seconds until the device is read, or refused with that code."""
    began = asyncio.get_running_loop().time()
    await until(lambda: code_of(driver) is code, LIMIT_S, f"{code}, it is {code_of(driver)}")
    return asyncio.get_running_loop().time() - began


async def test_a_driver_in_its_own_process_tells_what_it_tells_in_ours() -> None:
    (own,) = CpuDriver(SystemClock(), DriverOptions()).discover()
    async with running("cpu") as driver:
        assert driver.discover() == (own,)
        reading = driver.read(own.name)
        assert 0 < reading.free_bytes <= own.memory_bytes
        assert driver.access(own.name) == CpuDriver(SystemClock(), DriverOptions()).access(own.name)
        assert driver.set_sleep(own.name, True) == 0.0
        with pytest.raises(ShoalError):
            driver.read("cpu1")


async def test_what_a_driver_is_told_at_the_start_reaches_it() -> None:
    async with running("emulated", DriverOptions(emulate=("rk3588s=1GiB",), time_scale=3.0)) as driver:
        (device,) = driver.discover()
        assert (device.memory_bytes, device.time_scale, device.emulated) == (2**30, 3.0, True)
        pace = driver.access(device.name).pace
        assert pace is not None
        assert pace.memory_bytes == 2**30


async def test_a_driver_without_devices_ends() -> None:
    driver = DriverProcess("emulated", FACTORIES["emulated"], NO_OPTIONS, SystemClock(), lambda: None)
    await asyncio.wait_for(driver.run(), LIMIT_S)
    assert (driver.discover(), driver.is_silent) == ((), False)


async def test_options_that_a_driver_refuses_are_an_error_of_who_gave_them() -> None:
    with pytest.raises(ShoalError) as refused:
        async with running("emulated", DriverOptions(emulate=("abacus",))):
            pass
    assert refused.value.code is Code.FIELD_INVALID


HARMLESS: Final = (DriverFault.SLOW, DriverFault.FIGURE, DriverFault.VANISH)
"""At all calls, for the driver."""


@pytest.mark.parametrize("fault", [each for each in DriverFault if each not in (*HARMLESS, DriverFault.HUGE)])
async def test_f51_a_driver_that_fails_when_it_is_read_costs_its_device_until_it_is_sound(
    faults: Path, fault: DriverFault
) -> None:
    async with running("faulty") as driver:
        assert code_of(driver) is None
        faulty_driver.command(faults, "read", fault)
        await wait_code(driver, Code.DEVICE_UNREACHABLE)
        faulty_driver.command(faults)
        assert await wait_code(driver, None) < BACK_S


@pytest.mark.parametrize("fault", [each for each in DriverFault if each not in HARMLESS])
async def test_f51_a_driver_that_cannot_find_its_devices_is_asked_again(faults: Path, fault: DriverFault) -> None:
    faulty_driver.command(faults, "discover", fault)
    found = asyncio.Event()
    async with running("faulty", on_devices=found.set) as driver:
        assert driver.is_silent
        assert driver.discover() == ()
        faulty_driver.command(faults)
        await asyncio.wait_for(found.wait(), BACK_S + process.DISCOVER_S)
        assert [each.name for each in driver.discover()] == [DEVICE]
        assert code_of(driver) is None


async def test_f51_a_slow_driver_is_waited_for_and_its_device_goes_on(faults: Path) -> None:
    async with running("faulty") as driver:
        faulty_driver.command(faults, "read", DriverFault.SLOW)
        first = driver.read(DEVICE).taken_at
        await until(lambda: driver.read(DEVICE).taken_at > first + 1.0, LIMIT_S, "two slow readings")
        assert not driver.is_silent


async def test_f51_a_figure_that_cannot_be_true_is_unknown_and_its_device_goes_on(
    faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = RecordingLog()
    monkeypatch.setattr(process, "_log", heard)
    async with running("faulty") as driver:
        faulty_driver.command(faults, "read", DriverFault.FIGURE)
        await until(lambda: math.isnan(driver.read(DEVICE).utilisation), LIMIT_S, "the figure to be unknown")
        first = driver.read(DEVICE)
        await until(lambda: driver.read(DEVICE).taken_at > first.taken_at, LIMIT_S, "another reading")
        assert (first.free_bytes, first.power_w) == (faulty_driver.MEMORY, 3.0)
        assert not driver.is_silent
    assert heard.events.count("reading_figure_ignored") == 1, "it is logged once"


async def test_a_slow_driver_reads_a_tenth_of_the_time(faults: Path) -> None:
    """A vendor's command that takes half a second would otherwise hold half a core, on a node that is to serve."""
    async with running("faulty") as driver:
        faulty_driver.command(faults, "read", DriverFault.SLOW)
        seen = {driver.read(DEVICE).taken_at}

        def are_three() -> bool:
            seen.add(driver.read(DEVICE).taken_at)
            return len(seen) == 4

        await until(are_three, LIMIT_S, "three slow readings")
        second, third = sorted(seen)[2:]
        assert third - second >= 0.5 / process.MOST_OF_TIME - 0.5


async def test_f51_a_device_that_vanishes_is_lost_and_its_driver_is_not(faults: Path) -> None:
    async with running("faulty") as driver:
        faulty_driver.command(faults, "read", DriverFault.VANISH)
        await wait_code(driver, Code.DEVICE_LOST)
        assert not driver.is_silent
        faulty_driver.command(faults)
        assert await wait_code(driver, None) < BACK_S


async def test_f51_a_call_that_hangs_holds_up_nobody_who_reads(faults: Path) -> None:
    """The supervisor reads what was answered last, without waiting: at no time does the event loop stand still."""
    async with running("faulty") as driver:
        faulty_driver.command(faults, "read", DriverFault.HANG)
        times = [asyncio.get_running_loop().time()]

        def is_silent() -> bool:
            times.append(asyncio.get_running_loop().time())
            return code_of(driver) is Code.DEVICE_UNREACHABLE

        await until(is_silent, LIMIT_S, "the driver to be given up")
        assert max(later - earlier for earlier, later in pairwise(times)) < process.CALL_S / 2


async def test_a_device_sleeps_and_wakes_by_order_also_after_its_driver_was_started_again(faults: Path) -> None:
    async with running("faulty") as driver:
        assert driver.set_sleep(DEVICE, False) == 0.0, "it is awake"
        assert driver.set_sleep(DEVICE, True) == WAKE_S
        assert driver.set_sleep(DEVICE, False) == WAKE_S, "not before the driver has confirmed it"
        await until(lambda: driver.set_sleep(DEVICE, False) == 0.0, LIMIT_S, "it to wake")
        faulty_driver.command(faults, "read", DriverFault.EXIT)
        await wait_code(driver, Code.DEVICE_UNREACHABLE)
        with pytest.raises(ShoalError):
            driver.set_sleep(DEVICE, True)
        faulty_driver.command(faults)
        await wait_code(driver, None)
        await until(lambda: driver.set_sleep(DEVICE, False) == 0.0, LIMIT_S, "it to wake")


async def test_a_driver_that_hangs_at_an_order_is_started_again(faults: Path) -> None:
    async with running("faulty") as driver:
        faulty_driver.command(faults, "set_sleep", DriverFault.HANG)
        driver.set_sleep(DEVICE, True)
        await wait_code(driver, Code.DEVICE_UNREACHABLE)
        faulty_driver.command(faults)
        assert await wait_code(driver, None) < BACK_S

"""Drivers on machines that are not here: recordings of vendors' answers, most of them written by hand after documents,
and the same answers malformed, cut short, in another language, huge, or missing."""

import json
import math
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.machine import RECORDINGS, ReplayedMachine
from shoal.agent.devices import process
from shoal.agent.devices.amd import AmdDriver
from shoal.agent.devices.ascend import AscendDriver
from shoal.agent.devices.calls import FoundDevice
from shoal.agent.devices.intel import IntelTelemetry
from shoal.agent.devices.jetson import JetsonDriver
from shoal.agent.devices.topology import MAX_NUMA_NODE, pcie_links
from shoal.agent.driver_port import DeviceAccess, DeviceDriver, DriverOptions
from shoal.agent.packing import pack, unpack
from shoal.agent.worker.providers import Provider
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Device, DeviceKind, Reading
from shoal.wire import nouns

NAMES = sorted(path.stem for path in RECORDINGS.glob("*.json"))
MALFORMED = {
    "missing": "",
    "not available": "NA\n",
    "of another locale": "41,5\n",
    "of other digits": "\u0664\u0661\n",
    "negative": "-7\n",
    "huge": "9" * 400 + "\n",
    "hexadecimal": "0x7fffffffffffffffffff\n",
    "binary": "\x00\ufffd\x1b[31m",
    "an error": "cat: read error: Input/output error\n",
    "long": "41000\n" * 10_000,
}
MALFORMED_COUNTS = {"negative": -7, "none": 0, "odd": 3, "huge": 2**40, "no number": "NA"}
"""In place of a number that a library tells of links. Others are not replaced: a driver may believe its library."""
NPU_BUSY = "text /sys/class/accel/accel0/device/npu_busy_time_us"


def content(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads((RECORDINGS / f"{name}.json").read_text()))


def driver_on(name: str, machine: ReplayedMachine) -> DeviceDriver:
    (entry,) = entry_points(group="shoal.devices", name=content(name)["driver"])
    return cast(DeviceDriver, entry.load()(ManualClock(), DriverOptions(), machine=machine))


def is_readable(device: Device, driver: DeviceDriver) -> bool:
    """Whether the device answers. What it says of itself is true or unknown, or the test fails."""
    has_possible_topology(device)
    assert nouns.decode(Device, nouns.encode(device)) == device
    assert device.memory_bytes > 0
    assert device.provider.endswith("ExecutionProvider")
    assert device.attributes["sleep"].startswith("no:")
    assert device.runtime_version
    access = driver.access(device.name)
    assert repr(unpack(DeviceAccess, pack(access))) == repr(access)
    assert all(file.startswith("/dev/") and ".." not in file for file in access.files)
    try:
        reading = driver.read(device.name)
    except ShoalError as error:
        if error.code is not Code.DEVICE_LOST:
            raise
        return False
    assert 0 <= reading.free_bytes <= device.memory_bytes
    for value in (reading.utilisation, reading.temperature_c, reading.power_w, reading.energy_j):
        assert math.isnan(value) or 0 <= value < math.inf
    assert not reading.utilisation > 1
    assert repr(nouns.decode(Reading, nouns.encode(reading))) == repr(reading)
    return True


def has_possible_topology(device: Device) -> None:
    assert device.numa is None or 0 <= device.numa <= MAX_NUMA_NODE
    assert len({link.to for link in device.links}) == len(device.links), "one for each other end"
    for link in device.links:
        assert link.name
        assert link.source
        assert link.bytes_per_s is None or 1e8 < link.bytes_per_s < 1e13
    process._check_devices((FoundDevice(device, DeviceAccess()),))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_says_where_it_is_from_and_is_replayed(name: str) -> None:
    known = content(name)
    assert known["origin"] in ("recorded", "documents")
    assert ("written by hand" in known["about"]) == (known["origin"] == "documents")
    driver = driver_on(name, ReplayedMachine(known["answers"]))
    devices = driver.discover()
    assert devices == driver.discover()
    readable = [device.name for device in devices if is_readable(device, driver)]
    assert bool(readable) == (name not in ("nvidia_lost", "nvidia_no_driver"))
    with pytest.raises(ShoalError) as lost:
        driver.read("no-such-device")
    assert lost.value.code is Code.DEVICE_LOST


def cases() -> Iterator[tuple[str, str, str]]:
    """(recording, what is asked, how its answer is malformed). A library's answers are no text, and can be missing."""
    for name in NAMES:
        for asked, answer in content(name)["answers"].items():
            is_text = isinstance(answer, str) and not asked.startswith("nvml")
            kinds = ("half", *MALFORMED) if is_text else tuple(MALFORMED_COUNTS) if is_of_links(asked, answer) else ()
            yield from ((name, asked, kind) for kind in ("gone", *kinds))


def is_of_links(asked: str, answer: object) -> bool:
    return isinstance(answer, int) and any(each in asked for each in ("PcieLink", "NvLink"))


def malform(answer: Any, kind: str) -> Any:
    if kind == "half":
        return answer[: len(answer) // 2]
    return MALFORMED[kind] if isinstance(answer, str) else MALFORMED_COUNTS[kind]


@pytest.mark.parametrize("name", NAMES)
def test_a_malformed_answer_hides_a_device_or_a_figure_and_nothing_else(name: str) -> None:
    """Before the device is found, and after."""
    whole, tried = content(name)["answers"], 0
    for _, asked, kind in (case for case in cases() if case[0] == name):
        broken = {key: answer for key, answer in whole.items() if key != asked}
        if kind != "gone":
            broken[asked] = malform(whole[asked], kind)
        driver = driver_on(name, ReplayedMachine(broken))
        for device in driver.discover():
            is_readable(device, driver)
        machine = ReplayedMachine(whole)
        driver = driver_on(name, machine)
        devices = driver.discover()
        machine.answers.clear()
        machine.answers.update(broken)
        for device in devices:
            is_readable(device, driver)
        tried += 1
    assert tried >= len(whole)


def test_an_instinct_beside_a_display() -> None:
    driver = AmdDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("amd_mi210_and_a_display"))
    (device,) = driver.discover()
    assert (device.name, device.kind, device.model) == ("amd-gpu0", DeviceKind.GPU, "AMD Instinct MI210")
    assert device.attributes["unique_id"] == "e2c1dca3d2a52b21"
    assert (device.numa, device.power_root) == (1, "amd-gpu0")
    assert device.links == pcie_links(3, 16, "sysfs"), (
        "the slowest on the way; a port that does not tell is passed over"
    )
    reading = driver.read("amd-gpu0")
    assert reading.free_bytes == 68702699520 - 11603968
    assert (reading.utilisation, reading.temperature_c, reading.power_w) == pytest.approx((0.37, 41.0, 39.0))
    access = driver.access("amd-gpu0")
    assert access.environment == {"ROCR_VISIBLE_DEVICES": "GPU-e2c1dca3d2a52b21"}
    assert access.files == ("/dev/kfd", "/dev/dri/renderD128")


def test_graphics_in_a_processor_are_known_by_their_number() -> None:
    driver = AmdDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("amd_apu"))
    (device,) = driver.discover()
    assert device.model == "PCI device 0x15bf"
    assert (device.power_root, device.numa, device.links) == ("cpu0", None, ()), "whatever its port says of lanes"
    assert driver.read(device.name).power_w == pytest.approx(9.096)
    assert driver.access(device.name).environment == {"ROCR_VISIBLE_DEVICES": "0"}


def test_a_jetson_works_in_the_memory_of_its_board() -> None:
    driver = JetsonDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("jetson_orin_nx"))
    (device,) = driver.discover()
    assert (device.name, device.kind, device.memory_in) == ("jetson-gpu0", DeviceKind.GPU, "cpu0")
    assert device.model == "NVIDIA Jetson Orin NX Engineering Reference Developer Kit"
    assert (device.driver_version, device.provider) == ("L4T 36.3.0", "CUDAExecutionProvider")
    assert device.memory_bytes == 15930468 * 1024
    reading = driver.read(device.name)
    assert (reading.utilisation, reading.temperature_c) == pytest.approx((0.412, 48.218))
    assert reading.free_bytes == 12345678 * 1024
    assert math.isnan(reading.power_w), "its rail feeds the processor too"
    access = driver.access(device.name)
    assert access.files == ("/dev/nvmap", "/dev/nvhost-ctxsw-gpu", "/dev/nvhost-gpu", "/dev/nvsciipc")
    assert access.host_bytes > 0, "CUDA maps as much for itself as on other devices"
    options = Provider(device.provider, access, "fp32").options
    assert options == {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def test_a_jetson_with_a_rail_for_its_graphics() -> None:
    driver = JetsonDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("jetson_agx_xavier"))
    (device,) = driver.discover()
    reading = driver.read(device.name)
    assert (reading.power_w, reading.temperature_c) == pytest.approx((19.064 * 0.048, 30.5))
    elsewhere = JetsonDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("amd_apu"))
    assert elsewhere.discover() == ()
    with pytest.raises(ShoalError):
        elsewhere.read(device.name)
    assert elsewhere.access(device.name) == DeviceAccess()


def test_two_cards_of_ascend() -> None:
    driver = AscendDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("ascend_two_910b"))
    first, second = driver.discover()
    assert (first.name, first.model, first.memory_bytes) == ("ascend0", "Atlas 300T A2", 64 * 2**30)
    assert (first.numa, second.numa) == (6, 7)
    assert first.links == second.links == pcie_links(4, 16, "sysfs")
    reading = driver.read("ascend1")
    assert (reading.utilisation, reading.temperature_c, reading.power_w) == pytest.approx((0.37, 47.0, 70.0))
    assert reading.free_bytes == int(65536 * 0.94) * 2**20
    access = driver.access(second.name)
    assert access.environment == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert "/dev/davinci1" in access.files


def test_two_chips_of_one_card_count_its_watts_for_neither() -> None:
    """Its controller measures both together."""
    driver = AscendDriver(ManualClock(), DriverOptions(), ReplayedMachine.of("ascend_310p_duo"))
    devices = driver.discover()
    assert [device.memory_bytes for device in devices] == [44280 * 2**20, 43693 * 2**20]
    first, second = (driver.read(device.name) for device in devices)
    assert (first.temperature_c, second.utilisation) == (45.0, 1.0)
    assert all(map(math.isnan, (second.temperature_c, first.power_w, second.power_w)))


def test_what_intels_kernel_drivers_tell() -> None:
    cards = "/sys/class/drm/card[0-9]*/device/hwmon/hwmon*/energy1_input"
    other, own = (f"/sys/class/drm/card{index}/device" for index in (0, 1))
    answers: Mapping[str, Any] = {
        NPU_BUSY: "1000000\n",
        f"paths {cards}": [f"{other}/hwmon/hwmon1/energy1_input", f"{own}/hwmon/hwmon3/energy1_input"],
        f"text {other}/vendor": "0x1002\n",
        f"text {own}/vendor": "0x8086\n",
        f"text {own}/hwmon/hwmon3/energy1_input": "2500000\n",
    }
    machine, clock = ReplayedMachine(answers), ManualClock()
    intel = IntelTelemetry(clock, machine)
    assert math.isnan(intel.npu_utilisation(0)), "nothing to compare with yet"
    clock.advance(2.0)
    machine.answers[NPU_BUSY] = "1500000\n"
    assert intel.npu_utilisation(0) == pytest.approx(0.25)
    for busy in ("NA", "-1", "0\n"):
        clock.advance(1.0)
        machine.answers[NPU_BUSY] = busy
        assert math.isnan(intel.npu_utilisation(0)), "it began anew, or does not tell"
    assert intel.graphics_joules(0) == pytest.approx(2.5)
    assert math.isnan(intel.graphics_joules(1))

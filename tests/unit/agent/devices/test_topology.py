"""Links and NUMA nodes, from what the kernel's files say of them."""

import math
from ctypes import Structure, Union, c_uint
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import device
from harness.fakes.machine import ReplayedMachine
from shoal.agent.devices import process
from shoal.agent.devices.calls import DriverAnswer, FoundDevice
from shoal.agent.devices.machine import Machine, RecordingMachine
from shoal.agent.devices.topology import MAX_NUMA_NODE, host_links, numa_node, pci_folder, pcie_links
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.packing import pack, unpack
from shoal.types.device import DeviceLink

FOLDER = "/sys/bus/pci/devices/0000:3b:00.0"
SPEEDS = ("2.5 GT/s", "5 GT/s", "8.0 GT/s PCIe", "16.0 GT/s PCIe", "32.0 GT/s PCIe", "64.0 GT/s PCIe")
LANES = (1, 2, 4, 8, 12, 16, 32)


def machine_of(*ends: tuple[str, str]) -> ReplayedMachine:
    """(speed, width) of the device, and of each port above it."""
    answers: dict[str, str] = {}
    for up, (speed, width) in enumerate(ends):
        folder = FOLDER + "/.." * up
        answers |= {f"text {folder}/max_link_speed": speed, f"text {folder}/max_link_width": width}
    return ReplayedMachine(answers)


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"), [(1, 16, 4.0), (2, 4, 2.0), (3, 8, 7.88), (4, 16, 31.5), (5, 16, 63.0)]
)
def test_what_a_link_carries(generation: int, lanes: int, gigabytes: float) -> None:
    """PCI-SIG's figures, one way."""
    (link,) = pcie_links(generation, lanes, "NVML")
    assert link.bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.005)
    assert (link.name, link.source) == (f"PCIe {generation}.0 x{lanes}", "NVML")


def test_each_generation_carries_more() -> None:
    carried = [link.bytes_per_s or 0.0 for each in range(1, 7) for link in pcie_links(each, 16, "")]
    assert all(1.8 < later / earlier < 2.1 for earlier, later in pairwise(carried))


@given(st.lists(st.tuples(st.sampled_from(SPEEDS), st.sampled_from(LANES)), min_size=1, max_size=5))
def test_the_slowest_end_counts(ends: list[tuple[str, int]]) -> None:
    (link,) = host_links(machine_of(*((speed + "\n", f"{lanes}\n") for speed, lanes in ends)), FOLDER)
    alone = [pcie_links(SPEEDS.index(speed) + 1, lanes, "sysfs")[0].bytes_per_s for speed, lanes in ends]
    assert link.bytes_per_s == min(each for each in alone if each is not None)


@given(st.text(max_size=40), st.text(max_size=40))
def test_whatever_the_files_say_a_link_is_possible_or_unknown(speed: str, width: str) -> None:
    for link in host_links(machine_of((speed, width), (speed, width)), FOLDER):
        assert link.bytes_per_s is not None
        assert 1e8 < link.bytes_per_s < 1e13


def test_a_port_that_does_not_tell_hides_no_other() -> None:
    (link,) = host_links(machine_of(("16.0 GT/s PCIe", "16"), ("Unknown", "255"), ("8.0 GT/s PCIe", "16")), FOLDER)
    assert link.name == "PCIe 3.0 x16"
    assert host_links(machine_of(), FOLDER) == host_links(machine_of(("8.0 GT/s PCIe", "-1")), FOLDER) == ()
    endless = cast(Machine, SimpleNamespace(text=lambda path: "16" if path.endswith("width") else "8.0 GT/s PCIe"))
    assert host_links(endless, FOLDER)[0].name == "PCIe 3.0 x16"


@given(st.integers() | st.text(max_size=40))
def test_a_numa_node_is_one_that_can_be(said: int | str) -> None:
    found = numa_node(ReplayedMachine({f"text {FOLDER}/numa_node": f"{said}\n"}), FOLDER)
    assert found is None or 0 <= found <= MAX_NUMA_NODE
    if isinstance(said, int) and 0 <= said <= MAX_NUMA_NODE:
        assert found == said


@pytest.mark.parametrize("address", ["", "../../..", "0000:3b:00.0/..", "0000:3b:00", "0000:3B:00.0", "3b:00.0"])
def test_what_is_no_address_has_no_folder(address: str) -> None:
    assert pci_folder("0000:3b:00.0") == FOLDER
    assert pci_folder(address) == ""
    machine = ReplayedMachine(
        {"text /numa_node": "1", "text /max_link_speed": "8.0 GT/s", "text /max_link_width": "16"}
    )
    assert (numa_node(machine, pci_folder(address)), host_links(machine, pci_folder(address))) == (None, ())


@pytest.mark.parametrize(
    "lie",
    [
        {"numa": -1},
        {"numa": MAX_NUMA_NODE + 1},
        {"links": (DeviceLink("PCIe", math.nan, "made up"),)},
        {"links": (DeviceLink("PCIe", -1.0, "made up"),)},
        {"links": (DeviceLink("PCIe", 0.0, "made up"),)},
        {"links": (DeviceLink("PCIe", math.inf, "made up"),)},
        {"links": (DeviceLink("PCIe", None, "made up"),) * (process.MAX_LINKS + 1)},
    ],
)
def test_a_driver_of_another_package_that_says_what_cannot_be_has_failed(lie: dict[str, Any]) -> None:
    sound = device(
        "gpu0", numa=0, links=(DeviceLink("CXL 2.0 x8", 32e9, "its maker"), DeviceLink("PCIe", None, "", "x"))
    )
    process._check_devices((FoundDevice(sound, DeviceAccess()),))
    assert unpack(DriverAnswer, pack(DriverAnswer((FoundDevice(sound, DeviceAccess()),)))).found[0].device == sound
    with pytest.raises(process.DriverFailed):
        process._check_devices((FoundDevice(replace(sound, **lie), DeviceAccess()),))


class _Value(Union):
    _fields_ = (("uiVal", c_uint), ("siVal", c_uint))


class _Field(Structure):
    _fields_ = (("fieldId", c_uint), ("value", _Value))


def test_an_array_of_structures_is_recorded() -> None:
    """As NVML answers for the speed of its links."""
    values = (_Field * 1)(_Field(90, _Value(14062)))
    library = SimpleNamespace(nvmlDeviceGetFieldValues=lambda _handle, _fields: values)
    recording = RecordingMachine(cast(Machine, SimpleNamespace(library=lambda _name: library)))
    recording.library("pynvml").nvmlDeviceGetFieldValues("h", [90])
    (kept,) = recording.answers["nvmlDeviceGetFieldValues(h, [90])"]
    assert kept == {"fieldId": 90, "value": {"uiVal": 14062, "siVal": 14062}}

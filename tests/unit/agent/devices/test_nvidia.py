"""NVIDIA devices on recordings of NVML."""

import math
import os

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.machine import ReplayedMachine
from shoal.agent.devices import nvidia
from shoal.agent.devices.nvidia import NvidiaDriver
from shoal.agent.driver_port import DriverOptions
from shoal.agent.worker.providers import Provider
from shoal.types.codes import Code, ShoalError


def driver(recording: str) -> tuple[NvidiaDriver, ReplayedMachine]:
    machine = ReplayedMachine.of(f"nvidia_{recording}")
    return NvidiaDriver(ManualClock(), DriverOptions(), machine), machine


def test_a_whole_device() -> None:
    cuda, machine = driver("l4")
    (device,) = cuda.discover()
    assert (device.name, device.model, device.driver_version) == ("gpu0", "NVIDIA L4", "550.54.15")
    assert (device.provider, device.memory_bytes) == ("CUDAExecutionProvider", 24152899584)
    assert device.attributes == {
        "uuid": "GPU-11111111-2222-3333-4444-555555555555",
        "compute_capability": "8.9",
        "power_limit_w": "72",
        "pci": "0000:3b:00.0",
        "sleep": "no: its driver lowers its clocks by itself, and takes no such order",
    }
    assert device.numa == 0
    (link,) = device.links
    assert (link.name, link.source, link.to) == ("PCIe 4.0 x16", "NVML", "")
    assert device.host_bytes_per_s == pytest.approx(31.5e9, rel=1e-3)
    reading = cuda.read("gpu0")
    assert reading.free_bytes == 23600000000
    assert (reading.utilisation, reading.temperature_c) == (0.37, 58)
    assert reading.power_w == pytest.approx(31.25)
    assert reading.energy_j == pytest.approx(987654.321)
    assert not reading.throttled
    access = cuda.access("gpu0")
    assert access.pace is None
    assert access.environment == {"CUDA_VISIBLE_DEVICES": "GPU-11111111-2222-3333-4444-555555555555"}
    assert access.memory == "cuda"
    assert access.energy is not None
    assert (access.energy.arguments, access.energy.of_processors) == (tuple(access.environment.values()), False)
    assert access.memory_counter is not None
    assert access.memory_counter.arguments == access.energy.arguments
    for reasons, throttled in ((0x2, False), (0x4, True), (0x40, True), (0x100, False)):
        machine.answers["nvmlDeviceGetCurrentClocksThrottleReasons(h0)"] = reasons
        assert cuda.read("gpu0").throttled is throttled


def test_a_device_as_it_answered() -> None:
    cuda, _ = driver("h200")
    (device,) = cuda.discover()
    assert (device.name, device.model, device.driver_version) == ("gpu0", "NVIDIA H200", "580.159.04")
    assert device.memory_bytes == 150754820096
    assert (device.attributes["compute_capability"], device.attributes["power_limit_w"]) == ("9.0", "700")
    assert device.attributes["ecc"] == "on"
    (link,) = device.links
    assert link.name == "PCIe 5.0 x16", "NVLink is not passed to its virtual machine"
    assert device.numa is None
    reading = cuda.read("gpu0")
    assert reading.free_bytes == 150109880320, "less than its memory by what the driver keeps"
    assert 60 < reading.power_w < 120
    assert not reading.throttled, "idle is a reason of its own, and slows nothing"
    access = cuda.access("gpu0")
    assert access.host_bytes > 1_996_164 * 1024, "what a worker with one text detector had mapped there"


def test_a_model_runs_in_its_own_precision_and_changes_shapes_in_little_time() -> None:
    cuda, _ = driver("h200")
    access = cuda.access("gpu0")
    for precision in ("fp32", "fp16"):
        options = Provider("CUDAExecutionProvider", access, precision).options
        assert options == {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def test_mig_instances_and_a_device_that_tells_little() -> None:
    cuda, _ = driver("a100_mig_and_k80")
    devices = {device.name: device for device in cuda.discover()}
    assert list(devices) == ["gpu0-mig0", "gpu0-mig1", "gpu1"]
    assert devices["gpu0-mig1"].attributes["uuid"] == "MIG-1"
    assert cuda.access("gpu0-mig1").environment == {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "its instance alone"
    assert devices["gpu0-mig0"].attributes["mig"] == "instance"
    assert devices["gpu0-mig0"].memory_bytes == 20937965568
    roots = {name: device.power_root for name, device in devices.items()}
    assert roots == {"gpu0-mig0": "gpu0-mig0", "gpu0-mig1": "gpu0-mig0", "gpu1": "gpu1"}, "one meter for both"
    assert [device.numa for device in devices.values()] == [3, 3, None]
    assert devices["gpu0-mig0"].links == devices["gpu0-mig1"].links
    part = cuda.read("gpu0-mig0")
    assert part.free_bytes == 20900000000
    assert math.isnan(part.utilisation)
    assert part.temperature_c == 84
    assert part.power_w == pytest.approx(95)
    assert part.throttled
    little = cuda.read("gpu1")
    assert little.free_bytes == 11995578368
    assert all(map(math.isnan, (little.utilisation, little.temperature_c, little.power_w, little.energy_j)))
    assert not little.throttled


def test_devices_with_links_between_them() -> None:
    cuda, machine = driver("two_linked")
    first, second = cuda.discover()
    to_host, to_second = first.links
    assert (to_host.to, to_second.to, to_second.name, to_second.source) == ("", "gpu1", "NVLink x4", "NVML")
    assert to_second.bytes_per_s == 4 * 14062e6
    assert [link.to for link in second.links] == ["", "gpu0"]
    assert second.host_bytes_per_s == pytest.approx(first.host_bytes_per_s / 2), "half the lanes"
    machine.answers["nvmlDeviceGetFieldValues(h0, [90])"][0]["nvmlReturn"] = 3
    machine.answers["nvmlDeviceGetNvLinkRemoteDeviceType(h0, 3)"] = 2
    machine.answers["nvmlDeviceGetNvLinkRemotePciInfo(h0, 2)"] = {"busId": "00000000:99:00.0"}
    links = cuda.discover()[0].links
    assert [(link.to, link.name, link.bytes_per_s) for link in links[1:]] == [
        ("gpu1", "NVLink x2", None),
        ("nvswitch", "NVLink x1", None),
    ], "a GPU that is none of the node's is left out"
    machine.answers["nvmlDeviceGetC2cModeInfoV(h0)"] = {"isC2cEnabled": 1}
    assert "" not in {link.to for link in cuda.discover()[0].links}, "its bytes do not pass PCIe"


def test_devices_that_fell_off_the_bus() -> None:
    cuda, _ = driver("lost")
    assert cuda.discover() == (), "nothing could be placed on one that does not say what memory it has"
    for name in ("gpu1", "gpu0", "gpu7"):
        with pytest.raises(ShoalError) as lost:
            cuda.read(name)
        assert lost.value.code is Code.DEVICE_LOST


def test_a_worker_counts_joules_by_the_device_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, nvml = driver("l4")
    monkeypatch.setattr(nvidia, "_open_nvml", lambda machine: nvml.library("pynvml"))
    nvml.answers |= {
        "nvmlDeviceGetHandleByUUID(GPU-1)": "h0",
        "nvmlDeviceGetHandleByUUID(GPU-2)": {"error": 6},
        "nvmlDeviceGetTotalEnergyConsumption(h0)": 5000,
    }
    counter = nvidia.open_energy_counter("GPU-1")
    assert counter() == 5.0
    nvml.answers["nvmlDeviceGetTotalEnergyConsumption(h0)"] = 7500
    assert counter() == 7.5
    nvml.answers["nvmlDeviceGetTotalEnergyConsumption(h0)"] = {"error": 999}
    assert math.isnan(counter()), "an error of a moment ends no worker"
    with pytest.raises(OSError, match="GPU-2"):
        nvidia.open_energy_counter("GPU-2")
    monkeypatch.setattr(nvidia, "_open_nvml", lambda machine: None)
    with pytest.raises(OSError, match="NVML"):
        nvidia.open_energy_counter("GPU-1")


def test_without_a_driver_there_are_no_devices() -> None:
    cuda, _ = driver("no_driver")
    assert cuda.discover() == ()


def test_a_worker_counts_its_own_bytes_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    _, nvml = driver("l4")
    monkeypatch.setattr(nvidia, "_open_nvml", lambda machine: nvml.library("pynvml"))
    listed = "nvmlDeviceGetComputeRunningProcesses(h0)"
    other = {"pid": 1, "usedGpuMemory": 10**9}
    nvml.answers |= {
        "nvmlDeviceGetHandleByUUID(GPU-1)": "h0",
        "nvmlDeviceGetHandleByUUID(GPU-2)": {"error": 6},
        listed: [other],
    }
    count = nvidia.open_memory_counter("GPU-1")
    assert count() is None, "it knows another process, and not this one"
    nvml.answers[listed] = [
        other,
        {"pid": os.getpid(), "usedGpuMemory": 300},
        {"pid": os.getpid(), "usedGpuMemory": 50},
    ]
    assert count() == 350
    nvml.answers[listed] = [{"pid": os.getpid(), "usedGpuMemory": None}]
    assert count() is None, "as of a MIG instance, or by Windows"
    nvml.answers[listed] = {"error": 15}
    assert count() is None
    with pytest.raises(OSError, match="GPU-2"):
        nvidia.open_memory_counter("GPU-2")

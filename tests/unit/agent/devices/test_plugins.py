"""The driver of plugin providers against answers of the runtime. QNN's was recorded on x86-64; all others are typed by
hand from documents."""

import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from harness.fakes.clock import ManualClock
from shoal.agent.devices.plugins import driver as plugin_driver
from shoal.agent.devices.plugins.driver import PluginDriver
from shoal.agent.devices.plugins.listing import ListedDevice, Listing
from shoal.agent.driver_port import DriverOptions
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.model_loading import pace_of
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import DeviceKind

QNN = ListedDevice("QNNExecutionProvider", "onnxruntime_qnn", "2.7.0", "/opt/qnn/lib.so", "CPU", 0, "AMD", 4130, 0)
OPENVINO = replace(QNN, provider="OpenVINOExecutionProvider", package="onnxruntime_ep_openvino", version="1.8.1")
OTHER = replace(QNN, provider="NewExecutionProvider", package="onnxruntime_ep_new", hardware="GPU", vendor="Maker")


def driver(
    *devices: ListedDevice, simulate: tuple[str, ...] = (), failed: Mapping[str, str] | None = None
) -> PluginDriver:
    listing = Listing(devices, failed or {})
    return PluginDriver(ManualClock(), DriverOptions(simulate=simulate), listing=lambda: listing)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the vendor has a simulator for x86-64 alone")
def test_a_simulator_is_a_device_where_it_is_asked_for() -> None:
    assert driver(QNN).discover() == ()
    asked = driver(QNN, simulate=("htp",))
    (npu,) = asked.discover()
    assert (npu.name, npu.kind, npu.stand_in, npu.fixed_shapes) == ("htp-sim", DeviceKind.NPU, "simulated", True)
    assert npu.emulated
    assert "qai_hub_latency.csv.gz" in npu.profile_source
    assert "ai-hub-models" in npu.attributes["licence"]
    access = asked.access("htp-sim")
    assert access.pace is not None
    assert access.pace.simulated
    for rates in (access.pace.rates.matmul_flops, access.pace.rates.conv_flops):
        assert rates["fp32"] == rates["fp16"] < rates["int8"]
    for arithmetic in ("fp16", "int8"):
        order = SimpleNamespace(
            access=access, work=Work(conv_flops=1e9, nodes=3), weights=1e6, precision="fp32", arithmetic=arithmetic
        )
        pace = pace_of(cast(LoadOrder, order))
        assert pace is not None
        assert pace.relative.precision == arithmetic
    assert access.options["fp32"]["enable_htp_fp16_precision"] == "1"
    assert (npu.computes_fp32_in, npu.arithmetic("fp32"), npu.arithmetic("int8")) == ("fp16", "fp16", "int8")
    assert access.options[""]["backend_path"] == "/opt/qnn/libQnnHtp.so"
    assert asked.read("htp-sim").free_bytes > 0


def test_a_simulator_that_there_is_not() -> None:
    for simulate, found in ((("abacus",), "no simulator 'abacus'"), (("htp",), "no plugin here simulates htp")):
        with pytest.raises(ShoalError) as refused:
            driver(OPENVINO, simulate=simulate).discover()
        assert refused.value.code is Code.FIELD_INVALID
        assert found in refused.value.refusal.found


def test_the_npu_of_a_snapdragon() -> None:
    real = driver(replace(QNN, hardware="NPU", vendor="Qualcomm"), replace(QNN, hardware="GPU"))
    (npu,) = real.discover()
    assert (npu.name, npu.stand_in, npu.fixed_shapes, npu.hardware) == ("npu0", "", True, "")
    assert real.access("npu0").pace is None


def test_the_processor_once_more_by_another_compiler() -> None:
    second = driver(OPENVINO, replace(OPENVINO, hardware="GPU"), replace(OPENVINO, hardware="NPU"))
    cpu, gpu, npu = second.discover()
    assert [each.name for each in (cpu, gpu, npu)] == ["cpu0-openvino", "gpu0", "npu0"]
    assert [each.hardware for each in (cpu, gpu, npu)] == ["cpu0", "", ""]
    assert [each.memory_in for each in (cpu, gpu, npu)] == ["", "cpu0", "cpu0"]
    assert [each.fixed_shapes for each in (cpu, gpu, npu)] == [False, False, True]
    assert [each.power_root for each in (cpu, gpu, npu)] == ["cpu0", "gpu0", "cpu0"]
    for discrete, root in (("0", "cpu0"), ("1", "gpu0")):
        (gpu,) = driver(replace(OPENVINO, hardware="GPU", about={"Discrete": discrete})).discover()
        assert gpu.power_root == root
    assert cpu.runtime_version.endswith(", onnxruntime-ep-openvino 1.8.1")
    options = second.access("cpu0-openvino").options
    hints = {precision: json.loads(each["load_config"])["CPU"] for precision, each in options.items()}
    assert hints[""] == hints["fp32"] == {"INFERENCE_PRECISION_HINT": "f32"}, "never what it finds fastest"
    assert hints["fp16"] == {"INFERENCE_PRECISION_HINT": "f16"}
    assert options[""]["num_of_threads"] == "$threads"
    assert second.read("cpu0-openvino").energy_j != second.read("cpu0-openvino").energy_j, "it counts with cpu0"


def test_a_plugin_that_nobody_wrote_a_module_for() -> None:
    """Memory of its own is unknown, and one that only compiles runs nothing: such devices are left out."""
    for about in ({"Discrete": "1"}, {"is_virtual": "1"}):
        assert driver(replace(OTHER, about=about)).discover() == ()
    (gpu,) = driver(OTHER).discover()
    assert (gpu.name, gpu.vendor, gpu.provider) == ("gpu0-new", "Maker", "NewExecutionProvider")


def test_a_broken_plugin_hides_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(driver(OTHER, failed={"onnxruntime_ep_bad": "OSError: no such file"}).discover()) == 1
    assert "onnxruntime_ep_bad cannot be loaded: OSError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", ["pass", "print('nonsense')", "import time; time.sleep(9)", "import os; os.abort()"]
)
def test_plugins_that_do_not_answer(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_driver, "LISTING_S", 0.5)
    monkeypatch.setattr(plugin_driver, "installed_packages", lambda: ("onnxruntime_ep_bad",))
    monkeypatch.setattr(plugin_driver, "LISTING", (plugin_driver.LISTING[0], "-c", program))
    with pytest.raises(ShoalError) as refused:
        PluginDriver(ManualClock(), DriverOptions()).discover()
    assert refused.value.code is Code.DEVICE_UNREACHABLE


def test_no_plugin_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_driver, "installed_packages", tuple)
    monkeypatch.setattr(plugin_driver, "LISTING", ("/no/such/program",))
    assert PluginDriver(ManualClock(), DriverOptions()).discover() == ()

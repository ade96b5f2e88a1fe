"""Emulated devices are paced and metered by their profile; a real one is probed through the runtime."""

import asyncio
import math
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from harness.cluster.worker_pool import CPU, WorkerPoolHarness, infer
from harness.models import engine_cases as models
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.devices.emulated import EmulatedDriver
from shoal.agent.devices.plugins.driver import PluginDriver
from shoal.agent.driver_port import DeviceAccess, DriverOptions
from shoal.agent.ports import WorkerFailed
from shoal.agent.worker.pool_options import PoolOptions
from shoal.types.assignment import Work
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.workload import PREPARABLE

MIB = 2**20
RESNET50 = Work(conv_flops=8178368512.0, bytes=336765248.0, nodes=120, shapes={"x": (4,)})
"""The work of the model that profiles are derived from, for a model that takes no time here."""


def emulated_driver(profile: str, time_scale: float) -> EmulatedDriver:
    return EmulatedDriver(SystemClock(), DriverOptions((profile,), time_scale))


async def test_emulated_device_keeps_its_profiles_pace(tmp_path: Path) -> None:
    driver = emulated_driver("xr5610-l4", 500.0)
    (device,) = driver.discover()
    loop = asyncio.get_running_loop()
    async with WorkerPoolHarness(tmp_path, device=device, access=driver.access(device.name)) as pool:
        ready = await pool.serve("resnet", models.add_one(), work=RESNET50)
        # the row of the catalogue: 0.329 ms and 0.208 J
        assert ready.measured.latency_p50_s == pytest.approx(329.131e-6, rel=1e-3)
        assert ready.measured.joules == pytest.approx(0.208145, rel=1e-3)
        assert ready.measured.energy_source is EnergySource.PROFILE
        client = await pool.client("resnet")
        began = loop.time()
        answers = await asyncio.gather(*(infer(client, {"x": np.full(4, n, np.float32)}) for n in range(4)))
        took = loop.time() - began
        # one at a time, each 0.329 ms x 500, and the model is really run
        assert took >= 4 * 329.131e-6 * 500
        assert [np.frombuffer(a.raw_output_contents[0], np.float32)[0] for a in answers] == [1, 2, 3, 4]
        # half the elements, half the work beyond a launch, which eight samples of a query tell: 0.257 ms
        half_s = 329.131e-6 - (329.131e-6 - 257.278e-6) / 2
        began = loop.time()
        await infer(client, {"x": np.ones(2, np.float32)})
        assert loop.time() - began >= half_s * 500
        (served,) = (await pool.stats("resnet")).served
        assert (served.requests, served.pace_missed, served.energy_source) == (5, 0, EnergySource.PROFILE)
        assert served.joules == pytest.approx((4 + half_s / 329.131e-6) * 0.208145, rel=1e-3)
        # of the four, some waited for others: reported in the device's own time, as its clients there would see
        assert 329e-6 <= served.latency_p50_s <= 4 * 340e-6
        await client.close()


async def test_workers_of_one_emulated_device_take_turns(tmp_path: Path) -> None:
    driver = emulated_driver("xr5610-l4", 600.0)
    (device,) = driver.discover()
    loop = asyncio.get_running_loop()
    async with WorkerPoolHarness(tmp_path, device=device, access=driver.access(device.name)) as pool:
        await asyncio.gather(*(pool.serve(name, models.add_one(), work=RESNET50) for name in ("a", "b")))
        a, b = await pool.client("a"), await pool.client("b")
        began = loop.time()
        await asyncio.gather(infer(a, {"x": np.ones(4, np.float32)}), infer(b, {"x": np.ones(4, np.float32)}))
        assert loop.time() - began >= 2 * 329.131e-6 * 600
        await a.close()
        await b.close()


async def test_a_run_later_than_its_pace_is_counted(tmp_path: Path) -> None:
    driver = emulated_driver("xr5610-l4", 0.001)
    (device,) = driver.discover()
    async with WorkerPoolHarness(tmp_path, device=device, access=driver.access(device.name)) as pool:
        ready = await pool.serve("fast", models.add_one(), work=RESNET50)
        # what the region learns of such devices from, here and elsewhere, is theirs and not this machine's
        assert ready.measured.latency_p95_s == pytest.approx(329.131e-6, rel=1e-3)
        client = await pool.client("fast")
        for _ in range(3):
            await infer(client, {"x": np.ones(4, np.float32)})
        (served,) = (await pool.stats("fast")).served
        assert served.pace_missed == 3
        # joules stay the profile's; the latency is what it was, in the device's time
        assert served.joules == pytest.approx(3 * 0.208145, rel=1e-3)
        assert served.latency_p50_s > 329e-6
        await client.close()


async def test_emulated_device_needs_the_models_work(tmp_path: Path) -> None:
    driver = emulated_driver("rk3588s", 1.0)
    (device,) = driver.discover()
    async with WorkerPoolHarness(tmp_path, device=device, access=driver.access(device.name)) as pool:
        await pool.start("unknown", models.add_one())
        assert (await pool.wait_event("unknown", WorkerFailed)).refusal.code is Code.LOAD_FAILED


async def test_the_log_of_the_node_has_an_unforeseen_error_of_a_load(tmp_path: Path) -> None:
    driver = emulated_driver("xr5610-l4", 1.0)
    (device,) = driver.discover()
    pace = driver.access(device.name).pace
    assert pace is not None
    odd = replace(pace, figures=())
    with capture_logs() as logged:
        async with WorkerPoolHarness(tmp_path, device=device, access=DeviceAccess(pace=odd)) as pool:
            await pool.start("odd", models.add_one(), work=RESNET50)
            assert (await pool.wait_event("odd", WorkerFailed)).refusal.remedy == "see the log"
            found = await until(
                lambda: [line for line in logged if line["event"] == "worker_error_logged"], 30.0, "the worker's error"
            )
    assert [(line["message"], line["assignment"]) for line in found] == [("load_failed", "odd")]
    assert "ValueError: min()" in found[0]["exception"]


async def test_receipt_of_an_emulated_device_is_by_other_results_than_its_pace(tmp_path: Path) -> None:
    driver = emulated_driver("qualcomm-ai100-dm2", 10.0)
    (device,) = driver.discover()
    async with WorkerPoolHarness(tmp_path, device=device, access=driver.access(device.name)) as pool:
        receipt = await pool.workers.probe(device)
        halving = await pool.workers.probe(replace(device, computes_fp32_in="fp16"))
    assert receipt.runtime is not None
    assert halving.runtime == replace(receipt.runtime, prepares=("int8",)), "its provider makes the other itself"
    assert receipt.runtime.prepares == PREPARABLE
    assert receipt.emulated
    assert "gloria_highend/resnet50/singlestream" in receipt.source
    assert receipt.rates.energy_source is EnergySource.PROFILE
    # RetinaNet's 22.26 ms, less a launch on the same chip elsewhere
    assert receipt.rates.launch_s == pytest.approx(291.749e-6)
    assert receipt.rates.conv_flops["fp32"] == pytest.approx(303.08e9 / (22.260484e-3 - 291.749e-6))


async def test_probe_measures_this_processor(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(probe_s=4.0)) as pool:
        receipt = await pool.workers.probe(CPU)
        rates = receipt.rates
        assert receipt.probe_s <= 10
        assert (receipt.source, receipt.emulated, receipt.device) == ("probe", False, "cpu0")
        assert receipt.precisions == ("fp32", "fp16", "int8", "fp64")
        assert "fp64" not in rates.conv_flops, "ONNX Runtime's CPU provider has no Conv in double"
        for value in (
            *rates.matmul_flops.values(),
            *rates.conv_flops.values(),
            rates.elementwise_bytes,
            rates.copy_bytes,
            rates.load_bytes,
        ):
            assert math.isfinite(value)
            assert value > 1e7
        assert 0 < rates.launch_s < 0.01
        assert 0 <= rates.node_s < rates.launch_s * 10
        assert 0 <= receipt.spread < 10
        assert rates.energy_source is EnergySource.ESTIMATED
        # the code of the runtime, and nothing of the models: 10.7 MiB with ONNX Runtime 1.32 on x86
        assert 4 * MIB < receipt.provider_bytes < 40 * MIB
        assert receipt.provider_host_bytes == pytest.approx(receipt.provider_bytes, rel=0.01)
        # the worker that was used is gone; the next is at hand
        await pool.serve("after", models.add_one())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no plugin is installed for this processor")
async def test_a_simulator_is_measured_for_the_memory_that_it_takes_before_any_model(tmp_path: Path) -> None:
    simulators = PluginDriver(SystemClock(), DriverOptions(simulate=("htp",)))
    device = next(each for each in simulators.discover() if each.name == "htp-sim")
    access = simulators.access(device.name)
    async with WorkerPoolHarness(tmp_path, device=device, access=access) as pool:
        receipt = await pool.workers.probe(device)
        assert receipt.emulated
        # its library, and what it compiles with: 119 to 147 MiB
        assert receipt.provider_bytes > 50 * MIB
        assert access.pace is not None
        assert receipt.rates.matmul_flops == access.pace.rates.matmul_flops, "the profile's, all the same"

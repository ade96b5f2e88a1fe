"""Models compiled for a device, by the vendor's simulator of an NPU, and kept."""

import asyncio
import hashlib
import platform
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.builders.agent_values import assignment
from harness.fakes.log import RecordingLog
from harness.measure.partitions import devices
from harness.models.architectures import ARCHITECTURES, angles, samples_of, separable
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import SignatureVerifier
from shoal.agent.clock import SystemClock
from shoal.agent.devices.plugins.driver import PluginDriver
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import PreparedModel
from shoal.agent.preparation.preparer import ProgramPreparer
from shoal.agent.worker.engine import open_engine, read_and_verify, run_options
from shoal.agent.worker.providers import Provider
from shoal.artifacts.signature_bundle import verify_file
from shoal.types.assignment import Assignment, Preparation
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Device
from shoal.types.tolerance import default
from shoal.types.units import Bytes

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="no plugin is installed for this processor")
SHAPES = ARCHITECTURES["separable"][1]
NPU = "htp-sim"


async def nothing(digest: str, offset: int) -> AsyncGenerator[bytes, None]:
    raise refuse(Code.MODEL_UNKNOWN, digest)
    yield b""


class Bench:
    """A node with an NPU, and one model in its cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RecordingLog()
        self.driver: PluginDriver = devices()
        self.npu: Device = next(each for each in self.driver.discover() if each.name == NPU)
        publishers = SignatureVerifier(folder / "publishers.json", (), self.log, verify=verify_file)
        self.files = DirectoryCache(
            folder / "cache", nothing, publishers, self.log, quota=Bytes(2**30), low_water=Bytes(0)
        )
        self.preparer = self.start()

    def start(self, **changed: str) -> ProgramPreparer:
        """As a supervisor does. changed: of the device."""
        npu = replace(self.npu, **changed)  # type: ignore[arg-type]
        return ProgramPreparer(
            self.folder / "prepared",
            self.files,
            SystemClock(),
            self.log,
            device=lambda name: npu if name == NPU else None,
            access=lambda name: self.driver.access(name) if name == NPU else DeviceAccess(),
        )

    def order(self, content: bytes, **more: Any) -> Assignment:
        path = self.folder / "model"
        path.write_bytes(content)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        asked = assignment(model=digest, model_bytes=Bytes(len(content)), shapes=SHAPES, **more)
        return replace(asked, device=NPU)

    async def prepare(self, asked: Assignment, samples: str = "") -> PreparedModel | None:
        return await self.preparer.prepare(asked, str(self.folder / "model"), samples, lambda: None)

    def answers(self, made: PreparedModel, precision: str) -> np.ndarray:
        """Of the compiled model, loaded as a worker does."""
        data = read_and_verify(made.path, made.digest)
        engine = open_engine(
            data, Provider(self.npu.provider, self.driver.access(NPU), precision), compiled=made.operators
        )
        assert engine.operators == set(made.operators)
        x = np.linspace(0, 1, 8 * 16 * 16, dtype=np.float32).reshape(SHAPES["x"])
        return engine.run({"x": x}, ["y"], run_options())["y"]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_compiled_once_and_found_by_the_next_supervisor(bench: Bench) -> None:
    asked = bench.order(separable())
    assert bench.preparer.is_needed(asked)
    made = await bench.prepare(asked)
    assert made is not None
    assert (made.compiled, made.note) == (True, "")
    assert {"Conv", "GlobalAveragePool"} <= set(made.operators)
    plain = open_engine(separable(), Provider(bench.npu.provider, bench.driver.access(NPU)), SHAPES)
    x = np.linspace(0, 1, 8 * 16 * 16, dtype=np.float32).reshape(SHAPES["x"])
    assert np.array_equal(bench.answers(made, "fp32"), plain.run({"x": x}, ["y"], run_options())["y"])
    (bench.folder / "model").unlink()
    bench.preparer = bench.start()
    assert await bench.prepare(asked) == made, "nothing was compiled again"


async def test_another_version_or_device_compiles_anew(bench: Bench) -> None:
    asked = bench.order(separable())
    first = await bench.prepare(asked)
    assert first is not None
    for changed in ({"runtime_version": "onnxruntime 99"}, {"provider": "OtherExecutionProvider"}):
        bench.preparer = bench.start(**changed)
        (bench.folder / "model").unlink(missing_ok=True)
        assert await bench.prepare(asked) is None, "what was kept does not fit, and there is nothing to compile"
    assert [line["event"] for line in bench.log.lines if line["event"] == "model_compile_failed"]


async def test_what_the_device_does_not_take_whole_is_left_to_the_load(bench: Bench) -> None:
    asked = replace(bench.order(angles()), shapes={"x": (1, 8)})
    assert await bench.prepare(asked) is None
    assert not bench.preparer.is_needed(asked), "it is not tried again"
    (failed,) = [line for line in bench.log.lines if line["event"] == "model_compile_failed"]
    assert "OP_UNSUPPORTED" in failed["error"]
    assert not list((bench.folder / "prepared").glob("*"))


async def test_what_a_worker_could_not_load_is_not_offered_again(bench: Bench) -> None:
    asked = bench.order(separable())
    made = await bench.prepare(asked)
    assert made is not None
    bench.preparer.reject(made)
    assert not bench.preparer.is_needed(asked)
    assert await bench.prepare(asked) is None
    bench.preparer.reject(made)


async def test_a_model_in_int8_is_compiled_too(bench: Bench) -> None:
    samples = bench.folder / "samples"
    samples.write_bytes(samples_of(SHAPES["x"]))
    digest = f"sha256:{hashlib.sha256(samples.read_bytes()).hexdigest()}"
    preparation = Preparation(default("fp32", "int8"))
    asked = bench.order(separable(), precision="int8", samples=digest, preparation=preparation)
    made = await bench.prepare(asked, str(samples))
    assert made is not None
    assert made.compiled
    assert "int8" in made.note
    assert np.isfinite(bench.answers(made, "int8")).all()
    # it is loaded as it was pushed by no means: what was asked for is int8
    bench.preparer.reject(made)
    again = await bench.prepare(asked, str(samples))
    assert again is not None
    assert (again.compiled, again.note) == (False, made.note)


async def test_a_device_without_a_compiler_needs_nothing(bench: Bench) -> None:
    asked = replace(bench.order(separable()), device="cpu0")
    assert not bench.preparer.is_needed(asked)
    assert await bench.prepare(asked) is None


async def test_given_up_it_leaves_nothing(bench: Bench) -> None:
    asked = bench.order(separable())
    began = asyncio.Event()
    task = asyncio.create_task(bench.preparer.prepare(asked, str(bench.folder / "model"), "", began.set))
    await asyncio.wait_for(began.wait(), 60.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list((bench.folder / "prepared").glob("work-*"))
    assert await bench.prepare(asked) is not None


async def test_a_file_that_is_no_model_is_left_to_the_load(bench: Bench) -> None:
    assert await bench.prepare(bench.order(b"no model")) is None
    (failed,) = [line for line in bench.log.lines if line["event"] == "model_compile_failed"]
    assert failed["error"]


def test_a_compiled_model_of_another_kind_is_refused(bench: Bench) -> None:
    """A worker loads as compiled what is; nothing else of it may run beside the device."""
    provider = Provider(bench.npu.provider, bench.driver.access(NPU))
    with pytest.raises(ShoalError) as refused:
        open_engine(angles(), provider, {"x": (1, 8)}, compiled=("Conv",))
    assert refused.value.code is Code.OP_UNSUPPORTED

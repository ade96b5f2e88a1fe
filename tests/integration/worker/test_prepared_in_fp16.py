"""Real models in fp32, made in fp16 by the program that prepares, and served by a worker."""

import hashlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from harness.builders.agent_values import assignment
from harness.cluster.worker_pool import WorkerPoolHarness, infer
from harness.fakes.log import RecordingLog
from harness.models.engine_cases import digest, magika
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import SignatureVerifier
from shoal.agent.clock import SystemClock
from shoal.agent.ports import PreparedModel, WorkerReady
from shoal.agent.preparation.preparer import ProgramPreparer
from shoal.agent.worker.compare import compare
from shoal.agent.worker.engine import open_engine, run_options
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.artifacts.signature_bundle import verify_file
from shoal.devstack import ocr
from shoal.types.assignment import Assignment, Preparation, Work
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import Metric, Tolerance
from shoal.types.tolerance import default
from shoal.types.units import Bytes

FP16 = default("fp32", "fp16")


async def nothing(digest: str, offset: int) -> AsyncGenerator[bytes, None]:
    raise refuse(Code.MODEL_UNKNOWN, digest)
    yield b""


class Bench:
    """A node that prepares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        log = RecordingLog()
        publishers = SignatureVerifier(folder / "publishers.json", (), log, verify=verify_file)
        files = DirectoryCache(folder / "cache", nothing, publishers, log, quota=Bytes(2**30), low_water=Bytes(0))
        self.preparer = ProgramPreparer(folder / "prepared", files, SystemClock(), log)

    def order(self, model: Path, inputs: NDArray[Any] | None, name: str, **more: Any) -> Assignment:
        """Of a model with one input of that name; its samples are the rows of `inputs`."""
        content = model.read_bytes()
        (self.folder / "model").write_bytes(content)
        asked = assignment(model=digest(content), model_bytes=Bytes(len(content)), precision="fp16", **more)
        asked = replace(asked, preparation=asked.preparation or Preparation(FP16))
        if inputs is None:
            return asked
        samples = self.folder / "samples.npz"
        np.savez(samples, **{name: inputs})  # type: ignore[arg-type]
        digest_of_samples = f"sha256:{hashlib.sha256(samples.read_bytes()).hexdigest()}"
        return replace(asked, samples=digest_of_samples, shapes={name: (1, *inputs.shape[1:])})

    async def make(self, asked: Assignment) -> PreparedModel:
        samples = str(self.folder / "samples.npz") if asked.samples else ""
        made = await self.preparer.prepare(asked, str(self.folder / "model"), samples, lambda: None)
        assert made is not None
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def page() -> Image.Image:
    return Image.open(ocr.files().page)


async def test_a_classifier_in_fp16_serves_what_it_serves_in_fp32(bench: Bench, page: Image.Image) -> None:
    model, slices = ocr.files().classifier, ocr.slices(page)
    asked = bench.order(model, slices, "x")
    made = await bench.make(asked)
    assert made.note.startswith("fp16: ")
    assert made.note.endswith("over 40 samples")
    assert Path(made.path).stat().st_size < 0.51 * model.stat().st_size
    pushed = open_engine(model.read_bytes(), Provider(CPU_PROVIDER), asked.shapes)
    async with WorkerPoolHarness(bench.folder) as pool:
        await pool.workers.start(asked, str(bench.folder / "model"), "", made)
        ready = await pool.wait_event(asked.id, WorkerReady)
        assert made.note in ready.note
        assert ready.measured.prepare_s == made.prepare_s
        assert [each.dtype for each in (*ready.inputs, *ready.outputs)] == ["FP32", "FP32"], "clients see no other"
        client = await pool.client(asked.id)
        for each in slices[:8, None]:
            right = pushed.run({"x": each}, [spec.name for spec in pushed.outputs], run_options())
            (name,) = right
            answer = await infer(client, {"x": each})
            got = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(right[name].shape)
            found = compare(right, {name: got}, FP16)
            assert found.fault == ""
            assert all(drift.passed for drift in found.drifts), found
            assert np.abs(right[name] - got).max() > 0, "another arithmetic"


async def test_without_samples_it_is_judged_on_generated_inputs(bench: Bench) -> None:
    asked = bench.order(ocr.files().classifier, None, "x", shapes={"x": (1, 3, 48, 192)})
    assert (await bench.make(asked)).note.endswith("over 8 generated inputs")


async def test_a_recogniser_is_made_within_the_tolerance_of_its_policy(bench: Bench, page: Image.Image) -> None:
    """Where one letter ends and the next begins, a probability of a half is rounded to either side."""
    bands = [page.convert("RGB").crop((0, top, page.width, top + ocr.BAND)) for top in range(0, 160, ocr.BAND)]
    lines = np.concatenate([ocr.line_input(each)[..., :320] for each in bands])
    tolerance = Tolerance("", Metric.COSINE, 0.95)
    made = await bench.make(
        bench.order(ocr.files().recogniser, lines, "x", preparation=Preparation((tolerance,)))
    )  # fmt: skip
    assert made.note.endswith(f"over {len(lines)} samples")
    with pytest.raises(ShoalError) as refused:
        await bench.make(bench.order(ocr.files().recogniser, lines, "x"))
    assert refused.value.code is Code.PREPARE_FAILED
    assert "max_rel" in refused.value.refusal.found


async def test_a_model_that_overflows_is_refused_by_name(bench: Bench) -> None:
    """Magika sums 126,000 and divides it again. The processor's provider alone would not have noticed."""
    work = Work(shapes={"bytes": (1, 2048)}, below={"bytes": 257})
    with pytest.raises(ShoalError) as refused:
        await bench.make(bench.order(magika(), None, "bytes", shapes={"bytes": (1, 2048)}, work=work))
    assert refused.value.code is Code.PREPARE_FAILED
    assert "LayerNorm_1/Sum_1:0 reaches" in refused.value.refusal.found
    assert "fp16 ends at 65504" in refused.value.refusal.found

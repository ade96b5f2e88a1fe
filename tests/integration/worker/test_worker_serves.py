"""A real worker process answers as ONNX Runtime in process does, bit for bit, and refuses what it must."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from harness.cluster.worker_pool import WorkerPoolHarness, infer, request
from harness.models import engine_cases as models
from harness.wait import until
from shoal.agent.ports import WorkerFailed, WorkerReady
from shoal.agent.worker.pool_options import PoolOptions
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.profile import TensorSpec

PLAIN = tuple(kind for kind in models.KINDS if kind != "BF16")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPoolHarness]:
    async with WorkerPoolHarness(tmp_path, PoolOptions(queue=4)) as opened:
        yield opened


def in_process(data: bytes, feeds: dict[str, Any]) -> list[Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def extremes(kind: str) -> Any:
    """[2, 3] of the kind's awkward values."""
    dtype = {"BF16": ml_dtypes.bfloat16, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}.get(kind)
    if dtype is not None:
        array = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1 / 3], np.float64).astype(dtype)
    elif kind == "BOOL":
        array = np.array([True, False, True, True, False, False])
    elif kind == "BYTES":
        array = np.array(["", "a", "é\x00ü", "\x00", "x" * 300, "end\x00"], dtype=np.object_)
    else:
        limits = np.iinfo(np.dtype(kind.lower()))
        array = np.array([limits.min, limits.max, 0, 1, 2, 3], dtype=kind.lower())
    return array.reshape(2, 3)


async def test_every_datatype_bit_for_bit(pool: WorkerPoolHarness) -> None:
    data = models.identity(PLAIN)
    ready = await pool.serve("all", data)
    assert ready.inputs == tuple(TensorSpec(f"x_{kind}", kind, (-1, 3)) for kind in PLAIN)
    feeds = {f"x_{kind}": extremes(kind) for kind in PLAIN}
    expected = [array.tolist() if array.dtype == object else array.tobytes() for array in in_process(data, feeds)]
    client = await pool.client("all")
    answer = await infer(client, feeds)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "7")
    assert [output.datatype for output in answer.outputs] == list(PLAIN)
    assert all(list(output.shape) == [2, 3] for output in answer.outputs)
    raw = request(feeds).raw_input_contents
    assert list(answer.raw_output_contents) == list(raw)
    for kind, want, got in zip(PLAIN, expected, answer.raw_output_contents, strict=True):
        assert kind == "BYTES" or got == want
    await client.close()


async def test_typed_contents_equal_raw_ones(pool: WorkerPoolHarness) -> None:
    kinds = tuple(kind for kind in PLAIN if kind != "FP16")
    await pool.serve("typed", models.identity(kinds))
    feeds = {f"x_{kind}": extremes(kind) for kind in kinds}
    client = await pool.client("typed")
    raw, typed = await infer(client, request(feeds)), await infer(client, request(feeds, typed=True))
    assert list(raw.raw_output_contents) == list(typed.raw_output_contents)
    await client.close()


async def test_bfloat16_goes_through_io_binding(pool: WorkerPoolHarness) -> None:
    await pool.serve("bf16", models.identity(("BF16", "FP32")))
    feeds = {"x_BF16": extremes("BF16"), "x_FP32": extremes("FP32")}
    client = await pool.client("bf16")
    answer = await infer(client, feeds)
    assert list(answer.raw_output_contents) == [feeds["x_BF16"].tobytes(), feeds["x_FP32"].tobytes()]
    empty = await infer(client, {"x_BF16": extremes("BF16")[:0], "x_FP32": extremes("FP32")[:0]})
    assert [list(output.shape) for output in empty.outputs] == [[0, 3], [0, 3]]
    await client.close()


async def test_pp_ocr_recognition_and_magika_bit_for_bit(pool: WorkerPoolHarness) -> None:
    rec, magika = models.recogniser().read_bytes(), models.magika().read_bytes()
    await asyncio.gather(
        pool.serve("rec", rec, memory=300 * 2**20, work=Work(nodes=1, shapes={"x": (1, 3, 48, 320)})),
        pool.serve("magika", magika, work=Work(nodes=1, shapes={"bytes": (1, 2048)})),
    )
    ramp = (np.arange(3 * 48 * 320, dtype=np.float32) % 255 / 127.5 - 1).reshape(1, 3, 48, 320)
    text = np.frombuffer((Path(__file__).read_bytes() * 4)[:2048], np.uint8).astype(np.int32).reshape(1, 2048)
    for name, data, feeds in (("rec", rec, {"x": ramp}), ("magika", magika, {"bytes": text})):
        expected = in_process(data, feeds)
        client = await pool.client(name)
        answers = await asyncio.gather(*(infer(client, feeds) for _ in range(3)))
        for answer in answers:
            assert list(answer.raw_output_contents) == [array.tobytes() for array in expected]
        await client.close()


async def test_what_was_measured(pool: WorkerPoolHarness) -> None:
    data = models.recogniser().read_bytes()
    ready = await pool.serve("rec", data, work=Work(nodes=1, shapes={"x": (1, 3, 48, 320)}))
    measured = ready.measured
    assert measured.samples >= 5
    assert 0 < measured.latency_p50_s <= measured.latency_p95_s < 5
    assert 0 < measured.load_cpu_s <= measured.load_s < 20
    assert len(data) < measured.memory_bytes < 2**30
    # a processor without a counter: watts of one busy core times seconds, and said so
    assert measured.energy_source is EnergySource.ESTIMATED
    assert measured.joules == pytest.approx(7.65 * measured.latency_p50_s, rel=1)


async def test_service_is_metered_by_origin(pool: WorkerPoolHarness) -> None:
    await pool.serve("one", models.add_one())
    client = await pool.client("one")
    for _ in range(3):
        await infer(client, {"x": np.ones(4, np.float32)}, origin="ocr")
    with pytest.raises(ShoalError):
        await infer(client, {"z": np.ones(4, np.float32)}, origin="other")
    served = {one.origin: one for one in (await pool.stats("one")).served}
    assert (served["ocr"].requests, served["ocr"].errors) == (3, 0)
    assert (served["other"].requests, served["other"].errors) == (1, 0)
    assert served["ocr"].joules > 0
    assert 0 < served["ocr"].latency_p50_s <= served["ocr"].latency_p95_s < 1
    await client.close()


async def test_bad_requests_leave_the_worker_well(pool: WorkerPoolHarness) -> None:
    await pool.serve("one", models.add_one())
    client = await pool.client("one")
    good = request({"x": np.ones(4, np.float32)})
    changes: list[tuple[Callable[[oip.ModelInferRequest], object], Code]] = [
        (lambda r: r.inputs[0].ClearField("name"), Code.INVALID_ARGUMENT),
        (lambda r: r.inputs[0].shape.append(7), Code.INVALID_ARGUMENT),
        (lambda r: r.raw_input_contents.append(b""), Code.INVALID_ARGUMENT),
        (lambda r: r.inputs[0].shape.__setitem__(0, 2**40), Code.TOO_LARGE),
    ]
    for change, code in changes:
        bad = oip.ModelInferRequest()
        bad.CopyFrom(good)
        change(bad)
        with pytest.raises(ShoalError) as refused:
            await infer(client, bad)
        assert refused.value.code is code
        assert refused.value.refusal.remedy
    with pytest.raises(ShoalError) as junk:
        await client.ask(b"\xff\xff\xff")
    assert junk.value.code is Code.INVALID_ARGUMENT
    answer = await infer(client, good)
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [2.0] * 4
    await client.close()


async def test_deadline_ends_the_run_and_the_queue_is_bounded(pool: WorkerPoolHarness) -> None:
    await pool.serve("loop", models.loop(-1))
    client = await pool.client("loop")
    slow: dict[str, Any] = {"x": np.ones(1, np.float32), "n": np.array(2**60, np.int64)}
    with pytest.raises(ShoalError) as late:
        await infer(client, slow, deadline_s=0.2)
    assert late.value.code is Code.DEADLINE_EXCEEDED

    async def idle() -> bool:
        return (await pool.stats("loop")).in_flight == 0

    # the run really ended: its runner is free again
    await until(idle, 5, "the terminated run's end")
    waiting = [asyncio.create_task(infer(client, slow, deadline_s=20)) for _ in range(4)]

    async def full() -> bool:
        return (await pool.stats("loop")).in_flight == 4

    await until(full, 5, "four requests in flight")
    with pytest.raises(ShoalError) as refused:
        await infer(client, slow)
    assert refused.value.code is Code.OVERLOADED
    for task in waiting:
        task.cancel()
    # cancelled by their callers: those that run are terminated, those that wait never start
    await until(idle, 5, "cancelled requests' end")
    assert (await infer(client, {"x": np.ones(1, np.float32), "n": np.array(3, np.int64)})).outputs[0].name == "y"
    await client.close()


async def test_warm_up_that_never_ends_is_stopped(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(warm_up_s=0.5)) as pool:
        await pool.start("endless", models.loop(2**60))
        failed = await pool.wait_event("endless", WorkerFailed)
        assert failed.refusal.code is Code.WARMUP_FAILED
        assert pool.workers.local("endless") is None


async def test_models_that_cannot_be_loaded(pool: WorkerPoolHarness) -> None:
    for name, data, code in (
        ("junk", b"this is no model", Code.LOAD_FAILED),
        ("mixed", models.identity(("BF16", "BYTES")), Code.MODEL_INVALID),
    ):
        await pool.start(name, data)
        failed = await pool.wait_event(name, WorkerFailed)
        assert failed.refusal.code is code
        assert failed.refusal.remedy
    await pool.serve("after", models.add_one())


async def test_weights_outside_the_verified_bytes_are_never_read(pool: WorkerPoolHarness, tmp_path: Path) -> None:
    import onnx
    from onnx.external_data_helper import set_external_data

    loaded = onnx.load_from_string(models.heavy(1))
    weights = loaded.graph.initializer[0]
    (tmp_path / "weights.bin").write_bytes(weights.raw_data)
    set_external_data(weights, str((tmp_path / "weights.bin").relative_to("/")))
    weights.ClearField("raw_data")
    await pool.start("outside", loaded.SerializeToString())
    failed = await pool.wait_event("outside", WorkerFailed)
    assert failed.refusal.code is Code.LOAD_FAILED


async def test_readiness_is_told_step_by_step(pool: WorkerPoolHarness) -> None:
    await pool.serve("one", models.add_one())
    phases = [getattr(event, "phase", None) for event in pool.events]
    assert phases == ["loading", "warming"]
    assert not any(isinstance(event, WorkerReady) for event in pool.events)
    await pool.workers.stop("one")
    assert pool.workers.local("one") is None
    assert await pool.workers.stats() == ()
    await pool.workers.stop("never-started")

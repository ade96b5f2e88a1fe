"""An unmodified tritonclient against real fronts and workers: the same bits as ONNX Runtime in process.

Over gRPC and HTTP, binary and JSON, at the agent that has the workers and through a gateway that has none.
"""

import asyncio
import ctypes
import json
import pickle
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from harness.crafted import model as onnx_model
from harness.crafted import real_models, tensor
from harness.node import Node
from harness.pki import Authority
from shoal.agent.clock import SystemClock
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

DATATYPES = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "BF16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BYTES": (TensorProto.STRING, np.object_),
}
STRANGE = ["\xff\xfe\x00!", "n\xfcr", "", "n\xfcr"]
"""As bytes (Latin-1), not UTF-8."""
TEXTS = ["", "plain", 'quote " and \\ and \n', "Grüße 你好" * 50]
NEVER_JSON = ("bf16", "strange")


def transposed(*datatypes: str) -> bytes:
    """A transpose of each datatype, so that order counts."""
    nodes = [helper.make_node("Transpose", [f"in_{d}"], [f"out_{d}"], perm=[1, 0]) for d in datatypes]
    inputs = [tensor(f"in_{d}", ["N", "M"], DATATYPES[d][0]) for d in datatypes]
    outputs = [tensor(f"out_{d}", ["M", "N"], DATATYPES[d][0]) for d in datatypes]
    return bytes(onnx_model(nodes, inputs, outputs).SerializeToString())


def compared() -> bytes:
    """Which strings equal their mirror image: what ONNX Runtime takes as bytes and would hand out as UTF-8 alone."""
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("Equal", ["x", "t"], ["y"])]
    inputs, outputs = [tensor("x", ["N", "N"], TensorProto.STRING)], [tensor("y", ["N", "N"], TensorProto.BOOL)]
    return bytes(onnx_model(nodes, inputs, outputs, opset=19).SerializeToString())


def strings(texts: list[str], encoding: str) -> Any:
    return np.array([t.encode(encoding) for t in texts], np.object_).reshape(2, 2)


def ends(datatype: str) -> Any:
    """An array [2, 2] that holds the datatype's ends."""
    dtype = DATATYPES[datatype][1]
    if datatype == "BYTES":
        return strings(TEXTS, "utf-8")
    if datatype == "BOOL":
        return np.array([[True, False], [False, False]])
    if datatype == "BF16":
        return np.array([[1.5, -0.0], [3.0e38, 1e-38]], ml_dtypes.bfloat16)
    if datatype.startswith("FP"):
        info = np.finfo(dtype)
        return np.array([[info.max, info.min], [info.smallest_subnormal, -0.0]], dtype)
    limits = np.iinfo(dtype)
    return np.array([[limits.max, limits.min], [1, 7]], dtype)


def in_process(content: bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """ONNX Runtime itself, as it stands; BF16 goes in and out as bits."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    if "in_BF16" not in feeds:
        given = {name: _texts(feed) if feed.dtype == object else feed for name, feed in feeds.items()}
        return dict(zip(names, session.run(names, given), strict=True))
    bits = np.ascontiguousarray(feeds["in_BF16"]).view(np.uint16)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    (answer,) = session.run_with_ort_values(names, {"in_BF16": value})
    raw = np.frombuffer(ctypes.string_at(answer.data_ptr(), bits.nbytes), ml_dtypes.bfloat16)
    return {"out_BF16": raw.reshape(answer.shape())}


def _texts(feed: Any) -> Any:
    """Strings as ONNX Runtime's binding takes them: str, or bytes of fixed width where they are not UTF-8."""
    try:
        return np.array([[t.decode() for t in row] for row in feed], np.object_)
    except UnicodeDecodeError:
        return feed.astype(np.bytes_)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {
        "every": transposed(*(d for d in DATATYPES if d != "BF16")),
        "bf16": transposed("BF16"),
        "strange": compared(),
    }
    for name, content in made.items():
        (folder / name).write_bytes(content)
    real = real_models()
    return {**{name: folder / name for name in made}, "rec": real["rec"], "magika": real["magika"]}


@pytest.fixture(scope="module")
def feeds(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(7)
    found: dict[str, dict[str, Any]] = {
        "every": {f"in_{d}": ends(d) for d in DATATYPES if d != "BF16"},
        "bf16": {"in_BF16": ends("BF16")},
        "strange": {"x": strings(STRANGE, "latin-1")},
    }
    for name in ("rec", "magika"):
        session = ort.InferenceSession(models[name].read_bytes(), providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        if name == "rec":
            found[name] = {given.name: rng.standard_normal((2, 3, 48, 160)).astype(np.float32)}
        else:
            dtype = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}[given.type]
            found[name] = {given.name: rng.integers(0, 256, (3, given.shape[1])).astype(dtype)}
    return found


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], feeds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: in_process(models[name].read_bytes(), feed) for name, feed in feeds.items()}


@pytest.fixture
async def region(tmp_path: Path, models: dict[str, Path]) -> AsyncIterator[tuple[Authority, Node, Node]]:
    """An agent with a worker for each model, and a gateway."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    agent = Node("n1", authority, tmp_path / "n1")
    gateway = Node("g1", authority, tmp_path / "g1", Role.GATEWAY)
    try:
        await asyncio.gather(agent.start(), gateway.start())
        for name, path in models.items():
            await agent.load(f"a-{name}", WorkloadKey("acme", name), path)
        await agent.configure()
        await gateway.configure(
            Route(key, 1, (agent.endpoint(assignment, at=gateway),)) for assignment, key in agent.models.items()
        )
        yield authority, agent, gateway
    finally:
        await gateway.stop()
        await agent.stop()


def case(name: str, model: str, feed: Mapping[str, Any], outputs: list[str], **more: Any) -> dict[str, Any]:
    by_dtype = {np.dtype(dtype): d for d, (_, dtype) in DATATYPES.items()}
    inputs = {key: by_dtype[array.dtype] for key, array in feed.items()}
    return {"name": name, "model": model, "inputs": inputs, "outputs": outputs, "binary": True, **more}


def same(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    if wanted.dtype == object:
        # that client gives text of JSON as str, and of raw contents as bytes
        assert [t if isinstance(t, str) else t.decode() for t in found.ravel()] == list(wanted.ravel())
    else:
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("way", ["agent", "gateway"])
@pytest.mark.parametrize("transport", ["grpc", "http"])
async def test_same_bits_metadata_and_errors(
    region: tuple[Authority, Node, Node],
    feeds: dict[str, dict[str, Any]],
    expected: dict[str, dict[str, Any]],
    transport: str,
    way: str,
    tmp_path: Path,
) -> None:
    authority, agent, gateway = region
    node = agent if way == "agent" else gateway
    config = node.front.config
    tenant = authority.issue(Role.TENANT, "acme")

    arrays: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []

    def add(name: str, model: str, feed: dict[str, Any], outputs: list[str], **more: Any) -> None:
        cases.append(case(name, model, feed, outputs, **more))
        for key, array in feed.items():
            arrays[f"{name}/{key}"] = array

    for name, feed in feeds.items():
        add(name, name, feed, [])
        add(f"{name} by name", name, feed, sorted(expected[name]))
        if transport == "http" and name not in NEVER_JSON:
            add(f"{name} JSON", name, feed, sorted(expected[name]), binary=False)
    rec = feeds["rec"]
    (key,) = rec
    add("unknown", "nothing", rec, [])
    add("wrong name", "rec", {"y": rec[key]}, [])
    add("wrong dtype", "rec", {key: rec[key].astype(np.float64)}, [])
    add("wrong rank", "rec", {key: rec[key][0]}, [])
    add("wrong size", "rec", {key: rec[key][:, :2]}, [])
    add("short bytes", "rec", {key: rec[key][:1]}, [], shape=[2, 3, 48, 160])
    add("unknown output", "rec", rec, ["nowhere"])
    add("version", "rec", rec, [], options={"model_version": "9"})

    (tmp_path / "arrays.pickle").write_bytes(pickle.dumps(arrays))
    spec = {
        "transport": transport,
        "url": f"localhost:{config.grpc_port if transport == 'grpc' else config.rest_port}",
        "authority": str(tenant.authority),
        "certificate": str(tenant.certificate),
        "key": str(tenant.key),
        "arrays": str(tmp_path / "arrays.pickle"),
        "models": sorted(feeds),
        "unknown": ["nothing"],
        "cases": cases,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("triton.py")),
        str(tmp_path / "spec.json"),
        str(tmp_path / "found.pickle"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        _, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    found = pickle.loads((tmp_path / "found.pickle").read_bytes())

    for each in cases:
        if each["name"] in found["answers"]:
            answer = found["answers"][each["name"]]
            wanted = expected[each["name"].partition(" ")[0]]
            assert set(answer) == set(wanted), each["name"]
            for name, array in wanted.items():
                same(answer[name], array)
    assert set(found["answers"]) | set(found["errors"]) == {c["name"] for c in cases} | {"metadata nothing"}
    invalid, missing = ("INVALID_ARGUMENT", "NOT_FOUND") if transport == "grpc" else ("400", "404")
    assert {name: status.rpartition(".")[2] for name, (status, _) in found["errors"].items()} == {
        "unknown": missing,
        "version": missing,
        "metadata nothing": missing,
        "wrong name": invalid,
        "wrong dtype": invalid,
        "wrong rank": invalid,
        "wrong size": invalid,
        "short bytes": invalid,
        "unknown output": invalid,
    }, found["errors"]

    assert (found["live"], found["ready"], found["server"]["name"]) == (True, True, "shoal")
    rows = found["index"]["models"] if isinstance(found["index"], dict) else found["index"]
    assert {(row["name"], row["state"]) for row in rows} == {(m, "READY") for m in feeds}
    for name in feeds:
        ready, said = found["models"][name]
        assert ready
        assert {t["name"] for t in said["inputs"]} == set(feeds[name])
        assert {t["name"] for t in said["outputs"]} == set(expected[name])
    shown = {t["name"]: t for t in found["models"]["every"][1]["inputs"]}
    assert all(t["datatype"] == name.removeprefix("in_") for name, t in shown.items())
    assert [int(n) for n in shown["in_FP32"]["shape"]] == [-1, -1]

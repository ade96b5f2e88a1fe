"""Cases for an unmodified tritonclient, and the answers that it must get: the bits of ONNX Runtime in process.

The client runs in its own process (`triton_child`), because its stubs and ours share one proto package.
"""

import ctypes
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from harness.models.synthetic import model as onnx_model
from harness.models.synthetic import real_models, tensor

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


def transpose_model(*datatypes: str) -> bytes:
    """A transpose of each datatype, so that order counts."""
    nodes = [helper.make_node("Transpose", [f"in_{d}"], [f"out_{d}"], perm=[1, 0]) for d in datatypes]
    inputs = [tensor(f"in_{d}", ["N", "M"], DATATYPES[d][0]) for d in datatypes]
    outputs = [tensor(f"out_{d}", ["M", "N"], DATATYPES[d][0]) for d in datatypes]
    return bytes(onnx_model(nodes, inputs, outputs).SerializeToString())


def string_equality_model() -> bytes:
    """Compares strings with their mirror image. No string is output: ONNX Runtime accepts any bytes, but returns only
    UTF-8."""
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]), helper.make_node("Equal", ["x", "t"], ["y"])]
    inputs, outputs = [tensor("x", ["N", "N"], TensorProto.STRING)], [tensor("y", ["N", "N"], TensorProto.BOOL)]
    return bytes(onnx_model(nodes, inputs, outputs, opset=19).SerializeToString())


def strings(texts: list[str], encoding: str) -> Any:
    return np.array([t.encode(encoding) for t in texts], np.object_).reshape(2, 2)


def extreme_values(datatype: str) -> Any:
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


def run_in_process(content: bytes, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Unmodified ONNX Runtime; BF16 goes in and out as bits."""
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
    """Strings as ONNX Runtime's binding takes them: str, or bytes of fixed width if they are not UTF-8."""
    try:
        return np.array([[t.decode() for t in row] for row in feed], np.object_)
    except UnicodeDecodeError:
        return feed.astype(np.bytes_)


@dataclass(frozen=True, slots=True)
class Suite:
    """Models by name: their files, their inputs, and ONNX Runtime's answers in this process."""

    models: Mapping[str, Path]
    feeds: Mapping[str, Mapping[str, Any]]
    expected: Mapping[str, Mapping[str, Any]]


def suite(folder: Path) -> Suite:
    """Every datatype, strings that are not UTF-8, and two real models; generated models are written to `folder`."""
    made = {
        "every": transpose_model(*(d for d in DATATYPES if d != "BF16")),
        "bf16": transpose_model("BF16"),
        "strange": string_equality_model(),
    }
    for name, content in made.items():
        (folder / f"{name}.onnx").write_bytes(content)
    real = real_models()
    models = {
        **{name: folder / f"{name}.onnx" for name in made},
        "rec": real["rec"],
        "magika": real["magika"],
    }
    rng = np.random.default_rng(7)
    feeds: dict[str, dict[str, Any]] = {
        "every": {f"in_{d}": extreme_values(d) for d in DATATYPES if d != "BF16"},
        "bf16": {"in_BF16": extreme_values("BF16")},
        "strange": {"x": strings(STRANGE, "latin-1")},
    }
    for name in ("rec", "magika"):
        session = ort.InferenceSession(models[name].read_bytes(), providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        if name == "rec":
            feeds[name] = {given.name: rng.standard_normal((2, 3, 48, 160)).astype(np.float32)}
        else:
            dtype = {"tensor(int32)": np.int32, "tensor(int64)": np.int64}[given.type]
            feeds[name] = {given.name: rng.integers(0, 256, (3, given.shape[1])).astype(dtype)}
    expected = {name: run_in_process(models[name].read_bytes(), feed) for name, feed in feeds.items()}
    return Suite(models, feeds, expected)


@dataclass(slots=True)
class Cases:
    """The requests of one client."""

    cases: list[dict[str, Any]] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, model: str, feed: Mapping[str, Any], outputs: list[str], **more: Any) -> None:
        by_dtype = {np.dtype(dtype): d for d, (_, dtype) in DATATYPES.items()}
        inputs = {key: by_dtype[array.dtype] for key, array in feed.items()}
        self.cases.append({"name": name, "model": model, "inputs": inputs, "outputs": outputs, "binary": True, **more})
        for key, array in feed.items():
            self.arrays[f"{name}/{key}"] = array


def cases_of(of: Suite, transport: str) -> Cases:
    """Valid cases, named `MODEL ..`, and one of each mistake."""
    found = Cases()
    for name, feed in of.feeds.items():
        outputs = sorted(of.expected[name])
        found.add(name, name, feed, [])
        found.add(f"{name} by name", name, feed, outputs)
        squeezed = "compression_algorithm" if transport == "grpc" else "request_compression_algorithm"
        found.add(f"{name} gzip", name, feed, outputs, options={squeezed: "gzip"})
        if transport == "http" and name not in NEVER_JSON:
            found.add(f"{name} JSON", name, feed, outputs, binary=False)
    rec = of.feeds["rec"]
    (key,) = rec
    found.add("unknown", "nothing", rec, [])
    found.add("wrong name", "rec", {"y": rec[key]}, [])
    found.add("wrong dtype", "rec", {key: rec[key].astype(np.float64)}, [])
    found.add("wrong rank", "rec", {key: rec[key][0]}, [])
    found.add("wrong size", "rec", {key: rec[key][:, :2]}, [])
    found.add("short bytes", "rec", {key: rec[key][:1]}, [], shape=[2, 3, 48, 160])
    found.add("unknown output", "rec", rec, ["nowhere"])
    found.add("version", "rec", rec, [], options={"model_version": "9"})
    return found


def ask(folder: Path, transport: str, url: str, cases: Cases, of: Suite, **credentials: str) -> dict[str, Any]:
    """The client's answers. credentials: files `authority`, `certificate` and `key`, or `authority` and a `bearer`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arrays.pickle").write_bytes(pickle.dumps(cases.arrays))
    spec = {
        "transport": transport,
        "url": url,
        **credentials,
        "arrays": str(folder / "arrays.pickle"),
        "models": sorted(of.feeds),
        "unknown": ["nothing"],
        "cases": cases.cases,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    child = [sys.executable, str(Path(__file__).with_name("triton_child.py"))]
    done = subprocess.run(
        [*child, str(folder / "spec.json"), str(folder / "found.pickle")],
        stderr=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = pickle.loads((folder / "found.pickle").read_bytes())
    return found


def check_answers(found: Mapping[str, Any], cases: Cases, of: Suite, transport: str) -> int:
    """Assert equal bits, the standard errors, metadata and readiness; return how many answers were compared."""
    for each in cases.cases:
        if each["name"] in found["answers"]:
            answer = found["answers"][each["name"]]
            wanted = of.expected[each["name"].partition(" ")[0]]
            assert set(answer) == set(wanted), each["name"]
            for name, array in wanted.items():
                assert_same(answer[name], array)
    names = {each["name"] for each in cases.cases}
    assert set(found["answers"]) | set(found["errors"]) == names | {"metadata nothing"}
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
    assert {(row["name"], row["state"]) for row in rows} == {(m, "READY") for m in of.feeds}
    assert found["unknown"] == {"nothing": False}
    for name in of.feeds:
        config = found["configs"][name].get("config", found["configs"][name])
        assert (config["name"], config["backend"]) == (name, "onnxruntime")
        assert {t["name"] for t in config["input"]} == set(of.feeds[name])
        assert {t["name"] for t in config["output"]} == set(of.expected[name])
        (stats,) = found["statistics"][name]
        answered = sum(each.partition(" ")[0] == name for each in found["answers"])
        assert int(stats["inference_count"]) == int(stats["inference_stats"]["success"]["count"]) >= answered
        ready, said = found["models"][name]
        assert ready
        assert {t["name"] for t in said["inputs"]} == set(of.feeds[name])
        assert {t["name"] for t in said["outputs"]} == set(of.expected[name])
    types = {
        t["name"]: t["data_type"] for t in found["configs"]["every"].get("config", found["configs"]["every"])["input"]
    }
    assert (types["in_FP32"], types["in_BYTES"]) == ("TYPE_FP32", "TYPE_STRING")
    shown = {t["name"]: t for t in found["models"]["every"][1]["inputs"]}
    assert all(t["datatype"] == name.removeprefix("in_") for name, t in shown.items())
    assert [int(n) for n in shown["in_FP32"]["shape"]] == [-1, -1]
    return len(found["answers"])


def assert_same(found: Any, wanted: Any) -> None:
    assert found.shape == wanted.shape
    if wanted.dtype == object:
        # that client gives text of JSON as str, and of raw contents as bytes
        assert [t if isinstance(t, str) else t.decode() for t in found.ravel()] == list(wanted.ravel())
    else:
        assert found.dtype == wanted.dtype
        assert found.tobytes() == wanted.tobytes()

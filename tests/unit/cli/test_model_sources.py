"""Models to push: files, folders, URLs, and tensors in files beside them."""

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from shoal.cli.model_sources import model_file
from shoal.types.codes import Code, ShoalError


def write_model(path: Path, *, external: bool) -> bytes:
    """y = x + w, with w in a file beside it where asked; returns w's bytes."""
    weights = np.arange(1000, dtype=np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "add",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1000])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1000])],
        [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, str(path), save_as_external_data=external, location="w.bin", size_threshold=0)
    return weights.tobytes()


def code_of(source: str, digest: str = "") -> Code:
    with pytest.raises(ShoalError) as refused, model_file(source, digest):
        pass
    return refused.value.code


def test_a_file_and_a_folder_with_one_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "add.onnx"
    write_model(path, external=False)
    for source in (path, tmp_path):
        with model_file(str(source), "") as found:
            assert found == path
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    with model_file(str(path), digest) as found:
        assert found == path
    assert code_of(str(path), "sha256:" + "0" * 64) is Code.MODEL_DIGEST
    write_model(tmp_path / "other.onnx", external=False)
    assert code_of(str(tmp_path)) is Code.SOURCE_UNREACHABLE, "two of them"
    assert code_of(str(tmp_path / "none.onnx")) is Code.SOURCE_UNREACHABLE


def test_a_source_of_another_scheme_is_no_path() -> None:
    with pytest.raises(ShoalError) as refused, model_file("ftp://models.example/y.onnx", ""):
        pass
    assert (refused.value.code, refused.value.refusal.found) == (Code.USAGE, "ftp:// as a model's source")
    assert "oci://" in refused.value.refusal.asked


def test_tensors_beside_a_model_are_put_into_one_file(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "add.onnx", external=True)
    with model_file(str(tmp_path), "") as found:
        assert found.name == "add.onnx"
        assert found.parent != tmp_path
        assert weights in found.read_bytes()
        (tensor,) = onnx.load(str(found), load_external_data=False).graph.initializer
        assert numpy_helper.to_array(tensor).tobytes() == weights
    assert not found.exists(), "it was made for the push alone"
    (tmp_path / "w.bin").unlink()
    assert code_of(str(tmp_path)) is Code.SOURCE_UNREACHABLE


def test_a_tensor_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    """A model from somewhere must not have this user's files sent."""
    inner = tmp_path / "model"
    inner.mkdir()
    write_model(inner / "add.onnx", external=True)
    (inner / "w.bin").rename(tmp_path / "w.bin")
    model = onnx.load(str(inner / "add.onnx"), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../w.bin"
    (inner / "add.onnx").write_bytes(model.SerializeToString())
    assert code_of(str(inner)) is Code.SOURCE_UNREACHABLE


def test_what_is_no_model_is_left_to_the_region(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("its location is here")
    with model_file(str(tmp_path / "text.onnx"), "") as found:
        assert found == tmp_path / "text.onnx"


def test_an_empty_file_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").touch()
    assert code_of(str(tmp_path / "empty.onnx")) is Code.MODEL_INVALID


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    write_model(tmp_path / "add.onnx", external=False)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def do_GET(self) -> None:
            if self.path == "/large.onnx":
                self.send_response(200)
                self.send_header("Content-Length", str(2**40))
                self.end_headers()
                return
            super().do_GET()

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - its name

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_a_url_needs_tls_or_a_digest(server: str, tmp_path: Path) -> None:
    data = (tmp_path / "add.onnx").read_bytes()
    assert code_of(f"{server}/add.onnx") is Code.SOURCE_DENIED
    with model_file(f"{server}/add.onnx", f"sha256:{hashlib.sha256(data).hexdigest()}") as found:
        assert found.read_bytes() == data
    zeros = "sha256:" + "0" * 64
    assert code_of(f"{server}/add.onnx", zeros) is Code.MODEL_DIGEST
    assert code_of(f"{server}/nope.onnx", zeros) is Code.SOURCE_UNREACHABLE
    assert code_of(f"{server}/large.onnx", zeros) is Code.MODEL_TOO_LARGE, "before its first byte"

"""Models of OCI registries and model hubs: what is pulled, what stays at home, and what hostile ones achieve."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from harness.servers.registry import COMMIT, INDEX, TOKEN, Hub, Registry, Storage, StoredAnswer, digest_of, serve
from shoal.cli import hub, oci
from shoal.cli.downloads import REDIRECTS
from shoal.cli.model_sources import model_file
from shoal.types.codes import Code, ShoalError

MODEL = b"an onnx model, for all that the registry knows"
ZEROS = "sha256:" + "0" * 64


@pytest.fixture
def storage() -> Iterator[Storage]:
    with serve(Storage()) as served:
        yield served


@pytest.fixture
def registry(storage: Storage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with serve(Registry(storage)) as served:
        yield served


@pytest.fixture
def models(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve(Hub(storage)) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "secret-of-the-hub")
        yield served


def code_of(source: str, digest: str = "") -> Code:
    with pytest.raises(ShoalError) as refused, model_file(source, digest):
        pass
    return refused.value.code


def external_model() -> tuple[bytes, bytes]:
    """(y = x + w with w in `w.bin`, the bytes of w)"""
    tensor = numpy_helper.from_array(np.arange(100, dtype=np.float32), "w")
    weights = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "add",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [100])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [100])],
        [tensor],
    )
    return helper.make_model(graph).SerializeToString(), weights


# -- registries


def test_an_artifact_is_pulled_by_manifest_or_by_a_tag_that_is_resolved_and_shown(
    registry: Registry, storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = registry.push("v1", [("reader.onnx", MODEL), ("README.md", b"#")])
    for source in (f"oci://{registry.host}/team/models@{digest}", f"oci://{registry.host}/team/models:v1"):
        with model_file(source, digest_of(MODEL)) as found:
            assert (found.name, found.read_bytes()) == ("reader.onnx", MODEL)
    shown = "".join(capsys.readouterr().err.split("\n"))
    assert f":v1 is {digest}" in shown
    assert {each.authorization for each in registry.asked if "/v2/" in each.path} == {"", f"Bearer {TOKEN}"}
    assert {each.authorization for each in storage.asked} == {""}, "the token is the registry's alone"
    assert code_of(f"oci://{registry.host}/team/models@{digest}", ZEROS) is Code.MODEL_DIGEST
    assert code_of(f"oci://{registry.host}/team/models:nope") is Code.SOURCE_UNREACHABLE


def test_the_registrys_own_credentials_get_its_token_and_no_others(registry: Registry, tmp_path: Path) -> None:
    registry.push("v1", [("reader.onnx", MODEL)])
    registry.user = "ann:secret"
    source = f"oci://{registry.host}/team/models:v1"
    assert code_of(source) is Code.SOURCE_DENIED
    (tmp_path / "docker").mkdir()
    config = tmp_path / "docker" / "config.json"
    auth = {"auth": base64.b64encode(b"ann:secret").decode()}
    config.write_text(json.dumps({"auths": {"other.example": auth}}))
    assert code_of(source) is Code.SOURCE_DENIED
    config.write_text(json.dumps({"auths": {registry.host: auth}}))
    with model_file(source, "") as found:
        assert found.read_bytes() == MODEL
    assert all(each.path == "/token" for each in registry.asked if each.authorization.startswith("Basic"))


def test_a_token_service_without_tls_gets_no_credentials(registry: Registry) -> None:
    for realm in ("http://192.0.2.1/token", "file:///etc/passwd", ""):
        registry.answers["/v2/team/models/manifests/v1"] = StoredAnswer(
            401, headers={"WWW-Authenticate": f'Bearer realm="{realm}",service="x"'}
        )
        assert code_of(f"oci://{registry.host}/team/models:v1") is Code.SOURCE_DENIED


def test_external_data_are_other_layers(registry: Registry) -> None:
    model, weights = external_model()
    registry.push("v1", [("onnx/add.onnx", model), ("onnx/w.bin", weights), ("w.bin", b"another")])
    with model_file(f"oci://{registry.host}/team/models:v1", "") as found:
        (tensor,) = onnx.load(str(found), load_external_data=False).graph.initializer
        assert numpy_helper.to_array(tensor).tobytes() == weights
    registry.push("v1", [("onnx/add.onnx", model)])
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.SOURCE_UNREACHABLE


def test_a_size_is_refused_before_the_first_byte(registry: Registry, storage: Storage) -> None:
    registry.push("v1", [("reader.onnx", MODEL)])
    layer = {"digest": digest_of(MODEL), "size": 2**40, "annotations": {"org.opencontainers.image.title": "r.onnx"}}
    registry.push_manifest("huge", {"layers": [layer]})
    assert code_of(f"oci://{registry.host}/team/models:huge") is Code.MODEL_TOO_LARGE
    registry.answers["/v2/team/models/manifests/wide"] = StoredAnswer(body=b" " * (4 * 2**20 + 1))
    assert code_of(f"oci://{registry.host}/team/models:wide") is Code.SOURCE_UNREACHABLE
    for lie in ("1", str(2**40), str(len(MODEL) + 1)):
        storage.answers[f"/{digest_of(MODEL)}"] = StoredAnswer(body=MODEL, headers={"Content-Length": lie})
        assert code_of(f"oci://{registry.host}/team/models:v1") in (Code.MODEL_DIGEST, Code.MODEL_TOO_LARGE)


def test_other_bytes_than_the_digests_say_are_refused(registry: Registry, storage: Storage) -> None:
    digest = registry.push("v1", [("reader.onnx", MODEL)])
    storage.answers[f"/{digest_of(MODEL)}"] = StoredAnswer(body=MODEL[::-1])
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.MODEL_DIGEST
    registry.manifests[digest] = registry.manifests[registry.push("v2", [("other.onnx", b"other")])]
    assert code_of(f"oci://{registry.host}/team/models@{digest}") is Code.MODEL_DIGEST


@pytest.mark.parametrize(
    "title", ["../r.onnx", "/etc/r.onnx", "a/../../r.onnx", "a\\r.onnx", "C:r.onnx", "a//r.onnx", "r\n.onnx", "r" * 999]
)
def test_a_title_that_leaves_the_folder_is_refused(registry: Registry, storage: Storage, title: str) -> None:
    registry.push("v1", [("reader.onnx", MODEL), (title, b"x")])
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.MODEL_PATH
    assert not storage.asked


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"layers": 1},
        {"layers": [1]},
        {"layers": [{"digest": "sha256:..", "size": 1}]},
        {"layers": [{"digest": ZEROS, "size": -1}]},
        {"layers": [{"digest": ZEROS, "size": True}]},
        {"layers": [{"digest": ZEROS, "size": 1, "annotations": []}, 7]},
        {"layers": []},
        {"manifests": []},
        {"manifests": [{"digest": ZEROS}, {"digest": ZEROS}]},
        [],
    ],
)
def test_a_manifest_that_is_none_is_refused(registry: Registry, manifest: object) -> None:
    registry.push_manifest("v1", manifest)
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.SOURCE_UNREACHABLE


def test_an_index_of_one_is_followed_and_a_file_is_named_where_there_are_several(registry: Registry) -> None:
    digest = registry.push("v1", [("a.onnx", MODEL), ("b.onnx", b"b")])
    registry.push_manifest("all", {"manifests": [{"digest": digest}]}, INDEX)
    assert code_of(f"oci://{registry.host}/team/models:all") is Code.SOURCE_UNREACHABLE
    with model_file(f"oci://{registry.host}/team/models:all#b.onnx", "") as found:
        assert found.read_bytes() == b"b"
    registry.push("plain", [("", MODEL)])
    with model_file(f"oci://{registry.host}/team/models:plain", "") as found:
        assert (found.name, found.read_bytes()) == ("models.onnx", MODEL)


def test_redirects_end(registry: Registry, storage: Storage) -> None:
    registry.push("v1", [("reader.onnx", MODEL)])
    path = f"/{digest_of(MODEL)}"
    storage.answers[path] = StoredAnswer(302, headers={"Location": path})
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.SOURCE_UNREACHABLE
    assert len(storage.asked) == REDIRECTS
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "http://", "http://[::1"):
        storage.answers[path] = StoredAnswer(302, headers={"Location": target})
        assert code_of(f"oci://{registry.host}/team/models:v1") in (Code.SOURCE_DENIED, Code.SOURCE_UNREACHABLE)
    registry.answers["/v2/team/models/manifests/v1"] = StoredAnswer(302, headers={"Location": "http://192.0.2.1/v1"})
    assert code_of(f"oci://{registry.host}/team/models:v1") is Code.SOURCE_DENIED, "a manifest without TLS or digest"


@pytest.mark.parametrize(
    "source",
    ["oci://", "oci://host", "oci://host/repo", "oci://host/Repo:v1", "oci://host/../x:v1", "oci://host/repo@sha256:0",
     "oci://user:pw@host/repo:v1", "oci://host:port/repo:v1"],
)  # fmt: skip
def test_a_reference_without_a_digest_or_a_tag_is_refused(source: str) -> None:
    assert code_of(source) is Code.USAGE


def test_a_registry_elsewhere_is_called_with_tls() -> None:
    assert oci.parse_reference("oci://registry.example:5000/a/b:v1").base == "https://registry.example:5000"
    assert oci.parse_reference("oci://localhost:5000/a/b:v1").base == "http://localhost:5000"
    assert oci.parse_reference("oci://127.evil.example/a/b:v1").base == "https://127.evil.example"


# -- hubs


def test_a_file_of_a_hub_comes_with_the_digest_that_the_hub_names(
    models: Hub, storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    models.files["onnx/model.onnx"] = MODEL
    models.large.add("onnx/model.onnx")
    source = "hf://owner/name@main/onnx/model.onnx"
    with model_file(source, digest_of(MODEL)) as found:
        assert (found.name, found.read_bytes()) == ("model.onnx", MODEL)
    shown = "".join(capsys.readouterr().err.split("\n"))
    assert f"hf://owner/name@{COMMIT}/onnx/model.onnx is {digest_of(MODEL)}" in shown
    assert {each.authorization for each in models.asked} == {"Bearer secret-of-the-hub"}
    assert {each.authorization for each in storage.asked} == {""}
    before = len(storage.asked)
    assert code_of(source, ZEROS) is Code.MODEL_DIGEST
    storage.answers[f"/{digest_of(MODEL)[7:]}"] = StoredAnswer(body=MODEL[::-1])
    assert code_of(source, digest_of(MODEL)) is Code.MODEL_DIGEST
    assert len(storage.asked) == before + 2
    assert code_of(source) is Code.SOURCE_DENIED, "without TLS a digest is needed"
    assert code_of("hf://owner/name/none.onnx", ZEROS) is Code.SOURCE_UNREACHABLE


def test_a_small_file_of_a_hub_needs_the_digest_that_is_given(models: Hub) -> None:
    models.files["model.onnx"] = MODEL
    with model_file("hf://owner/name/model.onnx", digest_of(MODEL)) as found:
        assert found.read_bytes() == MODEL
    assert code_of("hf://owner/name/model.onnx", ZEROS) is Code.MODEL_DIGEST


def test_a_size_that_a_hub_names_is_refused_before_the_first_byte(models: Hub, storage: Storage) -> None:
    path = "/owner/name/resolve/main/m.onnx"
    linked = {"Location": f"{storage.url}/m", "X-Linked-Size": str(2**40), "X-Linked-Etag": f'"{digest_of(MODEL)[7:]}"'}
    models.answers[path] = StoredAnswer(302, headers=linked)
    storage.answers["/m"] = StoredAnswer(body=MODEL)
    assert code_of("hf://owner/name/m.onnx", digest_of(MODEL)) is Code.MODEL_TOO_LARGE
    models.answers[path] = StoredAnswer(302, headers={**linked, "X-Linked-Size": "3"})
    assert code_of("hf://owner/name/m.onnx", digest_of(MODEL)) is Code.MODEL_DIGEST


@pytest.mark.parametrize(
    "source", ["hf://", "hf://name/model.onnx", "hf://owner/name/../x.onnx", "hf://owner/name@/x.onnx", "hf://../b/c"]
)
def test_a_file_of_a_hub_is_named_whole(source: str) -> None:
    assert code_of(source) is Code.USAGE


def test_a_revision_may_have_slashes() -> None:
    found = hub.parse_reference("hf://owner/name@refs%2Fpr%2F1/a/b.onnx")
    assert (found.repository, found.revision, found.file) == ("owner/name", "refs/pr/1", "a/b.onnx")
    assert hub.parse_reference("hf://owner/name/m.onnx").revision == "main"

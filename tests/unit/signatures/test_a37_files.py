"""A37: forged model signatures. Files and directories are signed and verified by the publisher's commands: the
specification's round trips."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harness.crypto.signatures import Publisher
from shoal.cli.main import shoal
from shoal.types.codes import Code, ShoalError


def run(*arguments: str | Path, secret: str | None = None) -> str:
    done = CliRunner(env={"SHOAL_KEY_PASSPHRASE": secret}).invoke(shoal, ["model", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def refusal_code(*arguments: str | Path) -> Code:
    with pytest.raises(ShoalError) as caught:
        run(*arguments)
    assert caught.value.refusal.remedy
    return caught.value.code


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """(private, public) as `shoal model key --new` makes them."""
    private, public = tmp_path / "shop-release.pem", tmp_path / "public.pem"
    run("key", private, "--new")
    public.write_text(run("key", private, "--pem"))
    return private, public


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def file_names(signature: Path) -> list[str]:
    payload = json.loads(base64.b64decode(json.loads(signature.read_bytes())["dsseEnvelope"]["payload"]))
    return [each["name"] for each in payload["predicate"]["resources"]]


TREES: Mapping[str, tuple[Mapping[str, bytes], list[str]]] = {
    "one file deep": ({"parts/w.bin": b"1", "model.onnx": b"2"}, ["model.onnx", "parts/w.bin"]),
    "an empty file": ({"empty.bin": b"", "model.onnx": b"2"}, ["empty.bin", "model.onnx"]),
    "any bytes": ({"model.onnx": bytes(range(256))}, ["model.onnx"]),
    "letters of all the world": ({"模型.bin": b"1", "weights.bin": b"2"}, ["weights.bin", "模型.bin"]),
    "spaces and brackets": ({"a b/file (copy).bin": b"1"}, ["a b/file (copy).bin"]),
    "git's own files": (
        {".git/HEAD": b"1", ".github/ci.yml": b"1", ".gitignore": b"1", ".gitattributes": b"1", "m.bin": b"2"},
        ["m.bin"],
    ),
    "git's names deeper are files": (
        {"sub/.gitignore": b"1", "sub/.git/x": b"1", "m.bin": b"2"},
        ["m.bin", "sub/.git/x", "sub/.gitignore"],
    ),
    "other hidden files": (
        {".config": b"1", ".cache/w.bin": b"1", "m.bin": b"2"},
        [".cache/w.bin", ".config", "m.bin"],
    ),
    "what is left out, and nothing like it": (
        {"cache/x": b"1", "sub/cache/y": b"1", "cachet": b"2"},
        ["cachet", "sub/cache/y"],
    ),
}


@pytest.mark.parametrize("case", TREES)
def test_a37_a_directory_is_signed_and_verified(case: str, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    files, names = TREES[case]
    model, signature = write(tmp_path / "model", files), tmp_path / "model.sig"
    run("sign", model, "--key", keys[0], "--ignore", "cache")
    assert file_names(signature) == names
    run("verify", model, "--key", keys[1])


def test_a37_a_file_is_signed_under_its_own_name(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    model = tmp_path / "Receipt Text.onnx"
    model.write_bytes(b"model")
    run("sign", model, "--key", keys[0], "--version", "3", "--expires", "2999-12-31")
    assert file_names(tmp_path / "Receipt Text.onnx.sig") == ["Receipt Text.onnx"]
    told = json.loads(run("verify", model, "--key", keys[1], "-o", "json"))
    assert (told["key"], told["model"], told["version"]) == ("public", "receipt-text", 3)
    assert told["expires"] == "3000-01-01 00:00:00Z"


def test_a37_a_signature_inside_the_model_does_not_sign_itself(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    model = write(tmp_path / "model", {"model.onnx": b"1", "old.bin": b"2"})
    for _ in range(2):
        run("sign", model, "--key", keys[0], "-s", model / "model.sig")
        assert file_names(model / "model.sig") == ["model.onnx", "old.bin"]
        run("verify", model, "--key", keys[1], "-s", model / "model.sig")


def test_a37_signing_twice_lists_the_same(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    model = write(tmp_path / "model", {"model.onnx": b"1", "w.bin": b"2"})
    payloads = set()
    for _ in range(2):
        run("sign", model, "--key", keys[0])
        payloads.add(json.loads((tmp_path / "model.sig").read_bytes())["dsseEnvelope"]["payload"])
    assert len(payloads) == 1


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
def test_a37_each_curve_signs_and_verifies(curve: type[ec.EllipticCurve], tmp_path: Path) -> None:
    publisher = Publisher(ec.generate_private_key(curve()))
    model = write(tmp_path / "model", {"model.onnx": b"1"})
    (tmp_path / "k.pem").write_bytes(publisher.pem)
    (tmp_path / "p.pem").write_text(publisher.key.pem)
    run("sign", model, "--key", tmp_path / "k.pem")
    run("verify", model, "--key", tmp_path / "p.pem")
    assert run("key", tmp_path / "k.pem").strip() == f"{{name: k, key: {publisher.key.key}}}"


def test_a_private_key_may_have_a_passphrase(tmp_path: Path) -> None:
    publisher = Publisher(ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "k.pem").write_bytes(
        publisher.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    model = write(tmp_path / "model", {"model.onnx": b"1"})
    assert refusal_code("sign", model, "--key", tmp_path / "k.pem") is Code.FIELD_INVALID
    run("sign", model, "--key", tmp_path / "k.pem", secret="secret")
    run("key", tmp_path / "new.pem", "--new", secret="secret")
    assert b"ENCRYPTED" in (tmp_path / "new.pem").read_bytes(), "whoever gives a passphrase means it"
    assert refusal_code("sign", model, "--key", tmp_path / "new.pem") is Code.FIELD_INVALID
    run("sign", model, "--key", tmp_path / "new.pem", secret="secret")


CHANGES: Mapping[str, tuple[Mapping[str, bytes], str, bool]] = {
    "tampered": ({"w.bin": b"other"}, "", False),
    "tampered, others allowed": ({"w.bin": b"other"}, "", True),
    "missing": ({}, "w.bin", False),
    "missing, others allowed": ({}, "w.bin", True),
    "injected": ({"injected.bin": b"1"}, "", False),
    "injected deeper": ({"sub/injected.bin": b"1"}, "", False),
    "a weight file for external data": ({"model.onnx.data": b"1"}, "", False),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a37_a_directory_that_changed_since_is_refused(case: str, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    changed, gone, others_allowed = CHANGES[case]
    model = write(tmp_path / "model", {"model.onnx": b"1", "w.bin": b"2"})
    run("sign", model, "--key", keys[0])
    write(model, changed)
    if gone:
        (model / gone).unlink()
    options = ["--ignore-unsigned-files"] if others_allowed else []
    assert refusal_code("verify", model, "--key", keys[1], *options) is Code.SIGNATURE_INVALID


def test_a37_files_beside_the_signed_ones_may_be_allowed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    model = write(tmp_path / "model", {"model.onnx": b"1"})
    run("sign", model, "--key", keys[0])
    write(model, {"notes.txt": b"1"})
    run("verify", model, "--key", keys[1], "--ignore-unsigned-files")


@pytest.mark.parametrize("target", ["w.bin", "../outside.bin", ".", "nowhere", "/dev/null"])
def test_a37_links_are_neither_signed_nor_verified(target: str, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    model = write(tmp_path / "model", {"model.onnx": b"1", "w.bin": b"2"})
    (tmp_path / "outside.bin").write_bytes(b"3")
    run("sign", model, "--key", keys[0], "-s", tmp_path / "before.sig")
    (model / "link").symlink_to(target)
    assert refusal_code("sign", model, "--key", keys[0]) is Code.MODEL_PATH
    assert refusal_code("verify", model, "--key", keys[1], "-s", tmp_path / "before.sig") is Code.MODEL_PATH


def test_a37_another_key_an_expired_signature_and_no_signature_are_refused(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    model = write(tmp_path / "model", {"model.onnx": b"1"})
    assert refusal_code("verify", model, "--key", keys[1]) is Code.SOURCE_UNREACHABLE
    run("sign", model, "--key", keys[0], "--expires", "2020-01-01")
    assert refusal_code("verify", model, "--key", keys[1]) is Code.SIGNATURE_EXPIRED
    (tmp_path / "other.pem").write_text(Publisher(ec.generate_private_key(ec.SECP256R1())).key.pem)
    assert refusal_code("verify", model, "--key", tmp_path / "other.pem") is Code.SIGNATURE_INVALID


@pytest.mark.parametrize("files", [{}, {".gitignore": b"1"}])
def test_a37_a_model_without_files_is_not_signed(
    files: Mapping[str, bytes], tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model, files)
    assert refusal_code("sign", model, "--key", keys[0]) is Code.SOURCE_UNREACHABLE


def test_a_new_key_overwrites_nothing_and_is_its_owners_alone(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    assert keys[0].stat().st_mode & 0o777 == 0o600
    assert refusal_code("key", keys[0], "--new") is Code.CONFLICT
    assert refusal_code("key", tmp_path / "nowhere" / "k.pem", "--new") is Code.SOURCE_UNREACHABLE
    assert refusal_code("key", tmp_path / "nothing.pem") is Code.SOURCE_UNREACHABLE
    assert refusal_code("sign", tmp_path / "nothing", "--key", keys[0]) is Code.SOURCE_UNREACHABLE

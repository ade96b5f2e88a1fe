"""The device's own judgement: what the coordinator sends is verified again, and old versions stay away (A37, A38)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from harness.builders.agent_values import assignment
from harness.crypto.signatures import FILES, Publisher
from harness.fakes.log import RecordingLog
from shoal.agent.cache.publishers import SignatureVerifier, load_keys
from shoal.artifacts.signature_bundle import verify_file
from shoal.types.assignment import Assignment
from shoal.types.codes import Code, ShoalError
from shoal.types.signature import PublisherKey, SignedModel

SHOP = Publisher(ed25519.Ed25519PrivateKey.generate(), "shop-release")
OTHER = Publisher(ec.generate_private_key(ec.SECP256R1()), "other")
OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def signed_assignment(
    digest: str = OLD, bundle: bytes | None = None, *, version: int = 0, by: Publisher = SHOP, allow: int = 0
) -> Assignment:
    made = by.sign_digest(digest, model="ocr", version=version) if bundle is None else bundle
    return replace(assignment(), model=digest, signed=SignedModel(made, (SHOP.key,), allow))


def device(folder: Path, *own: PublisherKey) -> SignatureVerifier:
    return SignatureVerifier(folder / "publishers.json", own, RecordingLog(), verify=verify_file)


def code(publishers: SignatureVerifier, assigned: Assignment) -> Code | None:
    try:
        publishers.check(assigned)
    except ShoalError as error:
        return error.code if error.refusal.remedy else None
    return None


BAD = {
    "by another key": signed_assignment(by=OTHER),
    "of another model": signed_assignment(OLD, SHOP.sign_digest(NEW)),
    "over more files": signed_assignment(OLD, SHOP.sign(FILES)),
    "empty": signed_assignment(OLD, b""),
    "junk": signed_assignment(OLD, b"{}"),
    "no key counts": replace(assignment(), signed=SignedModel(SHOP.sign_digest(OLD), ())),
}


@pytest.mark.parametrize("case", BAD)
def test_a37_a_device_refuses_what_the_publisher_did_not_sign(case: str, tmp_path: Path) -> None:
    assert code(device(tmp_path), BAD[case]) is Code.SIGNATURE_INVALID
    assert not list(tmp_path.iterdir())


def test_a_model_that_needs_no_signature_is_not_judged(tmp_path: Path) -> None:
    assert code(device(tmp_path), assignment()) is None


def test_a38_an_older_version_does_not_come_back_to_a_device(tmp_path: Path) -> None:
    """Whatever the coordinator's store says: the device remembers, over restarts."""
    assert code(device(tmp_path), signed_assignment(OLD, version=1)) is None
    assert code(device(tmp_path), signed_assignment(NEW, version=2)) is None
    for older in (signed_assignment(OLD, version=1), signed_assignment(OLD, version=0)):
        assert code(device(tmp_path), older) is Code.MODEL_ROLLBACK
    assert code(device(tmp_path), signed_assignment(OLD, version=1, allow=2)) is Code.MODEL_ROLLBACK
    assert code(device(tmp_path), signed_assignment(OLD, version=0, allow=0)) is Code.MODEL_ROLLBACK
    assert code(device(tmp_path), signed_assignment(OLD, version=1, allow=1)) is None
    assert code(device(tmp_path), signed_assignment(OLD, version=1)) is Code.MODEL_ROLLBACK
    assert code(device(tmp_path), signed_assignment(NEW, version=2)) is None


def test_a38_each_key_has_versions_of_its_own(tmp_path: Path) -> None:
    publishers = device(tmp_path)
    both = (SHOP.key, OTHER.key)
    theirs = SignedModel(OTHER.sign_digest(NEW, model="ocr", version=9), both)
    assert code(publishers, replace(assignment(), model=NEW, signed=theirs)) is None
    assert code(publishers, signed_assignment(OLD, version=1)) is None


def test_a_version_that_cannot_be_remembered_is_not_loaded(tmp_path: Path) -> None:
    publishers = SignatureVerifier(tmp_path / "gone" / "publishers.json", (), RecordingLog(), verify=verify_file)
    assert code(publishers, signed_assignment(version=1)) is Code.DISK_FULL
    assert code(publishers, signed_assignment(version=0)) is None


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"line": "many"}', b"null"])
def test_a_memory_that_is_corrupt_is_set_aside_and_serving_goes_on(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "publishers.json").write_bytes(content)
    assert code(device(tmp_path), signed_assignment(version=3)) is None
    assert (tmp_path / "publishers.json.corrupt").read_bytes() == content
    assert list(json.loads((tmp_path / "publishers.json").read_bytes()).values()) == [3]


def test_a_device_with_keys_of_its_own_loads_nothing_else(tmp_path: Path) -> None:
    """A coordinator that was taken over names the thief's key, or asks for no signature at all."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "shop.pem").write_text(SHOP.key.pem)
    (keys / "README").write_text("no key")
    publishers = device(tmp_path, *load_keys(keys))
    assert code(publishers, assignment()) is Code.SIGNATURE_REQUIRED
    thief = SignedModel(OTHER.sign_digest(OLD), (OTHER.key,))
    assert code(publishers, replace(assignment(), model=OLD, signed=thief)) is Code.SIGNATURE_INVALID
    assert code(publishers, signed_assignment()) is None


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", SHOP.pem])
def test_a_folder_of_own_keys_that_holds_none_stops_the_start(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "shop.pem").write_bytes(content)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ShoalError) as caught:
            load_keys(folder)
        assert caught.value.code is Code.FIELD_INVALID

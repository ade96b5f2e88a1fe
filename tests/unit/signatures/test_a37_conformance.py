"""A37: forged model signatures, by the cases that the OpenSSF specification's sections ask for, one row each.

A row changes one thing of a bundle that verifies, or of the model beside it. `resign` rows sign what they changed, so
that only the rule under test can refuse them.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from harness.crypto.signatures import FILES, PRESENT, Publisher, envelope, sign_statement, statement
from harness.report import record
from shoal.artifacts import signature_bundle as bundles
from shoal.types.codes import Code, ShoalError
from shoal.types.signature import PublisherKey, SignedFile, VerifiedSignature, parse_key

Json = dict[str, Any]
SIGNATURES = Path(__file__).parents[2] / "data" / "signatures"

P256, P384, P521 = (Publisher(ec.generate_private_key(curve())) for curve in (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1))
ED25519 = Publisher(ed25519.Ed25519PrivateKey.generate())
STRANGER = Publisher(ec.generate_private_key(ec.SECP256R1()), "stranger")
GOOD = P256.sign(FILES)
NOTHING = base64.b64encode(P256.sign_bytes(b"")).decode()


def verify_refusal(content: bytes, *keys: PublisherKey, most: int = bundles.BUNDLE_BYTES) -> str:
    with pytest.raises(ShoalError) as caught:
        bundles.verify(content, keys or (P256.key,), most=most)
    assert caught.value.code is Code.SIGNATURE_INVALID
    assert caught.value.refusal.found
    assert caught.value.refusal.asked
    assert caught.value.refusal.remedy
    return str(caught.value.refusal)


def change_bundle(change: Callable[[Json], Any]) -> bytes:
    """The good bundle with its outside changed; the signature stays."""
    found: Json = json.loads(GOOD)
    change(found)
    return json.dumps(found).encode()


def change_statement(change: Callable[[Json], Any]) -> bytes:
    """The good bundle with its statement changed, and signed again."""
    found = statement(GOOD)
    change(found)
    return sign_statement(found, P256)


@pytest.mark.parametrize("publisher", [P256, P384, P521, ED25519], ids=["p256", "p384", "p521", "ed25519"])
def test_a37_what_each_kind_of_key_signed_is_verified(publisher: Publisher) -> None:
    key, signed = bundles.verify(publisher.sign(FILES), [STRANGER.key, publisher.key])
    assert key == publisher.key
    assert signed.fingerprint == publisher.key.fingerprint
    assert signed.files == tuple(sorted(FILES, key=lambda file: file.name))
    bundles.check_files(signed, PRESENT)


ACCEPTED: Mapping[str, Callable[[Json], Any]] = {
    "keyid absent": lambda b: envelope(b)["signatures"][0].pop("keyid"),
    "keyid null": lambda b: envelope(b)["signatures"][0].update(keyid=None),
    "no hint, raw bytes of before 1.1": lambda b: b.update(verificationMaterial={"publicKey": {"rawBytes": "AAAA"}}),
    "hint is the digest of the DER": lambda b: b["verificationMaterial"]["publicKey"].update(hint=P256.key.fingerprint),
    "no tlogEntries": lambda b: b["verificationMaterial"].pop("tlogEntries"),
    "timestamps beside": lambda b: b["verificationMaterial"].update(timestampVerificationData={}),
}


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_a37_what_older_and_other_signers_write_is_accepted(case: str) -> None:
    key, _ = bundles.verify(change_bundle(ACCEPTED[case]), [P256.key])
    assert key == P256.key


ACCEPTED_STATEMENTS: Mapping[str, Callable[[Json], Any]] = {
    "no ignore_paths": lambda s: s["predicate"]["serialization"].pop("ignore_paths"),
    "another subject's name": lambda s: s["subject"][0].update(name="model"),
    "symlinks were followed": lambda s: s["predicate"]["serialization"].update(allow_symlinks=True),
    "unknown fields of a resource": lambda s: s["predicate"]["resources"][0].update(uri="x", annotations={}),
    "unknown fields of the predicate": lambda s: s["predicate"].update(model_card="x"),
    "annotations of others": lambda s: s["subject"][0].update(annotations={"other/tool": 1}),
}


@pytest.mark.parametrize("case", ACCEPTED_STATEMENTS, ids=str)
def test_a37_fields_that_others_may_add_change_nothing(case: str) -> None:
    _, signed = bundles.verify(change_statement(ACCEPTED_STATEMENTS[case]), [P256.key])
    bundles.check_files(signed, PRESENT)


REFUSED: Mapping[str, Callable[[Json], Any]] = {
    "media type of another version": lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.1+json"),
    "media type missing": lambda b: b.pop("mediaType"),
    "media type of another thing": lambda b: b.update(mediaType="application/json"),
    "no verification material": lambda b: b.pop("verificationMaterial"),
    "certificate method": lambda b: b.update(verificationMaterial={"x509CertificateChain": {"certificates": [{}]}}),
    "sigstore method": lambda b: b.update(verificationMaterial={"certificate": {"rawBytes": "AAAA"}}),
    "key and certificate": lambda b: b["verificationMaterial"].update(certificate={"rawBytes": "AAAA"}),
    "hint of another key": lambda b: b["verificationMaterial"]["publicKey"].update(hint=STRANGER.key.fingerprint),
    "hint that is a number": lambda b: b["verificationMaterial"]["publicKey"].update(hint=7),
    "no envelope": lambda b: b.pop("dsseEnvelope"),
    "a message signature instead": lambda b: b.update(messageSignature=b.pop("dsseEnvelope")),
    "a message signature beside": lambda b: b.update(messageSignature={}),
    "envelope is a list": lambda b: b.update(dsseEnvelope=[b["dsseEnvelope"]]),
    "payload type changed": lambda b: envelope(b).update(payloadType="application/octet-stream"),
    "payload type missing": lambda b: envelope(b).pop("payloadType"),
    "payload missing": lambda b: envelope(b).pop("payload"),
    "payload empty": lambda b: envelope(b).update(payload=""),
    "payload is no base64": lambda b: envelope(b).update(payload="!" + envelope(b)["payload"]),
    "payload with a line break": lambda b: envelope(b).update(payload=envelope(b)["payload"] + "\n"),
    "no signatures": lambda b: envelope(b).update(signatures=[]),
    "signatures missing": lambda b: envelope(b).pop("signatures"),
    "two signatures": lambda b: envelope(b)["signatures"].append(envelope(b)["signatures"][0]),
    "empty signature": lambda b: envelope(b)["signatures"][0].update(sig=""),
    "signature cut": lambda b: envelope(b)["signatures"][0].update(sig=envelope(b)["signatures"][0]["sig"][:40]),
    "signature of nothing": lambda b: envelope(b)["signatures"][0].update(
        sig=base64.b64encode(P256.sign_bytes(b"")).decode()
    ),
    "keyid that is a list": lambda b: envelope(b)["signatures"][0].update(keyid=[]),
    "unknown field of the envelope": lambda b: envelope(b).update(payload2="x"),
    "unknown field of the bundle": lambda b: b.update(extra=1),
}


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a37_a_changed_bundle_is_refused(case: str) -> None:
    verify_refusal(change_bundle(REFUSED[case]))


REFUSED_STATEMENTS: Mapping[str, Callable[[Json], Any]] = {
    "statement of another version": lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"),
    "statement without type": lambda s: s.pop("_type"),
    "predicate of another type": lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"),
    "the deprecated predicate": lambda s: s.update(predicateType="https://model_signing/Digests/v0.1"),
    "no predicate": lambda s: s.pop("predicate"),
    "no subject": lambda s: s.update(subject=[]),
    "two subjects": lambda s: s["subject"].append(s["subject"][0]),
    "no root digest": lambda s: s["subject"][0].pop("digest"),
    "root digest of others": lambda s: s["subject"][0]["digest"].update(sha256="0" * 64),
    "no resources": lambda s: s["predicate"].update(resources=[]),
    "resources missing": lambda s: s["predicate"].pop("resources"),
    "resources reordered": lambda s: s["predicate"]["resources"].reverse(),
    "a resource twice": lambda s: s["predicate"]["resources"].append(s["predicate"]["resources"][-1]),
    "no serialization": lambda s: s["predicate"].pop("serialization"),
    "shards": lambda s: s["predicate"]["serialization"].update(method="shards", shard_size=1024),
    "a shard size with files": lambda s: s["predicate"]["serialization"].update(shard_size=1024),
    "an unknown method": lambda s: s["predicate"]["serialization"].update(method="tree"),
    "digests of another kind": lambda s: s["predicate"]["serialization"].update(hash_type="md5"),
    "blake2b": lambda s: s["predicate"]["serialization"].update(hash_type="blake2b"),
    "a resource of another algorithm": lambda s: s["predicate"]["resources"][0].update(algorithm="sha1"),
    "a resource without algorithm": lambda s: s["predicate"]["resources"][0].pop("algorithm"),
    "symlinks untold": lambda s: s["predicate"]["serialization"].pop("allow_symlinks"),
    "symlinks as a text": lambda s: s["predicate"]["serialization"].update(allow_symlinks="false"),
    "ignore_paths upwards": lambda s: s["predicate"]["serialization"].update(ignore_paths=["../x"]),
    "ignore_paths is a text": lambda s: s["predicate"]["serialization"].update(ignore_paths="x"),
    "a digest too short": lambda s: s["predicate"]["resources"][0].update(digest="ab"),
    "a digest in capitals": lambda s: s["predicate"]["resources"][0].update(digest="AB" * 32),
    "a digest as a set": lambda s: s["predicate"]["resources"][0].update(digest={"sha256": "ab" * 32}),
    "an absolute path": lambda s: s["predicate"]["resources"][0].update(name="/etc/passwd"),
    "a path upwards": lambda s: s["predicate"]["resources"][0].update(name="a/../../b"),
    "a path with a dot": lambda s: s["predicate"]["resources"][0].update(name="./a"),
    "a path with two slashes": lambda s: s["predicate"]["resources"][0].update(name="a//b"),
    "a path that ends in a slash": lambda s: s["predicate"]["resources"][0].update(name="a/"),
    "a path with NUL": lambda s: s["predicate"]["resources"][0].update(name="a\0b"),
    "an empty path": lambda s: s["predicate"]["resources"][0].update(name=""),
    "no path": lambda s: s["predicate"]["resources"][0].pop("name"),
    "a resource that is a text": lambda s: s["predicate"].update(resources=["model.onnx"]),
    "a version that is a text": lambda s: s["subject"][0].update(annotations={"shoal/version": "2"}),
    "a version below zero": lambda s: s["subject"][0].update(annotations={"shoal/version": -1}),
    "a version that is true": lambda s: s["subject"][0].update(annotations={"shoal/version": True}),
    "a version past 2^53": lambda s: s["subject"][0].update(annotations={"shoal/version": 2**60}),
    "an end that is no time": lambda s: s["subject"][0].update(annotations={"shoal/expires": "tomorrow"}),
    "an end without its zone": lambda s: s["subject"][0].update(annotations={"shoal/expires": "2027-01-31T00:00:00"}),
    "a model without name": lambda s: s["subject"][0].update(annotations={"shoal/model": ""}),
    "a model with a line break": lambda s: s["subject"][0].update(annotations={"shoal/model": "a\nb"}),
}


@pytest.mark.parametrize("case", REFUSED_STATEMENTS, ids=str)
def test_a37_a_statement_that_breaks_a_rule_is_refused_though_it_is_signed(case: str) -> None:
    verify_refusal(change_statement(REFUSED_STATEMENTS[case]))


TEXTS: Mapping[str, bytes] = {
    "empty": b"",
    "truncated": GOOD[:100],
    "its last byte missing": GOOD[:-1],
    "garbled": b"\x80\x81" + GOOD,
    "UTF-16": GOOD.decode().encode("utf-16"),
    "a list": b"[]",
    "a key twice": GOOD.replace(b'{"mediaType"', b'{"mediaType": "x", "mediaType"', 1),
    "NaN": GOOD.replace(b'"tlogEntries": []', b'"tlogEntries": NaN'),
    "deep": b'{"mediaType":' + b"[" * 20_000,
    "too large": GOOD + b" " * bundles.BUNDLE_BYTES,
}


@pytest.mark.parametrize("case", TEXTS, ids=str)
def test_a37_a_text_that_is_no_bundle_is_refused(case: str) -> None:
    verify_refusal(TEXTS[case])


def test_a37_the_payload_type_is_part_of_what_is_signed() -> None:
    payload = json.dumps(statement(GOOD)).encode()
    other = "application/octet-stream"
    verify_refusal(
        bundles.enclose(payload, P256.sign_bytes(bundles.pre_auth_encoding(other, payload)), P256.key, other)
    )
    verify_refusal(bundles.enclose(payload, P256.sign_bytes(bundles.pre_auth_encoding(other, payload)), P256.key))


def test_a37_another_key_or_none_is_refused() -> None:
    assert "stranger" in verify_refusal(GOOD, STRANGER.key)
    with pytest.raises(ShoalError):
        bundles.verify(GOOD, [])


def test_a37_a_signature_under_anothers_hint_is_refused() -> None:
    """The stranger signs and says that the publisher did."""
    payload = json.dumps(statement(GOOD)).encode()
    verify_refusal(
        bundles.enclose(
            payload, STRANGER.sign_bytes(bundles.pre_auth_encoding(bundles.PAYLOAD_TYPE, payload)), P256.key
        )
    )


def test_a37_another_algorithm_on_the_same_key_is_refused() -> None:
    """ECDSA with the wrong hash for its curve, and RSA-style confusion by a key of another kind."""
    payload = json.dumps(statement(GOOD)).encode()
    content = bundles.pre_auth_encoding(bundles.PAYLOAD_TYPE, payload)
    assert isinstance(P256.private_key, ec.EllipticCurvePrivateKey)
    weak = P256.private_key.sign(content, ec.ECDSA(hashes.SHA512()))
    verify_refusal(bundles.enclose(payload, weak, P256.key))
    verify_refusal(bundles.enclose(payload, ED25519.sign_bytes(content), P256.key), P256.key, ED25519.key)


def test_a37_the_payload_of_another_bundle_under_this_signature_is_refused() -> None:
    other = P256.sign([SignedFile("model.onnx", "ef" * 32)])
    mixed = json.loads(GOOD)
    mixed["dsseEnvelope"]["payload"] = json.loads(other)["dsseEnvelope"]["payload"]
    verify_refusal(json.dumps(mixed).encode())


def meaning(content: bytes) -> VerifiedSignature | Code:
    try:
        return bundles.verify(content, [P256.key])[1]
    except ShoalError as error:
        return error.code


def test_a37_no_changed_bit_is_accepted_with_another_meaning() -> None:
    """Each byte in turn: refused, or it says exactly what was signed (a space, an empty list of log entries)."""
    said = meaning(GOOD)
    found = [meaning(GOOD[:at] + bytes([byte ^ 1]) + GOOD[at + 1 :]) for at, byte in enumerate(GOOD)]
    assert set(found) <= {said, Code.SIGNATURE_INVALID}
    record("A37", "I", runs=len(GOOD), refused=found.count(Code.SIGNATURE_INVALID))


MODELS: Mapping[str, tuple[dict[str, str], bool]] = {
    "tampered": ({**PRESENT, "weights.bin": "00" * 32}, False),
    "tampered, others allowed": ({**PRESENT, "weights.bin": "00" * 32}, True),
    "missing": ({name: PRESENT[name] for name in PRESENT if name != "weights.bin"}, False),
    "missing, others allowed": ({name: PRESENT[name] for name in PRESENT if name != "weights.bin"}, True),
    "external data that is not listed": ({**PRESENT, "more.bin": "11" * 32}, False),
    "renamed": ({("Model.onnx" if name == "model.onnx" else name): PRESENT[name] for name in PRESENT}, True),
    "swapped": ({**PRESENT, "model.onnx": PRESENT["weights.bin"], "weights.bin": PRESENT["model.onnx"]}, False),
    "empty": ({}, False),
}


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_a37_other_files_than_the_signed_ones_are_refused(case: str) -> None:
    present, others_allowed = MODELS[case]
    _, signed = bundles.verify(GOOD, [P256.key])
    with pytest.raises(ShoalError) as caught:
        bundles.check_files(signed, present, others_allowed=others_allowed)
    assert caught.value.code is Code.SIGNATURE_INVALID


def test_a37_files_beside_the_model_may_be_allowed() -> None:
    _, signed = bundles.verify(GOOD, [P256.key])
    bundles.check_files(signed, {**PRESENT, "cache.bin": "11" * 32}, others_allowed=True)


def test_a37_a_region_stores_one_file_and_takes_a_signature_over_that_file_alone() -> None:
    digest = "sha256:" + "ab" * 32
    _, alone = bundles.verify(P256.sign([SignedFile("model.onnx", "ab" * 32)]), [P256.key])
    bundles.check_file(alone, digest)
    for signed, asked in ((alone, "sha256:" + "cd" * 32), (bundles.verify(GOOD, [P256.key])[1], digest)):
        with pytest.raises(ShoalError) as caught:
            bundles.check_file(signed, asked)
        assert caught.value.code is Code.SIGNATURE_INVALID


def test_a37_what_the_reference_implementation_signed_is_verified() -> None:
    """Signed by model-signing 1.1.1 (P-256, bare key) over a directory of two files."""
    key = PublisherKey("reference", parse_key((SIGNATURES / "publisher.pem").read_text()))
    _, signed = bundles.verify((SIGNATURES / "model-signing-1.1.1.sig").read_bytes(), [key])
    present = {"model.onnx": b"graph", "weights.bin": b"weights"}
    bundles.check_files(signed, {name: hashlib.sha256(content).hexdigest() for name, content in present.items()})
    assert (signed.model, signed.version, signed.expires_at) == ("model", 0, None)
    assert set(signed.ignored) == set(bundles.DEFAULT_IGNORED)

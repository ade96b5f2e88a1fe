"""Publishers' keys as documents carry them; bundles that sign what they say; versions that may not go back."""

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from harness.crypto.signatures import Publisher
from shoal.artifacts import signature_bundle as bundles
from shoal.types.codes import Code, ShoalError
from shoal.types.signature import PublisherKey, SignedFile, VerifiedSignature, check_rollback, parse_key
from shoal.types.units import Wall

ED25519 = Publisher(ed25519.Ed25519PrivateKey.generate())


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1, None])
def test_a_key_is_the_same_as_pem_and_on_one_line(curve: type[ec.EllipticCurve] | None) -> None:
    private = ed25519.Ed25519PrivateKey.generate() if curve is None else ec.generate_private_key(curve())
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()  # fmt: skip
    key = PublisherKey("shop", parse_key(pem))
    assert parse_key(key.key) == key.key
    assert parse_key(f"\n{pem}\n") == key.key
    assert key.pem == pem


RSA = rsa.generate_private_key(65537, 2048).public_key()
WRONG: dict[str, str | ec.EllipticCurvePublicKey | rsa.RSAPublicKey] = {
    "empty": "",
    "no base64": "not a key!",
    "cut": ED25519.key.key[:-8],
    "longer": parse_key(ED25519.key.key)[:-1] + "AAAA=",
    "another curve": ec.generate_private_key(ec.SECP256K1()).public_key(),
    "RSA": RSA,
    "a private key": ED25519.pem.decode(),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_publishers_key_is_refused(case: str) -> None:
    found = WRONG[case]
    if not isinstance(found, str):
        found = found.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(ShoalError) as caught:
        parse_key(found)
    assert caught.value.code is Code.FIELD_INVALID
    assert not found or found[:12] not in str(caught.value.refusal), "it may be a secret"


def test_a_private_key_that_signs_no_models_is_refused() -> None:
    pem = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for content in (pem, b"nothing"):
        with pytest.raises(ShoalError) as caught:
            bundles.load_signing_key(content, None)
        assert caught.value.code is Code.FIELD_INVALID


def test_a_bundle_says_its_model_version_and_end() -> None:
    _, signed = bundles.verify(
        ED25519.sign_digest("sha256:" + "ab" * 32, model="reader", version=7, expires_at=Wall(1_800_000_000.0)),
        [ED25519.key],
    )
    assert (signed.model, signed.version, signed.expires_at) == ("reader", 7, 1_800_000_000.0)
    assert signed.lineage == f"{ED25519.key.fingerprint}/reader"


@pytest.mark.parametrize(
    ("version", "newest", "allowed", "may"),
    [
        (3, 0, (), True),
        (3, 3, (), True),
        (4, 3, (), True),
        (2, 3, (), False),
        (0, 3, (), False),
        (2, 3, (2,), True),
        (2, 3, (1,), False),
        (0, 0, (), True),
    ],
)
def test_a38_an_older_version_is_refused_unless_it_is_allowed(
    version: int, newest: int, allowed: tuple[int, ...], may: bool
) -> None:
    signed = VerifiedSignature("f" * 64, "reader", version, None, (SignedFile("m", "ab" * 32),))
    refusal = check_rollback(signed, newest, frozenset(allowed))
    assert (refusal is None) is may
    assert refusal is None or (refusal.code is Code.MODEL_ROLLBACK and f"--allow {version}" in refusal.remedy)

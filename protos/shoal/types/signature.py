"""Publishers' signatures of models: keys as documents name them, and what a verified signature states."""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Final

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.units import Wall

_ARMOUR: Final = re.compile(r"\s*-----BEGIN PUBLIC KEY-----\s([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*")
_SHAPES: Final = (
    (bytes.fromhex("302a300506032b6570032100"), 44),
    (bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004"), 91),
    (bytes.fromhex("3076301006072a8648ce3d020106052b8104002203620004"), 120),
    (bytes.fromhex("30819b301006072a8648ce3d020106052b810400230381860004"), 158),
)
"""Prefix and length of a SubjectPublicKeyInfo (DER): Ed25519 (RFC 8410); P-256, P-384 and P-521 with uncompressed
points (RFC 5480)."""


@dataclass(frozen=True, slots=True)
class PublisherKey:
    """A key that models may be signed with, under the name that policies use."""

    name: str
    # As `parse_key` returns it.
    key: str

    @property
    def der(self) -> bytes:
        return base64.b64decode(self.key)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the DER, hex."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def pem(self) -> str:
        lines = "".join(f"{self.key[start : start + 64]}\n" for start in range(0, len(self.key), 64))
        return f"-----BEGIN PUBLIC KEY-----\n{lines}-----END PUBLIC KEY-----\n"


@dataclass(frozen=True, slots=True)
class SignedModel:
    """What a node needs to check a model's signature by itself."""

    # OpenSSF model signature (JSON), as it was pushed.
    bundle: bytes
    # Keys, one of which must have made the signature.
    keys: tuple[PublisherKey, ...]
    # A version that the region allows although a newer version of its model is known; 0: none.
    allow_version: int = 0


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A file that a signature covers."""

    # Relative to the model's root, with `/` between its parts.
    name: str
    # Hex.
    sha256: str


@dataclass(frozen=True, slots=True)
class VerifiedSignature:
    """What a verified signature states."""

    # SHA-256 (hex) of the key that made it.
    fingerprint: str
    # The publisher's name of the model: versions of one name are versions of one model.
    model: str
    # Orders versions of the model; 0 where the publisher gave none.
    version: int
    # None: never.
    expires_at: Wall | None
    # Files that the signature covers.
    files: tuple[SignedFile, ...]
    # Paths that the publisher excluded from the signature.
    ignored: tuple[str, ...] = ()

    @property
    def lineage(self) -> str:
        """Key under which the newest known version is stored: the publisher's key and the model's name."""
        return f"{self.fingerprint}/{self.model}"


def parse_key(text: str) -> str:
    """Base64 (one line) of the DER of a public key, from its PEM or from that base64.

    Ed25519, ECDSA P-256, P-384 and P-521. Raises ShoalError(FIELD_INVALID).
    """
    if "PRIVATE KEY" in text:
        raise _invalid_key("a private key, which stays with its owner")
    armoured = _ARMOUR.fullmatch(text)
    body = "".join((armoured[1] if armoured else text).split())
    try:
        der = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as cause:
        # not shown: it may be the rest of a private key
        raise _invalid_key(f"{len(text)} characters that are no key") from cause
    if not any(der.startswith(prefix) and len(der) == size for prefix, size in _SHAPES):
        raise _invalid_key(f"{len(der)} bytes of another kind of key")
    return base64.b64encode(der).decode()


def check_rollback(signed: VerifiedSignature, newest: int, allowed: frozenset[int]) -> Refusal | None:
    """Why a version may not run where `newest` of the same lineage is known; None: it may. `allowed`: versions that may
    run although they are older."""
    if signed.version >= newest or signed.version in allowed:
        return None
    return Refusal(
        Code.MODEL_ROLLBACK,
        f"{signed.model} version {signed.version}, by key {signed.fingerprint[:16]}",
        f"version {newest} or newer, the newest that was seen here",
        f"use that version, or let this one back: shoal model clear {signed.model} --allow {signed.version}",
    )


def _invalid_key(found: str) -> ShoalError:
    return refuse(
        Code.FIELD_INVALID,
        found,
        "a public key: Ed25519, or ECDSA on P-256, P-384 or P-521; PEM, or its base64 on one line",
        "`shoal model key FILE.pem` prints it",
    )

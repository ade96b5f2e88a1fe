"""Publishers' signatures of models: keys as documents name them, and what a signature that was verified says."""

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
"""How a SubjectPublicKeyInfo (DER) begins and how long it is: Ed25519 (RFC 8410); P-256, P-384 and P-521 with
uncompressed points (RFC 5480)."""


@dataclass(frozen=True, slots=True)
class PublisherKey:
    """A key that models may be signed with, under the name that policies give it. key: as `parse_key` returns it."""

    name: str
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
    """What a node needs to judge a model by itself. bundle: an OpenSSF model signature (JSON), as it was pushed.

    keys: one of these must have made it. allow_version: a version that the region lets run although it is older than
    the newest that is known of its model; 0: none.
    """

    bundle: bytes
    keys: tuple[PublisherKey, ...]
    allow_version: int = 0


@dataclass(frozen=True, slots=True)
class SignedFile:
    """name: relative to the model's root, `/` between its parts. sha256: hex."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Signed:
    """What a verified signature says. fingerprint: of the key that made it. model, version: what counts as the same
    model, and how old it is; version 0 where the publisher gave none. expires_at None: never."""

    fingerprint: str
    model: str
    version: int
    expires_at: Wall | None
    files: tuple[SignedFile, ...]
    ignored: tuple[str, ...] = ()
    """Paths beside the files that the publisher left out."""

    @property
    def line(self) -> str:
        """Under what a newest version is remembered: a publisher's key and the model's name."""
        return f"{self.fingerprint}/{self.model}"


def parse_key(text: str) -> str:
    """Base64 (one line) of the DER of a public key, from its PEM or from that base64.

    Ed25519, ECDSA P-256, P-384 and P-521. Raises ShoalError(FIELD_INVALID).
    """
    if "PRIVATE KEY" in text:
        raise _no_key("a private key, which stays with its owner")
    armoured = _ARMOUR.fullmatch(text)
    body = "".join((armoured[1] if armoured else text).split())
    try:
        der = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as cause:
        # not shown: it may be what is left of a private key
        raise _no_key(f"{len(text)} characters that are no key") from cause
    if not any(der.startswith(prefix) and len(der) == size for prefix, size in _SHAPES):
        raise _no_key(f"{len(der)} bytes of another kind of key")
    return base64.b64encode(der).decode()


def rollback(signed: Signed, newest: int, allowed: frozenset[int]) -> Refusal | None:
    """Why a version may not run where `newest` of the same line is known; `allowed`: versions that may nevertheless."""
    if signed.version >= newest or signed.version in allowed:
        return None
    return Refusal(
        Code.MODEL_ROLLBACK,
        f"{signed.model} version {signed.version}, by key {signed.fingerprint[:16]}",
        f"version {newest} or newer, the newest that was seen here",
        f"use that version, or let this one back: shoal model clear {signed.model} --allow {signed.version}",
    )


def _no_key(found: str) -> ShoalError:
    return refuse(
        Code.FIELD_INVALID,
        found,
        "a public key: Ed25519, or ECDSA on P-256, P-384 or P-521; PEM, or its base64 on one line",
        "`shoal model key FILE.pem` prints it",
    )

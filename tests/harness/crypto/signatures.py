"""Publishers of models for tests, and their bundles taken apart."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.artifacts import signature_bundle as bundles
from shoal.types.signature import PublisherKey, SignedFile
from shoal.types.units import Wall

FILES: Final = (
    SignedFile("weights.bin", "cd" * 32),
    SignedFile("model.onnx", "ab" * 32),
    SignedFile("parts/adapter one.bin", "12" * 32),
)
PRESENT: Final[Mapping[str, str]] = {file.name: file.sha256 for file in FILES}
_HASHES: Final[Mapping[int, hashes.HashAlgorithm]] = {
    256: hashes.SHA256(),
    384: hashes.SHA384(),
    521: hashes.SHA512(),
}


@dataclass(frozen=True)
class Publisher:
    """One that signs models with a key of its own."""

    private_key: bundles.SigningKey
    name: str = "publisher"

    @property
    def key(self) -> PublisherKey:
        return bundles.publisher_key(self.name, self.private_key)

    @property
    def pem(self) -> bytes:
        """The private key, unencrypted."""
        return self.private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def sign(
        self, files: Sequence[SignedFile], *, model: str = "", version: int = 0, expires_at: Wall | None = None
    ) -> bytes:
        return bundles.sign(self.private_key, "model", files, model=model, version=version, expires_at=expires_at)

    def sign_digest(self, digest: str, *, model: str = "", version: int = 0, expires_at: Wall | None = None) -> bytes:
        """Over one file of this digest (`sha256:HEX`)."""
        file = SignedFile("model.onnx", digest.removeprefix("sha256:"))
        return self.sign([file], model=model, version=version, expires_at=expires_at)

    def sign_bytes(self, content: bytes) -> bytes:
        """A bare signature over `content`."""
        if isinstance(self.private_key, ec.EllipticCurvePrivateKey):
            return self.private_key.sign(content, ec.ECDSA(_HASHES[self.private_key.curve.key_size]))
        return self.private_key.sign(content)


def envelope(bundle: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = bundle["dsseEnvelope"]
    return found


def statement(bundle: bytes) -> dict[str, Any]:
    """What a bundle's payload says."""
    found: dict[str, Any] = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
    return found


def sign_statement(changed: Mapping[str, Any], publisher: Publisher) -> bytes:
    """A bundle with this statement, signed as it should be."""
    payload = json.dumps(changed).encode()
    made = publisher.sign_bytes(bundles.pre_auth_encoding(bundles.PAYLOAD_TYPE, payload))
    return bundles.enclose(payload, made, publisher.key)

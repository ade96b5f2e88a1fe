"""Envelopes between agent and coordinator over a broker that is not trusted.

What is retained, and what begins a session, is signed by its sender's certificate key (`Signed`). Everything else of a
session carries a MAC under a key that only its two ends know (`Sealed`): HKDF-SHA256 of an ephemeral P-256 agreement,
whose public halves travel in the signed hello and welcome. Both name region, node and channel, so nothing can be moved;
sealed messages also name epoch and a sequence number, so nothing can be repeated or put back.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError, Message

from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import mqtt_pb2
from shoal.wire import signing
from shoal.wire.identity import UNREADABLE
from shoal.wire.limits import LINK_BYTES
from shoal.wire.topics import Channel

MAC_BYTES: Final = 32
KEY_BYTES: Final = 65
"""An uncompressed P-256 point."""
ENVELOPE_BYTES: Final = 4096
"""What a signed envelope may add to its content: a certificate, mostly."""
MOST_SEQUENCE: Final = 2**63 - 1
_DOMAIN: Final = b"shoal/v1/sealed"

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Raises ShoalError(MESSAGE_INVALID | TOO_LARGE)."""
    if len(data) > LINK_BYTES + ENVELOPE_BYTES:
        raise refuse(Code.TOO_LARGE, f"{len(data)} bytes", f"at most {LINK_BYTES}", "report less at once")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as cause:
        raise _invalid(f"bytes that are no {kind.__name__}") from cause
    return message


@dataclass(frozen=True, slots=True)
class Signature:
    """Who signs: the key, and its certificate as DER."""

    key: ec.EllipticCurvePrivateKey
    certificate: bytes

    @classmethod
    def of_pem(cls, key_pem: bytes, certificate_pem: bytes) -> "Signature":
        """Raises ShoalError(UNAUTHENTICATED)."""
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except ValueError as cause:
            raise refuse(Code.UNAUTHENTICATED, "unreadable identity files", "a key and its certificate") from cause
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "ECDSA P-256", "enrol again")
        return cls(key, certificate.public_bytes(serialization.Encoding.DER))


def sign(signature: Signature, region: str, node: str, channel: Channel, content: bytes) -> bytes:
    """node: empty for what the region's coordinator says to all."""
    return mqtt_pb2.Signed(
        content=content,
        signature=signing.sign(signature.key, region, node, channel, content),
        certificate=signature.certificate,
    ).SerializeToString()


Trust = Callable[[x509.Certificate], None]
"""Whether this certificate may sign here; raises ShoalError(CERT_* | ROLE_DENIED | NODE_MISMATCH | ...)."""


def open_signed(data: bytes, trust: Trust, region: str, node: str, channel: Channel) -> tuple[bytes, x509.Certificate]:
    """The content and its signer. Raises ShoalError(MESSAGE_INVALID | TOO_LARGE | SIGNATURE_INVALID | ...)."""
    message = parse(mqtt_pb2.Signed, data)
    try:
        certificate = x509.load_der_x509_certificate(message.certificate)
    except UNREADABLE as cause:
        raise _invalid("an unreadable certificate") from cause
    trust(certificate)
    signing.verify(certificate, message.signature, region, node, channel, message.content)
    return message.content, certificate


class Ephemeral:
    """One end's half of a session key; used once."""

    def __init__(self) -> None:
        self._private = ec.generate_private_key(ec.SECP256R1())
        self.public: bytes = self._private.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        )

    def agree(self, other: bytes, *, region: str, node: str, nonce: str) -> bytes:
        """The key of the session whose hello carries `nonce`; both ends get the same 32 bytes.

        Raises ShoalError(MESSAGE_INVALID) when `other` is no point of the curve.
        """
        try:
            public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), other)
        except ValueError as cause:
            raise _invalid("a session key that is no point of P-256") from cause
        halves = b"".join(sorted((self.public, other)))
        info = signing.envelope(region, node, "session", halves)
        kdf = HKDF(algorithm=hashes.SHA256(), length=MAC_BYTES, salt=nonce.encode(), info=info)
        return kdf.derive(self._private.exchange(ec.ECDH(), public))


@dataclass(frozen=True, slots=True)
class SessionKey:
    """What both ends of one session know. epoch: as the welcome said."""

    key: bytes
    region: str
    node: str
    epoch: int

    def mac(self, channel: Channel, sequence: int, content: bytes, *, last: bool) -> bytes:
        numbers = self.epoch.to_bytes(8, "big") + sequence.to_bytes(8, "big") + bytes([last])
        envelope = signing.envelope(self.region, self.node, channel, numbers + content)
        return hmac.digest(self.key, _DOMAIN + envelope, "sha256")


class Sealer:
    """Seals what one end sends in one session."""

    def __init__(self, key: SessionKey) -> None:
        self._key = key
        self._sequence = 0

    def seal(self, channel: Channel, content: bytes, *, last: bool = False) -> bytes:
        """Raises ShoalError(TOO_LARGE)."""
        if len(content) > LINK_BYTES:
            raise refuse(Code.TOO_LARGE, f"{len(content)} bytes", f"at most {LINK_BYTES}", "report less at once")
        self._sequence += 1
        return mqtt_pb2.Sealed(
            epoch=self._key.epoch,
            sequence=self._sequence,
            content=content,
            mac=self._key.mac(channel, self._sequence, content, last=last),
            last=last,
        ).SerializeToString()


@dataclass(frozen=True, slots=True)
class Unsealed:
    """last: the session ends with this message."""

    content: bytes
    last: bool


class Opener:
    """Opens what one end receives in one session. A message that is refused changes nothing here."""

    def __init__(self, key: SessionKey) -> None:
        self._key = key
        self._sequences: dict[Channel, int] = {}

    def open(self, channel: Channel, data: bytes) -> Unsealed:
        """Raises ShoalError(MESSAGE_INVALID | TOO_LARGE | EPOCH_STALE | SIGNATURE_INVALID | MESSAGE_REPLAYED)."""
        message = parse(mqtt_pb2.Sealed, data)
        if message.epoch != self._key.epoch:
            raise refuse(
                Code.EPOCH_STALE, f"epoch {message.epoch}", f"epoch {self._key.epoch}", "it is of another session"
            )
        if not 0 < message.sequence <= MOST_SEQUENCE:
            raise _invalid(f"sequence {message.sequence}")
        mac = self._key.mac(channel, message.sequence, message.content, last=message.last)
        if not hmac.compare_digest(mac, message.mac):
            raise refuse(
                Code.SIGNATURE_INVALID,
                f"a {channel} that was not sealed by the other end",
                "its own seal",
                "look at the broker",
            )
        newest = self._sequences.get(channel, 0)
        if message.sequence <= newest:
            raise refuse(
                Code.MESSAGE_REPLAYED,
                f"{channel} {message.sequence} after {newest}",
                "each message once, in order",
                "it was dropped",
            )
        self._sequences[channel] = message.sequence
        return Unsealed(message.content, message.last)


def _invalid(found: str) -> ShoalError:
    return refuse(
        Code.MESSAGE_INVALID, found, "a message as protos/shoal/v1/mqtt.proto defines it", "update the sender"
    )

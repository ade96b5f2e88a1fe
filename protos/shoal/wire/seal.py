"""Envelopes between agent and coordinator over an untrusted broker.

Retained messages, and those that begin a session, are signed by the sender's certificate key (`Signed`). All other
messages of a session carry a MAC under a key that only its two ends know (`Sealed`). That key is HKDF-SHA256 of an
ephemeral P-256 agreement, whose public halves are part of the signed hello and welcome. Both envelopes name region,
node and channel, so a message cannot be moved elsewhere. Sealed messages also carry the epoch and a sequence number, so
they cannot be replayed.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.mqtt_frames import SealedFrame, invalid_frame
from shoal.types.topics import Channel
from shoal.v1 import mqtt_pb2
from shoal.wire import signing
from shoal.wire.certificates import CERTIFICATE_ERRORS
from shoal.wire.field_limits import check_counts
from shoal.wire.limits import LINK_BYTES
from shoal.wire.request_limits import limits_of_message

MAC_BYTES: Final = 32
KEY_BYTES: Final = 65
"""An uncompressed P-256 point."""
ENVELOPE_BYTES: Final = 4096
"""What a signed envelope may add to its content: mostly a certificate."""
_DOMAIN: Final = b"shoal/v1/sealed"

M = TypeVar("M", bound=Message)


def parse(kind: type[M], data: bytes) -> M:
    """Raises ShoalError(MESSAGE_INVALID | TOO_LARGE | FIELD_TOO_MANY)."""
    if len(data) > LINK_BYTES + ENVELOPE_BYTES:
        raise refuse(Code.TOO_LARGE, f"{len(data)} bytes", f"at most {LINK_BYTES}", "report less at once")
    limits = limits_of_message(kind)
    if limits is not None and (refusal := check_counts(cast(Descriptor, kind.DESCRIPTOR), data, limits)) is not None:
        raise ShoalError(refusal)
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as cause:
        raise invalid_frame(f"bytes that are no {kind.__name__}") from cause
    return message


@dataclass(frozen=True, slots=True)
class SigningIdentity:
    """A signer."""

    key: ec.EllipticCurvePrivateKey
    # Certificate of the key, DER.
    certificate: bytes

    @classmethod
    def from_pem(cls, key_pem: bytes, certificate_pem: bytes) -> "SigningIdentity":
        """Raises ShoalError(UNAUTHENTICATED)."""
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except ValueError as cause:
            raise refuse(Code.UNAUTHENTICATED, "unreadable identity files", "a key and its certificate") from cause
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise refuse(Code.UNAUTHENTICATED, "a key that is not P-256", "ECDSA P-256", "enrol again")
        return cls(key, certificate.public_bytes(serialization.Encoding.DER))


def sign(signature: SigningIdentity, region: str, node: str, channel: Channel, content: bytes) -> bytes:
    """Signed envelope of `content`. node: empty for what the region's coordinator sends to all nodes."""
    return mqtt_pb2.Signed(
        content=content,
        signature=signing.sign(signature.key, region, node, channel, content),
        certificate=signature.certificate,
    ).SerializeToString()


SignerCheck = Callable[[x509.Certificate], None]
"""Checks that this certificate may sign here. Raises ShoalError(CERT_* | ROLE_DENIED | NODE_MISMATCH | ...)."""


def verify_signed_message(
    data: bytes, trust: SignerCheck, region: str, node: str, channel: Channel
) -> tuple[bytes, x509.Certificate]:
    """The content and the signer's certificate. Raises ShoalError(MESSAGE_INVALID | TOO_LARGE | SIGNATURE_INVALID |
    ...)."""
    message = parse(mqtt_pb2.Signed, data)
    try:
        certificate = x509.load_der_x509_certificate(message.certificate)
    except CERTIFICATE_ERRORS as cause:
        raise invalid_frame("an unreadable certificate") from cause
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

        other: the other end's public half. Raises ShoalError(MESSAGE_INVALID) when it is not a point of the curve.
        """
        try:
            public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), other)
        except ValueError as cause:
            raise invalid_frame("a session key that is no point of P-256") from cause
        halves = b"".join(sorted((self.public, other)))
        info = signing.envelope(region, node, "session", halves)
        kdf = HKDF(algorithm=hashes.SHA256(), length=MAC_BYTES, salt=nonce.encode(), info=info)
        return kdf.derive(self._private.exchange(ec.ECDH(), public))


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Secret that both ends of one session share; implements `types.mqtt_frames.SessionSeal`."""

    key: bytes
    region: str
    node: str
    # As in the session's welcome.
    epoch: int

    def encode(self, channel: Channel, frame: SealedFrame) -> bytes:
        """The frame with its MAC. Raises ShoalError(TOO_LARGE)."""
        if len(frame.content) > LINK_BYTES:
            raise refuse(Code.TOO_LARGE, f"{len(frame.content)} bytes", f"at most {LINK_BYTES}", "report less at once")
        return mqtt_pb2.Sealed(
            epoch=frame.epoch,
            sequence=frame.sequence,
            content=frame.content,
            mac=self.mac(channel, frame),
            last=frame.last,
        ).SerializeToString()

    def decode(self, payload: bytes) -> SealedFrame:
        """The frame, unverified. Raises ShoalError(MESSAGE_INVALID | TOO_LARGE)."""
        return decode_sealed(payload)

    def check(self, channel: Channel, frame: SealedFrame) -> None:
        """Raises ShoalError(SIGNATURE_INVALID)."""
        if not hmac.compare_digest(self.mac(channel, frame), frame.mac):
            raise refuse(
                Code.SIGNATURE_INVALID,
                f"a {channel} that was not sealed by the other end",
                "its own seal",
                "look at the broker",
            )

    def mac(self, channel: Channel, frame: SealedFrame) -> bytes:
        """Of the frame's epoch and sequence, which must fit into 8 bytes, content and last."""
        numbers = frame.epoch.to_bytes(8, "big") + frame.sequence.to_bytes(8, "big") + bytes([frame.last])
        envelope = signing.envelope(self.region, self.node, channel, numbers + frame.content)
        return hmac.digest(self.key, _DOMAIN + envelope, "sha256")


def decode_sealed(payload: bytes) -> SealedFrame:
    """The frame of any session, unverified. Raises ShoalError(MESSAGE_INVALID | TOO_LARGE)."""
    message = parse(mqtt_pb2.Sealed, payload)
    return SealedFrame(message.epoch, message.sequence, message.content, message.last, message.mac)

"""What the sessions over a broker need of their adapter: encoding, signatures and keys."""

from dataclasses import dataclass
from typing import Protocol

from shoal.types.assignment import DesiredSet
from shoal.types.codes import Refusal
from shoal.types.identity import Identity
from shoal.types.link import FromAgent, ToAgent
from shoal.types.mqtt_frames import (
    NodePresence,
    Opening,
    OpeningAnswer,
    RegionPresence,
    SealedFrame,
    SessionSeal,
)


@dataclass(frozen=True, slots=True)
class Signer:
    """Who signed a hello, as its certificate says."""

    identity: Identity
    # The certificate, DER.
    certificate: bytes


class AgreedKey(Protocol):
    """The coordinator's half of a session's key, and the secret that follows from both halves."""

    @property
    def public(self) -> bytes: ...

    def seal(self, epoch: int) -> SessionSeal: ...


class MessageReader(Protocol):
    """Decodes the messages of one session."""

    def read(self, content: bytes) -> FromAgent:
        """Raises ShoalError where it is invalid. What is signed within the message must be signed by the session's
        signer."""
        ...


class RegionCodec(Protocol):
    """Encodes, signs and verifies for the region's coordinator, on one connection to the broker.

    All `verify_*` and `decode_*` raise ShoalError where the message is invalid, or its signer may not say it.
    """

    def sign_presence(self, presence: RegionPresence) -> bytes: ...
    def sign_answer(self, node: str, answer: OpeningAnswer) -> bytes: ...
    def sign_desired_set(self, node: str, desired: DesiredSet) -> bytes: ...

    def verify_opening(self, node: str, payload: bytes) -> tuple[Opening, Signer]:
        """The signer is a node of this region, whose certificate is valid and not revoked. Its name is not checked."""
        ...

    def verify_presence(self, node: str, payload: bytes, signer: Signer) -> NodePresence:
        """Raises ShoalError(SIGNATURE_INVALID) if another key than the signer's was used."""
        ...

    def check_signer(self, signer: Signer) -> Refusal | None:
        """The refusal for a certificate that has ended or was revoked since."""
        ...

    def agree(self, node: str, key: bytes, nonce: str) -> AgreedKey: ...

    def encode_message(self, message: ToAgent) -> bytes: ...
    def decode_sealed(self, payload: bytes) -> SealedFrame:
        """The frame of any session, unverified."""
        ...

    def reader_of(self, signer: Signer) -> MessageReader:
        """Of a session that this signer opens."""
        ...

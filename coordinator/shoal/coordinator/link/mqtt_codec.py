"""What `core.link.mqtt_sessions` needs of signatures and encodings."""

from collections.abc import Callable

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shoal.coordinator.core.link.codec import Signer
from shoal.coordinator.link.check import check_signatures
from shoal.coordinator.ports import Clock
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.identity import NODES, Identity
from shoal.types.link import FromAgent, Receipts, ToAgent
from shoal.types.mqtt_frames import NodePresence, Opening, OpeningAnswer, RegionPresence, SealedFrame
from shoal.types.topics import Channel
from shoal.wire import mqtt_frames, nouns
from shoal.wire.identity import check_validity, require
from shoal.wire.seal import (
    Ephemeral,
    SessionKey,
    SigningIdentity,
    decode_sealed,
    sign,
    verify_signed_message,
)


class EphemeralKey:
    """`core.link.codec.AgreedKey` by ECDH."""

    def __init__(self, region: str, node: str, nonce: str, node_key: bytes) -> None:
        """node_key: the node's public half. Raises ShoalError(MESSAGE_INVALID)."""
        ephemeral = Ephemeral()
        self.public = ephemeral.public
        self._secret = ephemeral.agree(node_key, region=region, node=node, nonce=nonce)
        self._region, self._node = region, node

    def seal(self, epoch: int) -> SessionKey:
        return SessionKey(self._secret, self._region, self._node, epoch)


class SignedMessageReader:
    """`core.link.codec.MessageReader`, with signatures."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._reader = nouns.SessionReader()

    def read(self, content: bytes) -> FromAgent:
        message = mqtt_frames.decode_from_agent(content, self._reader)
        if isinstance(message, Receipts):  # they are few, and statuses are many
            certificate = x509.load_der_x509_certificate(self._signer.certificate)
            check_signatures(message, self._signer.identity, certificate)
        return message


class SigningRegionCodec:
    """`core.link.codec.RegionCodec` with the key that the coordinator signs with on one connection."""

    def __init__(
        self,
        region: str,
        signature: SigningIdentity,
        *,
        identify: Callable[[x509.Certificate], Identity],
        check_serial: Callable[[str], Refusal | None],
        clock: Clock,
    ) -> None:
        """identify, check_serial: as for MqttLinks."""
        self.signature = signature
        self._region = region
        self._identify = identify
        self._check_serial = check_serial
        self._clock = clock

    def sign_presence(self, presence: RegionPresence) -> bytes:
        return self._sign("", Channel.ONLINE, mqtt_frames.encode_region_presence(presence))

    def sign_answer(self, node: str, answer: OpeningAnswer) -> bytes:
        return self._sign(node, Channel.WELCOME, mqtt_frames.encode_opening_answer(answer))

    def sign_desired_set(self, node: str, desired: DesiredSet) -> bytes:
        return self._sign(node, Channel.DESIRED, nouns.encode(desired))

    def verify_opening(self, node: str, payload: bytes) -> tuple[Opening, Signer]:
        identities: list[Identity] = []
        content, certificate = verify_signed_message(
            payload, lambda found: identities.append(self._admit(found)), self._region, node, Channel.HELLO
        )
        signer = Signer(identities[0], certificate.public_bytes(Encoding.DER))
        return mqtt_frames.decode_opening(content), signer

    def verify_presence(self, node: str, payload: bytes, signer: Signer) -> NodePresence:
        def is_signer(certificate: x509.Certificate) -> None:
            if certificate.public_bytes(Encoding.DER) != signer.certificate:
                raise refuse(Code.SIGNATURE_INVALID, "a presence by another key", "the session's own", "it was dropped")

        content, _ = verify_signed_message(payload, is_signer, self._region, node, Channel.ONLINE)
        return mqtt_frames.decode_node_presence(content)

    def check_signer(self, signer: Signer) -> Refusal | None:
        return self._check_identity(signer.identity)

    def agree(self, node: str, key: bytes, nonce: str) -> EphemeralKey:
        return EphemeralKey(self._region, node, nonce, key)

    def encode_message(self, message: ToAgent) -> bytes:
        return mqtt_frames.encode_to_agent(message)

    def decode_sealed(self, payload: bytes) -> SealedFrame:
        return decode_sealed(payload)

    def reader_of(self, signer: Signer) -> "SignedMessageReader":
        return SignedMessageReader(signer)

    def _sign(self, node: str, channel: Channel, content: bytes) -> bytes:
        """node: empty for all nodes."""
        return sign(self.signature, self._region, node, channel, content)

    def _admit(self, certificate: x509.Certificate) -> Identity:
        identity = self._identify(certificate)
        require(identity, region=self._region, roles=NODES)
        if (refusal := self._check_identity(identity)) is not None:
            raise ShoalError(refusal)
        return identity

    def _check_identity(self, identity: Identity) -> Refusal | None:
        return check_validity(identity, self._clock.wall()) or self._check_serial(identity.serial)

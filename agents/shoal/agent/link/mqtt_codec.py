"""What `core.mqtt_session` needs of signatures and encodings."""

from cryptography import x509

from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.ports import AgentClock
from shoal.types.assignment import DesiredSet
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.link import FromAgent, ToAgent
from shoal.types.mqtt_frames import NodePresence, Opening, OpeningAnswer, RegionPresence
from shoal.types.topics import Channel
from shoal.wire import mqtt_frames, nouns
from shoal.wire.seal import Ephemeral, SessionKey, SigningIdentity, sign, verify_signed_message
from shoal.wire.trust import check_certificate


class SigningNodeCodec:
    """`core.mqtt_session.NodeCodec` with the key that this node signs with, and the CAs that it trusts."""

    def __init__(self, identity: Identity, files: CredentialFiles, clock: AgentClock) -> None:
        self._identity = identity
        self._clock = clock
        self._signature = SigningIdentity.from_pem(files.key.read_bytes(), files.certificate.read_bytes())
        self._authorities = x509.load_pem_x509_certificates(files.ca.read_bytes())
        self._ephemeral = Ephemeral()

    @property
    def public_key(self) -> bytes:
        return self._ephemeral.public

    def agree(self, coordinator_key: bytes, nonce: str, epoch: int) -> SessionKey:
        region, node = self._identity.region, self._identity.name
        secret = self._ephemeral.agree(coordinator_key, region=region, node=node, nonce=nonce)
        return SessionKey(secret, region, node, epoch)

    def sign_opening(self, opening: Opening) -> bytes:
        return self._sign(Channel.HELLO, mqtt_frames.encode_opening(opening))

    def sign_presence(self, presence: NodePresence) -> bytes:
        return self._sign(Channel.ONLINE, mqtt_frames.encode_node_presence(presence))

    def verify_presence(self, payload: bytes) -> RegionPresence:
        return mqtt_frames.decode_region_presence(self._verify(payload, "", Channel.ONLINE))

    def verify_answer(self, payload: bytes) -> OpeningAnswer:
        return mqtt_frames.decode_opening_answer(self._verify(payload, self._identity.name, Channel.WELCOME))

    def verify_desired_set(self, payload: bytes) -> DesiredSet:
        return nouns.decode(DesiredSet, self._verify(payload, self._identity.name, Channel.DESIRED))

    def encode_message(self, message: FromAgent) -> bytes:
        return mqtt_frames.encode_from_agent(message)

    def decode_message(self, content: bytes) -> ToAgent:
        return mqtt_frames.decode_to_agent(content)

    def _sign(self, channel: Channel, content: bytes) -> bytes:
        return sign(self._signature, self._identity.region, self._identity.name, channel, content)

    def _verify(self, payload: bytes, node: str, channel: Channel) -> bytes:
        """Content that the region's coordinator signed. node: empty for all nodes."""
        return verify_signed_message(payload, self._check_coordinator, self._identity.region, node, channel)[0]

    def _check_coordinator(self, certificate: x509.Certificate) -> None:
        roles = frozenset({Role.COORDINATOR})
        check_certificate(
            certificate, self._authorities, region=self._identity.region, roles=roles, wall=self._clock.wall()
        )

"""ports.Proofs: signed desired sets, with the key of the coordinator's own certificate, which goes along.

The signature names a topic of its own, so that nobody on the way can pass a proof off as the desired set itself.
"""

from dataclasses import replace
from typing import Final

from cryptography import x509

from shoal.coordinator.identity.authority import FileAuthority
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import mqtt_pb2
from shoal.wire import nouns, signing
from shoal.wire.certificates import identity_of_certificate
from shoal.wire.limits import LINK_BYTES
from shoal.wire.member_files import Enrolled
from shoal.wire.seal import SigningIdentity, parse

TOPIC: Final = "proof"
MAX_BYTES: Final = LINK_BYTES // 8
"""Largest content to sign: it travels beside the set, and again in each hello."""


class SignedProofs:
    """identity: the coordinator's key and certificate. A signature is valid as long as the region knows its CA, even a
    retired one. Dates are not checked, since a node may present a desired set of any age."""

    def __init__(self, region: str, authority: FileAuthority, identity: Enrolled) -> None:
        self._region = region
        self._authority = authority
        self._signature = SigningIdentity.from_pem(identity.key_pem, identity.certificate_pem)

    def sign(self, desired: DesiredSet) -> bytes:
        shown = replace(
            desired, routes=(), pins=(), credentials=(), trust=None, peers=(), proof=b"", forwarding=None, tenants=()
        )
        content = nouns.encode(shown)
        if len(content) > MAX_BYTES:
            return b""
        signature = signing.sign(self._signature.key, self._region, desired.node, TOPIC, content)
        return mqtt_pb2.Signed(
            content=content, signature=signature, certificate=self._signature.certificate
        ).SerializeToString()

    def verify(self, node: str, proof: bytes) -> DesiredSet | None:
        try:
            message = parse(mqtt_pb2.Signed, proof)
            self._check_signer(message, node)
            return nouns.decode(DesiredSet, message.content)
        except ShoalError:
            return None

    def _check_signer(self, message: mqtt_pb2.Signed, node: str) -> None:
        """Raises ShoalError."""
        try:
            certificate = x509.load_der_x509_certificate(message.certificate)
        except (ValueError, x509.InvalidVersion) as cause:
            raise refuse(Code.MESSAGE_INVALID, "an unreadable certificate", "the signer's") from cause
        self._authority.find_issuer(certificate, retired=True)
        signer = identity_of_certificate(certificate)
        if (signer.region, signer.role) != (self._region, Role.COORDINATOR):
            raise refuse(Code.ROLE_DENIED, signer.uri, f"a coordinator of {self._region}")
        signing.verify(certificate, message.signature, self._region, node, TOPIC, message.content)

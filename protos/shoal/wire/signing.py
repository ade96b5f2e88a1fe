"""Signatures over stored or retained data: receipts, desired sets.

ECDSA P-256 with SHA-256 over an envelope that names region, node and topic. So signed data cannot be moved to another
node or another use.
"""

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.types.codes import Code, refuse

_DOMAIN = b"shoal/v1/signed"


def envelope(region: str, node: str, topic: str, content: bytes) -> bytes:
    """Unambiguous bytes to sign: each part prefixed by its length."""
    parts = (_DOMAIN, region.encode(), node.encode(), topic.encode(), content)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def sign(key: ec.EllipticCurvePrivateKey, region: str, node: str, topic: str, content: bytes) -> bytes:
    return key.sign(envelope(region, node, topic, content), ec.ECDSA(hashes.SHA256()))


def verify(certificate: x509.Certificate, signature: bytes, region: str, node: str, topic: str, content: bytes) -> None:
    """Raises ShoalError(SIGNATURE_INVALID)."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise refuse(Code.SIGNATURE_INVALID, "a key that is not P-256", "ECDSA P-256", "enrol again")
    try:
        key.verify(signature, envelope(region, node, topic, content), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as cause:
        raise refuse(
            Code.SIGNATURE_INVALID,
            f"a {topic} that {node} did not sign",
            "the node's own signature",
            "restart the agent, or revoke it",
        ) from cause

"""Checks what a node claims against its certificate, on either link."""

from cryptography import x509

from shoal.types.codes import Code, refuse
from shoal.types.identity import Identity
from shoal.types.link import FromAgent, Hello, Receipts
from shoal.wire.signing import verify


def check_hello(hello: Hello, identity: Identity) -> None:
    """A node may speak only for itself: its hello must name the identity in its certificate. Raises
    ShoalError(NODE_MISMATCH)."""
    node = hello.node
    if (node.region, node.role, node.name) != (identity.region, identity.role, identity.name):
        raise refuse(
            Code.NODE_MISMATCH,
            f"a hello of shoal://{node.region}/{node.role}/{node.name}",
            identity.uri,
            "a node speaks for itself only",
        )


def check_signatures(message: FromAgent, identity: Identity, certificate: x509.Certificate) -> None:
    """Checks receipts against the key of the certificate that opened the session, because receipts are stored.

    Raises ShoalError(SIGNATURE_INVALID).
    """
    if isinstance(message, Receipts):
        for each in message.receipts:
            verify(certificate, each.signature, identity.region, identity.name, "receipt", each.content)

"""Checks what a node signed against its certificate, on either link."""

from cryptography import x509

from shoal.types.identity import Identity
from shoal.types.link import FromAgent, Receipts
from shoal.wire.signing import verify


def check_signatures(message: FromAgent, identity: Identity, certificate: x509.Certificate) -> None:
    """Checks receipts against the key of the certificate that opened the session, because receipts are stored.

    Raises ShoalError(SIGNATURE_INVALID).
    """
    if isinstance(message, Receipts):
        for each in message.receipts:
            verify(certificate, each.signature, identity.region, identity.name, "receipt", each.content)

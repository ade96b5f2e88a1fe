"""The certificate that the peer of a connection has shown."""

import ssl
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """It passed the handshake: an authority that counts for the connection vouches for it."""

    # The certificate, PEM.
    pem: bytes
    # This side of the connection; None where another library has it.
    connection: ssl.SSLObject | None = field(default=None, compare=False, repr=False)

    def verified_connection(self) -> ssl.SSLObject | None:
        """The connection, if its latest handshake was by this certificate."""
        known = self.connection
        return known if known is not None and _pem_of(known) == self.pem else None


def certificate_of_peer(connection: ssl.SSLObject) -> PeerCertificate | None:
    """What the peer of a connection, whose handshake is done, has shown; None: no certificate."""
    pem = _pem_of(connection)
    return PeerCertificate(pem, connection) if pem else None


def _pem_of(connection: ssl.SSLObject) -> bytes:
    der = connection.getpeercert(binary_form=True)
    return ssl.DER_cert_to_PEM_cert(der).encode() if der else b""

"""The certificate that the peer of a connection has shown, and what the handshake found of it, by the ssl module."""

import _ssl
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.types.identity import Identity, parse_only_name
from shoal.types.units import Wall


@dataclass(frozen=True, slots=True)
class VerifiedCertificate:
    """What a handshake has found of a certificate."""

    # Whom it names.
    identity: Identity
    # The certificate (DER) of whoever issued it, by whose key the handshake verified its signature.
    issuer: bytes


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """It passed the handshake: an authority that counts for the connection vouches for it."""

    # The certificate, PEM.
    pem: bytes
    # None where the handshake does not tell: it resumed a session, it is another library's, or this Python's ssl module
    # has no means to. Then somebody else has to verify the certificate.
    verified: VerifiedCertificate | None = None


def certificate_of_peer(connection: ssl.SSLObject) -> PeerCertificate | None:
    """What the peer of a connection has shown; None: no certificate.

    To be called when the handshake is done, before more is read: a peer may begin another message of a handshake at any
    time, and until that ends the ssl module raises ValueError.
    """
    der = connection.getpeercert(binary_form=True)
    return PeerCertificate(ssl.DER_cert_to_PEM_cert(der).encode(), _verified(connection, der)) if der else None


def verified_chain(connection: ssl.SSLObject) -> tuple[bytes, ...]:
    """Certificates (DER), from the peer's own to one that is trusted, each verified by the key of the next.

    Empty without a certificate or a full handshake, and where this Python does not tell.
    """
    # Public since Python 3.13, in DER; earlier versions have the same call underneath, which gives objects.
    public: Callable[[], Iterable[bytes] | None] | None = getattr(connection, "get_verified_chain", None)
    if public is not None:
        return tuple(public() or ())
    inner: Callable[[], Iterable[Any] | None] | None = getattr(
        getattr(connection, "_sslobj", None), "get_verified_chain", None
    )
    return () if inner is None else tuple(each.public_bytes(_ssl.ENCODING_DER) for each in inner() or ())


def identity_of_peer(peer: Mapping[str, Any]) -> Identity:
    """The identity of a verified peer, as `getpeercert()` of the ssl module tells it. Raises
    ShoalError(CERT_NAME_INVALID)."""
    uris = [name for kind, name in peer.get("subjectAltName", ()) if kind == "URI"]
    region, role, name = parse_only_name(uris)
    return Identity(
        region=region,
        role=role,
        name=name,
        not_before=Wall(float(ssl.cert_time_to_seconds(peer["notBefore"]))),
        not_after=Wall(float(ssl.cert_time_to_seconds(peer["notAfter"]))),
        serial=str(int(peer["serialNumber"], 16)),
    )


def _verified(connection: ssl.SSLObject, der: bytes) -> VerifiedCertificate | None:
    """What the handshake has found of the certificate."""
    try:
        chain = verified_chain(connection)
        # A chain of an earlier handshake, by another certificate, says nothing of this one.
        if len(chain) < 2 or chain[0] != der:
            return None
        return VerifiedCertificate(identity_of_peer(connection.getpeercert() or {}), chain[1])
    except Exception:  # an authority may sign what cannot be decoded: whoever verifies it says what is wrong
        return None

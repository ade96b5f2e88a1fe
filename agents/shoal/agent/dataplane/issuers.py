"""Who issued a certificate, and whom it names, by the cryptography library.

A front imports this when it exchanges requests with another region, and where a handshake does not say who issued the
certificate of its peer.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from shoal.types.assignment import PeerTrust
from shoal.wire.certificates import CERTIFICATE_ERRORS, identity_of_pem
from shoal.wire.identity import ca_common_name_of
from shoal.wire.trust import has_known_issuer

__all__ = ["identity_of_pem", "is_issued_by_one", "roots_of_peer"]

_KEPT_ROOTS: Final = 1024
"""Parsed CAs, which are the same for each certificate: far more than a gateway knows."""

_log = structlog.get_logger(__name__)


def is_issued_by_one(pem: bytes, roots: Iterable[bytes]) -> bool:
    """Whether one of these CAs (DER) issued the certificate directly. One that cannot be read did not."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except CERTIFICATE_ERRORS:  # what the ssl module could read
        return False
    return has_known_issuer(certificate, _readable(roots))


def roots_of_peer(peer: PeerTrust, region: str, ours: Sequence[bytes]) -> tuple[bytes, ...]:
    """CAs (DER) of another region, without those that cannot be read, or that bear the name of a CA of this region.

    region: this one. ours: its CAs, DER, some of which may be unreadable.
    """
    names = {each.subject for each in _readable(ours)}
    names.add(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_common_name_of(region))]))
    roots = (root for pem in peer.roots for root in _load(peer.region, pem))
    return tuple(root.public_bytes(Encoding.DER) for root in roots if root.subject not in names)


def _readable(ders: Iterable[bytes]) -> Iterable[x509.Certificate]:
    return (each for each in map(_parse, ders) if each is not None)


@lru_cache(maxsize=_KEPT_ROOTS)
def _parse(der: bytes) -> x509.Certificate | None:
    """None for what the ssl module can read, and the library cannot: it hides none of the others."""
    try:
        certificate = x509.load_der_x509_certificate(der)
    except CERTIFICATE_ERRORS:
        return None
    return certificate if _has_subject(certificate) else None


def _has_subject(certificate: x509.Certificate) -> bool:
    """Whether the library can read whom it names: it does not look before it is asked."""
    try:
        return bool(certificate.subject)
    except (*CERTIFICATE_ERRORS, TypeError):
        return False


def _load(region: str, pem: str) -> tuple[x509.Certificate, ...]:
    try:
        certificates = x509.load_pem_x509_certificates(pem.encode())
    except CERTIFICATE_ERRORS as error:
        _log.warning("peer_root_unreadable", region=region, error=str(error))
        return ()
    readable = tuple(each for each in certificates if _has_subject(each))
    if len(readable) < len(certificates):
        _log.warning("peer_root_unreadable", region=region, error="a subject that cannot be read")
    return readable

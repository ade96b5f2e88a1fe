"""Who issued a certificate, by the cryptography library.

A front imports this when it exchanges requests with another region, and where a handshake does not say who issued the
certificate of its peer.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shoal.types.assignment import PeerTrust
from shoal.wire.certificates import CERTIFICATE_ERRORS
from shoal.wire.trust import has_known_issuer

_KEPT_ROOTS: Final = 1024
"""Parsed CAs, which are the same for each certificate: far more than a gateway knows."""

_log = structlog.get_logger(__name__)


def is_issued_by_one(pem: bytes, roots: Iterable[bytes]) -> bool:
    """Whether one of these CAs (DER) issued the certificate directly."""
    try:
        return has_known_issuer(x509.load_pem_x509_certificate(pem), map(_parse, roots))
    except CERTIFICATE_ERRORS:  # what the ssl module could read
        return False


def roots_of_peer(peer: PeerTrust, ours: Sequence[bytes]) -> tuple[bytes, ...]:
    """CAs (DER) of another region, without those that cannot be read, or that bear the name of one of ours (DER)."""
    names = {_parse(each).subject for each in ours}
    roots = (root for pem in peer.roots for root in _load(peer.region, pem))
    return tuple(root.public_bytes(Encoding.DER) for root in roots if root.subject not in names)


@lru_cache(maxsize=_KEPT_ROOTS)
def _parse(der: bytes) -> x509.Certificate:
    return x509.load_der_x509_certificate(der)


def _load(region: str, pem: str) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(pem.encode()))
    except CERTIFICATE_ERRORS as error:
        _log.warning("peer_root_unreadable", region=region, error=str(error))
        return ()

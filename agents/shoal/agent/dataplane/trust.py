"""Which certificates are trusted, each for names of its own region only.

A gateway's TLS trusts the CAs of every region that it may exchange requests with. So each call checks the issuer again:
another region's CA is trusted for names of its own region only.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from shoal.agent.dataplane.transport import TlsFiles
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, refuse
from shoal.types.identity import Identity
from shoal.wire.certificates import CERTIFICATE_ERRORS, identity_of_pem
from shoal.wire.trust import has_known_issuer

_MAX_IDENTITIES: Final = 1024
"""Identities that are cached: parsing and verifying a certificate costs more than the rest of a small call."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Handshake:
    """CAs for TLS handshakes in addition to this region's own."""

    # Grows with each change.
    version: int = 0
    # CAs of the other regions, PEM.
    pem: bytes = b""


@dataclass(frozen=True, slots=True)
class _PeerRegion:
    """Another region that this gateway exchanges requests with."""

    # Its CAs.
    roots: tuple[x509.Certificate, ...]
    # Names of its gateways that may be called.
    gateways: frozenset[str]
    # The CAs as PEM for TLS, kept because each request to a gateway needs it.
    pem: bytes


class Authorities:
    """CAs of this region, read from `tls` and again when they change, and those of other regions, as last
    configured."""

    def __init__(self, region: str, tls: TlsFiles) -> None:
        self._region = region
        self._tls = tls
        self._pem = b""
        self._own: tuple[x509.Certificate, ...] = ()
        """With former CAs of this region: no new handshake passes by them, but a connection opened before they were
        removed lives on, like its certificate."""
        self._peers: dict[str, _PeerRegion] = {}
        self._peer_trusts: tuple[PeerTrust, ...] = ()
        self._stale = False
        """True if this region's CAs changed since the other regions' were last configured."""
        self._known: dict[bytes, Identity] = {}
        self.handshake = Handshake()
        """For the next connections; it is replaced as a whole, because other threads read it."""

    def configure(self, peers: Iterable[PeerTrust]) -> None:
        """Apply the complete list of other regions. An invalid root, or one with the name of a CA of this region, is
        left out."""
        told = tuple(peers)
        self._read()
        if not self._stale and told == self._peer_trusts:
            return
        self._peer_trusts, self._stale = told, False
        self._known.clear()
        ours = {root.subject for root in self._own}
        self._peers = {peer.region: _peer_region(peer, ours) for peer in told if peer.region != self._region}
        pem = b"".join(peer.pem for _, peer in sorted(self._peers.items()))
        if pem != self.handshake.pem:
            self.handshake = Handshake(self.handshake.version + 1, pem)

    def roots_of(self, region: str, gateway: str) -> bytes | None:
        """CAs (PEM) by which to verify that gateway; None when it must not be called."""
        peer = self._peers.get(region)
        return peer.pem if peer is not None and peer.roots and gateway in peer.gateways else None

    def identity(self, pem: bytes) -> Identity:
        """Identity in a client's certificate that passed the handshake, once its own region's CA is found to have
        issued it.

        Raises ShoalError(REGION_MISMATCH | CERT_UNTRUSTED | CERT_NAME_INVALID).
        """
        known = self._known.get(pem)
        if known is None:
            known = self._verify(pem)
            if len(self._known) >= _MAX_IDENTITIES:
                self._known.clear()
            self._known[pem] = known
        return known

    def _verify(self, pem: bytes) -> Identity:
        identity = identity_of_pem(pem)
        certificate = x509.load_pem_x509_certificate(pem)
        if identity.region == self._region:
            if has_known_issuer(certificate, self._own) or (self._read() and has_known_issuer(certificate, self._own)):
                return identity
        elif identity.region not in self._peers:
            raise refuse(
                Code.REGION_MISMATCH,
                f"a certificate of region {identity.region}",
                f"one of {self._region}, or of a region that has an agreement with it",
                "use that region's files",
            )
        elif has_known_issuer(certificate, self._peers[identity.region].roots):
            return identity
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"a certificate of {identity.uri} that no authority of {identity.region} issued",
            "one of its own region",
            "enrol again with a join token of that region",
        )

    def _read(self) -> bool:
        """Read this region's CAs again; return whether they changed."""
        try:
            pem = self._tls.authority.read_bytes()
            own = tuple(x509.load_pem_x509_certificates(pem))
        except (OSError, ValueError):
            return False  # half replaced: keep the current ones
        changed, self._pem = pem != self._pem, pem
        self._stale |= changed
        self._own = (*own, *(each for each in self._own if each not in own))
        return changed


def _peer_region(peer: PeerTrust, ours: Collection[x509.Name]) -> _PeerRegion:
    roots = tuple(root for pem in peer.roots for root in _load(peer.region, pem) if root.subject not in ours)
    return _PeerRegion(roots, frozenset(peer.gateways), b"".join(root.public_bytes(Encoding.PEM) for root in roots))


def _load(region: str, pem: str) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(pem.encode()))
    except CERTIFICATE_ERRORS as error:
        _log.warning("peer_root_unreadable", region=region, error=str(error))
        return ()

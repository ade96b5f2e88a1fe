"""Whose certificates count here, each for names of its own region alone.

A gateway's TLS believes the authorities of every region that it may meet. So who issued a certificate is looked at
again for each call: another region's authority vouches for its own region's names and for no other.
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
from shoal.wire.identity import UNREADABLE, Identity, identity_of_pem
from shoal.wire.trust import is_issued

_KNOWN: Final = 1024
"""Identities remembered: parsing and verifying a certificate costs more than the rest of a small call."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Handshake:
    """pem: authorities of other regions, beside our own. version: grows with each change."""

    version: int = 0
    pem: bytes = b""


@dataclass(frozen=True, slots=True)
class _Peer:
    """gateways: whom we may call there. pem: of the roots, as TLS takes them; each request to a gateway asks for it."""

    roots: tuple[x509.Certificate, ...]
    gateways: frozenset[str]
    pem: bytes


class Authorities:
    """Our region's, read from `tls` and again when they change, and those of other regions, as last told."""

    def __init__(self, region: str, tls: TlsFiles) -> None:
        self._region = region
        self._tls = tls
        self._pem = b""
        self._own: tuple[x509.Certificate, ...] = ()
        """With those that were ours before: no handshake is good by them any more, but a connection that was opened
        before they went lives on, as its certificate does."""
        self._peers: dict[str, _Peer] = {}
        self._told: tuple[PeerTrust, ...] = ()
        self._stale = False
        """Our own authorities changed since the others were looked at."""
        self._known: dict[bytes, Identity] = {}
        self.handshake = Handshake()
        """Of the next connections; read from other threads, so replaced as a whole."""

    def configure(self, peers: Iterable[PeerTrust]) -> None:
        """The whole truth, each time. A root that cannot be one, or bears the name of ours, is left out."""
        told = tuple(peers)
        self._read()
        if not self._stale and told == self._told:
            return
        self._told, self._stale = told, False
        self._known.clear()
        ours = {root.subject for root in self._own}
        self._peers = {peer.region: _peer(peer, ours) for peer in told if peer.region != self._region}
        pem = b"".join(peer.pem for _, peer in sorted(self._peers.items()))
        if pem != self.handshake.pem:
            self.handshake = Handshake(self.handshake.version + 1, pem)

    def roots_of(self, region: str, gateway: str) -> bytes | None:
        """PEM by which to judge that gateway; None when it is not to be called."""
        peer = self._peers.get(region)
        return peer.pem if peer is not None and peer.roots and gateway in peer.gateways else None

    def identity(self, pem: bytes) -> Identity:
        """Of a client's certificate whose handshake was good, once its own region's authority vouches for it.

        Raises ShoalError(REGION_MISMATCH | CERT_UNTRUSTED | CERT_NAME_INVALID)."""
        known = self._known.get(pem)
        if known is None:
            known = self._judged(pem)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[pem] = known
        return known

    def _judged(self, pem: bytes) -> Identity:
        identity = identity_of_pem(pem)
        certificate = x509.load_pem_x509_certificate(pem)
        if identity.region == self._region:
            if is_issued(certificate, self._own) or (self._read() and is_issued(certificate, self._own)):
                return identity
        elif identity.region not in self._peers:
            raise refuse(
                Code.REGION_MISMATCH,
                f"a certificate of region {identity.region}",
                f"one of {self._region}, or of a region that has an agreement with it",
                "use that region's files",
            )
        elif is_issued(certificate, self._peers[identity.region].roots):
            return identity
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"a certificate of {identity.uri} that no authority of {identity.region} issued",
            "one of its own region",
            "enrol again with a join token of that region",
        )

    def _read(self) -> bool:
        """Our own authorities anew; whether they changed."""
        try:
            pem = self._tls.authority.read_bytes()
            own = tuple(x509.load_pem_x509_certificates(pem))
        except (OSError, ValueError):
            return False  # half replaced: what is in use stays
        changed, self._pem = pem != self._pem, pem
        self._stale |= changed
        self._own = (*own, *(each for each in self._own if each not in own))
        return changed


def _peer(peer: PeerTrust, ours: Collection[x509.Name]) -> _Peer:
    roots = tuple(root for pem in peer.roots for root in _load(peer.region, pem) if root.subject not in ours)
    return _Peer(roots, frozenset(peer.gateways), b"".join(root.public_bytes(Encoding.PEM) for root in roots))


def _load(region: str, pem: str) -> tuple[x509.Certificate, ...]:
    try:
        return tuple(x509.load_pem_x509_certificates(pem.encode()))
    except UNREADABLE as error:
        _log.warning("root_unreadable", region=region, reason=str(error))
        return ()

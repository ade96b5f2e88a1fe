"""Which certificates are trusted, each for names of its own region only.

A gateway's TLS trusts the CAs of every region that it may exchange requests with. So each call checks the issuer again:
another region's CA is trusted for names of its own region only.

The handshake has verified by whose key a certificate was signed. Where it tells, and where that is a CA of the right
region, nothing is verified twice, and the cryptography library, 10 MiB of a front, is not imported.
"""

import importlib
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from shoal.agent.dataplane.transport import TlsFiles
from shoal.host.peer_certificate import PeerCertificate
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.identity import Identity
from shoal.wire.tls_files import authorities_of

_MAX_IDENTITIES: Final = 1024
"""Identities that are cached: parsing and verifying a certificate costs more than the rest of a small call."""


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

    # Its CAs, DER.
    roots: tuple[bytes, ...]
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
        self._own: tuple[bytes, ...] = ()
        """DER, with former CAs of this region: no new handshake passes by them, but a connection opened before they
        were removed lives on, like its certificate."""
        self._peers: dict[str, _PeerRegion] = {}
        self._peer_trusts: tuple[PeerTrust, ...] = ()
        self._stale = False
        """True if this region's CAs changed since the other regions' were last configured."""
        self._known: dict[bytes, Identity] = {}
        self.handshake = Handshake()
        """For the next connections; it is replaced as a whole, because other threads read it."""

    def configure(self, peers: Iterable[PeerTrust]) -> None:
        """Apply the complete list of other regions. An invalid root, or one with the name of a CA of this region, is
        left out.

        Raises ShoalError(INTERNAL) where the library cannot be used, which no empty list needs; then the earlier list
        stays in force.
        """
        told = tuple(peers)
        self._read()
        if not self._stale and told == self._peer_trusts:
            return
        self._peers = {peer.region: self._peer_region(peer) for peer in told if peer.region != self._region}
        self._peer_trusts, self._stale = told, False
        self._known.clear()
        pem = b"".join(peer.pem for _, peer in sorted(self._peers.items()))
        if pem != self.handshake.pem:
            self.handshake = Handshake(self.handshake.version + 1, pem)

    def roots_of(self, region: str, gateway: str) -> bytes | None:
        """CAs (PEM) by which to verify that gateway; None when it must not be called."""
        peer = self._peers.get(region)
        return peer.pem if peer is not None and peer.roots and gateway in peer.gateways else None

    def identity(self, certificate: PeerCertificate) -> Identity:
        """Identity in a client's certificate that passed the handshake, once its own region's CA is found to have
        issued it.

        Raises ShoalError(REGION_MISMATCH | CERT_UNTRUSTED | CERT_NAME_INVALID), and ShoalError(INTERNAL) where only the
        library can tell, and it cannot be used.
        """
        known = self._known.get(certificate.pem)
        if known is None:
            known = self._verify(certificate)
            if len(self._known) >= _MAX_IDENTITIES:
                self._known.clear()
            self._known[certificate.pem] = known
        return known

    def _verify(self, certificate: PeerCertificate) -> Identity:
        verified = certificate.verified
        identity = _identity_of(certificate.pem) if verified is None else verified.identity
        if identity.region == self._region:
            if verified is None or verified.issuer not in self._own:
                self._read()
            roots = self._own
        elif identity.region in self._peers:
            roots = self._peers[identity.region].roots
        else:
            raise refuse(
                Code.REGION_MISMATCH,
                f"a certificate of region {identity.region}",
                f"one of {self._region}, or of a region that has an agreement with it",
                "use that region's files",
            )
        # The issuer that the handshake found may also be the same CA as another one certified it.
        if (verified is not None and verified.issuer in roots) or _is_issued_by_one(certificate.pem, roots):
            return identity
        raise refuse(
            Code.CERT_UNTRUSTED,
            f"a certificate of {identity.uri} that no authority of {identity.region} issued",
            "one of its own region",
            "enrol again with a join token of that region",
        )

    def _read(self) -> None:
        """Read this region's CAs again."""
        try:
            pem = self._tls.authority.read_bytes()
            if pem == self._pem:
                return
            own = authorities_of(pem)
        except (OSError, ShoalError):
            return  # half replaced: keep the current ones
        self._pem, self._stale = pem, True
        self._own = (*own, *(each for each in self._own if each not in own))

    def _peer_region(self, peer: PeerTrust) -> _PeerRegion:
        with _library_in_use():
            from shoal.agent.dataplane.issuers import roots_of_peer

            roots = roots_of_peer(peer, self._region, self._own)
        pem = "".join(map(ssl.DER_cert_to_PEM_cert, roots)).encode()
        return _PeerRegion(roots, frozenset(peer.gateways), pem)


def load_library() -> None:
    """Import what the cryptography library is needed for: 60 to 100 ms on a server, and 10 MiB. Raises
    ShoalError(INTERNAL) where it cannot be imported."""
    with _library_in_use():
        importlib.import_module("shoal.agent.dataplane.issuers")


def _identity_of(pem: bytes) -> Identity:
    with _library_in_use():
        from shoal.agent.dataplane.issuers import identity_of_pem

        return identity_of_pem(pem)


def _is_issued_by_one(pem: bytes, roots: Iterable[bytes]) -> bool:
    with _library_in_use():
        from shoal.agent.dataplane.issuers import is_issued_by_one

        return is_issued_by_one(pem, roots)


@contextmanager
def _library_in_use() -> Iterator[None]:
    """Raises ShoalError(INTERNAL) for any other error: what is imported late, some of it with the first use, may be
    half replaced beneath a front that runs, or meet a limit of this process. Who is to be verified by it is refused."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as cause:
        found = f"{type(cause).__name__} in the cryptography library"
        raise refuse(Code.INTERNAL, found, "the library as it was installed", "restart the agent") from cause

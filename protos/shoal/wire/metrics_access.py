"""Who may read a server's metrics: holders of the region's certificates whose role may read the whole region."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal.host.peer_certificate import identity_of_peer
from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import check_validity, require

READERS: Final = frozenset({Role.OPERATOR, Role.VIEWER, Role.COORDINATOR})


@dataclass(frozen=True, slots=True)
class RegionMetricsAccess:
    """Access check of a metrics page, and the server's own TLS files."""

    # Region that the client's certificate must be of.
    region: str
    # The server's certificate (PEM). It is read again when the file changes, because it is renewed.
    certificate: Path
    # The server's key (PEM), read again when the file changes.
    key: Path
    # CA (PEM) that clients must be of, read again when the file changes.
    ca: Path
    # The clock that validity is checked by.
    wall: Callable[[], Wall]
    # Why a certificate with this serial number is refused; None: it is not revoked.
    check_revocation: Callable[[str], Refusal | None] = lambda serial: None

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def admit(self, peer: Mapping[str, Any]) -> None:
        """Raises ShoalError(CERT_* | REGION_MISMATCH | ROLE_DENIED)."""
        identity = identity_of_peer(peer)
        if (refusal := check_validity(identity, self.wall())) is not None:
            raise ShoalError(refusal)
        if (refusal := self.check_revocation(identity.serial)) is not None:
            raise ShoalError(refusal)
        require(identity, region=self.region, roles=READERS)

"""The coordinator's own certificate: made at start, made anew on an open port when a third of its life is left."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, cast

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Clock
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import identity_of_pem

LIFETIME_S: Final = Seconds(30 * 86400.0)
NAME: Final = "coordinator"
"""What agents and operators expect in the DNS name, whichever machine it runs on."""
OPERATOR: Final = "admin"

log: Final = structlog.get_logger("shoal.coordinator.identity")


class ServerIdentity:
    """hosts: addresses that clients dial."""

    def __init__(
        self,
        authority: FileAuthority,
        folder: Path,
        hosts: tuple[str, ...],
        clock: Clock,
        *,
        role: Role = Role.COORDINATOR,
        name: str = NAME,
    ) -> None:
        self._authority = authority
        self._role = role
        self._name = name
        self._folder = folder
        self._hosts = hosts
        self._clock = clock
        self._current = self._renewed()

    @property
    def folder(self) -> Path:
        """Holds cert.pem, key.pem and ca.pem of the newest certificate."""
        return self._folder

    @property
    def certificate(self) -> Path:
        """This, `key` and `ca`: wire.handshake.PemFiles."""
        return self._folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self._folder / "key.pem"

    @property
    def ca(self) -> Path:
        return self._folder / "ca.pem"

    @property
    def enrolled(self) -> Enrolled:
        """The newest key and certificate: to call others with, and to sign."""
        self.refresh()
        return self._current

    def credentials(
        self, *, client_certificates: bool, others: Callable[[], str] = lambda: ""
    ) -> grpc.ServerCredentials:
        """The chain carries the CA, so that a joiner can pin it before it trusts anything.

        others: CAs (PEM) of other regions whose members may shake hands too. TLS does not say which CA vouched for
        which name: where there are any, each call must be judged by `wire.said.RootsOf` as well.
        """
        material = self._material(others())

        def newest() -> grpc.ServerCertificateConfiguration | None:
            """At each handshake; None keeps what is in use. gRPC's core is not safe against a configuration that is
            replaced while others shake hands: a flood of them crashed it when each brought its own."""
            nonlocal material
            fresh = self._material(others())
            if fresh == material:
                return None
            material = fresh
            return _configuration(material, client_certificates)

        dynamic: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(material, client_certificates),
            cast(Callable[[], grpc.ServerCertificateConfiguration], newest),  # its stubs know of no None
            require_client_authentication=client_certificates,
        )
        return dynamic

    def _material(self, others: str) -> tuple[bytes, bytes, bytes]:
        """(key, chain, roots) as PEM."""
        self.refresh()
        return self._current.key_pem, self._chain(), self._current.ca_pem + others.encode()

    def refresh(self) -> None:
        """Makes it anew when its time nears its end, or when another CA issues or is trusted."""
        due = _is_due(self._current.certificate_pem, self._clock.wall())
        if due or self._current.ca_pem != self._authority.ca_pem:
            self._current = self._renewed()

    def _chain(self) -> bytes:
        return _own(self._current.certificate_pem) + self._authority.chain_pem

    def _renewed(self) -> Enrolled:
        enrolled = self._authority.enrol_self(
            self._role, self._name, hosts=self._hosts, lifetime_s=LIFETIME_S, wall=self._clock.wall()
        )
        try:
            enrolled.write(self._folder)
        except OSError as error:  # it serves all the same; what reads the files goes on with those from before
            log.error("certificate not written", folder=str(self._folder), error=str(error))
        return enrolled


@lru_cache(maxsize=1)
def _own(certificate_pem: bytes) -> bytes:
    """The first of them. Every handshake asks."""
    own = x509.load_pem_x509_certificate(certificate_pem)
    return own.public_bytes(serialization.Encoding.PEM)


def _configuration(
    material: tuple[bytes, bytes, bytes], client_certificates: bool
) -> grpc.ServerCertificateConfiguration:
    key, chain, roots = material
    return grpc.ssl_server_certificate_configuration([(key, chain)], roots if client_certificates else None)


def first_operator(authority: FileAuthority, folder: Path, wall: Wall) -> None:
    """`folder`/{cert.pem,key.pem,ca.pem} of an operator on this machine; renewed at a start when it is due."""
    certificate, ca = folder / "cert.pem", folder / "ca.pem"
    if (
        certificate.exists()
        and ca.exists()
        and ca.read_bytes() == authority.ca_pem
        and not _is_due(certificate.read_bytes(), wall)
    ):
        return
    authority.enrol_self(Role.OPERATOR, OPERATOR, lifetime_s=LIFETIME_S, wall=wall).write(folder)


def _is_due(certificate_pem: bytes, wall: Wall) -> bool:
    """Near its end; or not valid yet, since the clock was ahead when it was made."""
    dated = identity_of_pem(certificate_pem)
    return wall < dated.not_before or dated.not_after - wall < LIFETIME_S / 3

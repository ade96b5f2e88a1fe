"""The coordinator's own certificate: made at start, made anew on an open port when a third of its life is left."""

from pathlib import Path
from typing import Final

import grpc

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


class ServerIdentity:
    """hosts: addresses that clients dial."""

    def __init__(self, authority: FileAuthority, folder: Path, hosts: tuple[str, ...], clock: Clock) -> None:
        self._authority = authority
        self._folder = folder
        self._hosts = hosts
        self._clock = clock
        self._current = self._renewed()

    @property
    def folder(self) -> Path:
        """Holds cert.pem, key.pem and ca.pem of the newest certificate."""
        return self._folder

    def credentials(self, *, client_certificates: bool) -> grpc.ServerCredentials:
        """The chain carries the CA, so that a joiner can pin it before it trusts anything."""
        dynamic: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._configuration(client_certificates),
            lambda: self._configuration(client_certificates),
            require_client_authentication=client_certificates,
        )
        return dynamic

    def _configuration(self, client_certificates: bool) -> grpc.ServerCertificateConfiguration:
        if self._is_due():
            self._current = self._renewed()
        chain = self._current.certificate_pem + self._current.ca_pem
        roots = self._current.ca_pem if client_certificates else None
        return grpc.ssl_server_certificate_configuration([(self._current.key_pem, chain)], roots)

    def _is_due(self) -> bool:
        return _is_due(self._current.certificate_pem, self._clock.wall())

    def _renewed(self) -> Enrolled:
        enrolled = self._authority.enrol_self(
            Role.COORDINATOR, NAME, hosts=self._hosts, lifetime_s=LIFETIME_S, wall=self._clock.wall()
        )
        enrolled.write(self._folder)
        return enrolled


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
    return identity_of_pem(certificate_pem).not_after - wall < LIFETIME_S / 3

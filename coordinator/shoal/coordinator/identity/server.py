"""The coordinator's own certificate: made at start, renewed on an open port when a third of its lifetime is left."""

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
from shoal.wire.certificates import identity_of_pem
from shoal.wire.member_files import Enrolled

LIFETIME_S: Final = Seconds(30 * 86400.0)
NAME: Final = "coordinator"
"""The DNS name that agents and operators expect in the certificate, whichever machine it runs on."""
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
        self._current = self._enrol()

    @property
    def folder(self) -> Path:
        """Holds cert.pem, key.pem and ca.pem of the newest certificate."""
        return self._folder

    @property
    def certificate(self) -> Path:
        """With `key` and `ca`: wire.handshake.PemFiles."""
        return self._folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self._folder / "key.pem"

    @property
    def ca(self) -> Path:
        return self._folder / "ca.pem"

    @property
    def current(self) -> Enrolled:
        """The newest key and certificate, to call others and to sign."""
        self.refresh()
        return self._current

    def credentials(
        self, *, client_certificates: bool, others: Callable[[], str] = lambda: ""
    ) -> grpc.ServerCredentials:
        """Server credentials whose chain carries the CA, so that a joiner can pin it before it trusts anything.

        others: CAs (PEM) of other regions whose members may shake hands too. TLS does not say which CA vouched for
        which name, so where there are any, `wire.signed_envelope.RootsOf` must check each call as well.
        """
        material = self._material(others())

        def newest() -> grpc.ServerCertificateConfiguration | None:
            """Called at each handshake; None keeps the configuration in use. gRPC's core is not safe against replacing
            a configuration during other handshakes: a flood of handshakes crashed it when each brought its own."""
            nonlocal material
            fresh = self._material(others())
            if fresh == material:
                return None
            material = fresh
            return _configuration(material, client_certificates)

        dynamic: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(material, client_certificates),
            cast(Callable[[], grpc.ServerCertificateConfiguration], newest),  # its stubs do not allow None
            require_client_authentication=client_certificates,
        )
        return dynamic

    def _material(self, others: str) -> tuple[bytes, bytes, bytes]:
        """(key, chain, roots) as PEM."""
        self.refresh()
        return self._current.key_pem, self._chain(), self._current.ca_pem + others.encode()

    def refresh(self) -> None:
        """Renews the certificate when it nears its end, or when the issuing CA or a trusted CA has changed."""
        due = _is_due(self._current.certificate_pem, self._clock.wall())
        if due or self._current.ca_pem != self._authority.ca_pem:
            self._current = self._enrol()

    def _chain(self) -> bytes:
        return _leaf_pem(self._current.certificate_pem) + self._authority.chain_pem

    def _enrol(self) -> Enrolled:
        enrolled = self._authority.enrol_self(
            self._role, self._name, hosts=self._hosts, lifetime_s=LIFETIME_S, wall=self._clock.wall()
        )
        try:
            enrolled.write(self._folder)
        except OSError as error:  # serving goes on; readers of the files use the previous ones
            log.error("certificate_write_failed", folder=str(self._folder), error=str(error))
        return enrolled


@lru_cache(maxsize=1)
def _leaf_pem(certificate_pem: bytes) -> bytes:
    """The first certificate of the PEM. Every handshake calls this."""
    own = x509.load_pem_x509_certificate(certificate_pem)
    return own.public_bytes(serialization.Encoding.PEM)


def _configuration(
    material: tuple[bytes, bytes, bytes], client_certificates: bool
) -> grpc.ServerCertificateConfiguration:
    key, chain, roots = material
    return grpc.ssl_server_certificate_configuration([(key, chain)], roots if client_certificates else None)


def first_operator(authority: FileAuthority, wall: Wall) -> Enrolled:
    """A new key and certificate for the first operator, whom this machine certifies by itself."""
    return authority.enrol_self(Role.OPERATOR, OPERATOR, lifetime_s=LIFETIME_S, wall=wall)


def operator_certificate(folder: Path) -> bytes:
    """The first operator's certificate in `folder`; empty if there is none."""
    try:
        return (folder / "cert.pem").read_bytes()
    except FileNotFoundError:
        return b""


def is_due(authority: FileAuthority, folder: Path, wall: Wall) -> bool:
    """True if `folder`/{cert.pem,key.pem,ca.pem} must be created or renewed."""
    certificate, ca = operator_certificate(folder), folder / "ca.pem"
    return not certificate or not ca.exists() or ca.read_bytes() != authority.ca_pem or _is_due(certificate, wall)


def _is_due(certificate_pem: bytes, wall: Wall) -> bool:
    """True near its end, or before it is valid, since the clock may have been ahead when it was made."""
    dated = identity_of_pem(certificate_pem)
    return wall < dated.not_before or dated.not_after - wall < LIFETIME_S / 3

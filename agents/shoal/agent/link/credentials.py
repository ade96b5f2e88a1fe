"""This node's credentials towards its coordinator: files, mutual TLS, and the cause of a failed handshake."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from shoal.host.grpc_client import GrpcChannel
from shoal.host.tls import client_context
from shoal.http2.keepalive import Keepalive
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.wire.handshake import check_own, check_peer
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK
from shoal.wire.tls_files import read_identity


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """key.pem, cert.pem and ca.pem as enrolment wrote them.

    They are read again for each connection, so that the next one uses a renewed certificate.
    """

    folder: Path

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def identity(self) -> Identity:
        """Raises ShoalError(UNAUTHENTICATED) if there is no certificate or key, and ShoalError(CERT_NAME_INVALID)."""
        try:
            return read_identity(self.certificate, self.key)
        except OSError as cause:
            found = f"no {Path(cause.filename or self.certificate).name}: {cause.strerror}"
            raise refuse(Code.UNAUTHENTICATED, found, "an enrolled node", "run shoal-agent join") from cause


def coordinator_name(region: str) -> str:
    """The DNS name that the certificate of the region's coordinator must hold."""
    return dns_of(region, Role.COORDINATOR, "coordinator")


def open_channel(files: CredentialFiles, address: str, max_bytes: int, keepalive: Keepalive = LINK) -> GrpcChannel:
    """Raises ShoalError(UNAUTHENTICATED | CERT_NAME_INVALID)."""
    server_name = coordinator_name(files.identity().region)
    try:
        context = client_context(files.ca, files.certificate, files.key)
    except OSError as cause:
        found = f"the files in {files.folder.name}: {cause.strerror or cause}"
        raise refuse(Code.UNAUTHENTICATED, found, "an enrolled node", "run shoal-agent join") from cause
    return GrpcChannel(address, server_name, lambda: context, keepalive, max_bytes)


async def check_coordinator(files: CredentialFiles, address: str, wall: Wall) -> Refusal | None:
    """The result of a plain TLS handshake, which tells more than that of a call. None: it succeeded."""
    try:
        region = files.identity().region
        check_own(files, wall)
        await asyncio.to_thread(check_peer, files, address, coordinator_name(region))
    except ShoalError as error:
        return error.refusal
    except (OSError, ValueError) as cause:
        return _unreachable(address, f"{cause}")
    return None


def _unreachable(address: str, found: str) -> Refusal:
    return Refusal(
        Code.COORDINATOR_UNREACHABLE,
        f"{address}: {found}",
        "the region's coordinator",
        "check that it runs and that the address is right; this node goes on with what it holds",
    )

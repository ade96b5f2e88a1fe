"""This node's credentials towards its coordinator: files, mutual TLS, and the cause of a failed handshake."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from shoal.http2.keepalive import Keepalive
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.wire.handshake import check_own, check_peer
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK, channel_options
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


def open_channel(files: CredentialFiles, address: str, max_bytes: int, keepalive: Keepalive = LINK) -> grpc.aio.Channel:
    """Raises ShoalError(UNAUTHENTICATED)."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca),
        private_key=_read(files.key),
        certificate_chain=_read(files.certificate),
    )
    server_name = coordinator_name(files.identity().region)
    options = channel_options(max_bytes, server_name=server_name, keepalive=keepalive)
    return grpc.aio.secure_channel(address, credentials, options)


async def check_coordinator(files: CredentialFiles, address: str, wall: Wall) -> Refusal | None:
    """The result of a plain TLS handshake, made without grpc, which reports only `unavailable`. None: it succeeded."""
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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise refuse(
            Code.UNAUTHENTICATED, f"no {path.name}: {cause.strerror}", "an enrolled node", "run shoal-agent join"
        ) from cause

"""How this node speaks to its coordinator: its files, TLS both ways, and why a handshake failed."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.handshake import check_own, check_peer
from shoal.wire.identity import Identity, dns_of, identity_of_pem
from shoal.wire.limits import LINK, Patience, channel_options


@dataclass(frozen=True, slots=True)
class Files:
    """key.pem, cert.pem and ca.pem as enrolment wrote them; read again for each connection, so that a renewed
    certificate is used from the next one on."""

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
        """Raises ShoalError(UNAUTHENTICATED) where there is no certificate."""
        return identity_of_pem(_read(self.certificate))


def coordinator_name(region: str) -> str:
    """The DNS name that the region's coordinator must show."""
    return dns_of(region, Role.COORDINATOR, "coordinator")


def open_channel(files: Files, address: str, max_bytes: int, patience: Patience = LINK) -> grpc.aio.Channel:
    """Raises ShoalError(UNAUTHENTICATED)."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca),
        private_key=_read(files.key),
        certificate_chain=_read(files.certificate),
    )
    server_name = coordinator_name(files.identity().region)
    options = channel_options(max_bytes, server_name=server_name, patience=patience)
    return grpc.aio.secure_channel(address, credentials, options)


async def check_coordinator(files: Files, address: str, wall: Wall) -> Refusal | None:
    """What a plain handshake says, made apart from grpc, which says only `unavailable`. None: all is well."""
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

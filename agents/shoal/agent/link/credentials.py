"""How this node speaks to its coordinator: its files, TLS both ways, and why a handshake failed."""

import asyncio
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire.identity import Identity, check_validity, dns_of, identity_of_pem
from shoal.wire.limits import channel_options

HANDSHAKE_S: Final = 5.0


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


def open_channel(files: Files, address: str, max_bytes: int) -> grpc.aio.Channel:
    """Raises ShoalError(UNAUTHENTICATED)."""
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca),
        private_key=_read(files.key),
        certificate_chain=_read(files.certificate),
    )
    server_name = coordinator_name(files.identity().region)
    return grpc.aio.secure_channel(address, credentials, channel_options(max_bytes, server_name=server_name))


async def check_coordinator(files: Files, address: str, wall: Wall) -> Refusal | None:
    """What a plain handshake says, made apart from grpc, which says only `unavailable`. None: all is well."""
    try:
        identity = files.identity()
    except ShoalError as error:
        return error.refusal
    own = check_validity(identity, wall) or _check_issuer(files)
    return own or await asyncio.to_thread(_shake_hands, files, identity.region, address)


def _check_issuer(files: Files) -> Refusal | None:
    """A server may hang up on a stranger's certificate without a word, so this side looks at its own too."""
    try:
        own = x509.load_pem_x509_certificate(_read(files.certificate))
        own.verify_directly_issued_by(x509.load_pem_x509_certificate(_read(files.ca)))
    except (InvalidSignature, ValueError, TypeError):
        found = "this node's certificate is not of the authority in ca.pem"
        return Refusal(Code.CERT_UNTRUSTED, found, "one of its region", "join again")
    return None


def _shake_hands(files: Files, region: str, address: str) -> Refusal | None:
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=HANDSHAKE_S) as plain,
            context.wrap_socket(plain, server_hostname=coordinator_name(region)) as secured,
        ):
            # With TLS 1.3 the server judges our certificate after our side is done; a good one gets its settings.
            return None if secured.recv(1) else _unreachable(address, "it closed the connection")
    except ssl.SSLCertVerificationError as cause:
        return _theirs(cause, address)
    except ssl.SSLError as cause:
        return _ours(cause, address)
    except (OSError, ValueError) as cause:
        return _unreachable(address, f"{cause}")


def _theirs(cause: ssl.SSLCertVerificationError, address: str) -> Refusal:
    expired = cause.verify_code == 10  # X509_V_ERR_CERT_HAS_EXPIRED
    return Refusal(
        Code.CERT_EXPIRED if expired else Code.CERT_UNTRUSTED,
        f"the certificate of {address}: {cause.verify_message}",
        "this region's coordinator",
        "renew the coordinator's certificate" if expired else "check the address, or join again",
    )


def _ours(cause: ssl.SSLError, address: str) -> Refusal:
    reason = cause.reason or str(cause)
    if "CERTIFICATE_EXPIRED" in reason:
        return Refusal(Code.CERT_EXPIRED, f"{address} refused this node's certificate", "a valid one", "join again")
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return Refusal(
            Code.CERT_UNTRUSTED,
            f"{address} refused this node's certificate: {reason}",
            "one of its region",
            "join again",
        )
    return _unreachable(address, reason)


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

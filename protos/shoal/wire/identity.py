"""Identities in certificates, which every part reads in the same way.

A certificate of Shoal carries exactly one URI subject alternative name, `shoal://REGION/ROLE/NAME`. The common name is
for MQTT brokers, and ignored everywhere else. Servers also carry DNS and IP names, for ordinary TLS clients.
"""

import ipaddress
from functools import lru_cache
from typing import Any, Final, Protocol
from urllib.parse import unquote

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import NODES, Identity, parse_name
from shoal.types.units import Wall

COORDINATOR_USER: Final = "shoal.coordinator"
"""The coordinator's name at an MQTT broker. Other names have no dots, so no node can have it."""

BACKDATED_S: Final = 3600.0
"""Issued certificates become valid this much before their creation, because clocks differ."""

CERTIFICATE_ERRORS: Final = (
    ValueError,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""Errors that reading an untrusted certificate may raise."""


class GrpcContext(Protocol):
    """The part of grpc's (sync or aio) servicer context that identifies the peer."""

    def auth_context(self) -> Any: ...


def dns_of(region: str, role: Role, name: str) -> str:
    """The DNS name that a server of this identity answers to, which forwarders and links verify."""
    return f"{name}.{role}.{region}.shoal"


def common_name_of(role: Role, name: str) -> str:
    """Common name for MQTT brokers, which cannot read a URI name: for a node, its name. Empty: the role must not
    connect there."""
    if role in NODES:
        return name
    return COORDINATOR_USER if role is Role.COORDINATOR else ""


def store_user_of(scope: str) -> str:
    """User name of a region or a federation at a shared etcd, which is also the common name of its coordinators'
    certificates.

    scope: `region/eu`, `federation/eu`. The result begins with `region-` or `federation-`, so no region's name gives
    `root`, etcd's own user with all rights.
    """
    return scope.replace("/", "-")


def identity_of_certificate(certificate: x509.Certificate) -> Identity:
    """Raises ShoalError(CERT_NAME_INVALID) unless the certificate has exactly one URI name, in Shoal's form."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except CERTIFICATE_ERRORS as cause:
        raise refuse(
            Code.CERT_NAME_INVALID, "no readable subject alternative name", "one URI name", "enrol again"
        ) from cause
    if len(uris) != 1:
        raise refuse(Code.CERT_NAME_INVALID, f"{len(uris)} URI names", "exactly one", "enrol again with a join token")
    region, role, name = parse_name(uris[0])
    return Identity(
        region=region,
        role=role,
        name=name,
        not_before=Wall(certificate.not_valid_before_utc.timestamp()),
        not_after=Wall(certificate.not_valid_after_utc.timestamp()),
        serial=str(certificate.serial_number),
    )


@lru_cache(maxsize=1024)
def identity_of_pem(pem: bytes) -> Identity:
    """Identity of the first certificate in `pem`. Cached, because every call of a peer looks up the same one.

    Raises ShoalError(CERT_NAME_INVALID).
    """
    try:
        return identity_of_certificate(x509.load_pem_x509_certificate(pem))
    except CERTIFICATE_ERRORS as cause:
        raise refuse(Code.CERT_NAME_INVALID, "not a readable certificate", "one in PEM", "enrol again") from cause


def ca_fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of the certificate (DER), hex: what a join token pins."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def identity_of_der(der: bytes) -> Identity:
    """Takes DER, as `ssl.SSLSocket.getpeercert(binary_form=True)` returns it. Raises ShoalError(CERT_NAME_INVALID)."""
    try:
        return identity_of_certificate(x509.load_der_x509_certificate(der))
    except CERTIFICATE_ERRORS as cause:
        raise refuse(Code.CERT_NAME_INVALID, "not a readable certificate", "one in DER", "enrol again") from cause


def identity_of_context(context: GrpcContext) -> Identity:
    """The verified peer of a gRPC call. Raises ShoalError(UNAUTHENTICATED | CERT_NAME_INVALID)."""
    pems = context.auth_context().get("x509_pem_cert")
    if not pems:
        raise refuse(
            Code.UNAUTHENTICATED,
            "no client certificate",
            "a certificate of this region",
            "connect with the files of your context",
        )
    return identity_of_pem(pems[0])


def peer_ip(peer: str) -> str:
    """gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000` -> the address; empty where there is none."""
    _, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def check_validity(identity: Identity, wall: Wall, *, allowance_s: float = 0.0) -> Refusal | None:
    """Why the certificate is not valid at `wall`; None: it is. Called for each call, not for each handshake, so that a
    certificate that expires on an open connection is refused too."""
    if wall > identity.not_after + allowance_s:
        return Refusal(
            Code.CERT_EXPIRED,
            f"the certificate of {identity.uri} ended {wall - identity.not_after:.0f}s ago",
            "a valid certificate",
            "renew it, or enrol again with a join token",
        )
    if wall < identity.not_before - allowance_s:
        return Refusal(
            Code.CERT_NOT_YET_VALID,
            f"the certificate of {identity.uri} begins in {identity.not_before - wall:.0f}s",
            "a valid certificate",
            "set the clock of this machine",
        )
    return None


def require(identity: Identity, *, region: str, roles: frozenset[Role]) -> None:
    """Raises ShoalError(REGION_MISMATCH | ROLE_DENIED)."""
    if identity.region != region:
        raise ShoalError(
            Refusal(
                Code.REGION_MISMATCH,
                f"a certificate of region {identity.region}",
                f"one of {region}",
                "use that region's files",
            )
        )
    if identity.role not in roles:
        raise ShoalError(
            Refusal(
                Code.ROLE_DENIED,
                f"role {identity.role}",
                f"one of {', '.join(sorted(roles))}",
                "use a context whose certificate has that role",
            )
        )

"""What names a certificate carries, and what its holder may do. Reads no certificate itself: `certificates.py` does by
the cryptography library, `tls_files.py` by the ssl module alone.

A certificate of Shoal carries exactly one URI subject alternative name, `shoal://REGION/ROLE/NAME`. The common name is
for MQTT brokers, and ignored everywhere else. Servers also carry DNS and IP names, for ordinary TLS clients.
"""

import ipaddress
from typing import Final
from urllib.parse import unquote

from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.identity import NODES, Identity
from shoal.types.units import Wall, show_seconds

COORDINATOR_USER: Final = "shoal.coordinator"
"""The coordinator's name at an MQTT broker. Other names have no dots, so no node can have it."""

BACKDATED_S: Final = 3600.0
"""Issued certificates become valid this much before their creation, because clocks differ."""


def dns_of(region: str, role: Role, name: str) -> str:
    """The DNS name that a server of this identity answers to, which forwarders and links verify."""
    return f"{name}.{role}.{region}.shoal"


def ca_common_name_of(region: str) -> str:
    """Common name of each CA of a region or a federation. TLS finds a CA by its name, so no other party may send one of
    this name."""
    return f"Shoal region {region}"


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


def peer_address(peer: str) -> HostPort | None:
    """gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000` -> the address; None for a peer without one."""
    try:
        return HostPort.parse(unquote(peer).partition(":")[2])
    except ShoalError:
        return None


def peer_ip(peer: str) -> str:
    """The IP address of `peer` as gRPC names it, without port and zone; empty where there is none."""
    found = peer_address(peer)
    try:
        return str(ipaddress.ip_address(found.host.partition("%")[0])) if found is not None else ""
    except ValueError:
        return ""


def check_validity(identity: Identity, wall: Wall, *, allowance_s: float = 0.0) -> Refusal | None:
    """Why the certificate is not valid at `wall`; None: it is. Called for each call, not for each handshake, so that a
    certificate that expires on an open connection is refused too."""
    if wall > identity.not_after + allowance_s:
        return Refusal(
            Code.CERT_EXPIRED,
            f"the certificate of {identity.uri} ended {show_seconds(wall - identity.not_after)} ago",
            "a valid certificate",
            "renew it, or enrol again with a join token",
        )
    if wall < identity.not_before - allowance_s:
        return Refusal(
            Code.CERT_NOT_YET_VALID,
            f"the certificate of {identity.uri} begins in {show_seconds(identity.not_before - wall)}",
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
        *others, last = sorted(roles) or ("none",)
        raise ShoalError(
            Refusal(
                Code.ROLE_DENIED,
                f"role {identity.role}",
                f"role {' or '.join(filter(None, (', '.join(others), last)))}",
                "use a context whose certificate has that role",
            )
        )

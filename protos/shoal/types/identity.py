"""Names of regions and their members, and the identity that a certificate states.

An identity has one URI name, `shoal://REGION/ROLE/NAME`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shoal.types.codes import Code, refuse
from shoal.types.device import Role
from shoal.types.units import Wall

NAME_PATTERN: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Names of regions, nodes, tenants, operators, workloads, policies and models: a DNS label (RFC 1123) in lower case."""
NAME_RULE: Final = "1 to 63 of a-z, 0-9 and -, not starting or ending with -"

NODES: Final = frozenset({Role.AGENT, Role.GATEWAY})

_URI: Final = re.compile(r"shoal://([^/]*)/([^/]*)/([^/]*)")


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate's name and validity."""

    # Region in the URI name.
    region: str
    # Role in the URI name.
    role: Role
    # Name of the node, operator, tenant or coordinator in the URI name.
    name: str
    # Start of validity.
    not_before: Wall
    # End of validity.
    not_after: Wall
    # Serial number, decimal, as in the audit log.
    serial: str

    @property
    def uri(self) -> str:
        return uri_of(self.region, self.role, self.name)


def check_name(name: str, what: str) -> str:
    """`name` itself if it is a DNS label in lower case. Raises ShoalError(NAME_INVALID)."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise refuse(
            Code.NAME_INVALID,
            f"{what} {name!r:.80}",
            NAME_RULE,
            f"choose another {what}",
        )
    return name


def uri_of(region: str, role: Role, name: str) -> str:
    return f"shoal://{region}/{role}/{name}"


def parse_only_name(uris: Sequence[str]) -> tuple[str, Role, str]:
    """As `parse_name`, of all URI names of a certificate: there has to be one."""
    if len(uris) != 1:
        raise refuse(Code.CERT_NAME_INVALID, f"{len(uris)} URI names", "exactly one", "enrol again with a join token")
    return parse_name(uris[0])


def parse_name(uri: str) -> tuple[str, Role, str]:
    """(region, role, name). Raises ShoalError(CERT_NAME_INVALID)."""
    match = _URI.fullmatch(uri)
    invalid = refuse(
        Code.CERT_NAME_INVALID,
        "a URI name that is not ours",
        "shoal://REGION/ROLE/NAME",
        "enrol again with a join token",
    )
    if match is None:
        raise invalid
    region, role, name = match.groups()
    if NAME_PATTERN.fullmatch(region) is None or NAME_PATTERN.fullmatch(name) is None:
        raise invalid
    try:
        return region, Role(role), name
    except ValueError as cause:
        raise invalid from cause

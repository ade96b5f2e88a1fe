"""What may be dialled because a document, or another region, says so: never the inside of the network that the program
runs in because of a document; another region's members wherever they are, but nothing that no machine can be."""

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from shoal.types.codes import Code, Refusal, ShoalError

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NUMBER: Final = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]*))*", re.IGNORECASE)
"""What a resolver would take for an address: `0`, `0x7f.1`, `2852039166`."""
_HOST_PORT: Final = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9.-]{0,252}):([0-9]{1,5})")


def target_of_peer(address: str) -> str:
    """What gRPC dials for HOST:PORT, as another region told it: by name or number alone, never a socket of this machine
    (`unix-abstract:7`). That it is that region which answers, TLS proves by its CA before anything is said.

    Raises ShoalError as `refusal_of_peer` says."""
    if (refusal := refusal_of_peer(address)) is not None:
        raise ShoalError(refusal)
    return f"dns:///{address}"


def refusal_of_peer(address: str) -> Refusal | None:
    """Why no member of another region can be there: SOURCE_DENIED. Link-local addresses are those of this machine's own
    link (cloud metadata). Loopback and private ones are let through: regions may share a machine, or a network."""
    found = _HOST_PORT.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 65536:
        return _denied(f"{address!r:.120} is no address", "HOST:PORT")
    try:
        number = ipaddress.ip_address(found[1].strip("[]"))
    except ValueError:
        if _NUMBER.fullmatch(found[1]):
            return _denied(
                f"{address!r:.120} is a number in disguise", "a name, or an address as it is usually written"
            )
        return None
    inner = getattr(number, "ipv4_mapped", None) or number
    if inner.is_link_local or inner.is_multicast or inner.is_unspecified or str(inner) == "255.255.255.255":
        return _denied(f"{address!r:.120} is on this machine's own link, or nowhere", "where others reach that region")
    return None


def _denied(found: str, asked: str) -> Refusal:
    return Refusal(Code.SOURCE_DENIED, found, asked, "correct it at that region")


def refusal_of_address(host: str, address: str, allowed: Collection[str], remedy: str) -> Refusal | None:
    """Why `address`, to which `host` resolved, may not be dialled. allowed: hosts that the program's own command line
    names, which may be anywhere. To be asked of the very address that is then dialled: a name may change its mind."""
    if host.lower() in allowed or is_public(address):
        return None
    return Refusal(
        Code.SOURCE_DENIED,
        f"{host:.120} is at {address}, which is no public address",
        "a host on the internet",
        remedy,
    )


def is_public(address: str) -> bool:
    """False of loopback, private, link-local (cloud metadata), shared, multicast and reserved addresses, also where an
    IPv6 address stands for one of IPv4."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)

"""What may be dialled because a document says so: never the inside of the network that the program runs in."""

import ipaddress
from collections.abc import Collection
from typing import Final

from shoal.types.codes import Code, Refusal

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


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

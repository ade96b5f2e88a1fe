"""Which addresses may be dialled when a document, or another region, names them.

A document must never make the program dial the inside of its own network. Members of another region may be anywhere,
except at addresses that no remote machine can have.
"""

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from shoal.types.address import HostPort
from shoal.types.codes import Code, Refusal, ShoalError

_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_NUMBER: Final = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]*|[0-9]*))*", re.IGNORECASE)
"""Texts that a resolver would take for an address: `0`, `0x7f.1`, `2852039166`."""


def target_of_peer(address: str) -> str:
    """What gRPC dials for HOST:PORT from another region: by name or number only, never a socket of this machine
    (`unix-abstract:7`). TLS then proves by the region's CA that the right region answers, before any data is sent.

    Raises ShoalError for what `refusal_of_peer` refuses.
    """
    if (refusal := refusal_of_peer(address)) is not None:
        raise ShoalError(refusal)
    return f"dns:///{address}"


def refusal_of_peer(address: str) -> Refusal | None:
    """Why no member of another region can be at this address (SOURCE_DENIED); None: one can. Link-local addresses are
    on this machine's own link (cloud metadata). Loopback and private addresses are allowed, because regions may share a
    machine or a network."""
    try:
        found = HostPort.parse(address)
    except ShoalError:
        found = None
    if found is None or found.port == 0 or "%" in found.host:  # a zone means an interface of the machine that wrote it
        return _deny(f"{address!r:.120} is no address", "HOST:PORT")
    try:
        number = ipaddress.ip_address(found.host)
    except ValueError:
        if _NUMBER.fullmatch(found.host):
            return _deny(f"{address!r:.120} is a number in disguise", "a name, or an address as it is usually written")
        return None
    inner = getattr(number, "ipv4_mapped", None) or number
    if inner.is_link_local or inner.is_multicast or inner.is_unspecified or str(inner) == "255.255.255.255":
        return _deny(f"{address!r:.120} is on this machine's own link, or nowhere", "where others reach that region")
    return None


def _deny(found: str, asked: str) -> Refusal:
    return Refusal(Code.SOURCE_DENIED, found, asked, "correct it at that region")


def refusal_of_address(host: str, address: str, allowed: Collection[str], remedy: str) -> Refusal | None:
    """Why `address`, to which `host` resolved, may not be dialled; None: it may.

    allowed: hosts that the program's own command line names, which may be anywhere. Check the very address that is then
    dialled, because a name may resolve differently the next time.
    """
    if host.lower() in allowed or is_public(address):
        return None
    return Refusal(
        Code.SOURCE_DENIED,
        f"{host:.120} is at {address}, which is no public address",
        "a host on the internet",
        remedy,
    )


def is_public(address: str) -> bool:
    """False for loopback, private, link-local (cloud metadata), shared, multicast and reserved addresses, and for IPv6
    addresses that embed such an IPv4 address."""
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

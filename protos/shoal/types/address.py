"""HOST:PORT as text and as a value. An IPv6 address stands in brackets, as in a URL (RFC 3986): `[::1]:7444`."""

import re
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Final, Self

from shoal.types.codes import Code, ShoalError, refuse

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_IPV6: Final = re.compile(r"([0-9A-Fa-f:.]{2,45})(?:%[A-Za-z0-9._-]{1,15})?")
"""With the zone of a link-local address, an interface of this machine: `fe80::1%eth0`."""
_ADDRESS: Final = re.compile(rf"(\[{_IPV6.pattern}\]|{_NAME.pattern}):([0-9]{{1,5}})")


@dataclass(frozen=True, slots=True)
class HostPort:
    """An address to listen on or dial. Port 0 of a listener: any free port."""

    # Name, IPv4 address, or IPv6 address without brackets.
    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str = "address") -> Self:
        """Raises ShoalError(FIELD_INVALID)."""
        found = _ADDRESS.fullmatch(text)
        if found is None or int(found[3]) > 65535:
            raise _invalid(what, text)
        try:
            return cls(parse_host(found[1]), int(found[3]))
        except ShoalError as cause:
            raise _invalid(what, text) from cause

    @property
    def is_any(self) -> bool:
        """True if the host means every address of this machine, so that nobody can dial it."""
        return self.host in ("", "0.0.0.0", "::")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host(text: str, what: str = "host") -> str:
    """A host without a port; an IPv6 address loses its brackets. Raises ShoalError(FIELD_INVALID)."""
    if _NAME.fullmatch(text):
        return text
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    found = _IPV6.fullmatch(host)
    if found is None or not _is_ipv6(found[1]):
        raise refuse(
            Code.FIELD_INVALID, f"{what} {text!r:.120}", "a name or an IP address", "for example 10.0.0.7 or ::1"
        )
    return host


def is_dialable(address: str) -> bool:
    """True for an address that another machine can dial: a zone means an interface of the machine that wrote it."""
    try:
        found = HostPort.parse(address)
    except ShoalError:
        return False
    return found.port > 0 and "%" not in found.host


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _invalid(what: str, text: str) -> ShoalError:
    return refuse(
        Code.FIELD_INVALID,
        f"{what} {text!r:.120}",
        "HOST:PORT, an IPv6 address in brackets",
        "for example 127.0.0.1:7443 or [::1]:7443",
    )

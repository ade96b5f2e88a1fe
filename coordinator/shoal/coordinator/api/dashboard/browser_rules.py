"""What a browser may ask for, and what it is told to refuse itself. Pure.

A browser carries its user's cookie or certificate wherever a page of another site sends it, so each request has to show
that this dashboard's own page made it: by the host that it names (a name that an attacker points here is not ours), by
`Sec-Fetch-Site`, and by `Origin` where there is one.
"""

from collections.abc import Mapping
from typing import Final

from shoal.types.address import HostPort, parse_host
from shoal.types.codes import Code, Refusal, ShoalError

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts by which a browser reaches the tunnel of `shoal dashboard`."""
SECURITY_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "manifest-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
"""Of every answer."""
_FRAMES: Final = frozenset({"frame", "iframe", "embed", "object"})


def host_refusal(headers: Mapping[str, str], hosts: frozenset[str]) -> Refusal | None:
    """Why a request for this `Host` is refused; None: it is not. hosts: names and addresses of this coordinator."""
    named = headers.get("host", "")
    if _host_of(named) in hosts | LOOPBACK:
        return None
    return Refusal(
        Code.ROLE_DENIED,
        f"host {named!r:.80}",
        "one that this coordinator is known by",
        "open it by its own address, or name this one with --dashboard-host",
    )


def site_refusal(method: str, headers: Mapping[str, str], *, is_page: bool) -> Refusal | None:
    """Why a request that another site caused is refused; None: it is not. is_page: it is for the page itself, to which
    other sites may link, and which shows nothing before its own requests are answered."""
    site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
    if headers.get("sec-fetch-dest", "") in _FRAMES:
        return _cross_site("a frame")
    if site not in ("", "same-origin", "none") and not (is_page and headers.get("sec-fetch-mode", "") == "navigate"):
        return _cross_site(f"a request of another site ({site:.20})")
    if origin and not _is_same_origin(origin, headers.get("host", "")):
        return _cross_site(f"a request of {origin!r:.80}")
    if method == "POST" and not headers.get("content-type", "").startswith(("application/json", "application/yaml")):
        return _cross_site("a form")
    return None


def cookie_of(headers: Mapping[str, str], name: str) -> str:
    """The value of a cookie; empty without one."""
    for pair in headers.get("cookie", "").split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value
    return ""


def _is_same_origin(origin: str, host: str) -> bool:
    """`Origin` ends with what `Host` says. Its scheme is http behind the tunnel of `shoal dashboard`, which is no way
    around this: another page of that host and port is this page."""
    scheme, _, named = origin.partition("://")
    return scheme in ("https", "http") and named.lower() == host.lower()


def _host_of(named: str) -> str:
    """The host of a `Host` header, without its port; empty for what is none."""
    try:
        host = HostPort.parse(named).host if ":" in named.rpartition("]")[2] else parse_host(named)
    except ShoalError:
        return ""
    return host.lower().rstrip(".")


def _cross_site(found: str) -> Refusal:
    return Refusal(Code.ROLE_DENIED, found, "one of the dashboard's own page", "open the dashboard by itself")

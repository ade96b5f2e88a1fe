"""Whose gateways this region's may meet, whichever side of an agreement each is on."""

from collections.abc import Iterable

from shoal.types.assignment import PeerTrust


def united(*parts: Iterable[PeerTrust]) -> tuple[PeerTrust, ...]:
    """One for each region, by name: all of its gateways and agreements that any part names, and the roots of either."""
    found = dict[str, PeerTrust]()
    for each in (each for part in parts for each in part):
        known = found.get(each.region)
        found[each.region] = each if known is None else _joined(known, each)
    return tuple(found[region] for region in sorted(found))


def _joined(one: PeerTrust, other: PeerTrust) -> PeerTrust:
    return PeerTrust(
        region=one.region,
        roots=tuple(dict.fromkeys((*one.roots, *other.roots))),
        gateways=tuple(sorted({*one.gateways, *other.gateways})),
        agreements=tuple(sorted({*one.agreements, *other.agreements})),
        revoked=tuple(sorted({*one.revoked, *other.revoked})),
    )

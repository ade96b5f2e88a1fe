"""Which regions' gateways this region's gateways may connect to, on either side of an agreement."""

from collections.abc import Iterable

from shoal.coordinator.core.negotiation.message_rules import CALLERS_MOST, REVOKED_MOST
from shoal.types.assignment import PeerTrust


def merge_peers(*parts: Iterable[PeerTrust]) -> tuple[PeerTrust, ...]:
    """One entry per region, by name, with the gateways, agreements, roots and revocations of every part: as many as one
    part may have. A region says the same in all its agreements, unless it means to fill this region's gateways."""
    found = dict[str, PeerTrust]()
    for each in (each for part in parts for each in part):
        known = found.get(each.region)
        found[each.region] = each if known is None else _merge(known, each)
    return tuple(found[region] for region in sorted(found))


def _merge(one: PeerTrust, other: PeerTrust) -> PeerTrust:
    return PeerTrust(
        region=one.region,
        roots=tuple(dict.fromkeys((*one.roots, *other.roots))),
        gateways=tuple(sorted({*one.gateways, *other.gateways})[:CALLERS_MOST]),
        agreements=tuple(sorted({*one.agreements, *other.agreements})),
        revoked=tuple(sorted({*one.revoked, *other.revoked})[:REVOKED_MOST]),
    )

"""The state of the federation: its members, what each offers now, and how far its reports are trusted. Values are
replaced as messages arrive.

A lease starts when this replica learns of the advertisement, on its own monotonic clock. Replicas therefore need no
common clock, and a replica that starts gives every region one full lease.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from shoal.coordinator.core.negotiation import reputation, standing
from shoal.coordinator.core.negotiation.standing import LedgerStandings
from shoal.types.agreement import Delivered
from shoal.types.offer import Advertisement, Directory, Member
from shoal.types.units import Elapsed, Wall

RECORDS_KEPT: Final = 64
"""Delivery records kept for each pair of regions: those of the newest agreements."""
STANDING_QUORUM: Final = 3
"""Delegates whose reports are needed before they alone decide the standing of an asking region."""


CoarseCapacity = tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class LiveAdvertisement:
    """The newest valid advertisement of a region."""

    advertisement: Advertisement
    # When this replica learned of it; its lease starts here.
    heard_at: Elapsed


@dataclass(frozen=True, slots=True)
class FederationState:
    """What one replica of the federation knows."""

    # Members by region name, as they described themselves: without advertisement, with trust 1.
    members: Mapping[str, Member] = field(default_factory=dict)
    # Newest advertisement by region name. Its lease may have expired.
    advertisements: Mapping[str, LiveAdvertisement] = field(default_factory=dict)
    # By region name, `coarse_capacity` of it. The same mapping until one of them changes.
    capacities: Mapping[str, CoarseCapacity] = field(default_factory=dict)
    # Delivery records by delegate, then by origin; the oldest first.
    deliveries: Mapping[str, Mapping[str, tuple[Delivered, ...]]] = field(default_factory=dict)
    # Trust by delegate, computed from `deliveries` (`trust_score`); an absent delegate has trust 1.
    trust: Mapping[str, float] = field(default_factory=dict)
    # By delegate, what its ledger says about the regions that let it hold capacity.
    askers: Mapping[str, LedgerStandings] = field(default_factory=dict)

    def with_member(self, member: Member) -> "FederationState":
        return replace(self, members={**self.members, member.region: member})

    def with_advertisement(self, advertisement: Advertisement, now: Elapsed) -> "FederationState":
        """Ignores an advertisement that is not newer: the same one, as another replica may have stored it, must not
        extend the lease."""
        before = self.advertisements.get(advertisement.region)
        if before is not None and before.advertisement.sequence >= advertisement.sequence:
            return self
        region, capacity = advertisement.region, coarse_capacity(advertisement)
        known = self.capacities
        return replace(
            self,
            advertisements={**self.advertisements, region: LiveAdvertisement(advertisement, now)},
            capacities=known if known.get(region) == capacity else {**known, region: capacity},
        )

    def with_deliveries(self, origin: str, delivered: Mapping[str, tuple[Delivered, ...]]) -> "FederationState":
        """delivered: to `origin`, by delegate."""
        if not delivered:
            return self
        seen = {region: {**self.deliveries.get(region, {}), origin: each} for region, each in delivered.items()}
        trust = {region: trust_score(region, each) for region, each in seen.items()}
        return replace(self, deliveries={**self.deliveries, **seen}, trust={**self.trust, **trust})

    def deliveries_to(self, origin: str, region: str) -> tuple[Delivered, ...]:
        return self.deliveries.get(region, {}).get(origin, ())

    def with_askers(self, region: str, askers: LedgerStandings) -> "FederationState":
        return replace(self, askers={**self.askers, region: askers})

    def without(self, region: str) -> "FederationState":
        """Removes a member. Its delivery records stay, because it may join again under the same name."""
        members = {name: member for name, member in self.members.items() if name != region}
        return replace(
            self,
            members=members,
            advertisements={name: live for name, live in self.advertisements.items() if name != region},
            capacities={name: each for name, each in self.capacities.items() if name != region},
        )

    def has_same_directory(self, other: "FederationState") -> bool:
        """Whether both have the same directory, as far as leases, figures in small steps and time do not change it."""
        return (
            self.members is other.members
            and self.capacities is other.capacities
            and self.trust is other.trust
            and self.askers is other.askers
        )


def make_directory(state: FederationState, federation: str, now: Elapsed, wall: Wall) -> Directory:
    """The directory as this replica sees it: members by name, with advertisements whose lease has not expired.

    Which CAs of the federation a member trusts concerns no other one.
    """
    current = {each.region: replace(each, trusted_roots=()) for each in live_advertisements(state, now)}
    members = tuple(
        replace(
            member,
            advertisement=current.get(region),
            trust=state.trust.get(region, 1.0),
            standing=standing_of(state, region, wall),
        )
        for region, member in sorted(state.members.items())
    )
    return Directory(federation, _directory_version(members), members)


def directory_for(region: str, directory: Directory) -> Directory:
    """As `region` is told it: of round trips and heads that other members advertise, those with itself. All of them
    would grow with the square of the members."""
    members = tuple(
        member
        if member.advertisement is None
        else replace(member, advertisement=_advertisement_for(region, member.advertisement))
        for member in directory.members
    )
    return replace(directory, members=members)


def _advertisement_for(region: str, advertisement: Advertisement) -> Advertisement:
    rtt_s, heads = advertisement.rtt_s, advertisement.heads
    return replace(
        advertisement,
        rtt_s={region: rtt_s[region]} if region in rtt_s else {},
        heads={region: heads[region]} if region in heads else {},
    )


def live_advertisements(state: FederationState, now: Elapsed) -> tuple[Advertisement, ...]:
    """Of members, by name: the newest valid one, if its lease has not expired."""
    found = (state.advertisements.get(region) for region in sorted(state.members))
    return tuple(
        live.advertisement for live in found if live is not None and now < live.heard_at + live.advertisement.lease_s
    )


def merge_deliveries(known: Iterable[Delivered], reported: Iterable[Delivered]) -> tuple[Delivered, ...]:
    """The newest record of each agreement. Beyond RECORDS_KEPT the oldest agreements are dropped."""
    by_agreement = {each.agreement: each for each in known}
    for each in reported:
        by_agreement.pop(each.agreement, None)
        by_agreement[each.agreement] = each
    return tuple(by_agreement.values())[-RECORDS_KEPT:]


def trust_score(region: str, seen: Mapping[str, tuple[Delivered, ...]]) -> float:
    """Median of what each origin saw. 1: as promised; lower: worse than promised.

    seen: by origin, what `region` delivered to it.
    """
    return median(reputation.trust_of(records).get(region, 1.0) for records in seen.values()) if seen else 1.0


def standing_of(state: FederationState, region: str, wall: Wall) -> float:
    """Median of what other regions report about the holds they granted to `region`. 1: all holds were used, or it asked
    for none; lower: holds were wasted.

    While fewer than STANDING_QUORUM regions report, the missing ones count as 1, so that one lying region cannot ruin
    another's standing alone.
    """
    said = [
        standing.value(askers.standings[region], wall)
        for delegate, askers in state.askers.items()
        if delegate != region and region in askers.standings
    ]
    return median([*said, *[1.0] * (STANDING_QUORUM - len(said))])


def coarse_capacity(advertisement: Advertisement) -> CoarseCapacity:
    """Capacity in steps of about a fifth of free memory. A smaller change does not make a new directory version."""
    return tuple(
        (each.device_class, each.runtime, each.precisions, each.devices, round(4 * math.log2(1 + each.free_bytes)))
        for each in advertisement.classes
    )


def _directory_version(members: tuple[Member, ...]) -> int:
    """The same number on every replica that knows the same. What changes with every advertisement is left out."""
    told = [
        (
            *(member.region, member.address, member.roots, member.residency),
            *(round(member.trust, 2), round(member.standing, 1)),
            coarse_capacity(member.advertisement) if member.advertisement is not None else None,
        )
        for member in members
    ]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 or 1

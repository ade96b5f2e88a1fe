"""Who is in the federation, what each offers now, and how far its word is trusted: values, replaced as things happen.

A lease is counted from when this replica heard (of) the advertisement, on its own elapsed time: replicas need no common
clock, and one that starts gives everybody a lease's time.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from shoal.coordinator.core.negotiation import reputation, standing
from shoal.coordinator.core.negotiation.standing import Askers
from shoal.types.agreement import Delivered
from shoal.types.offer import Advertisement, Directory, Member
from shoal.types.units import Elapsed, Wall

RECORDS_KEPT: Final = 64
"""Of what one region delivered to another: the newest agreements."""
WITNESSES: Final = 3
"""So many delegates' words make an asker's standing."""


@dataclass(frozen=True, slots=True)
class Live:
    """The newest advertisement of a region that counted."""

    advertisement: Advertisement
    heard_at: Elapsed


@dataclass(frozen=True, slots=True)
class Book:
    """members: as they said of themselves (no advertisement, trust 1).

    delivered: by delegate and origin, oldest first. trust: by delegate, what follows from that (`trusted`). askers: by
    delegate."""

    members: Mapping[str, Member] = field(default_factory=dict)
    live: Mapping[str, Live] = field(default_factory=dict)
    delivered: Mapping[str, Mapping[str, tuple[Delivered, ...]]] = field(default_factory=dict)
    trust: Mapping[str, float] = field(default_factory=dict)
    askers: Mapping[str, Askers] = field(default_factory=dict)

    def with_member(self, member: Member) -> "Book":
        return replace(self, members={**self.members, member.region: member})

    def with_advertisement(self, advertisement: Advertisement, now: Elapsed) -> "Book":
        """The same one again, as another replica may have written it, extends nothing."""
        before = self.live.get(advertisement.region)
        if before is not None and before.advertisement.sequence >= advertisement.sequence:
            return self
        return replace(self, live={**self.live, advertisement.region: Live(advertisement, now)})

    def with_delivered(self, origin: str, region: str, delivered: tuple[Delivered, ...]) -> "Book":
        seen = {**self.delivered.get(region, {}), origin: delivered}
        return replace(
            self,
            delivered={**self.delivered, region: seen},
            trust={**self.trust, region: trusted(region, seen)},
        )

    def delivered_to(self, origin: str, region: str) -> tuple[Delivered, ...]:
        return self.delivered.get(region, {}).get(origin, ())

    def with_askers(self, region: str, askers: Askers) -> "Book":
        return replace(self, askers={**self.askers, region: askers})

    def without(self, region: str) -> "Book":
        """Its records stay: it may join again under its name."""
        members = {name: member for name, member in self.members.items() if name != region}
        return replace(self, members=members, live={name: live for name, live in self.live.items() if name != region})


def listed(book: Book, federation: str, now: Elapsed, wall: Wall) -> Directory:
    members = tuple(
        replace(
            member,
            advertisement=_current(book, region, now),
            trust=book.trust.get(region, 1.0),
            standing=standing_of(book, region, wall),
        )
        for region, member in sorted(book.members.items())
    )
    return Directory(federation, _version(members), members)


def merged(known: Iterable[Delivered], told: Iterable[Delivered]) -> tuple[Delivered, ...]:
    """The newest word of each agreement; the oldest agreements go first."""
    by_agreement = {each.agreement: each for each in known}
    for each in told:
        by_agreement.pop(each.agreement, None)
        by_agreement[each.agreement] = each
    return tuple(by_agreement.values())[-RECORDS_KEPT:]


def trusted(region: str, seen: Mapping[str, tuple[Delivered, ...]]) -> float:
    """1: as promised; less below. The median of what each origin saw.

    seen: by origin, what `region` delivered to it."""
    return median(reputation.of(records).get(region, 1.0) for records in seen.values()) if seen else 1.0


def standing_of(book: Book, region: str, wall: Wall) -> float:
    """1: what others held for it came to something, or nobody held anything; less below. The median of those who held;
    while they are fewer than `WITNESSES`, the others are taken to find no fault: one that lies ruins nobody alone."""
    said = [
        standing.value(askers.standings[region], wall)
        for delegate, askers in book.askers.items()
        if delegate != region and region in askers.standings
    ]
    return median([*said, *[1.0] * (WITNESSES - len(said))])


def _current(book: Book, region: str, now: Elapsed) -> Advertisement | None:
    live = book.live.get(region)
    if live is None or now >= live.heard_at + live.advertisement.lease_s:
        return None
    return live.advertisement


def _coarse(advertisement: Advertisement | None) -> list[tuple[object, ...]] | None:
    """What free memory is worth telling again: a fifth more or less."""
    if advertisement is None:
        return None
    return [
        (each.device_class, each.runtime, each.precisions, each.devices, round(4 * math.log2(1 + each.free_bytes)))
        for each in advertisement.classes
    ]


def _version(members: tuple[Member, ...]) -> int:
    """The same of every replica that knows the same. What changes with each advertisement alone is left out."""
    told = [
        (
            *(member.region, member.address, member.roots, member.residency),
            *(round(member.trust, 2), round(member.standing, 1)),
            _coarse(member.advertisement),
        )
        for member in members
    ]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1 or 1

"""Desired sets as the store has them. What a gateway is told grows with the region, and follows from what is stored of
the region anyway, so it is not stored again with every change.

Of a set with many routes, the store has the set without its routes and without what it may forward to, and a digest of
these. A start finds the set without them, and its first step decides them anew. Where they are what the digest says, it
is the set that was sent: nothing is written or sent. Otherwise it is a new set, as it is where an older coordinator
wrote a set since, which has no digest then. One that reads such a set also finds it without routes, and decides them.

The set of a node that asks for routes is one record: until it says what it asks for, that is what it has routes of.
Earlier versions wrote routes and what may be forwarded to below `LARGE`; nothing reads that any more.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Final, NamedTuple

from shoal.coordinator import codec
from shoal.coordinator.core.workloads.changed import same_ends
from shoal.coordinator.core.workloads.model import DesiredContent
from shoal.coordinator.ports import StoreRecord
from shoal.types.assignment import DesiredSet, Forwarding, Front, Version
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

DESIRED: Final = "desired/"
DIGESTS: Final = "set-digests/"
LARGE: Final = "large-sets/"
FEW: Final = 64
"""Up to so many routes, a set is one record."""
MOST_LEFT: Final = 32
"""Of the records that nobody needs any more, one step deletes so many."""
SUMS: Final = 2**256
"""Of routes, the digest is the sum of their hashes modulo this, so that one of them changes it without a look at the
others. That two sets of routes have the same is a matter of chance: whose workloads they are could at most keep their
own routes as they were."""


@dataclass(frozen=True, slots=True)
class SetDigest:
    """Of what the store does not have of a set."""

    # Of the set.
    version: Version
    # Of its routes.
    routes: str
    # Of what it may forward to; empty: it has none.
    forwarding: str


@dataclass(slots=True)
class _Routes:
    """The routes of a set."""

    # Of the set.
    version: Version
    # Each route and its hash, by workload.
    hashes: dict[WorkloadKey, tuple[Route, int]]
    # Of all, modulo SUMS.
    total: int


class _Fronts(NamedTuple):
    """The fronts that gateways list."""

    fronts: tuple[Front, ...]
    # Of each, in order.
    texts: list[bytes]
    # Of all of them.
    digest: str


class DesiredSetRecords:
    """Writes sets, and knows those again that were written."""

    def __init__(self) -> None:
        self._incomplete: dict[str, SetDigest] = {}
        """By node: of the sets that were loaded without their routes."""
        self._stored: set[str] = set()
        """Nodes of which the store may have a digest."""
        self._left: dict[str, None] = {}
        """Keys of records of earlier versions, in order."""
        self._routes: dict[str, _Routes] = {}
        """By node: of the last set that was to be written, or that was known again."""
        self._hashes: Mapping[WorkloadKey, tuple[Route, int]] = {}
        """Of the set that was looked at last: gateways have the same routes."""
        self._fronts: dict[str, tuple[Front, bytes]] = {}
        """By name: the text of a front that forwards nothing. A gateway's set lists all nodes that serve."""
        self._listed = _Fronts((), [], hashlib.sha256(b"").hexdigest())
        """The last ones: all gateways list the same."""

    def load(
        self, sets: Iterable[StoreRecord], digests: Iterable[StoreRecord], left: Iterable[StoreRecord] = ()
    ) -> dict[str, DesiredSet]:
        """All sets, by node, some of them without routes and what they may forward to. sets, digests, left: records
        below DESIRED, DIGESTS and LARGE. Raises ShoalError(STATE_CORRUPT)."""
        found = {each.key.removeprefix(DESIRED): codec.load(DesiredSet, each.value) for each in sets}
        known = {each.key.removeprefix(DIGESTS): codec.load(SetDigest, each.value) for each in digests}
        self._stored, self._left, self._routes = {*known}, dict.fromkeys(sorted(each.key for each in left)), {}
        self._incomplete = {
            node: each for node, each in known.items() if node in found and found[node].version == each.version
        }
        return found

    @property
    def incomplete(self) -> Collection[str]:
        """Nodes whose set was loaded without its routes, until `adopt` has them."""
        return self._incomplete.keys()

    def find_complete(
        self, sets: Mapping[str, DesiredSet], decided: Mapping[str, DesiredContent]
    ) -> dict[str, DesiredSet]:
        """Incomplete sets as they were when they were written, by node, where what is decided now has the routes of
        then, and may forward to the same; for the rest of them it may decide something else."""
        found = dict[str, DesiredSet]()
        for node, digest in self._incomplete.items():
            known, content = sets.get(node), decided.get(node)
            if known is None or content is None or known.version != digest.version:
                continue
            routes = self._hashed(known.version, content.routes)
            if digest == self._digest_of(routes, content.forwarding):
                self._routes[node] = routes
                found[node] = replace(known, routes=content.routes, forwarding=content.forwarding)
        return found

    def write(
        self, desired: DesiredSet, before: Version | None = None, changed: Collection[WorkloadKey] | None = None
    ) -> Mapping[str, bytes]:
        """Values by key. changed: workloads whose routes may be others than in the set of that version, that came, or
        that went; None: any may be."""
        node, known = desired.node, self._routes.pop(desired.node, None)
        if not _is_large(desired):
            return {DESIRED + node: codec.dump(desired)}
        if known is None or known.version != before or changed is None:
            known = self._hashed(desired.version, desired.routes)
        else:
            self._update(known, desired, changed)
        self._routes[node] = known
        self._stored.add(node)
        return {
            DESIRED + node: codec.dump(replace(desired, routes=(), forwarding=None)),
            DIGESTS + node: codec.dump(self._digest_of(known, desired.forwarding)),
        }

    def parts(self, node: str) -> tuple[str, ...]:
        """Keys that the store may have of a node besides that of its set: to be deleted with the node."""
        return (DIGESTS + node,) if node in self._stored else ()

    def obsolete_keys(self, *sets: Mapping[str, DesiredSet]) -> tuple[str, ...]:
        """Keys of some records that nobody needs: of earlier versions, and digests of complete sets and of nodes that
        an older coordinator removed. sets: all that there are, by node; the first that has a node counts."""
        of_nodes = ((node, next((each[node] for each in sets if node in each), None)) for node in sorted(self._stored))
        unneeded = (
            DIGESTS + node
            for node, desired in of_nodes
            if node not in self._incomplete and (desired is None or not _is_large(desired))
        )
        return tuple(islice(chain(self._left, unneeded), MOST_LEFT))

    def adopt(self, completed: Iterable[str], left: Iterable[str]) -> None:
        """The sets of these nodes have their routes now, as others were written or as they were found, and these
        records are deleted."""
        for node in completed:
            self._incomplete.pop(node, None)
        for key in left:
            self._left.pop(key, None)
            self._stored.discard(key.removeprefix(DIGESTS))

    def forget(self, node: str) -> None:
        """The node is gone, and its records are deleted."""
        self._incomplete.pop(node, None)
        self._routes.pop(node, None)
        self._fronts.pop(node, None)
        self._stored.discard(node)

    def _hashed(self, version: Version, routes: Sequence[Route]) -> _Routes:
        hashes = {route.workload: self._hash_of(route) for route in routes}
        self._hashes = hashes
        return _Routes(version, hashes, sum(each for _, each in hashes.values()) % SUMS)

    def _update(self, known: _Routes, desired: DesiredSet, changed: Collection[WorkloadKey]) -> None:
        """Takes over the routes of these workloads."""
        routes, hashes = desired.routes, known.hashes
        for key in changed:
            at = bisect_left(routes, key, key=lambda route: route.workload)
            if key in hashes:
                known.total -= hashes.pop(key)[1]
            if at < len(routes) and routes[at].workload == key:
                hashes[key] = self._hash_of(routes[at])
                known.total += hashes[key][1]
        known.version, known.total = desired.version, known.total % SUMS
        self._hashes = hashes

    def _hash_of(self, route: Route) -> tuple[Route, int]:
        known = self._hashes.get(route.workload)
        if known is not None and known[0] == route:
            return known
        return route, int.from_bytes(hashlib.sha256(codec.dump(route)).digest(), "big")

    def _digest_of(self, routes: _Routes, forwarding: Forwarding | None) -> SetDigest:
        of_fronts = "" if forwarding is None else self._forwarding_digest(forwarding)
        return SetDigest(routes.version, f"{routes.total:064x}", of_fronts)

    def _forwarding_digest(self, forwarding: Forwarding) -> str:
        fronts, before = forwarding.fronts, self._listed
        if before.fronts is not fronts:
            start, end = same_ends(before.fronts, fronts)
            texts = before.texts
            texts[start : len(before.fronts) - end] = map(self._front_text, fronts[start : len(fronts) - end])
            self._listed = _Fronts(fronts, texts, hashlib.sha256(b",".join(texts)).hexdigest())
        return hashlib.sha256(json.dumps([self._listed.digest, *forwarding.enters]).encode()).hexdigest()

    def _front_text(self, front: Front) -> bytes:
        if front.workloads:
            return codec.dump(front)
        known = self._fronts.get(front.node)
        if known is None or known[0] is not front:
            known = self._fronts[front.node] = front, codec.dump(front)
        return known[1]


def _is_large(desired: DesiredSet) -> bool:
    """Whether the store has a digest of its routes."""
    return len(desired.routes) > FEW and not desired.routes_on_demand

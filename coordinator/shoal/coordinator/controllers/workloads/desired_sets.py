"""Desired sets as the store has them. What a gateway is told grows with the region, so what stays in it is not written
again with every change.

A set with many routes is several records: the set without its routes and without what it may forward to, and these by
themselves, the routes some at a time. `LARGE/NODE` says of which version they are: an older coordinator writes the set
as a whole and leaves the other records as they are, so that they are of no set any more. One that reads such a set
finds it without routes, and its first step decides them anew. A set with routes on demand is one record, because what
its node subscribes to is read from it after a restart.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.coordinator import codec
from shoal.coordinator.ports import StoreRecord
from shoal.types.assignment import DesiredSet, Forwarding, Front, Version
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

DESIRED: Final = "desired/"
LARGE: Final = "large-sets/"
FORWARDING: Final = "/forwarding"
BLOCK: Final = "/routes/"
FEW: Final = 64
"""Up to so many routes, a set is one record."""
SIZE: Final = 24
"""Routes of one record of a larger set; at most twice as many."""


@dataclass(frozen=True, slots=True)
class LargeSet:
    """Of which set the records of a node are."""

    # Of the set.
    version: Version


@dataclass(frozen=True, slots=True)
class RouteBlock:
    """Routes that follow each other."""

    # In order.
    routes: tuple[Route, ...]


@dataclass(frozen=True, slots=True)
class SetWrites:
    """Of one or more sets."""

    # Values by key.
    puts: Mapping[str, bytes] = field(default_factory=dict)
    # Keys to delete.
    deletes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Written:
    """The records of a large set."""

    # Of the set.
    version: Version
    # Workloads of the routes of each block, in order; at least one block.
    blocks: list[list[WorkloadKey]]
    # Number of each block.
    numbers: list[int]
    # As it was written.
    forwarding: Forwarding | None


class DesiredSetRecords:
    """Writes what changed of each set. It keeps which routes are in which record, and no text."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}
        self._stored: dict[str, set[str]] = {}
        """By node: records of a large set that the store may have."""
        self._fronts: dict[str, tuple[Front, bytes]] = {}
        """By name: what was written of a front that forwards nothing. A gateway's set lists all nodes that serve."""

    def load(self, sets: Iterable[StoreRecord], parts: Iterable[StoreRecord]) -> dict[str, DesiredSet]:
        """All sets, by node. sets, parts: records below DESIRED and LARGE. Raises ShoalError(STATE_CORRUPT)."""
        self._written, self._stored = {}, {}
        found = {each.key.removeprefix(DESIRED): codec.load(DesiredSet, each.value) for each in sets}
        versions, forwardings = dict[str, Version](), dict[str, Forwarding | None]()
        blocks = dict[str, dict[int, tuple[Route, ...]]]()
        for each in parts:
            node, slash, rest = each.key.removeprefix(LARGE).partition("/")
            self._stored.setdefault(node, set()).add(each.key)
            if not slash:
                versions[node] = codec.load(LargeSet, each.value).version
            elif slash + rest == FORWARDING:
                forwardings[node] = codec.load(Forwarding, each.value)
            else:
                number = int((slash + rest).removeprefix(BLOCK))
                blocks.setdefault(node, {})[number] = codec.load(RouteBlock, each.value).routes
        for node, version in versions.items():
            if (desired := found.get(node)) is None or desired.version != version:
                continue
            ordered = sorted(blocks.get(node, {}).items(), key=lambda one: one[1][0].workload)
            forwarding = forwardings.get(node)
            found[node] = replace(
                desired, routes=tuple(route for _, routes in ordered for route in routes), forwarding=forwarding
            )
            keys = [[route.workload for route in routes] for _, routes in ordered]
            if keys:
                self._written[node] = _Written(version, keys, [number for number, _ in ordered], forwarding)
        return found

    def write(
        self, desired: DesiredSet, before: Version | None = None, changed: Collection[WorkloadKey] | None = None
    ) -> SetWrites:
        """changed: workloads whose routes may be others than in the set of that version, that came, or that went; None:
        any may be."""
        node, key = desired.node, LARGE + desired.node
        known = self._written.pop(node, None)
        if len(desired.routes) <= FEW or desired.routes_on_demand:
            return SetWrites({DESIRED + node: codec.dump(desired)}, self.parts(node))
        touched: set[int] | None = None
        if known is not None and known.version == before and changed is not None:
            self._stored[node] = _keys_of(node, known)  # what was to be deleted with that version is deleted
            touched = _update(known, desired.routes, changed)
        if known is None or touched is None or sum(map(len, known.blocks)) != len(desired.routes):
            known, touched = _divided(desired), None
        puts = {
            DESIRED + node: codec.dump(replace(desired, routes=(), forwarding=None)),
            key: codec.dump(LargeSet(desired.version)),
        }
        is_known = touched is not None and known.forwarding == desired.forwarding
        if desired.forwarding is not None and not is_known:
            puts[key + FORWARDING] = self._forwarding_text(desired.forwarding)
        start = 0
        for number, keys in zip(known.numbers, known.blocks, strict=True):
            if touched is None or number in touched:
                puts[f"{key}{BLOCK}{number}"] = codec.dump(RouteBlock(desired.routes[start : start + len(keys)]))
            start += len(keys)
        known.version, known.forwarding = desired.version, desired.forwarding
        self._written[node] = known
        wanted = _keys_of(node, known)
        gone = self._stored.get(node, set()) - wanted
        self._stored[node] = wanted | gone
        return SetWrites(puts, tuple(sorted(gone)))

    def _forwarding_text(self, forwarding: Forwarding) -> bytes:
        """As `codec.dump` writes it."""
        fronts = b",".join(self._front_text(each) for each in forwarding.fronts)
        return (
            b'{"enters":'
            + json.dumps(forwarding.enters, separators=(",", ":")).encode()
            + b',"fronts":['
            + fronts
            + b"]}"
        )

    def _front_text(self, front: Front) -> bytes:
        if front.workloads:
            return codec.dump(front)
        known = self._fronts.get(front.node)
        if known is None or known[0] is not front:
            known = self._fronts[front.node] = front, codec.dump(front)
        return known[1]

    def parts(self, node: str) -> tuple[str, ...]:
        """Keys of the records of a large set that the store may have: to be deleted with the node."""
        return tuple(sorted(self._stored.get(node, ())))

    def forget(self, node: str) -> None:
        """The node is gone, and its records are deleted."""
        self._written.pop(node, None)
        self._stored.pop(node, None)
        self._fronts.pop(node, None)


def _keys_of(node: str, known: _Written) -> set[str]:
    key = LARGE + node
    blocks = {f"{key}{BLOCK}{number}" for number in known.numbers}
    return {key, *blocks} if known.forwarding is None else {key, key + FORWARDING, *blocks}


def _divided(desired: DesiredSet) -> _Written:
    keys = [route.workload for route in desired.routes]
    blocks = [keys[at : at + SIZE] for at in range(0, len(keys), SIZE)]
    return _Written(desired.version, blocks, [*range(len(blocks))], desired.forwarding)


def _update(known: _Written, routes: Sequence[Route], changed: Collection[WorkloadKey]) -> set[int]:
    """Takes over the routes of these workloads; returns the numbers of the blocks that are others now."""
    touched = set[int]()
    for key in changed:
        at = bisect_left(routes, key, key=lambda route: route.workload)
        has_route = at < len(routes) and routes[at].workload == key
        place = max(0, bisect_right(known.blocks, key, key=_first) - 1)
        keys = known.blocks[place]
        index = bisect_left(keys, key)
        is_known = index < len(keys) and keys[index] == key
        if not (has_route or is_known):
            continue
        keys[index : index + is_known] = [key] if has_route else []
        touched.add(known.numbers[place])
        if not keys and len(known.blocks) > 1:
            del known.blocks[place], known.numbers[place]
        elif len(keys) > 2 * SIZE:
            new = max(known.numbers) + 1
            known.blocks[place : place + 1] = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            known.numbers.insert(place + 1, new)
            touched.add(new)
    return touched


def _first(keys: list[WorkloadKey]) -> WorkloadKey:
    return keys[0] if keys else WorkloadKey("", "")

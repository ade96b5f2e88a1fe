"""Desired sets as the store has them. What a gateway is told grows with the region, so what stays in it is not written
again with every change.

A set with many routes is several records: the set without its routes and without what it may forward to, and these by
themselves, the routes some at a time. `LARGE/NODE` says of which version they are: an older coordinator writes the set
as a whole and leaves the other records as they are, so that they are of no set any more. One that reads such a set
finds it without routes, and its first step decides them anew: they follow from the route tables. Those of a node that
asks for routes follow from what it has, until it says what it asks for; its set is small, and one record.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple

from shoal.coordinator import codec
from shoal.coordinator.core.workloads.changed import same_ends
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
BLOCKS: Final = 24
"""Records of the routes of a set that is written as a whole: with more routes, each has more. One transaction of etcd
takes 128 writes, unless it is told otherwise."""
MOST_BLOCKS: Final = 2 * BLOCKS
"""With more, a set is divided anew: routes that came and went left many with few."""
MOST_OWNERLESS: Final = 32
"""Records without a node that one step deletes."""
NUMBER_DIGITS: Final = 9
"""Of the number of a block."""


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


class _WrittenBlock(NamedTuple):
    """What was written of the routes of a block."""

    routes: tuple[Route, ...]
    # Of each, in order.
    texts: list[bytes]


class _WrittenFronts(NamedTuple):
    """What was written of the fronts that gateways list."""

    fronts: tuple[Front, ...]
    # Of each, in order.
    texts: list[bytes]
    # The same, with commas between them.
    joined: bytes


class DesiredSetRecords:
    """Writes what changed of each set. It keeps which routes are in which record, and no text."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}
        self._stored: dict[str, set[str]] = {}
        """By node: records of a large set that the store may have."""
        self._last: dict[str, tuple[Version, set[str]]] = {}
        """By node: the last set that was to be written, and the records of a large set that there are with it."""
        self._fronts: dict[str, tuple[Front, bytes]] = {}
        """By name: what was written of a front that forwards nothing. A gateway's set lists all nodes that serve."""
        self._joined = _WrittenFronts((), [], b"")
        """The fronts that were written last: all gateways list the same ones."""
        self._routes: dict[str, dict[int, _WrittenBlock]] = {}
        """By node and number of a block: what was written of its routes. It takes a few hundred bytes a route; to write
        a block of 500 anew takes milliseconds of the region's loop."""

    def load(self, sets: Iterable[StoreRecord], parts: Iterable[StoreRecord]) -> dict[str, DesiredSet]:
        """All sets, by node. sets, parts: records below DESIRED and LARGE. Raises ShoalError(STATE_CORRUPT)."""
        self._written, self._stored, self._last, self._routes = {}, {}, {}, {}
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
                routes = codec.load(RouteBlock, each.value).routes
                number = (slash + rest).removeprefix(BLOCK)
                if not (routes and number.isascii() and number.isdecimal() and len(number) <= NUMBER_DIGITS):
                    raise codec.unreadable(f"a stored RouteBlock {each.key!r:.80}")
                blocks.setdefault(node, {})[int(number)] = routes
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
        if node in self._last and self._last[node][0] == before:
            self._stored[node] = self._last[node][1]  # what was to be deleted with that version is deleted
        if len(desired.routes) <= FEW or desired.routes_on_demand:
            self._routes.pop(node, None)
            parts = self.parts(node)
            if parts:
                self._last[node] = desired.version, set()
            else:
                self._stored.pop(node, None)
                self._last.pop(node, None)
            return SetWrites({DESIRED + node: codec.dump(desired)}, parts)
        touched: set[int] | None = None
        if known is not None and known.version == before and changed is not None:
            touched = _update(known, desired.routes, changed)
        if (
            known is None
            or touched is None
            or len(known.blocks) > MOST_BLOCKS
            or sum(map(len, known.blocks)) != len(desired.routes)
        ):
            known, touched = _divided(desired), None
        puts = {
            DESIRED + node: codec.dump(replace(desired, routes=(), forwarding=None)),
            key: codec.dump(LargeSet(desired.version)),
        }
        is_known = touched is not None and known.forwarding == desired.forwarding
        if desired.forwarding is not None and not is_known:
            puts[key + FORWARDING] = self._forwarding_text(desired.forwarding)
        start, texts = 0, self._routes.get(node, {})
        self._routes[node] = {number: texts[number] for number in known.numbers if number in texts}
        for number, keys in zip(known.numbers, known.blocks, strict=True):
            if touched is None or number in touched:
                routes = desired.routes[start : start + len(keys)]
                puts[f"{key}{BLOCK}{number}"] = self._block_text(node, number, routes)
            start += len(keys)
        known.version, known.forwarding = desired.version, desired.forwarding
        self._written[node] = known
        wanted = _keys_of(node, known)
        gone = self._stored.get(node, set()) - wanted
        self._stored[node], self._last[node] = wanted | gone, (desired.version, wanted)
        return SetWrites(puts, tuple(sorted(gone)))

    def _block_text(self, node: str, number: int, routes: tuple[Route, ...]) -> bytes:
        """A RouteBlock as `codec.dump` writes it."""
        known = self._routes[node].get(number) or _WrittenBlock((), [])
        start, end = same_ends(known.routes, routes)
        middle = slice(start, len(known.routes) - end)
        texts = {id(each): text for each, text in zip(known.routes[middle], known.texts[middle], strict=True)}
        news = [texts.get(id(each)) or codec.dump(each) for each in routes[start : len(routes) - end]]
        known.texts[middle] = news
        self._routes[node][number] = _WrittenBlock(routes, known.texts)
        return b'{"routes":[' + b",".join(known.texts) + b"]}"

    def _forwarding_text(self, forwarding: Forwarding) -> bytes:
        """As `codec.dump` writes it."""
        fronts, before = forwarding.fronts, self._joined
        if before.fronts is not fronts:
            start, end = same_ends(before.fronts, fronts)
            news = [self._front_text(each) for each in fronts[start : len(fronts) - end]]
            texts = before.texts
            texts[start : len(before.fronts) - end] = news
            self._joined = _WrittenFronts(fronts, texts, b",".join(texts))
        return (
            b'{"enters":'
            + json.dumps(forwarding.enters, separators=(",", ":")).encode()
            + b',"fronts":['
            + self._joined.joined
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

    def ownerless(self, *sets: Mapping[str, DesiredSet]) -> tuple[str, ...]:
        """Keys of some records of nodes that have no set: an older coordinator leaves them when it removes a node.
        sets: by node, all that there are."""
        gone = sorted(node for node in self._stored if not any(node in each for each in sets))
        return tuple(islice((key for node in gone for key in self.parts(node)), MOST_OWNERLESS))

    def drop(self, ownerless: Iterable[str]) -> None:
        """They are deleted."""
        for key in ownerless:
            node = key.removeprefix(LARGE).partition("/")[0]
            self._stored[node].discard(key)
            if not self._stored[node]:
                self.forget(node)

    def forget(self, node: str) -> None:
        """The node is gone, and its records are deleted."""
        self._written.pop(node, None)
        self._stored.pop(node, None)
        self._last.pop(node, None)
        self._fronts.pop(node, None)
        self._routes.pop(node, None)


def _keys_of(node: str, known: _Written) -> set[str]:
    key = LARGE + node
    blocks = {f"{key}{BLOCK}{number}" for number in known.numbers}
    return {key, *blocks} if known.forwarding is None else {key, key + FORWARDING, *blocks}


def _divided(desired: DesiredSet) -> _Written:
    keys = [route.workload for route in desired.routes]
    size = _size_of(len(keys))
    blocks = [keys[at : at + size] for at in range(0, len(keys), size)]
    return _Written(desired.version, blocks, [*range(len(blocks))], desired.forwarding)


def _size_of(count: int) -> int:
    """Routes of one record of a set with so many."""
    return max(SIZE, -(-count // BLOCKS))


def _update(known: _Written, routes: Sequence[Route], changed: Collection[WorkloadKey]) -> set[int]:
    """Takes over the routes of these workloads; returns the numbers of the blocks that are others now."""
    touched, size = set[int](), _size_of(len(routes))
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
        elif len(keys) > 2 * size:
            new = max(known.numbers) + 1
            known.blocks[place : place + 1] = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            known.numbers.insert(place + 1, new)
            touched.add(new)
    return touched


def _first(keys: list[WorkloadKey]) -> WorkloadKey:
    return keys[0] if keys else WorkloadKey("", "")

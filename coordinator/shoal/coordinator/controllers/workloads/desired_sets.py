"""Desired sets as the store has them. What a gateway is told grows with the region, so what stays in it is not written
out again with every change."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec
from shoal.types.assignment import DesiredSet, Forwarding, Version
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

FEW: Final = 64
"""Up to so many routes, a set is written out as a whole; with more, about so many are written out together."""


class _Block:
    """Some routes that follow each other, as they are written."""

    def __init__(self, keys: list[WorkloadKey], texts: list[bytes]) -> None:
        """Of each route, in order: its workload, and how it is written."""
        self.keys = keys
        self._texts = texts
        self._joined: bytes | None = None

    @classmethod
    def of(cls, routes: Sequence[Route]) -> "_Block":
        return cls([route.workload for route in routes], [codec.dump(route) for route in routes])

    @property
    def text(self) -> bytes:
        if self._joined is None:
            self._joined = b",".join(self._texts)
        return self._joined

    def put(self, key: WorkloadKey, route: Route | None) -> None:
        """None: there is none any more."""
        at = bisect_left(self.keys, key)
        is_known = at < len(self.keys) and self.keys[at] == key
        self.keys[at : at + is_known] = [] if route is None else [key]
        self._texts[at : at + is_known] = [] if route is None else [codec.dump(route)]
        self._joined = None

    def halves(self) -> "tuple[_Block, _Block]":
        at = len(self.keys) // 2
        return _Block(self.keys[:at], self._texts[:at]), _Block(self.keys[at:], self._texts[at:])


@dataclass(slots=True)
class _Written:
    """The large parts of a set."""

    # Of the set.
    version: Version
    # Its routes, in order; at least one block.
    blocks: list[_Block]
    forwarding: Forwarding | None
    forwarding_text: bytes


class DesiredSetEncoder:
    """Writes as `codec.dump`. It keeps the texts of the routes that it wrote last for each node with many."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}

    def dump(
        self, desired: DesiredSet, before: Version | None = None, changed: Collection[WorkloadKey] | None = None
    ) -> bytes:
        """changed: workloads whose routes may be others than in the set of that version, that came, or that went; None:
        any may be."""
        known = self._written.get(desired.node)
        if len(desired.routes) <= FEW:
            self.forget(desired.node)
            return codec.dump(desired)
        if known is not None and known.version == before and changed is not None:
            _update(known.blocks, desired.routes, changed)
            blocks = known.blocks
        else:
            blocks = [_Block.of(desired.routes[at : at + FEW]) for at in range(0, len(desired.routes), FEW)]
        is_same = known is not None and known.forwarding is desired.forwarding
        forwarding = known.forwarding_text if known is not None and is_same else _text(desired.forwarding)
        self._written[desired.node] = _Written(desired.version, blocks, desired.forwarding, forwarding)
        rest = json.loads(codec.dump(replace(desired, routes=(), forwarding=None)))
        parts = {
            name: json.dumps(value, sort_keys=True, separators=(",", ":")).encode() for name, value in rest.items()
        }
        routes = b",".join(each.text for each in blocks if each.keys)
        parts |= {"routes": b"[" + routes + b"]", "forwarding": forwarding}
        return b"{" + b",".join(b'"' + name.encode() + b'":' + parts[name] for name in sorted(parts)) + b"}"

    def forget(self, node: str) -> None:
        """The node is gone, or its next set is written out as a whole."""
        self._written.pop(node, None)


def _update(blocks: list[_Block], routes: Sequence[Route], changed: Collection[WorkloadKey]) -> None:
    """Writes out the routes of these workloads."""
    for key in changed:
        at = bisect_left(routes, key, key=lambda route: route.workload)
        route = routes[at] if at < len(routes) and routes[at].workload == key else None
        place = max(0, bisect_right(blocks, key, key=_first) - 1)
        blocks[place].put(key, route)
        if not blocks[place].keys and len(blocks) > 1:
            del blocks[place]
        elif len(blocks[place].keys) > 2 * FEW:
            blocks[place : place + 1] = blocks[place].halves()


def _first(block: _Block) -> WorkloadKey:
    return block.keys[0] if block.keys else WorkloadKey("", "")


def _text(forwarding: Forwarding | None) -> bytes:
    return b"null" if forwarding is None else codec.dump(forwarding)

"""Desired sets as the store has them. What a gateway is told grows with the region, so what stays in it is not written
out again with every change."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator import codec
from shoal.types.assignment import DesiredSet, Forwarding
from shoal.types.route import Route

FEW: Final = 64
"""Up to so many routes, a set is written out as a whole."""


@dataclass(frozen=True, slots=True)
class _Written:
    """The large parts of a set, and their texts."""

    routes: tuple[Route, ...]
    texts: tuple[str, ...]
    forwarding: Forwarding | None
    forwarding_text: str


class DesiredSetEncoder:
    """Writes as `codec.dump`. It keeps the texts of the routes that it wrote last for each node with many."""

    def __init__(self) -> None:
        self._written: dict[str, _Written] = {}

    def dump(self, desired: DesiredSet) -> bytes:
        before = self._written.get(desired.node)
        if len(desired.routes) <= FEW:
            self.forget(desired.node)
            return codec.dump(desired)
        is_same = before is not None and before.forwarding is desired.forwarding
        after = _Written(
            desired.routes,
            _texts(
                desired.routes, before.routes if before is not None else (), before.texts if before is not None else ()
            ),
            desired.forwarding,
            before.forwarding_text if before is not None and is_same else _text(desired.forwarding),
        )
        self._written[desired.node] = after
        rest = json.loads(codec.dump(replace(desired, routes=(), forwarding=None)))
        parts = {name: json.dumps(value, sort_keys=True, separators=(",", ":")) for name, value in rest.items()}
        parts |= {"routes": f"[{','.join(after.texts)}]", "forwarding": after.forwarding_text}
        return ("{" + ",".join(f'"{name}":{parts[name]}' for name in sorted(parts)) + "}").encode()

    def forget(self, node: str) -> None:
        """The node is gone, or its next set is written out as a whole."""
        self._written.pop(node, None)


def _texts(routes: Sequence[Route], before: Sequence[Route], texts: Sequence[str]) -> tuple[str, ...]:
    """Of each route. before, texts: earlier routes, in the same order but for those that came and went."""
    found, at = list[str](), 0
    for route in routes:
        while at < len(before) and before[at].workload < route.workload:
            at += 1
        is_same = at < len(before) and before[at] is route
        found.append(texts[at] if is_same else codec.dump(route).decode())
    return tuple(found)


def _text(forwarding: Forwarding | None) -> str:
    return "null" if forwarding is None else codec.dump(forwarding).decode()

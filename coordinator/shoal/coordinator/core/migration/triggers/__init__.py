"""What speaks for moves that nobody asked for: one module a signal, each with its `NAME` and `propose`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from shoal.coordinator.core.migration.model import Proposal
from shoal.coordinator.core.migration.triggers import consolidate, heat, limits, objective, wake
from shoal.coordinator.core.migration.triggers.view import View, pending_key


@dataclass(frozen=True, slots=True)
class Trigger:
    """in_turn: it compares with every other place, and so speaks only of replicas that have their turn."""

    name: str
    propose: Callable[[View], Iterator[Proposal]]
    in_turn: bool = False


EVERY: Final = (
    Trigger(wake.NAME, wake.propose),
    Trigger(limits.NAME, limits.propose),
    Trigger(heat.NAME, heat.propose),
    Trigger(objective.NAME, objective.propose, in_turn=True),
    Trigger(consolidate.NAME, consolidate.propose, in_turn=True),
)


@dataclass(frozen=True, slots=True)
class Look:
    """found: by `pending_key`. judged: all of whose conditions this look knows whether they hold. seen: replicas that
    it looked at, by assignment, or will when it is their turn."""

    found: tuple[tuple[str, Proposal], ...]
    judged: frozenset[str]
    seen: frozenset[str]


def look(view: View) -> Look:
    """All that speaks for a move now."""
    return Look(
        tuple((pending_key(one.source, each.name), one) for each in EVERY for one in each.propose(view)),
        frozenset(
            pending_key(replica.place, each.name)
            for each in EVERY
            for replica in view.replicas
            if not each.in_turn or view.looks_at(replica)
        ),
        frozenset(replica.place.assignment for replica in view.replicas),
    )

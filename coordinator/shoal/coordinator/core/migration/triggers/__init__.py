"""Triggers: signals that propose automatic moves. One module each, with its `NAME` and `propose`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from shoal.coordinator.core.migration.model import MoveProposal
from shoal.coordinator.core.migration.triggers import consolidate, heat, limits, objective, preempt, wake
from shoal.coordinator.core.migration.triggers.view import TriggerView, Turns, pending_key


@dataclass(frozen=True, slots=True)
class Trigger:
    """A signal that proposes moves."""

    # Its name in `pending_key`.
    name: str
    # Yields the moves that it proposes.
    propose: Callable[[TriggerView], Iterator[MoveProposal]]
    # It compares with every other place, so each scan covers only the replicas whose turn it is.
    in_turn: bool = False


TRIGGERS: Final = (
    Trigger(preempt.NAME, preempt.propose),
    Trigger(wake.NAME, wake.propose),
    Trigger(limits.NAME, limits.propose),
    Trigger(heat.NAME, heat.propose),
    Trigger(objective.NAME, objective.propose, in_turn=True),
    Trigger(consolidate.NAME, consolidate.propose, in_turn=True),
)


@dataclass(frozen=True, slots=True)
class TriggerScan:
    """Result of one scan."""

    # Proposed moves, with their `pending_key`.
    proposals: tuple[tuple[str, MoveProposal], ...]
    # `pending_key` of every condition that this scan evaluated.
    evaluated_keys: frozenset[str]
    # Assignments that it looked at, or will when it is their turn.
    known_replicas: frozenset[str]
    # The turns that replicas have had.
    turns: Turns = field(default_factory=dict)


def scan(view: TriggerView) -> TriggerScan:
    """Runs all triggers."""
    proposals = tuple((pending_key(one.source, each.name), one) for each in TRIGGERS for one in each.propose(view))
    return TriggerScan(
        proposals,
        frozenset(
            pending_key(replica.place, each.name)
            for each in TRIGGERS
            for replica in view.replicas
            if not each.in_turn or view.has_turn(replica)
        ),
        frozenset(replica.place.assignment for replica in view.replicas),
        view.turns_after,
    )

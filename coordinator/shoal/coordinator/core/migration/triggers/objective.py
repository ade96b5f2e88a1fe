"""Moves replicas to a place with a better objective, by the weights in effect now: one comparison, `gain`.

It compares the replica's warm-up baseline with the known or predicted figures of each other place. The current load
alone is no reason to move (`limits` handles that). A return to a place that was left needs more gain than it had
when the place was left. So no move is undone without a reason of its own.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.migration.model import Cause, ExpectedOutcome, Migration, MoveProposal
from shoal.coordinator.core.migration.outcomes import expected_outcome, gain_of
from shoal.coordinator.core.migration.triggers.view import MovableReplica, TriggerView, new_proposal
from shoal.coordinator.core.placement import score
from shoal.coordinator.core.placement.feasible import Option
from shoal.coordinator.core.placement.score import energy
from shoal.coordinator.core.placement.score.term import ObjectiveTerm
from shoal.policies.resolve import PRICE_LABEL
from shoal.types.units import show_gain
from shoal.types.workload import Weights

NAME: Final = "objective"
PASSING_CAUSES: Final = frozenset({Cause.HEAT, Cause.POWER, Cause.WAKE})
"""Conditions that may pass, a peak included; after that the place may have the replica again."""
_TEMPORARY_CAUSES: Final = PASSING_CAUSES | {Cause.SCHEDULE}
"""These, and objectives that hold for a time."""


@dataclass(frozen=True, slots=True)
class BetterPlace:
    """The best other place of a replica."""

    # Place that the replica would move to.
    option: Option
    # Expected outcome of moving there.
    expected: ExpectedOutcome
    # Gain from which on the move is worthwhile; -inf where the workload prefers it, whatever its gain.
    required_gain: float
    # The move that left this place; None: none did.
    previous_move: Migration | None
    # How many alternatives of `prefer` it is better by; 0 where the gain decides.
    preferred_by: int


def propose(view: TriggerView) -> Iterator[MoveProposal]:
    for replica in view.replicas:
        best = best_place(view, replica) if view.has_turn(replica) else None
        if best is not None and best.expected.gain >= best.required_gain * min(view.threshold_shares(replica, NAME)):
            yield replace(proposal_for(replica, best), is_fading=best.expected.gain < best.required_gain)


def proposal_for(replica: MovableReplica, best: BetterPlace) -> MoveProposal:
    cause, reason = _cause_and_reason(replica, best)
    return new_proposal(replica, best.option, best.expected, cause, reason)


def best_place(view: TriggerView, replica: MovableReplica) -> BetterPlace | None:
    """The place that the workload prefers by most. Of equal ones, that whose gain exceeds the required one by most, or
    falls short by least. None: there is no other place that it does not prefer less."""
    intent = replica.intent
    here = view.scope.preference(replica.live_option, intent)
    found = [
        _evaluate(view, replica, option, here - there)
        for option in view.places(replica, intent.require, intent.limits)
        if (there := view.scope.preference(option, intent)) <= here
    ]
    return max(found, key=_worth, default=None)


def _worth(place: BetterPlace) -> tuple[int, float, tuple[str, str, str]]:
    gain = place.expected.gain
    return place.preferred_by, gain if place.preferred_by else gain - place.required_gain, place.option.key


def _evaluate(view: TriggerView, replica: MovableReplica, option: Option, preferred_by: int) -> BetterPlace:
    left, asked = _previous_move(view, replica, option), replica.intent.migration.gain
    if left is not None and not _is_reason_over(left, replica.intent.weights):
        preferred_by = 0  # it was left for a reason that its place in `prefer` does not outweigh
        if left.expected is not None:
            asked += max(0.0, gain_of(left.expected.before, left.expected.after, replica.intent.weights))
    expected = expected_outcome(view.scope, replica.intent, replica.baseline, option)
    return BetterPlace(option, expected, -math.inf if preferred_by else asked, left, preferred_by)


def _previous_move(view: TriggerView, replica: MovableReplica, option: Option) -> Migration | None:
    """The move that brought the replica, if it came from this very place."""
    last = view.arrival_move(replica)
    source = last.source if last is not None else None
    came_from = source is not None and (source.node, source.device, source.variant) == option.key
    return last if came_from else None


def _is_reason_over(previous_move: Migration, weights: Weights) -> bool:
    """True if the reason for leaving may be over although no figure of the two places changed. Without a weight on
    energy, no device is to sleep."""
    return previous_move.cause in _TEMPORARY_CAUSES or (
        previous_move.cause is Cause.CONSOLIDATION and weights.get(energy.NAME, 0.0) <= 0
    )


def _is_scheduled(replica: MovableReplica, best: BetterPlace) -> bool:
    """True if a schedule entry asks for the move, or if it is the way back after the entry ended."""
    intent = replica.intent
    if intent.declared is None:
        return False
    if intent.weights == intent.declared.weights:
        return best.previous_move is not None and best.previous_move.cause in (Cause.SCHEDULE, Cause.CONSOLIDATION)
    return gain_of(best.expected.after, best.expected.before, intent.declared.weights) < best.required_gain


def _cause_and_reason(replica: MovableReplica, best: BetterPlace) -> tuple[Cause, str]:
    """The objective term that makes most of the difference, with its figures."""
    before, after, weights = best.expected.before, best.expected.after, replica.intent.weights

    def part(term: ObjectiveTerm) -> float:
        old, new = term.read(before), term.read(after)
        return weights.get(term.name, 0.0) * (1 - new / old) if old > 0 and new >= 0 else 0.0

    decisive = max(score.TERMS, key=part)
    cause = Cause(decisive.name) if decisive.name in set(Cause) else Cause.OBJECTIVE
    if cause is Cause.COST and not all(
        PRICE_LABEL in each.state.node.labels for each in (replica.baseline, best.option)
    ):
        cause = Cause.PRICE
    gain = best.expected.gain
    whole = f"the objective is {show_gain(gain)}" if gain > 0 else f"though the objective is {show_gain(gain)}"
    old, new = (decisive.show(decisive.read(each)) for each in (before, after))
    reason = f"{decisive.label} {old} -> {new}, {whole}"
    if best.preferred_by:
        cause, reason = Cause.OBJECTIVE, f"`prefer` puts {best.option.where} first: {reason}"
    if _is_scheduled(replica, best):
        return Cause.SCHEDULE, f"by the objective that holds at this time: {reason}"
    if best.previous_move is None:
        return cause, reason
    back = f"back where {best.previous_move.id} ({best.previous_move.cause}) left"
    return (Cause.FAILBACK if best.previous_move.cause in PASSING_CAUSES else cause), f"{back}: {reason}"

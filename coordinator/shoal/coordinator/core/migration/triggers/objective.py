"""To a place where the workload's objective is better, by the weights that hold now: one comparison, `gain`.

The replica as it was when it warmed up against what is known or predicted of each other place: what only the load of
the moment makes of it is no reason (`limits` sees that). What a move left behind counts: the way back is asked for more
than was to be had when it was left, so that no move is undone without a reason of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.migration.expected import expected, gain_of
from shoal.coordinator.core.migration.model import Cause, Expected, Migration, Proposal
from shoal.coordinator.core.migration.triggers.view import Replica, View, proposal
from shoal.coordinator.core.placement.feasible import Option
from shoal.policies.resolve import PRICE_LABEL
from shoal.types.units import show_joules, show_seconds, show_usd_per_hour
from shoal.types.workload import Weights

NAME: Final = "objective"
PASSING: Final = frozenset({Cause.HEAT, Cause.POWER, Cause.WAKE})
"""What a place may get over, a peak as well: then it may have the replica again."""
_TIMELY: Final = PASSING | {Cause.SCHEDULE}
"""So with what holds for a time."""


@dataclass(frozen=True, slots=True)
class Better:
    """The best other place of a replica. asked: the gain that makes it worth a move. left: the move that left it."""

    option: Option
    expected: Expected
    asked: float
    left: Migration | None


def propose(view: View) -> Iterator[Proposal]:
    for replica in view.replicas:
        best = better(view, replica) if view.looks_at(replica) else None
        if best is not None and best.expected.gain >= best.asked * min(view.shares(replica, NAME)):
            yield replace(proposed(replica, best), fading=best.expected.gain < best.asked)


def proposed(replica: Replica, best: Better) -> Proposal:
    cause, reason = _why(replica, best)
    return proposal(replica, best.option, best.expected, cause, reason)


def better(view: View, replica: Replica) -> Better | None:
    """The place that comes closest to being worth a move, or is most. None: it has nowhere else to go."""
    intent = replica.intent
    found = [_judged(view, replica, option) for option in view.places(replica, intent.require, intent.limits)]
    return max(found, key=lambda each: (each.expected.gain - each.asked, each.option.names), default=None)


def _judged(view: View, replica: Replica, option: Option) -> Better:
    left, asked = _left(view, replica, option), replica.intent.migration.gain
    if left is not None and not _is_over(left, replica.intent.weights) and left.expected is not None:
        asked += max(0.0, gain_of(left.expected.before, left.expected.after, replica.intent.weights))
    return Better(option, expected(view.scope, replica.intent, replica.calm, option), asked, left)


def _left(view: View, replica: Replica, option: Option) -> Migration | None:
    """The move that brought the replica, where it came from this very place."""
    last = view.came_by(replica)
    source = last.source if last is not None else None
    came_from = source is not None and (source.node, source.device, source.model) == option.names
    return last if came_from else None


def _is_over(left: Migration, weights: Weights) -> bool:
    """Whether what it left for may hold no more, without that any figure of the two places is another. Where energy
    counts for nothing, no device is to sleep."""
    return left.cause in _TIMELY or (left.cause is Cause.CONSOLIDATION and weights.energy <= 0)


def _is_scheduled(replica: Replica, best: Better) -> bool:
    """Whether it is a schedule's entry that speaks for it, or for the way back that there is none any more."""
    intent = replica.intent
    if intent.declared is None:
        return False
    if intent.weights == intent.declared.weights:
        return best.left is not None and best.left.cause in (Cause.SCHEDULE, Cause.CONSOLIDATION)
    return gain_of(best.expected.after, best.expected.before, intent.declared.weights) < best.asked


def _why(replica: Replica, best: Better) -> tuple[Cause, str]:
    """The term that makes most of the difference, with its figures."""
    before, after, weights = best.expected.before, best.expected.after, replica.intent.weights
    terms = (
        (Cause.LATENCY, weights.latency, before.latency_p95_s, after.latency_p95_s, "p95", show_seconds),
        (Cause.COST, weights.cost, before.cost, after.cost, "cost", show_usd_per_hour),
        (Cause.ENERGY, weights.energy, before.joules, after.joules, "energy", show_joules),
    )
    cause, _, old, new, name, show = max(
        terms, key=lambda term: term[1] * (1 - term[3] / term[2]) if term[2] > 0 and term[3] >= 0 else 0.0
    )
    if cause is Cause.COST and not all(PRICE_LABEL in each.state.node.labels for each in (replica.calm, best.option)):
        cause = Cause.PRICE
    how = f"{best.expected.gain:.0%} better" if best.expected.gain > 0 else "worse"
    reason = f"{how}: {name} {show(new)} for {show(old)}"
    if _is_scheduled(replica, best):
        return Cause.SCHEDULE, f"by the objective that holds at this time {reason}"
    if best.left is None:
        return cause, reason
    back = f"back where {best.left.id} ({best.left.cause}) left"
    return (Cause.FAILBACK if best.left.cause in PASSING else cause), f"{back}: {reason}"

"""Why the replicas of a workload stay where they are, for `shoal explain`."""

from collections.abc import Iterable

from shoal.coordinator.core.migration.budget import HoldReason, MoveHold
from shoal.coordinator.core.migration.model import MoveProposal
from shoal.coordinator.core.migration.triggers.objective import best_place, proposal_for
from shoal.coordinator.core.migration.triggers.view import MovableReplica, TriggerView
from shoal.coordinator.core.placement.explain import STAYS_WITHOUT_TRIGGER
from shoal.types.workload import Intent, WorkloadKey


def reasons_to_stay(view: TriggerView, held: Iterable[MoveHold], key: WorkloadKey) -> tuple[MoveHold, ...]:
    """What holds back each proposed move; for other replicas, what the best other place would gain.

    view: of this workload alone.
    """
    found = [each for each in held if each.proposal.workload == key]
    spoken = {each.proposal.source.assignment for each in found}
    rest = (_reason_to_stay(view, replica) for replica in view.replicas if replica.place.assignment not in spoken)
    return (*found, *(each for each in rest if each is not None))


def _reason_to_stay(view: TriggerView, replica: MovableReplica) -> MoveHold | None:
    best = best_place(view, replica)
    if best is None:
        return None
    asked = proposal_for(replica, best)
    if best.expected.gain < best.required_gain:
        gain = max(0.0, best.expected.gain)
        return MoveHold(asked, HoldReason.GAIN, f"{gain:.1%} of the {best.required_gain:.1%} asked")
    if not replica.intent.migration.automatic:
        return MoveHold(asked, HoldReason.NOT_AUTOMATIC, STAYS_WITHOUT_TRIGGER, remedy=_remedy(replica.intent, asked))
    return MoveHold(asked, HoldReason.SETTLING, "just seen")


def _remedy(intent: Intent, asked: MoveProposal) -> str:
    """How an operator gets a replica to move that no trigger moves."""
    where = f"policy {intent.policy}" if intent.policy else "a policy of its own"
    let = f"`migration: {{when: {{gain: {intent.migration.gain:.0%}}}}}` in {where}"
    return f"let it move by {let}; or once: shoal migrate {intent.key.name} --to {asked.aim.where}"

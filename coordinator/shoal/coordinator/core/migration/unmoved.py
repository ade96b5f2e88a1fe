"""Why the replicas of a workload stay where they are, as `shoal explain` tells it."""

from collections.abc import Iterable

from shoal.coordinator.core.migration.budget import Held, Hold
from shoal.coordinator.core.migration.triggers.objective import better, proposed
from shoal.coordinator.core.migration.triggers.view import Replica, View
from shoal.types.workload import WorkloadKey


def unmoved(view: View, held: Iterable[Held], key: WorkloadKey) -> tuple[Held, ...]:
    """What holds back the moves that something speaks for; of other replicas, how much the best other place would gain.

    view: of this workload alone."""
    found = [each for each in held if each.proposal.workload == key]
    spoken = {each.proposal.source.assignment for each in found}
    rest = (_short(view, replica) for replica in view.replicas if replica.place.assignment not in spoken)
    return (*found, *(each for each in rest if each is not None))


def _short(view: View, replica: Replica) -> Held | None:
    best = better(view, replica)
    if best is None:
        return None
    asked = proposed(replica, best)
    if not replica.intent.migration.unasked:
        return Held(asked, Hold.UNASKED, "its policy has no migration.when")
    if best.expected.gain >= best.asked:
        return Held(asked, Hold.SETTLING, "just seen")
    gain = max(0.0, best.expected.gain)
    return Held(asked, Hold.GAIN, f"gain {gain:.1%} of the {best.asked:.1%} asked")

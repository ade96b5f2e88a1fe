"""How silence is judged follows the workloads, and is what a look at all of them says."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import fleet_of, intent, node
from shoal.coordinator.controllers.region.region import TICK_S
from shoal.coordinator.core.fleet.liveness import update_liveness
from shoal.coordinator.core.fleet.state import Liveness, LivenessTiming
from shoal.coordinator.core.workloads.liveness_rules import LivenessRules
from shoal.policies.kinds import Partition
from shoal.policies.quantities import Unit
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import Intent, PartitionRule


def intent_of_rule(name: str, heartbeat_s: float, lost_after_s: float) -> Intent:
    return replace(intent(name), partition=PartitionRule(Seconds(heartbeat_s), Seconds(lost_after_s)))


@given(st.lists(st.lists(st.tuples(st.sampled_from((0.5, 1.0, 5.0)), st.sampled_from((2.0, 10.0, 60.0))), max_size=4)))
def test_the_shortest_times_count_of_those_that_are_there(steps: list[list[tuple[float, float]]]) -> None:
    rules = LivenessRules()
    for asked in steps:
        intents = tuple(intent_of_rule(f"w{at}", *each) for at, each in enumerate(asked))
        shortest = LivenessTiming(
            Seconds(min((heartbeat for heartbeat, _ in asked), default=PartitionRule().heartbeat_s)),
            Seconds(min((lost for _, lost in asked), default=PartitionRule().lost_after_s)),
        )
        assert rules.timing(intents) == rules.timing(intents) == shortest


def least_of(field: str) -> Seconds:
    (unit,) = (each for each in Partition.model_fields[field].metadata if isinstance(each, Unit))
    return Seconds(unit.least)


def test_a_silent_node_is_lost_at_the_least_times_that_a_policy_may_ask_for() -> None:
    """A look that is later than three heartbeats tells of a coordinator that was paused: that of a region comes twice
    within them."""
    timing = LivenessTiming(least_of("heartbeat"), least_of("lost_after"))
    fleet = replace(fleet_of(node("a")), timing=timing)
    found = list[Liveness]()
    for look in range(1, 10):
        fleet, changes = update_liveness(fleet, Elapsed(2 * TICK_S * look))
        found += [change.after for change in changes]
    assert found == [Liveness.SUSPECT, Liveness.LOST]

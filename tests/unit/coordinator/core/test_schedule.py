"""What a workload asks for at a time, and which devices sleep meanwhile."""

import math
from dataclasses import replace

import pytest

from harness.builders.agent_values import assignment
from harness.builders.coordinator_core import START, device, fleet_of, intent, node, observation, profile, reading
from shoal.coordinator.core.placement.model import RegionFacts, Reservation, Slot, terms_of
from shoal.coordinator.core.workloads import sleep
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS, DesiredContent, ReconcilerMemory, RegionState
from shoal.coordinator.core.workloads.schedule import LOAD_S, VERIFY_S, demand_of, effective_intent, lead_s
from shoal.types.assignment import Phase
from shoal.types.device import PowerState, Rest
from shoal.types.migration import MigrationRule
from shoal.types.offer import Demand
from shoal.types.units import Bytes, Elapsed, PerSecond, Seconds, Wall, Watts
from shoal.types.workload import Intent, ScheduledWeights, Traffic
from shoal.wire.nouns import decode, encode

REGION = RegionFacts("eu-west", "eu")
NIGHT = {"energy": 1.0}
# seconds of this test's day: the peak comes from 1000 to 2000, the night begins at 3000
PEAK = f"int(now) >= {START + 1000:.0f} && int(now) < {START + 2000:.0f}"
LATE = f"int(now) >= {START + 3000:.0f}"
REST = Rest(Watts(100.0), Watts(10.0), Seconds(40.0), "of this test")


def scheduled_intent() -> Intent:
    home = Traffic("eu-west", PerSecond(5.0), PerSecond(50.0), PEAK)
    abroad = Traffic("us", PerSecond(1.0), PerSecond(1.0))
    rule = MigrationRule(automatic=True)
    return intent(traffic=(home, abroad), schedule=(ScheduledWeights(LATE, NIGHT),), migration=rule)


def rates(found: Intent) -> list[float]:
    return [each.rate for each in found.traffic]


def test_a_workload_without_times_is_as_it_is() -> None:
    assert effective_intent(intent(), REGION, Wall(START), Seconds(60)) == intent()


def test_a_peak_counts_from_the_lead_before_it_until_it_has_passed() -> None:
    lead = Seconds(60.0)
    for at, expected in ((0, 5), (939, 5), (940, 50), (1500, 50), (1999, 50), (2000, 5)):
        assert rates(effective_intent(scheduled_intent(), REGION, Wall(START + at), lead)) == [expected, 1], at


def test_what_may_not_move_unasked_has_room_for_its_peak_at_any_time() -> None:
    fixed = replace(scheduled_intent(), migration=MigrationRule())
    assert rates(effective_intent(fixed, REGION, Wall(START), Seconds(60.0))) == [50, 1]


def test_a_peak_shorter_than_the_lead_is_seen() -> None:
    short = replace(scheduled_intent(), traffic=(Traffic("a", PerSecond(1.0), PerSecond(9.0), PEAK),))
    assert rates(effective_intent(short, REGION, Wall(START + 400), Seconds(4000.0))) == [9]


def test_the_objective_is_that_of_the_time_ahead_and_the_documents_terms_stay() -> None:
    before = effective_intent(scheduled_intent(), REGION, Wall(START + 2900), Seconds(60.0))
    after = effective_intent(scheduled_intent(), REGION, Wall(START + 2950), Seconds(60.0))
    assert (before.weights, after.weights) == (scheduled_intent().weights, NIGHT)
    assert terms_of(before) == terms_of(after) == terms_of(scheduled_intent())
    assert terms_of(replace(scheduled_intent(), weights=NIGHT)) != terms_of(scheduled_intent())
    assert effective_intent(after, REGION, Wall(START), Seconds(0.0)).traffic == after.traffic


def test_a_signal_that_is_unknown_holds_nothing() -> None:
    dirty = intent(schedule=(ScheduledWeights("region.carbon > 350.0", NIGHT),))
    for carbon, weights in ((float("nan"), dirty.weights), (300.0, dirty.weights), (400.0, NIGHT)):
        region = replace(REGION, carbon_g_per_kwh=carbon)
        assert effective_intent(dirty, region, Wall(START), Seconds(0.0)).weights == weights


def test_the_lead_is_what_waking_loading_and_taking_over_take() -> None:
    fleet = fleet_of(node("a", device(rest=REST)), node("b"))
    rule = scheduled_intent().migration
    assert lead_s(scheduled_intent(), fleet, {}) == 40 + LOAD_S + VERIFY_S + len(rule.steps) * rule.hold_s
    assert lead_s(scheduled_intent(), fleet_of(node("b")), {}) == LOAD_S + VERIFY_S + len(rule.steps) * rule.hold_s


@pytest.mark.parametrize("wake_s", [1e300, math.inf, math.nan])
def test_a_lead_beyond_every_date_is_the_longest(wake_s: float) -> None:
    """A node says how long its device takes to wake: it must not end the region's step."""
    fleet = fleet_of(node("a", device(rest=replace(REST, wake_s=Seconds(wake_s)))))
    lead = lead_s(scheduled_intent(), fleet, {})
    assert effective_intent(scheduled_intent(), REGION, Wall(START), lead).weights == NIGHT  # which comes, and stays


def test_placement_reads_what_holds() -> None:
    fleet = fleet_of(node("b"))
    world = RegionState(REGION, fleet, (scheduled_intent(),), {"x": profile()}, {}, ReconcilerMemory())
    found = [rates(inputs_of(world, NO_MIGRATIONS, Elapsed(at), Wall(START + at)).intents[0]) for at in (0, 1500)]
    assert found == [[5, 1], [50, 1]]


# -- sleep ------------------------------------------------------------


def test_what_nothing_is_on_sleeps_after_a_while_and_an_assignment_wakes_it() -> None:
    fleet = fleet_of(node("a", device("gpu0", rest=REST)), node("b"))
    since = sleep.idle_since(fleet, {}, (), {}, Elapsed(100))
    assert since == {"a/gpu0": Elapsed(100)}  # b's cannot sleep
    assert sleep.idle_since(fleet, {}, (), since, Elapsed(170)) == since
    assert sleep.devices_to_sleep(since, Seconds(60.0), Elapsed(159)) == {}
    assert sleep.next_due(since, Seconds(60.0), Elapsed(150)) == 10.0
    assert sleep.devices_to_sleep(since, Seconds(60.0), Elapsed(160)) == {"a": ("gpu0",)}
    assert sleep.devices_to_sleep(since, None, Elapsed(9999)) == {}
    taken = {"a": (assignment(device="gpu0"),)}
    assert sleep.idle_since(fleet, taken, (), since, Elapsed(170)) == {}
    draining = {"a": (replace(assignment(device="gpu0"), draining=True),)}
    assert sleep.idle_since(fleet, draining, (), since, Elapsed(170)) == {}
    kept = (Reservation("g", Slot("a", "gpu0"), Bytes(1), 0.1),)
    assert sleep.idle_since(fleet, {}, kept, since, Elapsed(170)) == {}


def test_what_its_node_still_has_keeps_a_device_awake() -> None:
    fleet = fleet_of(node("a", device("gpu0", rest=REST)))
    state = fleet.nodes["a"]
    for phase, idles in ((Phase.DRAINING, False), (Phase.GONE, True)):
        held = replace(state, observed={"x": observation(assignment(device="gpu0"), phase)})
        found = sleep.idle_since(replace(fleet, nodes={"a": held}), {}, (), {}, Elapsed(1))
        assert bool(found) == idles


def test_who_sleeps_and_wakes_is_told_with_what_it_saves() -> None:
    on = device("gpu0", rest=REST)
    fleet = fleet_of(node("a", on))
    slept = replace(reading(on), power=PowerState.ASLEEP, saved_j=5400.0)
    fleet = replace(fleet, nodes={"a": replace(fleet.nodes["a"], readings={"gpu0": slept})})
    awake, asleep = {"a": DesiredContent()}, {"a": DesiredContent(asleep=("gpu0",))}
    (sleeps,) = sleep.sleep_events(fleet, awake, asleep)
    assert (sleeps.code, sleeps.subject, sleeps.message) == ("DEVICE_SLEEPS", "a/gpu0", "nothing on it: 10 W for 100 W")
    (wakes,) = sleep.sleep_events(fleet, asleep, awake)
    assert (wakes.code, wakes.subject) == ("DEVICE_WAKES", "a/gpu0")
    assert "saved 5.4kJ" in wakes.message
    assert sleep.sleep_events(fleet, asleep, asleep) == ()


def test_another_region_is_asked_for_room_at_the_peak() -> None:
    plain, timed = Traffic("home", PerSecond(2), PerSecond(9)), Traffic("home", PerSecond(2), PerSecond(9), "true")
    asked = demand_of((plain, timed))
    assert asked == (Demand("home", PerSecond(2), PerSecond(9)), Demand("home", PerSecond(9), PerSecond(9)))
    for each in asked:
        assert decode(Demand, encode(each)) == each

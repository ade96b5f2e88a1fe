"""Make before break, and blindness destroys nothing: a region's decisions over time, every step checked."""

from dataclasses import replace

import pytest

from harness.builders.coordinator_core import (
    DIGEST,
    SMALL,
    CoreRegion,
    device,
    inputs,
    intent,
    node,
    observation,
    require,
)
from shoal.coordinator import codec
from shoal.coordinator.controllers.workloads.memory import MEMORY, SmallMemory, memory_writes
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.placement import replicas
from shoal.coordinator.core.placement.accuracy import batching_of
from shoal.coordinator.core.placement.allocations import QuotaCaps
from shoal.coordinator.core.placement.feasible import Scope
from shoal.coordinator.core.placement.model import Poisoning, Triple
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.workloads import failures
from shoal.coordinator.core.workloads.entries import EntryPoints
from shoal.coordinator.core.workloads.model import Crashes, ReconcilerMemory
from shoal.coordinator.core.workloads.routes import GatewayRoutes, routes
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import Assignment, Batching, Phase
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import EndpointKind
from shoal.types.tolerance import default
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import ModelRef, Quota, Spread, Standby, WorkloadKey


def nodes(region: CoreRegion, name: str = "ocr") -> list[str]:
    return sorted(where for where, _ in region.replicas(name).values())


def test_a_replica_is_assigned_loaded_routed() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 2e11, "b": 1e11})
    region.intents = (intent(),)
    region.run(0.5)
    assert nodes(region) == ["a"]
    assert region.routed_nodes("b") == []
    assert region.desired["b"].routes[0].pending_code == Code.MODEL_NOT_READY
    region.run(4)
    assert region.routed_nodes("a") == ["a"]
    assert region.routed_nodes("b") == ["a"]
    assert [event.code for event in region.events] == ["ASSIGNED", "READY"]
    assert region.decision is not None
    assert region.decision.waits == ()


def test_a_consent_to_capture_comes_and_goes_without_moving_anything() -> None:
    region = CoreRegion(node("a"), node("b"))
    for capture in (0, 64, 16, 0):
        region.intents = (intent(capture=capture, replicas=2),)
        region.run(4)
        found = [assignment.capture for desired in region.desired.values() for assignment in desired.assignments]
        assert found == [capture] * 2
    assert [event.code for event in region.events] == ["ASSIGNED", "ASSIGNED", "READY", "READY"]


def test_how_long_nobody_has_to_ask_comes_and_goes_without_moving_anything() -> None:
    region = CoreRegion(node("a"), node("b"))
    for after_s in (None, Seconds(600.0), Seconds(60.0), None):
        region.intents = (intent(to_zero_after_s=after_s, standby=Standby.WARM),)
        region.run(4)
        found = {each.standby: each.to_zero_after_s for one in region.desired.values() for each in one.assignments}
        assert found == {False: after_s, True: None}, "a standby is of no use unless it is loaded"
    assert [event.code for event in region.events if event.code != "READY"] == ["ASSIGNED", "ASSIGNED"]


def test_when_nothing_happens_nothing_is_written() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(replicas=2), intent("other"))
    region.run(10)
    before, memory = region.desired, region.memory
    region.run(30)
    assert region.desired == before
    assert region.memory == memory


def test_a_new_model_takes_over_only_when_it_serves() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(),)
    region.run(10)
    (old,) = region.replicas()
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    seen = set[tuple[str, ...]]()
    for _ in range(40):
        region.step()
        seen.add(tuple(region.routed_nodes("a")))
        if old in region.replicas() and region.replicas()[old][1]:
            assert region.agents[region.replicas()[old][0]].up
    assert old not in region.replicas()
    assert len(region.replicas()) == 1
    assert () not in seen


def test_other_batches_come_with_another_replica_and_another_bound_with_the_next_load() -> None:
    """Limits of batches hold from the load on, so the replica is replaced by one that serves before the old one
    goes."""
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(),)
    region.run(10)
    (old,) = region.replicas()

    def rules() -> list[Batching | None]:
        return [each.batching for desired in region.desired.values() for each in desired.assignments]

    assert rules() == [None]
    region.intents = (intent(max_batch=16, batch_delay_s=Seconds(0.005)),)
    region.run(40)
    (new,) = region.replicas()
    assert new != old
    assert rules() == [Batching(16, Seconds(0.005), None, default("fp32", "fp32"))]
    bounded = intent(max_batch=16, batch_delay_s=Seconds(0.005), require=require(latency_p95_s=Seconds(5.0)))
    region.intents = (bounded,)
    region.run(10)
    assert list(region.replicas()) == [new]
    assert rules() == [Batching(16, Seconds(0.005), Seconds(5.0), default("fp32", "fp32"))]
    region.intents = (replace(bounded, batch_padding=True),)
    region.run(40)
    assert list(region.replicas()) != [new]
    assert rules() == [Batching(16, Seconds(0.005), Seconds(5.0), default("fp32", "fp32"), padding=True)]


def test_the_steps_of_sessions_run_alone() -> None:
    alone = Batching(16, tolerances=default("fp32", "fp32"))
    assert batching_of(intent(max_batch=16), device(), "fp32") == alone
    assert batching_of(intent(max_batch=16, session={"h": "hn"}), device(), "fp32") is None
    assert batching_of(intent(), device(), "fp32") is None


def test_a_device_that_computes_in_another_precision_may_be_as_far_from_itself() -> None:
    """In a batch, too, as far as that precision rounds."""
    found = batching_of(intent(max_batch=16), device(computes_fp32_in="fp16"), "fp32")
    assert found is not None
    assert found.tolerances == default("fp32", "fp16")


def test_fewer_replicas_drain_and_a_busy_one_is_waited_for() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(replicas=2),)
    region.run(10)
    for agent in region.agents.values():
        agent.in_flight = 3
    region.intents = (intent(replicas=1),)
    region.run(20)
    assert sorted(draining for _, draining in region.replicas().values()) == [False, True]
    assert region.decision is not None
    assert [wait.code for wait in region.decision.waits] == [Code.WAITING_FOR_DRAIN]
    region.run(15)
    assert len(region.replicas()) == 1


def test_a_deleted_workload_drains_away() -> None:
    region = CoreRegion(node("a"))
    region.intents = (intent(),)
    region.run(10)
    region.intents = ()
    region.step()
    assert [draining for _, draining in region.replicas().values()] == [True]
    assert region.desired["a"].routes == ()
    region.run(5)
    assert region.replicas() == {}


def test_suspect_is_replaced_at_once_and_stays_assigned_until_lost() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), flops={"a": 4e11, "b": 2e11, "c": 1e11})
    region.intents = (intent(),)
    region.run(10)
    assert nodes(region) == ["a"]
    region.agents["a"].up = False
    region.run(4)
    assert nodes(region) == ["a", "b"]
    region.run(4)
    assert region.routed_nodes("c") == ["b"]
    assert nodes(region) == ["a", "b"]
    region.run(8)
    assert nodes(region) == ["b"]


def fall_silent(replicas: int) -> CoreRegion:
    """Three agents and a gateway that the coordinator hears no more, for longer than any may be silent; all go on."""
    region = CoreRegion(node("a"), node("b"), node("c"), node("gw", role=Role.GATEWAY))
    region.intents = (intent(replicas=replicas, spread=Spread.NODE),)
    region.run(10)
    for agent in region.agents.values():
        agent.heard = False
    region.run(5)
    assert not {state.liveness for state in region.fleet.nodes.values()} - {Liveness.SUSPECT}
    return region


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("silent_s", [0.0, 8.0])
def test_a_front_that_is_heard_first_again_keeps_its_routes(replicas: int, silent_s: float) -> None:
    """The replicas answer it: what was cut off is the coordinator. It says so only once they are heard, too."""
    region = fall_silent(replicas)
    region.run(silent_s)
    serving = {held for held, _ in region.replicas().values()}
    region.agents["gw"].heard = True
    region.run(1)
    assert {*region.routed_nodes("gw")} == serving
    first = min(serving)
    region.agents[first].heard = True
    region.run(1)
    assert region.routed_nodes("gw") == [first], "where one is heard, routes avoid the others"


def test_replicas_that_two_silent_nodes_held_stay_in_routes_and_one_alone_does_not() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), node("d"), node("gw", role=Role.GATEWAY))
    both = intent("both", replicas=2, spread=Spread.NODE, where='node.name in ["a", "b"]')
    region.intents = (both, intent("alone", where='node.name == "a"'))
    region.run(10)
    for name in ("a", "b"):
        region.agents[name].heard = False
    region.run(5)
    assert region.fleet.mass_silence is None
    assert region.routed_nodes("gw", "both") == ["a", "b"]
    assert region.routed_nodes("gw", "alone") == []
    assert "both" in {name.split("/")[-1] for name in region.memory.without_ready}, "nobody is known to answer"


def test_the_own_route_of_a_node_that_is_not_heard_keeps_the_shares_of_a_move() -> None:
    """It judges its replica itself, and gives it no more of the requests than the move's step does."""
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(replicas=2, spread=Spread.NODE),)
    region.run(10)
    (old,), (new,) = (region.desired[name].assignments for name in ("a", "b"))
    desired = {name: content.assignments for name, content in region.desired.items()}
    region.agents["b"].heard = False
    region.run(5)
    entries = EntryPoints(region.fleet, desired, [new.workload], [])
    shares, state = {old.id: 0.75, new.id: 0.25}, region.fleet.nodes["b"]
    (route,) = routes("b", region.memory.tables, (new,), state, shares, entries, GatewayRoutes())
    (own,) = (each for each in route.endpoints if each.kind is EndpointKind.LOCAL)
    assert (own.assignment, own.weight) == (new.id, 0.25)


def region_of_two() -> CoreRegion:
    """A workload with replicas on two agents and no third place, and a gateway."""
    region = CoreRegion(node("a"), node("b"), node("gw", role=Role.GATEWAY))
    region.intents = (intent(replicas=2, spread=Spread.NODE, where='node.name in ["a", "b"]'),)
    region.run(10)
    assert region.routed_nodes("gw") == ["a", "b"]
    return region


def pending_at_gateway(region: CoreRegion) -> str:
    (route,) = region.desired["gw"].routes
    return route.pending_code


@pytest.mark.parametrize("apart_s", [3.5, 9.0, 400.0])
def test_nodes_that_fall_silent_one_by_one_leave_the_routes_one_by_one(apart_s: float) -> None:
    """Within `lost_after` or long after: only what is cut off at once is probably not dead."""
    region = region_of_two()
    region.agents["a"].heard = False
    region.run(apart_s, tick=2.0 if apart_s > 10.0 else 0.5)
    assert region.routed_nodes("gw") == ["b"]
    region.agents["b"].heard = False
    for _ in range(100):
        region.step()
        assert "a" not in region.routed_nodes("gw"), "it was taken out before"
    assert region.fleet.mass_silence is None
    assert region.routed_nodes("gw") == []
    assert pending_at_gateway(region) == Code.MODEL_NOT_READY


def test_what_fell_silent_within_one_suspicion_time_is_never_put_back_and_the_last_one_stays_until_lost() -> None:
    region = region_of_two()
    region.agents["a"].heard = False
    region.run(2.5)
    region.agents["b"].heard = False
    seen = set[tuple[str, ...]]()
    while region.fleet.nodes["b"].liveness is not Liveness.LOST:
        seen.add(tuple(region.routed_nodes("gw")))
        assert region.now < 60.0
        region.step()
    assert seen == {("a", "b"), ("b",)}, "no front is without a route until they are lost"
    assert region.routed_nodes("gw") == []
    assert pending_at_gateway(region) == Code.MODEL_NOT_READY
    region.agents["a"].heard = True
    region.run(1)
    assert region.routed_nodes("gw") == ["a"]


def test_routes_to_two_silent_nodes_end_when_they_are_lost() -> None:
    region = region_of_two()
    for name in ("a", "b"):
        region.agents[name].heard = False
    region.run(9)
    assert region.routed_nodes("gw") == ["a", "b"]
    region.run(2)
    assert region.routed_nodes("gw") == []
    assert pending_at_gateway(region) == Code.MODEL_NOT_READY
    region.run(400, tick=2.0)
    assert region.routed_nodes("gw") == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_routes_to_nodes_in_a_mass_silence_end_with_it(replicas: int) -> None:
    region = fall_silent(replicas)
    assert region.fleet.mass_silence is not None
    ends = region.fleet.mass_silence.since + 2 * region.fleet.timing.lost_after_s
    while region.fleet.mass_silence is not None:
        assert len(region.routed_nodes("gw")) == replicas
        region.step()
    assert region.now >= ends
    assert region.routed_nodes("gw") == []
    assert pending_at_gateway(region) == Code.MODEL_NOT_READY


def test_nodes_lost_behind_a_broker_keep_their_routes_while_they_may_reconnect() -> None:
    """The coordinator did not reach the broker for longer than a mass silence lasts. They are lost until they are
    heard, but nothing is held against them yet."""
    region = region_of_two()
    region.fleet = updates.mark_link_lost(region.fleet, ("a", "b"), Elapsed(region.now))
    for name in ("a", "b"):
        region.agents[name].heard = False
    region.run(60)
    assert region.fleet.nodes["a"].liveness is Liveness.LOST
    assert region.routed_nodes("gw") == ["a", "b"]
    region.fleet = updates.mark_link_restored(region.fleet, Elapsed(region.now))
    region.run(2.5)
    assert region.routed_nodes("gw") == ["a", "b"]
    region.run(10)
    assert region.routed_nodes("gw") == []


def test_a_front_never_learns_of_a_replica_that_did_not_serve_before_the_silence() -> None:
    region = fall_silent(2)
    for name in ("a", "b", "c"):
        state = region.fleet.nodes[name]
        loading = {key: replace(one, phase=Phase.LOADING) for key, one in state.observed.items()}
        region.fleet = region.fleet.with_node(replace(state, observed=loading))
    region.agents["gw"].heard = True
    region.run(1)
    assert region.routed_nodes("gw") == []


def test_back_in_time_the_healthy_one_stays_and_the_half_loaded_one_is_dropped() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), flops={"a": 4e11, "b": 2e11, "c": 1e11})
    region.agents["b"].load_s = 30
    region.intents = (intent(),)
    region.run(10)
    (old,) = region.replicas()
    region.agents["a"].heard = False
    region.run(5)
    assert nodes(region) == ["a", "b"]
    region.agents["a"].heard = True
    region.run(5)
    assert list(region.replicas()) == [old]
    assert region.agents["a"].started == [old]


def test_back_after_its_replacement_serves_one_of_the_two_drains() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 4e11, "b": 2e11})
    region.intents = (intent(),)
    region.run(10)
    region.agents["a"].heard = False
    region.run(7)
    assert region.routed_nodes("b") == ["b"]
    region.agents["a"].heard = True
    region.run(10)
    assert len(region.replicas()) == 1
    assert len(region.routed_nodes("a")) == 1


def test_without_another_device_a_lost_node_keeps_its_replica() -> None:
    region = CoreRegion(node("a"))
    region.intents = (intent(),)
    region.run(10)
    (old,) = region.replicas()
    region.agents["a"].heard = False
    region.run(60)
    assert list(region.replicas()) == [old]
    assert region.decision is not None
    assert region.decision.plan.workloads[0].refusal is not None
    region.agents["a"].heard = True
    region.run(5)
    assert region.routed_nodes("a") == ["a"]
    assert region.agents["a"].started == [old]


def test_an_impossible_change_leaves_what_runs() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(),)
    region.run(10)
    before = region.replicas()
    region.intents = (replace(intent(where='node.name == "nowhere"'), revision=2),)
    region.run(60)
    assert region.replicas() == before
    assert len(region.routed_nodes("a")) == 1


def test_a_crashing_model_is_poisoned_after_three_crashes_across_the_fleet() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), node("d"))
    for agent in region.agents.values():
        agent.fail = Code.WORKER_CRASHED
    region.intents = (intent(replicas=2),)
    region.run(60)
    touched = {name for name, agent in region.agents.items() if agent.started}
    assert len(touched) <= 2
    assert [crashes.triple.model for crashes in region.memory.crashes] == [DIGEST]
    assert "POISONED" in [event.code for event in region.events]
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert refusal.code is Code.POISONED


def test_what_one_node_shows_for_good_counts_for_every_device_of_that_runtime_and_is_kept() -> None:
    region = CoreRegion(node("a"), node("b"), node("c", device(runtime_version="1.32")), flops={"c": 1e9})
    for name in ("a", "b"):
        region.agents[name].fail = Code.OP_UNSUPPORTED
    region.intents = (intent(),)
    region.run(60)
    touched = {name for name, agent in region.agents.items() if agent.started}
    assert "c" in touched
    assert len(touched) == 2, "the other device of the first runtime is not tried"
    assert nodes(region) == ["c"]
    (known,) = region.memory.unloadable
    assert (known.triple, known.refusal.code) == (Triple(DIGEST, "cpu-provider", "1.31"), Code.OP_UNSUPPORTED)
    puts, _ = memory_writes(ReconcilerMemory(), region.memory, {}, ())
    assert codec.load(SmallMemory, puts[MEMORY]).unloadable == region.memory.unloadable
    assert failures.load_refusals(failures.allow_retry(region.memory.unloadable, DIGEST)) == {}


def test_what_was_cleared_is_tried_once_more_and_a_replica_that_comes_up_disproves_it() -> None:
    region = CoreRegion(node("a"))
    region.agents["a"].fail = Code.IR_UNSUPPORTED
    region.intents = (intent(),)
    region.run(30)
    assert len(region.agents["a"].started) == 1
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert (refusal.code, refusal.found.partition(";")[0]) == (Code.IR_UNSUPPORTED, "a/cpu0: as told")
    region.memory = replace(region.memory, unloadable=failures.allow_retry(region.memory.unloadable, DIGEST))
    region.run(30)
    assert len(region.agents["a"].started) == 2
    assert failures.load_refusals(region.memory.unloadable), "it was shown again"
    region.memory = replace(region.memory, unloadable=failures.allow_retry(region.memory.unloadable, DIGEST))
    region.agents["a"].fail = None
    region.run(30)
    assert nodes(region) == ["a"]
    assert region.memory.unloadable == ()


SHOP, BANK = WorkloadKey("shop", "ocr"), WorkloadKey("bank", "ocr")


def replicas_of(region: CoreRegion, workload: WorkloadKey) -> set[str]:
    """Nodes that have one of its replicas, ready."""
    return {
        name
        for name, agent in region.agents.items()
        for each in agent.content.assignments
        if each.workload == workload and agent.up and each.id not in agent.stuck
    }


def test_crashes_are_remembered_no_longer_than_they_matter() -> None:
    region = CoreRegion(node("a"))
    region.intents = (intent("w"),)
    region.run(10)
    (base,) = region.desired["a"].assignments
    state, memory = region.fleet.nodes["a"], ReconcilerMemory()

    def count(one: Assignment | None, now: float, models: tuple[str, ...] = (DIGEST,)) -> tuple[Crashes, ...]:
        assignments = (one,) if one is not None else ()
        reports = {each.id: observation(each, Phase.FAILED, code=Code.WORKER_CRASHED) for each in assignments}
        fleet = replace(region.fleet, nodes={"a": replace(state, observed=reports)})
        return failures.count_crashes(memory, fleet, {"a": assignments}, Elapsed(now), models)

    for number in range(50):
        one = replace(base, id=f"a-{number}")
        memory = replace(memory, crashes=count(one, float(number)))
        assert memory.crashes[0].seen == ((one.id, 0),), "of what exists"
        assert count(one, float(number)) == memory.crashes, "a repeated report counts nothing"
    late = 50.0 + failures.CRASH_MEMORY_S
    assert [each.count for each in count(None, late)] == [50], "an operator clears a model that is to blame"
    assert count(None, 50.0, models=()) == (), "the model is gone"
    memory = replace(memory, crashes=(replace(memory.crashes[0], count=failures.POISON_AFTER - 1),))
    assert len(count(None, 50.0)) == 1
    assert count(None, late) == ()


@pytest.mark.parametrize(("tenant", "is_kept"), [("acme", True), (GUEST_TENANT, False)])
def test_a56_what_is_held_against_an_agreement_ends_after_it(tenant: str, is_kept: bool) -> None:
    """Other regions choose their names: a region would remember any number of them."""
    region = CoreRegion(node("a"))
    region.intents = (intent("w"),)
    region.run(10)
    (base,) = region.desired["a"].assignments
    one = replace(base, workload=WorkloadKey(tenant, "one"))
    report = observation(one, Phase.FAILED, code=Code.POISONED)
    fleet = replace(region.fleet, nodes={"a": replace(region.fleet.nodes["a"], observed={one.id: report})})
    memory = ReconcilerMemory()

    def count(assignments: tuple[Assignment, ...], now: float) -> tuple[Crashes, ...]:
        return failures.count_crashes(memory, fleet, {"a": assignments}, Elapsed(now), (DIGEST,))

    memory = replace(memory, crashes=count((one,), 1.0))
    assert len(failures.poisonings(memory.crashes)) == 1
    late = 2.0 + failures.CRASH_MEMORY_S
    assert len(count((one,), late)) == 1, "it still has the replica"
    assert len(count((), failures.CRASH_MEMORY_S)) == 1
    assert bool(count((), late)) == is_kept


def test_a56_a_model_that_crashed_with_a_tenant_and_a_guest_is_poisoned_for_everybody_for_good() -> None:
    """Of any number of guests one is remembered for it, the newest."""
    triple, other = Triple(DIGEST, "cpu", "1"), Triple(DIGEST, "cpu", "2")
    guests = tuple(Crashes(triple, 3, Elapsed(float(n)), (), f"{GUEST_TENANT}/{n}") for n in (2, 3, 1))
    alone = Crashes(other, 3, Elapsed(1.0), (), f"{GUEST_TENANT}/1")
    few = Crashes(triple, 2, Elapsed(4.0), (), f"{GUEST_TENANT}/4")
    tenant = Crashes(triple, 3, Elapsed(1.0), (), "acme")
    region = CoreRegion(node("a"))
    late = Elapsed(5.0 + failures.CRASH_MEMORY_S)

    def count(crashes: tuple[Crashes, ...]) -> tuple[Crashes, ...]:
        return failures.count_crashes(ReconcilerMemory(crashes=crashes), region.fleet, {}, late, (DIGEST,))

    left = count((tenant, few, alone, *guests))
    assert left == (tenant, guests[1])
    assert Poisoning(triple, "") in failures.poisonings(left)
    assert count(failures.clear_crashes(left, DIGEST)) == (), "an operator found it right"
    assert count((*guests, alone)) == ()


def test_nothing_is_remembered_of_a_deleted_nodes_replicas() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(),)
    region.run(20)
    ((name, (where, _)),) = region.replicas().items()
    region.agents[where].up = False
    region.run(1)
    del region.agents[where]
    region.fleet = updates.remove_node(region.fleet, where)
    region.run(10)
    assert name not in region.memory.marks
    assert len(region.replicas()) == 1


def crashes_of(region: CoreRegion, workload: WorkloadKey) -> None:
    """From now on its replicas crash with a request in flight, wherever they are."""
    for agent in region.agents.values():
        agent.at_load = False
        agent.crashing = {workload}


def test_a56_a_tenant_that_crashes_its_workers_costs_another_tenant_nothing() -> None:
    """The same model; then the other tenant loses a node, and is served again elsewhere."""
    region = CoreRegion(node("a"), node("b"), node("c"), node("d"))
    region.intents = (intent(tenant="shop"), intent(tenant="bank"))
    region.run(10)
    crashes_of(region, SHOP)
    region.run(60)
    poisonings = [event.message for event in region.events if event.code == "POISONED"]
    assert [message.endswith(" for shop") for message in poisonings] == [True]
    assert not replicas_of(region, SHOP)
    assert region.decision is not None
    (refused,) = [each.refusal for each in region.decision.plan.workloads if each.workload == SHOP]
    assert refused is not None
    assert refused.code is Code.POISONED
    (home,) = replicas_of(region, BANK)
    region.agents[home].up = False
    region.run(30)
    (again,) = replicas_of(region, BANK)
    assert again != home
    touched = {name for name, agent in region.agents.items() for each in agent.crashed if each == SHOP}
    assert len(touched) <= 2


def test_a56_a_model_that_crashes_with_two_tenants_requests_is_to_blame_itself() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), node("d"))
    region.intents = (intent(tenant="shop"), intent(tenant="bank"), intent(tenant="zoo"))
    region.run(10)
    crashes_of(region, SHOP)
    for agent in region.agents.values():
        agent.crashing.add(BANK)
    region.run(60)
    (home,) = replicas_of(region, WorkloadKey("zoo", "ocr"))
    region.run(30)
    assert replicas_of(region, WorkloadKey("zoo", "ocr")) == {home}, "what runs goes on"
    region.agents[home].up = False
    region.run(30)
    assert not replicas_of(region, WorkloadKey("zoo", "ocr"))
    assert region.decision is not None
    (refused,) = [each.refusal for each in region.decision.plan.workloads if each.workload.tenant == "zoo"]
    assert refused is not None
    assert refused.code is Code.POISONED


def test_a_device_that_cannot_load_it_is_left_for_another() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 4e11, "b": 1e11})
    region.agents["a"].fail = Code.LOAD_FAILED
    region.intents = (intent(),)
    region.run(30)
    assert nodes(region) == ["b"]
    assert region.routed_nodes("a") == ["b"]


def test_a_model_that_fails_everywhere_does_not_tour_the_fleet() -> None:
    region = CoreRegion(*(node(f"n{index}") for index in range(8)))
    for agent in region.agents.values():
        agent.fail = Code.LOAD_FAILED
    region.intents = (intent(),)
    region.run(120)
    assert sum(bool(agent.started) for agent in region.agents.values()) == 3
    assert region.decision is not None
    refusal = region.decision.plan.workloads[0].refusal
    assert refusal is not None
    assert refusal.code is Code.LOAD_FAILED


def test_another_model_is_tried_where_the_first_one_failed() -> None:
    region = CoreRegion(*(node(f"n{index}") for index in range(3)))
    for agent in region.agents.values():
        agent.fail = Code.LOAD_FAILED
    region.intents = (intent(),)
    region.run(60)
    for agent in region.agents.values():
        agent.fail = None
        agent.stuck = {each.id for each in agent.content.assignments}
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    region.run(20)
    assert len(region.replicas()) == 1
    assert len(region.routed_nodes("n0")) == 1


def test_a_replica_that_was_never_seen_ready_goes_only_when_another_serves() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.agents["a"].load_s = region.agents["b"].load_s = 5
    region.intents = (intent(),)
    region.run(2)
    (first,) = region.replicas()
    region.intents = (intent(models=(ModelRef("small.onnx", SMALL, ""),)),)
    region.run(5)
    assert first in region.replicas()
    region.run(15)
    assert first not in region.replicas()
    assert len(region.routed_nodes("a")) == 1


def test_a_coordinator_that_restarts_changes_nothing_until_the_nodes_had_a_window() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"))
    region.intents = (intent(replicas=2),)
    region.run(10)
    before, routes = region.replicas(), region.desired["c"].routes
    region.restart()
    for agent in region.agents.values():
        agent.heard = False
    region.run(4)
    assert region.desired["c"].routes == routes
    region.reconnect("c")
    region.run(2)
    assert region.desired["c"].routes == routes
    for name in "ab":
        region.reconnect(name)
    region.run(10)
    assert region.replicas() == before
    assert region.desired["c"].routes == routes
    assert all(len(agent.started) <= 1 for agent in region.agents.values())


def test_a_silent_node_keeps_its_own_replicas_in_its_own_table() -> None:
    """The first set that it takes when its link is back must not send its own clients away."""
    region = CoreRegion(node("a"), node("b"), flops={"a": 2e11, "b": 1e11})
    region.intents = (intent(),)
    region.run(10)
    assert region.routed_nodes("a") == region.routed_nodes("b") == ["a"]
    region.agents["a"].up = False
    region.run(4)
    assert region.fleet.nodes["a"].liveness is Liveness.SUSPECT
    assert region.routed_nodes("b") == [], "nobody else is sent there"
    assert region.routed_nodes("a") == ["a"]
    region.agents["a"].up = True
    region.run(1)
    assert region.routed_nodes("a")[0] == "a"


def test_a_lower_quota_drains_what_is_over_it_by_priority() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"))
    region.intents = (intent("low", replicas=2, priority=1), intent("high", replicas=2, priority=9))
    region.run(10)
    region.quotas = {"shop": Quota("shop", replicas=3)}
    region.run(15)
    assert len(region.replicas("high")) == 2
    assert len(region.replicas("low")) == 1
    before = region.desired
    region.run(10)
    assert region.desired == before


def test_the_quota_counts_what_workloads_of_higher_rank_keep_and_not_what_they_might() -> None:
    """`high` has four replicas, and may have three and a standby. None of the four can stand by, since both nodes have
    active ones; so it keeps three, and `low` may have the fifth of the quota."""
    devices = device("cpu0"), device("gpu0", kind="gpu")
    region = CoreRegion(node("a", *devices), node("b", *devices))
    high, low = intent("high", replicas=4, spread=Spread.DEVICE, priority=9), intent("low", replicas=2)
    region.intents = (high, low)
    region.run(10)
    fewer = replace(high, require=replace(high.require, replicas=3, standby=Standby.STAGED))
    desired = {name: each.assignments for name, each in region.desired.items()}
    quotas = {"shop": Quota("shop", replicas=5)}
    scope = Scope(inputs(region.fleet, fewer, low, desired=desired, quotas=quotas))
    caps = QuotaCaps(scope, [(each, replicas.replicas_of(scope, each)) for each in (fewer, low)])
    assert (caps.of(fewer.key), caps.of(low.key)) == (4, 1)
    plan = place(scope.inputs).of(fewer.key)
    assert plan is not None
    assert plan.no_standby is not None
    caps.decide(fewer.key, {each.existing_assignment for each in plan.targets})
    assert caps.of(low.key) == 2


def test_a_full_quota_does_not_break_before_it_makes() -> None:
    region = CoreRegion(node("a"), node("b"), flops={"a": 1e11, "b": 9e11})
    region.quotas = {"shop": Quota("shop", replicas=1)}
    region.intents = (intent(where='node.name == "a"', replicas=2, spread=Spread.NONE),)
    region.run(10)
    assert nodes(region) == ["a"]
    region.intents = (intent(where='node.name == "b"', replicas=2, spread=Spread.NONE),)
    for _ in range(40):
        region.step()
        assert region.routed_nodes("a") != []
    region.intents = (intent(replicas=2, spread=Spread.NONE, weights={"energy": 1}),)
    for _ in range(40):
        region.step()
        assert region.routed_nodes("a") != []
    assert len(nodes(region)) == 1


def test_a_short_silence_costs_nobody_its_place_in_the_quota() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), flops={"a": 1e11, "b": 2e11, "c": 3e11})
    region.quotas = {"shop": Quota("shop", replicas=2)}
    region.intents = (intent("text", where='node.name == "a"'),)
    region.run(10)
    region.intents = (*region.intents, intent("faces", replicas=2))
    region.run(10)
    before = region.replicas("text"), region.replicas("faces")
    region.agents["a"].heard = False
    region.run(8)
    region.agents["a"].heard = True
    region.run(10)
    assert (region.replicas("text"), region.replicas("faces")) == before


def test_a_replacement_that_proves_needless_costs_another_workload_nothing() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"), flops={"a": 1e11, "b": 2e11, "c": 3e11})
    region.quotas = {"shop": Quota("shop", replicas=2)}
    region.intents = (intent("text", where='node.name == "a"'),)
    region.run(10)
    region.intents = (*region.intents, intent("faces", replicas=3))
    region.run(10)
    (old,) = region.replicas("text")
    (faces,) = nodes(region, "faces")
    region.agents[faces].heard = False
    region.run(8)
    assert len(nodes(region, "faces")) == 2
    region.agents[faces].heard = True
    region.run(15)
    assert list(region.replicas("text")) == [old]
    assert len(nodes(region, "faces")) == 1


def test_a_node_that_comes_back_brings_nobody_over_quota() -> None:
    region = CoreRegion(node("a"), node("b"), node("c"))
    region.quotas = {"shop": Quota("shop", replicas=2)}
    region.intents = (intent(replicas=3),)
    region.run(10)
    region.agents[nodes(region)[0]].heard = False
    region.run(20)
    assert len(nodes(region)) >= 2
    for agent in region.agents.values():
        agent.heard = True
    region.run(15)
    assert len(region.replicas()) == 2
    assert len(region.routed_nodes("a")) == 2


def test_mass_silence_is_not_answered_with_mass_replacement() -> None:
    names = [f"n{index}" for index in range(9)]
    region = CoreRegion(*(node(name) for name in names))
    region.intents = tuple(intent(f"w{index}", spread=Spread.NODE) for index in range(9))
    region.run(10)
    before = {name: agent.started[:] for name, agent in region.agents.items()}
    for name in names[:4]:
        region.agents[name].heard = False
    region.run(8)
    assert region.fleet.mass_silence is not None
    for name in names[:4]:
        region.agents[name].heard = True
    region.run(10)
    assert region.fleet.mass_silence is None
    assert {name: agent.started for name, agent in region.agents.items()} == before


def test_a_real_mass_loss_is_replaced_within_half_a_minute() -> None:
    names = [f"n{index}" for index in range(9)]
    region = CoreRegion(*(node(name) for name in names), flops=dict.fromkeys(names, 100000000000.0))
    region.intents = (intent(replicas=5),)
    region.run(10)
    gone = sorted({where for where, _ in region.replicas().values()})[:4]
    for name in gone:
        region.agents[name].up = False
    region.run(30)
    survivors = [name for name in names if name not in gone]
    assert sorted(region.routed_nodes(survivors[0])) == survivors


def test_a_node_that_booted_is_not_routed_before_it_is_ready_again() -> None:
    region = CoreRegion(node("a"), node("b"))
    region.intents = (intent(replicas=2),)
    region.run(10)
    region.reconnect("a", boot="boot-2")
    region.step()
    assert region.routed_nodes("b") == ["b"]
    region.run(6)
    assert sorted(region.routed_nodes("b")) == ["a", "b"]

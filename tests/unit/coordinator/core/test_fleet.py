"""The fleet view: messages merged, replays without effect, silence judged by an observer that doubts itself."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    GIB,
    MIB,
    START,
    device,
    fleet_of,
    inputs,
    intent,
    merge_status,
    node,
    observation,
    reading,
    receipt,
    status,
    warm,
)
from shoal.coordinator.controllers.fleet.node_events import status_events
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.checks import check_receipt, check_status
from shoal.coordinator.core.fleet.commitments import (
    NO_COMMITMENT,
    MemoryCommitment,
    admissible_bytes,
    commitments,
    least_committed_bytes,
    memory_of,
)
from shoal.coordinator.core.fleet.liveness import deferred_nodes, update_liveness
from shoal.coordinator.core.fleet.state import Fleet, Liveness, LivenessChange, LivenessTiming, NodeState
from shoal.coordinator.core.placement.place import place
from shoal.types.assignment import Assignment, Ingress, Measured, Phase, Served, Status
from shoal.types.codes import Code
from shoal.types.device import EnergySource, Node, SilentDevice
from shoal.types.latency import BUCKETS
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall, Watts

A = node("a")


def at(seconds: float) -> tuple[Elapsed, Wall]:
    return Elapsed(seconds), Wall(START + seconds)


def with_heartbeat(fleet: Fleet, of: Node, sequence: int, seconds: float, **changes: Any) -> Fleet:
    fleet, refusals = merge_status(
        fleet, of.name, fleet.nodes[of.name].epoch, status(of, sequence, at=seconds, **changes), *at(seconds)
    )
    assert refusals == ()
    return fleet


def assignment(name: str = "a-1", memory: int = 100 * MIB, **changes: Any) -> Assignment:
    one = intent()
    values: dict[str, Any] = {
        "id": name, "workload": one.key, "revision": 1, "model": "sha256:x", "model_bytes": Bytes(1), "device": "cpu0",
        "provider": "cpu-provider", "precision": "fp32", "draining": False, "shared_worker": False,
        "memory_bytes": Bytes(memory), "partition": one.partition,
    }  # fmt: skip
    return Assignment(**(values | changes))


def test_full_replaces_and_a_delta_amends() -> None:
    one, two = observation(assignment("a-1"), Phase.READY), observation(assignment("a-2"), Phase.LOADING)
    fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(one, two))
    fleet = with_heartbeat(fleet, A, 3, 2.0, full=False, observed=(replace(two, phase=Phase.READY),), gone=("a-1",))
    state = fleet.nodes["a"]
    assert {name: each.phase for name, each in state.observed.items()} == {"a-2": Phase.READY}
    assert "cpu0" in state.readings
    assert with_heartbeat(fleet, A, 4, 3.0, full=False, readings=()).nodes["a"].readings == {}, (
        "a device that is silent is lost"
    )
    assert with_heartbeat(fleet, A, 4, 3.0).nodes["a"].observed == {}


def test_replayed_late_and_foreign_messages_change_nothing() -> None:
    fleet = with_heartbeat(fleet_of(A), A, 5, 1.0, observed=(observation(assignment(), Phase.READY),))
    for sequence in (5, 4, 1):
        again, refusals = merge_status(fleet, "a", 1, status(A, sequence, at=2.0), *at(2.0))
        assert again is fleet
        assert refusals == ()
    for epoch, message in ((2, status(A, 9, at=2.0, epoch=2)), (1, status(A, 9, at=2.0, epoch=0))):
        again, refusals = merge_status(fleet, "a", epoch, message, *at(2.0))
        assert again is fleet
        assert [refusal.code for refusal in refusals] == [Code.EPOCH_STALE]
    again, refusals = merge_status(fleet, "a", 1, status(node("b"), 9, at=2.0), *at(2.0))
    assert again is fleet
    assert [refusal.code for refusal in refusals] == [Code.NODE_MISMATCH]
    assert updates.connect(fleet, A, 1, *at(2.0)) is fleet
    assert updates.disconnect(fleet, "a", 7) is fleet


def test_a_reconnect_keeps_what_was_seen_and_a_boot_does_not() -> None:
    fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(observation(assignment(), Phase.READY),))
    again = updates.connect(fleet, A, 2, *at(2.0)).nodes["a"]
    assert set(again.observed) == {"a-1"}
    assert again.has_full_status
    booted = updates.connect(fleet, replace(A, boot_id="boot-2"), 2, *at(2.0)).nodes["a"]
    assert booted.observed == {}
    assert not booted.has_full_status


def test_a_new_runtime_voids_the_receipt() -> None:
    fleet = fleet_of(A)
    assert set(fleet.nodes["a"].receipts) == {"cpu0"}
    newer = replace(A, devices=(replace(A.devices[0], runtime_version="1.32"),))
    assert updates.connect(fleet, newer, 2, *at(1.0)).nodes["a"].receipts == {}


def test_silence_makes_suspect_then_lost_and_a_beat_makes_ready() -> None:
    fleet, found = fleet_of(A), []
    for tick in range(1, 25):
        fleet, changes = update_liveness(fleet, Elapsed(tick * 0.5))
        found += [(tick * 0.5, change.after) for change in changes]
    assert found == [(3.5, Liveness.SUSPECT), (10.5, Liveness.LOST)]
    fleet, changes = update_liveness(with_heartbeat(fleet, A, 2, 12.5), Elapsed(12.5))
    assert [(change.before, change.after) for change in changes] == [(Liveness.LOST, Liveness.READY)]


def test_f22_a_hello_alone_is_no_sign_of_life() -> None:
    """A node that nobody answers says hello for ever: it stays suspect, then lost, and does not come back each time."""
    fleet, found = with_heartbeat(fleet_of(A), A, 2, 0.0), []
    for tick in range(1, 60):
        if tick % 4 == 0:
            fleet = updates.connect(fleet, A, 1 + tick, *at(tick * 0.5))
        fleet, changes = update_liveness(fleet, Elapsed(tick * 0.5))
        found += [change.after for change in changes]
    assert found == [Liveness.SUSPECT, Liveness.LOST]
    fleet, changes = update_liveness(with_heartbeat(fleet, A, 1, 30.0, epoch=fleet.nodes["a"].epoch), Elapsed(30.0))
    assert [change.after for change in changes] == [Liveness.READY]


def test_a_shorter_beat_counts_once_the_nodes_can_have_heard_of_it() -> None:
    fleet = with_heartbeat(fleet_of(A, node("b")), A, 2, 0.9)
    fleet = updates.with_timing(fleet, LivenessTiming(Seconds(0.2), Seconds(2.0)), Elapsed(1.0))
    found = []
    for tick in range(2, 12):
        fleet = with_heartbeat(fleet, A, 1 + tick, tick * 0.5)
        fleet, changes = update_liveness(fleet, Elapsed(tick * 0.5))
        found += [(tick * 0.5, change.node, change.after) for change in changes]
    assert found == [(4.0, "b", Liveness.LOST)]


def test_an_observer_that_paused_suspects_nobody_before_a_window() -> None:
    fleet, _ = update_liveness(fleet_of(A, node("b")), Elapsed(1.0))
    fleet, changes = update_liveness(fleet, Elapsed(31.0))
    assert changes == ()
    fleet = with_heartbeat(fleet, A, 2, 31.5)
    found = []
    for tick in range(63, 90):
        fleet, changes = update_liveness(fleet, Elapsed(tick * 0.5))
        found += [(tick * 0.5, change.node, change.after) for change in changes if change.node == "b"]
    assert found == [(41.0, "b", Liveness.LOST)]


def test_nodes_behind_a_lost_broker_are_judged_when_it_is_back_or_stays_away() -> None:
    fleet = fleet_of(A, node("b"))
    timing = fleet.timing
    lost, back = 1.0, 1.0 + timing.lost_after_s - 1.0

    def liveness(fleet: Fleet, seconds: float) -> Liveness:
        found = fleet.nodes["a"].liveness
        for step in range(1, int(seconds * 2) + 1):
            fleet, _ = update_liveness(with_heartbeat(fleet, node("b"), 10**6 + step, step / 2), Elapsed(step / 2))
            found = fleet.nodes["a"].liveness
        return found

    blind = updates.mark_link_lost(fleet, ("a",), Elapsed(lost))
    assert updates.mark_link_lost(blind, ("a",), Elapsed(lost + 5)) is blind, "the same loss, told twice"
    assert liveness(fleet, lost + timing.suspect_after_s) is Liveness.SUSPECT
    assert liveness(blind, lost + timing.lost_after_s - 0.5) is Liveness.READY
    assert liveness(blind, lost + timing.lost_after_s + 0.5) is Liveness.LOST, "it may have died with the broker"
    anew = updates.mark_link_restored(updates.disconnect(blind, "a", 1), Elapsed(back))
    assert liveness(anew, back + timing.lost_after_s - 0.5) is Liveness.READY, "one full window to connect again"
    assert liveness(anew, back + timing.lost_after_s + 0.5) is Liveness.LOST
    kept = updates.mark_link_restored(blind, Elapsed(back))
    assert liveness(kept, back + timing.suspect_after_s + 0.5) is not Liveness.READY, "its session stood all the time"
    assert updates.mark_link_restored(kept, Elapsed(back + 1)) is kept
    elsewhere = updates.connect(blind, A, 2, *at(lost + 1))
    assert not elsewhere.nodes["a"].link_lost
    assert liveness(elsewhere, lost + 1.5 + timing.suspect_after_s) is Liveness.SUSPECT, "it came by another carrier"


def test_a_connection_that_is_over_excuses_its_nodes_and_nobody_else() -> None:
    fleet = fleet_of(A, node("b"), node("c"))
    closed = updates.close_link(fleet, {"a": 1, "b": 0, "gone": 1}, Elapsed(1.0))
    assert [(state.name, state.connected, state.link_lost) for state in closed.nodes.values()] == [
        ("a", False, True),
        ("b", True, False),  # it has a newer session
        ("c", True, False),
    ]
    assert updates.close_link(closed, {"a": 1}, Elapsed(5.0)) is closed
    for step in range(2, int(fleet.timing.lost_after_s * 2)):
        closed, changes = update_liveness(closed, Elapsed(step / 2))
        assert "a" not in {change.node for change in changes}
    assert closed.nodes["c"].liveness is Liveness.SUSPECT


def test_a_coordinator_that_started_has_seen_nobody_yet() -> None:
    stored = tuple(fleet_of(A, node("b")).nodes.values())
    fleet = updates.restore(stored, Fleet(), Elapsed(100.0))
    assert {state.liveness for state in fleet.nodes.values()} == {Liveness.NEVER_SEEN}
    fleet = with_heartbeat(updates.connect(fleet, A, 2, *at(101.0)), A, 1, 101.0, epoch=2)
    found = []
    for tick in range(202, 230):
        fleet, changes = update_liveness(fleet, Elapsed(tick * 0.5))
        fleet = with_heartbeat(fleet, A, tick, tick * 0.5, epoch=2)
        found += [(tick * 0.5, change.node, change.after) for change in changes]
    assert found == [(101.0, "a", Liveness.READY), (110.5, "b", Liveness.LOST)]


def test_mass_silence_brakes_and_ends() -> None:
    nodes = [node(f"n{index}") for index in range(9)]
    fleet = fleet_of(*nodes)
    for tick in range(1, 60):
        now = tick * 0.5
        for index, each in enumerate(nodes):
            if index >= 3:
                fleet = with_heartbeat(fleet, each, tick + 1, now)
        fleet, _ = update_liveness(fleet, Elapsed(now))
        mass = fleet.mass_silence
        if now == 3.5:
            assert mass is not None
            assert deferred_nodes(fleet, Elapsed(now)) == {"n0", "n1", "n2"}
        if now == 18.0:
            assert deferred_nodes(fleet, Elapsed(now)) == {"n0", "n1", "n2"}
        if now == 21.0:
            assert deferred_nodes(fleet, Elapsed(now)) == {"n2"}
    assert fleet.mass_silence is None
    assert deferred_nodes(fleet, Elapsed(30.0)) == frozenset()


def test_f25_the_first_suspect_is_held_with_those_that_are_late() -> None:
    """Three of nine beat last within one beat, then fall silent at once; two more are only slow."""
    nodes = [node(f"n{index}") for index in range(9)]
    fleet = fleet_of(*nodes)
    for index in range(3):
        fleet = with_heartbeat(fleet, nodes[index], 2, 0.4 * index)
    changes: tuple[LivenessChange, ...] = ()
    for tick in range(1, 32):
        now = 0.1 * tick
        for each in nodes[3:] if tick % 10 == 0 else ():
            fleet = with_heartbeat(fleet, each, 100 + tick, now)
        fleet, changes = update_liveness(fleet, Elapsed(now))
    assert [(change.node, change.after) for change in changes] == [("n0", Liveness.SUSPECT)]
    assert deferred_nodes(fleet, Elapsed(3.1)) == {"n0", "n1", "n2"}
    fleet, _ = update_liveness(with_heartbeat(fleet, nodes[2], 3, 3.2), Elapsed(3.2))
    assert deferred_nodes(fleet, Elapsed(3.2)) == frozenset(), "two are no mass silence"


def test_two_silent_nodes_are_no_mass_silence() -> None:
    fleet = fleet_of(A, node("b"))
    for tick in range(1, 10):
        fleet, _ = update_liveness(fleet, Elapsed(tick * 0.5))
    assert fleet.mass_silence is None


@pytest.mark.parametrize(
    ("ready", "after"),
    [
        ({}, Liveness.READY),
        ({"heard_at": Elapsed(96.0)}, Liveness.SUSPECT),
        ({"epoch": 0, "connected": False}, Liveness.NEVER_SEEN),
        ({"revoked": True}, Liveness.LOST),
    ],
)
def test_a_ready_node_stays_so_only_with_a_session_that_was_heard(ready: dict[str, Any], after: Liveness) -> None:
    state = NodeState(A, Liveness.READY, epoch=1, connected=True, heard_at=Elapsed(100.0))
    fleet, changes = update_liveness(Fleet({"a": replace(state, **ready)}), Elapsed(100.0))
    assert fleet.nodes["a"].liveness is after
    assert [change.after for change in changes] == [after] * (after is not Liveness.READY)


ABSURD = [math.inf, -math.inf, -1.0, 1e308]


@pytest.mark.parametrize("value", [*ABSURD, 2.0])
@pytest.mark.parametrize("field", ["utilisation", "temperature_c", "power_w", "energy_j"])
def test_a35_absurd_readings_are_refused_value_by_value(field: str, value: float) -> None:
    if (value == 2.0 and field != "utilisation") or (field, value) == ("temperature_c", -1.0):
        return
    first, second = device("cpu0"), device("gpu0", kind="gpu")
    two = node("a", first, second)
    message = status(two, 2, at=1.0, readings=(reading(first, **{field: value}), reading(second, free=GIB)))
    fleet, refusals = merge_status(fleet_of(two), "a", 1, message, *at(1.0))
    assert [refusal.code for refusal in refusals] == [Code.TELEMETRY_ABSURD]
    assert fleet.nodes["a"].readings["cpu0"].utilisation == 0.1
    assert fleet.nodes["a"].readings["gpu0"].free_bytes == GIB
    assert not fleet.nodes["a"].quarantined


def test_a_device_that_does_not_answer_says_why_and_since_when() -> None:
    first, second = device("cpu0"), device("gpu0", kind="gpu")
    two = node("a", first, second)
    silent = SilentDevice("gpu0", Code.DEVICE_UNREACHABLE, "found: its driver hangs; wanted: an answer", Wall(START))
    absurd, stranger = replace(silent, since=Wall(-1e300)), replace(silent, device="gpu7")
    for told, known in (((silent, stranger), {"gpu0": silent}), ((absurd,), {})):
        message = status(two, 2, at=1.0, readings=(reading(first),), silent=told)
        fleet, _ = merge_status(fleet_of(two), "a", 1, message, *at(1.0))
        assert fleet.nodes["a"].silent == known
    fleet, _ = merge_status(
        fleet, "a", 1, status(two, 3, at=2.0, readings=(reading(first),), silent=(silent,)), *at(2.0)
    )
    (plan,) = place(inputs(fleet, intent())).workloads
    refusals = {each.device: each.refusal for each in plan.candidates if each.refusal is not None}
    assert refusals["gpu0"].code is Code.DEVICE_UNREACHABLE
    assert refusals["gpu0"].found == "a/gpu0: its driver hangs"


@pytest.mark.parametrize("latencies", [(-1,), (2**60,), (6,), (3, 3), (0,) * (BUCKETS + 1)])
def test_a35_counts_of_latencies_that_cannot_be_are_refused(latencies: tuple[int, ...]) -> None:
    """Of five requests."""
    served = Served("eu", 5, 0, Seconds(0.01), Seconds(0.02), Joules(1.0), EnergySource.ESTIMATED)
    fine, lying = (observation(assignment(name), Phase.READY, served=(served,)) for name in ("a-1", "a-2"))
    both = (replace(fine, latencies=(1, 4)), replace(lying, latencies=latencies))
    fleet, refusals = merge_status(fleet_of(A), "a", 1, status(A, 2, at=1.0, observed=both), *at(1.0))
    assert [refusal.code for refusal in refusals] == [Code.TELEMETRY_ABSURD]
    assert set(fleet.nodes["a"].observed) == {"a-1"}


@pytest.mark.parametrize("wall", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("field", ["since", "retry_at", "gives_up_at"])
def test_a_time_of_a_replica_that_no_clock_shows_is_refused(field: str, wall: float) -> None:
    """What it told before stays, and so does the replica."""
    told = observation(assignment("a-1"), Phase.READY)
    fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(told,))
    changes: dict[str, Any] = {field: wall}
    lying = status(A, 3, at=2.0, observed=(replace(told, **changes),))
    fleet, refusals = merge_status(fleet, "a", 1, lying, *at(2.0))
    assert [refusal.code for refusal in refusals] == [Code.TELEMETRY_ABSURD]
    assert fleet.nodes["a"].observed == {"a-1": told}


@pytest.mark.parametrize("count", [-1, 2**60])
@pytest.mark.parametrize("field", ["requests", "answered", "retried", "refused", "lost"])
def test_a35_counts_of_ingress_that_cannot_be_are_refused(field: str, count: int) -> None:
    """The last valid count of the same workload and origin stays; the other origins are merged."""
    told, other = Ingress(intent().key, "x", 5, 5, 0, 0, 0), Ingress(intent().key, "y", 7, 7, 0, 0, 0)
    fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, ingress=(told, other))
    more = replace(other, requests=9, answered=9)
    changes: dict[str, Any] = {field: count}
    lying = status(A, 3, at=2.0, ingress=(replace(told, **changes), more))
    fleet, refusals = merge_status(fleet, "a", 1, lying, *at(2.0))
    assert [refusal.code for refusal in refusals] == [Code.TELEMETRY_ABSURD]
    assert {each.origin: each for each in fleet.nodes["a"].ingress} == {"x": told, "y": more}


def test_free_above_total_and_stamps_from_the_future() -> None:
    fleet = fleet_of(A)
    lying = status(A, 2, at=1.0, readings=(reading(A.devices[0], free=64 * GIB),))
    assert [each.code for each in check_status(lying, A).refusals] == [Code.TELEMETRY_ABSURD]
    future = status(A, 2, at=1.0, readings=(reading(A.devices[0], at=START + 3600),))
    assert [each.code for each in check_status(future, A).refusals] == [Code.TELEMETRY_ABSURD]
    counts = status(A, 2, at=1.0, ingress=(Ingress(intent().key, "x", -1, 0, 0, 0, 0),))
    assert [each.code for each in check_status(counts, A).refusals] == [Code.TELEMETRY_ABSURD]
    assert check_status(status(A, 2, at=1.0), A).refusals == ()
    assert fleet.nodes["a"].strikes == 0


def test_a59_a_replica_that_answered_nothing_yet_puts_its_node_in_no_quarantine() -> None:
    """One refused request every 0.7 s, to a replica that never answered: its latencies are unknown, which is no lie."""
    unknown = Seconds(math.nan)
    fleet = fleet_of(A)
    for sequence in range(2, 30):
        served = Served("eu", sequence, 0, unknown, unknown, Joules(math.nan), EnergySource.ESTIMATED, refused=sequence)
        told = status(
            A, sequence, at=float(sequence), observed=(observation(assignment(), Phase.READY, served=(served,)),)
        )
        fleet, refusals = merge_status(fleet, "a", 1, told, *at(float(sequence)))
        assert refusals == ()
    assert (fleet.nodes["a"].quarantined, fleet.nodes["a"].strikes) == (False, 0)
    (seen,) = fleet.nodes["a"].observed.values()
    assert seen.served[0].refused == 29, "what can be true is kept"


@pytest.mark.parametrize("stamp", [*ABSURD, math.nan])
def test_f35_a_stamp_that_no_clock_shows_is_refused(stamp: float) -> None:
    lying = status(A, 2, at=1.0, taken_at=Wall(stamp), readings=())
    fleet, refusals = merge_status(fleet_of(A), "a", 1, lying, *at(1.0))
    assert [refusal.code for refusal in refusals] == [Code.TELEMETRY_ABSURD]
    assert fleet.nodes["a"].skew_s == 0.0


@pytest.mark.parametrize("ahead_s", [600.0, -600.0, 365 * 86400.0, -START])
def test_f27_a_clock_that_is_wrong_is_no_lie(ahead_s: float) -> None:
    """Readings are judged by the clock that stamped them; a receipt that it stamped is kept too."""
    fleet = fleet_of(A)
    stamped = at(1.0 + ahead_s)[1]
    fleet = updates.connect(fleet, A, 2, *at(1.0), sent_at=stamped)
    assert fleet.nodes["a"].is_skewed
    measured = receipt(A, A.devices[0], flops=2e11, at=max(stamped, START))
    fleet, refusals = updates.merge_receipts(fleet, "a", (measured,), *at(1.5))
    assert refusals == ()
    assert fleet.nodes["a"].receipts["cpu0"] == measured
    told = status(A, 1, at=2.0, epoch=2, taken_at=stamped, readings=(reading(A.devices[0], free=GIB, at=stamped),))
    fleet, refusals = merge_status(fleet, "a", 2, told, *at(2.0))
    assert refusals == ()
    assert fleet.nodes["a"].readings["cpu0"].free_bytes == GIB
    assert fleet.nodes["a"].skew_s == pytest.approx(1.0 - ahead_s)
    right = status(A, 2, at=3.0, epoch=2)
    assert not merge_status(fleet, "a", 2, right, *at(3.0))[0].nodes["a"].is_skewed


def test_absurdity_that_persists_quarantines_and_the_work_stays() -> None:
    fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(observation(assignment(), Phase.READY),))
    for sequence in range(3, 6):
        bad = status(
            A, sequence, at=1.0 + sequence, readings=(reading(A.devices[0], power_w=-5.0),),
            observed=(observation(assignment(), Phase.READY, measured=replace(warm(), load_s=Seconds(math.inf))),),
        )  # fmt: skip
        fleet, refusals = merge_status(fleet, "a", 1, bad, *at(1.0 + sequence))
        assert len(refusals) == 2
    state = fleet.nodes["a"]
    assert state.quarantined
    assert state.observed["a-1"].phase is Phase.READY
    for sequence in range(6, 9):
        assert fleet.nodes["a"].quarantined
        fleet = with_heartbeat(fleet, A, sequence, 1.0 + sequence)
    assert not fleet.nodes["a"].quarantined


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"node": "b"}, Code.NODE_MISMATCH),
        ({"device": "gpu7"}, Code.RECEIPT_ABSURD),
        ({"provider": "other"}, Code.RECEIPT_ABSURD),
        ({"measured_at": Wall(START + 3600)}, Code.RECEIPT_ABSURD),
        ({"memory_bytes": Bytes(64 * GIB)}, Code.RECEIPT_ABSURD),
        ({"memory_bytes": Bytes(0)}, Code.RECEIPT_ABSURD),
        ({"spread": math.nan}, Code.RECEIPT_ABSURD),
        ({"provider_bytes": Bytes(-1)}, Code.RECEIPT_ABSURD),
        ({"provider_bytes": Bytes(64 * GIB)}, Code.RECEIPT_ABSURD),
        ({"provider_host_bytes": Bytes(2**60)}, Code.RECEIPT_ABSURD),
        ({"provider_bytes": Bytes(GIB // 4), "provider_host_bytes": Bytes(GIB)}, None),
        ({"flops": 1e19}, Code.RECEIPT_ABSURD),
        ({"flops": math.inf}, Code.RECEIPT_ABSURD),
        ({"flops": 0.0}, Code.RECEIPT_ABSURD),
        ({"watts": -1.0}, Code.RECEIPT_ABSURD),
        ({}, None),
        ({"flops": math.nan}, None),
    ],
)
def test_receipts_that_cannot_be_true(changes: dict[str, Any], code: Code | None) -> None:
    found = check_receipt(receipt(A, A.devices[0], **changes), A, Wall(START + 1))
    assert (found.code if found is not None else None) is code


def test_an_older_receipt_does_not_replace_a_newer_one() -> None:
    fleet, _ = updates.merge_receipts(fleet_of(A), "a", (receipt(A, A.devices[0], flops=5e11, at=START + 5),), *at(6.0))
    fleet, refusals = updates.merge_receipts(fleet, "a", (receipt(A, A.devices[0], flops=1e11, at=START),), *at(7.0))
    assert refusals == ()
    assert fleet.nodes["a"].receipts["cpu0"].rates.matmul_flops["fp32"] == 5e11


def test_memory_that_is_committed_and_not_in_use_is_given_to_nobody() -> None:
    idle = observation(assignment("a-1"), Phase.READY, code=Code.SCALED_TO_ZERO, measured=warm(memory=300 * MIB))
    for code, pending in ((Code.SCALED_TO_ZERO, 300), (Code.WAITING_FOR_WAKE, 300), (None, 0)):
        fleet = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(replace(idle, code=code),))
        books = commitments(fleet, {"a": (assignment("a-1"),)})
        assert books == {("a", "cpu0"): MemoryCommitment(Bytes(300 * MIB), Bytes(pending * MIB))}


def test_scaling_to_zero_and_back_are_events_of_the_replica() -> None:
    def node_with(code: Code | None) -> NodeState:
        found = observation(assignment("a-1"), Phase.READY, code=code, reason="no request for 600s")
        return with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(found,)).nodes["a"]

    def events_between(before: Code | None, after: Code | None) -> list[tuple[str, str]]:
        return [(each.code, each.subject) for each in status_events(node_with(before), node_with(after))]

    assert events_between(None, Code.SCALED_TO_ZERO) == [(Code.SCALED_TO_ZERO, "a-1")]
    assert events_between(Code.SCALED_TO_ZERO, Code.SCALED_TO_ZERO) == []
    assert events_between(Code.SCALED_TO_ZERO, Code.WAITING_FOR_WAKE) == []
    assert (
        events_between(Code.WAITING_FOR_WAKE, None)
        == events_between(Code.SCALED_TO_ZERO, None)
        == [("SCALED_UP", "a-1")]
    )
    assert events_between(None, None) == []


@pytest.mark.parametrize(("code", "told"), [(Code.DEVICE_LOST, 0), (Code.DEVICE_UNREACHABLE, 0), (Code.LOAD_FAILED, 1)])
def test_attempts_on_a_device_that_could_not_be_read_before_are_no_news(code: Code, told: int) -> None:
    """Of another failure each attempt is, and of the first one after a device was lost."""

    def attempt(restarts: int, *, is_readable: bool) -> NodeState:
        found = observation(assignment("a-1"), Phase.FAILED, code=code, reason="as told", restarts=restarts)
        state = with_heartbeat(fleet_of(A), A, 2, 1.0, observed=(found,)).nodes["a"]
        return replace(state, readings={"cpu0": reading(A.devices[0])} if is_readable else {})

    first, second = attempt(1, is_readable=False), attempt(2, is_readable=False)
    assert [each.code for each in status_events(first, second)] == [code] * told
    assert [each.code for each in status_events(attempt(0, is_readable=True), first)] == [code]
    unheard = replace(first, has_full_status=False)
    assert [each.code for each in status_events(unheard, second)] == [code], "of a node that has just connected"


def test_books_and_live_memory() -> None:
    fleet = with_heartbeat(
        fleet_of(A), A, 2, 1.0,
        observed=(observation(assignment("a-1"), Phase.READY, measured=warm(memory=300 * MIB)),
                  observation(assignment("a-2"), Phase.LOADING)),
    )  # fmt: skip
    state = fleet.nodes["a"]
    books = commitments(fleet, {"a": (assignment("a-1"), assignment("a-2"), assignment("a-3"))})
    assert books == {("a", "cpu0"): MemoryCommitment(Bytes(500 * MIB), Bytes(200 * MIB))}
    on = A.devices[0]
    by_books = admissible_bytes(on, replace(state, readings={}), books["a", "cpu0"])
    assert by_books == 8 * GIB - 500 * MIB
    tight = replace(state, readings={"cpu0": reading(on, free=GIB)})
    assert admissible_bytes(on, tight, books["a", "cpu0"]) == GIB - 256 * MIB - 200 * MIB
    assert admissible_bytes(on, replace(state, readings={"cpu0": reading(on, free=0)}), NO_COMMITMENT) < 0


phases = st.sampled_from(list(Phase))
figures = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([*ABSURD, 0.0, 0.5, math.nan]))


@st.composite
def messages(draw: st.DrawFn) -> Status:
    served = Served(
        "eu", draw(st.integers(-2, 5)), 0, Seconds(draw(figures)), Seconds(draw(figures)), Joules(draw(figures)),
        EnergySource.ESTIMATED,
    )  # fmt: skip
    return status(
        A,
        draw(st.integers(0, 12)),
        at=draw(st.floats(0, 10)),
        epoch=draw(st.integers(0, 2)),
        full=draw(st.booleans()),
        observed=tuple(
            observation(assignment(name), draw(phases), served=(served,))
            for name in draw(st.sets(st.sampled_from(["a-1", "a-2", "a-3"])))
        ),
        gone=tuple(draw(st.sets(st.sampled_from(["a-1", "a-2"])))),
        readings=(replace(reading(A.devices[0]), power_w=Watts(draw(figures)), utilisation=draw(figures)),),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(messages(), max_size=8))
def test_law_no_message_breaks_the_view_and_a_replay_changes_nothing(received: list[Status]) -> None:
    fleet = fleet_of(A)
    for index, message in enumerate(received):
        now, wall = at(10.0 + index)
        fleet, _ = merge_status(fleet, "a", message.epoch, message, now, wall)
        again, _ = merge_status(fleet, "a", message.epoch, message, now, wall)
        assert again is fleet
        state = fleet.nodes["a"]
        assert all(math.isnan(each.power_w) or 0 <= each.power_w <= 1e5 for each in state.readings.values())
        assert all(served.requests >= 0 for each in state.observed.values() for served in each.served)
    fleet, _ = update_liveness(fleet, Elapsed(30.0))
    assert fleet.timing == LivenessTiming()


def test_a_provider_counts_once_in_a_worker_that_several_models_share() -> None:
    """Its context takes 800 MiB of the 860 that are committed to each."""
    asked = replace(assignment("a-1"), shared_worker=True, memory_bytes=Bytes(860 * MIB))
    told = replace(asked, provider_bytes=Bytes(800 * MIB))
    alone, joined = warm(memory=850 * MIB), replace(warm(memory=50 * MIB), joined=True)

    def held_mib(one: Assignment, measured: Measured | None) -> int:
        return memory_of(one, observation(one, Phase.READY, measured=measured)) // MIB

    assert [held_mib(told, each) for each in (None, alone, joined)] == [860, 860, 60]
    assert held_mib(told, replace(joined, memory_bytes=Bytes(90 * MIB))) == 90, "it took more than was committed"
    assert held_mib(asked, joined) == 860, "of an older coordinator's nobody knows the part"
    asleep = observation(told, Phase.READY, measured=joined, code=Code.SCALED_TO_ZERO)
    assert memory_of(told, asleep) // MIB == 860, "it may be the first of its next worker"


def test_what_is_committed_at_least_has_a_provider_once_for_a_worker() -> None:
    told = [
        replace(
            assignment(f"a-{n}"), shared_worker=True, memory_bytes=Bytes(860 * MIB), provider_bytes=Bytes(800 * MIB)
        )
        for n in range(3)
    ]
    alone, joined = warm(memory=850 * MIB), replace(warm(memory=50 * MIB), joined=True)

    def least_mib(assignments: Iterable[Assignment], *measured: Measured) -> int:
        seen = {one.id: observation(one, Phase.READY, measured=each) for one, each in zip(told, measured, strict=False)}
        return least_committed_bytes(assignments, seen) // MIB

    assert least_mib(told) == 980, "those that load anew may join one worker"
    assert least_mib(told, alone, joined, joined) == 980
    assert least_mib(told, joined, joined) == 980, "the worker is there although its first model left"
    assert least_mib(told, alone, alone, joined) == 1780, "they have two workers"
    assert least_mib([replace(one, provider_bytes=Bytes(0)) for one in told], alone, joined) == 3 * 860
    assert least_mib([*told, replace(told[0], id="b-1", device="gpu1")]) == 980 + 860

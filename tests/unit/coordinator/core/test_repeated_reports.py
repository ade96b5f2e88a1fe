"""Statuses that repeat what was known are not looked at again, and give what they would give if they were."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import GIB, START, device, fleet_of, node, observation, reading, status, warm
from shoal.coordinator.controllers.fleet.node_events import affects_decisions, status_events
from shoal.coordinator.core.fleet import updates
from shoal.coordinator.core.fleet.checks import check_status
from shoal.coordinator.core.fleet.state import NodeState
from shoal.coordinator.core.placement.changes import is_material, is_same_host
from shoal.types.assignment import (
    AgreementCounts,
    Ingress,
    Observed,
    Phase,
    Served,
    Status,
    Subscriptions,
    Version,
)
from shoal.types.codes import Code
from shoal.types.device import EnergySource, SilentDevice
from shoal.types.units import Elapsed, Joules, Seconds, Wall, Watts
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

KEY = WorkloadKey("t", "w")
FIRST, SECOND = device("cpu0"), device("gpu0", kind="gpu")
TWO = node("a", FIRST, SECOND)
UNKNOWN = Joules(math.nan)


def service_of(requests: int, joules: Joules = UNKNOWN) -> Served:
    return Served("eu", requests, 0, Seconds(0.01), Seconds(0.02), joules, EnergySource.ESTIMATED)


@dataclass(frozen=True)
class Named:
    """What `observation` reads of an assignment."""

    id: str
    workload: WorkloadKey = KEY
    model: str = "sha256:x"
    device: str = "cpu0"


def replica(name: str, phase: Phase, **changes: Any) -> Observed:
    of: Any = Named(name)
    return observation(of, phase, **changes)


VARIANTS: list[tuple[Phase, dict[str, Any]]] = [
    (Phase.READY, {"measured": warm()}),
    (Phase.READY, {"measured": warm(), "served": (service_of(5),), "latencies": (0, 3)}),
    (Phase.READY, {"measured": warm(), "served": (service_of(5, Joules(2.0)),)}),
    (Phase.READY, {"measured": warm(), "served": (service_of(900, Joules(9.0)),)}),
    (Phase.READY, {"in_flight": -1}),
    (Phase.READY, {"latencies": (1,)}),
    (Phase.READY, {"code": Code.SCALED_TO_ZERO, "reason": "idle"}),
    (Phase.DRAINING, {"code": Code.SCALED_TO_ZERO, "reason": "idle"}),
    (Phase.DRAINING, {"in_flight": 2}),
    (Phase.FAILED, {"code": Code.WORKER_CRASHED, "reason": "it ended"}),
    (Phase.FAILED, {"code": Code.DEVICE_LOST, "reason": "gone"}),
    (Phase.LOADING, {"sessions": 1}),
]
replicas = st.builds(
    lambda name, variant: replica(name, variant[0], **variant[1]),
    st.sampled_from(["a-1", "a-2", "a-3"]),
    st.sampled_from(VARIANTS),
)
readings = st.builds(
    lambda on, free, watts: reading(on, free=free, power_w=Watts(watts)),
    st.sampled_from([FIRST, SECOND]),
    st.sampled_from([7.0 * GIB, 7.0 * GIB + 1, 1.0 * GIB, 99.0 * GIB]),
    st.sampled_from([10.0, 90.0, -5.0]),
)
reports = st.fixed_dictionaries(
    {
        "full": st.booleans(),
        "observed": st.lists(replicas, max_size=3, unique_by=lambda each: each.assignment).map(tuple),
        "gone": st.lists(st.sampled_from(["a-1", "a-2"]), max_size=1).map(tuple),
        "readings": st.lists(readings, max_size=2, unique_by=lambda each: each.device).map(tuple),
        "version": st.sampled_from([None, Version("h", 1, 1), Version("h", 1, 2)]),
        "front_ready": st.booleans(),
        "ingress": st.lists(
            st.builds(
                Ingress, st.just(KEY), st.sampled_from(["x", "y"]), st.sampled_from([5, 9, -1]), *[st.just(0)] * 4
            ),
            max_size=2,
        ).map(tuple),
        "agreement_counts": st.lists(
            st.builds(AgreementCounts, st.just("g"), st.just("us"), st.sampled_from([3, 7]), st.just(0), st.just(0.0)),
            max_size=1,
        ).map(tuple),
        "silent": st.sampled_from([(), (SilentDevice("gpu0", Code.DEVICE_UNREACHABLE, "hangs", Wall(START)),)]),
        "subscriptions": st.sampled_from([None, Subscriptions(()), Subscriptions((KEY,))]),
        "serial": st.sampled_from(["", "7"]),
    }
)
steps = st.lists(st.one_of(st.none(), reports), min_size=1, max_size=8)
"""None repeats what was reported last."""


@settings(max_examples=150, deadline=None)
@given(steps)
def test_a_stream_with_repeats_gives_what_a_stream_gives_of_which_all_is_judged(
    steps: list[dict[str, Any] | None],
) -> None:
    state = whole = noted = whole_noted = fleet_of(TWO).nodes["a"]
    last: dict[str, Any] = {}
    for at, step in enumerate(steps, start=1):
        last = last if step is None else step
        told = status(TWO, at + 1, at=float(at), **last)
        now, wall = Elapsed(float(at)), Wall(START + at)
        before, whole_before = state, whole
        after, refusals = updates.with_status(state, "a", 1, as_read(told), now, wall)
        assert after is not None
        state, (whole, all_refusals) = after, merge_whole(whole, as_read(told), now, wall)
        assert (repr(state), refusals) == (repr(whole), all_refusals)
        assert status_events(before, state) == status_events(whole_before, whole)
        assert affects_decisions(before, state) == affects_decisions(whole_before, whole)
        assert is_same_host(before, state) == is_same_host(whole_before, whole)
        is_new = is_material(noted, state)
        assert is_new == is_material(whole_noted, whole)
        noted, whole_noted = (state, whole) if is_new else (noted, whole_noted)


def as_read(told: Status) -> Status:
    """As it comes from a node: nothing of it is the same object as before."""
    return nouns.from_wire(Status, nouns.to_wire(told))


def merge_whole(known: NodeState, told: Status, now: Elapsed, wall: Wall) -> tuple[NodeState, tuple[Any, ...]]:
    """The state after a status of which every part is judged, and nothing of the state before is kept that is told
    again."""
    checked = check_status(told, known.node)
    ended = {
        name: updates.sum_agreement_counts(known.earlier_agreement_counts[name], before)
        if name in known.earlier_agreement_counts
        else before
        for name, before in known.agreement_counts.items()
        if name in checked.agreement_counts and checked.agreement_counts[name].requests < before.requests
    }
    strikes = known.strikes + 1 if checked.refusals else max(0, known.strikes - 1)
    is_new = told.front_ready and not known.front_ready
    answered = {each.device for each in told.readings}
    kept = {key: each for key, each in known.observed.items() if key in checked.refused_assignments}
    stay = {} if told.full else {key: each for key, each in known.observed.items() if key not in told.gone}
    entered = (
        *checked.ingress,
        *(each for each in known.ingress if (each.workload, each.origin) in checked.refused_ingress),
    )
    state = replace(
        known,
        strikes=strikes,
        quarantined=strikes >= updates.QUARANTINE_AT or (known.quarantined and strikes > 0),
        refusal=checked.refusals[0] if checked.refusals else known.refusal if strikes else None,
        heard_at=max(now, known.heard_at),
        last_seen=wall,
        sequence=told.sequence,
        version=told.version,
        observed={**stay, **kept, **checked.observed},
        readings={**{name: each for name, each in known.readings.items() if name in answered}, **checked.readings},
        silent={each.device: each for each in told.silent},
        skew_s=Seconds(wall - told.taken_at),
        ingress=entered if told.full or told.ingress else known.ingress,
        tenants=checked.tenants,
        front_ready=told.front_ready,
        has_full_status=known.has_full_status or told.full,
        serial=told.serial or known.serial,
        agreement_counts={**known.agreement_counts, **checked.agreement_counts},
        earlier_agreement_counts={**known.earlier_agreement_counts, **ended},
        counts_since=now if is_new or ended else known.counts_since,
        subscriptions=checked.subscriptions or known.subscriptions,
    )
    return state, checked.refusals


def test_what_is_repeated_is_the_same_object() -> None:
    one, two = replica("a-1", Phase.READY, measured=warm()), replica("a-2", Phase.LOADING)
    first = state_after(fleet_of(TWO).nodes["a"], 2, observed=(one, two))
    again = state_after(first, 3, observed=(one, two))
    assert again.observed is first.observed
    assert state_after(again, 4, full=False).observed is first.observed, "nothing was told of them"
    other = state_after(again, 4, observed=(one, replace(two, phase=Phase.READY)))
    assert other.observed["a-1"] is first.observed["a-1"]
    assert other.observed["a-2"].phase is Phase.READY


def test_what_was_refused_is_judged_each_time() -> None:
    """A report that is repeated is no truer than at first."""
    known = fleet_of(TWO).nodes["a"]
    absurd = replica("a-1", Phase.READY, in_flight=-1)
    for strikes in (1, 2, 3):
        known = state_after(known, strikes + 1, observed=(absurd,))
        assert (known.strikes, dict(known.observed)) == (strikes, {})
    assert known.quarantined


def test_a_repeated_reading_is_judged_by_the_clock_that_sent_it() -> None:
    known, stale = fleet_of(TWO).nodes["a"], reading(FIRST, at=START)
    assert state_after(known, 2, readings=(stale,)).strikes == 0
    assert state_after(known, 2, readings=(stale,), taken_at=Wall(START - 400)).strikes == 1


def test_a_replica_that_drains_is_not_scaled_to_zero_at_each_report() -> None:
    left = replica("a-1", Phase.DRAINING, code=Code.SCALED_TO_ZERO, reason="idle")
    known = state_after(fleet_of(TWO).nodes["a"], 2, observed=(left,))
    again = state_after(known, 3, observed=(replace(left, in_flight=1),))
    assert [each.code for each in status_events(known, again)] == []


def test_a_status_keeps_all_that_it_does_not_tell() -> None:
    told = {
        "sequence", "heard_at", "last_seen", "has_full_status", "version", "observed", "readings", "silent", "ingress",
        "tenants", "front_ready", "strikes", "quarantined", "refusal", "skew_s", "counts_since",
    }  # fmt: skip
    known = fleet_of(TWO).nodes["a"]
    others = [each.name for each in fields(NodeState) if each.name not in told | {"node", "epoch"}]
    marked = {name: object() for name in others}
    changes: dict[str, Any] = marked
    after = state_after(replace(known, **changes), 2, full=False)
    assert {name: getattr(after, name) for name in others} == marked


def state_after(known: NodeState, sequence: int, **changes: Any) -> NodeState:
    """The state after a status of that number, of the second of that number."""
    at = float(sequence)
    told = as_read(status(TWO, sequence, at=at, **changes))
    after, _ = updates.with_status(known, "a", 1, told, Elapsed(at), Wall(START + at))
    assert after is not None
    return after

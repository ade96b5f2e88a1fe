"""What a region answers when another asks: offers, counter-offers, declines, and that nothing is promised twice."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import DIGEST, GIB, MIB, device, fleet_of, inputs, intent, node, profile
from harness.builders.negotiation import HERE, ORIGIN, bid, demand, region, solicitation
from shoal.coordinator.core.federation.rules import check_advertisement
from shoal.coordinator.core.fleet.commitments import total_bytes
from shoal.coordinator.core.graph.kernels import intensity_of
from shoal.coordinator.core.negotiation import bid as bid_module
from shoal.coordinator.core.negotiation.advertise import capacity_classes
from shoal.coordinator.core.negotiation.bid import COSTS_MOST, KERNELS_MOST, BidAnswer, guest_intent
from shoal.coordinator.core.placement.contention import UTILISATION_MOST
from shoal.coordinator.core.placement.model import Inputs, Reservation, Slot
from shoal.coordinator.core.placement.place import place
from shoal.types.agreement import GUEST_TENANT
from shoal.types.codes import Code
from shoal.types.offer import Advertisement, Decline, Offer
from shoal.types.profile import KERNEL_KINDS, RUN_BATCHES, KernelCost, OperatorCost
from shoal.types.units import Bytes, PerSecond, Seconds, UsdPerHour
from shoal.types.workload import Intent, Limits, Spread, TradeRule, Traffic, WorkloadKey


def offer_of(answered: BidAnswer) -> Offer:
    assert isinstance(answered.answer, Offer), answered.answer
    return answered.answer


def decline_code(answered: BidAnswer) -> Code:
    assert isinstance(answered.answer, Decline), answered.answer
    assert answered.reservations == ()
    return answered.answer.refusal.code


def test_an_offer_holds_room_for_every_replica() -> None:
    costs = {Slot(name, "cpu0"): UsdPerHour(price) for name, price in (("a", 1.0), ("b", 2.0))}
    answered = bid(solicitation(replicas=2, traffic=demand(4.0)), region("a", "b", costs=costs))
    told = offer_of(answered)
    assert (told.region, told.origin, told.solicitation, told.round) == (HERE, ORIGIN, "s-1", 1)
    assert (told.replicas, told.cost, told.hold_s, told.changes, told.cached) == (2, 3.0, 10.0, (), False)
    assert (told.model, told.precision, told.residency) == (DIGEST, "fp32", "eu")
    assert {each.slot.node for each in answered.reservations} == {"a", "b"}
    assert all(each.bid == "b-1" and each.memory_bytes > 10 * MIB and each.busy > 0 for each in answered.reservations)


def test_figures_are_those_that_placement_would_find() -> None:
    world = region("a")
    told = offer_of(bid(solicitation(), world))
    plan = place(replace(world, intents=(intent(),)))
    (candidate,) = plan.workloads[0].candidates
    prediction = candidate.prediction
    assert prediction is not None
    assert (told.latency_p95_s, told.joules, told.load_s) == (
        prediction.latency_p95_s.mid,
        prediction.joules.mid,
        prediction.load_s.mid,
    )
    assert math.isnan(told.cost), "what has no price is not free"


def test_the_way_counts_in_what_is_asked_and_not_in_what_is_offered() -> None:
    world = region("a")
    alone = offer_of(bid(solicitation(), world)).latency_p95_s
    bound = Seconds(2 * alone + 0.04)
    near = solicitation(latency_p95_s=bound, way_s={HERE: 0.02})
    assert offer_of(bid(near, world)).latency_p95_s == pytest.approx(alone)
    assert offer_of(bid(replace(near, way_s={"elsewhere": 9.0}), world)).changes == ()
    far = bid(replace(near, way_s={HERE: 1.0}), world)
    assert offer_of(far).is_counter


def test_a_counter_offer_says_what_would_have_to_give_and_holds_nothing() -> None:
    world = region("a")
    asked = solicitation(latency_p95_s=Seconds(0.001))
    answered = bid(asked, world)
    told = offer_of(answered)
    assert told.is_counter
    assert told.changes[0].startswith("latency: {p95: ")
    assert (told.hold_s, answered.reservations) == (0.0, ())
    assert told.latency_p95_s > 0.001
    relaxed = replace(asked, round=2, require=replace(asked.require, latency_p95_s=Seconds(10.0)))
    assert not offer_of(bid(relaxed, world)).is_counter


def test_an_indicative_bid_holds_nothing() -> None:
    answered = bid(solicitation(indicative=True), region("a"))
    assert (offer_of(answered).hold_s, answered.reservations) == (0.0, ())


def test_a27_the_region_that_asks_and_the_tenant_it_asks_for_need_a_right_each() -> None:
    trades = (TradeRule("us-*", ("bank", "lab-*"), 1.0), TradeRule("eu-*", ("shop",), 1.0))
    assert decline_code(bid(solicitation(), region("a"), trades)) is Code.TENANT_DENIED
    assert not offer_of(bid(solicitation(workload=WorkloadKey("lab-1", "ocr")), region("a"), trades)).is_counter
    assert decline_code(bid(solicitation(origin="af-1"), region("a"), trades)) is Code.TRADE_DENIED


def test_what_no_price_is_known_of_is_offered_and_advertised_without_one() -> None:
    unpriced = region("a")
    unpriced = replace(unpriced, costs={})
    assert math.isnan(offer_of(bid(solicitation(), unpriced)).cost)
    (told,) = capacity_classes(unpriced)
    assert math.isnan(told.cost_usd_per_h)
    assert check_advertisement(Advertisement(HERE, 1, (told,), "", Seconds(10.0)), None) is None


@pytest.mark.parametrize(
    ("trades", "changes"),
    [
        ((), {}),
        ((TradeRule("eu-*", ("*",), 1.0),), {}),
        ((TradeRule("*", ("*",), 1.0),), {"origin": HERE}),
    ],
)
def test_who_may_not_trade_is_declined(trades: tuple[TradeRule, ...], changes: dict[str, Any]) -> None:
    assert decline_code(bid(solicitation(**changes), region("a"), trades)) is Code.TRADE_DENIED


def test_a25_residency_is_judged_here_too() -> None:
    assert decline_code(bid(solicitation(residency=("us",)), region("a"))) is Code.RESIDENCY
    for allowed in ("eu", HERE):
        assert not offer_of(bid(solicitation(residency=("us", allowed)), region("a"))).is_counter


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"where": 'node.name == "a-better-one"'}, Code.SELECTOR_MISMATCH),
        ({"replicas": 2, "where": 'node.name == "edge-7"'}, Code.SELECTOR_MISMATCH),
        ({"signed_by": ("factory",)}, Code.PUBLISHER_UNKNOWN),
        ({"models": (profile("sha256:" + "c" * 64, size=64 * GIB),)}, Code.MEMORY_SHORT),
    ],
)
def test_a_decline_tells_why_and_names_nothing_of_the_region(changes: dict[str, Any], code: Code) -> None:
    world = region("secret-node")
    answered = bid(solicitation(**changes), world)
    assert decline_code(answered) is code
    assert "secret-node" not in repr(answered)
    assert "cpu0" not in repr(answered)


@pytest.mark.parametrize(
    "changes",
    [
        {"models": (replace(profile(DIGEST), weight_bytes=Bytes(-(2**40))),)},
        {"models": (replace(profile(DIGEST), largest_weight_bytes=Bytes(2**62)),)},
        {"models": (replace(profile(DIGEST), run_bytes=Bytes(-1)),)},
        {"models": (replace(profile(DIGEST), copied_bytes=Bytes(2**62)),)},
        {"models": (replace(profile(DIGEST), run_growth_bytes=Bytes(-1)),)},
        {"models": (replace(profile(DIGEST), largest_convolution_bytes=Bytes(2**62)),)},
        {"models": (replace(profile(DIGEST), layout_copies=-1),)},
        {"models": (replace(profile(DIGEST), kernels=(KernelCost("conv", 1.0, 1.0, 1.0, 1.0, (math.nan,)),)),)},
        {"models": (replace(profile(DIGEST), kernels=(KernelCost("conv", 1.0, 1.0, 1.0, 1.0, (1.0,) * 3),)),)},
        {"models": (replace(profile(DIGEST), batch_run_bytes=(Bytes(1), Bytes(-1))),)},
        {"models": (replace(profile(DIGEST), layout_bytes=Bytes(2**62)),)},
        {"models": (replace(profile(DIGEST), activation_bytes=Bytes(-1)),)},
        {"models": (profile(DIGEST, flops=math.nan),)},
        {"models": ()},
        {"traffic": demand(-1.0)},
        {"traffic": demand(math.inf)},
        {"replicas": 0},
        {"replicas": 10**9},
        {"max_batch": 0},
        {"round": 0},
        {"way_s": {HERE: -5.0}},
        {"models": (replace(profile(DIGEST), kernels=(KernelCost("matmul", 1.0, -1.0, 1.0, 0.0),)),)},
        {
            "models": (
                replace(profile(DIGEST), kernels=(KernelCost("matmul", 1.0, 1.0, 1.0, 0.0),) * (KERNELS_MOST + 1)),
            )
        },
        {"models": (replace(profile(DIGEST), costs=(OperatorCost("Relu", 1, 1.0, 1.0),) * (COSTS_MOST + 1)),)},
        {"models": (replace(profile(DIGEST), batch_run_bytes=(Bytes(1),) * (len(RUN_BATCHES) + 1)),)},
    ],
)
def test_absurd_figures_are_declined(changes: dict[str, Any]) -> None:
    assert decline_code(bid(solicitation(**changes), region("a"))) is Code.MESSAGE_INVALID


def test_as_many_kernels_as_a_region_can_count_are_no_absurd_figures() -> None:
    kernels = tuple(
        KernelCost(kind, 1.0, 4.0 ** max(step, 0), 4.0 ** max(-step, 0), 0.0)
        for kind in KERNEL_KINDS
        for step in range(-29, 30)
    )
    assert len({(each.kind, intensity_of(each.flops, each.bytes)) for each in kernels}) == len(kernels)
    assert 0.9 * KERNELS_MOST < len(kernels) <= KERNELS_MOST
    answered = bid(solicitation(models=(replace(profile(DIGEST), kernels=kernels),)), region("a"))
    assert not isinstance(answered.answer, Decline) or answered.answer.refusal.code is not Code.MESSAGE_INVALID


def test_a_known_model_counts_as_it_was_inspected_here() -> None:
    """An origin that calls a model small gets no offer by it."""
    lied = solicitation(models=(profile(DIGEST, size=MIB, flops=1e3),))
    assert offer_of(bid(lied, region("a"))).latency_p95_s == offer_of(bid(solicitation(), region("a"))).latency_p95_s


def test_a28_one_counterpart_holds_no_more_than_its_share() -> None:
    world = region("a", "b")
    trades = (TradeRule(ORIGIN, ("*",), 0.01),)
    first = bid(solicitation(), world, trades)
    share = sum(each.memory_bytes for each in first.reservations) / (16 * GIB)
    assert 0 < share < 0.01, "the sample fits once, and not often"
    held = list(first.reservations)
    answered, count = first, 1
    while answered.reservations and count < 100:
        count += 1
        answered = bid(solicitation(f"s-{count}"), replace(world, reserved=tuple(held)), trades, used=tuple(held))
        held += [replace(each, bid=f"b-{count}") for each in answered.reservations]
    assert decline_code(answered) is Code.HOLD_SHARE
    assert sum(each.memory_bytes for each in held) <= 0.01 * 16 * GIB
    others = bid(solicitation(), replace(world, reserved=tuple(held)), trades, used=())
    assert not offer_of(others).is_counter, "another counterpart has its own share"


def test_time_counts_to_the_share_as_memory_does() -> None:
    busy = solicitation(traffic=demand(20.0))
    trades = (TradeRule(ORIGIN, ("*",), 0.05),)
    assert decline_code(bid(busy, region("a"), trades)) is Code.HOLD_SHARE
    assert not offer_of(bid(solicitation(), region("a"), trades)).is_counter


def test_who_lives_here_is_placed_first_and_guests_spend_no_tenants_quota() -> None:
    small = fleet_of(node("a", device(memory=100 * MIB)))
    home = intent()
    world = inputs(small, home)
    assert place(world).workloads[0].refusal is None
    assert decline_code(bid(solicitation(), world)) in (Code.MEMORY_SHORT, Code.OUTRANKED)
    told = offer_of(bid(solicitation(), inputs(small)))
    assert guest_intent(solicitation(), told, "g-1").key == WorkloadKey(GUEST_TENANT, "g-1")


def test_an_agreement_is_placed_in_its_own_room_and_no_one_else_is() -> None:
    small = fleet_of(node("a", device(memory=100 * MIB)))
    answered = bid(solicitation(), inputs(small))
    kept = tuple(replace(each, bid="g-1") for each in answered.reservations)
    asked = guest_intent(solicitation(), offer_of(answered), "g-1")
    home = intent()
    plan = place(inputs(small, asked, home, reserved=kept))
    placed = {each.workload: each.placed for each in plan.workloads}
    assert placed == {home.key: 0, asked.key: 1}, "a promise is kept, even towards who is of higher rank"


def test_a_workload_that_runs_elsewhere_is_wanted_nowhere_here() -> None:
    plan = place(inputs(fleet_of(node("a")), intent(), elsewhere=frozenset({intent().key})))
    (found,) = plan.workloads
    assert (found.elsewhere, found.wanted, found.placed, found.refusal, found.targets) == (True, 0, 0, None, ())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_is_oversold_whatever_is_held_awarded_and_applied(data: st.DataObject) -> None:
    """Bids are held, awarded and released and home workloads come, in any order."""
    sizes = data.draw(st.lists(st.integers(60, 400), min_size=1, max_size=3))
    nodes = tuple(node(f"n{index}", device(memory=size * MIB)) for index, size in enumerate(sizes))
    fleet = fleet_of(*nodes)
    homes: tuple[Intent, ...] = ()
    guests: dict[str, Intent] = {}
    pending: dict[str, Intent] = {}
    held: dict[str, tuple[Reservation, ...]] = {}
    for turn in range(data.draw(st.integers(1, 8))):
        move = data.draw(st.sampled_from(["bid", "bid", "award", "release", "home"]))
        reserved = tuple(each for kept in held.values() for each in kept)
        world: Inputs = inputs(fleet, *homes, *guests.values(), reserved=reserved)
        if move == "bid":
            rate, replicas = data.draw(st.floats(0, 30)), data.draw(st.integers(1, 3))
            asked = solicitation(f"s-{turn}", replicas=replicas, spread=Spread.NONE, traffic=demand(rate))
            answered = bid(asked, world, name=f"b-{turn}")
            if answered.reservations:
                held[f"b-{turn}"] = answered.reservations
                pending[f"b-{turn}"] = guest_intent(asked, offer_of(answered), f"b-{turn}")
        elif move == "award" and (waiting := [name for name in held if name in pending]):
            name = data.draw(st.sampled_from(waiting))
            guests[name] = pending.pop(name)
        elif move == "release" and held:
            name = data.draw(st.sampled_from(sorted(held)))
            held.pop(name)
            guests.pop(name, None)
            pending.pop(name, None)
        else:
            rate = data.draw(st.floats(0, 30))
            homes = (*homes, intent(f"home-{turn}", traffic=(Traffic(ORIGIN, PerSecond(rate), PerSecond(rate)),)))
        _within(fleet, homes, guests, held)


def _within(
    fleet: Any, homes: tuple[Intent, ...], guests: dict[str, Intent], held: dict[str, tuple[Reservation, ...]]
) -> None:
    reserved = tuple(each for kept in held.values() for each in kept)
    plan = place(inputs(fleet, *homes, *guests.values(), reserved=reserved))
    placed = {each.workload.name for each in plan.workloads if each.targets}
    for name, state in fleet.nodes.items():
        (on,) = state.node.devices
        taken = [
            (each.memory_bytes, each.busy) for found in plan.workloads for each in found.targets if each.node == name
        ]
        taken += [
            (each.memory_bytes, each.busy) for each in reserved if each.slot.node == name and each.bid not in placed
        ]
        assert sum(memory for memory, _ in taken) <= total_bytes(on, state)
        assert math.fsum(busy for _, busy in taken) <= UTILISATION_MOST + 1e-9
    for guest_name in guests:
        assert guest_name in placed, "what was granted finds its room"


def test_limits_are_asked_of_the_delegate_too() -> None:
    costs = {Slot("a", "cpu0"): UsdPerHour(2.0)}
    answered = bid(solicitation(limits=Limits(cost=UsdPerHour(1.0))), region("a", costs=costs))
    assert "cost: 2 USD/h" in offer_of(answered).changes[0]


@pytest.mark.parametrize(("where", "code"), [("foo.bar > 2", Code.EXPRESSION_INVALID), ("(" * 500, None)])
def test_an_expression_that_is_none_is_refused_before_any_device_is_looked_at(
    where: str, code: Code | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placement compiled it for each device: 200 of them took 2.6 s."""
    monkeypatch.setattr(bid_module, "place", None)
    found = decline_code(bid(solicitation(where=where), region("a")))
    assert found in ((code,) if code else (Code.EXPRESSION_INVALID, Code.POLICY_COST))

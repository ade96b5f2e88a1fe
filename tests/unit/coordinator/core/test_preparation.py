"""Models that a node makes in another precision: where they may go, what they are told from, and what a move says."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.builders.coordinator_core import (
    DIGEST,
    START,
    CoreRegion,
    device,
    fleet_of,
    inputs,
    intent,
    node,
    profile,
    require,
)
from shoal.coordinator.core.migration.estimate import MoveAnswer, MoveNeed, estimate_move
from shoal.coordinator.core.migration.movable import is_there
from shoal.coordinator.core.placement.model import Aim, Inputs, Judged, Move, Trial, Triple, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.placement.preparable import prepare_refusal
from shoal.coordinator.core.prediction.demand import DemandRow, ModelDemand, OperatorClass, prepared_profile
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS
from shoal.types.assignment import Preparation, Served
from shoal.types.codes import Code, Refusal
from shoal.types.device import EnergySource
from shoal.types.migration import Against, InputsFrom, Metric, MigrationRule, PackRef, Tolerance
from shoal.types.receipt import Receipt, RuntimeSupport
from shoal.types.tolerance import default
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall
from shoal.types.workload import PREPARABLE, Intent, ModelRef, variant_of

PUSHED = ModelRef("model.onnx", DIGEST, "fp32")
MADE = replace(PUSHED, precision="int8", prepared=True)
HALF = replace(PUSHED, precision="fp16", prepared=True)
PACK = PackRef("sha256:" + "5" * 64, Bytes(1000), 16, answers=False)
BOTH = intent(models=(PUSHED, MADE), packs={DIGEST: PACK})
ALL = replace(BOTH, models=(PUSHED, MADE, HALF))
FASTER = {"fp32": 1e11, "fp16": 1.5e11, "int8": 2e11}
"""FLOP/s of a device that is the faster the coarser."""


def region(
    asked: Intent = BOTH, prepares: tuple[str, ...] = ("int8",), flops: Mapping[str, float] | None = None
) -> Inputs:
    """One processor on which int8 is twice as fast, or of other rates."""
    fleet = fleet_of(node("a", device()))
    state = fleet.nodes["a"]
    known = replace(state.receipts["cpu0"], runtime=RuntimeSupport(13, {}, prepares=prepares))
    if flops is not None:
        rates = replace(known.rates, matmul_flops=flops, conv_flops=flops)
        known = replace(known, precisions=tuple(flops), rates=rates)
    return inputs(replace(fleet, nodes={"a": replace(state, receipts={"cpu0": known})}), asked)


def plan_of(asked: Inputs) -> WorkloadPlan:
    (plan,) = place(asked).workloads
    return plan


def test_the_faster_precision_is_made_of_the_samples() -> None:
    (target,) = plan_of(region()).targets
    assert (target.model, target.precision, target.samples) == (DIGEST, "int8", PACK.digest)
    assert target.preparation is not None
    assert target.preparation.tolerances == default("fp32", "int8")
    assert target.samples_count == 16
    assert target.variant == variant_of(DIGEST, "int8") != DIGEST


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (region(replace(BOTH, packs={})), "the model has no samples"),
        (region(prepares=()), "a/cpu0 cannot prepare models"),
        (inputs(fleet_of(node("a", device())), BOTH), "a/cpu0 cannot prepare models"),  # by an older agent's receipt
    ],
)
def test_it_is_loaded_as_it_was_pushed_where_nothing_can_be_made(asked: Inputs, found: str) -> None:
    plan = plan_of(asked)
    (target,) = plan.targets
    assert (target.precision, target.preparation) == ("fp32", None)
    refusal = next(each.refusal for each in plan.candidates if each.is_prepared)
    assert refusal is not None
    assert (refusal.code, refusal.found) == (Code.PREPARE_UNAVAILABLE, found)


def test_what_could_not_be_made_by_these_samples_is_not_tried_again() -> None:
    failed = Refusal(Code.PREPARE_FAILED, "cosine 0.9")
    at = region()
    there = at.fleet.nodes["a"].node.devices[0]
    shown = Triple.of_load(DIGEST, there, {}, None, judgement("int8"))
    plan = plan_of(replace(at, unloadable={shown: failed}))
    assert [each.precision for each in plan.targets] == ["fp32"], "the pushed model is another matter"
    other = replace(BOTH, packs={DIGEST: replace(PACK, digest="sha256:" + "6" * 64)})
    assert [each.precision for each in plan_of(replace(region(other), unloadable={shown: failed})).targets] == ["int8"]
    wider = replace(BOTH, migration=MigrationRule(tolerances=(Tolerance("", Metric.COSINE, 0.5),)))
    assert [each.precision for each in plan_of(replace(region(wider), unloadable={shown: failed})).targets] == ["int8"]


def judgement(precision: str, samples: str = PACK.digest) -> Judged:
    found = Judged.of(precision, samples, Preparation(default("fp32", precision)), None)
    assert found is not None
    return found


def test_each_precision_has_figures_and_blocks_of_its_own() -> None:
    at = region()
    blocked = {(BOTH.key, Trial(MADE.variant, "a", "cpu0")): Refusal(Code.VERIFY_FAILED, "differs")}
    assert [each.precision for each in plan_of(replace(at, blocked=blocked)).targets] == ["fp32"]


def test_a_move_says_that_the_node_prepares_the_model() -> None:
    fast = CoreRegion(node("first"), node("second"), flops={"first": 2e11, "second": 1e11})
    fast.intents = (intent(models=(PUSHED,), packs={DIGEST: PACK}),)
    fast.run(20)
    world = inputs_of(fast.world(), NO_MIGRATIONS, Elapsed(fast.now), Wall(START + fast.now))
    state = world.fleet.nodes["second"]
    known = state.receipts["cpu0"]
    rates = replace(known.rates, matmul_flops={"int8": 4e11}, conv_flops={"int8": 4e11})
    runtime = RuntimeSupport(13, {}, prepares=("int8",))
    only_int8 = replace(known, precisions=("int8",), rates=rates, runtime=runtime)
    fleet = replace(world.fleet, nodes={**world.fleet.nodes, "second": replace(state, receipts={"cpu0": only_int8})})
    asked = replace(world, fleet=fleet, intents=(replace(fast.intents[0], models=(PUSHED, MADE)),))
    best = estimate_move(asked, BOTH.key, Aim("second")).estimates[0]
    assert (best.precision, best.answer) == ("int8", MoveAnswer.YES_WITH)
    assert best.needs == ((MoveNeed.PREPARE, "int8 of 16 samples, never done there"),)
    assert best.drift == default("fp32", "int8")
    halved = replace(rates, matmul_flops={"fp16": 4e11}, conv_flops={"fp16": 4e11})
    only_fp16 = replace(
        only_int8, precisions=("fp16",), rates=halved, runtime=RuntimeSupport(13, {}, prepares=PREPARABLE)
    )
    fleet = replace(world.fleet, nodes={**world.fleet.nodes, "second": replace(state, receipts={"cpu0": only_fp16})})
    asked = replace(world, fleet=fleet, intents=(replace(fast.intents[0], models=(PUSHED, HALF), packs={}),))
    best = estimate_move(asked, BOTH.key, Aim("second")).estimates[0]
    assert best.needs == ((MoveNeed.PREPARE, "fp16, never done there"),)


def prepared_region() -> CoreRegion:
    """One node, which makes int8 of the model, and a replica in it whose bound on the p95 could be missed."""
    found = CoreRegion(node("a"), flops={"a": 1e11})
    state = found.fleet.nodes["a"]
    receipt = replace(state.receipts["cpu0"], runtime=RuntimeSupport(13, {}, prepares=("int8",)))
    found.fleet = replace(found.fleet, nodes={"a": replace(state, receipts={"cpu0": receipt})})
    moves = MigrationRule(automatic=True, against=Against.NONE)
    asked = require(precisions=("int8",), latency_p95_s=Seconds(0.06))
    found.intents = (replace(BOTH, require=asked, migration=moves, weights={"latency": 1.0}),)
    found.run(20)
    (one,) = found.desired["a"].assignments
    assert one.variant == MADE.variant
    return found


def test_a_prepared_replica_does_not_move_to_where_it_is() -> None:
    there = prepared_region()
    served = Served("eu-west", 1000, 0, Seconds(0.1), Seconds(0.2), Joules(400.0), EnergySource.ESTIMATED)
    there.agents["a"].served = (served,)
    there.run(60)
    assert not there.migrations
    assert [event.message for event in there.events if event.code == "MOVE_HELD"], "its bound is missed"


@pytest.mark.parametrize("made", [True, False])
def test_a_move_of_a_prepared_replica_is_placed_beside_it_as_another_variant_alone(*, made: bool) -> None:
    there = prepared_region()
    there.intents = (replace(BOTH, models=(MADE if made else PUSHED,), migration=there.intents[0].migration),)
    (one,) = there.desired["a"].assignments
    world = inputs_of(there.world(), NO_MIGRATIONS, Elapsed(there.now), Wall(START + there.now))
    move = Move("m-1", BOTH.key, one.id, Refusal(Code.CONFLICT, "it moves"), aim=Aim("a", "cpu0"))
    (plan,) = place(replace(world, moves=(move,))).workloads
    assert [each.variant for each in plan.targets if each.existing_assignment != one.id] == [DIGEST] * (not made)


@pytest.mark.parametrize("model", [PUSHED, MADE])
def test_it_is_where_a_move_aims_if_it_runs_that_variant_there(model: ModelRef) -> None:
    (one,) = prepared_region().desired["a"].assignments
    assert is_there(("a", one), Aim("a", "cpu0", model.variant)) is (model is MADE)
    assert is_there(("a", one), Aim("a"))


def test_a_policy_that_allows_int8_alone_leaves_nothing_else() -> None:
    plan = plan_of(region(replace(BOTH, require=require(precisions=("int8",)))))
    assert [each.precision for each in plan.targets] == ["int8"]
    plan = plan_of(region(replace(BOTH, require=require(precisions=("int8",)), models=(PUSHED,))))
    assert plan.targets == ()


def test_what_is_made_moves_fewer_bytes_and_what_is_fetched_is_what_was_pushed() -> None:
    pushed, made = profile(), prepared_profile(profile(), "int8")
    assert made.weight_bytes == pushed.weight_bytes // 4
    assert pushed.bytes_moved / 4 < made.bytes_moved < pushed.bytes_moved / 2
    assert (made.flops, made.size_bytes) == (pushed.flops, pushed.size_bytes)
    (target,) = plan_of(region()).targets
    assert target.model_bytes == pushed.size_bytes
    p95 = {
        each.precision: each.prediction.latency_p95_s.mid for each in plan_of(region()).candidates if each.prediction
    }
    assert p95["int8"] < p95["fp32"]


def test_a_selector_sees_the_precision_that_it_would_run_in() -> None:
    for wanted in ("int8", "fp32"):
        plan = plan_of(region(replace(BOTH, require=require(where=f'model.precision == "{wanted}"'))))
        assert [each.precision for each in plan.targets] == [wanted]


@pytest.mark.parametrize(("before", "after"), [(PUSHED, MADE), (MADE, PUSHED)])
def test_a_move_from_or_to_a_prepared_model_is_compared_on_samples(before: ModelRef, after: ModelRef) -> None:
    moving = CoreRegion(node("a"), node("b"))
    runtime = RuntimeSupport(13, {}, prepares=("int8",))
    moving.intents = (only(before),)
    moving.run(1)
    nodes = {
        name: replace(state, receipts={each: replace(one, runtime=runtime) for each, one in state.receipts.items()})
        for name, state in moving.fleet.nodes.items()
    }
    moving.fleet = replace(moving.fleet, nodes=nodes)
    moving.run(20)
    (source,) = (one for content in moving.desired.values() for one in content.assignments)
    assert source.precision == before.precision
    moving.intents = (replace(only(after), revision=2),)
    moving.step()
    (target,) = (one for content in moving.desired.values() for one in content.assignments if one.id != source.id)
    asked = target.verification
    assert asked is not None
    assert (asked.inputs, asked.pack, asked.samples) == (InputsFrom.SAMPLES, PACK.digest, 8)
    assert asked.tolerances == default("fp32", "int8")


def only(model: ModelRef) -> Intent:
    """In that precision alone."""
    return replace(BOTH, models=(PUSHED, MADE), require=require(precisions=(model.precision,)))


def halves(asked: Intent, flops: Mapping[str, float] | None = None, prepares: tuple[str, ...] = PREPARABLE) -> Inputs:
    return region(asked, prepares, FASTER if flops is None else flops)


def precisions_of(asked: Inputs) -> list[str]:
    return [each.precision for each in plan_of(asked).targets]


def why_not(asked: Inputs, precision: str) -> Refusal:
    found = (each for each in plan_of(asked).candidates if each.is_prepared and each.precision == precision)
    refusal = next(found).refusal
    assert refusal is not None
    return refusal


def test_fp16_is_made_without_samples_where_int8_cannot_be() -> None:
    (target,) = plan_of(halves(replace(ALL, packs={}))).targets
    assert (target.model, target.precision, target.samples) == (DIGEST, "fp16", "")
    assert target.preparation is not None
    assert target.preparation.tolerances == default("fp32", "fp16")
    assert target.variant == variant_of(DIGEST, "fp16")


def test_fp16_is_made_where_int8_was_not_near_enough() -> None:
    at = halves(ALL)
    assert precisions_of(at) == ["int8"], "it is faster"
    there = at.fleet.nodes["a"].node.devices[0]
    shown = {
        Triple.of_load(DIGEST, there, {}, None, judgement(precision)): Refusal(Code.PREPARE_FAILED, "cosine 0.9")
        for precision in PREPARABLE
    }
    int8, fp16 = shown
    assert precisions_of(replace(at, unloadable={int8: shown[int8]})) == ["fp16"]
    assert precisions_of(replace(at, unloadable={fp16: shown[fp16]})) == ["int8"]
    assert precisions_of(replace(at, unloadable=shown)) == ["fp32"]


def test_fp16_before_int8_where_it_is_faster() -> None:
    assert precisions_of(halves(ALL, {"fp32": 1e11, "fp16": 4e11, "int8": 1.2e11})) == ["fp16"]


def test_fp16_is_not_made_where_it_gains_nothing() -> None:
    asked = replace(ALL, packs={})
    for flops in ({"fp32": 1e11, "fp16": 1e11}, {"fp32": 1e11, "fp16": 1.3e11}, {"fp32": 1e11, "fp16": 0.5e11}):
        assert precisions_of(halves(asked, flops)) == ["fp32"]
        refusal = why_not(halves(asked, flops), "fp16")
        assert (refusal.code, refusal.found) == (
            Code.PREPARE_UNAVAILABLE, "a/cpu0 computes fp16 no faster than fp32",
        )  # fmt: skip
        alone = replace(asked, require=require(precisions=("fp16",)))
        assert precisions_of(halves(alone, flops)) == ["fp16"], "the policy denies what it would be compared with"


def test_fp16_is_not_made_where_the_provider_does_so_itself() -> None:
    at = halves(replace(ALL, packs={}), prepares=("int8",))
    assert precisions_of(at) == ["fp32"]
    assert why_not(at, "fp16").found == "a/cpu0 prepares int8"


def test_what_was_made_in_fp16_moves_half_the_bytes() -> None:
    pushed, made = profile(), prepared_profile(profile(), "fp16")
    assert (made.weight_bytes, made.flops) == (pushed.weight_bytes // 2, pushed.flops)
    assert made.bytes_moved == pytest.approx(pushed.bytes_moved / 2)


RATE = st.floats(1e9, 1e13)


@given(RATE, RATE, st.floats(0.0, 2.0), st.booleans())
def test_fp16_is_worth_it_beyond_the_error_of_measuring(fp32: float, fp16: float, spread: float, samples: bool) -> None:
    """For a model of matrix products alone, by the rate of those; samples change nothing."""
    at = halves(ALL, {"fp32": fp32, "fp16": fp16}).fleet.nodes["a"].receipts["cpu0"]
    demand = ModelDemand((DemandRow(OperatorClass.MATMUL, 1e9, 0.0, 0.0),), 1)

    def refusal_of(receipt: Receipt) -> object:
        return prepare_refusal(HALF, require(), receipt, demand, "a/cpu0", samples=samples)

    is_made = refusal_of(replace(at, spread=spread)) is None
    assert is_made == (1e9 / fp16 * (1 + max(spread, 0.15)) < 1e9 / fp32 * (1 - max(spread, 0.15)))
    assert refusal_of(replace(at, precisions=("fp16",))) is None, "it runs nothing else"

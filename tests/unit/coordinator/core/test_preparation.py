"""Models that a node makes in another precision: where they may go, what they are told from, and what a move says."""

from dataclasses import replace

import pytest

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
from shoal.coordinator.core.placement.model import Aim, Inputs, Trial, Triple, WorkloadPlan
from shoal.coordinator.core.placement.place import place
from shoal.coordinator.core.prediction.demand import quantised_profile
from shoal.coordinator.core.workloads.decide import inputs_of
from shoal.coordinator.core.workloads.model import NO_MIGRATIONS
from shoal.types.codes import Code, Refusal
from shoal.types.migration import InputsFrom, PackRef
from shoal.types.receipt import RuntimeSupport
from shoal.types.tolerance import default
from shoal.types.units import Bytes, Elapsed, Wall
from shoal.types.workload import Intent, ModelRef, variant_of

PUSHED = ModelRef("model.onnx", DIGEST, "fp32")
MADE = replace(PUSHED, precision="int8", prepared=True)
PACK = PackRef("sha256:" + "5" * 64, Bytes(1000), 16, answers=False)
BOTH = intent(models=(PUSHED, MADE), packs={DIGEST: PACK})


def region(asked: Intent = BOTH, prepares: tuple[str, ...] = ("int8",)) -> Inputs:
    """One processor on which int8 is twice as fast."""
    fleet = fleet_of(node("a", device()))
    state = fleet.nodes["a"]
    known = replace(state.receipts["cpu0"], runtime=RuntimeSupport(13, {}, prepares=prepares))
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
        (region(prepares=()), "a cannot prepare models"),
        (inputs(fleet_of(node("a", device())), BOTH), "a cannot prepare models"),  # by an older agent's receipt
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
    shown = Triple.of_load(DIGEST, there, {}, None, ("int8", PACK.digest))
    plan = plan_of(replace(at, unloadable={shown: failed}))
    assert [each.precision for each in plan.targets] == ["fp32"], "the pushed model is another matter"
    other = replace(BOTH, packs={DIGEST: replace(PACK, digest="sha256:" + "6" * 64)})
    assert [each.precision for each in plan_of(replace(region(other), unloadable={shown: failed})).targets] == ["int8"]


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


def test_a_policy_that_allows_int8_alone_leaves_nothing_else() -> None:
    plan = plan_of(region(replace(BOTH, require=require(precisions=("int8",)))))
    assert [each.precision for each in plan.targets] == ["int8"]
    plan = plan_of(region(replace(BOTH, require=require(precisions=("int8",)), models=(PUSHED,))))
    assert plan.targets == ()


def test_what_is_made_moves_fewer_bytes_and_what_is_fetched_is_what_was_pushed() -> None:
    pushed, made = profile(), quantised_profile(profile())
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

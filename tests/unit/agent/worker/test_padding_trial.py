"""Whether answers stay the same where inputs are filled up: models that look along the axis, and those that do not."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from harness.models import engine_cases as models
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker.batching import BatchDecision, BatchPlan, BatchPoint
from shoal.agent.worker.engine import Engine, open_engine, run_options
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.padding_trial import PaddingTrial
from shoal.agent.worker.providers import Provider
from shoal.agent.worker.request_reader import InferRequest
from shoal.agent.worker.tensors import Array
from shoal.artifacts.samples import write_pack
from shoal.types.assignment import Batching, Work
from shoal.types.codes import ShoalError
from shoal.types.migration import Metric, Tolerance
from shoal.types.units import Seconds

SIDE, LENGTH = 8, 12
RULE = Batching(8, Seconds(0.0), None, (Tolerance("", Metric.MAX_REL, 1e-3),), padding=True)
PLAN = BatchPlan(4, 0.0, (BatchPoint(1, 1.0, 1.0, 1.0), BatchPoint(4, 2.0, 2.0, 2.0)))
"""A row's share of a full batch is 0.5 s."""


def order(length: int = LENGTH, samples: Path | None = None) -> LoadOrder:
    work = Work(nodes=1, shapes={"x": (1, length, SIDE), "mask": (1, length)})
    digest = models.digest(samples.read_bytes()) if samples is not None else ""
    return LoadOrder(
        "a", "", "", "", "CPUExecutionProvider", "fp32", 1, 1, 8, 0, 2**20, 1.0, work, 0.0,
        DeviceAccess(), (), samples=str(samples or ""), samples_digest=digest,
    )  # fmt: skip


async def decide(engine: Engine, asked: LoadOrder, *, seconds_of_item: float = 0.1) -> BatchDecision:
    """A run alone takes so many seconds for each item along the axis."""

    async def ask(request: InferRequest) -> tuple[dict[str, Array], float]:
        return engine.run(request.feeds, request.outputs, run_options()), request.feeds["x"].shape[1] * seconds_of_item

    return await PaddingTrial(asked, engine, ask).decide(RULE, BatchDecision(PLAN, "batches of up to 4"))


def engine_of(how: str) -> Engine:
    return open_engine(models.sequences(how, 1, SIDE), Provider("CPUExecutionProvider"))


@pytest.mark.parametrize("how", ["each", "sum", "masked"])
async def test_a_model_that_answers_the_same_is_filled_up_from_where_it_pays(how: str) -> None:
    """Alone an item takes 0.1 s: 6 of 12 take 0.6 s, longer than their share, and 3 take less."""
    decision = await decide(engine_of(how), order())
    assert decision.plan is not None
    found = decision.plan.padding
    assert found is not None
    assert (found.axis.name, found.shortest, found.longest) == ("s", 6, 15)
    assert decision.reason == "batches of up to 4; filled up along 's' from 6 to at most 15"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("mean", "is answered otherwise than alone: y: max_rel"),
        ("max", "is answered otherwise than alone: y: max_rel"),
        ("last", "is answered otherwise than alone: y: max_rel"),
        ("nameless", "has no name"),
        ("two", "more than one length may differ: s, t"),
    ],
)
async def test_a_model_that_looks_at_what_was_filled_up_is_not(how: str, why: str) -> None:
    decision = await decide(engine_of(how), order())
    assert decision.plan == PLAN
    assert decision.reason.startswith("batches of up to 4; no padding: ")
    assert why in decision.reason


async def test_a_length_that_is_answered_sooner_alone_is_not_filled_up() -> None:
    decision = await decide(engine_of("each"), order(), seconds_of_item=0.05)
    assert decision.plan == PLAN
    assert "half the length, 6, is answered sooner alone" in decision.reason


async def test_an_input_of_one_element_shows_nothing() -> None:
    decision = await decide(engine_of("each"), order(length=1))
    assert "give samples of a usual length" in decision.reason


async def test_no_batches_have_no_padding() -> None:
    engine = engine_of("each")

    async def ask(_: InferRequest) -> tuple[dict[str, Array], float]:
        raise AssertionError("nothing is to be asked")

    none = BatchDecision(None, "no batches: why")
    assert await PaddingTrial(order(), engine, ask).decide(RULE, none) == none


async def test_samples_say_the_length(tmp_path: Path) -> None:
    engine = engine_of("each")
    rng = np.random.default_rng(1)
    fed = [{"x": rng.standard_normal((1, 20, SIDE)).astype(np.float32)} for _ in range(3)]
    pack = tmp_path / "samples"
    pack.write_bytes(write_pack([(each, {"y": each["x"]}) for each in fed], engine.inputs, engine.outputs))
    decision = await decide(engine, order(samples=pack))
    assert decision.plan is not None
    assert decision.plan.padding is not None
    assert (decision.plan.padding.shortest, decision.plan.padding.longest) == (10, 31)


async def test_a_model_that_refuses_what_is_shorter_has_no_padding() -> None:
    engine = engine_of("each")

    async def ask(request: InferRequest) -> tuple[dict[str, Array], float]:
        if request.feeds["x"].shape[1] < LENGTH:
            engine.run({"x": np.zeros((1, 1, 1), np.float32)}, ["y"], ort.RunOptions())
        raise AssertionError("only what is shorter is asked")

    with pytest.raises(ShoalError):
        engine.run({"x": np.zeros((1, 1, 1), np.float32)}, ["y"], ort.RunOptions())
    decision = await PaddingTrial(order(), engine, ask).decide(RULE, BatchDecision(PLAN, "batches"))
    assert decision.plan == PLAN
    assert "no padding" in decision.reason

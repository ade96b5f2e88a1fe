"""Whether batches pay, by runs that take as long as a test says."""

from collections.abc import Callable

from harness.models.synthetic import relu
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.worker.batch_trial import BatchTrial
from shoal.agent.worker.batching import BatchDecision
from shoal.agent.worker.engine import open_engine, run_options
from shoal.agent.worker.messages import LoadOrder, LoadResult
from shoal.agent.worker.providers import Provider
from shoal.agent.worker.request_reader import InferRequest
from shoal.agent.worker.tensors import Array
from shoal.types.assignment import Batching, Measured, Work
from shoal.types.device import EnergySource
from shoal.types.migration import Metric, Tolerance
from shoal.types.units import Bytes, Joules, Seconds

RULE = Batching(8, Seconds(0.0), None, (Tolerance("", Metric.MAX_REL, 1e-3),))
ALONE_S = 0.003
HOP_S = Seconds(1e-5)
ORDER = LoadOrder(
    "a", "", "", "", "CPUExecutionProvider", "fp32", 1, 1, 8, 0, 2**20, 1.0,
    Work(nodes=1, shapes={"x": (1, 4)}), 0.0, DeviceAccess(), (),
)  # fmt: skip


async def decide(seconds_of: Callable[[int, int], float]) -> BatchDecision:
    """`seconds_of`: of a run, by its rows and those of the run before it."""
    engine = open_engine(relu().SerializeToString(), Provider("CPUExecutionProvider"))
    before = 1

    async def ask(request: InferRequest) -> tuple[dict[str, Array], float]:
        nonlocal before
        rows = request.feeds["x"].shape[0]
        took_s, before = seconds_of(rows, before), rows
        return engine.run(request.feeds, request.outputs, run_options()), took_s

    alone = Seconds(ALONE_S)
    measured = Measured(alone, Bytes(1), alone, alone, Joules(0.0), EnergySource.ESTIMATED, 5)
    loaded = LoadResult(measured, engine.inputs, engine.outputs, "", (), alone)
    return await BatchTrial(ORDER, engine, ask).decide(RULE, loaded, HOP_S)


async def test_batches_pay_where_a_run_of_many_rows_takes_as_long_as_one() -> None:
    decision = await decide(lambda rows, before: ALONE_S)
    assert decision.plan is not None, decision.reason
    assert decision.plan.size == RULE.max


async def test_batches_do_not_pay_where_each_new_size_is_planned_anew() -> None:
    """As CUDA's provider does for convolutions: 8 rows in 0.1 s are fewer than one in 3 ms each."""
    decision = await decide(lambda rows, before: ALONE_S if rows == before else 0.1)
    assert decision.plan is None, decision.reason
    assert decision.reason.startswith("no batches: ")

"""What a worker that a model took over can tell its supervisor: nothing that the region would refuse the node for."""

import math
from dataclasses import replace

import pytest

from shoal.agent.packing import pack
from shoal.agent.worker.messages import LoadResult, LoadState, WorkerReport, WorkerStatus
from shoal.agent.worker.status_check import read_report, read_status
from shoal.types.assignment import Measured, Served
from shoal.types.codes import Code, ShoalError
from shoal.types.device import EnergySource
from shoal.types.latency import BUCKETS
from shoal.types.profile import TensorSpec
from shoal.types.units import Bytes, Joules, Seconds

MEASURED = Measured(Seconds(1.0), Bytes(10), Seconds(0.1), Seconds(0.1), Joules(math.nan), EnergySource.ESTIMATED, 3)
SERVED = Served("f1", 1, 0, Seconds(math.nan), Seconds(0.1), Joules(1.0), EnergySource.ESTIMATED)
LOADED = LoadResult(MEASURED, (TensorSpec("x", "FP32", (-1, 3)),), (), "no warm-up")
HONEST = WorkerStatus(LoadState.READY, "a-1", 0, (SERVED,), LOADED, None, latencies=(1,) * BUCKETS)


def test_what_a_worker_says_is_read() -> None:
    assert pack(read_status(pack(HONEST))) == pack(HONEST)
    many = tuple(TensorSpec(f"layer.{number}.state", "FP32", (1,)) for number in range(1024))
    wide = replace(HONEST, loaded=replace(LOADED, inputs=many, outputs=many))
    report = WorkerReport((HONEST, wide))
    assert pack(read_report(pack(report))) == pack(report)


@pytest.mark.parametrize(
    "lie",
    [
        replace(HONEST, served=(replace(SERVED, joules=Joules(1.5e308)),)),
        replace(HONEST, served=(replace(SERVED, joules=Joules(-math.inf)),)),
        replace(HONEST, served=(SERVED,) * 2000),
        replace(HONEST, served=(replace(SERVED, requests=2**62),)),
        replace(HONEST, latencies=(1,) * 70_000),
        replace(HONEST, loaded=replace(LOADED, measured=replace(MEASURED, load_s=Seconds(math.inf)))),
        replace(HONEST, loaded=replace(LOADED, note="x" * 5000)),
        replace(HONEST, loaded=replace(LOADED, inputs=(TensorSpec("x\0", "FP32", (1,)),))),
        replace(HONEST, loaded=replace(LOADED, inputs=(TensorSpec("x", "FP32", (1,)),) * 9000)),
        replace(HONEST, loaded=replace(LOADED, inputs=(TensorSpec("x" * 4000, "FP32", (1,)),) * 100)),
    ],
    ids=["joules", "-inf", "origins", "requests", "latencies", "seconds", "note", "nul", "inputs", "names"],
)
def test_what_no_worker_says_is_refused(lie: WorkerStatus) -> None:
    with pytest.raises(ShoalError) as pushed:
        read_status(pack(lie))
    with pytest.raises(ShoalError) as asked:
        read_report(pack(WorkerReport((lie,))))
    assert pushed.value.code is asked.value.code is Code.MESSAGE_INVALID

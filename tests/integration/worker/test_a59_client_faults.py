"""A59: figures that a client steers. What clients get wrong or give up, sent to a real worker that never answers
well, counts against no replica."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from harness.cluster.worker_pool import Array, WorkerPoolHarness, infer
from harness.models import engine_cases as models
from harness.report import record
from harness.wait import until
from shoal.coordinator.core.fleet.checks import check_replica_metrics
from shoal.coordinator.core.migration.guard import stats_of
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

REFUSED, LATE, CANCELLED = 40, 10, 10
WRONG: dict[str, Array] = {"x": np.ones(1, np.int64), "n": np.array(1, np.int64)}
ENDLESS: dict[str, Array] = {"x": np.ones(1, np.float32), "n": np.array(2**60, np.int64)}


async def test_a59_refusals_deadlines_and_cancels_count_against_no_replica(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        ready = await pool.serve("loop", models.loop(-1))
        client = await pool.client("loop")
        for _ in range(REFUSED):
            with pytest.raises(ShoalError) as refused:
                await infer(client, WRONG)
            assert refused.value.code is Code.INVALID_ARGUMENT
        for _ in range(LATE):
            with pytest.raises(ShoalError) as late:
                await infer(client, ENDLESS, deadline_s=0.02)
            assert late.value.code is Code.DEADLINE_EXCEEDED
        for _ in range(CANCELLED):
            call = asyncio.create_task(infer(client, ENDLESS))
            await until(lambda: client.in_flight, 5.0, "it to be sent")
            call.cancel()
            await asyncio.wait([call])

        async def are_all_counted() -> bool:
            return sum(each.requests for each in (await pool.stats("loop")).served) >= REFUSED + LATE

        await until(are_all_counted, 10.0, "all of them to be counted")
        stats = await pool.stats("loop")
        await client.close()
    (served,) = stats.served
    assert (served.errors, served.refused) == (0, REFUSED)
    assert served.requests == served.refused + served.late
    assert math.isnan(served.latency_p50_s)
    told = Observed(
        assignment="loop", workload=WorkloadKey("default", "loop"), model="sha256:0", device="cpu0", phase=Phase.READY,
        since=Wall(0.0), code=None, reason="", retry_at=None, gives_up_at=None, in_flight=0, restarts=0,
        measured=ready.measured, served=stats.served, latencies=stats.latencies,
    )  # fmt: skip
    heard = nouns.decode(Observed, nouns.encode(told))
    assert check_replica_metrics(heard) is None, "no strike against its node"
    figures = stats_of(heard)
    assert (figures.errors, figures.requests) == (0, figures.late), "nothing that a guard judges by"
    record("A59", "P", 1, refused=served.refused, late=served.late, errors=0, strikes=0)

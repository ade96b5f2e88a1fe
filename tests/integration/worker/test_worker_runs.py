"""A worker runs short models on its event loop, and stays responsive whatever a request's values ask of it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cluster.worker_pool import WorkerClient, WorkerPoolHarness, infer, request
from harness.models import engine_cases as models
from harness.wait import until
from shoal.agent.worker.run_watch import WATCH_EVERY_S
from shoal.types.codes import Code, ShoalError

ENDLESS = 2**60


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPoolHarness]:
    async with WorkerPoolHarness(tmp_path) as opened:
        yield opened


@pytest.fixture
def one_processor() -> Iterator[None]:
    """For the workers that are started meanwhile: all short runs are on the loop there."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    yield
    os.sched_setaffinity(0, processors)


def loops(count: int) -> dict[str, Any]:
    return {"x": np.ones(1, np.float32), "n": np.array(count, np.int64)}


def events(pool: WorkerPoolHarness, name: str) -> list[dict[str, Any]]:
    lines = [line for log in pool.run.glob("worker-*.log") for line in log.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event["event"] == name]


async def test_where_a_model_runs_is_measured_and_said(pool: WorkerPoolHarness) -> None:
    ready = await pool.serve("one", models.add_one())
    (chosen,) = events(pool, "run_place_chosen")
    assert chosen["inline"] is (chosen["run_us"] <= chosen["limit_us"])
    assert chosen["hop_us"] > 0
    assert ("event loop" in ready.note) is chosen["inline"]


async def test_a_model_whose_values_can_make_a_run_long_holds_no_loop(
    one_processor: None, pool: WorkerPoolHarness
) -> None:
    """However short it was until then. Pings are answered meanwhile, its deadline ends it, others go on."""
    await pool.serve("loop", models.loop(-1))
    assert not events(pool, "run_place_chosen")[0]["inline"]
    client, other = await pool.client("loop"), await pool.client("loop")
    for _ in range(20):
        assert (await infer(client, loops(1))).outputs[0].name == "y"
    slow = asyncio.create_task(infer(client, loops(ENDLESS), deadline_s=4 * WATCH_EVERY_S + 1.0))
    while not slow.done():
        start = time.perf_counter()
        await other.call("ping", timeout=10.0)
        assert time.perf_counter() - start < 1.2, "a front gives up on a worker after that"
        await asyncio.wait([slow], timeout=0.05)
    with pytest.raises(ShoalError) as late:
        await slow
    assert late.value.code is Code.DEADLINE_EXCEEDED

    async def idle() -> bool:
        return (await pool.stats("loop")).in_flight == 0

    await until(idle, 10, "the run's end")
    assert (await infer(client, loops(3))).outputs[0].name == "y"
    (served,) = (await pool.stats("loop")).served
    assert (served.requests, served.errors, served.late) == (22, 0, 1)
    await client.close()
    await other.close()


async def test_many_at_once_are_answered_each_as_alone(pool: WorkerPoolHarness) -> None:
    """Usual and unusual requests, small and large, on several connections; some callers go."""
    await pool.serve("id", models.identity(("FP32",)))
    clients = [await pool.client("id") for _ in range(3)]

    async def ask(client: WorkerClient, number: int) -> None:
        feeds = {"x_FP32": np.full((1 + number * number % 20_000, 3), number, np.float32)}
        answer = await infer(client, request(feeds, typed=number % 3 == 0))
        assert answer.raw_output_contents[0] == feeds["x_FP32"].tobytes()

    tasks = [asyncio.create_task(ask(clients[number % 3], number)) for number in range(300)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    gone = [task for task in tasks[::7] if task.cancel()]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(gone) == sum(isinstance(each, asyncio.CancelledError) for each in done)
    assert [each for each in done if each is not None and not isinstance(each, asyncio.CancelledError)] == []

    async def idle() -> bool:
        return (await pool.stats("id")).in_flight == 0

    await until(idle, 10, "nothing in flight")
    for client in clients:
        await client.close()

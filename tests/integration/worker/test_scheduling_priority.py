"""A worker that gets ready keeps out of the way of those that serve, and is none the slower once it serves itself."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from harness.builders import agent_values
from harness.cluster.worker_pool import WorkerPoolHarness
from harness.models import engine_cases as models
from harness.wait import until
from shoal.agent import scheduling_priority
from shoal.agent.ports import WorkerPhase, WorkerReady
from shoal.agent.worker.pool_options import PoolOptions

pytestmark = pytest.mark.skipif(
    not scheduling_priority.may_restore_priority(), reason="needs a limit for nice values that allows coming back"
)


STARVED_S = 120.0
"""What steps aside gets only what others leave."""


def policies(pid: int) -> set[int]:
    """Of all its threads."""
    return {os.sched_getscheduler(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()}


def spare(pool: WorkerPoolHarness) -> int:
    (found,) = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_in(pool, path))
    return found


def _is_in(pool: WorkerPoolHarness, process: Path) -> bool:
    try:
        return str(pool.run).encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


async def test_a_spare_steps_aside_until_it_is_ready(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        pid = spare(pool)
        assert policies(pid) == {os.SCHED_IDLE}
        await until(lambda: policies(pid) == {os.SCHED_OTHER}, STARVED_S, "the spare to be ready")


async def test_what_is_wanted_now_waits_for_nobody(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        pid = spare(pool)
        assert policies(pid) == {os.SCHED_IDLE}
        os.kill(pid, signal.SIGSTOP)  # it gets no further until it was told
        await pool.start("wanted", models.add_one())
        await until(lambda: policies(pid) == {os.SCHED_OTHER}, 10, "the spare to step up before it is ready")
        os.kill(pid, signal.SIGCONT)
        await pool.wait_event("wanted", WorkerReady)
        assert pool.pid("wanted") == pid


async def test_a_load_beside_the_replica_that_serves_steps_aside(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(keep_spare=False)) as pool:
        assignment, path = pool.assignment("moving", models.add_one())
        loading = asyncio.create_task(_phase(pool, "moving"))
        await pool.workers.start(replace(assignment, verification=agent_values.verification()), str(path))
        pid = await until(lambda: spare(pool), 10, "its process")
        assert policies(pid) == {os.SCHED_IDLE}
        assert await loading == "loading"
        await pool.wait_event("moving", WorkerReady, STARVED_S)
        assert policies(pid) == {os.SCHED_OTHER}


async def _phase(pool: WorkerPoolHarness, name: str) -> str:
    return (await pool.wait_event(name, WorkerPhase, STARVED_S)).phase

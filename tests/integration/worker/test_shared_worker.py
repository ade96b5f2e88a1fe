"""Models of one tenant in one worker process: each loads, answers and stops on its own, and they fall together."""

from pathlib import Path

import numpy as np
import pytest

from harness.cluster.worker_pool import WorkerPoolHarness, infer, kill
from harness.models import engine_cases as models
from shoal.agent.frames import ConnectionLost
from shoal.agent.ports import WorkerExited, WorkerFailed, WorkerReady
from shoal.types.codes import Code, ShoalError

ONES = {"x": np.ones(4, np.float32)}
CRASHING = {"x": np.array([-(2**31)], np.int32), "d": np.array([-1], np.int32)}


async def share(pool: WorkerPoolHarness, name: str, data: bytes, tenant: str = "small") -> None:
    assignment, path = pool.assignment(name, data, tenant=tenant, shared=True)
    await pool.workers.start(assignment, str(path))


async def answer(pool: WorkerPoolHarness, name: str) -> bytes:
    client = await pool.client(name)
    try:
        return (await infer(client, ONES)).raw_output_contents[0]
    finally:
        await client.close()


async def test_one_tenant_shares_and_each_stops_and_reloads_alone(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await share(pool, "a", models.add_one())
        await share(pool, "b", models.add_one())
        await share(pool, "other", models.add_one(), tenant="stranger")
        ready = [await pool.serve("own", models.add_one())]
        ready += [await pool.wait_event(name, WorkerReady) for name in ("other", "a", "b")]
        assert sorted(each.measured.joined for each in ready) == [False, False, False, True]
        assert sorted(each.measured.joined for each in ready[2:]) == [False, True], "one of the two was first"
        assert pool.pid("a") == pool.pid("b")
        assert len({pool.pid(name) for name in ("a", "other", "own")}) == 3
        alone = await answer(pool, "own")
        assert np.frombuffer(alone, np.float32).tolist() == [2.0] * 4
        assert (await answer(pool, "a"), await answer(pool, "b"), await answer(pool, "b")) == (alone,) * 3
        assert [(await pool.stats(name)).served[0].requests for name in ("a", "b")] == [1, 2]

        client, pid = await pool.client("a"), pool.pid("b")
        await pool.workers.stop("a")
        with pytest.raises(ShoalError) as stopped:
            await infer(client, ONES)
        assert stopped.value.code is Code.MODEL_NOT_READY
        await client.close()
        assert (pool.workers.local("a"), pool.pid("b"), await answer(pool, "b")) == (None, pid, alone)

        await share(pool, "a", models.add_one())
        assert (await pool.wait_event("a", WorkerReady)).measured.joined
        assert pool.pid("a") == pid
        kill(pid)
        for name in ("a", "b"):
            exited = await pool.wait_event(name, WorkerExited)
            assert (exited.own_fault, exited.refusal.code) == (False, Code.WORKER_KILLED)
        for name in ("a", "b"):
            await share(pool, name, models.add_one())
        for name in ("a", "b"):
            await pool.wait_event(name, WorkerReady)
            assert await answer(pool, name) == alone
        assert pool.pid("a") == pool.pid("b") != pid
    assert not list(pool.run.glob("worker-*"))


async def test_crash_blames_the_one_that_loads_or_runs(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await share(pool, "good", models.add_one())
        await pool.wait_event("good", WorkerReady)
        await share(pool, "bad", models.crash_at_load())
        exits = {name: await pool.wait_event(name, WorkerExited) for name in ("good", "bad")}
        assert {name: each.own_fault for name, each in exits.items()} == {"good": False, "bad": True}
        assert exits["bad"].at_load
        await share(pool, "good", models.add_one())
        await share(pool, "divide", models.divide())
        for name in ("good", "divide"):
            await pool.wait_event(name, WorkerReady)
        assert pool.pid("good") == pool.pid("divide")
        client = await pool.client("divide")
        with pytest.raises(ConnectionLost):
            await infer(client, CRASHING)
        exits = {name: await pool.wait_event(name, WorkerExited) for name in ("good", "divide")}
        assert {name: each.own_fault for name, each in exits.items()} == {"good": False, "divide": True}
        assert not exits["divide"].at_load, "with its tenant's request in flight"


async def test_refused_model_leaves_the_others_and_the_next_supervisor_adopts_them(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, keep=True) as first:
        for name in ("a", "b"):
            await share(first, name, models.add_one())
            await first.wait_event(name, WorkerReady)
        await share(first, "bad", b"no model")
        assert (await first.wait_event("bad", WorkerFailed)).refusal.code is Code.LOAD_FAILED
        pid, alone = first.pid("a"), await answer(first, "a")
        await first.workers.stop("bad")
    async with WorkerPoolHarness(tmp_path) as second:
        assert {one.assignment for one in second.adopted if one.ready} == {"a", "b"}
        assert second.pid("a") == second.pid("b") == pid
        assert (await answer(second, "a"), await answer(second, "b")) == (alone, alone)
        await share(second, "c", models.add_one())
        await second.wait_event("c", WorkerReady)
        assert second.pid("c") == pid

"""A supervisor or worker that did not run (stopped, or starved) judges nobody by that time; a stuck one still ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness.cluster.worker_pool import WorkerPoolHarness, infer
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.models import engine_cases as models
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.packing import unpack
from shoal.agent.ports import WorkerExited
from shoal.agent.worker.messages import WorkerReport
from shoal.types.codes import Code

pytestmark = pytest.mark.alone

STOPPED_S = 3.2
TIMES = 4
WITHIN_S = 2.0
"""F38: max(2 s, 5 x the p99), which is milliseconds for these models."""

STOPPER = """
import os, signal, sys, time
from pathlib import Path
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
os.kill(pid, signal.SIGSTOP)
start = time.monotonic()
state = Path(f"/proc/{pid}/stat")
while state.read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
time.sleep(seconds)
os.kill(pid, signal.SIGCONT)
print(time.monotonic() - start)
"""

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from harness.cluster.worker_pool import WorkerPoolHarness
from harness.models import engine_cases
from shoal.agent.ports import WorkerExited

async def main():
    async with WorkerPoolHarness(Path(sys.argv[1])) as pool:
        await asyncio.gather(*(pool.serve(name, engine_cases.add_one()) for name in ("a", "b", "c")))
        print("up", flush=True)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        asked = asyncio.ensure_future(reader.readline())
        while not asked.done():
            await pool.workers.stats()  # asks all the time: most stops meet an open question, as on a busy machine
            await asyncio.wait({asked}, timeout=0.001)
        print([str(each.refusal) for each in pool.events if isinstance(each, WorkerExited)], flush=True)

asyncio.run(main())
"""


def start_supervisor(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )


async def stop_for(pid: int, seconds: float) -> None:
    """By another process, which sees that it is stopped."""
    stopper = [sys.executable, "-c", STOPPER, str(pid), str(seconds)]
    stopped = await asyncio.to_thread(subprocess.run, stopper, capture_output=True, check=True, timeout=30)
    assert float(stopped.stdout) >= seconds


async def test_a_supervisor_that_was_stopped_kills_no_worker_at_any_of_its_stops(tmp_path: Path) -> None:
    supervisor = start_supervisor(tmp_path)
    try:
        assert supervisor.stdout is not None
        assert await asyncio.to_thread(supervisor.stdout.readline) == b"up\n"
        for _ in range(TIMES):
            await stop_for(supervisor.pid, STOPPED_S)
        told, _ = await asyncio.to_thread(supervisor.communicate, b"\n", 30)
        assert told == b"[]\n"
        record("F38", "P", TIMES, what="supervisor stopped", stopped_s=STOPPED_S, workers_lost=0)
    finally:
        supervisor.kill()
        supervisor.wait()


async def test_a_worker_that_is_stopped_is_found_in_time_and_its_neighbours_stay(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await asyncio.gather(*(pool.serve(name, models.add_one()) for name in ("a", "b")))
        clock = SystemClock()
        os.kill(pool.pid("a"), signal.SIGSTOP)
        start, kept, delay = clock.now(), pool.pid("b"), RunDelay(os.getpid())

        async def has_exited() -> bool:
            await pool.workers.stats()
            return any(isinstance(each, WorkerExited) for each in pool.events)

        await until(has_exited, 10.0, "its end")
        found_s, delayed_s = clock.now() - start, delay.seconds()
        exited = await pool.wait_event("a", WorkerExited)
        assert exited.refusal.code is Code.WORKER_STUCK
        assert pool.pid("b") == kept
        assert found_s - delayed_s - startup_slowdown_s() <= WITHIN_S + 0.5
        record("F38", "P", 1, what="stopped worker, found by its supervisor", found_s=round(found_s, 2))


async def test_a_run_whose_worker_was_stopped_goes_on_and_is_answered(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("loop", models.loop(-1))
        client, clock = await pool.client("loop"), SystemClock()
        took_s, trips = 0.0, 1000
        while took_s < 0.5:
            trips, start = 2 * trips, clock.now()
            await infer(client, {"x": np.ones(1, np.float32), "n": np.array(trips, np.int64)})
            took_s = clock.now() - start
        running = asyncio.create_task(infer(client, {"x": np.ones(1, np.float32), "n": np.array(trips, np.int64)}))
        other = await pool.client("loop")

        async def inside() -> bool:
            return unpack(WorkerReport, (await other.call("status", timeout=5.0)).payload).held[0].in_flight == 1

        await until(inside, 5.0, "the run")
        await stop_for(pool.pid("loop"), STOPPED_S)
        assert (await running).outputs[0].name == "y"
        await client.close()
        await other.close()

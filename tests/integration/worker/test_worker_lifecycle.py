"""Workers die, are killed, are adopted; every fault is seen to have struck, and stays with its one assignment."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.cluster.worker_pool import WorkerPoolHarness, infer, kill, request
from harness.models import engine_cases as models
from harness.report import record
from harness.wait import until
from shoal.agent.frames import ConnectionLost, FrameClient
from shoal.agent.packing import unpack
from shoal.agent.ports import WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker import process
from shoal.agent.worker.messages import WorkerReport
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.process import WorkerProcess
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Against, InputsFrom, Verdict

ONES = {"x": np.ones(4, np.float32)}
CRASHING = {"x": np.array([-(2**31)], np.int32), "d": np.array([-1], np.int32)}

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from harness.cluster.worker_pool import WorkerPoolHarness
from harness.models import engine_cases

async def main():
    async with WorkerPoolHarness(Path(sys.argv[1]), keep=True) as pool:
        await pool.serve("divide", engine_cases.divide())
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def python(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Another process, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )


def worker_without_reader(socket: Path, models_folder: Path) -> subprocess.Popen[bytes]:
    """A worker with the nonce `nonce`, whose standard output nobody reads any more."""
    arguments = ("--socket", str(socket), "--models", str(models_folder))
    worker = subprocess.Popen(
        [sys.executable, "-m", "shoal.agent.worker.main", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdin is not None
    worker.stdin.write(b"nonce\n")
    worker.stdin.close()
    assert worker.stdout is not None
    worker.stdout.close()
    return worker


def alive(pid: int) -> bool:
    """Not gone and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_f01_f02_killed_from_outside_is_no_fault_and_comes_back(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await asyncio.gather(pool.serve("a", models.loop(-1)), pool.serve("b", models.add_one()))
        a, b = await pool.client("a"), await pool.client("b")
        in_flight = asyncio.create_task(infer(a, {"x": np.ones(1, np.float32), "n": np.array(2**60, np.int64)}))

        async def running() -> bool:
            return (await pool.stats("a")).in_flight == 1

        await until(running, 5, "a request in flight")
        pid = pool.pid("a")
        kill(pid)
        exited = await pool.wait_event("a", WorkerExited)
        assert not alive(pid)
        assert (exited.own_fault, exited.refusal.code) == (False, Code.WORKER_KILLED)
        with pytest.raises(ConnectionLost):
            await in_flight
        assert pool.workers.local("a") is None
        # the other assignment does not notice; the same one loads again in the spare
        assert (await infer(b, ONES)).outputs[0].name == "y"
        again = await pool.serve("a", models.loop(-1))
        assert again.measured.load_s < 5
        await b.close()


async def test_a_worker_whose_supervisor_ends_before_its_ready_line_serves_the_next_one(tmp_path: Path) -> None:
    """The socket is there before the ready line, which then has no reader."""
    models_folder, socket = tmp_path / "models", tmp_path / "run" / "worker-0.sock"
    models_folder.mkdir()
    socket.parent.mkdir(mode=0o700)
    worker = worker_without_reader(socket, models_folder)
    try:

        async def is_connected() -> bool:
            with suppress(OSError, ConnectionLost):
                clients.append(await FrameClient.connect(socket, "nonce"))
            return bool(clients) or not alive(worker.pid)

        clients: list[FrameClient] = []
        await until(is_connected, 30, "the worker to listen")
        for _ in range(2):  # the second answer comes after the ready line was written
            report = unpack(WorkerReport, (await clients[0].call("status", timeout=10.0)).payload)
            assert report.held == ()
        assert Path(f"/proc/{worker.pid}/fd/1").readlink() == Path(os.devnull)
        await clients[0].close()
    finally:
        worker.kill()
        worker.wait()


async def test_workers_go_on_where_the_disk_takes_no_record_and_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("a", models.add_one())
        monkeypatch.setattr(process, "write_private", full)
        await pool.workers.record_verdict("a", Verdict("m-1", True, None, "", Against.SOURCE, InputsFrom.GENERATED, 1))
        await pool.serve("b", models.add_one())
        monkeypatch.setattr(WorkerProcess, "spawn", full)
        await pool.workers.stop("b")
        for name in ("c", "d"):  # one in the spare at most
            await pool.start(name, models.add_one())
        failed = await pool.wait_event("d", WorkerFailed)
        assert failed.refusal.code is Code.LOAD_FAILED
        with pytest.raises(ShoalError):
            await pool.workers.probe(pool.device)
        client = await pool.client("a")
        assert (await infer(client, ONES)).outputs[0].name == "y"
        await client.close()
        monkeypatch.undo()
        await pool.serve("d", models.add_one())


async def test_a_worker_that_still_measures_for_a_supervisor_that_is_gone_is_no_spare(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(probe_s=5.0)) as pool:
        measuring = asyncio.create_task(pool.workers.probe(pool.device))
        spare = pool.workers._spare.process
        assert spare is not None
        await until(lambda: spare.client is not None and spare.client.in_flight, 20, "it to measure")
        client = await FrameClient.connect(spare.socket, spare.nonce)
        report = unpack(WorkerReport, (await client.call("status", timeout=5.0)).payload)
        assert report == WorkerReport((), measuring=True)
        await client.close()
        async with WorkerPoolHarness(tmp_path):
            assert not alive(spare.pid)
        with pytest.raises(ShoalError):
            await measuring


async def test_f39_model_that_crashes_the_runtime_at_load(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("good", models.add_one())
        await pool.start("bad", models.crash_at_load())
        exited = await pool.wait_event("bad", WorkerExited)
        assert (exited.own_fault, exited.refusal.code) == (True, Code.WORKER_CRASHED)
        assert "SIGFPE" in exited.refusal.found
        client = await pool.client("good")
        assert (await infer(client, ONES)).outputs[0].name == "y"
        await client.close()


async def test_f39_request_that_crashes_the_runtime(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("divide", models.divide())
        client = await pool.client("divide")
        with pytest.raises(ConnectionLost):
            await infer(client, CRASHING)
        exited = await pool.wait_event("divide", WorkerExited)
        assert (exited.own_fault, exited.refusal.code) == (True, Code.WORKER_CRASHED)
        # the stack that the signal left tells where
        assert "SIGFPE" in exited.refusal.found
        assert "engine.py" in exited.refusal.found
        await until(lambda: all(not path.stat().st_size for path in pool.run.glob("*.crash")), 10, "its files removed")


async def test_a56_empty_contents_are_refused_and_end_no_worker(tmp_path: Path) -> None:
    """12 MiB of empty `raw_input_contents` ended the worker three times of three, and its model was poisoned."""
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("one", models.add_one(), memory=2**20)
        client, pid = await pool.client("one"), pool.pid("one")
        crowded = request(ONES).SerializeToString() + b"\x3a\x00" * (6 * 2**20)
        for _ in range(3):
            with pytest.raises(ShoalError) as refused:
                await client.ask(crowded)
            assert refused.value.code is Code.FIELD_TOO_MANY
        assert (await infer(client, ONES)).outputs[0].name == "y"
        assert pool.pid("one") == pid
        served = (await pool.stats("one")).served[0]
        assert (served.requests, served.errors) == (4, 0), "what a client got wrong is no failure of its replica"
        await client.close()


async def test_f37_request_that_wants_more_than_the_limit(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(memory_floor=256 * 2**20)) as pool:
        await pool.serve("other", models.add_one())
        await pool.serve("fill", models.fill(), memory=2**20)
        client, other, untouched = await pool.client("fill"), await pool.client("other"), pool.pid("other")
        assert len((await infer(client, {"x": np.array([2**20], np.int64)})).raw_output_contents[0]) == 2**22
        for wanted in (2**28, 2**40):
            with pytest.raises(ShoalError) as refused:
                await infer(client, {"x": np.array([wanted], np.int64)})
            assert refused.value.code is Code.OUT_OF_MEMORY
            assert (await infer(other, ONES)).outputs[0].name == "y"
        assert len((await infer(client, {"x": np.array([2**20], np.int64)})).raw_output_contents[0]) == 2**22
        served = (await pool.stats("fill")).served[0]
        assert (served.requests, served.errors) == (4, 2)
        assert (await infer(other, ONES)).outputs[0].name == "y"
        assert pool.pid("other") == untouched
        record("F37", "P", 2, told=Code.OUT_OF_MEMORY, others_lost=0)
        await other.close()
        await client.close()


async def test_f37_model_that_is_larger_than_its_limit(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(memory_floor=32 * 2**20, memory_slack=1.0)) as pool:
        await pool.start("heavy", models.heavy(128), memory=2**20)
        failed = await pool.wait_event("heavy", WorkerFailed)
        assert failed.refusal.code is Code.OUT_OF_MEMORY
        assert str(33 * 2**20) in failed.refusal.asked
        # nothing but the limit was wrong
        await pool.serve("roomy", models.heavy(128), memory=600 * 2**20)


async def test_f37_the_machines_killer_takes_the_worker_first(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.serve("one", models.add_one())
        worker = int(Path(f"/proc/{pool.pid('one')}/oom_score").read_text())
        assert worker > int(Path("/proc/self/oom_score").read_text())


async def test_f33_changed_bytes_are_never_loaded(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        assignment, path = pool.assignment("one", models.add_one())
        path.write_bytes(path.read_bytes()[:-1] + b"\x00")
        await pool.workers.start(assignment, str(path))
        failed = await pool.wait_event("one", WorkerFailed)
        assert failed.refusal.code is Code.MODEL_DIGEST
        assert failed.refusal.asked == assignment.model


async def test_next_supervisor_adopts(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, keep=True) as first:
        ready = await first.serve("one", models.add_one())
        pid = first.pid("one")
        client = await first.client("one")
    # no supervisor now, and it still answers
    assert (await infer(client, ONES)).outputs[0].name == "y"
    async with WorkerPoolHarness(tmp_path) as second:
        (adopted,) = second.adopted
        assert (adopted.assignment, adopted.ready) == ("one", ready)
        assert second.pid("one") == pid
        assert second.workers.local("one") is not None
        assert (await second.stats("one")).served[0].requests == 1
        await client.close()
        client = await second.client("one")
        assert (await infer(client, ONES)).outputs[0].name == "y"
        kill(pid)
        exited = await second.wait_event("one", WorkerExited)
        assert (exited.own_fault, exited.refusal.code) == (False, Code.WORKER_KILLED)
        await client.close()
    assert not list(tmp_path.glob("run/worker-*"))


async def test_adopted_worker_that_crashes_is_known_by_its_stack(tmp_path: Path) -> None:
    """Its exit status goes to its new parent; the supervisor that adopted it was killed, so this one starts afresh."""
    supervisor = python(SUPERVISOR, str(tmp_path))
    assert supervisor.stdout is not None
    assert await asyncio.to_thread(supervisor.stdout.readline) == b"up\n"
    # the whole process group, as an init would
    os.killpg(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    supervisor.communicate()
    async with WorkerPoolHarness(tmp_path) as pool:
        assert [one.assignment for one in pool.adopted] == ["divide"]
        client = await pool.client("divide")
        with pytest.raises(ConnectionLost):
            await infer(client, CRASHING)
        exited = await pool.wait_event("divide", WorkerExited)
        assert (exited.own_fault, exited.refusal.code) == (True, Code.WORKER_CRASHED)


async def test_records_of_what_is_gone_or_another_are_cleared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir(0o700)
    stranger = python("input()")
    told = {"pid": stranger.pid, "start_time": 1, "nonce": "0" * 32, "assignments": []}
    (run / "worker-00000001.json").write_text(json.dumps(told))
    (run / "worker-00000002.json").write_text(json.dumps(told | {"pid": 2**22 - 1}))
    (run / "worker-00000003.json").write_text("{")
    try:
        async with WorkerPoolHarness(tmp_path) as pool:
            assert pool.adopted == ()
            assert {path.stem for path in run.glob("worker-0000000*")} == set()
            # the number belonged to another process, which is left alone
            assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


async def test_orphan_ends_by_itself(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path, PoolOptions(orphan_after_s=3.0), keep=True) as pool:
        await pool.serve("one", models.add_one())
        pid = pool.pid("one")
        client = await pool.client("one")
    # the front's connection keeps it
    assert (await infer(client, ONES)).outputs[0].name == "y"
    assert alive(pid)
    await client.close()
    await until(lambda: not Path(f"/proc/{pid}").exists() or _reaped(pid), 10, "the orphan's end")


def _reaped(pid: int) -> bool:
    """In this test the orphan is still this process's child."""
    return os.waitpid(pid, os.WNOHANG)[0] == pid


async def test_stopping_while_loading_and_starting_twice(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        await pool.start("heavy", models.heavy(64))
        await pool.workers.stop("heavy")
        await pool.start("one", models.add_one())
        await pool.start("one", models.add_one())
        await pool.wait_event("one", WorkerReady)
        records = [json.loads(path.read_text()) for path in pool.run.glob("worker-*.json")]
        assert sum(len(record["assignments"]) for record in records) == 1
        assert not any(isinstance(event, WorkerExited | WorkerFailed) for event in pool.events)
    assert not list(pool.run.glob("worker-*"))


async def test_a35_a50_what_a_worker_does_not_have(tmp_path: Path) -> None:
    os.environ["SHOAL_SECRET_CANARY"] = "canary-4711"
    try:
        async with WorkerPoolHarness(tmp_path) as pool:
            await pool.serve("one", models.add_one())
            pid = pool.pid("one")
            local = pool.workers.local("one")
            assert local is not None
            proc = Path(f"/proc/{pid}")
            seen = (proc / "environ").read_bytes() + (proc / "cmdline").read_bytes()
            assert b"canary" not in seen
            assert local.nonce.encode() not in seen
            # a network of its own, with nothing in it that is up
            assert (proc / "ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
            status = (proc / "status").read_text()
            assert "CapEff:\t0000000000000000" in status
            for path in pool.run.glob("worker-*.json"):
                assert path.stat().st_mode & 0o777 == 0o600
            assert pool.run.stat().st_mode & 0o777 == 0o700
            assert os.getpgid(pid) != os.getpgid(0)
            with pytest.raises(ShoalError) as stranger:
                await FrameClient.connect(local.socket, "guessed")
            assert stranger.value.code is Code.UNAUTHENTICATED
    finally:
        del os.environ["SHOAL_SECRET_CANARY"]


async def test_unknown_device_and_second_order(tmp_path: Path) -> None:
    async with WorkerPoolHarness(tmp_path) as pool:
        assignment, path = pool.assignment("one", models.add_one())
        await pool.serve("one", models.add_one())
        client = await pool.client("one")
        with pytest.raises(ShoalError) as malformed:
            await client.call("load", b"{}")
        assert malformed.value.code is Code.MESSAGE_INVALID
        with pytest.raises(ShoalError) as busy:
            await client.call("probe", b"{}")
        assert busy.value.code is Code.CONFLICT
        await pool.workers.start(replace(assignment, id="two", device="gpu9"), str(path))
        assert (await pool.wait_event("two", WorkerFailed)).refusal.code is Code.DEVICE_LOST
        metadata = await client.call("metadata")
        assert b'"x"' in metadata.payload
        await client.close()

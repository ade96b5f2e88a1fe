"""F50: a process hangs but does not end. A coordinator whose event loop hangs ends itself; one that was stopped, or
got no CPU, does not."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import grpc
import pytest

from harness.cluster.coordinator import CoordinatorServer, operator
from harness.report import record
from harness.wait import until
from shoal.coordinator.main.watchdog import END_SIGNAL, LIMIT_S
from shoal.types.device import Role
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

FOUND_WITHIN_S = 12 * LIMIT_S
"""Where the processors are busy, a loop that keeps one takes longer to have had it for so long."""
BACK_WITHIN_S = 30.0
STEP_S = 1.0
HANGS = """
import signal, sys, threading
def spin(*_):
    while True: pass
def wait(*_):
    lock = threading.Lock(); lock.acquire(); lock.acquire()
signal.signal(signal.SIGUSR1, spin)
signal.signal(signal.SIGUSR2, wait)
from shoal.coordinator.main import main
main(sys.argv[2:])
"""
"""A coordinator that hangs on request."""
AT_ONCE = """
import asyncio, re
from shoal.coordinator.main.watchdog import run_with_watchdog
async def hang():
    re.match("(a+)+$", "a" * 64 + "b")
asyncio.run(run_with_watchdog(hang()))
"""
HANG_SIGNALS = {"spin": signal.SIGUSR1, "wait": signal.SIGUSR2}


def start_coordinator(folder: Path) -> CoordinatorServer:
    folder.mkdir()
    made = CoordinatorServer(folder, command_prefix=(sys.executable, "-c", HANGS))
    made.start()
    return made


def answers(coordinator: CoordinatorServer, timeout_s: float = 10.0) -> bool:
    stub = operator(coordinator.link, coordinator.certificate(Role.OPERATOR, "op"))
    try:
        return bool(stub.WhoAmI(operator_pb2.WhoAmIRequest(), timeout=timeout_s).name)
    except grpc.RpcError:
        return False


async def hang_and_restart(coordinator: CoordinatorServer, name: str) -> tuple[str, float]:
    """How long it hung, after which it ended itself and, started again, answers."""
    process, loop = coordinator.process, asyncio.get_running_loop()
    assert process is not None
    os.kill(process.pid, HANG_SIGNALS[name])
    began = loop.time()
    await until(lambda: process.poll() is not None, FOUND_WITHIN_S, f"the end of one in {name}")
    hung_s = loop.time() - began
    assert process.returncode == END_SIGNAL, coordinator.log.read_text()[-2000:]
    assert f" in {name}\n" in coordinator.log.read_text(), "where its loop hung"
    await asyncio.to_thread(coordinator.start)
    assert await asyncio.to_thread(answers, coordinator)
    return name, round(hung_s, 1)


async def throttle(coordinator: CoordinatorServer, over: asyncio.Event) -> None:
    """It hardly runs until `over`: stopped for a second again and again."""
    assert coordinator.process is not None
    while not over.is_set():
        os.kill(coordinator.process.pid, signal.SIGSTOP)
        await asyncio.wait((asyncio.ensure_future(over.wait()),), timeout=STEP_S)
        os.kill(coordinator.process.pid, signal.SIGCONT)
        await asyncio.wait((asyncio.ensure_future(over.wait()),), timeout=STEP_S / 100)


async def test_f50_the_first_process_of_a_container_that_hangs_at_once_ends_too() -> None:
    """The kernel ignores what a signal does by default to the first process; no thread of this one ever looked."""
    inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", AT_ONCE)
    process = await asyncio.create_subprocess_exec(*inside, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(FOUND_WITHIN_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == END_SIGNAL, said.decode()
    assert " in hang\n" in said.decode()
    record("F50", "P", 1, what="first process of a container, in C code from the start")


async def test_f50_a_coordinator_that_hangs_ends_and_one_that_did_not_run_goes_on(tmp_path: Path) -> None:
    ours = await asyncio.gather(
        *(
            asyncio.to_thread(start_coordinator, tmp_path / name)
            for name in (*HANG_SIGNALS, "stopped once", "stopped often")
        )
    )
    crew = dict(zip((*HANG_SIGNALS, "once", "often"), ours, strict=True))
    try:
        assert all([await asyncio.to_thread(answers, each) for each in ours])
        over = asyncio.Event()
        pids = {name: crew[name].process.pid for name in ("once", "often")}  # type: ignore[union-attr]
        os.kill(pids["once"], signal.SIGSTOP)
        stopping = asyncio.create_task(throttle(crew["often"], over))
        took = dict(await asyncio.gather(*(hang_and_restart(crew[name], name) for name in HANG_SIGNALS)))
        os.kill(pids["once"], signal.SIGCONT)
        over.set()
        await stopping
        for name, pid in pids.items():
            await until(partial(answers, crew[name]), BACK_WITHIN_S, f"an answer of the one that was stopped {name}")
            process = crew[name].process
            assert process is not None
            assert (process.pid, process.poll()) == (pid, None)
    finally:
        for each in ours:
            if each.process is not None and each.process.poll() is None:
                os.kill(each.process.pid, signal.SIGCONT)
                each.end(signal.SIGKILL)
    assert min(took.values()) > LIMIT_S - 1
    record("F50", "P", len(took), what="coordinator", hung_s=took)

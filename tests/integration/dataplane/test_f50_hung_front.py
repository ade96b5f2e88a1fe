"""F50: a process hangs but does not end. A hung front is found by its lack of progress, ended, and started again."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.clients.oip import InferenceError, Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.measure.contention import RunDelay
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.process import STUCK_S, FrontProcess
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey

pytestmark = pytest.mark.alone

OTHERS_WAIT_S = 5.0
WAIT_TIMEOUT_S = 30.0
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
HANGS = """
import signal, sys, threading
def spin(*_):
    while True: pass
def wait(*_):
    threading.Lock().acquire(); lock = threading.Lock(); lock.acquire(); lock.acquire()
signal.signal(signal.SIGUSR1, spin)
signal.signal(signal.SIGUSR2, wait)
from shoal.agent.main import main
sys.argv[1:1] = ["front"]
sys.exit(main())
"""
"""A front that hangs on request."""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    made = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    made.front = FrontProcess(made.config, (sys.executable, "-c", HANGS), SystemClock())
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "relu"), model)
        await made.configure()
        yield made
    finally:
        await made.stop()


async def gaps_of(node: DataPlaneNode, longest: list[float], stopped: asyncio.Event) -> None:
    """The longest time without an answer goes into `longest`."""
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    loop = asyncio.get_running_loop()
    last = loop.time()
    while not stopped.is_set():
        try:
            await client.infer("relu", X, timeout=0.5)
            longest[0], last = max(longest[0], loop.time() - last), loop.time()
        except InferenceError:
            longest[0] = max(longest[0], loop.time() - last)
        await asyncio.wait((asyncio.ensure_future(stopped.wait()),), timeout=0.02)
    await client.close()


@pytest.mark.parametrize(
    "blow", [signal.SIGSTOP, signal.SIGUSR1, signal.SIGUSR2], ids=["stopped", "busy loop", "deadlock"]
)
async def test_f50_a_front_that_hangs_is_replaced_and_others_wait_five_seconds_at_most(
    node: DataPlaneNode, blow: signal.Signals
) -> None:
    longest, stopped, delay = [0.0], asyncio.Event(), RunDelay(os.getpid())
    asking = asyncio.create_task(gaps_of(node, longest, stopped))
    client = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
    await client.infer("relu", X)
    hung = node.front.pid
    assert hung is not None
    os.kill(hung, blow)

    async def is_reported() -> bool:
        try:
            await node.front.stats()
        except ShoalError as error:
            return error.code in (Code.FRONT_STUCK, Code.REPLICA_UNREACHABLE)
        return False

    await until(is_reported, WAIT_TIMEOUT_S, "the supervisor says that it does not answer")
    await until(
        lambda: node.front.restarts == 1 and node.front.pid not in (hung, None), WAIT_TIMEOUT_S, "another front"
    )
    assert node.front.pid is not None
    delay.add(node.front.pid)
    await client.close()

    async def answers() -> bool:
        fresh = node.grpc_client(node.authority.issue(Role.TENANT, "acme"))
        try:
            return bool((await fresh.infer("relu", X, timeout=2)).outputs)
        except InferenceError:
            return False
        finally:
            await fresh.close()

    await until(answers, WAIT_TIMEOUT_S, "an answer")
    stopped.set()
    await asking
    slowed_s = delay.slowdown_s()
    record("F50", "P", 1, what=f"front: {blow.name}", longest_without_answer_s=round(longest[0], 2))
    assert longest[0] - slowed_s <= OTHERS_WAIT_S, f"of which {slowed_s:.2f} s because others hold the cores"
    assert node.front.restarts == 1


async def test_f50_a_supervisor_that_did_not_run_itself_ends_no_front(node: DataPlaneNode) -> None:
    """Its own gap is not the front's silence; nor is what the front waits for a processor."""
    front = node.front.pid
    for _ in range(3):
        time.sleep(STUCK_S + 1)  # noqa: ASYNC251, TID251 - this process is the supervisor, and does not run
        await until(node.front.stats, WAIT_TIMEOUT_S, "the front's answer")
    assert (node.front.pid, node.front.restarts) == (front, 0)

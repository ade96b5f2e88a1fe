"""Workers that make no progress and requests that end workers, with real processes: what callers see, what it costs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.measure.contention import RunDelay
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.workload import WorkloadKey

pytestmark = pytest.mark.alone

KEY = WorkloadKey("acme", "model")
WITHIN_S = 2.0
"""F38: max(2 s, 5 x the p99), which is milliseconds for these models."""


def tensor(name: str, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> Tensor:
    kinds = {"float32": "FP32", "int64": "INT64", "int32": "INT32"}
    return Tensor(name, kinds[array.dtype.name], array.shape, array.tobytes())


@asynccontextmanager
async def replicas(count: int, folder: Path, model: bytes) -> AsyncIterator[tuple[DataPlaneNode, GrpcClient]]:
    authority = Authority(folder / "ca", "west", SystemClock().wall())
    file = folder / "model.onnx"
    file.write_bytes(model)
    node = DataPlaneNode("n1", authority, folder / "n1")
    client: GrpcClient | None = None
    try:
        await node.start()
        for number in range(count):
            await node.load(f"a{number + 1}", KEY, file)
        await use(node, *node.models)
        client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
        yield node, client
    finally:
        if client is not None:
            await client.close()
        await node.stop()


async def use(node: DataPlaneNode, *names: str) -> None:
    await node.configure([Route(KEY, 1, tuple(node.endpoint(name) for name in names))])


async def timed_infer(client: GrpcClient, *inputs: Tensor, request_id: str = "") -> tuple[float, str]:
    """Seconds, and the code that it ended with, empty when it was answered."""
    clock = SystemClock()
    start = clock.now()
    try:
        await client.infer("model", inputs, timeout=20.0, request_id=request_id)
    except InferenceError as failed:
        return clock.now() - start, failed.code
    return clock.now() - start, ""


def run_delay(node: DataPlaneNode) -> RunDelay:
    """Of those that judge a worker: the front, and this process, which is the supervisor and the client too."""
    assert node.front.pid is not None
    return RunDelay(os.getpid(), node.front.pid)


def trips(count: int) -> tuple[Tensor, Tensor]:
    return tensor("x", np.ones(1, np.float32)), tensor("n", np.array(count, np.int64))


async def test_f38_a_run_without_end_is_told_to_terminate_and_costs_no_worker(tmp_path: Path) -> None:
    async with replicas(2, tmp_path, engine_cases.loop(-1)) as (node, client):
        workers = [node.worker_pid(name) for name in ("a1", "a2")]
        delay = run_delay(node)
        (away, code), others = await asyncio.gather(
            timed_infer(client, *trips(2**60)), asyncio.gather(*(timed_infer(client, *trips(n)) for n in range(1, 9)))
        )
        assert code == Code.REQUEST_CRASHED_WORKER
        assert [code for _, code in others] == [""] * 8
        slowed = delay.slowdown_s()
        assert away - slowed <= 2 * WITHIN_S, "one replica after the other"
        again, code = await timed_infer(client, *trips(2**60), request_id="another")
        assert (code, again < 1.0) == (Code.REQUEST_CRASHED_WORKER, True), "refused before it meets a worker"
        assert [node.worker_pid(name) for name in ("a1", "a2")] == workers
        assert not node.exits
        record("F38", "P", 1, what="endless loop", two_replicas_s=round(away, 2), workers_lost=0)


async def test_f38_an_operator_that_does_not_return_is_killed_and_its_neighbours_go_elsewhere(tmp_path: Path) -> None:
    async with replicas(3, tmp_path, engine_cases.square()) as (node, client):
        small, huge = (tensor("n", np.array([n, n], np.int64)) for n in (2, 8000))
        delay = run_delay(node)
        stuck = asyncio.create_task(timed_infer(client, huge))
        await until(lambda: _inside(node), 5.0, "it to be inside")
        others = await asyncio.gather(*(timed_infer(client, small) for _ in range(8)))
        assert [code for _, code in others] == [""] * 8
        away, code = await stuck
        assert code == Code.REQUEST_CRASHED_WORKER
        assert away - delay.slowdown_s() <= 2 * WITHIN_S + 0.5
        await until(lambda: len(node.exits) == 2, 5.0, "both workers to end")
        assert {each.refusal.code for each in node.exits} == {Code.WORKER_STUCK}
        record("F38", "P", 1, what="one operator", two_replicas_s=round(away, 2), worst_other_s=_worst(others))


async def test_f38_a_stopped_worker_is_left_within_two_seconds(tmp_path: Path) -> None:
    async with replicas(2, tmp_path, engine_cases.loop(-1)) as (node, client):
        for n in range(1, 21):
            await timed_infer(client, *trips(n))
        delay = run_delay(node)
        os.kill(node.worker_pid("a1"), signal.SIGSTOP)
        found = await asyncio.gather(*(timed_infer(client, *trips(n)) for n in range(1, 33)))
        found += [await timed_infer(client, *trips(n)) for n in range(33, 65)]
        assert [code for _, code in found] == [""] * 64
        assert max(away for away, _ in found) - delay.slowdown_s() <= WITHIN_S
        assert max(away for away, _ in found) > 0.5, "some of them met the stopped worker"
        record("F38", "P", 1, what="stopped", requests=64, lost=0, worst_s=_worst(found))


def _worst(found: list[tuple[float, str]]) -> float:
    return round(max(away for away, _ in found), 2)


async def _inside(node: DataPlaneNode) -> bool:
    return any(count for _, count in (await node.front.stats()).in_flight)


LEAST, MINUS = np.array([-(2**31)], np.int32), np.array([-1], np.int32)
QUERY_OF_DEATH = tensor("x", LEAST), tensor("d", MINUS)


def sound(n: int) -> tuple[Tensor, Tensor]:
    return tensor("x", np.array([n], np.int32)), tensor("d", np.array([1], np.int32))


async def reload(node: DataPlaneNode, model: Path, known: Callable[[], int], before: int) -> None:
    """What a supervisor does: the assignment whose worker ended gets another."""
    await until(lambda: known() > before, 5.0, "the worker's end")
    name = node.exits[-1].assignment
    await node.load(name, KEY, model)


@pytest.mark.parametrize("beside", [0, 6])
async def test_f40_a_query_of_death_costs_two_workers_and_is_then_refused(tmp_path: Path, beside: int) -> None:
    async with replicas(2, tmp_path, engine_cases.divide()) as (node, client):
        stop = asyncio.Event()
        codes: list[str] = []

        async def go_on(n: int) -> None:
            while not stop.is_set():
                codes.append((await timed_infer(client, *sound(n)))[1])

        loading = [asyncio.create_task(go_on(n)) for n in range(beside)]
        await until(lambda: len(codes) > 20 * beside - 1, 5.0, "load")
        _, code = await timed_infer(client, *QUERY_OF_DEATH)
        assert code == Code.REQUEST_CRASHED_WORKER
        for number in range(5):
            away, code = await timed_infer(client, *QUERY_OF_DEATH, request_id=f"try-{number}")
            assert (code, away < 1.0) == (Code.REQUEST_CRASHED_WORKER, True)
        stop.set()
        await asyncio.gather(*loading)
        await until(lambda: len(node.exits) == 2, 5.0, "the second worker's end")
        record("F40", "P", 1, others_in_flight=beside, workers_lost=2)


async def test_f40_sent_again_and_again_it_still_costs_two_workers(tmp_path: Path) -> None:
    """Only one replica at a time, brought back after each crash: no retry, so each crash ends another call."""
    async with replicas(2, tmp_path, engine_cases.divide()) as (node, client):
        await use(node, "a1")
        told = []
        for number in range(6):
            before = len(node.exits)
            _, code = await timed_infer(client, *QUERY_OF_DEATH, request_id=f"try-{number}")
            told.append(code)
            if code == Code.WORKER_CRASHED:
                await reload(node, tmp_path / "model.onnx", lambda: len(node.exits), before)
                await use(node, "a1")
        assert told == [Code.WORKER_CRASHED, *[Code.REQUEST_CRASHED_WORKER] * 5]
        await until(lambda: len(node.exits) == 2, 5.0, "the second worker's end")
        await use(node, "a1", "a2")
        assert (await timed_infer(client, *sound(7)))[1] == "", "who sends something else is served"
        record("F40", "P", 1, sent=6, workers_lost=2)


async def test_f40_through_another_front_it_costs_two_workers_too(tmp_path: Path) -> None:
    """The first crash is at one node; the next node has two replicas, and loses one of them."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    file = tmp_path / "model.onnx"
    file.write_bytes(engine_cases.divide())
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY)
    one, two = (DataPlaneNode(name, authority, tmp_path / name) for name in ("n1", "n2"))
    client: GrpcClient | None = None
    try:
        await asyncio.gather(*(node.start() for node in (gateway, one, two)))
        await one.load("a1", KEY, file)
        await two.load("b1", KEY, file)
        await two.load("b2", KEY, file)
        await use(one, "a1")
        await use(two, "b1", "b2")
        entering = Route(KEY, 1, (one.endpoint("a1", at=gateway), two.endpoint("b1", at=gateway, weight=1e-9)))
        await gateway.configure([entering])
        client = gateway.grpc_client(authority.issue(Role.TENANT, "acme"))
        assert (await timed_infer(client, *sound(7)))[1] == ""
        for _ in range(3):
            assert (await timed_infer(client, *QUERY_OF_DEATH))[1] == Code.REQUEST_CRASHED_WORKER
        await until(lambda: len(one.exits) + len(two.exits) == 2, 5.0, "the second worker's end")
        assert (len(one.exits), len(two.exits)) == (1, 1)
        record("F40", "P", 1, fronts=2, workers_lost=2)
    finally:
        if client is not None:
            await client.close()
        await asyncio.gather(*(node.stop() for node in (gateway, one, two)))

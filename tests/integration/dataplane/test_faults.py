"""Processes of the data plane die under load: what clients see, judged from their own record."""

import asyncio
import errno
import hashlib
import os
import signal
import socket
import ssl
import struct
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.clients.relu_load import KEY, answer_of, send_load, send_request
from harness.cluster.dataplane_node import FRONT, DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.measure.history import CallHistory, HistoryVerdict, check_histories
from harness.metrics import check_page
from harness.models.synthetic import relu
from harness.ports import free_ports
from harness.report import record
from harness.wait import until
from shoal.agent import metrics as agent_metrics
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.dataplane import process
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.dataplane.upstream import SILENT_S
from shoal.types.assignment import Credential
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.route import EndpointState, Route
from shoal.types.units import Wall

RUNS, REQUESTS, RATE = 3, 5000, 500.0
"""F01 asks for ten runs: those are the long test."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "west", SystemClock().wall())


@pytest.fixture
def relu_file(tmp_path: Path) -> Path:
    path = tmp_path / "relu.onnx"
    path.write_bytes(relu().SerializeToString())
    return path


@pytest.fixture
async def pair(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> AsyncIterator[tuple[DataPlaneNode, DataPlaneNode, DataPlaneNode]]:
    """A gateway and two agents with a replica each."""
    gateway = DataPlaneNode("g1", authority, tmp_path / "g1", Role.GATEWAY)
    one, two = (DataPlaneNode(name, authority, tmp_path / name) for name in ("n1", "n2"))
    nodes = (gateway, one, two)
    try:
        await asyncio.gather(*(node.start() for node in nodes))
        await asyncio.gather(one.load("a1", KEY, relu_file), two.load("a2", KEY, relu_file))
        await asyncio.gather(one.configure(), two.configure())
        await gateway.configure([Route(KEY, 1, (one.endpoint("a1", at=gateway), two.endpoint("a2", at=gateway)))])
        yield nodes
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))


async def wait_all_served(node: DataPlaneNode, client: GrpcClient, *assignments: str) -> None:
    """Each of these workers has answered something."""
    warm = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 9, 9, 9, 9))

    async def all_served() -> bool:
        await client.infer("relu", (warm,))
        return all([await _served(node, name) for name in assignments])

    await until(all_served, 20, "every worker has answered")


async def outstanding_requests(node: DataPlaneNode, assignment: str) -> int:
    return dict((await node.front.stats()).in_flight).get(assignment, 0)


async def kill_with_requests_inside(node: DataPlaneNode, assignment: str) -> None:
    """SIGKILL, once a request is seen to wait in that worker: it is paused first, so that the blow cannot miss.

    More than one need not come: the front prefers the replica that has less to do.
    """
    pid, before = node.worker_pid(assignment), len(node.exits)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(2):  # the second time no answer from before the pause can be on its way any more
        await until(lambda: _more(node, assignment, 1), 10, f"a request in {assignment}")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: [e for e in node.exits[before:] if e.assignment == assignment], 10, f"{assignment} to exit")


async def _more(node: DataPlaneNode, assignment: str, at_least: int) -> bool:
    return await outstanding_requests(node, assignment) >= at_least


async def double(tmp_path: Path, authority: Authority, relu_file: Path) -> DataPlaneNode:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    await node.start()
    await asyncio.gather(node.load("a1", KEY, relu_file), node.load("a2", KEY, relu_file))
    await node.configure(both(node))
    return node


def both(node: DataPlaneNode) -> list[Route]:
    return [Route(KEY, 1, (node.endpoint("a1"), node.endpoint("a2")))]


async def f01(
    node: DataPlaneNode, clients: list[GrpcClient], relu_file: Path, count: int, rate: float
) -> HistoryVerdict:
    """One of two local replicas dies under load, and comes back before the load ends."""

    async def strike() -> None:
        await kill_with_requests_inside(node, "a1")
        await node.load("a1", KEY, relu_file)
        await node.configure(both(node))

    return await send_load(clients, count, rate, count // 3, strike)


async def test_f01_one_of_two_replicas_killed_under_load(tmp_path: Path, authority: Authority, relu_file: Path) -> None:
    tenant = authority.issue(Role.TENANT, "acme")
    node = await double(tmp_path, authority, relu_file)
    clients = [node.grpc_client(tenant) for _ in range(2)]
    try:
        sent, slowest = 0, 0.0
        for _ in range(RUNS):
            verdict = await f01(node, clients, relu_file, REQUESTS, RATE)
            print(verdict)
            assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
            sent, slowest = sent + verdict.sent, max(slowest, verdict.slowest_s)
        assert len(node.exits) == RUNS
        assert not any(exit_.own_fault for exit_ in node.exits), "a kill from outside is nobody's fault here"
        (ingress,) = (await node.front.stats()).ingress
        assert ingress.retried >= RUNS
        assert (ingress.requests, ingress.answered, ingress.lost) == (sent, sent, 0)
        await until(lambda: _served(node, "a1"), 10, "the reloaded replica serves again")
        figures = {"retried": ingress.retried, "slowest_s": round(slowest, 3)}
        record("F01", "P", RUNS, sent=sent, rate=RATE, lost=0, **figures)
    finally:
        for client in clients:
            await client.close()
        await node.stop()


@pytest.mark.long
async def test_f01_ten_runs_of_5000(tmp_path: Path, authority: Authority, relu_file: Path) -> None:
    tenant = authority.issue(Role.TENANT, "acme")
    node = await double(tmp_path, authority, relu_file)
    clients = [node.grpc_client(tenant) for _ in range(2)]
    try:
        worst = 0.0
        for run in range(10):
            verdict = await f01(node, clients, relu_file, 5000, 500.0)
            print(run, verdict)
            assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
            worst = max(worst, verdict.slowest_s)
        record("F01", "P", 10, sent=50_000, rate=500, lost=0, slowest_s=round(worst, 3))
    finally:
        for client in clients:
            await client.close()
        await node.stop()


async def _served(node: DataPlaneNode, assignment: str) -> int:
    assert node.workers is not None
    found = {stats.assignment: sum(s.requests for s in stats.served) for stats in await node.workers.stats()}
    return found.get(assignment, 0)


async def test_f01_an_agent_dies_whole_behind_a_gateway(
    pair: tuple[DataPlaneNode, DataPlaneNode, DataPlaneNode], authority: Authority
) -> None:
    """Front and worker at once: what was in flight there is answered by the other agent."""
    gateway, one, _ = pair
    client = gateway.grpc_client(authority.issue(Role.TENANT, "acme"))

    async def strike() -> None:
        front, worker = one.front.pid, one.worker_pid("a1")
        assert front is not None
        await one.front.close(keep=True)  # no supervisor restarts it
        os.kill(worker, signal.SIGSTOP)
        await until(lambda: client_waits(gateway), 10, "requests wait in the agent")
        os.kill(front, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(front) or _zombie(front), 10, "the front is dead")

    verdict = await send_load([client], 600, 150.0, 200, strike)
    print(verdict)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    (ingress,) = (await gateway.front.stats()).ingress
    assert ingress.retried >= 1
    assert (ingress.answered, ingress.lost) == (600, 0)
    record("F01", "P", 1, what="an agent whole", sent=600, lost=0, retried=ingress.retried)
    await client.close()


async def client_waits(gateway: DataPlaneNode) -> bool:
    (ingress,) = (await gateway.front.stats()).ingress
    return ingress.requests - ingress.answered - ingress.refused - ingress.lost >= 2


def _zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_f02_the_only_replica_fails_its_requests_retryably_and_serves_when_reloaded(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    client: GrpcClient | None = None
    try:
        await node.start()
        await node.load("a1", KEY, relu_file)
        await node.configure()
        client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
        await wait_all_served(node, client, "a1")
        (before,) = (await node.front.stats()).ingress
        history = CallHistory()
        pid = node.worker_pid("a1")
        os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(send_request(client, history, number)) for number in range(1, 6)]
        await until(lambda: _more(node, "a1", 5), 10, "requests inside")
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*waiting)
        assert {done.detail for done in history.completed} == {Code.WORKER_CRASHED}
        await until(lambda: node.exits, 10, "seen to exit")
        await node.load("a1", KEY, relu_file)
        await node.configure()
        again = CallHistory()
        await send_request(client, again, 7)
        verdict = check_histories([again], answer_of)
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        (after,) = (await node.front.stats()).ingress
        assert (after.requests - before.requests, after.answered - before.answered, after.lost) == (6, 1, 5)
        record("F02", "P", 1, in_flight_refused=5, others_refused=0)
    finally:
        if client is not None:
            await client.close()
        await node.stop()


async def test_a_request_that_two_workers_died_of_is_refused_for_a_while(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = await double(tmp_path, authority, relu_file)
    client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
    x = Tensor("x", "FP32", (1, 4), bytes(16))
    try:
        await wait_all_served(node, client, "a1", "a2")
        pids = {name: node.worker_pid(name) for name in ("a1", "a2")}
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(client.infer("relu", (x,)))
        for _ in range(2):
            holder = await until(lambda: _holder(node, pids), 10, "inside a worker")
            os.kill(pids.pop(holder), signal.SIGKILL)
        with pytest.raises(InferenceError) as crashed:
            await call
        assert crashed.value.code == Code.REQUEST_CRASHED_WORKER
        with pytest.raises(InferenceError) as refused:
            await client.infer("relu", (x,))
        assert refused.value.code == Code.REQUEST_CRASHED_WORKER
        assert int(refused.value.retry_after_ms) > 1000
        await until(lambda: len(node.exits) == 2, 10, "both seen to exit")
        await node.load("a1", KEY, relu_file)
        await node.configure([Route(KEY, 2, (node.endpoint("a1"),))])
        other = Tensor("x", "FP32", (1, 4), struct.pack("<4f", 1, 2, 3, 4))
        assert (await client.infer("relu", (other,))).outputs[0].raw == other.raw
        with pytest.raises(InferenceError):
            await client.infer("relu", (x,))
    finally:
        await client.close()
        await node.stop()


async def _holder(node: DataPlaneNode, pids: dict[str, int]) -> str:
    inside = dict((await node.front.stats()).in_flight)
    return next((name for name in pids if inside.get(name)), "")


async def test_a_killed_front_comes_back_on_its_ports_with_its_routes(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    tenant = authority.issue(Role.TENANT, "acme")
    try:
        await node.start()
        await node.load("a1", KEY, relu_file)
        await node.configure()
        before, worker = node.front.pid, node.worker_pid("a1")
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wrong: list[str] = []

        async def answers() -> bool:
            client = node.grpc_client(tenant)
            try:
                await client.infer("relu", (Tensor("x", "FP32", (1, 4), bytes(16)),), timeout=2)
            except InferenceError as error:
                wrong.extend([str(error)] if error.code else [])
                return False
            finally:
                await client.close()
            return node.front.pid != before

        await until(answers, 20, "the new front answers")
        assert wrong == [], "a front that knows no routes answered"
        assert node.front.restarts == 1
        assert node.worker_pid("a1") == worker
        assert (await node.front.stats()).ready
    finally:
        await node.stop()


async def test_a_front_that_cannot_be_started_is_tried_again(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine has no process left for it, once at first and once for the next one."""
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    start, short = subprocess.Popen, [True]

    def starts(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        if short:
            short.pop()
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        found: subprocess.Popen[bytes] = start(*arguments, **options)
        return found

    monkeypatch.setattr(subprocess, "Popen", starts)
    try:
        await node.start()
        await node.front.configure((), ())
        first = node.front.pid
        assert first is not None
        short.append(True)
        os.kill(first, signal.SIGKILL)
        await until(lambda: node.front.pid not in (first, None), 20, "the next one")
        await node.front.configure((), ())
        assert node.front.restarts == 3
    finally:
        await node.stop()


@pytest.mark.parametrize("is_starved", [True, False])
async def test_a_front_has_its_time_to_start_however_long_it_waits_for_a_processor(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, is_starved: bool
) -> None:
    """One that has a processor and does not listen in time is replaced."""
    clock = SystemClock()
    monkeypatch.setattr(process, "START_TIMEOUT_S", 0.5)
    if is_starved:  # all the while
        monkeypatch.setattr(process._Process, "run_delay_s", lambda _: clock.now())
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    node.front = FrontProcess(node.config, ("sh", "-c", 'sleep 1.5; exec "$@"', "sh", *FRONT), clock)
    try:
        await node.start()
        if is_starved:
            await until(node.front.stats, 60, "it to listen")
            assert node.front.restarts == 0
        else:
            await until(lambda: node.front.restarts > 1, 60, "it to be replaced")
    finally:
        await node.stop()


async def test_f03_a_next_supervisor_adopts_the_front_which_served_meanwhile(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    client: GrpcClient | None = None
    try:
        await node.start()
        await node.load("a1", KEY, relu_file)
        await node.configure()
        client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
        first = node.front
        pid = first.pid
        await first.close(keep=True)
        history = CallHistory()
        await send_request(client, history, 1)
        node.front = FrontProcess(node.config, FRONT, SystemClock())
        await node.front.start()
        await node.configure()
        await send_request(client, history, 2)
        verdict = check_histories([history], answer_of)
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        assert (node.front.pid, node.front.restarts) == (pid, 0)
        assert node.front.config == first.config
        with socket.create_server(("127.0.0.1", 0)) as taken:
            other = replace(node.config, run_dir=str(tmp_path / "x"), port=taken.getsockname()[1])
            with pytest.raises(ShoalError) as conflict:
                await FrontProcess(other, FRONT, SystemClock()).start()
        assert conflict.value.code is Code.CONFLICT
    finally:
        if client is not None:
            await client.close()
        await node.stop()


async def test_an_adopted_front_that_ends_before_anything_was_configured_is_followed_by_one_that_answers(
    tmp_path: Path, authority: Authority
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    try:
        await node.start()
        assert not node.front.is_adopted
        await node.front.configure((), ())
        pid = node.front.pid
        assert pid is not None
        await node.front.close(keep=True)
        node.front = FrontProcess(node.config, FRONT, SystemClock())
        await node.front.start()
        assert node.front.is_adopted
        assert node.front.waits_for_routes
        os.kill(pid, signal.SIGKILL)

        async def listens() -> bool:
            try:
                return (await node.front.stats()).ready and node.front.pid != pid
            except ShoalError:
                return False

        await until(listens, 20, "the new front listens")
        assert not node.front.is_adopted
    finally:
        await node.stop()


async def test_what_is_to_be_told_to_a_front_that_is_ended_is_refused(tmp_path: Path, authority: Authority) -> None:
    """A supervisor that is told to stop as its desired set comes configures while it closes. It must end all the same:
    what it does not expect would leave front and workers behind."""
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    try:
        await node.start()
        await node.front.configure((), ())
        ending = asyncio.create_task(node.front.close(keep=False))
        await until(lambda: node.front.pid is None, 20, "it is ended")
        with pytest.raises(ShoalError) as refused:
            await node.front.configure((), ())
        assert refused.value.code is Code.REPLICA_UNREACHABLE
        await ending
    finally:
        await node.stop()


async def test_an_orphan_ends_itself(tmp_path: Path, authority: Authority) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    node.config = replace(node.config, orphan_after_s=0.5)
    node.front = FrontProcess(node.config, FRONT, SystemClock())
    await node.start()
    await node.front.configure((), ())
    pid = node.front.pid
    assert pid is not None
    await node.front.close(keep=True)
    await until(lambda: not psutil.pid_exists(pid) or _zombie(pid), 15, "the front ended")
    assert not (tmp_path / "n1" / "front.json").exists()


async def test_draining_replicas_get_nothing_new_and_finish_what_they_have(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = await double(tmp_path, authority, relu_file)
    client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
    history = CallHistory()
    try:
        pid, loop = node.worker_pid("a1"), asyncio.get_running_loop()
        goes_on_at = loop.time() + SILENT_S / 2  # before the front takes it for one that hangs
        os.kill(pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(send_request(client, history, number)) for number in range(1, 9)]
        await until(lambda: _more(node, "a1", 1), 10, "requests inside")
        draining = replace(node.endpoint("a1"), state=EndpointState.DRAINING)
        locals_ = (node.local_worker("a2"),)
        await node.front.configure((Route(KEY, 2, (draining, node.endpoint("a2"))),), (), locals_)
        asked = 0
        while asked == 0 or loop.time() < goes_on_at:
            await send_request(client, history, 10 + asked)
            asked += 1
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        verdict = check_histories([history], answer_of)
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        assert await _served(node, "a1") <= 8
        assert await _served(node, "a1") + await _served(node, "a2") == 8 + asked
    finally:
        await client.close()
        await node.stop()


async def test_only_the_named_peer_is_believed_and_only_peers_forward(
    pair: tuple[DataPlaneNode, DataPlaneNode, DataPlaneNode], authority: Authority
) -> None:
    gateway, one, two = pair
    tenant = authority.issue(Role.TENANT, "acme")
    client = gateway.grpc_client(tenant)
    history = CallHistory()
    try:
        posing = replace(one.endpoint("a1", at=gateway), node="n9")
        await gateway.configure([Route(KEY, 2, (posing, two.endpoint("a2", at=gateway)))])
        for number in range(1, 21):
            await send_request(client, history, number)
        verdict = check_histories([history], answer_of)
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        assert await _served(one, "a1") == 0
        assert await _served(two, "a2") == 20

        x = Tensor("x", "FP32", (1, 4), bytes(16))
        await gateway.configure([Route(KEY, 3, (posing,))])
        with pytest.raises(InferenceError) as nobody:
            await client.infer("relu", (x,))
        assert (nobody.value.status, nobody.value.code) == ("UNAVAILABLE", Code.REPLICA_UNREACHABLE)

        said = {"shoal-tenant": "acme", "shoal-origin": "g1", "shoal-hop": "1"}
        peer = gateway.grpc_client(authority.issue(Role.GATEWAY, "g2"))
        with pytest.raises(InferenceError) as twice:
            await peer.infer("relu", (x,), extra_metadata=said)
        assert twice.value.code == Code.MODEL_NOT_READY, "what was forwarded once is served here or not at all"
        with pytest.raises(InferenceError) as own:
            await peer.infer("relu", (x,))
        assert own.value.code == Code.ROLE_DENIED
        await peer.close()
        forward = one.grpc_client(authority.issue(Role.GATEWAY, "g2"))
        await forward.infer("relu", (x,), extra_metadata=said)
        assert (await one.front.stats()).ingress == (), "counted where it entered, not where it was forwarded to"
        await forward.close()
    finally:
        await client.close()


async def test_identities_end_on_open_connections_and_tokens_count(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    x = Tensor("x", "FP32", (1, 4), bytes(16))
    clients = []
    try:
        await node.start()
        await node.load("a1", KEY, relu_file)
        wall = SystemClock().wall()
        digest = hashlib.sha256(b"good").hexdigest()
        await node.configure(credentials=(Credential("acme", digest, Wall(wall + 3600)),))
        brief = node.grpc_client(authority.issue(Role.TENANT, "acme", valid_s=3.0))
        clients.append(brief)
        await brief.infer("relu", (x,))

        async def is_expired() -> bool:
            try:
                await brief.infer("relu", (x,))
            except InferenceError as error:
                return (error.status, error.code) == ("UNAUTHENTICATED", Code.CERT_EXPIRED)
            return False

        await until(is_expired, 10, "CERT_EXPIRED on the open connection", every_s=0.1)
        root = authority.certificate.read_bytes()
        good, bad = node.token_client(root, "good"), node.token_client(root, "bad")
        clients += [good, bad]
        assert (await good.infer("relu", (x,))).outputs[0].raw == x.raw
        assert (await node.rest_client(bearer="good").infer("relu", (x,))).outputs[0].raw == x.raw
        for attempt in (bad, node.rest_client(bearer="bad")):
            with pytest.raises(InferenceError) as refused:
                await attempt.infer("relu", (x,))
            assert refused.value.code == Code.TOKEN_INVALID
        stranger = node.grpc_client(authority.issue(Role.TENANT, "other"))
        clients.append(stranger)
        with pytest.raises(InferenceError) as hidden:
            await stranger.infer("relu", (x,))
        assert hidden.value.code == Code.MODEL_NOT_FOUND, "another tenant's workload is not even there"
        await node.configure()
        with pytest.raises(InferenceError) as gone:
            await good.infer("relu", (x,))
        assert gone.value.code == Code.TOKEN_INVALID, "a token that was taken back counts no more"
    finally:
        for client in clients:
            await client.close()
        await node.stop()


async def test_what_cannot_wait_is_told_when_to_come_back(
    tmp_path: Path, authority: Authority, relu_file: Path
) -> None:
    node = DataPlaneNode("n1", authority, tmp_path / "n1", limits=AdmissionLimits(per_replica=4))
    (metrics_port,) = free_ports(1)
    node.config = replace(node.config, metrics_port=metrics_port)
    node.front = FrontProcess(node.config, FRONT, SystemClock())
    operator = authority.issue(Role.OPERATOR, "ops")
    client: GrpcClient | None = None
    try:
        await node.start()
        await node.load("a1", KEY, relu_file)
        await node.configure()
        client = node.grpc_client(authority.issue(Role.TENANT, "acme"))
        await wait_all_served(node, client, "a1")
        pid = node.worker_pid("a1")
        os.kill(pid, signal.SIGSTOP)
        history = CallHistory()
        waiting = [asyncio.create_task(send_request(client, history, number)) for number in range(1, 5)]
        await until(lambda: _more(node, "a1", 4), 10, "the queue is full")
        x = Tensor("x", "FP32", (1, 4), bytes(16))
        for way in (client, node.rest_client(authority.issue(Role.TENANT, "acme"))):
            with pytest.raises(InferenceError) as full:
                await way.infer("relu", (x,), timeout=5)
            assert (full.value.status, full.value.code) in {("UNAVAILABLE", Code.OVERLOADED), (503, Code.OVERLOADED)}
            assert int(full.value.retry_after_ms) > 0
        with pytest.raises(InferenceError):
            await client.infer("hunter2", (x,), timeout=5)
        text = await asyncio.to_thread(scrape, metrics_port, operator)
        check_page(text, agent_metrics.FRONT)
        assert "hunter2" not in text, "a name that a client chose"
        assert 'shoal_front_refusals_total{code="OVERLOADED"} 2.0' in text
        assert "shoal_front_in_flight 4.0" in text
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        verdict = check_histories([history], answer_of)
        assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
        (ingress,) = (await node.front.stats()).ingress
        assert (ingress.refused, ingress.lost) == (2, 0)
        assert ingress.requests == ingress.answered + 2
    finally:
        if client is not None:
            await client.close()
        await node.stop()


def scrape(port: int, files: CertificateFiles) -> str:
    """The metrics page, which asks for a certificate."""
    strict = ssl.create_default_context(cafile=str(files.authority))
    with pytest.raises((ssl.SSLError, OSError)):
        urllib.request.urlopen(f"https://localhost:{port}/metrics", context=strict, timeout=5)
    strict.load_cert_chain(files.certificate, files.key)
    with urllib.request.urlopen(f"https://localhost:{port}/metrics", context=strict, timeout=5) as page:
        return str(page.read().decode())

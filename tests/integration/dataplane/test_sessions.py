"""Sessions of a stateful workload at real fronts with real workers: state kept, replayed, pinned, handed over."""

import asyncio
import json
import os
import signal
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from harness.clients.oip import GrpcClient, InferenceError, Tensor, step_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models import engine_cases
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.ports import StatefulReplica
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.migration import Handover, SessionSource
from shoal.types.route import Endpoint, Route
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey
from shoal.v1 import sessions_pb2
from shoal.wire import grpcio_status, nouns

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = WorkloadKey("acme", "summing")
OLD, NEW = "a-old", "a-new"
STATE = {"s": "sn"}
LEASE_S = Seconds(300.0)
WAIT_S = 30.0


@dataclass
class Three:
    """Node `old` has the workload's replica, `new` another; `way` has none and sends requests on."""

    folder: Path
    old: DataPlaneNode
    new: DataPlaneNode
    router: DataPlaneNode

    async def configure(
        self, endpoints: tuple[tuple[DataPlaneNode, str, float], ...], **stateful_replicas: StatefulReplica
    ) -> None:
        """endpoints: of the route, with their weights. keepers: by node, where not as always."""
        for node in (self.old, self.new, self.router):
            listed: tuple[Endpoint, ...] = tuple(
                each.endpoint(name, at=node, weight=weight) for each, name, weight in endpoints
            )
            always = [StatefulReplica(name, KEY, STATE) for name in node.models]
            kept = (stateful_replicas[node.name],) if node.name in stateful_replicas else tuple(always)
            await node.configure([Route(KEY, 1, listed, stateful=True)], stateful_replicas=kept)

    def handing(self, source: DataPlaneNode, name: str, to: DataPlaneNode, other: str) -> dict[str, StatefulReplica]:
        """What the two are told while `source` hands its sessions to `to`."""
        address = f"127.0.0.1:{to.front.config.port}"
        return {
            source.name: StatefulReplica(name, KEY, STATE, Handover("m-1", other, to.name, address)),
            to.name: StatefulReplica(other, KEY, STATE, handover_sources=(SessionSource("m-1", source.name),)),
        }

    async def busy(self) -> bool:
        """Whether a request is with the old node's worker."""
        return any(count for _, count in (await self.old.front.stats()).in_flight)

    async def none_at(self, node: DataPlaneNode) -> bool:
        return await self.sessions(node) == 0

    async def sessions(self, node: DataPlaneNode) -> int:
        return sum(count for _, count in (await node.front.stats()).sessions)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Three]:
    folder = tmp_path_factory.mktemp("sessions")
    authority = Authority(folder / "ca", "eu", SystemClock().wall())
    old, new, way = (DataPlaneNode(name, authority, folder / name) for name in ("old", "new", "way"))
    model = folder / "summing.onnx"
    model.write_bytes(engine_cases.summing())
    try:
        await asyncio.gather(old.start(), new.start(), way.start())
        await asyncio.gather(old.load(OLD, KEY, model), new.load(NEW, KEY, model))
        made = Three(folder, old, new, way)
        await made.configure(((old, OLD, 1.0),))
        for node in (old, new, way):
            await node.front.lease(LEASE_S, "")
        yield made
    finally:
        await asyncio.gather(old.stop(), new.stop(), way.stop())


class Stream:
    """One client's session: each step adds its number. told: what it was answered, step by step."""

    def __init__(self, client: GrpcClient, sequence: int | str) -> None:
        self.client = client
        self.sequence = sequence
        self.told: list[float] = []

    async def step(self, *, end: bool = False, **options: Any) -> float:
        count = len(self.told) + 1
        start = options.pop("start", not self.told)
        x = Tensor("x", "FP32", (1, 2), struct.pack("<2f", float(count), 1.0))
        request = step_request("summing", (x,), self.sequence, start=start, end=end, **options)
        answer = await self.client.send(request)
        assert [each.name for each in answer.outputs] == ["y"], answer  # no client ever sees state
        total, steps = struct.unpack("<2f", answer.outputs[0].raw)
        self.told.append(total)
        assert steps == len(self.told), (steps, self.told)
        return float(total)

    def has(self, count: int) -> bool:
        return len(self.told) >= count

    def right(self) -> bool:
        return self.told == [n * (n + 1) / 2 for n in range(1, len(self.told) + 1)]


def client_of(three: Three, node: DataPlaneNode) -> GrpcClient:
    return node.grpc_client(three.old.authority.issue(Role.TENANT, "acme"))


async def test_state_stays_at_the_front_and_no_client_sees_it(three: Three) -> None:
    client = client_of(three, three.old)
    streams = [Stream(client, number) for number in (1, 2, "three")]
    for _ in range(5):
        await asyncio.gather(*(stream.step() for stream in streams))
    assert all(stream.right() for stream in streams)
    said = await client.model("summing")
    assert [each["name"] for each in (*said["inputs"], *said["outputs"])] == ["x", "y"]
    assert await three.sessions(three.old) == 3
    for stream in streams:
        await stream.step(end=True)
    assert await three.sessions(three.old) == 0
    with pytest.raises(InferenceError, match="SESSION_LOST"):
        await streams[0].step()
    with pytest.raises(InferenceError, match="SESSION_INVALID"):
        await client.infer("summing", (Tensor("x", "FP32", (1, 2), bytes(8)),))
    with pytest.raises(InferenceError, match="SESSION_INVALID"):
        await client.send(step_request("summing", (Tensor("s", "FP32", (1, 2), bytes(8)),), 9, start=True))


async def test_a_step_that_is_sent_again_is_not_run_again(three: Three) -> None:
    stream = Stream(client_of(three, three.old), 21)
    for number in (1, 2, 3):
        await stream.step(step=number)
    stream.told.pop()
    assert await stream.step(step=3) == 6.0
    with pytest.raises(InferenceError, match="SESSION_STEP"):
        await stream.step(step=7)
    assert await stream.step(step=4, end=True) == 10.0


async def test_a_session_stays_where_it_began_whatever_front_is_asked(three: Three) -> None:
    await three.configure(((three.old, OLD, 1.0), (three.new, NEW, 1.0)))
    streams = [Stream(client_of(three, three.router), number) for number in range(100, 120)]
    for _ in range(3):
        await asyncio.gather(*(stream.step() for stream in streams))
    assert await three.sessions(three.old) + await three.sessions(three.new) == 20
    assert await three.sessions(three.old) > 2 < await three.sessions(three.new)
    for stream in streams:  # fronts that have never heard of them
        stream.client = client_of(three, three.new)
    await asyncio.gather(*(stream.step() for stream in streams))
    await asyncio.gather(*(stream.step(end=True) for stream in streams))
    assert all(stream.right() for stream in streams)
    await three.configure(((three.old, OLD, 1.0),))


async def test_a_worker_that_is_killed_under_a_step_replays_it_once(three: Three) -> None:
    stream = Stream(client_of(three, three.router), 31)
    await stream.step()
    await stream.step()
    pid = json.loads(Path(three.old.local_worker(OLD).socket).with_suffix(".json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(stream.step())
    await until(three.busy, WAIT_S, "the step to be with the worker")
    os.kill(pid, signal.SIGKILL)
    await until(lambda: OLD not in three.old.models, WAIT_S, "the worker's end to be seen")
    await three.configure(((three.old, OLD, 1.0),), old=StatefulReplica(OLD, KEY, STATE))
    await three.old.load(OLD, KEY, three.folder / "summing.onnx")
    await three.configure(((three.old, OLD, 1.0),))
    assert await waiting == 6.0
    assert await stream.step(end=True) == 10.0
    assert stream.right()


async def test_sessions_go_to_another_front_while_they_stream_and_back(three: Three) -> None:
    ways = [client_of(three, each) for each in (three.router, three.old, three.new)]
    streams = [Stream(ways[number % 3], number) for number in range(200, 230)]
    await asyncio.gather(*(stream.step() for stream in streams))
    stopped = asyncio.Event()

    async def go_on(stream: Stream) -> None:
        while not stopped.is_set():
            await stream.step()

    running = [asyncio.create_task(go_on(stream)) for stream in streams]
    for source, name, to, other in ((three.old, OLD, three.new, NEW), (three.new, NEW, three.old, OLD)) * 2:
        ends = ((source, name, 0.0), (to, other, 1.0))
        await three.configure(ends, **three.handing(source, name, to, other))

        async def have_moved(source: DataPlaneNode = source, to: DataPlaneNode = to) -> bool:
            return (await three.sessions(source), await three.sessions(to)) == (0, len(streams))

        await until(have_moved, WAIT_S, f"every session to be at {to.name}")
        counts = [len(stream.told) + 3 for stream in streams]

        def gone_on(counts: list[int] = counts) -> bool:
            return all(map(Stream.has, streams, counts))

        await until(gone_on, WAIT_S, "each to go on")
    stopped.set()
    await asyncio.gather(*running)
    assert all(stream.right() for stream in streams)
    await asyncio.gather(*(stream.step(end=True) for stream in streams))
    await three.configure(((three.old, OLD, 1.0),))


async def stops(node: DataPlaneNode, stream: Stream) -> bool:
    """Whether its front begins no session any more, which is when the lease has ended."""
    try:
        await Stream(stream.client, "another").step(end=True)
    except InferenceError as error:
        return error.code == Code.LEASE_ENDED
    return False


async def test_the_end_of_the_lease_stops_every_session_until_it_is_extended(three: Three) -> None:
    """They go on under the same claim, and have ended under another: the region gave the node up meanwhile."""
    lone = DataPlaneNode("lone", three.old.authority, three.folder / "lone")
    try:
        await lone.start()
        await lone.load("a-lone", KEY, three.folder / "summing.onnx")
        route = Route(KEY, 1, (lone.endpoint("a-lone"),), stateful=True)
        await lone.configure([route], stateful_replicas=(StatefulReplica("a-lone", KEY, STATE),))
        stream = Stream(client_of(three, lone), 1)
        with pytest.raises(InferenceError, match="LEASE_ENDED"):
            await stream.step()
        for _ in range(2):
            await lone.front.lease(Seconds(1.0), "first")
            await stream.step()
            await until(lambda: stops(lone, stream), WAIT_S, "the lease to end")
        waiting = asyncio.ensure_future(stream.step())
        await lone.front.lease(Seconds(3.0), "first")
        await waiting
        await until(lambda: stops(lone, stream), WAIT_S, "the lease to end")
        await lone.front.lease(LEASE_S, "second")
        with pytest.raises(InferenceError, match="SESSION_LOST"):
            await stream.step()
        assert await Stream(client_of(three, lone), 1).step(start=True) == 1.0
    finally:
        await lone.stop()


async def test_nobody_but_the_named_giver_hands_a_session_over(three: Three) -> None:
    endpoints = ((three.old, OLD, 1.0),)
    await three.configure(endpoints, **three.handing(three.old, OLD, three.new, NEW))
    offer = sessions_pb2.SessionOffer(
        migration="m-1", to=NEW, workload=nouns.to_wire(KEY), sequence="1", run="r", step=1, hands=1
    )
    for role, name in ((Role.AGENT, "way"), (Role.TENANT, "acme"), (Role.GATEWAY, "old")):
        client = three.new.grpc_client(three.old.authority.issue(role, name))
        call = client.channel.unary_unary("/shoal.v1.Sessions/Offer", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(offer.SerializeToString(), timeout=10)
        assert grpcio_status.refusal_of(caught.value).code is Code.ROLE_DENIED, (role, name)
    assert await three.none_at(three.new)
    await three.configure(endpoints)


async def test_a_session_that_is_not_taken_stays_and_goes_on(three: Three) -> None:
    stream = Stream(client_of(three, three.router), 400)
    await stream.step()
    endpoints = ((three.old, OLD, 1.0),)
    nobody = StatefulReplica(OLD, KEY, STATE, Handover("m-1", "a-none", "new", "127.0.0.1:1"))
    await three.configure(endpoints, old=nobody)
    for _ in range(3):
        await stream.step()
    assert await three.sessions(three.old) == 1
    await three.configure(endpoints)
    await stream.step(end=True)
    assert stream.right()

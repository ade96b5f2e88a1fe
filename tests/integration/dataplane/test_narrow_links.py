"""Two fronts, in one region or in two, on a road of 128 KiB/s: what is slow is not taken for dead, what is dead is.
And on one of 100 ms: those under way are not taken for those that wait."""

import asyncio
import os
import signal
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.faults.netns import NetnsNetwork, network
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.dataplane import process
from shoal.types.agreement import GUEST_TENANT
from shoal.types.assignment import PeerTrust
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.workload import WorkloadKey

pytestmark = pytest.mark.alone

KEY = WorkloadKey("acme", "plus")
AGREEMENT = "ag-1"
LINK_BYTES_PER_S = 128 * 2**10
"""Bytes a second, each way."""
LARGE = Tensor("x", "FP32", (2**18,), struct.pack("<f", 1.0) * 2**18)
DEADLINE_S = 30.0
FOUND_S = {"inside": 7.0, "afar": 10.0}
"""A road that broke, or a peer that was stopped, under a request that has been under way for three seconds."""


@pytest.fixture
def net() -> Iterator[NetnsNetwork]:
    with network(["near", "far"]) as found:
        yield found


@asynccontextmanager
async def fronts(
    folder: Path, net: NetnsNetwork, where: str, limits: AdmissionLimits | None = None
) -> AsyncIterator[tuple[DataPlaneNode, DataPlaneNode, GrpcClient]]:
    """A gateway, the one front that has a replica, and a client of the first. limits: the gateway's."""
    model = folder / "plus.onnx"
    model.write_bytes(engine_cases.add_one())
    now = SystemClock().wall()
    west = Authority(folder / "west", "west", now)
    east = Authority(folder / "east", "east", now) if where == "afar" else west
    hosts = {name: net.address(name) for name in ("near", "far")}
    near = DataPlaneNode(
        "g1", west, folder / "g1", Role.GATEWAY,
        host=hosts["near"], command_prefix=net.inside("near"), limits=limits or AdmissionLimits(),
    )  # fmt: skip
    role = Role.GATEWAY if where == "afar" else Role.AGENT
    far = DataPlaneNode("f1", east, folder / "f1", role, host=hosts["far"], command_prefix=net.inside("far"))
    client = None
    try:
        await asyncio.gather(near.start(), far.start())
        await far.load("a1", WorkloadKey(GUEST_TENANT, AGREEMENT) if where == "afar" else KEY, model)
        if where == "afar":
            wests = PeerTrust("west", (west.certificate.read_text(),), ("g1",), (AGREEMENT,))
            easts = PeerTrust("east", (east.certificate.read_text(),), ("f1",), ())
            await far.configure(peers=(wests,))
            address = f"{far.host}:{far.front.config.port}"
            way = Endpoint("a1", "f1", EndpointKind.GATEWAY, address, 1.0, EndpointState.READY, "east", AGREEMENT)
            await near.configure([Route(KEY, 1, (way,))], peers=(easts,))
        else:
            await far.configure()
            await near.configure([Route(KEY, 1, (far.endpoint("a1", at=near),))])
        client = near.grpc_client(west.issue(Role.TENANT, KEY.tenant))
        yield near, far, client
    finally:
        if client is not None:
            await client.close()
        await asyncio.gather(near.stop(), far.stop())


async def timed_infer(client: GrpcClient) -> tuple[str, float]:
    """A MiB there and a MiB back: what came of it, and in how many seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    try:
        answer = await client.infer(KEY.name, (LARGE,), timeout=DEADLINE_S)
        told = "right" if answer.outputs[0].raw == struct.pack("<f", 2.0) * 2**18 else "wrong"
    except InferenceError as error:
        told = error.code or str(error.status)
    return told, loop.time() - start


async def wait_third_sent(net: NetnsNetwork) -> None:
    """A third of a request has passed."""
    before = net.bytes_carried("far")
    await until(lambda: net.bytes_carried("far") - before > len(LARGE.raw) / 3, 20.0, "bytes on the road", every_s=0.1)


@pytest.mark.parametrize("where", [pytest.param("inside", marks=pytest.mark.long), "afar"])
async def test_f18_a_narrow_road_is_not_a_dead_one(
    tmp_path: Path, net: NetnsNetwork, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(process, "STUCK_S", DEADLINE_S)  # as if its supervisor were stopped with it
    loop = asyncio.get_running_loop()
    async with fronts(tmp_path, net, where) as (_, far, client):
        assert (await timed_infer(client))[0] == "right"
        with net.bandwidth_limit("far", LINK_BYTES_PER_S):
            told, took_s = await timed_infer(client)
            assert told == "right"
            assert took_s >= 2 * len(LARGE.raw) / LINK_BYTES_PER_S - 1.0, "it was narrow"

            inside = asyncio.create_task(timed_infer(client))
            await wait_third_sent(net)
            pid, start = far.front.pid, loop.time()
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                assert (await inside)[0] == Code.REPLICA_UNREACHABLE
                stopped_s = loop.time() - start
            finally:
                os.kill(pid, signal.SIGCONT)

        async def again() -> bool:
            return (await timed_infer(client))[0] == "right"

        await until(again, 20.0, "it is reached again")
        with net.bandwidth_limit("far", LINK_BYTES_PER_S):
            inside = asyncio.create_task(timed_infer(client))
            await wait_third_sent(net)
            start = loop.time()
            cut = net.isolate("far")
            assert (await inside)[0] == Code.REPLICA_UNREACHABLE
            cut_s = loop.time() - start
            assert net.packets_dropped(*cut) > 0
    print(took_s, stopped_s, cut_s)
    assert max(stopped_s, cut_s) <= FOUND_S[where]
    record(
        "F18", "P", 1, where=f"narrow road, {where}", bytes_per_s=LINK_BYTES_PER_S, request_s=round(took_s, 1),
        stopped_found_s=round(stopped_s, 2), cut_found_s=round(cut_s, 2),
    )  # fmt: skip


WAIT_AT_MOST, AT_ONCE = 8, 24
SMALL = Tensor("x", "FP32", (1,), struct.pack("<f", 1.0))


async def codes_under_load(
    client: GrpcClient, at_once: int, for_s: float, timeout_s: float = DEADLINE_S
) -> Counter[str]:
    """The codes of what was refused, "" for an answer, with so many requests under way all the time."""
    loop = asyncio.get_running_loop()
    end, told = loop.time() + for_s, Counter[str]()

    async def ask_on() -> None:
        while True:
            try:
                await client.infer(KEY.name, (SMALL,), timeout=timeout_s)
                told[""] += 1
            except InferenceError as error:
                told[error.code] += 1
            if loop.time() >= end:
                return

    await asyncio.gather(*(ask_on() for _ in range(at_once)))
    return told


async def test_those_on_a_long_road_take_nobody_s_place(tmp_path: Path, net: NetnsNetwork) -> None:
    """Three times as many as may wait: few of them wait where there and back takes 100 ms, all where nobody answers."""
    async with fronts(tmp_path, net, "inside", AdmissionLimits(per_replica=WAIT_AT_MOST)) as (_, _, client):
        with net.latency(0.05):
            for at_once in range(WAIT_AT_MOST, AT_ONCE + 1, 2):  # a load that grows
                told = await codes_under_load(client, at_once, 1.5)
                assert told.keys() == {""}, at_once
    (tmp_path / "next").mkdir()
    async with fronts(tmp_path / "next", net, "inside", AdmissionLimits(per_replica=WAIT_AT_MOST)) as (_, far, client):
        await codes_under_load(client, 1, 0.5)
        assert far.front.pid is not None
        os.kill(far.front.pid, signal.SIGSTOP)
        try:
            told = await codes_under_load(client, AT_ONCE, 0.0, timeout_s=1.0)
        finally:
            os.kill(far.front.pid, signal.SIGCONT)
        assert AT_ONCE / 3 <= told[Code.OVERLOADED] <= AT_ONCE - WAIT_AT_MOST

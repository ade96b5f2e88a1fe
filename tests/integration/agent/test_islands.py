"""A node that is cut off, killed, started again, with a clock that is wrong by years: it serves what it last held."""

import asyncio
import hashlib
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from harness.clients.oip import GrpcClient, InferenceError, RestClient, Tensor
from harness.cluster.agent_host import NODE, REGION, AgentHost, FakeCoordinator, assignment, ready
from harness.crypto.pki import Authority
from harness.faults.wall_clock import FakeWallClock
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.models import engine_cases
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Seconds, Wall
from shoal.wire.tls_files import NO_CHECK_TIME

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = engine_cases.add_one()
DIGEST = f"sha256:{hashlib.sha256(MODEL).hexdigest()}"
HOUR, DAY, YEAR = 3600, 86400, 31_536_000
ATTEMPTS = 3
SERVE_S, BEAT_S = 4.0, 1.0
"""Seconds: of `serve`, and of the beat that it may be wrong by, as shipped."""
TOKEN = "a-token-of-tenant-default"


class ClientIgnoringDates(RestClient):
    """A client that cannot tell what day it is either: it checks who answers, and no dates."""

    def context(self) -> ssl.SSLContext:
        context = super().context()
        context.verify_flags = ssl.VerifyFlags(int(context.verify_flags) | NO_CHECK_TIME)
        return context


@dataclass
class Island:
    coordinator: FakeCoordinator
    machine: AgentHost
    wall_clock: FakeWallClock
    authority: Authority
    input: Tensor
    right: bytes
    load_s: float = 0.0

    @property
    def generation(self) -> int:
        return self.coordinator.desired.version.generation if self.coordinator.desired else 0

    def want(self, **rule: object) -> None:
        token = Credential("default", hashlib.sha256(TOKEN.encode()).hexdigest(), Wall(4e9))
        asked = assignment("a-one", "one", DIGEST, len(MODEL), **rule)
        self.coordinator.want(asked, generation=self.generation + 1, credentials=(token,))

    async def boot_linked(self, **rule: object) -> None:
        """Link and clock are right, and so is the identity; what it is told is in service. rule: of `partition`."""
        self.wall_clock.jump(0)
        sessions = len(self.coordinator.hellos)
        self.machine.identify(self.authority.issue(Role.AGENT, NODE))
        self.machine.lose_power()
        await self.coordinator.stop()
        await self.coordinator.start()
        self.want(**rule)
        await asyncio.to_thread(self.machine.start)
        await until(lambda: len(self.coordinator.hellos) > sessions, 20.0, "a session")
        await until(lambda: self.coordinator.version == self._version(), 20.0, "the set to be accepted")
        observed = await ready(self.coordinator, "a-one")
        assert observed.measured is not None
        self.load_s = observed.measured.load_s
        # Its front and its coordinator hear of a phase side by side, neither after the other.
        await until(self.by_token, 10.0, "its front to have heard too")

    def _version(self) -> object:
        return self.coordinator.desired.version if self.coordinator.desired else None

    async def cut(self) -> None:
        """Nobody listens at the coordinator's address any more."""
        before = len(self.machine.log())
        await self.coordinator.stop()
        await until(lambda: self.machine.log_lines("session_closed", before), 10.0, "the cut to be seen")

    async def boot(self, ask: Callable[[], Awaitable[bytes]]) -> float:
        """Power lost and back; seconds until `ask` is answered, which must be right, less what other programs took: of
        the supervisor's start, and of the front's and the worker's, which go side by side."""
        self.machine.lose_power()
        before = await asyncio.to_thread(startup_slowdown_s)
        clock, delay = SystemClock(), RunDelay(os.getpid())
        started = clock.now()
        starting = asyncio.create_task(asyncio.to_thread(self.machine.start))
        found: list[bytes] = []

        async def try_ask() -> list[bytes]:
            with suppress(InferenceError, OSError, EOFError):
                found.append(await ask())
            return found

        await until(try_ask, 30.0, "an answer on the island", every_s=0.05)
        away = clock.now() - started
        delay.add(self.machine.pid, *self.machine.workers().values())
        delayed = delay.seconds()
        await starting
        assert found == [self.right]
        return away - delayed - before - await asyncio.to_thread(startup_slowdown_s)

    async def boots(self, ask: Callable[[], Awaitable[bytes]]) -> list[float]:
        """Boots until it was in time: other programs of the machine make a boot longer, never shorter."""
        aways: list[float] = []
        while len(aways) < ATTEMPTS and (not aways or min(aways) > self.load_s + 2.0):
            aways.append(await self.boot(ask))
        assert min(aways) <= self.load_s + 2.0, aways
        return aways

    async def by_rest(self, role: Role = Role.TENANT, valid_s: float = 3600.0) -> bytes:
        files = self.authority.issue(role, "default", valid_s=valid_s)
        return await self.ask(
            ClientIgnoringDates(self.machine.port("data"), self.authority.certificate.read_bytes(), files)
        )

    async def by_token(self) -> bytes:
        client = GrpcClient(self.machine.port("data"), self.authority.certificate.read_bytes(), bearer=TOKEN)
        try:
            return await self.ask(client)
        finally:
            await client.close()

    async def ask(self, client: GrpcClient | RestClient) -> bytes:
        return (await client.infer("one", [self.input], timeout=2.0)).outputs[0].raw


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def island(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Island]:
    folder = tmp_path_factory.mktemp("island")
    authority = Authority(folder / "ca", REGION, SystemClock().wall())
    coordinator = FakeCoordinator(authority.issue(Role.COORDINATOR, "coordinator"), {DIGEST: MODEL})
    await coordinator.start()
    machine = AgentHost(folder / "edge-1", authority, coordinator.address)
    wall = FakeWallClock(folder)
    machine.environment = wall.environment
    x = np.arange(4, dtype=np.float32)
    sent = Tensor("x", "FP32", x.shape, x.tobytes())
    made = Island(coordinator, machine, wall, authority, sent, (x + 1).tobytes())
    try:
        made.want()
        await asyncio.to_thread(machine.start)
        await ready(coordinator, "a-one")
        yield made
    finally:
        machine.lose_power()
        await coordinator.stop()


async def test_f21_cut_off_killed_and_rebooted_it_answers_from_what_it_holds(island: Island) -> None:
    await island.boot_linked()
    fetched = len(island.coordinator.fetched)
    await island.cut()
    aways = await island.boots(island.by_token)
    assert len(island.coordinator.fetched) == fetched, "the bytes were here"
    record("F21", "P", len(aways), away_s=round(min(aways), 2), load_s=round(island.load_s, 3))


async def test_what_it_held_serves_before_its_device_is_measured(island: Island) -> None:
    """Power lost before it was ever measured: that takes a core for seconds, which the replica has use for."""
    await island.boot_linked()
    await island.cut()
    island.machine.lose_power()
    for slot in (island.machine.folder / "journal").glob("receipts*"):
        slot.unlink()
    before = len(island.machine.log())
    await asyncio.to_thread(island.machine.start)
    await until(lambda: island.machine.log_lines("device_probed", before), 30.0, "the measurement")
    (probed,) = island.machine.log_lines("device_probed", before)
    (ready_at,) = (
        at(each) for each in island.machine.log_lines("replica_phase_changed", before) if each["phase"] == "ready"
    )
    assert ready_at < at(probed) - probed["duration_s"]


def at(logged: dict[str, Any]) -> float:
    return datetime.fromisoformat(logged["timestamp"]).timestamp()


@pytest.mark.parametrize("how", ["1970", "three days ahead", "three days behind", "certificate ran out"])
async def test_f28_a_wrong_clock_or_an_old_certificate_removes_nothing(island: Island, how: str) -> None:
    await island.boot_linked()
    now = SystemClock().wall()
    await island.cut()
    match how:
        case "1970":
            island.wall_clock.jump(-int(now))
        case "three days ahead":
            island.wall_clock.jump(3 * DAY)
        case "three days behind":
            island.wall_clock.jump(-3 * DAY)
        case _:
            island.machine.identify(island.authority.issue(Role.AGENT, NODE, valid_s=-60.0))
    before = len(island.machine.log())
    aways = await island.boots(island.by_rest)
    if how != "certificate ran out":
        assert await island.by_token() == island.right
        await until(lambda: _is_logged(island, Code.CLOCK_SKEW, before), 5.0, "the jump to be told")
    assert not [
        each
        for each in island.machine.log_lines("replica_phase_changed", before)
        if each["phase"] in ("draining", "gone")
    ]
    record("F28", "P", len(aways), how=how, away_s=round(min(aways), 2), load_s=round(island.load_s, 3), removed=0)


def _is_logged(island: Island, code: Code, since: int) -> bool:
    return any(each["code"] == code for each in island.machine.log_lines("node_event_reported", since))


async def seconds_until_refused(island: Island, started: float) -> float:
    """Seconds from `started` until requests are refused for want of a replica."""
    clock = SystemClock()

    async def is_refused() -> bool:
        try:
            await island.by_token()
        except InferenceError as failed:
            return failed.code == Code.MODEL_NOT_READY
        return False

    await until(is_refused, 20.0, "it to stop serving", every_s=0.05)
    return clock.now() - started


@pytest.mark.parametrize("jumps", [(), (HOUR, -HOUR, YEAR, -YEAR)], ids=["", "f26"])
async def test_serve_ends_by_its_rule_and_goes_on_with_the_link(island: Island, jumps: tuple[int, ...]) -> None:
    """`partition.serve`: elapsed time from the coordinator's last word on, whatever the wall clock says meanwhile."""
    await island.boot_linked(serve_s=Seconds(SERVE_S))
    fetched = len(island.coordinator.fetched)
    before = len(island.machine.log())
    await island.coordinator.stop()
    cut_at, delay = SystemClock().now(), RunDelay(os.getpid(), island.machine.pid)
    for seconds in jumps:
        island.wall_clock.jump(seconds)
        assert await island.by_token() == island.right
    ended_s, delayed_s = await seconds_until_refused(island, cut_at), delay.seconds()
    island.wall_clock.jump(0)
    assert SERVE_S - BEAT_S <= ended_s <= SERVE_S + BEAT_S + delayed_s, (ended_s, delayed_s)
    await until(lambda: "gone" in phases(island, before), 10.0, "the worker's end")
    await island.coordinator.start()
    await until(island.by_token, 20.0, "service with the link")
    assert len(island.coordinator.fetched) == fetched, "the bytes were kept"
    if jumps:
        record("F26", "P", 1, lease_s=SERVE_S, jumps=len(jumps), wrong_by_s=round(abs(ended_s - SERVE_S), 2))


async def test_cold_boot_wait_starts_nothing_until_the_coordinator_is_heard(island: Island) -> None:
    """`partition.cold_boot: wait`."""
    await island.boot_linked(cold_boot_serve=False)
    fetched = len(island.coordinator.fetched)
    await island.cut()
    assert await island.by_token() == island.right, "what runs goes on"
    island.machine.lose_power()
    before = len(island.machine.log())
    await asyncio.to_thread(island.machine.start)
    await seconds_until_refused(island, SystemClock().now())
    failed = "coordinator_connection_failed"
    await until(lambda: len(island.machine.log_lines(failed, before)) > 2, 20.0, "it to have called in vain")
    assert phases(island, before) == []
    await island.coordinator.start()
    await until(island.by_token, 20.0, "service with the link")
    assert len(island.coordinator.fetched) == fetched


def phases(island: Island, since: int) -> list[str]:
    return [each["phase"] for each in island.machine.log_lines("replica_phase_changed", since)]

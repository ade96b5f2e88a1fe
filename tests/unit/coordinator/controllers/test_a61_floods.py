"""A61: an agent that floods events, logs and statuses. Others' entries stay, and its messages are counted before
anything else."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.controller import HELLO_BURST, HELLOS_PER_S
from shoal.coordinator.controllers.fleet.node_events import EVENT_BURST, MESSAGE_MOST
from shoal.coordinator.controllers.log.events import AUDIT, NODE_EVENTS_KEPT, AuditEntry, EventLog, LogEvent
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.rate_limit import MESSAGE_BURST, MESSAGES_PER_S
from shoal.coordinator.link.rate_limiter import SessionRateLimiter
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.link import LogLines, NodeEvent, NodeEvents, Welcome
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey
from shoal.wire import nouns

FORGED = NodeEvent("NODE_REVOKED", "edge-2", "x" * 4000, Wall(0.0))
SAMPLE = Observed(
    "a", WorkloadKey("default", "w"), "sha256:0", "cpu0", Phase.FAILED, Wall(0.0), Code.LOAD_FAILED, "no", None, None,
    0, 0, None, (),
)  # fmt: skip
READ_S = 0.25
"""CPU seconds at most for one message of 4 MiB that is refused by its count."""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def test_a61_one_agents_flood_pushes_out_nobody_elses_entries(world: RegionFixture) -> None:
    liar, other = FakeAgent(world, "liar"), FakeAgent(world, "other")
    await other.connect()
    await liar.connect()
    before = [event for event in await world.region.events.events_after(0, 10_000) if event.node != "liar"]
    for _ in range(60):
        await world.region.fleet.on_message("liar", liar.epoch, NodeEvents((FORGED,) * 256))
        world.clock.advance(60.0)
    after = await world.region.events.events_after(0, 100_000)
    assert [event for event in after if event.node != "liar"] == before
    said = [event for event in after if event.actor == "agent liar"]
    assert EVENT_BURST <= len(said) + 4 <= NODE_EVENTS_KEPT + 4
    assert {event.code for event in said} == {Code.CODE_UNKNOWN}, "words of the coordinator's are nobody else's"
    assert {len(event.message) for event in said} == {MESSAGE_MOST}
    audited = [codec.load(AuditEntry, each.value) for each in await world.store.scan(AUDIT)]
    told = [each for each in audited if (each.actor, each.outcome) == ("agent liar", Code.OVERLOADED)]
    assert 1 <= len(told) <= 60, "one a minute"
    assert world.region.fleet.fleet.nodes["other"].liveness is not Liveness.LOST


async def test_a58_a_refused_forward_is_in_the_events_and_the_audit_log(world: RegionFixture) -> None:
    keeper = FakeAgent(world, "keeper")
    await keeper.connect()
    told = NodeEvent(Code.FORWARD_DENIED, "thief", "1 requests that it forwarded were refused", Wall(0.0))
    await world.region.fleet.on_message("keeper", keeper.epoch, NodeEvents((told,)))
    (event,) = [each for each in await world.region.events.events_after(0, 100) if each.code == Code.FORWARD_DENIED]
    assert (event.actor, event.subject) == ("agent keeper", "thief")
    (entry,) = [codec.load(AuditEntry, each.value) for each in await world.store.scan(AUDIT)]
    assert (entry.actor, entry.action, entry.subject) == ("agent keeper", "DenyForward", "thief")
    assert entry.outcome == Code.FORWARD_DENIED


async def test_a61_failures_in_statuses_count_to_the_same_share(world: RegionFixture) -> None:
    liar = FakeAgent(world, "liar")
    await liar.connect()
    await world.push()
    for number in range(40):
        liar.observed = tuple(replace(SAMPLE, assignment=f"a-{each}", restarts=number) for each in range(50))
        await liar.report()
        await world.region.fleet.tick()
    said = [event for event in await world.region.events.events_after(0, 100_000) if event.actor == "agent liar"]
    assert 0 < len(said) <= NODE_EVENTS_KEPT


async def test_a61_a_restart_counts_what_is_kept(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "store", reserve_bytes=0)
    clock = (await RegionFixture.open(tmp_path / "clock")).clock
    log = EventLog(store, clock, kept=100, audit_kept=100)
    for _ in range(3):
        log = EventLog(store, clock, kept=100, audit_kept=100)
        await log.start()
        for number in range(80):
            await log.write(LogEvent("PLACED", "w", str(number)))
            await log.write(*(LogEvent(Code.LOAD_FAILED, "a", "", "agent liar", "liar") for _ in range(8)))
    kept = await log.events_after(0, 100_000)
    assert sum(event.code == "PLACED" for event in kept) == 100
    assert sum(event.node == "liar" for event in kept) == 100
    await store.close()


@pytest.mark.parametrize(
    "message",
    [
        NodeEvents((NodeEvent("X", "", "", Wall(0.0)),) * 300_000),
        LogLines(1, ("",) * 1_000_000, "", False),
    ],
    ids=["events", "logs"],
)
def test_a61_a_message_of_many_parts_is_refused_by_its_count(message: NodeEvents | LogLines) -> None:
    sent = nouns.from_agent_to_wire(message).SerializeToString()
    received = type(nouns.from_agent_to_wire(message)).FromString(sent)
    began = time.process_time()
    with pytest.raises(ShoalError, match=Code.MESSAGE_INVALID):
        nouns.from_agent_from_wire(received)
    assert time.process_time() - began < READ_S


async def test_a61_messages_beyond_a_nodes_pace_wait() -> None:
    loop, pace = asyncio.get_running_loop(), SessionRateLimiter()
    began = loop.time()
    for _ in range(MESSAGE_BURST):
        await pace.wait()
    assert loop.time() - began < 1.0
    for _ in range(10):
        await pace.wait()
    assert loop.time() - began >= 9 / MESSAGES_PER_S


async def test_a61_a_node_that_opens_session_after_session_is_slowed_and_no_other(world: RegionFixture) -> None:
    liar, other = FakeAgent(world, "liar"), FakeAgent(world, "other")
    for _ in range(HELLO_BURST):
        assert isinstance(await liar.connect(), Welcome)
        await world.region.fleet.on_close("liar", liar.epoch)
    answers = [await liar.connect() for _ in range(10)]
    told = [event for event in await world.region.events.events_after(0, 10_000) if event.code == Code.OVERLOADED]
    assert len(told) == 1, "once a minute"
    answer = answers[-1]
    assert isinstance(answer, Refusal)
    assert answer.code is Code.OVERLOADED
    assert isinstance(await other.connect(), Welcome)
    world.clock.advance(1 / HELLOS_PER_S)
    assert isinstance(await liar.connect(), Welcome), "it comes back by itself"

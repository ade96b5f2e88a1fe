"""The queue of moves over a real store: what waits, what begins, what ends, and what a restart and an older version
find."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from harness.fakes.meter import RecordedMeter
from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture, run_heartbeat, run_until_over, two_agents
from shoal.coordinator import codec
from shoal.coordinator.api.migrations import migration_views
from shoal.coordinator.controllers.workloads import placement_queries
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.controllers.workloads.move_queue import QUEUE
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.estimate import estimate_move
from shoal.coordinator.core.migration.model import Migration, MigrationStage, ReplicaPlace
from shoal.coordinator.core.migration.queue import (
    KEPT,
    LONGEST_S,
    MOST,
    MOST_OF_TENANT,
    QUEUED,
    WAIT_S,
    DocumentRevision,
    QueuedMove,
    entry_refusal,
    next_look,
    to_forget,
)
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.metrics import MIGRATIONS_ENDED
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.units import Bytes, Elapsed, Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import operator_pb2

T = TypeVar("T")

KEY = WorkloadKey("default", "reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def look(world: RegionFixture, times: int = 3) -> None:
    """Ticks of the region's loop, far enough apart for a look each."""
    for _ in range(times):
        world.clock.advance(2.5)
        await world.region.queued_moves.tick()
        await asyncio.sleep(0)  # noqa: TID251 - one turn of the loop, for the look
        await world.region.queued_moves.tick()


async def queue_move(world: RegionFixture, aim: str, key: WorkloadKey = KEY, replica: str = "") -> QueuedMove:
    found = await world.region.queued_moves.migrate(key, Aim(aim), "ops", replica=replica)
    assert isinstance(found, QueuedMove)
    return found


async def test_a_move_that_nothing_refuses_begins_at_once(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    begun = await world.region.queued_moves.migrate(KEY, Aim(target.name), "ops")
    assert isinstance(begun, Migration)
    assert not await world.store.scan(QUEUE)


async def test_a_move_waits_until_its_node_takes_work(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert refused.value.code is Code.NODE_CORDONED
    waits = await queue_move(world, target.name)
    assert waits.reason.code is Code.NODE_CORDONED
    await look(world)
    assert world.region.workloads.queue.waiting == [waits]
    assert not world.region.workloads.migrations.all
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    assert not world.region.workloads.queue.all
    assert not await world.store.scan(QUEUE), "it left the queue in the transaction that began it"
    begun = world.region.moves.get(waits.id)
    assert begun.reason.startswith("queued for")
    ended = await run_until_over(world, begun, source, target)
    assert ended.stage is MigrationStage.DONE
    assert ended.verdict is not None
    assert ended.verdict.passed


async def test_a_move_waits_for_room_over_a_restart(world: RegionFixture, tmp_path: Path) -> None:
    source, target = await two_agents(world)
    await target.report(free_bytes=0)
    waits = await queue_move(world, target.name)
    assert waits.reason.code is Code.MEMORY_SHORT
    await look(world)
    await world.store.close()
    now = await RegionFixture.open(tmp_path / "first", world)
    assert now.region.workloads.queue.waiting == [waits], "it is stored"
    for agent in (source, target):
        agent.world = now
        await agent.connect()
    await now.step()
    for agent in (source, target):
        await agent.apply_desired()
    await target.report(free_bytes=0)
    await look(now)
    assert now.region.workloads.queue.waiting == [waits]
    assert now.region.workloads.queue.reason_of(waits).code is Code.MEMORY_SHORT
    for agent in (source, target):
        await agent.report()
    await look(now)
    ended = await run_until_over(now, now.region.moves.get(waits.id), source, target)
    assert ended.stage is MigrationStage.DONE
    assert ended.verdict is not None
    assert ended.verdict.migration == waits.id
    await now.store.close()


async def test_a_busy_replica_waits_for_the_end_of_its_move(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    first = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    waits = await queue_move(world, source.name)
    assert waits.reason.code is Code.CONFLICT
    await look(world)
    assert (await run_until_over(world, first, source, target)).stage is MigrationStage.DONE
    await look(world)
    ended = await run_until_over(world, world.region.moves.get(waits.id), source, target)
    assert ended.stage is MigrationStage.DONE
    assert ended.target is not None
    assert ended.target.node == source.name


async def test_what_never_can_begin_is_refused_at_once(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    ((name, text),) = DOCUMENTS
    bound = text.replace("optimize:", f"""require: {{where: 'node.name == "{source.name}"'}}, optimize:""")
    applied = await world.region.documents.apply([(name, bound)], {}, "", "test")
    assert not applied.plan_result.problems
    await world.step()
    with pytest.raises(ShoalError) as refused:
        await queue_move(world, target.name)
    assert refused.value.code is Code.SELECTOR_MISMATCH, "a cordon passes, a selector does not"
    for aim, code in ((Aim("nobody"), Code.NODE_UNKNOWN), (Aim(target.name, "gpu7"), Code.NOT_FOUND)):
        with pytest.raises(ShoalError) as refused:
            await world.region.queued_moves.migrate(KEY, aim, "ops")
        assert refused.value.code is code
    with pytest.raises(ShoalError) as refused:
        await queue_move(world, source.name)
    assert "is on" in refused.value.refusal.found
    with pytest.raises(ShoalError) as refused:
        await queue_move(world, target.name, replica="a-none")
    assert refused.value.code is Code.NOT_FOUND
    assert not world.region.workloads.queue.all


@pytest.mark.parametrize(
    ("relax", "code"),
    [
        ("", Code.COST_OVER),
        ("relax: [{limits: {cost: 3 USD/h}}],", Code.COST_OVER),
        ("relax: [{limits: {cost: 10 USD/h}}],", None),
    ],
)
async def test_a_move_may_wait_for_what_a_relaxed_level_admits(
    world: RegionFixture, relax: str, code: Code | None
) -> None:
    """A start tries every level, so hope does too, and what it waits for is what the last one lacks."""
    await world.push()
    source, target = FakeAgent(world, "edge-1"), FakeAgent(world, "edge-2")
    for agent, price in ((source, 1), (target, 5)):
        await agent.connect()
        await world.region.fleet.label(agent.name, {"price": f"{price} USD/h"}, set(), "ops")
    ((name, text),) = DOCUMENTS
    asked = f"limits: {{cost: 2 USD/h}}, {relax} optimize:"
    applied = await world.region.documents.apply([(name, text.replace("optimize:", asked))], {}, "", "test")
    assert not applied.plan_result.problems, applied.plan_result.problems
    await world.step()
    for _ in range(3):
        await run_heartbeat(world, source, target)
    assert world.region.workloads.desired[source.name].assignments
    await target.report(free_bytes=0)
    if code is not None:
        with pytest.raises(ShoalError) as refused:
            await queue_move(world, target.name)
        assert refused.value.code is code
        return
    waits = await queue_move(world, target.name)
    await look(world)
    assert world.region.workloads.queue.reason_of(waits).code is Code.MEMORY_SHORT
    await target.report()
    await look(world)
    ended = await run_until_over(world, world.region.moves.get(waits.id), source, target)
    assert ended.stage is MigrationStage.DONE


async def test_a_device_that_is_too_small_for_it_alone_is_no_hope(world: RegionFixture) -> None:
    """What others hold may go, what the device never had does not come."""
    _, target = await two_agents(world)
    await target.report(free_bytes=0)
    state = world.region.fleet.fleet.nodes[target.name]
    small = replace(state.node, devices=tuple(replace(each, memory_bytes=Bytes(1000)) for each in state.node.devices))
    world.region.fleet.fleet = world.region.fleet.fleet.with_node(replace(state, node=small))
    with pytest.raises(ShoalError) as refused:
        await queue_move(world, target.name)
    assert refused.value.code is Code.MEMORY_SHORT
    assert not world.region.workloads.queue.all


async def test_a_node_that_has_not_reported_yet_is_waited_for_and_a_gateway_is_not(
    world: RegionFixture, tmp_path: Path
) -> None:
    source, target = await two_agents(world)
    await world.store.close()
    now = await RegionFixture.open(tmp_path / "first", world)
    door = FakeAgent(now, "door", role=Role.GATEWAY)
    source.world = target.world = now
    for agent in (source, door):
        await agent.connect()
    await now.step()
    await source.apply_desired()
    waits = await queue_move(now, target.name)
    assert waits.reason.code is Code.NODE_NOT_READY
    with pytest.raises(ShoalError) as refused:
        await queue_move(now, door.name, replica=waits.source.assignment)
    assert refused.value.code is Code.CONFLICT, "the replica waits already"
    await now.region.queued_moves.cancel(waits.id, "ops")
    with pytest.raises(ShoalError) as refused:
        await queue_move(now, door.name)
    assert refused.value.code is Code.NO_CANDIDATE, "it has no device, and never will"
    waits = await queue_move(now, target.name)
    await look(now)
    assert now.region.workloads.queue.waiting == [waits]
    await target.connect()
    await now.step()
    for agent in (source, target):
        await agent.apply_desired()
    await look(now)
    ended = await run_until_over(now, now.region.moves.get(waits.id), source, target)
    assert ended.stage is MigrationStage.DONE
    await now.store.close()


async def test_a_queued_move_is_taken_back(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    with pytest.raises(ShoalError) as refused:
        await world.region.queued_moves.cancel(waits.id, "ops", WorkloadKey("shop", "reader"))
    assert refused.value.code is Code.MIGRATION_UNKNOWN, "another tenant's move is none of its business"
    with pytest.raises(ShoalError) as refused:
        await world.region.queued_moves.cancel(waits.id, "ops", WorkloadKey("default", "other"))
    assert refused.value.code is Code.CONFLICT
    ended = await world.region.queued_moves.cancel(waits.id, "ops", KEY)
    assert (ended.stage, ended.is_over) == ("aborted", True)
    with pytest.raises(ShoalError) as refused:
        await world.region.queued_moves.cancel(waits.id, "ops", KEY)
    assert refused.value.code is Code.CONFLICT
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    assert not world.region.workloads.migrations.all
    told = [each for each in await world.region.events.events_after(0, 1000) if each.subject == waits.id]
    assert [each.code for each in told] == ["MIGRATION_QUEUED", "MIGRATION_ABORTED"]
    assert "MOVE_CANCELLED" in told[-1].message
    begun = await world.region.queued_moves.migrate(KEY, Aim(target.name), "ops")
    assert isinstance(begun, Migration)
    taken_back = await world.region.queued_moves.cancel(begun.id, "ops", KEY)
    assert taken_back.stage == "aborted"


async def test_a_move_that_waited_too_long_says_for_what(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    world.clock.advance(WAIT_S - 10)
    await look(world, 1)
    assert world.region.workloads.queue.waiting
    world.clock.advance(10)
    await look(world, 1)
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert ended.code is Code.MOVE_TIMEOUT
    assert "NODE_CORDONED" in ended.found


async def test_what_vanished_ends_it_and_fails_no_step(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await target.report(free_bytes=0)
    assignment = world.region.workloads.desired[source.name].assignments[0].id
    waits = await queue_move(world, target.name, replica=assignment)
    await world.region.documents.delete(DocumentKey("Workload", str(KEY)), "ops")
    for _ in range(4):
        await run_heartbeat(world, source)
    await look(world)
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert ended.code is Code.WORKLOAD_UNKNOWN
    applied = await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    assert not applied.plan_result.problems
    for _ in range(4):
        await run_heartbeat(world, source)
    assert world.region.workloads.desired[source.name].assignments[0].id != assignment
    with pytest.raises(ShoalError):
        await queue_move(world, target.name, replica=assignment)
    await target.report(free_bytes=0)
    waits = await queue_move(world, target.name)
    await world.region.fleet.on_close(target.name, target.epoch)
    await world.region.fleet.forget(target.name, "ops")
    await look(world)
    await world.step()
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert ended.code is Code.NODE_UNKNOWN
    told = [each.code for each in await world.region.events.events_after(0, 1000) if each.subject == waits.id]
    assert told == ["MIGRATION_QUEUED", "MIGRATION_ABORTED"]


async def test_a_move_of_a_silent_node_waits_and_one_of_a_lost_replica_ends(world: RegionFixture) -> None:
    """A node that is lost has its replica replaced elsewhere: what named the replica ends, and says so."""
    source, target = await two_agents(world)
    third = FakeAgent(world, "edge-3")
    await third.connect()
    await world.step()
    await world.region.fleet.cordon(target.name, True, "ops")
    assignment = world.region.workloads.desired[source.name].assignments[0].id
    waits = await queue_move(world, target.name, replica=assignment)
    for _ in range(200):
        world.clock.advance(0.5)
        for agent in (target, third):
            await agent.apply_desired()
        await world.step()
        await world.region.queued_moves.tick()
        if world.region.workloads.queue.all[waits.id].is_over:
            break
    assert world.region.fleet.fleet.nodes[source.name].liveness is Liveness.LOST
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert ended.code is Code.NOT_FOUND
    assert assignment in ended.found
    assert [one.workload for one in world.region.workloads.desired[third.name].assignments] == [KEY]


async def test_it_lifts_no_block_and_waits_for_its_end(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    first = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    for _ in range(3):
        await run_heartbeat(world, source, target)
    await world.region.moves.cancel(first.id, "ops")
    failed = await run_until_over(world, world.region.moves.get(first.id), source, target)
    assert failed.target is not None
    assert not failed.cleared
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    assert world.region.workloads.queue.reason_of(waits).code is Code.MOVE_BLOCKED
    assert not world.region.moves.get(first.id).cleared
    world.clock.advance(failed.rule.cooldown_s)
    for agent in (source, target):
        await agent.report()
    await world.step()
    await look(world)
    begun = world.region.moves.get(waits.id)
    assert not world.region.moves.get(first.id).cleared
    assert (await run_until_over(world, begun, source, target)).stage is MigrationStage.DONE


async def test_a_place_that_answered_wrongly_stays_blocked(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    target.answers_wrong = True
    first = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert (await run_until_over(world, first, source, target)).stage is MigrationStage.ABORTED
    target.answers_wrong = False
    waits = await queue_move(world, target.name)
    await look(world)
    world.clock.advance(1800.0)
    for agent in (source, target):
        await agent.report()
    await world.step()
    await look(world)
    assert world.region.workloads.queue.reason_of(waits).code is Code.VERIFY_FAILED
    await world.region.moves.clear("ocr", "ops")
    await look(world)
    assert world.region.moves.get(waits.id).stage is MigrationStage.PLANNED


async def test_it_is_listed_beside_migrations(world: RegionFixture) -> None:
    source, target = await two_agents(world, emulated=True)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)

    def views(name: str = "", tenant: str = "") -> list[operator_pb2.MigrationView]:
        region, now, wall = world.region, world.region.clock.now(), world.clock.wall()
        return migration_views(region.workloads, region.fleet.fleet, name, tenant, now, wall)

    (view,) = views(waits.id)
    assert (view.id, view.stage, view.to, view.to_stand_in) == (waits.id, "queued", target.name, "emulated")
    assert (view.source.node, view.cause, view.actor) == (source.name, "operator", "ops")
    assert view.reason.code == "NODE_CORDONED"
    assert view.gives_up_at == world.clock.wall() + WAIT_S
    assert [each.stage for each in view.stages] == ["queued"]
    assert views("reader", "default") == [view]
    assert not views("reader", "shop")
    await world.region.queued_moves.cancel(waits.id, "ops")
    (view,) = views()
    assert (view.stage, view.reason.code, view.gives_up_at) == ("aborted", "MOVE_CANCELLED", 0.0)
    assert [each.stage for each in view.stages] == ["queued", "aborted"]


async def test_an_earlier_version_reads_the_store(world: RegionFixture) -> None:
    """It scans what it knows. A move that began is stored as one that never waited."""
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    (record,) = await world.store.scan(QUEUE)
    assert codec.load(QueuedMove, record.value) == waits
    assert not await world.store.scan(MIGRATIONS)
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    ended = await run_until_over(world, world.region.moves.get(waits.id), source, target)
    begun = await world.region.moves.migrate(KEY, Aim(source.name), "ops")
    (stored,) = await world.store.scan(MIGRATIONS + waits.id)
    (usual,) = await world.store.scan(MIGRATIONS + begun.id)
    assert json.loads(stored.value).keys() == json.loads(usual.value).keys()
    assert ended.stages[0].stage is MigrationStage.PLANNED
    assert QUEUED not in tuple(MigrationStage), "a stage in a record is one of these"


async def test_a_full_store_takes_nothing_and_the_loop_goes_on(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    await world.region.fleet.cordon(target.name, False, "ops")

    async def full(*_: object, **__: object) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        await look(world)
        assert not world.region.workloads.migrations.all
        assert world.region.workloads.queue.all == {waits.id: waits}
    await look(world)
    assert (await run_until_over(world, world.region.moves.get(waits.id), source, target)).is_over


async def test_a_look_does_not_hold_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed beside it, one at a time, and the next one waits in proportion."""
    looks = list[asyncio.Future[None]]()

    async def compute(work: Callable[[], T], /) -> T:
        looks.append(asyncio.get_running_loop().create_future())
        await looks[-1]
        return work()

    spent = [0.0]
    world = await RegionFixture.open(tmp_path / "first", compute=compute, thread_time=lambda: spent[0])
    _, target = await two_agents(world)
    await target.report(free_bytes=0)
    waits = await queue_move(world, target.name)
    await look(world, 5)
    assert len(looks) == 1

    def work() -> None:
        spent[0] += 5.0

    monkeypatch.setattr(placement_queries, "estimate_move", partial(after, work, estimate_move))
    looks[0].set_result(None)
    await look(world, 1)
    assert world.region.workloads.queue.reason_of(waits).code is Code.MEMORY_SHORT
    await look(world, 15)
    assert len(looks) == 1, "it took 5 s of a processor, so the next one waits ten times as long"
    await look(world, 10)
    assert len(looks) == 2
    await world.store.close()


def after(work: Callable[[], object], wrapped: Callable[..., T], *args: object, **named: object) -> T:
    work()
    return wrapped(*args, **named)


def entry(number: int, tenant: str = "default", name: str = "", replica: str = "") -> QueuedMove:
    return QueuedMove(
        f"m-{tenant}-{number}", WorkloadKey(tenant, name or f"w{number}"), "ops", Aim("edge-1"), replica,
        ReplicaPlace("a-1", "edge-2", "cpu0", "sha256:0", "fp32"), Refusal(Code.MEMORY_SHORT), Wall(1.0 * number),
        Elapsed(1.0 * number), Elapsed(3600.0),
    )  # fmt: skip


def test_a_tenant_and_the_region_have_bounds_and_no_tenant_reads_another_one_s_moves() -> None:
    shop = [entry(number, "shop") for number in range(MOST_OF_TENANT)]
    full = entry_refusal(shop, WorkloadKey("shop", "another"), "")
    assert full is not None
    assert full.code is Code.QUEUE_FULL
    assert "shoal migrate w0 --cancel m-shop-0 --tenant shop" in full.remedy
    assert entry_refusal(shop, WorkloadKey("default", "w0"), "") is None, "another tenant has its own bound"
    assert entry_refusal(shop[1:], WorkloadKey("shop", "another"), "") is None
    ended = replace(shop[0], ended=Refusal(Code.MOVE_CANCELLED))
    assert entry_refusal([ended, *shop[1:]], WorkloadKey("shop", "another"), "") is None
    many = [entry(number, f"t{number // 8}") for number in range(MOST)]
    full = entry_refusal(many, WorkloadKey("shop", "another"), "")
    assert full is not None
    assert full.code is Code.QUEUE_FULL
    assert "m-" not in str(full)
    assert " t0" not in str(full)


def test_a_replica_waits_for_one_move() -> None:
    def code(*known: QueuedMove, replica: str) -> Code | None:
        found = entry_refusal(known, WorkloadKey("default", "w"), replica)
        return found.code if found is not None else None

    assert code(entry(1, name="w"), replica="") is Code.CONFLICT
    assert code(entry(1, name="w"), replica="a-1") is Code.CONFLICT
    assert code(entry(1, name="w", replica="a-1"), replica="") is Code.CONFLICT
    assert code(entry(1, name="w", replica="a-1"), replica="a-1") is Code.CONFLICT
    assert code(entry(1, name="w", replica="a-1"), replica="a-2") is None
    assert code(entry(1, "shop", name="w"), replica="") is None


def test_the_one_that_was_looked_at_longest_ago_goes_first() -> None:
    known = [entry(number) for number in (2, 1, 3)]
    at = dict[str, Elapsed]()
    order = list[str]()
    for second in range(100, 110):
        found = next_look(known, at, {}, Elapsed(float(second)))
        if found is not None:
            at[found.id] = Elapsed(float(second))
            order.append(found.id)
    assert order[:6] == ["m-default-1", "m-default-2", "m-default-3"] * 2


def test_only_the_newest_that_ended_are_kept() -> None:
    over = [
        replace(entry(number), ended=Refusal(Code.MOVE_CANCELLED), ended_at=Wall(1.0 * number))
        for number in range(KEPT + 3)
    ]
    assert to_forget([*over, entry(-1)]) == [f"m-default-{number}" for number in range(3)]


TWO_REPLICAS = "require: {availability: {replicas: 2, spread: node}}, optimize"


async def two_replicas(world: RegionFixture) -> tuple[FakeAgent, FakeAgent]:
    """Agents that run a replica each, of a workload with two."""
    await world.push()
    agents = (FakeAgent(world, "edge-1"), FakeAgent(world, "edge-2"))
    for agent in agents:
        await agent.connect()
    ((name, text),) = DOCUMENTS
    applied = await world.region.documents.apply([(name, text.replace("optimize", TWO_REPLICAS))], {}, "", "test")
    assert not applied.plan_result.problems
    for _ in range(4):
        await world.step()
        await run_heartbeat(world, *(each for each in agents if world.links.desired_sets(each.name)))
    assert all(world.region.workloads.desired[agent.name].assignments for agent in agents)
    return agents


async def test_where_another_replica_runs_is_nothing_to_wait_for(world: RegionFixture) -> None:
    first, second = await two_replicas(world)
    with pytest.raises(ShoalError) as refused:
        await queue_move(world, first.name)
    assert refused.value.code is Code.CONFLICT
    third = FakeAgent(world, "edge-3")
    await third.connect()
    await world.step()
    await third.report(free_bytes=0)
    waits = await queue_move(world, third.name)
    await third.report()
    other = await world.region.moves.migrate(KEY, Aim(third.name), "ops")
    await run_heartbeat(world, first, second)
    await look(world)
    assert world.region.workloads.queue.waiting == [waits], "the other move may still fail"
    assert (await run_until_over(world, other, first, second, third)).stage is MigrationStage.DONE
    await look(world)
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert (ended.code, third.name in ended.found) == (Code.CONFLICT, True)


VIP = """apiVersion: shoal/v1
kind: Policy
metadata: {name: vip}
spec: {optimize: {latency: 1.0}, priority: 900, preempt: always, require: {where: 'node.name == "%s"'}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {name: vip}
spec: {model: {source: ocr}, policy: vip}
"""


async def test_a_preempted_workload_keeps_its_move(world: RegionFixture) -> None:
    """Whichever replica serves when its time has come moves, and one may serve again."""
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    full = 268435456 + 100  # what is reserved, and nothing beside the replica that runs
    await source.report(free_bytes=full)
    applied = await world.region.documents.apply([("v.yaml", VIP % source.name)], {}, "", "test")
    assert not applied.plan_result.problems
    for _ in range(10):
        await world.step()
        world.clock.advance(0.5)
        await look(world, 1)
        if all(one.workload != KEY for one in world.region.workloads.desired[source.name].assignments):
            break
        await source.apply_desired()
        await source.report(free_bytes=full)
    else:
        pytest.fail("nothing was preempted")
    await look(world)
    assert world.region.workloads.queue.waiting == [waits]
    assert world.region.workloads.queue.reason_of(waits).code is Code.NOT_FOUND


async def test_a_move_begins_by_its_look_while_nothing_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is looked at again, beside the loop, and the third look counts."""
    computed = list[int]()
    looks = list[asyncio.Future[None]]()

    async def compute(work: Callable[[], T], /) -> T:
        looks.append(asyncio.get_running_loop().create_future())
        await looks[-1]
        return work()

    world = await RegionFixture.open(tmp_path / "first", compute=compute)
    source, target = await two_agents(world)
    count = partial(computed.append, 1)
    monkeypatch.setattr(placement_queries, "estimate_move", partial(after, count, estimate_move))

    async def end_look(number: int) -> None:
        await look(world, 1)
        assert len(looks) == number
        looks[-1].set_result(None)
        await look(world, 1)

    async def wait_for_room(aim: FakeAgent) -> QueuedMove:
        await aim.report(free_bytes=0)
        waits = await queue_move(world, aim.name)
        await aim.report()
        computed.clear()
        return waits

    waits = await wait_for_room(target)
    await end_look(1)
    begun = world.region.moves.get(waits.id)
    assert len(computed) == 1, "the look's own"
    assert (await run_until_over(world, begun, source, target)).stage is MigrationStage.DONE
    waits = await wait_for_room(source)
    for number in (2, 3, 4):
        await look(world, 1)
        await world.region.fleet.label(source.name, {"look": str(number)}, set(), "ops")
        assert waits.id not in world.region.workloads.migrations.all
        await end_look(number)
    assert world.region.moves.get(waits.id).stage is MigrationStage.PLANNED
    assert len(computed) == 3, "three looks, and nothing on the loop"
    await world.store.close()


async def test_another_workload_of_the_same_name_does_not_inherit_a_move(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    ((name, text),) = DOCUMENTS
    changed = text.replace("policy: fast}", "policy: fast, traffic: [{from: edge-1, rate: 1/s}]}")
    applied = await world.region.documents.apply([(name, changed)], {}, "", "test")
    assert not applied.plan_result.problems
    await look(world, 1)
    assert world.region.workloads.queue.waiting == [waits], "another revision is the same workload"
    await world.region.documents.delete(DocumentKey("Workload", str(KEY)), "ops")
    await run_heartbeat(world, source)
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    await run_heartbeat(world, source)
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world)
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert (ended.code, "deleted" in ended.found) == (Code.WORKLOAD_UNKNOWN, True)
    assert not world.region.workloads.migrations.all


def test_revisions_tell_a_changed_document_from_another_one() -> None:
    known = DocumentRevision(3, Wall(10.0))
    assert not known.is_of_another(known)
    assert not known.is_of_another(DocumentRevision(4, Wall(20.0)))
    assert known.is_of_another(DocumentRevision(1, Wall(20.0)))
    assert known.is_of_another(DocumentRevision(3, Wall(20.0)))


def test_turns_go_by_tenant() -> None:
    """One move of a tenant waits for one move of each other tenant, however many these have."""
    known = [entry(number, f"t{tenant}") for tenant in range(3) for number in range(16)] + [entry(99, "solo")]
    at, turns = dict[str, Elapsed](), dict[str, Elapsed]()
    order = list[QueuedMove]()
    for second in range(200, 300):
        found = next_look(known, at, turns, Elapsed(float(second)))
        assert found is not None
        at[found.id] = turns[found.workload.tenant] = Elapsed(float(second))
        order.append(found)
    mine = [index for index, each in enumerate(order) if each.workload.tenant == "solo"]
    assert [later - earlier for earlier, later in pairwise(mine)] == [4] * (len(mine) - 1)
    assert len({each.id for each in order if each.workload.tenant == "t0"}) == 16, "none of a tenant's keeps the others"


async def test_one_tick_passes_over_what_plainly_waits(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    ((name, text),) = DOCUMENTS
    more = [f"more-{number}" for number in range(4)]
    workloads = (text.split("---\n")[1].replace("name: reader", f"name: {each}") for each in more)
    applied = await world.region.documents.apply([(name, "---\n".join((text, *workloads)))], {}, "", "test")
    assert not applied.plan_result.problems
    await world.region.fleet.cordon(target.name, True, "ops")
    for _ in range(4):
        await run_heartbeat(world, source)
    keys = [one.workload for one in world.region.workloads.desired[source.name].assignments]
    assert len(keys) > 1
    waits = {(await queue_move(world, target.name, key)).id for key in keys}
    world.clock.advance(2.5)
    await world.region.queued_moves.tick()
    assert world.region.workloads.queue.reasons.keys() == waits


@pytest.mark.parametrize(
    ("traffic", "code"),
    [
        ("rate: 100000000/s", Code.UTILISATION_SHORT),
        ("rate: 1/s, peak: 100000000/s, when: 'now.getHours() < 24'", None),
    ],
)
async def test_the_end_of_a_peak_is_worth_waiting_for(world: RegionFixture, traffic: str, code: Code | None) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    ((name, text),) = DOCUMENTS
    asked = text.replace("policy: fast}", f"policy: fast, traffic: [{{from: {source.name}, {traffic}}}]}}")
    asked = asked.replace("optimize", "migration: {when: {gain: 10%}}, optimize")
    applied = await world.region.documents.apply([(name, asked)], {}, "", "test")
    assert not applied.plan_result.problems, applied.plan_result.problems
    for _ in range(3):
        await run_heartbeat(world, source)
    if code is not None:
        with pytest.raises(ShoalError) as refused:
            await queue_move(world, target.name)
        assert refused.value.code is code
    else:
        await queue_move(world, target.name)


async def test_a_restored_copy_begins_nothing_of_days_ago(world: RegionFixture) -> None:
    """By the region's clock no time passed."""
    _, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    world.clock.date += LONGEST_S - 60.0
    await look(world, 1)
    assert world.region.workloads.queue.waiting == [waits]
    world.clock.date += 60.0
    await world.region.fleet.cordon(target.name, False, "ops")
    await look(world, 1)
    ended = world.region.workloads.queue.all[waits.id].ended
    assert ended is not None
    assert ended.code is Code.MOVE_TIMEOUT
    assert not world.region.workloads.migrations.all


async def test_a_move_that_never_began_is_no_migration_that_failed(tmp_path: Path) -> None:
    """Else taking back three that wait would raise an alert."""
    meter = RecordedMeter()
    world = await RegionFixture.open(tmp_path / "first", meter=meter)
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    waits = await queue_move(world, target.name)
    await world.region.queued_moves.cancel(waits.id, "ops")
    assert not [metric for metric, _ in meter.counts if metric is MIGRATIONS_ENDED]
    await world.region.fleet.cordon(target.name, False, "ops")
    begun = await world.region.queued_moves.migrate(KEY, Aim(target.name), "ops")
    assert isinstance(begun, Migration)
    await run_until_over(world, begun, source, target)
    assert [metric for metric, _ in meter.counts if metric is MIGRATIONS_ENDED]
    await world.store.close()


async def test_a_look_that_fails_is_told_and_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent, failures = [0.0], list[Exception]()

    def fail(*_: object) -> None:
        spent[0] += 1.0
        raise failures[-1]

    world = await RegionFixture.open(tmp_path / "first", thread_time=lambda: spent[0])
    _, target = await two_agents(world)
    await target.report(free_bytes=0)
    waits = await queue_move(world, target.name)
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(placement_queries, "estimate_move", fail)
        failures.append(RuntimeError("broken"))
        await look(world)
        assert spent == [1.0], "it rests ten times as long as it took"
        assert [each["event"] for each in logs] == ["look_at_queued_move_failed"]
        failures.append(ShoalError(Refusal(Code.OVERLOADED, "too much to compute")))
        world.clock.advance(10.0)
        await look(world, 1)
        assert spent == [2.0]
        assert world.region.workloads.queue.reason_of(waits).code is Code.OVERLOADED
        assert len(logs) == 1
    world.clock.advance(10.0)
    await target.report()
    await look(world)
    assert world.region.moves.get(waits.id).stage is MigrationStage.PLANNED
    await world.store.close()

"""The queue of moves over a real store: what waits, what begins, what ends, and what a restart and an older version
find."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture, run_heartbeat, run_until_over, two_agents
from shoal.coordinator import codec
from shoal.coordinator.api.migrations import migration_views
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.controllers.workloads.move_queue import QUEUE
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.model import Migration, MigrationStage, ReplicaPlace
from shoal.coordinator.core.migration.queue import (
    KEPT,
    MOST,
    MOST_OF_TENANT,
    QUEUED,
    WAIT_S,
    QueuedMove,
    entry_refusal,
    next_look,
    to_forget,
)
from shoal.coordinator.core.placement.model import Aim
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


async def queued(world: RegionFixture, aim: str, key: WorkloadKey = KEY, replica: str = "") -> QueuedMove:
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, source.name)
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
        await queued(world, target.name)
    assert refused.value.code is Code.SELECTOR_MISMATCH, "a cordon passes, a selector does not"
    for aim, code in ((Aim("nobody"), Code.NODE_UNKNOWN), (Aim(target.name, "gpu7"), Code.NOT_FOUND)):
        with pytest.raises(ShoalError) as refused:
            await world.region.queued_moves.migrate(KEY, aim, "ops")
        assert refused.value.code is code
    with pytest.raises(ShoalError) as refused:
        await queued(world, source.name)
    assert "is on" in refused.value.refusal.found
    with pytest.raises(ShoalError) as refused:
        await queued(world, target.name, replica="a-none")
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
            await queued(world, target.name)
        assert refused.value.code is code
        return
    waits = await queued(world, target.name)
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
        await queued(world, target.name)
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
    waits = await queued(now, target.name)
    assert waits.reason.code is Code.NODE_NOT_READY
    with pytest.raises(ShoalError) as refused:
        await queued(now, door.name, replica=waits.source.assignment)
    assert refused.value.code is Code.CONFLICT, "the replica waits already"
    await now.region.queued_moves.cancel(waits.id, "ops")
    with pytest.raises(ShoalError) as refused:
        await queued(now, door.name)
    assert refused.value.code is Code.NO_CANDIDATE, "it has no device, and never will"
    waits = await queued(now, target.name)
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name, replica=assignment)
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
        await queued(world, target.name, replica=assignment)
    await target.report(free_bytes=0)
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name, replica=assignment)
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name)

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
    waits = await queued(world, target.name)
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
    waits = await queued(world, target.name)
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


async def test_a_look_does_not_hold_the_loop(tmp_path: Path) -> None:
    """It is computed beside it, one at a time, and the next one waits in proportion."""
    looks = list[asyncio.Future[None]]()

    async def compute(work: Callable[[], T], /) -> T:
        looks.append(asyncio.get_running_loop().create_future())
        await looks[-1]
        return work()

    world = await RegionFixture.open(tmp_path / "first", compute=compute)
    _, target = await two_agents(world)
    await target.report(free_bytes=0)
    waits = await queued(world, target.name)
    await look(world, 5)
    assert len(looks) == 1
    looks[0].set_result(None)
    await look(world, 1)
    assert world.region.workloads.queue.reason_of(waits).code is Code.MEMORY_SHORT
    await look(world, 5)
    assert len(looks) == 1, "the look took five times 2.5 s and more, so the next one waits ten times as long"
    world.clock.advance(200.0)
    await look(world, 1)
    assert len(looks) == 2
    await world.store.close()


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
        found = next_look(known, at, Elapsed(float(second)))
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

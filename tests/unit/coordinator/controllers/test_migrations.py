"""Live moves over a real store: what an operator begins, what a restart finds, what is written with what."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.region import DIGEST, DOCUMENTS, Agent, World
from shoal.coordinator.api.migrations import migration_view, migration_views
from shoal.coordinator.api.views import workload_views
from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.migrations import KEPT, MIGRATIONS, Migrations, StoredMigration, verdict_digest
from shoal.coordinator.core.migration.model import Aborted, Cause, Done, Entered, Migration, Place, Stage
from shoal.coordinator.core.placement.model import Aim
from shoal.types.assignment import Phase
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import MigrationRule
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    opened = await World.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def two(world: World) -> tuple[Agent, Agent]:
    """An agent that runs the one workload, and one that does not."""
    await world.push()
    agents = [Agent(world, "edge-1"), Agent(world, "edge-2")]
    for agent in agents:
        await agent.connect()
    applied = await world.region.workloads.apply(DOCUMENTS, {}, "", "test")
    assert not applied.planned.problems
    await world.step()
    await beat(world, *agents)
    (runs,) = [agent for agent in agents if world.region.workloads.desired[agent.name].assignments]
    (other,) = [agent for agent in agents if agent is not runs]
    return runs, other


async def beat(world: World, *agents: Agent, seconds: float = 0.5) -> None:
    """Everybody does what it was told last, and time goes on."""
    for agent in agents:
        await agent.obey()
    world.clock.advance(seconds)
    for _ in range(3):
        await world.step()


async def test_what_was_applied_is_not_ready_before_it_was_decided_upon(world: World) -> None:
    """`shoal apply --wait` of a policy alone: what runs is as many as the one before wanted."""
    agents = await two(world)
    for _ in range(20):
        await beat(world, *agents)

    def state() -> str:
        (view,) = workload_views(world.region.workloads, world.region.fleet.fleet)
        return view.state

    assert state() == "ready"
    ((name, text),) = DOCUMENTS
    sturdier = [(name, text.replace("optimize:", "require: {availability: {replicas: 2}}, optimize:"))]
    applied = await world.region.workloads.apply(sturdier, {}, "", "test")
    assert not applied.planned.problems
    assert state() == "progressing"
    for _ in range(20):
        await beat(world, *agents)
    assert state() == "ready"
    again = await world.region.workloads.apply(sturdier, {}, "", "test")
    assert not again.planned.problems
    assert state() == "ready", "nothing was changed"


async def until_over(world: World, migration: Migration, *agents: Agent, most: int = 120) -> Migration:
    found = migration
    for _ in range(most):
        found = world.region.moving.one(migration.id)
        if found.is_over:
            return found
        await beat(world, *agents)
    raise AssertionError(f"still {found.stage}: {found.story}")


def weights(world: World, at: str) -> dict[str, float]:
    (route,) = world.region.workloads.desired[at].routes
    return {endpoint.node: endpoint.weight for endpoint in route.endpoints}


async def test_a_region_has_a_workload_whole(world: World) -> None:
    _, target = await two(world)
    for aim, replica in ((Aim("us-east", "gpu0"), ""), (Aim("us-east"), "a-1")):
        with pytest.raises(ShoalError) as error:
            await world.region.moving.cross(KEY, aim, "ops", replica=replica)
        assert error.value.code is Code.FIELD_INVALID
    one = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    crossing = replace(one, aim=Aim(region="us-east"))
    world.region.workloads.migrations.all[one.id] = crossing
    assert migration_view(world.region.workloads, crossing, Elapsed(0.0), Wall(0.0)).reason.code == "NO_BID"
    inward = replace(crossing, source=replace(one.source, region="us-east"))
    assert migration_view(world.region.workloads, inward, Elapsed(0.0), Wall(0.0)).reason.code == "NO_CANDIDATE"
    with pytest.raises(ShoalError) as error:
        await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    assert error.value.code is Code.CONFLICT
    assert "as a whole" in error.value.refusal.found
    other = replace(crossing, source=replace(one.source, assignment="a-2"))
    world.region.workloads.migrations.all[one.id] = other
    drained = await world.region.moving.drain(one.source.node, "ops")
    assert drained.begun == (other,)
    assert "as a whole" in drained.unmoved[one.source.assignment].found


async def test_an_operator_moves_a_workload(world: World) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    assert begun.stage is Stage.PLANNED
    ended = await until_over(world, begun, source, target)
    assert ended.stage is Stage.DONE
    assert ended.verdict is not None
    assert ended.verdict.passed
    assert weights(world, source.name) == {target.name: 1.0}
    codes = [event.code for event in await world.region.events.past(0, 1000) if event.subject == begun.id]
    assert codes == [
        "MIGRATION_PLANNED", "MIGRATION_RESERVED", "MIGRATION_SHIFTING", "MIGRATION_SHIFTING", "MIGRATION_DRAINING",
        "MIGRATION_DONE",
    ]  # fmt: skip


async def test_what_a_verification_came_to_is_audited_before_anything_acts_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    said = list[tuple[str, str, str, str]]()
    audit = world.region.events.audit

    async def heard(actor: str, action: str, subject: str, outcome: str) -> None:
        assert world.region.moving.one(begun.id).verdict is None
        said.append((actor, action, subject, outcome))
        await audit(actor, action, subject, outcome)

    monkeypatch.setattr(world.region.events, "audit", heard)
    ended = await until_over(world, begun, source, target)
    assert ended.verdict is not None
    found = f"passed sha256:{verdict_digest(ended.verdict)}"
    assert said == [(f"shoal://eu/agent/{target.name}", "Verify", begun.id, found)]
    view = migration_view(world.region.workloads, ended, world.clock.now(), world.clock.wall())
    assert view.verdict_sha256 == verdict_digest(ended.verdict)


async def test_what_waits_for_its_turn_says_so(world: World) -> None:
    _, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    view = migration_view(world.region.workloads, begun, world.clock.now(), world.clock.wall())
    assert view.reason.code == Code.WAITING_FOR_TURN


async def test_a_move_home_says_from_which_region(world: World) -> None:
    _, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    home = replace(begun, source=replace(begun.source, node="", device="", region="us-east"))
    view = migration_view(world.region.workloads, home, world.clock.now(), world.clock.wall())
    assert (view.source.region, view.source.node) == ("us-east", "")


async def test_a_restart_at_any_state_finds_it_and_goes_on(world: World, tmp_path: Path) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    stages = set[Stage]()
    now = world
    for _ in range(40):
        stages.add(now.region.moving.one(begun.id).stage)
        if now.region.moving.one(begun.id).is_over:
            break
        before = now.region.moving.one(begun.id).story
        await now.store.close()
        now = await World.open(tmp_path / "first", now)
        assert now.region.moving.one(begun.id).story == before, "what was not committed was not done"
        for agent in (source, target):
            agent.world = now
            await agent.connect()
        await now.step()
        for agent in (source, target):
            await agent.obey()
        now.clock.advance(2.5)
        if now.region.moving.one(begun.id).stage in (Stage.SHIFTING, Stage.DRAINING):
            await now.step()  # these go on by time, and the time of a restart counts for nothing
    assert {Stage.PLANNED, Stage.RESERVED, Stage.SHIFTING, Stage.DRAINING, Stage.DONE} <= stages
    assert weights(now, source.name) == {target.name: 1.0}
    await now.store.close()


async def test_nothing_of_a_step_is_true_before_it_is_committed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    sent = len(world.sent.messages)

    async def full(*_: object, **__: object) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        with pytest.raises(ShoalError):
            await world.step()
    assert world.region.moving.one(begun.id).stage is Stage.PLANNED
    assert len(world.sent.messages) == sent
    stored = await world.store.read(MIGRATIONS + begun.id)
    assert stored is not None
    assert records.load(StoredMigration, stored.value).migration == begun
    assert (await until_over(world, begun, source, target)).stage is Stage.DONE


async def test_a_wrong_target_is_blocked_until_an_operator_clears_it(world: World) -> None:
    source, target = await two(world)
    target.wrong = True
    ended = await until_over(world, await world.region.moving.migrate(KEY, Aim(target.name), "ops"), source, target)
    assert isinstance(ended.state, Aborted)
    assert ended.state.refusal.code is Code.VERIFY_FAILED
    assert weights(world, source.name) == {source.name: 1.0}
    target.wrong = False
    again = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    await beat(world, source, target)
    assert world.region.moving.one(again.id).stage is Stage.PLANNED
    assert await world.region.moving.clear(DIGEST, "ops") == (f"{DIGEST} on {target.name}/cpu0",)
    assert (await until_over(world, again, source, target)).stage is Stage.DONE


async def test_a_cancelled_move_goes_back(world: World) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    await beat(world, source, target)
    with pytest.raises(ShoalError) as other:
        await world.region.moving.cancel(begun.id, "ops", WorkloadKey(KEY.tenant, "another"))
    assert other.value.code is Code.CONFLICT
    await world.region.moving.cancel(begun.id, "ops", KEY)
    ended = await until_over(world, begun, source, target)
    assert isinstance(ended.state, Aborted)
    assert ended.state.refusal.code is Code.MOVE_CANCELLED
    assert weights(world, source.name) == {source.name: 1.0}
    with pytest.raises(ShoalError) as refused:
        await world.region.moving.cancel(begun.id, "ops")
    assert refused.value.code is Code.CONFLICT


async def test_a_drained_node_is_emptied_by_moves(world: World) -> None:
    source, target = await two(world)
    drained = await world.region.moving.drain(source.name, "ops")
    (begun,) = drained.begun
    assert (begun.cause, drained.unmoved) == (Cause.DRAIN, {})
    assert (await until_over(world, begun, source, target)).stage is Stage.DONE
    assert world.region.workloads.desired[source.name].assignments == ()
    assert world.region.fleet.fleet.nodes[source.name].cordoned
    assert (await world.region.moving.drain(source.name, "ops")).begun == ()


@pytest.mark.parametrize(
    ("name", "tenant", "found"),
    [("", "", 2), (KEY.name, "", 2), (KEY.name, "other", 0), ("", "other", 0), ("nobody", "", 0)],
)
async def test_moves_are_listed_by_workload_and_tenant(world: World, name: str, tenant: str, found: int) -> None:
    source, target = await two(world)
    first = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    await until_over(world, first, source, target)
    await world.region.moving.migrate(KEY, Aim(source.name), "ops")
    now, wall = world.clock.now(), world.clock.wall()
    listed = migration_views(world.region.workloads, name, tenant, now, wall)
    assert len(listed) == found
    (one,) = migration_views(world.region.workloads, first.id, "", now, wall)
    assert one.id == first.id


async def test_what_no_other_node_can_take_holds_a_drain_back_and_says_why(world: World) -> None:
    source, target = await two(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    (begun,) = (await world.region.moving.drain(source.name, "ops")).begun
    await beat(world, source, target)
    plan = world.region.workloads.plan_now
    assert plan is not None
    assert plan.workloads[0].unmoved[begun.id].code is Code.NODE_CORDONED
    assert weights(world, source.name) == {source.name: 1.0}


@pytest.mark.parametrize(
    ("key", "aim", "code"),
    [
        (WorkloadKey("default", "nobody"), Aim("edge-2"), Code.WORKLOAD_UNKNOWN),
        (KEY, Aim("nowhere"), Code.NODE_UNKNOWN),
        (KEY, Aim("edge-2", "gpu7"), Code.NOT_FOUND),
    ],
)
async def test_what_cannot_be_asked(world: World, key: WorkloadKey, aim: Aim, code: Code) -> None:
    await two(world)
    with pytest.raises(ShoalError) as refused:
        await world.region.moving.migrate(key, aim, "ops")
    assert refused.value.code is code


async def test_where_it_is_and_what_moves_already_are_refused(world: World) -> None:
    source, target = await two(world)
    with pytest.raises(ShoalError) as refused:
        await world.region.moving.migrate(KEY, Aim(source.name), "ops")
    assert refused.value.code is Code.CONFLICT
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    with pytest.raises(ShoalError) as again:
        await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    assert again.value.code is Code.CONFLICT
    assert begun.id in again.value.refusal.found
    with pytest.raises(ShoalError) as unknown:
        world.region.moving.one("m-none")
    assert unknown.value.code is Code.MIGRATION_UNKNOWN


async def test_the_controller_wakes_when_a_step_of_shifting_is_due(world: World) -> None:
    source, target = await two(world)
    begun = await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    while world.region.moving.one(begun.id).stage is not Stage.SHIFTING:
        await beat(world, source, target)
    book, moving = world.region.workloads.migrations, world.region.moving.one(begun.id)
    # Shorter than what routes take to reach every front: that counts then.
    book.all[begun.id] = replace(moving, rule=replace(moving.rule, hold_s=Seconds(0.6)))
    wait = book.next_deadline(world.clock.now())
    assert wait is not None
    world.clock.advance(wait)
    await world.step()
    assert len(world.region.moving.one(begun.id).readings) == 1


async def test_ends_are_kept_to_a_number_and_what_forbids_a_place_longer(world: World) -> None:
    source, target = await two(world)
    target.wrong = True
    wrong = await until_over(world, await world.region.moving.migrate(KEY, Aim(target.name), "ops"), source, target)
    book = world.region.workloads.migrations
    write(book, world, {f"m-past-{index}": _copy(wrong, f"m-past-{index}", cleared=True) for index in range(KEPT + 5)})
    last = {"m-last": _copy(wrong, "m-last", cleared=True)}
    write(book, world, last)
    assert len(book.all) == KEPT + 1
    assert {wrong.id, "m-last"} <= book.all.keys()


async def test_however_many_places_are_forbidden_what_ends_is_kept(world: World) -> None:
    source, target = await two(world)
    target.wrong = True
    wrong = await until_over(world, await world.region.moving.migrate(KEY, Aim(target.name), "ops"), source, target)
    book = world.region.workloads.migrations
    write(book, world, {f"m-past-{index}": _copy(wrong, f"m-past-{index}") for index in range(KEPT + 5)})
    write(book, world, {"m-last": _copy(wrong, "m-last", cleared=True)})
    write(book, world, {"m-other": _copy(wrong, "m-other", cleared=True)})
    assert {"m-last", "m-other"} <= book.all.keys()


def write(book: Migrations, world: World, changed: dict[str, Migration]) -> None:
    written = book.written(changed, world.clock.now())
    assert not {key.removeprefix(MIGRATIONS) for key in written.deletes} & changed.keys(), "put and deleted at once"
    book.adopt(changed, written)


def _copy(migration: Migration, name: str, *, cleared: bool = False) -> Migration:
    return replace(migration, id=name, cleared=cleared)


async def test_a_drain_names_what_is_not_ready_and_asks_again_later(world: World) -> None:
    source, target = await two(world)
    source.observed = tuple(replace(each, phase=Phase.LOADING) for each in source.observed)
    await source.report()
    drained = await world.region.moving.drain(source.name, "ops")
    assert drained.begun == ()
    assert [refusal.code for refusal in drained.unmoved.values()] == [Code.MODEL_NOT_READY]
    await beat(world, source, target)
    assert len((await world.region.moving.drain(source.name, "ops")).begun) == 1


@pytest.mark.parametrize("state", [Done(Elapsed(50.0)), Aborted(Refusal(Code.GUARD_TRIPPED), Elapsed(50.0))])
def test_what_is_over_is_no_younger_after_a_restart(state: Done | Aborted) -> None:
    """Written a day ago, and again when it was read what it brought."""
    place, ended = Place("a-1", "edge-1", "cpu0", DIGEST, "fp32"), Wall(1_700_000_000.0)
    story = (Entered(Stage.PLANNED, Wall(ended - 20.0)), Entered(Stage.DONE, ended))
    over = Migration("m-1", KEY, Cause.PRICE, "", place, Aim("edge-2"), MigrationRule(), state, story=story)
    stored = records.load(StoredMigration, records.dump(StoredMigration(Elapsed(80.0), over)))
    restored = stored.restored(Elapsed(3.0), Wall(ended + 86400.0)).state
    assert isinstance(restored, Done | Aborted)
    assert restored.at == 3.0 - 86400.0
    early = stored.restored(Elapsed(3.0), Wall(ended - 60.0)).state
    assert isinstance(early, Done | Aborted)
    assert early.at == 3.0, "by a clock that was set back it has just ended"


async def test_a_move_to_where_its_standby_is_is_refused_at_once(world: World) -> None:
    source, target = await two(world)
    ((name, text),) = DOCUMENTS
    spare = text.replace("latency: 1.0}}", "latency: 1.0}, require: {availability: {standby: warm}}}")
    applied = await world.region.workloads.apply([(name, spare)], {}, "", "test")
    assert not applied.planned.problems
    await beat(world, source, target)
    assert [one.standby for one in world.region.workloads.desired[target.name].assignments] == [True]
    with pytest.raises(ShoalError) as refused:
        await world.region.moving.migrate(KEY, Aim(target.name), "ops")
    assert refused.value.code is Code.CONFLICT
    assert "standby" in refused.value.refusal.found

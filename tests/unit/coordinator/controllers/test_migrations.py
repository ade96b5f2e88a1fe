"""Live moves over a real store: what an operator begins, what a restart finds, what is written with what."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from harness.fakes.region import (
    DIGEST,
    DOCUMENTS,
    FakeAgent,
    RegionFixture,
    run_heartbeat,
    run_until_over,
    two_agents,
)
from shoal.coordinator import codec
from shoal.coordinator.api.migrations import migration_view, migration_views
from shoal.coordinator.api.views import workload_views
from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.queries.can_move import can_move
from shoal.coordinator.controllers.workloads import placement_queries, step
from shoal.coordinator.controllers.workloads.migrations import (
    KEPT,
    MIGRATIONS,
    MigrationRepository,
    verdict_digest,
)
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.migration.advance import AdvanceResult, advance
from shoal.coordinator.core.migration.estimate import MoveAnswer
from shoal.coordinator.core.migration.model import (
    AbortedState,
    Cause,
    Migration,
    MigrationStage,
)
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.migration.triggers.turns import Turn
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.core.workloads.kept import may_ask_for_moves
from shoal.coordinator.core.workloads.model import DelegatedWorkload
from shoal.coordinator.ports import Transaction
from shoal.types.agreement import GatewayRef
from shoal.types.assignment import Phase
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Seconds
from shoal.types.workload import Intent, WorkloadKey
from shoal.v1 import operator_pb2

T = TypeVar("T")

KEY = WorkloadKey("default", "reader")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def test_what_was_applied_is_not_ready_before_it_was_decided_upon(world: RegionFixture) -> None:
    """`shoal apply --wait` of a policy alone: what runs is as many as the one before wanted."""
    agents = await two_agents(world)
    for _ in range(20):
        await run_heartbeat(world, *agents)

    def state() -> str:
        (view,) = workload_views(world.region.workloads, world.region.fleet.fleet)
        return view.state

    assert state() == "ready"
    ((name, text),) = DOCUMENTS
    sturdier = [(name, text.replace("optimize:", "require: {availability: {replicas: 2}}, optimize:"))]
    applied = await world.region.documents.apply(sturdier, {}, "", "test")
    assert not applied.plan_result.problems
    assert state() == "progressing"
    for _ in range(20):
        await run_heartbeat(world, *agents)
    assert state() == "ready"
    again = await world.region.documents.apply(sturdier, {}, "", "test")
    assert not again.plan_result.problems
    assert state() == "ready", "nothing was changed"


def weights(world: RegionFixture, at: str) -> dict[str, float]:
    (route,) = world.region.workloads.desired[at].routes
    return {endpoint.node: endpoint.weight for endpoint in route.endpoints}


def _view_of(world: RegionFixture, migration: Migration) -> operator_pb2.MigrationView:
    region, now, wall = world.region, world.region.clock.now(), world.clock.wall()
    return migration_view(region.workloads, region.fleet.fleet, migration, now, wall)


async def test_what_is_emulated_says_so_also_when_its_node_is_forgotten(world: RegionFixture) -> None:
    _, target = await two_agents(world, emulated=True)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    asked = _view_of(world, begun)
    assert asked.source.stand_in
    assert (asked.to, asked.to_stand_in) == (target.name, "emulated")
    (event,) = [each for each in await world.region.events.events_after(0, 1000) if each.code == "MIGRATION_PLANNED"]
    assert event.stand_in
    assert "cpu0 (emulated) to" in event.message
    nodes = world.region.fleet.fleet.nodes
    world.region.fleet.fleet = replace(world.region.fleet.fleet, nodes={})
    assert _view_of(world, begun).source.stand_in
    world.region.fleet.fleet = replace(world.region.fleet.fleet, nodes=nodes)
    assert codec.load(Migration, codec.dump(begun)).source.stand_in


async def test_a_region_has_a_workload_whole(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    for aim, replica in ((Aim("us-east", "gpu0"), ""), (Aim("us-east"), "a-1")):
        with pytest.raises(ShoalError) as error:
            await world.region.moves.migrate_to_region(KEY, aim, "ops", replica=replica)
        assert error.value.code is Code.FIELD_INVALID
    one = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    cross_region = replace(one, aim=Aim(region="us-east"))
    world.region.workloads.migrations.all[one.id] = cross_region
    assert _view_of(world, cross_region).reason.code == "NO_BID"
    inward = replace(cross_region, source=replace(one.source, region="us-east"))
    assert _view_of(world, inward).reason.code == "NO_CANDIDATE"
    with pytest.raises(ShoalError) as error:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert error.value.code is Code.CONFLICT
    assert "as a whole" in error.value.refusal.found
    other = replace(cross_region, source=replace(one.source, assignment="a-2"))
    world.region.workloads.migrations.all[one.id] = other
    drained = await world.region.moves.drain(one.source.node, "ops")
    assert drained.migrations == (other,)
    assert "as a whole" in drained.refusals[one.source.assignment].found


@pytest.mark.parametrize("queue", [False, True])
async def test_what_another_region_runs_has_to_come_home_first(world: RegionFixture, queue: bool) -> None:
    """Before, a node was refused it with nothing to try."""
    _, target = await two_agents(world)
    workloads, queries = world.region.workloads, world.region.queued_moves if queue else world.region.moves
    workloads.desired = {}
    with pytest.raises(ShoalError) as error:
        await queries.migrate(KEY, Aim(target.name), "ops")
    assert (error.value.code, error.value.refusal.found) == (Code.NOT_FOUND, "no replica of default/reader")
    assert "shoal explain" in error.value.refusal.remedy
    workloads.delegations = {KEY: DelegatedWorkload("g-1", "us-east", (), is_ready=True)}
    with pytest.raises(ShoalError) as error:
        await queries.migrate(KEY, Aim(target.name), "ops")
    assert (error.value.code, error.value.refusal.found) == (Code.NOT_FOUND, "us-east has default/reader")
    assert error.value.refusal.remedy == f"bring it home first: --to {workloads.region}"


async def test_an_operator_moves_a_workload(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert begun.stage is MigrationStage.PLANNED
    ended = await run_until_over(world, begun, source, target)
    assert ended.stage is MigrationStage.DONE
    assert ended.verdict is not None
    assert ended.verdict.passed
    assert weights(world, target.name) == {target.name: 1.0}
    codes = [event.code for event in await world.region.events.events_after(0, 1000) if event.subject == begun.id]
    assert codes == [
        "MIGRATION_PLANNED", "MIGRATION_RESERVED", "MIGRATION_SHIFTING", "MIGRATION_SHIFTING", "MIGRATION_DRAINING",
        "MIGRATION_DONE",
    ]  # fmt: skip


async def test_what_a_verification_came_to_is_audited_before_anything_acts_on_it(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    said = list[tuple[str, str, str, str]]()
    audit = world.region.events.audit

    async def record_audit(actor: str, action: str, subject: str, outcome: str) -> None:
        assert world.region.moves.get(begun.id).verdict is None
        said.append((actor, action, subject, outcome))
        await audit(actor, action, subject, outcome)

    monkeypatch.setattr(world.region.events, "audit", record_audit)
    ended = await run_until_over(world, begun, source, target)
    assert ended.verdict is not None
    found = f"passed sha256:{verdict_digest(ended.verdict)}"
    assert said == [(f"shoal://eu/agent/{target.name}", "Verify", begun.id, found)]
    view = migration_view(
        world.region.workloads, world.region.fleet.fleet, ended, world.region.clock.now(), world.clock.wall()
    )
    assert view.verdict_sha256 == verdict_digest(ended.verdict)


async def test_what_waits_for_its_turn_says_so(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    view = migration_view(
        world.region.workloads, world.region.fleet.fleet, begun, world.region.clock.now(), world.clock.wall()
    )
    assert view.reason.code == Code.WAITING_FOR_TURN


async def test_a_move_home_says_from_which_region(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    home = replace(begun, source=replace(begun.source, node="", device="", region="us-east"))
    view = _view_of(world, home)
    assert (view.source.region, view.source.node) == ("us-east", "")


async def test_a_restart_at_any_state_finds_it_and_goes_on(world: RegionFixture, tmp_path: Path) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    stages = set[MigrationStage]()
    now = world
    for _ in range(40):
        stages.add(now.region.moves.get(begun.id).stage)
        if now.region.moves.get(begun.id).is_over:
            break
        before = now.region.moves.get(begun.id).stages
        await now.store.close()
        now = await RegionFixture.open(tmp_path / "first", now)
        assert now.region.moves.get(begun.id).stages == before, "what was not committed was not done"
        for agent in (source, target):
            agent.world = now
            await agent.connect()
        await now.step()
        for agent in (source, target):
            await agent.apply_desired()
        now.clock.advance(2.5)
        if now.region.moves.get(begun.id).stage in (MigrationStage.SHIFTING, MigrationStage.DRAINING):
            await now.step()  # these go on by time, and the time of a restart counts for nothing
    assert {
        MigrationStage.PLANNED,
        MigrationStage.RESERVED,
        MigrationStage.SHIFTING,
        MigrationStage.DRAINING,
        MigrationStage.DONE,
    } <= stages
    assert weights(now, target.name) == {target.name: 1.0}
    await now.store.close()


async def test_nothing_of_a_step_is_true_before_it_is_committed(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    sent = len(world.links.messages)

    async def full(*_: object, **__: object) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        with pytest.raises(ShoalError):
            await world.step()
    assert world.region.moves.get(begun.id).stage is MigrationStage.PLANNED
    assert len(world.links.messages) == sent
    stored = await world.store.read(MIGRATIONS + begun.id)
    assert stored is not None
    assert codec.load(Migration, stored.value) == begun
    assert (await run_until_over(world, begun, source, target)).stage is MigrationStage.DONE


@pytest.mark.parametrize("takes_effect", [True, False])
async def test_a_move_whose_write_got_no_answer_begins_once(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, takes_effect: bool
) -> None:
    _, target = await two_agents(world)
    commit = world.store.commit

    async def commit_without_answer(transaction: Transaction) -> int:
        if takes_effect:
            await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", commit_without_answer)
        with pytest.raises(ShoalError, match=Code.STORE_UNAVAILABLE):
            await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert not world.region.workloads.migrations.all
    if takes_effect:
        with pytest.raises(ShoalError, match=Code.CONFLICT):
            await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    else:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert len(world.region.workloads.migrations.live) == len(await world.store.scan(MIGRATIONS)) == 1


async def test_a_wrong_target_is_blocked_until_an_operator_clears_it(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    target.answers_wrong = True
    ended = await run_until_over(world, await world.region.moves.migrate(KEY, Aim(target.name), "ops"), source, target)
    assert isinstance(ended.state, AbortedState)
    assert ended.state.refusal.code is Code.VERIFY_FAILED
    assert weights(world, source.name) == {source.name: 1.0}
    target.answers_wrong = False
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert refused.value.code is Code.VERIFY_FAILED
    assert await world.region.moves.clear(DIGEST, "ops") == (f"{DIGEST} on {target.name}/cpu0",)
    again = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert (await run_until_over(world, again, source, target)).stage is MigrationStage.DONE


async def test_migrate_is_refused_by_what_can_move_says(world: RegionFixture) -> None:
    """One function decides both: the same code, the same words, and nothing is begun."""
    source, target = await two_agents(world)
    documents, placement = world.region.documents, world.region.placement
    await world.region.fleet.cordon(target.name, True, "ops")
    said = (await can_move(documents, placement, None, (), KEY, target.name)).refusal
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert said == refused.value.refusal
    assert said is not None
    assert said.code is Code.NODE_CORDONED
    assert not world.region.workloads.migrations.live
    await world.region.fleet.cordon(target.name, False, "ops")
    assert (await can_move(documents, placement, None, (), KEY, target.name)).refusal is None
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert (await run_until_over(world, begun, source, target)).stage is MigrationStage.DONE


async def test_can_move_says_why_what_another_region_runs_cannot_go_there(world: RegionFixture) -> None:
    """Before, it said no without a reason, also to the way home that `migrate` then took."""
    source, target = await two_agents(world)
    workloads, moves = world.region.workloads, world.region.moves
    documents, placement, home = world.region.documents, world.region.placement, world.region.config.name
    regions = (home, "us-east", "us-west")

    here = await can_move(documents, placement, None, regions, KEY, home)
    with pytest.raises(ShoalError) as refused:
        await moves.migrate_to_region(KEY, Aim(home), "ops")
    assert here.refusal == refused.value.refusal

    workloads.delegations = {KEY: DelegatedWorkload("g-1", "us-east", (GatewayRef("gw", "us-east:1"),), is_ready=True)}
    workloads.desired = {}
    for to, begin in ((target.name, moves.migrate), ("us-west", moves.migrate_to_region)):
        said = await can_move(documents, placement, None, regions, KEY, to)
        with pytest.raises(ShoalError) as refused:
            await begin(KEY, Aim(to), "ops")
        assert said.refusal == refused.value.refusal
        assert said.region == "us-east"
        assert refused.value.refusal.remedy == f"bring it home first: --to {home}"

    back = await can_move(documents, placement, None, regions, KEY, home)
    assert (back.answer, back.region, back.refusal) == (MoveAnswer.YES, "us-east", None)
    assert back.estimate is not None
    assert {each.node for each in back.estimate.estimates} == {source.name, target.name}
    await world.region.fleet.cordon(source.name, True, "ops")
    await world.region.fleet.cordon(target.name, True, "ops")
    full = await can_move(documents, placement, None, regions, KEY, home)
    assert full.refusal is not None
    assert full.refusal.code is Code.NODE_CORDONED


def silent_federation() -> OriginController:
    """One whose regions give no bid."""

    async def preview_offers(*_: object) -> None:
        return None

    return cast(OriginController, SimpleNamespace(may_trade=True, preview_offers=preview_offers))


@pytest.mark.parametrize("is_ready", [None, False, True], ids=["not delegated", "not ready there", "delegated"])
@pytest.mark.parametrize("to", ["home/npu0", "us-west/npu0", "home", "us-west", "us-east", "node"])
async def test_can_move_refuses_what_migrate_refuses(world: RegionFixture, is_ready: bool | None, to: str) -> None:
    """Before, it went on to ask for bids where `migrate` did not, and took a device of a region for a place."""
    _, target = await two_agents(world)
    workloads, moves, home = world.region.workloads, world.region.moves, world.region.config.name
    if is_ready is not None:
        gateways = (GatewayRef("gw", "us-east:1"),)
        workloads.delegations = {KEY: DelegatedWorkload("g-1", "us-east", gateways, is_ready=is_ready)}
        workloads.desired = {}
    text = to.replace("home", home).replace("node", target.name)

    async def refusal_of_migrate() -> Refusal | None:
        aim = Aim.parse(text)
        try:
            if to == "node":
                await moves.migrate(KEY, aim, "ops")
            else:
                moves.cross_region_source(KEY, aim)
        except ShoalError as error:
            return error.refusal
        return None

    async def refusal_of_can_move() -> Refusal | None:
        regions = (home, "us-east", "us-west")
        documents, placement = world.region.documents, world.region.placement
        return (await can_move(documents, placement, silent_federation(), regions, KEY, text)).refusal

    wanted = await refusal_of_can_move()
    assert wanted == await refusal_of_migrate()
    is_possible = (to == "node" and is_ready is None) or (to == "home" and is_ready)
    assert (wanted is None) == bool(is_possible)


async def test_where_its_policy_keeps_a_workload_at_home_both_say_so(world: RegionFixture) -> None:
    """Before, `can-move` said PEER_UNREACHABLE, where the other region gave no bid either."""
    await two_agents(world)
    moves, placement, documents = world.region.moves, world.region.placement, world.region.documents
    intent = world.region.workloads.intent_of(KEY)
    assert intent is not None
    found = placement.cross_region_refusal(intent, "us-west")
    with pytest.raises(ShoalError) as refused:
        moves.cross_region_source(KEY, Aim("us-west"))
    assert found == refused.value.refusal
    assert found is not None
    assert found.code is Code.TRADE_DENIED
    result = await can_move(documents, placement, silent_federation(), ("us-west",), KEY, "us-west")
    assert (result.answer, result.refusal) == (MoveAnswer.NO, found)


async def test_a_workload_that_moves_is_not_asked_for_elsewhere(world: RegionFixture) -> None:
    _, target = await two_agents(world)
    moves, placement, documents = world.region.moves, world.region.placement, world.region.documents
    begun = await moves.migrate(KEY, Aim(target.name), "ops")
    said = (await can_move(documents, placement, silent_federation(), ("us-west",), KEY, "us-west")).refusal
    with pytest.raises(ShoalError) as refused:
        moves.cross_region_source(KEY, Aim("us-west"))
    assert said == refused.value.refusal
    assert said is not None
    assert begun.id in said.found


async def test_a_model_that_nobody_runs_may_have_any_place_at_home(world: RegionFixture) -> None:
    """Before, a model that is no workload was said to run here."""
    source, target = await two_agents(world)
    documents, placement, home = world.region.documents, world.region.placement, world.region.config.name
    found = await can_move(documents, placement, None, (), WorkloadKey("default", "ocr"), home)
    assert (found.answer, found.refusal, found.region) == (MoveAnswer.YES, None, "")
    assert found.estimate is not None
    assert {each.node for each in found.estimate.estimates} == {source.name, target.name}
    device = await can_move(documents, placement, None, (), WorkloadKey("default", "ocr"), f"{home}/cpu0")
    assert device.refusal is not None
    assert device.refusal.code is Code.FIELD_INVALID


async def test_an_operator_may_ask_again_where_a_move_was_only_late(world: RegionFixture) -> None:
    """As `migrate` forgives it, so does `can-move`."""
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await run_heartbeat(world, source, target)
    await world.region.moves.cancel(begun.id, "ops")
    ended = await run_until_over(world, begun, source, target)
    assert isinstance(ended.state, AbortedState)
    assert (await can_move(world.region.documents, world.region.placement, None, (), KEY, target.name)).refusal is None
    again = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert (await run_until_over(world, again, source, target)).stage is MigrationStage.DONE


async def test_a_workload_that_no_device_can_take_is_final(world: RegionFixture) -> None:
    """Who waits for it need not: only another document or device helps. A node that was cordoned may come back."""
    await two_agents(world)
    ((name, text),) = DOCUMENTS
    elsewhere = text.replace("optimize:", "require: {where: \"node.name == 'nobody'\"}, optimize:")

    def view() -> operator_pb2.WorkloadView:
        (found,) = workload_views(world.region.workloads, world.region.fleet.fleet)
        return found

    assert not view().final
    assert not (await world.region.documents.apply([(name, elsewhere)], {}, "", "test")).plan_result.problems
    assert not view().final, "not decided upon yet"
    await world.step()
    assert (view().state, view().reason.code, view().final) == ("pending", Code.SELECTOR_MISMATCH, True)
    await world.region.documents.apply([(name, text)], {}, "", "test")
    for node in ("edge-1", "edge-2"):
        await world.region.fleet.cordon(node, True, "ops")
    await world.step()
    assert not view().final


async def test_a_cancelled_move_goes_back(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await run_heartbeat(world, source, target)
    with pytest.raises(ShoalError) as other:
        await world.region.moves.cancel(begun.id, "ops", WorkloadKey(KEY.tenant, "another"))
    assert other.value.code is Code.CONFLICT
    await world.region.moves.cancel(begun.id, "ops", KEY)
    ended = await run_until_over(world, begun, source, target)
    assert isinstance(ended.state, AbortedState)
    assert ended.state.refusal.code is Code.MOVE_CANCELLED
    assert weights(world, source.name) == {source.name: 1.0}
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.cancel(begun.id, "ops")
    assert refused.value.code is Code.CONFLICT


async def test_a_drained_node_is_emptied_by_moves(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    drained = await world.region.moves.drain(source.name, "ops")
    (begun,) = drained.migrations
    assert (begun.cause, drained.refusals) == (Cause.DRAIN, {})
    assert (await run_until_over(world, begun, source, target)).stage is MigrationStage.DONE
    assert world.region.workloads.desired[source.name].assignments == ()
    assert world.region.fleet.fleet.nodes[source.name].cordoned
    assert (await world.region.moves.drain(source.name, "ops")).migrations == ()


@pytest.mark.parametrize(
    ("name", "tenant", "found"),
    [("", "", 2), (KEY.name, "", 2), (KEY.name, "other", 0), ("", "other", 0), ("nobody", "", 0)],
)
async def test_moves_are_listed_by_workload_and_tenant(
    world: RegionFixture, name: str, tenant: str, found: int
) -> None:
    source, target = await two_agents(world)
    first = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await run_until_over(world, first, source, target)
    await world.region.moves.migrate(KEY, Aim(source.name), "ops")
    now, wall = world.region.clock.now(), world.clock.wall()
    listed = migration_views(world.region.workloads, world.region.fleet.fleet, name, tenant, now, wall)
    assert len(listed) == found
    (one,) = migration_views(world.region.workloads, world.region.fleet.fleet, first.id, "", now, wall)
    assert one.id == first.id


async def test_what_no_other_node_can_take_holds_a_drain_back_and_says_why(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    await world.region.fleet.cordon(target.name, True, "ops")
    (begun,) = (await world.region.moves.drain(source.name, "ops")).migrations
    await run_heartbeat(world, source, target)
    plan = world.region.workloads.last_plan
    assert plan is not None
    assert plan.workloads[0].unplaced_moves[begun.id].code is Code.NODE_CORDONED
    assert weights(world, source.name) == {source.name: 1.0}


@pytest.mark.parametrize(
    ("key", "aim", "code"),
    [
        (WorkloadKey("default", "nobody"), Aim("edge-2"), Code.WORKLOAD_UNKNOWN),
        (KEY, Aim("nowhere"), Code.NODE_UNKNOWN),
        (KEY, Aim("edge-2", "gpu7"), Code.NOT_FOUND),
    ],
)
async def test_what_cannot_be_asked(world: RegionFixture, key: WorkloadKey, aim: Aim, code: Code) -> None:
    await two_agents(world)
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(key, aim, "ops")
    assert refused.value.code is code


async def test_where_it_is_and_what_moves_already_are_refused(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(source.name), "ops")
    assert refused.value.code is Code.CONFLICT
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    with pytest.raises(ShoalError) as again:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert again.value.code is Code.CONFLICT
    assert begun.id in again.value.refusal.found
    with pytest.raises(ShoalError) as unknown:
        world.region.moves.get("m-none")
    assert unknown.value.code is Code.MIGRATION_UNKNOWN


async def test_the_controller_wakes_when_a_step_of_shifting_is_due(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    while world.region.moves.get(begun.id).stage is not MigrationStage.SHIFTING:
        await run_heartbeat(world, source, target)
    book, moving = world.region.workloads.migrations, world.region.moves.get(begun.id)
    # Shorter than what routes take to reach every front: that counts then.
    book.all[begun.id] = replace(moving, rule=replace(moving.rule, hold_s=Seconds(0.6)))
    wait = book.next_deadline(world.region.clock.now())
    assert wait is not None
    world.clock.advance(wait)
    await world.step()
    assert len(world.region.moves.get(begun.id).readings) == 1
    (shown,) = _view_of(world, world.region.moves.get(begun.id)).readings
    assert (shown.outcome, shown.passed) == ("not judged", False), "nobody asked for anything"


async def test_ends_are_kept_to_a_number_and_what_forbids_a_place_longer(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    target.answers_wrong = True
    wrong = await run_until_over(world, await world.region.moves.migrate(KEY, Aim(target.name), "ops"), source, target)
    book = world.region.workloads.migrations
    write(book, world, {f"m-past-{index}": _copy(wrong, f"m-past-{index}", cleared=True) for index in range(KEPT + 5)})
    last = {"m-last": _copy(wrong, "m-last", cleared=True)}
    write(book, world, last)
    assert len(book.all) == KEPT + 1
    assert {wrong.id, "m-last"} <= book.all.keys()


async def test_however_many_places_are_forbidden_what_ends_is_kept(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    target.answers_wrong = True
    wrong = await run_until_over(world, await world.region.moves.migrate(KEY, Aim(target.name), "ops"), source, target)
    book = world.region.workloads.migrations
    write(book, world, {f"m-past-{index}": _copy(wrong, f"m-past-{index}") for index in range(KEPT + 5)})
    write(book, world, {"m-last": _copy(wrong, "m-last", cleared=True)})
    write(book, world, {"m-other": _copy(wrong, "m-other", cleared=True)})
    assert {"m-last", "m-other"} <= book.all.keys()


def write(book: MigrationRepository, world: RegionFixture, changed: dict[str, Migration]) -> None:
    written = book.writes(changed)
    assert not {key.removeprefix(MIGRATIONS) for key in written.deletes} & changed.keys(), "put and deleted at once"
    book.adopt(changed, written)


def _copy(migration: Migration, name: str, *, cleared: bool = False) -> Migration:
    return replace(migration, id=name, cleared=cleared)


async def test_a_drain_names_what_is_not_ready_and_asks_again_later(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    source.observed = tuple(replace(each, phase=Phase.LOADING) for each in source.observed)
    await source.report()
    drained = await world.region.moves.drain(source.name, "ops")
    assert drained.migrations == ()
    assert [refusal.code for refusal in drained.refusals.values()] == [Code.MODEL_NOT_READY]
    await run_heartbeat(world, source, target)
    assert len((await world.region.moves.drain(source.name, "ops")).migrations) == 1


async def test_a_move_to_where_its_standby_is_is_refused_at_once(world: RegionFixture) -> None:
    source, target = await two_agents(world)
    ((name, text),) = DOCUMENTS
    spare = text.replace("latency: 1.0}}", "latency: 1.0}, require: {availability: {standby: warm}}}")
    applied = await world.region.documents.apply([(name, spare)], {}, "", "test")
    assert not applied.plan_result.problems
    await run_heartbeat(world, source, target)
    assert [one.standby for one in world.region.workloads.desired[target.name].assignments] == [True]
    with pytest.raises(ShoalError) as refused:
        await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    assert refused.value.code is Code.CONFLICT
    assert "standby" in refused.value.refusal.found


async def test_a_planned_move_ends_once_its_node_is_deleted_and_other_steps_go_on(world: RegionFixture) -> None:
    """`shoal migrate` and `shoal delete node` right after each other: no step has seen that the source is gone."""
    source, target = await two_agents(world)
    begun = await world.region.moves.migrate(KEY, Aim(target.name), "ops")
    await world.region.fleet.on_close(source.name, source.epoch)
    await world.region.fleet.forget(source.name, "ops")
    await world.step()
    state = world.region.moves.get(begun.id).state
    assert isinstance(state, AbortedState)
    assert state.refusal.code is Code.NODE_LOST
    for _ in range(3):
        await run_heartbeat(world, target)
    assert [each.workload for each in world.region.workloads.desired[target.name].assignments] == [KEY]


class Beside:
    """Where looks are computed: it says what is computed elsewhere, and can change the region before it answers."""

    def __init__(self, world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world = world
        self._is_inside = False
        self.looks = 0
        self.outside = list[str]()
        """What was computed on the loop."""
        self.then: Callable[[int], Awaitable[object]] | None = None
        """What happens before the answer, by the number of the look."""
        for name in ("estimate_move", "hopeless_refusal", "inputs_of"):
            monkeypatch.setattr(placement_queries, name, partial(self._run, name, getattr(placement_queries, name)))

    def _run(self, name: str, computes: Callable[..., object], *args: object) -> object:
        if not self._is_inside:
            self.outside.append(name)
        return computes(*args)

    async def compute(self, work: Callable[[], T], /) -> T:
        assert not self._world.region.workloads.step_lock.locked(), "steps go on meanwhile"
        self.looks += 1
        self._is_inside = True
        try:
            return work()
        finally:
            self._is_inside = False
            if self.then is not None:
                await self.then(self.looks)


async def ask(
    world: RegionFixture, beside: Beside, aim: str, *, queue: bool = False, key: WorkloadKey = KEY
) -> Migration | QueuedMove:
    asked = world.region.queued_moves if queue else world.region.moves
    return await asked.migrate(key, Aim(aim), "ops", compute=beside.compute)


@pytest.mark.parametrize("queue", [False, True])
async def test_whether_it_can_move_is_computed_beside_the_loop(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    """Before, two placements of the whole region ran on the loop, of a command that is refused too."""
    _, target = await two_agents(world)
    beside = Beside(world, monkeypatch)
    await target.report(free_bytes=0)
    if queue:
        assert isinstance(await ask(world, beside, target.name, queue=True), QueuedMove)
    else:
        with pytest.raises(ShoalError) as refused:
            await ask(world, beside, target.name)
        assert refused.value.code is Code.MEMORY_SHORT
    await target.report()
    assert isinstance(await ask(world, beside, target.name, queue=queue), Migration)
    assert (beside.looks, beside.outside) == (2, [])


async def test_a_refused_command_waits_for_no_step(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = await two_agents(world)
    beside = Beside(world, monkeypatch)
    await target.report(free_bytes=0)
    runs = list[object]()
    monkeypatch.setattr(world.region.workloads.transitions, "run", runs.append)
    with pytest.raises(ShoalError):
        await ask(world, beside, target.name)
    assert not runs


@pytest.mark.parametrize("queue", [False, True])
async def test_a_move_is_looked_at_again_while_what_it_names_changes(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    """The third look counts, so that it begins however busy the region is."""
    source, target = await two_agents(world)
    bystander = FakeAgent(world, "edge-3")
    await bystander.connect()
    beside = Beside(world, monkeypatch)

    async def label(name: str, look: int) -> None:
        await world.region.fleet.label(name, {"look": str(look)}, set(), "ops")

    beside.then = partial(label, bystander.name)
    begun = await ask(world, beside, target.name, queue=queue)
    assert isinstance(begun, Migration)
    assert beside.looks == 1, "what changes elsewhere is none of its business"
    await world.region.moves.cancel(begun.id, "ops")
    for changes in (source, target):
        beside.looks, beside.then = 0, partial(label, changes.name)
        begun = await ask(world, beside, target.name, queue=queue)
        assert isinstance(begun, Migration)
        assert (beside.looks, beside.outside) == (3, [])
        await world.region.moves.cancel(begun.id, "ops")


async def test_what_happens_during_a_look_refuses_the_move(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = await two_agents(world)
    beside, moves = Beside(world, monkeypatch), world.region.moves

    async def expect_refusal(happens: Callable[[], Awaitable[object]], wanted: Code, looks: int) -> None:
        async def then(look: int) -> None:
            if look == 1:
                await happens()

        beside.looks, beside.then = 0, then
        with pytest.raises(ShoalError) as error:
            await ask(world, beside, target.name)
        assert (error.value.code, beside.looks) == (wanted, looks)

    async def fill() -> None:
        await target.report(free_bytes=0)

    await expect_refusal(lambda: world.region.fleet.cordon(target.name, True, "ops"), Code.NODE_CORDONED, 2)
    await world.region.fleet.cordon(target.name, False, "ops")
    await expect_refusal(fill, Code.MEMORY_SHORT, 2)
    await target.report()
    await expect_refusal(lambda: moves.migrate(KEY, Aim(target.name), "ops"), Code.CONFLICT, 1)
    assert len(world.region.workloads.migrations.live) == 1
    await moves.cancel(world.region.workloads.migrations.live[0].id, "ops")
    await expect_refusal(
        lambda: world.region.documents.delete(DocumentKey("Workload", str(KEY)), "ops"), Code.WORKLOAD_UNKNOWN, 1
    )
    assert not world.region.workloads.migrations.live


async def test_triggers_run_at_once_for_documents_that_may_ask_for_moves(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each change of any document ran them. Whose turn it is goes from one run to the next."""
    agents = await two_agents(world)
    for _ in range(20):
        await run_heartbeat(world, *agents)
    ran, given, left = list[bool](), list[object](), list[object]()

    def note(*args: Any, **named: Any) -> AdvanceResult:
        found = replace(advance(*args, **named), turns={"comparison": {"shop": Turn(len(left), "a-1")}})
        ran.append(named["run_triggers"])
        given.append(named["turns"])
        left.append(found.turns)
        return found

    monkeypatch.setattr(step, "advance", note)
    await world.step()
    await world.step()
    ran.clear()
    asked = list[str]()

    def note_asked(each: Intent) -> bool:
        asked.append(each.key.name)
        return may_ask_for_moves(each)

    monkeypatch.setattr(step, "may_ask_for_moves", note_asked)
    policy = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: other}\nspec: {optimize: {cost: 1.0}}\n"
    other = DOCUMENTS[0][1].split("---\n")[1].replace("name: reader", "name: other").replace("fast", "other")
    assert (await world.region.documents.apply([("p", policy), ("w", other)], {}, "", "test")).revision
    await world.step()
    assert not any(ran)
    assert set(asked) == {"other"}, "of all workloads, those whose documents changed"
    moves = policy.replace("spec: {", "spec: {migration: {when: {gain: 10%}}, ")
    assert (await world.region.documents.apply([("p", moves)], {}, "", "test")).revision
    await world.step()
    assert any(ran)
    assert given[1:] == left[:-1]

"""The region's controllers over a real store: sessions, documents, desired sets, and what a restart finds."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from harness.fakes.meter import RecordedMeter
from harness.fakes.region import DIGEST, DOCUMENTS, FakeAgent, RegionFixture
from harness.wait import until
from shoal.coordinator import codec, metrics
from shoal.coordinator.api.views import node_view, workload_views
from shoal.coordinator.controllers.log.events import AUDIT, AuditEntry, EventLog, LogEvent, first_broken_entry
from shoal.coordinator.controllers.log.region_clock import ClockFloor
from shoal.coordinator.controllers.region import doctor
from shoal.coordinator.controllers.region.doctor import examine
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.workloads import apply, step
from shoal.coordinator.controllers.workloads.desired_sets import DIGESTS, FEW, LARGE, DesiredSetRecords
from shoal.coordinator.core.catalog.model import DocumentKey, StoredDocument
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.ports import Transaction
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.link import Lease, NodeEvent, NodeEvents, Welcome
from shoal.types.profile import PROFILE_VERSION, ModelProfile
from shoal.types.route import Route
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import WorkloadKey

T = TypeVar("T")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


async def place_agent(world: RegionFixture) -> FakeAgent:
    """One agent that runs the one workload."""
    await world.push()
    agent = FakeAgent(world, "edge-1")
    assert isinstance(await agent.connect(), Welcome)
    applied = await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    assert not applied.plan_result.problems
    await world.step()
    await agent.apply_desired()
    await world.step()
    return agent


async def test_a_workload_whose_replicas_are_all_at_zero_is_ready_and_says_so(world: RegionFixture) -> None:
    agent = await place_agent(world)

    async def report(code: Code | None) -> tuple[str, int, str, list[str]]:
        agent.observed = tuple(replace(each, code=code, reason="the next one waits 1.2s") for each in agent.observed)
        assert await agent.report() is None
        await world.step()
        (view,) = workload_views(world.region.workloads, world.region.fleet.fleet)
        told = [event.code for event in await world.region.events.events_after(0, 1000)]
        scaled = [each for each in told if each.startswith("SCALED")]
        return view.state, view.ready, view.reason.code, scaled

    assert await report(None) == ("ready", 1, "", [])
    idle = [Code.SCALED_TO_ZERO]
    assert await report(Code.SCALED_TO_ZERO) == ("ready", 1, Code.SCALED_TO_ZERO, idle)
    assert await report(Code.WAITING_FOR_WAKE) == ("ready", 1, Code.WAITING_FOR_WAKE, idle)
    assert await report(None) == ("ready", 1, "", [*idle, "SCALED_UP"])


async def remove_workload(world: RegionFixture, agent: FakeAgent) -> None:
    """The one workload is deleted, and nothing of it is left."""
    await world.region.documents.delete(DocumentKey("Workload", "default/reader"), "test")
    for _ in range(4):
        world.clock.advance(1.0)
        await world.step()
        await agent.apply_desired()
    await world.step()
    assert not world.region.workloads.desired["edge-1"].assignments


async def codes(world: RegionFixture) -> list[str]:
    return [event.code for event in await world.region.events.events_after(0, 1000)]


async def test_what_a_workload_costs_is_metered_for_as_long_as_it_has_a_device(tmp_path: Path) -> None:
    spent = RecordedMeter()
    world = await RegionFixture.open(tmp_path / "first", meter=spent)
    region = "apiVersion: shoal/v1\nkind: Region\nmetadata: {name: eu}\nspec: {price: 0.40 USD/h}\n"
    assert not (await world.region.documents.apply([("region.yaml", region)], {}, "", "test")).plan_result.problems
    agent = await place_agent(world)
    world.clock.elapsed += 1800.0
    await world.region.workloads.step()
    reader = metrics.COST, ("default", "reader", "")
    assert spent.counts[reader] == pytest.approx(0.20)
    await agent.report()
    await remove_workload(world, agent)
    came = spent.counts[reader]
    world.clock.elapsed += 1800.0
    await world.region.workloads.step()
    assert spent.counts[reader] == came
    await world.store.close()


async def test_a_workload_is_placed_sent_and_routed(world: RegionFixture) -> None:
    agent = await place_agent(world)
    newest = world.links.desired_sets("edge-1")[-1]
    (assignment,) = newest.assignments
    assert (assignment.model, assignment.device) == (DIGEST, "cpu0")
    (route,) = newest.routes
    assert [endpoint.assignment for endpoint in route.endpoints] == [assignment.id]
    generations = [each.version.generation for each in world.links.desired_sets("edge-1")]
    assert generations == sorted(set(generations)), "each set that is sent is newer than the one before"
    await agent.apply_desired()
    before = len(world.links.messages)
    await world.step()
    await world.step()
    assert len(world.links.messages) == before, "nothing new, nothing sent"


async def test_what_is_sent_is_in_the_store_before(world: RegionFixture) -> None:
    await place_agent(world)
    stored = await world.store.read("desired/edge-1")
    assert stored is not None
    assert world.links.desired_sets("edge-1")[-1].version == world.region.workloads.desired["edge-1"].version


async def test_a_refused_write_sends_nothing(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.push()
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    before = len(world.links.messages)

    async def full(*_: object, **__: object) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        with pytest.raises(ShoalError):
            await world.step()
    assert len(world.links.messages) == before
    await world.step()
    assert world.links.desired_sets("edge-1")[-1].assignments


async def test_a_step_with_an_unforeseen_error_is_logged_and_the_region_does_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = RecordedMeter()
    world = await RegionFixture.open(tmp_path / "first", meter=counted)
    agent = await place_agent(world)
    region, ticks = world.region, list[int]()
    tick = region.queued_moves.tick

    async def tick_and_stop() -> None:
        await tick()
        ticks.append(len(ticks))
        if len(ticks) == 3:
            region.stop()

    def fail(*_: object, **__: object) -> object:
        raise LookupError("a defect")

    monkeypatch.setattr(region.queued_moves, "tick", tick_and_stop)
    with monkeypatch.context() as patched, capture_logs() as logged:
        patched.setattr(step, "advance", fail)
        began = world.clock.now()
        await region.run()
    failed = [each for each in logged if each["event"] == "task_failed"]
    assert [(each["task"], each["log_level"], each["exc_info"]) for each in failed] == [("step", "error", True)] * 3
    assert counted.counts[metrics.STEPS_FAILED, ()] == 3
    assert region.write_refusal is None, "the store is as good as before"
    ticked_at = region.fleet.fleet.ticked_at
    assert ticked_at is not None
    assert ticked_at > began + 1.0, "the fleet's time goes on"
    await region.documents.delete(DocumentKey("Workload", "default/reader"), "test")
    await world.step()
    assert all(each.draining for each in region.workloads.desired[agent.name].assignments)
    await world.store.close()


async def test_a_step_whose_write_got_no_answer_is_found_in_the_store(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.push()
    await FakeAgent(world, "edge-1").connect()
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    await world.region.fleet.tick()
    commit = world.store.commit

    async def commit_without_answer(transaction: Transaction) -> int:
        await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", commit_without_answer)
        with pytest.raises(ShoalError):
            await world.region.workloads.step()
    assert world.links.desired_sets("edge-1") == []
    stored = await world.store.read("desired/edge-1")
    assert stored is not None
    before = await codes(world)
    await world.step()
    (sent,) = world.links.desired_sets("edge-1")
    assert sent == codec.load(DesiredSet, stored.value), "no version has two contents"
    assert await codes(world) == before, "nothing was decided twice"


async def test_the_first_step_deletes_what_an_older_coordinator_left_of_a_node(
    world: RegionFixture, tmp_path: Path
) -> None:
    await place_agent(world)
    routes = tuple(Route(WorkloadKey("shop", f"w-{at:02}"), 1, ()) for at in range(99))
    left = DesiredSet("gone", Version("h", 1, 1), (), routes, (), (), Seconds(1.0))
    written = {key: value for key, value in DesiredSetRecords().write(left).items() if key.startswith(DIGESTS)}
    await world.store.commit(Transaction({**written, LARGE + "gone": b"{}", LARGE + "gone/routes/0": b"{}"}))
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    try:
        assert len(await again.store.scan(DIGESTS)) == 1
        await again.step()
        assert not await again.store.scan(LARGE)
        assert not await again.store.scan(DIGESTS)
        assert not again.region.workloads._records.parts("gone"), "deleted once"
    finally:
        await again.store.close()


async def test_a_restart_finds_the_same_and_moves_nothing(world: RegionFixture, tmp_path: Path) -> None:
    agent = await place_agent(world)
    before = world.region.workloads.desired["edge-1"]
    history = world.region.fence.history
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    try:
        assert again.region.fence.history == history
        assert again.region.fleet.fleet.nodes["edge-1"].liveness is Liveness.NEVER_SEEN
        assert again.region.fleet.fleet.nodes["edge-1"].receipts, "receipts are not measured again"
        await again.step()
        assert again.region.workloads.desired["edge-1"] == before, "nobody heard yet is no reason to move anything"
        again.clock.advance(5.0)
        await again.step()
        assert again.region.workloads.desired["edge-1"] == before
        agent.world = again
        assert isinstance(answer := await agent.connect(), Welcome)
        assert answer.epoch == 2
        await agent.report()
        await again.step()
        assert [each.id for each in again.region.workloads.desired["edge-1"].assignments] == [
            each.id for each in before.assignments
        ]
        assert not (await again.region.documents.plan([], {}, "test")).plan.has_changes  # type: ignore[union-attr]
    finally:
        await again.store.close()


async def test_a_restart_finds_a_large_set_and_goes_on_with_it(world: RegionFixture, tmp_path: Path) -> None:
    agent = await place_agent(world)
    text = DOCUMENTS[0][1].split("---")[1]
    many = [(f"{at}.yaml", text.replace("name: reader", f"name: reader-{at:03}")) for at in range(FEW + 10)]
    assert (await world.region.documents.apply(many, {}, "", "test")).revision
    for _ in range(4):
        await world.step()
        await agent.apply_desired()
    before = world.region.workloads.desired["edge-1"]
    assert len(before.routes) == len(many) + 1
    stored = await world.store.snapshot()
    (record,) = await world.store.scan("desired/edge-1")
    assert not codec.load(DesiredSet, record.value).routes, "they follow from what else is stored"
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    try:
        assert not again.region.workloads.desired["edge-1"].routes
        await again.step()
        assert again.region.workloads.desired["edge-1"] == before
        assert (await again.store.snapshot()).records == stored.records, "nothing changed, nothing is written"
        assert again.links.desired_sets("edge-1") == []
        await again.region.documents.delete(DocumentKey("Workload", "default/reader-003"), "test")
        await again.step()
        changed = again.region.workloads.desired["edge-1"]
        assert len(changed.routes) == len(many)
        await again.region.documents.delete(DocumentKey("Workload", "default/reader-004"), "test")
    finally:
        await again.store.close()
    last = await RegionFixture.open(tmp_path / "first", world)
    try:
        await last.step()
        found = last.region.workloads.desired["edge-1"]
        assert len(found.routes) == len(many) - 1, "what was applied before the restart is decided after it"
        assert found.version.generation == changed.version.generation + 1
    finally:
        await last.store.close()


async def test_a_lost_node_is_replaced_and_said_so(world: RegionFixture) -> None:
    agent = await place_agent(world)
    other = FakeAgent(world, "edge-2")
    await other.connect()
    for _ in range(30):
        world.clock.advance(0.5)
        await other.report()
        await world.step()
    nodes = world.region.fleet.fleet.nodes
    assert (nodes["edge-1"].liveness, nodes["edge-2"].liveness) == (Liveness.LOST, Liveness.READY)
    assert [each.workload for each in world.region.workloads.desired["edge-2"].assignments] == [
        WorkloadKey("default", "reader")
    ]
    found = await codes(world)
    assert found.index("NODE_SUSPECT") < found.index("NODE_LOST")
    assert agent.epoch == 1


async def test_f06_a_lease_is_of_the_same_claim_until_its_node_is_lost(world: RegionFixture, tmp_path: Path) -> None:
    """Over a restart too: a coordinator that was away has given nobody up."""
    agent, other = FakeAgent(world, "edge-1"), FakeAgent(world, "edge-2")
    for each in (agent, other):
        await each.connect()
        await each.report()

    def claim(of: RegionFixture) -> str:
        epoch = of.region.fleet.fleet.nodes["edge-1"].epoch
        agent.sequence += 1
        status = Status(
            "edge-1", epoch, agent.sequence, True, agent.version, (), (), (), (), of.clock.wall(), True, asks_lease=True
        )
        lease = of.region.fleet.on_status("edge-1", epoch, status)
        assert isinstance(lease, Lease), lease
        return lease.claim

    first = claim(world)
    assert first == claim(world)
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    try:
        for each in (agent, other):
            each.world = again
            await each.connect()
            await each.report()
        assert claim(again) == first
        for _ in range(30):
            again.clock.advance(0.5)
            await other.report()
            await again.step()
        assert again.region.fleet.fleet.nodes["edge-1"].liveness is Liveness.LOST
        assert claim(again) != first
    finally:
        await again.store.close()


async def test_f31_a_node_is_not_judged_by_what_was_not_read_yet(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link reads its messages one after the other, and the disk takes long to write what it said before."""
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await agent.report()
    await world.step()
    write, begun, written = world.region.fence.note, asyncio.Event(), asyncio.Event()

    async def slowly(*events: LogEvent) -> None:
        if events[0].code == "CLOCK_SKEW":
            begun.set()
            await written.wait()
        await write(*events)

    monkeypatch.setattr(world.region.fence, "note", slowly)
    said = NodeEvents((NodeEvent("CLOCK_SKEW", "edge-1", "it jumped", world.clock.wall()),))
    reading = asyncio.ensure_future(world.region.fleet.on_message("edge-1", agent.epoch, said))
    await begun.wait()

    async def after_s(seconds: int) -> Liveness:
        for _ in range(2 * seconds):
            world.clock.advance(0.5)
            await world.step()
        return world.region.fleet.fleet.nodes["edge-1"].liveness

    assert await after_s(20) is Liveness.READY
    written.set()
    await reading
    assert await after_s(0) is Liveness.READY
    assert await after_s(2) is Liveness.LOST, "and it was silent"


async def test_a_twin_is_refused_and_the_running_one_stays(world: RegionFixture) -> None:
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    duplicate = FakeAgent(world, "edge-1", boot="boot-9")
    answer = await duplicate.connect()
    assert isinstance(answer, Refusal)
    assert answer.code is Code.DUPLICATE_IDENTITY
    assert await agent.report() is None
    assert Code.DUPLICATE_IDENTITY in await codes(world)


async def test_an_agent_that_fell_silent_may_come_back_and_its_old_session_is_fenced(world: RegionFixture) -> None:
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    world.clock.advance(4.0)
    assert isinstance(answer := await agent.connect(), Welcome)
    assert answer.epoch == 2
    assert [node for node, _ in world.links.ended_sessions] == ["edge-1"]
    late = await agent.report(epoch=1)
    assert late is not None
    assert late.code is Code.EPOCH_STALE


async def test_a_node_that_says_it_holds_another_set_is_sent_its_own_again(world: RegionFixture) -> None:
    agent = await place_agent(world)
    await agent.apply_desired()
    await world.step()
    count = len(world.links.desired_sets("edge-1"))
    agent.version = None
    world.clock.advance(1.0)
    await agent.report()
    await world.step()
    world.clock.advance(4.0)
    await agent.report()
    await world.step()
    assert len(world.links.desired_sets("edge-1")) > count


async def test_a_stale_plan_is_refused_and_says_what_differs(world: RegionFixture) -> None:
    await world.push()
    await FakeAgent(world, "edge-1").connect()
    await world.step()
    shown = await world.region.documents.plan(DOCUMENTS, {}, "test")
    assert shown.plan is not None
    await world.region.fleet.cordon("edge-1", True, "test")
    await FakeAgent(world, "edge-2").connect()
    await world.step()
    applied = await world.region.documents.apply(DOCUMENTS, {}, shown.plan.hash, "test")
    assert applied.revision == 0
    assert any("edge-1" in line for line in applied.plan_differences)
    assert any("edge-2" in line for line in applied.plan_differences)
    assert not world.region.workloads.catalog.documents
    fresh = await world.region.documents.plan(DOCUMENTS, {}, "test")
    assert fresh.plan is not None
    assert (await world.region.documents.apply(DOCUMENTS, {}, fresh.plan.hash, "test")).revision > 0


READER = DOCUMENTS[0][1].partition("---\n")[2]


async def test_a_plan_holds_while_others_change_nothing_that_it_decides(world: RegionFixture) -> None:
    await place_agent(world)
    others = [("other.yaml", READER.replace("reader", "other"))]
    shown = await world.region.documents.plan(others, {}, "test")
    assert shown.plan is not None
    assert shown.plan.workloads
    await world.step()
    again = await world.region.documents.plan(others, {}, "test")
    assert again.plan is not None
    assert again.plan.hash == shown.plan.hash
    assert (await world.region.documents.apply(others, {}, shown.plan.hash, "test")).revision > 0


async def test_a_large_apply_is_planned_by_the_steps_alone(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply, "MOST_PLANNED", 1)
    await place_agent(world)
    texts = [(name, READER.replace("reader", name)) for name in ("one", "two")]
    shown = await world.region.documents.plan(texts, {}, "test")
    assert shown.plan is not None
    with_hash = await world.region.documents.apply(texts, {}, "another", "test")
    assert with_hash.plan_differences
    applied = await world.region.documents.apply(texts, {}, "", "test")
    assert applied.revision
    assert applied.plan_result.plan is None
    await world.step()
    placed = {one.workload.name for one in world.region.workloads.desired["edge-1"].assignments}
    assert {"one", "two"} <= placed


async def test_an_apply_that_asks_for_no_plan_places_nothing_itself(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place_agent(world)
    others = [("other.yaml", READER.replace("reader", "other"))]
    stale = await world.region.documents.apply(others, {}, "another", "test", with_plan=False)
    assert stale.plan_differences, "a hash is compared all the same"

    async def refuse_placement(*_: object) -> None:
        raise AssertionError("placed")

    with monkeypatch.context() as patched:
        patched.setattr(world.region.workloads, "next_placement", refuse_placement)
        applied = await world.region.documents.apply(others, {}, "", "test", with_plan=False)
    assert applied.revision
    assert applied.plan_result.plan is None
    assert [(each.sign, each.name) for each in applied.plan_result.documents] == [("+", "default/other")]
    await world.step()
    assert "other" in {one.workload.name for one in world.region.workloads.desired["edge-1"].assignments}


@pytest.mark.parametrize("most", [1, 2])
async def test_what_a_large_apply_stores_is_made_beside_the_loop(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The documents are read there, whatever their number."""
    monkeypatch.setattr(apply, "MOST_DUMPED", most)
    await place_agent(world)
    computed = list[object]()

    async def compute(work: Callable[[], T]) -> T:
        computed.append(found := work())
        return found

    texts = [(name, READER.replace("reader", name)) for name in ("one", "two")]
    applied = await world.region.documents.apply(texts, {}, "", "test", with_plan=False, compute=compute)
    assert applied.revision
    assert len(computed) == (2 if most < len(texts) else 1)
    found = dict(world.region.workloads.catalog.documents)
    await world.region.documents.start()
    assert dict(world.region.workloads.catalog.documents) == found, "the store has the same"


async def test_planning_after_applying_shows_nothing(world: RegionFixture) -> None:
    await place_agent(world)
    again = await world.region.documents.plan(DOCUMENTS, {}, "test")
    assert again.plan is not None
    assert not again.documents
    assert not again.plan.has_changes


async def test_a_change_bumps_the_revision_and_shows_its_lines(world: RegionFixture) -> None:
    await place_agent(world)
    texts = [(name, text.replace("latency: 1.0", "cost: 1.0")) for name, text in DOCUMENTS]
    (change,) = (await world.region.documents.plan(texts, {}, "test")).documents
    assert (change.sign, change.kind, change.name) == ("~", "Policy", "fast")
    assert change.lines == ("- spec.optimize.latency: 1.0", "+ spec.optimize.cost: 1.0")
    await world.region.documents.apply(texts, {}, "", "test")
    assert world.region.workloads.catalog.documents[DocumentKey("Policy", "fast")].revision == 2


async def test_a_workload_says_when_its_document_was_applied_last(world: RegionFixture) -> None:
    """Not when that of its policy was, nor since when it waits."""

    def read_applied_at() -> float:
        (view,) = workload_views(world.region.workloads, world.region.fleet.fleet)
        return view.applied_at

    async def apply(word: str, other: str) -> float:
        world.clock.advance(60.0)
        texts = [(name, text.replace(word, other)) for name, text in DOCUMENTS]
        at = world.clock.wall()
        assert not (await world.region.documents.apply(texts, {}, "", "test")).plan_result.problems
        return at

    begun = world.clock.wall()
    await place_agent(world)
    first = read_applied_at()
    assert begun <= first <= world.clock.wall()
    await apply("latency: 1.0", "cost: 1.0")
    assert read_applied_at() == first
    at = await apply("{name: reader}", "{name: reader, labels: {v: b}}")
    assert read_applied_at() == at


async def test_documents_with_problems_change_nothing(world: RegionFixture) -> None:
    applied = await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    assert [problem.refusal.code for problem in applied.plan_result.problems] == [Code.MODEL_UNKNOWN]
    assert not await world.store.scan("documents/")


async def test_what_is_in_use_is_not_deleted(world: RegionFixture) -> None:
    await place_agent(world)
    for delete in (
        world.region.documents.delete(DocumentKey("Policy", "fast"), "test"),
        world.region.models.remove("ocr", "test"),
    ):
        with pytest.raises(ShoalError) as refused:
            await delete
        assert refused.value.code is Code.IN_USE
    await world.region.documents.delete(DocumentKey("Workload", "default/reader"), "test")
    await world.region.documents.delete(DocumentKey("Policy", "fast"), "test")
    assert await world.region.models.remove("ocr", "test") == (DIGEST, True)
    assert not world.models.kept
    with pytest.raises(ShoalError) as gone:
        await world.region.documents.delete(DocumentKey("Workload", "default/reader"), "test")
    assert gone.value.code is Code.WORKLOAD_UNKNOWN


async def test_a_deleted_workload_is_drained_and_goes(world: RegionFixture) -> None:
    agent = await place_agent(world)
    await remove_workload(world, agent)
    assert not world.region.workloads.desired["edge-1"].routes


async def test_a_refused_model_leaves_nothing(world: RegionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deny_inspection(path: str, digest: str, shapes: object) -> None:
        raise ShoalError(Refusal(Code.MODEL_INVALID))

    monkeypatch.setattr(world.models, "inspect", deny_inspection)
    with pytest.raises(ShoalError):
        await world.push()
    assert not world.models.kept
    assert not await world.store.scan("models/")


async def test_a_newer_push_takes_over_a_name(world: RegionFixture) -> None:
    await world.push()
    newer = "sha256:" + "b" * 64

    async def chunks() -> AsyncIterator[bytes]:
        yield b"y" * 1000

    await world.region.models.push("ocr", Bytes(1000), newer, chunks(), actor="test")
    assert world.region.workloads.catalog.digest_of("ocr") == newer
    assert world.region.workloads.catalog.models[DIGEST].names == ()


async def test_a_coordinator_that_was_replaced_changes_nothing_more(world: RegionFixture) -> None:
    """Two coordinators over one store: whoever opens a history fences the other."""
    second = replace(world.region.fence._record, history="history-x")
    await world.store.commit(Transaction({"region": codec.dump(second)}))
    sequence = (await world.region.events.events_after(0, 1000))[-1].sequence
    with pytest.raises(ShoalError) as refused:
        await world.region.fence.commit({"nodes/x": b"{}"})
    assert refused.value.code is Code.NOT_LEADER
    await world.region.fence.note(LogEvent("NEVER", "x", "its events would take the numbers of the other's"))
    assert (await world.region.events.events_after(0, 1000))[-1].sequence == sequence
    assert world.region.leadership_loss.is_set()


async def test_who_is_elected_begins_a_term_and_waits_a_full_window(world: RegionFixture, tmp_path: Path) -> None:
    """Over one store, as two machines would: the first one's next write is refused, and it is told by whom."""
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    second = RegionalCoordinator(
        world.store, world.links, world.models, world.models, world.clock, world.ids, RegionConfig("eu")
    )
    await second.start(elected=True)
    assert (second.fence.term, second.fence.history) == (world.region.fence.term + 1, world.region.fence.history)
    assert (await second.events.events_after(0, 1))[0].code == "LEADER_ELECTED"
    await second.fleet.tick()
    assert second.fleet.fleet.nodes["edge-1"].liveness is Liveness.NEVER_SEEN
    with pytest.raises(ShoalError) as refused:
        await world.region.fleet.cordon("edge-1", True, "test")
    assert refused.value.code is Code.NOT_LEADER
    assert isinstance(await agent.connect(), Refusal)


async def test_absurd_reports_are_refused_and_persisting_ones_quarantine(world: RegionFixture) -> None:
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    for _ in range(3):
        refusal = await agent.report(free_bytes=2**50)
        assert refusal is not None
        assert refusal.code is Code.TELEMETRY_ABSURD
    assert world.region.fleet.fleet.nodes["edge-1"].quarantined
    assert world.region.fleet.fleet.nodes["edge-1"].readings["cpu0"].free_bytes == 2**33, "the last good one stays"
    await world.region.fleet.tick()
    assert Code.NODE_QUARANTINED in await codes(world)


async def test_events_are_kept_to_their_number_and_followed(world: RegionFixture) -> None:
    log = EventLog(world.store, world.clock, kept=5, audit_kept=5)
    await log.start()
    first = (await log.events_after(0, 1000))[-1].sequence
    seen: list[int] = []

    async def follow() -> None:
        async for event in log.follow(first):
            seen.append(event.sequence)
            if len(seen) == 8:
                return

    follower = asyncio.create_task(follow())
    for number in range(8):
        await log.write(LogEvent("TEST", f"{number}", ""))
        await until(partial(seen.__contains__, first + 1 + number), 5.0, "the follower")
    await asyncio.wait_for(follower, 5)
    assert seen == list(range(first + 1, first + 9))
    assert len(await log.events_after(0, 1000)) <= 5 + 1


async def test_the_audit_log_shows_what_was_done_to_it(world: RegionFixture) -> None:
    for number in range(6):
        await world.region.events.audit("shoal://eu/operator/admin", "Apply", f"{number}", "applied")
    stored = await world.store.scan(AUDIT)
    entries = [codec.load(AuditEntry, record.value) for record in stored]
    assert first_broken_entry(stored) is None
    other = replace(stored[2], value=codec.dump(replace(entries[2], subject="other")))
    assert first_broken_entry([*stored[:2], other, *stored[3:]]) == entries[3].sequence
    assert first_broken_entry([*stored[:2], *stored[3:]]) == entries[3].sequence
    assert first_broken_entry([*stored[:2], replace(stored[2], value=b"{}"), *stored[3:]]) == entries[2].sequence
    swapped = [replace(stored[0], value=stored[1].value), replace(stored[1], value=stored[0].value), *stored[2:]]
    assert first_broken_entry(swapped) == entries[0].sequence
    checks = [check async for check in examine(world.region, world.store) if "audit" in check.name]
    assert [check.refusal for check in checks] == [None]


async def test_doctor_checks_the_invariants_beside_the_loop(world: RegionFixture) -> None:
    works = list[object]()

    async def compute(work: Callable[[], T], /) -> T:
        found = work()
        works.append(found)
        return found

    checks = [check.name async for check in examine(world.region, world.store, compute)]
    assert "the invariants hold" in checks
    assert () in works, "what was found of them"


async def test_f50_doctor_and_get_nodes_say_that_a_front_does_not_answer(world: RegionFixture) -> None:
    agent = await place_agent(world)
    state = replace(
        world.region.fleet.fleet.nodes["edge-1"], liveness=Liveness.READY, has_full_status=True, front_ready=True
    )
    assert agent is not None
    for shown, expected in ((state, None), (replace(state, front_ready=False), Code.NODE_NOT_READY)):
        refusal = doctor._node(shown)
        assert (refusal.code if refusal is not None else None) == expected
        assert node_view(shown, None, None).reason.code == (expected or "")
    refusal = doctor._node(replace(state, front_ready=False))
    assert refusal is not None
    assert refusal.found == "the front of edge-1 does not answer"


def test_records_of_another_shape_are_refused() -> None:
    with pytest.raises(ShoalError) as refused:
        codec.load(ClockFloor, b'{"at": 1.0}')
    assert refused.value.code is Code.STATE_CORRUPT


async def test_a_document_of_a_newer_version_is_refused_and_nothing_is_changed(world: RegionFixture) -> None:
    """On the way back to the version before, which does not know a field of it."""
    await world.push()
    await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    key = DocumentKey("Workload", "default/reader").store_key
    stored = await world.store.read(key)
    assert stored is not None
    document = codec.load(StoredDocument, stored.value)
    text = json.loads(document.text)
    text["spec"]["novel"] = 3
    newer = codec.dump(replace(document, text=json.dumps(text)))
    await world.store.commit(Transaction({key: newer}))
    before = await world.store.scan("")
    ports = (world.store, world.links, world.models, world.models, world.clock, world.ids)
    with pytest.raises(ShoalError) as refused:
        await RegionalCoordinator(*ports, RegionConfig("eu")).start()
    assert refused.value.code is Code.STATE_CORRUPT
    assert "Workload default/reader" in refused.value.refusal.found
    assert "'novel' in spec" in refused.value.refusal.found
    assert await world.store.scan("") == before


async def test_a_model_that_is_pushed_again_is_inspected_again_if_an_older_version_did(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs as well: at the shapes that it was placed at. Then it is known, and its bytes are not read."""
    await place_agent(world)
    older = world.region.workloads.catalog.models[DIGEST].profile
    asked, inspect = list[Mapping[str, tuple[int, ...]]](), world.models.inspect

    async def inspect_newly(
        path: str, digest: str, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> ModelProfile:
        asked.append(shapes or {})
        return replace(await inspect(path, digest, shapes), version=PROFILE_VERSION, largest_weight_bytes=Bytes(700))

    monkeypatch.setattr(world.models, "inspect", inspect_newly)
    for _ in range(2):
        await world.push()
        profile = world.region.workloads.catalog.models[DIGEST].profile
        assert profile == replace(older, version=PROFILE_VERSION, largest_weight_bytes=Bytes(700))
    assert asked == [older.reference_shapes]
    (record,) = await world.store.scan("models/")
    assert b'"largest_weight_bytes":700' in record.value


@pytest.mark.parametrize(("code", "is_known"), [(Code.MODEL_INVALID, True), (Code.MODEL_DIGEST, False)])
async def test_a_model_that_is_known_stays_so_where_it_is_not_inspected_again(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, code: Code, is_known: bool
) -> None:
    await place_agent(world)
    before = world.region.workloads.catalog.models[DIGEST]

    async def refuse_all(*_: object) -> ModelProfile:
        raise refuse(code, "a model", "another one", "push another one")

    monkeypatch.setattr(world.models, "inspect", refuse_all)
    with nullcontext() if is_known else pytest.raises(ShoalError):
        await world.push("another-name")
    assert world.region.workloads.catalog.models[DIGEST].profile == before.profile
    assert (world.region.workloads.catalog.digest_of("another-name") == DIGEST) is is_known


async def test_a_profile_at_other_shapes_replaces_none_that_something_runs_by(world: RegionFixture) -> None:
    await place_agent(world)
    before = world.region.workloads.catalog.models[DIGEST].profile
    other = replace(before, version=PROFILE_VERSION, reference_shapes={"x": (1, 3, 96, 96)})
    kept = await world.region.models.keep(other, "ocr", DIGEST, actor="test")
    assert kept.model.profile == before
    with pytest.raises(ShoalError) as refused:
        await world.region.models.keep(other, "ocr", DIGEST, actor="test", has_shapes=True)
    assert refused.value.code is Code.IN_USE

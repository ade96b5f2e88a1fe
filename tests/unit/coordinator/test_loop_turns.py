"""What the operator API computes does not hold the coordinator's loop: by slices, by one workload, or in a thread."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from harness.builders.federation_members import member
from harness.fakes.region import RegionFixture, two_agents
from harness.wait import until
from shoal.coordinator import codec
from shoal.coordinator.api import operator, region_views, views
from shoal.coordinator.api.compute_pool import MAX_REQUESTS_PER_CALLER, ComputePool
from shoal.coordinator.api.federation_operator import FederationOperatorService
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.api.pace import SLICE_S, Pace, extend_in_slices
from shoal.coordinator.controllers.federation import ledger
from shoal.coordinator.controllers.federation.ledger import LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.region import doctor
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.controllers.workloads import apply, placement_queries
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.catalog.propose import propose
from shoal.coordinator.ports import Transaction, VerifiedMessage
from shoal.types.agreement import ReportContent
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey
from shoal.v1 import nouns_pb2, operator_pb2

NOWHERE = """apiVersion: shoal/v1
kind: Policy
metadata: {name: nowhere}
spec: {require: {where: 'node.name == "none"'}}
"""
READER = operator_pb2.ExplainRequest(workload=nouns_pb2.WorkloadKey(tenant="default", name="reader"))
SECOND = """apiVersion: shoal/v1
kind: Workload
metadata: {name: second}
spec: {model: {source: ocr}, policy: fast}
"""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "region")
    await two_agents(opened)
    await opened.region.documents.apply([("second.yaml", SECOND)], {}, "", "test")
    await opened.step()
    yield opened
    await opened.store.close()


class NoCertificates:
    """Enrolment, as far as lists ask it."""

    async def expiry_of(self, role: Role, name: str) -> None:
        return None


@pytest.fixture
def api(world: RegionFixture) -> OperatorService:
    nobody = cast(Any, None)
    return OperatorService(world.region, cast(Any, NoCertificates()), nobody, nobody, nobody)


async def test_explain_shows_one_workload_as_lists_do_and_builds_no_other(
    world: RegionFixture, api: OperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, fleet = world.region.workloads, world.region.fleet.fleet
    (listed,) = (each for each in views.workload_views(controller, fleet) if each.workload.name == "reader")
    built: list[WorkloadKey] = []
    build = views.workload_view

    def note(intent: Any, index: Any) -> operator_pb2.WorkloadView:
        built.append(intent.key)
        return build(intent, index)

    monkeypatch.setattr(views, "workload_view", note)
    reply = await api.explain(READER, "test")
    assert built == [WorkloadKey("default", "reader")]
    assert reply.workload == listed
    assert [each.assignment.workload.name for each in reply.placements] == ["reader"]


async def test_lists_are_whole_and_in_order(world: RegionFixture, api: OperatorService) -> None:
    controller, fleet = world.region.workloads, world.region.fleet.fleet
    names = sorted(fleet.nodes)
    nodes = (await api.get(operator_pb2.GetRequest(kind="nodes"), "test")).nodes
    assert list(nodes) == [views.node_view(fleet.nodes[name], controller.desired.get(name), None) for name in names]
    devices = (await api.get(operator_pb2.GetRequest(kind="devices"), "test")).devices
    assert [each.node for each in devices] == names
    workloads = (await api.get(operator_pb2.GetRequest(kind="workloads"), "test")).workloads
    assert list(workloads) == list(views.workload_views(controller, fleet))
    assert len(workloads) == 2
    placements = (await api.get(operator_pb2.GetRequest(kind="placements"), "test")).placements
    assert {each.assignment.workload.name for each in placements} == {"reader", "second"}
    assert all(each.HasField("prediction") for each in placements)
    (one,) = (await api.get(operator_pb2.GetRequest(kind="nodes", name=names[1]), "test")).nodes
    assert one.node.name == names[1]


async def test_explain_looks_at_other_places_in_a_thread(
    world: RegionFixture, api: OperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}
    for module, name in ((placement_queries, "place"), (placement_queries, "reasons_to_stay"), (views, "_predictions")):
        monkeypatch.setattr(module, name, _noting(threads, name, getattr(module, name)))
    reply = await api.explain(READER, "test")
    assert threads.keys() == {"place", "reasons_to_stay", "_predictions"}
    assert threading.get_ident() not in threads.values()
    assert [each.to for each in reply.move_holds], "of a replica that has another place"


def _noting(threads: dict[str, int], name: str, work: Any) -> Any:
    def note(*given: Any, **named: Any) -> Any:
        threads[name] = threading.get_ident()
        return work(*given, **named)

    return note


async def test_a_workload_that_was_deleted_is_explained_by_its_assignments(world: RegionFixture) -> None:
    controller, fleet, key = world.region.workloads, world.region.fleet.fleet, WorkloadKey("default", "reader")
    assert views.one_workload_view(controller, fleet, WorkloadKey("default", "none")) is None
    controller.intents = tuple(each for each in controller.intents if each.key != key)
    found = views.one_workload_view(controller, fleet, key)
    assert found is not None
    assert found.state == views.DELETING


async def test_a_list_that_is_made_in_slices_is_as_of_its_begin(world: RegionFixture) -> None:
    """No plan of a later step with earlier documents, nor the other way round, and no workload twice."""
    controller, fleet, key = world.region.workloads, world.region.fleet.fleet, DocumentKey("Workload", "default/second")
    impossible = [("nowhere.yaml", NOWHERE), ("second.yaml", SECOND.replace("fast", "nowhere"))]
    await world.region.documents.apply(impossible, {}, "", "test")
    await world.step()
    whole = [*views.workload_views(controller, fleet)]
    assert [each.final for each in whole if each.workload.name == "second"] == [True]
    before = views.workload_views(controller, fleet)
    found = [next(before)]
    await world.region.documents.apply([("second.yaml", SECOND)], {}, "", "test")
    during = views.workload_views(controller, fleet)
    progressing = [next(during)]
    await world.step()
    (second,) = (each for each in (*progressing, *during) if each.workload.name == "second")
    assert second.revision == controller.catalog.documents[key].revision
    assert not second.final, "what was refused is another revision"
    leaving = views.workload_views(controller, fleet)
    listed = [next(leaving)]
    await world.region.documents.delete(key, "test")
    assert [each.workload.name for each in (*listed, *leaving)] == ["reader", "second"]
    assert [*found, *before] == whole


async def test_a_long_list_gives_the_loop_turns_between_its_items() -> None:
    loop, turns = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    def slow() -> Iterator[int]:
        for each in range(5):
            _spin(1.5 * SLICE_S)
            yield each

    listed: list[int] = []
    count()
    await extend_in_slices(listed, slow())
    assert listed == [0, 1, 2, 3, 4]
    assert turns > 5


@pytest.fixture
async def logs(world: RegionFixture) -> None:
    """A ledger, and some entries of the audit log."""
    for number in range(8):
        await world.region.ledger.commit(
            LedgerWrites(drafts=(LedgerDraft("renewed", f"g-{number}", "us", "shop/ocr"),))
        )
        await world.region.events.audit("ann", "Apply", f"{number}", "applied")


@pytest.mark.parametrize("kind", ["ledger", "events"])
async def test_a_long_log_is_parsed_in_slices(
    world: RegionFixture, api: OperatorService, logs: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    expected = [entry.agreement for entry in await world.region.ledger.entries_after(5)]
    monkeypatch.setattr(region_views, "MAX_LEDGER_ENTRIES", 3)
    parsed = _parse_slowly(monkeypatch)
    reply = await api.get(operator_pb2.GetRequest(kind=kind), "test")
    listed = reply.ledger if kind == "ledger" else reply.events
    assert len(listed) == len(parsed), "what is not shown is not parsed either"
    assert len({*parsed}) == len(parsed) >= 3, "the loop has a turn between any two"
    if kind == "ledger":
        assert [each.agreement for each in reply.ledger] == expected


async def test_a_long_copy_of_a_ledger_is_parsed_in_slices(
    world: RegionFixture, logs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A federation's `Get ledger` of ten thousand entries held its loop for 0.15 s."""
    nobody = cast(Any, None)
    federation = FederationController("fed", world.store, world.region.events, world.clock, NoMeter(), nobody)
    await federation.admit(member("eu"))
    entries = await world.region.ledger.entries_after(0)
    await federation.report(VerifiedMessage("eu", ReportContent((), entries), b""))
    service = FederationOperatorService("fed", federation, *[nobody] * 7)  # type: ignore[abstract]
    parsed = _parse_slowly(monkeypatch)
    reply = await service.Get(operator_pb2.GetRequest(kind="ledger", name="eu"), None)
    assert [each.sequence for each in reply.ledger] == [each.sequence for each in entries]
    assert len({*parsed}) == len(parsed) > len(entries), "the loop has a turn between any two"


async def test_doctor_reads_whole_logs_in_a_thread(
    world: RegionFixture, api: OperatorService, logs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_certificates(_: object) -> AsyncIterator[doctor.HealthCheck]:
        for each in list[doctor.HealthCheck]():
            yield each

    threads, viewer = dict[str, int](), Identity("eu", Role.VIEWER, "ann", Wall(0.0), Wall(0.0), "1")
    for module, name in ((doctor, "first_broken_entry"), (ledger, "first_break")):
        monkeypatch.setattr(module, name, _noting(threads, name, getattr(module, name)))
    monkeypatch.setattr(doctor, "examine_certificates", no_certificates)
    monkeypatch.setattr(operator, "identity_of_context", lambda _: viewer)
    reply = await api.Doctor(operator_pb2.DoctorRequest(), None)
    assert threads.keys() == {"first_broken_entry", "first_break"}
    assert threading.get_ident() not in threads.values()
    assert [each.ok for each in reply.checks if "ledger" in each.name or "audit" in each.name] == [True, True]


async def test_an_apply_that_is_stored_is_answered_whatever_else_its_caller_asks(
    world: RegionFixture, api: OperatorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many plans as a caller may have begin once the documents are stored, and last until the apply has ended."""
    read, commit, run = threading.Event(), world.store.commit, ComputePool.run
    counted = list[str]()
    plans = list[asyncio.Task[operator_pb2.PlanReply]]()
    who = Identity("eu", Role.OPERATOR, "ops", Wall(0.0), Wall(0.0), "1")

    def wait_and_propose(*given: Any, **named: Any) -> Any:
        assert read.wait(30.0)
        return propose(*given, **named)

    async def note_and_run(pool: ComputePool, caller: str, work: Any, **named: Any) -> Any:
        counted.append(caller)
        return await run(pool, caller, work, **named)

    async def commit_and_plan(transaction: Transaction) -> int:
        revision = await commit(transaction)
        if not plans:
            monkeypatch.setattr(apply, "propose", wait_and_propose)
            monkeypatch.setattr(ComputePool, "run", note_and_run)
            asked = [api.plan(operator_pb2.PlanRequest(), who.uri) for _ in range(MAX_REQUESTS_PER_CALLER)]
            plans.extend(map(asyncio.create_task, asked))
            await until(lambda: len(counted) == len(plans), 30.0, "all plans in the pool")
        return revision

    class Audit:
        async def note(self, *_: str) -> None:
            asyncio.get_running_loop().call_soon(read.set)  # once the answer is waited for

    monkeypatch.setattr(operator, "identity_of_context", lambda _: who)
    monkeypatch.setattr(api, "_audit", Audit())
    monkeypatch.setattr(world.store, "commit", commit_and_plan)
    third = operator_pb2.Document(name="third.yaml", text=SECOND.replace("second", "third"))
    reply = await api.Apply(operator_pb2.ApplyRequest(documents=[third]), None)
    assert reply.revision
    assert [(each.sign, each.name) for each in reply.plan.documents] == [("+", "default/third")]
    await asyncio.gather(*plans, return_exceptions=True)


async def test_work_is_measured_in_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a look on a busy machine would be followed by a rest of nine times as long as it waited for a processor."""
    pace = Pace()
    threading.Event().wait(0.05)  # as a process that gets no processor
    await pace.breathe()
    assert pace.worked_s < 0.025
    _spin(0.03)
    await pace.breathe()
    assert 0.03 <= pace.longest_s <= pace.worked_s


def _parse_slowly(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whatever is parsed from now on takes more than a slice; returns the loop's turns at which that was done."""
    loop, load, turns, parsed = asyncio.get_running_loop(), codec.load, 0, list[int]()

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    def load_slowly(kind_of: Any, data: bytes) -> Any:
        _spin(1.5 * SLICE_S)
        parsed.append(turns)
        return load(kind_of, data)

    monkeypatch.setattr(codec, "load", load_slowly)
    count()
    return parsed


def _spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_plan_of_a_model_that_nobody_pushed_says_where_and_which_is_meant(
    world: RegionFixture, api: OperatorService
) -> None:
    """Before, the previews of other regions' offers read a catalog that cannot be read: no line, no suggestion."""
    asked = operator_pb2.Document(name="typo.yaml", text=SECOND.replace("source: ocr", "source: orc"))
    (problem,) = (await api.plan(operator_pb2.PlanRequest(documents=[asked]), "test")).problems
    assert (problem.document, problem.line, problem.refusal.code) == ("typo.yaml", 4, "MODEL_UNKNOWN")
    assert problem.refusal.found == "no model 'orc'"
    assert problem.refusal.remedy.startswith("did you mean ocr? Else push it first: shoal model push FILE")

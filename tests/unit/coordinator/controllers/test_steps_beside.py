"""A step decides beside the coordinator's loop, and what happens meanwhile counts from the next one on."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness.fakes.region import FakeAgent, RegionFixture, run_heartbeat
from harness.wait import until
from shoal.coordinator.api.compute_pool import ComputePool
from shoal.coordinator.controllers.log.events import EVENTS, MADE_AT_ONCE, EventLog, LogEvent
from shoal.coordinator.controllers.runner import inline
from shoal.coordinator.controllers.workloads import sender
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration import advance
from shoal.coordinator.core.workloads import decide as decide_module
from shoal.coordinator.core.workloads.kept import KeptDecisions
from shoal.coordinator.main.watchdog import StepLimit
from shoal.coordinator.ports import Transaction
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

T = TypeVar("T")
DOCUMENTS = """apiVersion: shoal/v1
kind: Workload
metadata: {name: NAME}
spec: {model: {source: ocr}}
"""


class Gate:
    """Where steps decide: each waits until the test lets it go on."""

    def __init__(self) -> None:
        self.is_closed = False
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, work: Callable[[], T], /) -> T:
        if self.is_closed:
            self.arrived.set()
            await self.go.wait()
        return work()


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def world(tmp_path: Path, gate: Gate) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path, decide=gate)
    yield opened
    await opened.store.close()


async def apply(world: RegionFixture, name: str) -> None:
    done = await world.region.documents.apply([("w.yaml", DOCUMENTS.replace("NAME", name))], {}, "", "ops")
    assert done.revision


async def stands(world: RegionFixture) -> FakeAgent:
    """One node with one workload in service."""
    await world.push()
    agent = FakeAgent(world, "edge-1")
    await agent.connect()
    await apply(world, "first")
    await world.step()
    await run_heartbeat(world, agent)
    return agent


def placed_names(world: RegionFixture) -> set[str]:
    return {one.workload.name for each in world.region.workloads.desired.values() for one in each.assignments}


async def others_turn() -> None:
    """Until whatever is due on the loop has had its turn."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


async def begin_step(world: RegionFixture, gate: Gate) -> "asyncio.Task[None]":
    """A step that decides when the gate opens."""
    gate.is_closed = True
    task = asyncio.create_task(world.region.workloads.step())
    await asyncio.wait_for(gate.arrived.wait(), 10)
    return task


async def test_reports_and_documents_are_taken_while_a_step_decides(world: RegionFixture, gate: Gate) -> None:
    agent = await stands(world)
    await apply(world, "second")
    step = await begin_step(world, gate)
    await agent.report()
    done = await world.region.documents.apply(
        [("w.yaml", DOCUMENTS.replace("NAME", "third"))], {}, "", "ops", with_plan=False
    )
    assert done.revision
    assert not step.done()
    gate.go.set()
    await step
    assert placed_names(world) == {"first", "second"}, "as of when the step began"
    await world.step()
    assert placed_names(world) == {"first", "second", "third"}


async def test_a_plan_waits_for_the_decision_and_not_for_its_commit(
    world: RegionFixture, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier steps decided changes under the hands of one that decides."""
    await stands(world)
    await apply(world, "second")
    step = await begin_step(world, gate)
    workloads = world.region.workloads
    plan = asyncio.create_task(workloads.next_placement(workloads.catalog))
    for _ in range(10):
        await others_turn()
    assert not plan.done()
    commit, stored = world.store.commit, asyncio.Event()

    async def wait_and_commit(transaction: Transaction) -> int:
        await stored.wait()
        return await commit(transaction)

    monkeypatch.setattr(world.store, "commit", wait_and_commit)
    gate.go.set()
    found = await asyncio.wait_for(plan, 10)
    assert WorkloadKey("default", "second") in {each.key for each in found.inputs.intents}
    assert not step.done()
    stored.set()
    await step


async def test_silence_is_judged_while_a_step_decides(
    world: RegionFixture, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause between two looks at the fleet counts as one of the coordinator's own, in which it heard nothing."""
    await stands(world)
    await apply(world, "second")
    tick = world.region.fleet.tick

    async def tick_each_second() -> None:
        await tick()
        world.clock.advance(1.0)

    monkeypatch.setattr(world.region.fleet, "tick", tick_each_second)
    step = await begin_step(world, gate)
    await until(lambda: world.region.fleet.fleet.nodes["edge-1"].liveness is Liveness.LOST, 60.0, "the node to be lost")
    assert not step.done()
    gate.go.set()
    await step


async def test_a_step_that_cannot_be_settled_is_adopted_all_the_same(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored. The next step decides about everything, and writes nothing twice."""
    await stands(world)
    await apply(world, "second")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(KeptDecisions, "adopt", fail)
        await world.step()
    assert placed_names(world) == {"first", "second"}
    revision = world.region.workloads.desired["edge-1"].version
    await world.step()
    assert world.region.workloads.desired["edge-1"].version == revision


async def test_the_newest_events_are_told_while_and_after_many_are_refused(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(world.store, world.clock, kept=10_000, audit_kept=100)
    await log.start()
    for number in range(20):
        await log.write(LogEvent("TOLD", f"{number}", ""))
    told = list[int]()

    async def pause(_: Seconds) -> None:
        told.append(len(await log.events_after(0, 20)))

    async def refuse_all(_: Transaction) -> int:
        raise refuse(Code.STORE_FULL, "a full store", "room", "make some")

    with monkeypatch.context() as patched:
        patched.setattr(world.clock, "sleep", pause)
        patched.setattr(world.store, "commit", refuse_all)
        with pytest.raises(ShoalError):
            await log.write(*(LogEvent("MADE", f"{number}", "") for number in range(4 * MADE_AT_ONCE)))
    assert told == [20, 20, 20]
    await log.write(LogEvent("TOLD", "20", ""))
    assert [each.subject for each in await log.events_after(0, 20)] == [*map(str, range(1, 21))]


async def test_what_a_computation_stops_by_reaches_the_caller() -> None:
    """A future takes no StopIteration: its caller would wait for ever."""
    pool = ComputePool(threads=1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(pool.run("steps", lambda: next(iter(())), limited=False), 30)
    pool.stop()


async def test_a_step_that_does_not_end_ends_the_process() -> None:
    told, stuck = list[str](), asyncio.Event()

    async def never(work: Callable[[], T], /) -> T:
        await stuck.wait()
        return work()

    def end(found: str, _: str) -> None:
        told.append(found)
        stuck.set()

    assert await asyncio.wait_for(StepLimit(never, end, Seconds(0.0))(lambda: 1), 60) == 1
    assert told == ["a step of the region that decides for 600s"]
    assert await StepLimit(inline, end, Seconds(0.0))(lambda: 2) == 2
    await others_turn()
    assert len(told) == 1


async def test_the_process_has_a_thread_where_steps_decide_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, decide, pool = set[int](), decide_module.decide, ComputePool(threads=1)

    def note(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return decide(*given)

    monkeypatch.setattr(advance, "decide", note)

    async def beside(work: Callable[[], T], /) -> T:
        return await pool.run("steps", work, limited=False)

    world = await RegionFixture.open(tmp_path, decide=beside)
    await stands(world)
    assert placed_names(world) == {"first"}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    pool.stop()
    await world.store.close()


async def test_a_step_that_was_stored_unheard_is_known_whole_by_the_next_one(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is settled follows the store too: the next step decides about nothing again."""
    agent = await stands(world)
    await apply(world, "second")
    commit = world.store.commit

    async def lose_answer(transaction: Transaction) -> int:
        await commit(transaction)
        raise refuse(Code.STORE_UNAVAILABLE, "no answer of the store", "one", "try again")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", lose_answer)
        with pytest.raises(ShoalError):
            await world.step()
    wholes = list[bool]()
    decide = decide_module.decide

    def note(*given: Any) -> Any:
        found = decide(*given)
        wholes.append(found.is_whole)
        return found

    monkeypatch.setattr(advance, "decide", note)
    await world.step()
    assert placed_names(world) == {"first", "second"}
    await run_heartbeat(world, agent)
    assert not any(wholes)


async def test_others_have_turns_while_the_events_of_a_large_apply_are_made(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(world.store, world.clock, kept=10_000, audit_kept=100)
    await log.start()
    count, turns = 4 * MADE_AT_ONCE, 0
    others = list["asyncio.Task[None]"]()

    async def pause(_: Seconds) -> None:
        nonlocal turns
        turns += 1
        others.append(asyncio.create_task(log.write(LogEvent("MADE", f"other {turns}", ""))))
        await others_turn()

    monkeypatch.setattr(world.clock, "sleep", pause)
    await log.write(*(LogEvent("MADE", f"{number}", "") for number in range(count)))
    await asyncio.gather(*others)
    assert turns == 3
    stored = await world.store.scan(EVENTS)
    revisions = [each.revision for each in stored]
    assert revisions == sorted(revisions), "one who follows the log asks for higher numbers alone"
    told = [each.subject for each in await log.events_after(0, 2 * count) if each.code == "MADE"]
    assert told == [*map(str, range(count)), "other 1", "other 2", "other 3"]


async def test_others_have_turns_while_many_sets_are_sent(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SENT_AT_ONCE", 2)
    turns = 0

    async def pause(seconds: Seconds) -> None:
        nonlocal turns
        assert seconds == Seconds(0.0)
        turns += 1

    for number in range(5):
        await FakeAgent(world, f"edge-{number}").connect()
    await world.region.fleet.tick()
    monkeypatch.setattr(world.clock, "sleep", pause)
    await world.region.workloads.step()
    assert len(world.links.messages) == 5
    assert turns == 2

"""A whole region under load while its parts are killed: F01, F03 and F06, by `shoal dev break`.

The coordinator's outage is scaled: seconds instead of a minute, with the region's beats as they are.
"""

import json
import threading
from dataclasses import dataclass, field

import pytest

from harness.cluster.stack import DevStack, InferenceLoad, Process, log_time, policy, process_start
from harness.measure.contention import RunDelay, startup_slowdown_s
from harness.report import record
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.types.codes import Code, ShoalError
from shoal.types.workload import PartitionRule
from shoal.v1 import operator_pb2

NODES = ("plain-cpu", "edge-npu")
VIEW_WITHIN_S = 5.0
ADOPTED_WITHIN_S = 2.0
GIVEN_UP = ("NODE_LOST", "NODE_SUSPECT")


def through_gateway(stack: DevStack, clients: int = 4) -> InferenceLoad:
    return InferenceLoad(stack.port("gateway", "data"), stack.client_files, "pair", clients)


@dataclass
class PolicyWriter:
    """Applies one policy after the other on a thread, and remembers which were acknowledged."""

    stack: DevStack
    name: str
    acknowledged: dict[str, int] = field(default_factory=dict)
    refused: list[Code] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "PolicyWriter":
        self._thread = threading.Thread(target=self._run, name="writer")
        self._thread.start()
        wait_until(lambda: len(self.acknowledged) > 3, 30.0, "writes to be acknowledged")
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        with self.stack.api() as api:
            while not self._stopping.is_set():
                count += 1
                name = f"{self.name}-{count}"
                document = operator_pb2.Document(name="w.yaml", text=policy(name, f"  priority: {count}\n"))
                try:
                    reply = api.apply([document])
                    assert not reply.problems
                    self.acknowledged[name] = count
                except ShoalError as error:
                    self.refused.append(error.code)
                    self._stopping.wait(0.05)

    def lost_writes(self) -> list[str]:
        """Acknowledged writes that the region does not hold as they were written."""
        with self.stack.api() as api:
            documents = api.get("policies").documents
        held = {one.name: json.loads(one.text)["spec"].get("priority") for one in documents}
        return [name for name, count in self.acknowledged.items() if held.get(name) != count]


def whole(stack: DevStack) -> bool:
    """All nodes are ready and both replicas serve, in the coordinator's own view."""
    with stack.api() as api:
        nodes = {view.node.name: view for view in api.get("nodes").nodes}
        rows = api.get("placements").placements
    ready = all(nodes[name].liveness == "ready" and nodes[name].front_ready for name in (*NODES, "gateway"))
    return ready and sum(row.routed for row in rows) == len(rows) == 2


def test_f06_killed_coordinator_is_back_and_nothing_was_lost_or_restarted(pair: DevStack) -> None:
    """Killed while it writes; its keeper starts it again after half a second."""
    workers, assignments = pair.workers(), {row.assignment.id for row in pair.wait_serving("pair", 2)}
    before = pair.events()[-1].sequence
    with through_gateway(pair) as load, PolicyWriter(pair, "acked") as writer:
        pair.kill("coordinator/coordinator")
        count = len(writer.acknowledged)
        wait_until(lambda: len(writer.acknowledged) > count + 3, 60.0, "writes again")
        load.wait_for(100)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert writer.refused, "the writer saw the outage"
    assert writer.lost_writes() == []
    wait_until(lambda: whole(pair), 60.0, "the whole view")
    assert pair.workers() == workers, "the very same processes"
    assert {row.assignment.id for row in pair.placements("pair")} == assignments
    assert [event.code for event in pair.events(before) if event.code in GIVEN_UP] == []
    assert pair.doctor() == []
    figures = {"writes_acknowledged": len(writer.acknowledged), "writes_lost": 0, "replicas_restarted": 0}
    record("F06", "P", 1, outage="restarted by its keeper", sent=verdict.sent, lost=verdict.lost_count, **figures)


@pytest.mark.parametrize("down_s", [PartitionRule().lost_after_s + 2.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_f06_coordinator_held_down_under_load(pair: DevStack, down_s: float) -> None:
    """Down for longer than its nodes may be silent: who is back has not lost them for its own absence."""
    clock = SystemClock()
    workers, before = pair.workers(), pair.events()[-1].sequence
    with through_gateway(pair) as load:
        killed = clock.now()
        pair.kill("coordinator")
        told = pair.shoal("get", "nodes")
        assert (told.returncode, told.stderr.split()[-1].strip("()")) == (255, Code.COORDINATOR_UNREACHABLE), (
            told.stderr
        )
        load.wait_for(20, after_s=down_s - (clock.now() - killed))
        assert pair.processes("coordinator") == {}
        resumed = clock.now()
        pair.control.break_member("coordinator", "resume")
        listening, delay = clock.now(), RunDelay(*(pid for pid, _ in pair.processes()))
        wait_until(lambda: whole(pair), 60.0, "the whole view")
        complete_s, delayed_s = clock.now() - listening, delay.seconds()
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert complete_s - delayed_s <= VIEW_WITHIN_S, f"of which {delayed_s:.2f}s because others hold the cores"
    assert pair.workers() == workers, "the very same processes"
    assert [event.code for event in pair.events(before) if event.code in GIVEN_UP] == []
    drift = pair.shoal("plan")
    assert (drift.returncode, "nothing to do" in drift.stdout) == (0, True), drift.stdout + drift.stderr
    assert pair.doctor() == []
    record(
        "F06", "P", 1, outage_s=round(resumed - killed, 1), sent=verdict.sent, lost=verdict.lost_count,
        view_complete_s=round(complete_s, 2), slowest_s=round(verdict.slowest_s, 3), replicas_restarted=0,
    )  # fmt: skip


@pytest.mark.parametrize("node", NODES)
def test_f01_worker_of_one_of_two_replicas_killed_under_load(pair: DevStack, node: str) -> None:
    pair.wait_serving("pair", 2)
    before = pair.workers()
    victim = next(row.assignment.id for row in pair.placements("pair") if row.node == node)
    last = pair.events()[-1].sequence
    with through_gateway(pair) as load:
        pair.kill(f"{node}/worker")
        load.wait_for(100)
        after = wait_until(
            lambda: _workers_if_reloaded(pair, before, victim), 60.0, "the assignment to be loaded again"
        )
        pair.wait_serving("pair", 2)
        load.wait_for(100)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert {name for name in before if before[name] != after[name]} == {victim}
    codes = {event.code for event in pair.events(last) if event.node == node}
    assert Code.WORKER_KILLED in codes
    assert not codes & {Code.POISONED, Code.WORKER_CRASHED}, "killed from outside: no fault of the model"
    figures = {"retried_by_gateway": _retry_count(pair), "slowest_s": round(verdict.slowest_s, 3)}
    record("F01", "P", 1, sent=verdict.sent, lost=verdict.lost_count, **figures)


@pytest.mark.parametrize("node", [*NODES, "gateway"])
def test_f03_supervisor_killed_under_load(pair: DevStack, node: str) -> None:
    pair.wait_serving("pair", 2)
    workers, fronts = pair.workers(), pair.processes(node, "front")
    booted, delay = len(pair.log_lines(node, "agent_started")), RunDelay()
    with through_gateway(pair) as load:
        pair.kill(f"{node}/supervisor")
        load.wait_for(50)
        (supervisor,) = wait_until(lambda: list(pair.processes(node, "supervisor")), 60.0, "its next one")
        delay.add(supervisor[0])
        wait_until(lambda: len(pair.log_lines(node, "agent_started")) > booted, 60.0, "it to have booted")
        adopted_s = log_time(pair.log_lines(node, "agent_started")[-1]) - process_start(supervisor[0])
        delayed_s = delay.seconds()
        wait_until(lambda: whole(pair), 60.0, "the whole view")
        load.wait_for(50)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert pair.workers() == workers, "the very same processes"
    assert pair.processes(node, "front") == fronts
    assert pair.log_lines(node, "agent_started")[-1]["adopted"] == (0 if node == "gateway" else 1)
    slowed_s = delayed_s + startup_slowdown_s()
    assert adopted_s - slowed_s <= ADOPTED_WITHIN_S, f"of which {slowed_s:.2f}s because others hold the cores"
    record("F03", "P", 1, node=node, sent=verdict.sent, lost=verdict.lost_count, adopted_s=round(adopted_s, 2))


def _workers_if_reloaded(stack: DevStack, before: dict[str, Process], victim: str) -> dict[str, Process]:
    now = stack.workers()
    return now if set(now) == set(before) and now[victim] != before[victim] else {}


def _retry_count(stack: DevStack) -> int:
    return sum(each.retried for each in stack.workload("pair").ingress)

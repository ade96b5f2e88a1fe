"""A local region of real processes, as `shoal dev up` starts it; the real command line; and load."""

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from harness.clients.oip import GrpcClient, InferenceError, Tensor
from harness.cluster import measured_processor
from harness.crypto.pki import CertificateFiles
from harness.measure.history import CallHistory, CallOutcome, HistoryVerdict, check_histories
from harness.models.synthetic import relu
from harness.ports import free_ports
from harness.wait import wait_until
from shoal.agent.clock import SystemClock
from shoal.client import Context, Contexts, RegionClient
from shoal.devstack.bootstrap import Say
from shoal.devstack.control import Control, RunningStack, context_of
from shoal.devstack.layout import StackLayout, StackMember, StackOptions
from shoal.types.codes import Code, ShoalError
from shoal.types.receipt import Receipt
from shoal.types.units import Wall
from shoal.v1 import operator_pb2
from shoal.wire import nouns
from shoal.wire.enrol import redeem

WAIT_TIMEOUT_S = 60.0
"""For everything that takes a second or two on an idle machine."""

Process = tuple[int, float]
"""(pid, start time): identifies a process even if its pid is used again."""


class HarnessControl(Control):
    """`shoal dev up`, but agents that begin take over what an earlier one measured of this machine's processor."""

    def up(self, asked: StackOptions, say: Say) -> RunningStack:
        started = super().up(asked, say)
        with RegionClient(started.operator) as api:
            found = api.get("devices").devices
        measured_processor.keep(nouns.from_wire(Receipt, each.receipt) for each in found if each.receipt.node)
        return started

    def _enrol(self, api: RegionClient, stack: StackLayout, member: StackMember) -> None:
        super()._enrol(api, stack, member)
        state = self.folder / member.name
        if member.role == "agent" and not (state / "journal").exists():
            measured_processor.hand_to(member.name, state)


class DevStack:
    """One region under `folder`, up from `up()` to `down()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contexts = Contexts(folder / "home")
        self.control: Control = HarnessControl(folder / "dev", self.contexts, free_ports)
        self._up: RunningStack | None = None

    def up(self, asked: StackOptions) -> None:
        self._up = self.control.up(asked, lambda text: None)

    def down(self) -> None:
        """Nothing of it runs on return."""
        running = self.processes()
        self.control.down()
        wait_until(lambda: not _alive(running), WAIT_TIMEOUT_S, "every process to end")

    @property
    def info(self) -> RunningStack:
        assert self._up is not None, "up() was not called"
        return self._up

    @property
    def client_files(self) -> CertificateFiles:
        """Files of the default tenant."""
        return files_of(self.info.client)

    def port(self, name: str, use: str) -> int:
        """use: grpc, rest, token, metrics, link, enrol."""
        member = next(member for member in self.info.stack.members if member.name == name)
        return int(member.addresses[use].rpartition(":")[2])

    # as an operator

    def api(self, region: str = "") -> RegionClient:
        """region: by default the first."""
        return RegionClient(self.contexts.get(context_of(self.info.stack, region)) if region else self.info.operator)

    def shoal(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run the real command line in a process of its own."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        return subprocess.run(
            [str(Path(sys.executable).with_name("shoal")), *arguments],
            env={
                **environment,
                "SHOAL_HOME": str(self.contexts.folder),
                "SHOAL_DEV_DIR": str(self.control.folder),
                "COLUMNS": "300",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def push(self, content: bytes, name: str) -> None:
        path = self.folder / f"{name}.onnx"
        path.write_bytes(content)
        with self.api() as api:
            api.push(path, name)

    def apply(self, text: str, region: str = "") -> operator_pb2.ApplyReply:
        with self.api(region) as api:
            reply = api.apply([operator_pb2.Document(name="test.yaml", text=text)])
        assert not reply.problems, reply.problems
        return reply

    def tenant(self, name: str) -> tuple[CertificateFiles, str]:
        """A client certificate and a bearer token for that tenant."""
        folder = self.folder / f"tenant-{name}"
        with self.api() as api:
            token = api.create_token("tenant", name, 300.0).token
            bearer = api.create_token("bearer", name, 3600.0).token
        redeem(self.info.stack.coordinator_addresses("enrol"), token, name).write(folder)
        return CertificateFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem"), bearer

    def workload(self, name: str, tenant: str = "default") -> operator_pb2.WorkloadView:
        with self.api() as api:
            return next(
                view
                for view in api.get("workloads").workloads
                if (view.workload.tenant, view.workload.name) == (tenant, name)
            )

    def placements(self, name: str = "") -> list[operator_pb2.PlacementView]:
        with self.api() as api:
            rows = api.get("placements").placements
        return [row for row in rows if name in ("", row.assignment.workload.name)]

    def wait_serving(self, name: str, replicas: int = 1) -> list[operator_pb2.PlacementView]:
        """Its placements, once `replicas` of them serve, none starts or drains, and every front has the routes."""

        def rows_if_settled() -> list[operator_pb2.PlacementView]:
            rows = self.placements(name)
            still = all(row.routed and not row.assignment.draining for row in rows)
            return rows if still and len(rows) == replicas and self.are_nodes_current() else []

        return wait_until(rows_if_settled, WAIT_TIMEOUT_S, f"{replicas} replicas of {name} to serve", every_s=0.1)

    def migrate(self, name: str, to: str) -> operator_pb2.MigrationView:
        """Migrate the workload to that node; return the migration once it is done or aborted."""
        with self.api() as api:
            begun = api.migrate("default", name, to)

        def view_if_over() -> operator_pb2.MigrationView | None:
            with self.api() as api:
                (one,) = api.get("migrations", begun.id).migrations
            return one if one.stage in ("done", "aborted") else None

        found = wait_until(view_if_over, 2 * WAIT_TIMEOUT_S, f"{begun.id} to be over")
        assert found is not None
        return found

    def are_nodes_current(self) -> bool:
        """Whether every ready node has its newest desired set."""
        with self.api() as api:
            return all(view.observed == view.desired for view in api.get("nodes").nodes if view.liveness == "ready")

    def delete_workloads(self, *names: str, tenant: str = "default") -> None:
        """Delete those of these workloads that exist; nothing of them is left on return."""

        def remaining() -> list[operator_pb2.WorkloadView]:
            with self.api() as api:
                views = api.get("workloads").workloads
            return [view for view in views if view.workload.tenant == tenant and view.workload.name in names]

        with self.api() as api:
            for view in remaining():
                if view.state != "deleting":
                    api.delete("workload", view.workload.name, tenant)
        wait_until(lambda: not remaining(), WAIT_TIMEOUT_S, f"{', '.join(names)} to be gone", every_s=0.1)

    def events(self, after: int = 0) -> list[operator_pb2.Event]:
        with self.api() as api:
            return list(api.events(after))

    # as somebody with a shell on the machine

    def processes(self, name: str = "", role: str = "") -> dict[Process, str]:
        """`NAME/ROLE` -> running processes."""
        found: dict[Process, str] = {}
        for row in self.control.status():
            if row["pid"] and name in ("", row["name"]) and role in ("", row["role"]):
                try:
                    found[row["pid"], psutil.Process(row["pid"]).create_time()] = f"{row['name']}/{row['role']}"
                except psutil.NoSuchProcess:
                    continue
        return found

    def workers(self) -> dict[str, Process]:
        """The process of every assignment that is loaded, of all nodes."""
        found: dict[str, Process] = {}
        for record in sorted(self.control.folder.glob("*/run/worker-*.json")):
            told = json.loads(record.read_text())
            for one in told["assignments"]:
                pid = told["pid"]
                found[one["id"]] = (pid, psutil.Process(pid).create_time())
        return found

    def kill(self, target: str) -> dict[Process, str]:
        """SIGKILL through `shoal dev break`; returns when those processes are dead."""
        name, _, role = target.partition("/")
        victims = self.processes(name, role)
        assert victims, f"{target} has no process"
        hit = self.kill_if_running(target)
        assert {pid for pid, _ in victims} <= set(hit), f"{target}: {victims} but {hit}"
        wait_until(lambda: not _alive(victims), WAIT_TIMEOUT_S, f"{target} to be dead")
        return victims

    def kill_if_running(self, target: str) -> list[int]:
        """SIGKILL at once; the pids, empty if nothing of it runs."""
        try:
            return self.control.break_member(target, "kill")
        except ShoalError as error:
            if error.code is not Code.NOT_FOUND:
                raise
            return []

    def wait_dead(self, pids: Sequence[int]) -> None:
        """Wait until the killed processes are gone."""
        wait_until(lambda: not [pid for pid in pids if _lives(pid)], WAIT_TIMEOUT_S, f"{list(pids)} to be dead")

    def log_lines(self, name: str, event: str) -> list[dict[str, Any]]:
        """Lines of that event in one member's log."""
        text = (self.control.folder / "logs" / f"{name}.log").read_text()
        lines = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def doctor(self) -> list[str]:
        """Failing checks."""
        with self.api() as api:
            return [f"{check.name}: {check.refusal.found}" for check in api.doctor().checks if not check.ok]


def process_start(pid: int) -> Wall:
    """When that process was started, to 10 ms; psutil uses the boot time cut to the second."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    clock = SystemClock()
    age_s = clock.ticks(clock.now()) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return Wall(clock.wall() - age_s)


def log_time(line: dict[str, Any]) -> Wall:
    """When that event was logged, by its own timestamp."""
    return Wall(datetime.fromisoformat(line["timestamp"]).timestamp())


def files_of(context: Context) -> CertificateFiles:
    return CertificateFiles(context.certificate, context.key, context.ca)


def _alive(processes: dict[Process, str]) -> list[str]:
    return [name for (pid, started), name in processes.items() if _lives(pid, started)]


def _lives(pid: int, started: float | None = None) -> bool:
    try:
        process = psutil.Process(pid)
        return started in (None, process.create_time()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def region(
    folder: Path,
    agents: int,
    link: str = "grpc",
    *,
    regions: int = 1,
    federation: int = 0,
    store: str = "sqlite",
    coordinators: int = 1,
    fleet: tuple[tuple[str, str], ...] = (),
) -> Iterator[DevStack]:
    """With the model `relu` in the first region."""
    stack = DevStack(folder)
    try:
        asked = StackOptions(
            agents=agents, link=link, regions=regions, federation=federation, store=store, coordinators=coordinators,
            fleet=fleet,
        )  # fmt: skip
        stack.up(asked)
        stack.push(relu().SerializeToString(), "relu")
        yield stack
    finally:
        stack.down()


def expected_answer(asked: Hashable) -> Hashable:
    """Model of the service: max(x, 0) of [-n, n, n + 0.5, 0]."""
    assert isinstance(asked, int)
    return struct.pack("<4f", 0.0, asked, asked + 0.5, 0.0)


_RETRYABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""Status codes that ordinary gRPC clients retry."""
RETRY_S = 0.1
_NO_ANSWER = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL"})


def input_of(asked: int) -> tuple[Tensor, ...]:
    return (Tensor("x", "FP32", (1, 4), struct.pack("<4f", -asked, asked, asked + 0.5, 0.0)),)


@dataclass
class InferenceLoad:
    """Clients of one workload, by default of `harness.models.synthetic.relu`, on a thread of their own.

    Each client sends its next request when the last one is answered, at most `rate` a second. Every request has its own
    right answer, and each client keeps its own history. A client retries at the other fronts as ordinary gRPC clients
    do, for `retry_for_s` after it first sent the request.
    """

    # Data port of the first front.
    port: int
    # Client certificate.
    files: CertificateFiles
    # Name of the workload.
    workload: str
    # Number of concurrent clients.
    clients: int = 4
    # Most requests per second of each client.
    rate: float = 30.0
    # Of each attempt.
    timeout_s: float = 30.0
    # Of every front.
    host: str = "127.0.0.1"
    # Request number -> its inputs.
    inputs: Callable[[int], tuple[Tensor, ...]] = input_of
    # Ports of further fronts, tried in turn after a retryable failure.
    other_ports: tuple[int, ...] = ()
    # Seconds from a request's first attempt during which it is retried; 0: never.
    retry_for_s: float = 0.0
    # (start, end, error) of every attempt that was retried.
    failed_attempts: list[tuple[float, float, str]] = field(default_factory=list)
    # One per client.
    histories: list[CallHistory] = field(default_factory=list)
    # Time base of the histories.
    _clock: SystemClock = field(default_factory=SystemClock)
    # Set to end the clients.
    _stopping: threading.Event = field(default_factory=threading.Event)
    # Runs the clients; None before.
    _thread: threading.Thread | None = None

    def __enter__(self) -> "InferenceLoad":
        self.histories = [CallHistory() for _ in range(self.clients)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")
        self._thread.start()
        self.wait_for(5 * self.clients)
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def now(self) -> float:
        return self._clock.now()

    def answer_count(self, since: float = 0.0) -> int:
        """Answers to requests that were sent after `since`."""
        return sum(
            done.outcome is CallOutcome.OK and done.start >= since
            for history in self.histories
            for done in list(history.completed)
        )

    def latencies(self, since: float, until: float) -> list[float]:
        """Seconds of every answer so far to a request that was sent between the two times."""
        return [
            done.end - done.start
            for history in self.histories
            for done in list(history.completed)
            if done.outcome is CallOutcome.OK and since <= done.start < until
        ]

    def longest_gap_s(self, since: float) -> float:
        """The longest time without an answer since then."""
        ends = sorted(
            done.end
            for history in self.histories
            for done in list(history.completed)
            if done.outcome is CallOutcome.OK and done.end >= since
        )
        return max(later - earlier for earlier, later in pairwise([since, *ends]))

    def wait_for(self, count: int, *, after_s: float = 0.0) -> None:
        """Wait until `count` more requests, sent at least `after_s` from now, are answered."""
        since = self.now() + after_s
        wait_until(lambda: self.answer_count(since) >= count, WAIT_TIMEOUT_S + after_s, f"{count} more answers")

    def verdict(self, answer: Callable[[Hashable], Hashable] = expected_answer) -> HistoryVerdict:
        """Call after the load has ended. answer: the right one to each request."""
        return check_histories(self.histories, answer)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number, history in enumerate(self.histories):
                group.create_task(self._client(number, history))

    async def _client(self, number: int, history: CallHistory) -> None:
        authority = self.files.authority.read_bytes()
        fronts = [GrpcClient(port, authority, self.files, host=self.host) for port in (self.port, *self.other_ports)]
        asked = number
        while not self._stopping.is_set():
            due = asyncio.get_running_loop().time() + 1 / self.rate
            asked = (asked + self.clients) % 2**20
            call = history.begin(asked, self.now())
            tries = number
            while True:
                began = self.now()
                try:
                    answer = await fronts[tries % len(fronts)].infer(
                        self.workload, self.inputs(asked), timeout=self.timeout_s
                    )
                    history.end(call, CallOutcome.OK, answer.outputs[0].raw, self.now())
                    break
                except InferenceError as error:
                    tries += 1
                    if error.status in _RETRYABLE and self.now() < history.calls[call][1] + self.retry_for_s:
                        self.failed_attempts.append((began, self.now(), str(error)))
                        if (tries - number) % len(fronts) == 0:
                            await _sleep_until(asyncio.get_running_loop().time() + RETRY_S)
                        continue
                    told = error.code or error.status not in _NO_ANSWER
                    outcome = CallOutcome.REFUSED if told else CallOutcome.UNKNOWN
                    history.end(call, outcome, error.code or str(error.status), self.now())
                    break
            await _sleep_until(due)
        for front in fronts:
            await front.close()


async def _sleep_until(due: float) -> None:
    """Sleep until `due` on the loop's clock."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(due):
            await asyncio.Event().wait()


def documents(*parts: str) -> str:
    return "---\n".join(parts)


def policy(name: str, spec: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec:\n{spec}"


def workload(name: str, source: str, policy: str = "", tenant: str = "default") -> str:
    lines = [
        "apiVersion: shoal/v1",
        "kind: Workload",
        f"metadata: {{name: {name}, tenant: {tenant}}}" if tenant != "default" else f"metadata: {{name: {name}}}",
        "spec:",
        f"  model: {{source: {source}}}",
        *([f"  policy: {policy}"] if policy else []),
    ]
    return "\n".join(lines) + "\n"


def on_nodes(nodes: Sequence[str], replicas: int = 1) -> str:
    """A policy's spec: replicas on these nodes, at most one per node."""
    where = f"node.name in [{', '.join(repr(node) for node in nodes)}]"
    spread = f"\n    availability: {{replicas: {replicas}, spread: node}}" if replicas > 1 else ""
    return f'  require:\n    where: "{where}"{spread}\n'

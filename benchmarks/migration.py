"""Live migrations under load, beside stopping and starting and a rolling replacement: `shoal bench migration`.

A region of real processes on machines of their own (network namespaces): a coordinator, a gateway, and two plain CPU
agents. Between any two of them a process delays every packet by half the requested RTT, if that is more than the bare
connection takes. Unmodified tritonclients, in a separate process, send to the gateway at a steady rate with fixed due
times. An answer's latency counts from when its request was due, and every answer is compared with ONNX Runtime's in
this process, bit for bit.

First the benchmark finds the highest rate that the machine sustains without queueing. It tries the model on one of the
agents, and a replica on each, as in the middle of a migration; the lower rate counts. Then, at shares of it, a model of
4 MB moves back and forth.

A row for each share and RTT: requests failed and wrong; p99 before and during the migrations, and their ratio; the
longest time without an answer; how long a migration takes beside its floor (bytes / bandwidth + load + the hold
windows). Below it: p99 of each stage; the stages in which each migration's longest time without an answer began; the
ratio of a single migration's p99 to that of the seconds before it.

Migrations take two steps of 2 s each, so that there can be many; `--own-steps` has the four of 10 s of a policy without
settings. Then the same agents do it in two other ways: `stop-start` deletes the workload and applies it for the other
node; `rolling` compares nothing and gives all requests to the new replica at once. `--no-moves N` adds N windows as
long as the live migrations in which nothing moves, with one replica and with one on each node. They show how uneven the
machine is by itself, and what two replicas on its cores cost, as in the middle of a migration.

Everything shares this machine: clients, gateway, both agents, coordinator and link delays; the scheduler's per-session
grouping is off meanwhile (`without_autogroup`). Needs root. Without options: the quick form, one share and RTT and 6
migrations. The full form is `--loads 50 70 90 --rtts 0.1 2 30 100 --moves 100`, hours in one go; its parts can be run
one by one, at the same rate by `--rate`.
"""

import argparse
import contextlib
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnxruntime
from _machine import machine_line
from onnx import helper, numpy_helper

from shoal.client import Contexts, RegionClient
from shoal.devstack import layout
from shoal.devstack.control import RunningStack
from shoal.devstack.layout import StackMember
from shoal.types.address import HostPort
from shoal.v1 import operator_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.clients import triton_load
from harness.clients.triton_load import RECORD
from harness.cluster.netns_stack import NetnsControl
from harness.faults.netns import TEST_MACHINE, NetnsNetwork, network
from harness.models.synthetic import model, tensor
from harness.wait import wait_until

NODES: Final[tuple[str, ...]] = ("node-a", "node-b")
WORKLOAD: Final = "dense"
WIDTHS: Final = (256, 1024, 768, 16)
SAMPLE_COUNT: Final = 16
CONNECTIONS: Final = 2
LEAST_RATE: Final = 100.0
PROBE_S: Final = 10.0
SETTLE_S: Final = 1.0
TAIL_S: Final = 0.3
"""Seconds after a migration that still count as during it, for requests in flight."""
TIMEOUT_S: Final = 120.0
POLL_S: Final = 0.25
BETWEEN_S: Final = 9.0
"""Seconds from a migration to the baseline of the next one, in which nodes finish what they do later for their next
start."""
BEFORE_S: Final = 4.0
"""Seconds before a migration that it is compared with."""
HOLD_S: Final = 2.0
"""Seconds of a step: the least that a coordinator allows, so that every front has the new routes."""
STEPS: Final = f"shift: {{steps: [25%, 100%], hold: {HOLD_S:g}s}}"
BARE_RTT_MS: Final = 0.2
"""RTT of the connection itself."""
CLIENTS_NICE: Final = -10
"""Clients count as machines of their own: a busy server must not delay them."""
LINK_NICE: Final = ("nice", "-n", "-15")
"""A link's delay must not depend on how busy the machines at its ends are."""
COORDINATOR_NICE: Final = ("nice", "-n", "10")
"""The coordinator counts as a machine of its own, which serves no requests: its work must not take time from those that
serve."""

AUTOGROUP: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")

Stages: TypeAlias = tuple[tuple[str, float], ...]
"""The stages of a migration and when each began, in seconds of this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Requests between two moments."""

    # Seconds from when a request was due to its answer.
    latencies: tuple[float, ...]
    # Requests that failed.
    failed: int
    # Requests with a wrong answer.
    wrong: int
    # Longest time without an answer, in seconds.
    gap_s: float


@dataclass(frozen=True, slots=True)
class MoveRow:
    """Results of one method at one load and RTT. Windows before and during the migrations are pooled for
    percentiles."""

    # Name of the method.
    way: str
    # Share of the highest sustained rate.
    load: float
    # Requests a second.
    rate: float
    # RTT to the gateway as measured, in milliseconds.
    rtt_ms: float
    # Number of migrations.
    moves: int
    # Requests due during the migrations.
    requests: int
    # Failed requests of these.
    failed: int
    # Wrong answers of these.
    wrong: int
    # Failed or wrong requests at all other times.
    outside: int
    # Median latency before the migrations, in milliseconds.
    p50_before_ms: float
    # p99 latency before the migrations, in milliseconds.
    p99_before_ms: float
    # p99 latency during the migrations, in milliseconds.
    p99_during_ms: float
    # p99_during_ms / p99_before_ms.
    p99_ratio: float
    # Longest time without an answer before any migration, in milliseconds.
    gap_before_ms: float
    # Median over the migrations of the longest time without an answer, in milliseconds.
    gap_median_ms: float
    # Longest time without an answer during any migration, in milliseconds.
    gap_worst_ms: float
    # Median duration of a migration, in seconds.
    took_s: float
    # Median of the least duration, in seconds: bytes / bandwidth + load + the hold windows.
    floor_s: float
    # One-minute load average of the machine at the end.
    machine_load: float
    # For each migration: its p99 over that of the time before it.
    ratios: tuple[float, ...] = ()
    # For each stage over all migrations: its name, the p99 in milliseconds and the number of requests due in it.
    by_stage_ms: tuple[tuple[str, float, int], ...] = ()
    # For each stage: its name, how many migrations had their longest time without an answer begin in it, and the
    # longest of those in milliseconds.
    gaps_by_stage: tuple[tuple[str, int, float], ...] = ()


# The region


class Machines(NetnsControl):
    """Agents that emulate nothing: each has the whole processor of this machine."""

    def _with_own_addresses(self, member: StackMember) -> StackMember:
        return replace(super()._with_own_addresses(member), emulate="", labels={})


class Scene:
    """The region and its model. api: one connection for all calls, because each new connection would take a core for
    milliseconds just when latency is measured."""

    def __init__(self, net: NetnsNetwork, up: RunningStack, api: RegionClient, folder: Path) -> None:
        self.net = net
        self.up = up
        self.api = api
        self.folder = folder
        self.model = folder / "dense.onnx"
        self.model.write_bytes(dense())
        self.names: dict[str, str] = dict(zip(NODES, (member.name for member in up.stack.agents), strict=True))
        self._fetched: set[str] = set()

    @property
    def gateway(self) -> StackMember:
        return self.up.stack.gateways[0]

    def is_first_on(self, node: str) -> bool:
        """True if the model's bytes must be transferred to the node; later they are there."""
        before = node in self._fetched
        self._fetched.add(node)
        return not before

    def apply(self, *nodes: str, migration: str = STEPS, replicas: int = 1) -> None:
        """Applies the workload with `replicas` replicas on these nodes."""
        where = ", ".join(repr(self.names[node]) for node in nodes)
        text = (
            f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: bench}}\nspec:\n"
            f"  require:\n    where: \"node.name in [{where}]\"\n"
            f"    availability: {{replicas: {replicas}{', spread: node' if replicas > 1 else ''}}}\n"
            f"  migration: {{{migration}}}\n---\n"
            f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: {WORKLOAD}}}\n"
            f"spec: {{model: {{source: {WORKLOAD}}}, policy: bench}}\n"
        )  # fmt: skip
        reply = self.api.apply([operator_pb2.Document(name="bench.yaml", text=text)])
        if reply.problems:
            raise SystemExit(str(reply.problems))

    def serving(self, replicas: int = 1) -> operator_pb2.PlacementView:
        """The only replica, or one of several, once all serve and every front has the routes."""

        def settled_placement() -> operator_pb2.PlacementView | None:
            rows, nodes = self.api.get("placements").placements, self.api.get("nodes").nodes
            heard = all(node.observed == node.desired for node in nodes)
            return rows[0] if heard and len(rows) == replicas and all(row.routed for row in rows) else None

        found = wait_until(settled_placement, TIMEOUT_S, "as many replicas as asked to serve", every_s=POLL_S)
        assert found is not None
        return found

    def node(self, replicas: int = 1) -> str:
        here = self.serving(replicas).node
        return next(node for node, name in self.names.items() if name == here)

    def other(self, replicas: int = 1) -> str:
        """A node without the replica, or without one particular replica of several."""
        return next(node for node in NODES if node != self.node(replicas))


@contextlib.contextmanager
def without_autogroup() -> Iterator[None]:
    """Switches off the scheduler's autogrouping while the block runs (sched(7)). With it Linux weighs sessions against
    each other, whatever the priorities in them: a low-priority process on one machine of the scene would keep its
    session's share of the cores that all machines use."""
    before = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    if before:
        AUTOGROUP.write_text("0")
    try:
        yield
    finally:
        if before:
            AUTOGROUP.write_text(before)


@contextlib.contextmanager
def scene(folder: Path) -> Iterator[Scene]:
    names = ["coordinator", "gateway", *(name for name, _ in layout.fleet_of(len(NODES)))]
    with network(names) as net:
        before = dict.fromkeys(names, ()) | {"coordinator": COORDINATOR_NICE}
        control = Machines(folder / "dev", Contexts(folder / "home"), net, before)
        try:
            up = control.up(layout.StackOptions(agents=len(NODES)), lambda text: print(f"# {text}", file=sys.stderr))
            with RegionClient(up.operator) as api:
                found = Scene(net, up, api, folder)
                api.push(found.model, WORKLOAD)
                found.apply(*NODES)
                found.is_first_on(found.node())
                yield found
        finally:
            control.down()


def dense() -> bytes:
    """Layers of WIDTHS with random weights, 4 MB: y [1, 16] of x [1, 256]."""
    chance = np.random.default_rng(11)
    nodes, weights, last = [], [], "x"
    for number, (wide, narrow) in enumerate(pairwise(WIDTHS)):
        values = (chance.standard_normal((wide, narrow)) / np.sqrt(wide)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{number}"))
        out = "y" if number == len(WIDTHS) - 2 else f"h{number}"
        nodes.append(helper.make_node("MatMul", [last, f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Relu" if out != "y" else "Tanh", [f"m{number}"], [out]))
        last = out
    made = model(nodes, [tensor("x", [1, WIDTHS[0]])], [tensor("y", [1, WIDTHS[-1]])], weights)
    return bytes(made.SerializeToString())


def sample_requests(path: Path) -> list[tuple[str, list[int], Any, bytes]]:
    """Datatype, shape and value of each input, and the bytes of its answer."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    chance = np.random.default_rng(5)
    found: list[tuple[str, list[int], Any, bytes]] = []
    for _ in range(SAMPLE_COUNT):
        value = chance.standard_normal((1, WIDTHS[0])).astype(np.float32)
        (answer,) = session.run(None, {"x": value})
        found.append(("FP32", list(value.shape), value, np.asarray(answer).tobytes()))
    return found


# The load


class LoadClients:
    """The process that sends requests. Call `window` after `end` or `pause`, when all outcomes are written."""

    def __init__(self, folder: Path, at: Scene) -> None:
        self._calls = folder / "calls"
        arrays, spec = folder / "questions.pickle", folder / "load.json"
        arrays.write_bytes(pickle.dumps(sample_requests(at.model)))
        client = at.up.folder / "client"
        told = {
            "url": at.gateway.addresses["data"],
            "model": WORKLOAD,
            "authority": str(client / "ca.pem"),
            "certificate": str(client / "cert.pem"),
            "key": str(client / "key.pem"),
            "connections": CONNECTIONS,
            "arrays": str(arrays),
            "calls": str(self._calls),
        }
        spec.write_text(json.dumps(told))
        child = str(Path(triton_load.__file__))
        self._process = subprocess.Popen(
            ["nice", "-n", str(CLIENTS_NICE), sys.executable, child, str(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit("the clients did not start")

    def set_rate(self, rate: float) -> None:
        self._input.write(f"{rate}\n")
        self._input.flush()

    def pause(self) -> None:
        """Stops sending and waits until the outcomes so far are written."""
        self.set_rate(0.0)
        time.sleep(SETTLE_S)
        self.set_rate(0.0)
        time.sleep(0.1)

    def end(self) -> None:
        self._input.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def calls(self) -> np.ndarray[Any, Any]:
        """Rows (due, over, outcome)."""
        raw = self._calls.read_bytes()
        raw = raw[: len(raw) // RECORD.size * RECORD.size]
        return np.array(list(RECORD.iter_unpack(raw)), np.float64).reshape(-1, 3)

    def failures(self) -> list[str]:
        return self._calls.with_suffix(".failures").read_text().splitlines()


def window(calls: np.ndarray[Any, Any], since: float, until: float) -> LoadWindow:
    inside = calls[(calls[:, 0] >= since) & (calls[:, 0] < until)]
    answered = inside[inside[:, 2] == triton_load.OK]
    ends = np.sort(calls[(calls[:, 2] == triton_load.OK) & (calls[:, 1] >= since) & (calls[:, 1] < until), 1])
    gap_s = float(np.max(np.diff(np.concatenate([[since], ends, [until]])))) if len(ends) else until - since
    return LoadWindow(
        tuple(answered[:, 1] - answered[:, 0]),
        int(np.sum(inside[:, 2] == triton_load.FAILED)),
        int(np.sum(inside[:, 2] == triton_load.WRONG)),
        gap_s,
    )


def gaps_by_stage(
    calls: np.ndarray[Any, Any], spans: Sequence[tuple[float, float]], stages: Sequence[Stages]
) -> tuple[tuple[str, int, float], ...]:  # fmt: skip
    found = dict[str, list[float]]()
    ends = np.sort(calls[calls[:, 2] == triton_load.OK, 1])
    for (since, until), told in zip(spans, stages, strict=True):
        inside = ends[(ends >= since) & (ends < until + TAIL_S)]
        if not told or len(inside) < 2:
            continue
        longest = int(np.argmax(np.diff(inside)))
        began = [name for name, at in told if at <= inside[longest]]
        found.setdefault(began[-1] if began else "asked", []).append(float(inside[longest + 1] - inside[longest]))
    return tuple((name, len(gaps), 1e3 * max(gaps)) for name, gaps in found.items())


def by_stage(
    calls: np.ndarray[Any, Any], spans: Sequence[tuple[float, float]], stages: Sequence[Stages]
) -> tuple[tuple[str, float, int], ...]:  # fmt: skip
    found = dict[str, list[float]]()
    for (_, until), told in zip(spans, stages, strict=True):
        for (name, since), (_, over) in pairwise((*told, ("", until + TAIL_S))):
            found.setdefault(name, []).extend(window(calls, since, over).latencies)
    return tuple((name, 1e3 * quantile(latencies, 0.99), len(latencies)) for name, latencies in found.items())


def quantile(latencies: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(latencies), share)) if latencies else float("nan")


def highest_rate(at: Scene, clients: LoadClients) -> float:
    """Requests a second that are sustained with one replica and with one on each node, because a migration goes through
    both."""
    rates = list[float]()
    for replicas in (1, len(NODES)):
        at.apply(*NODES, replicas=replicas)
        at.serving(replicas)
        print(f"# with {replicas} replicas", file=sys.stderr)
        rates.append(sustained_rate(clients))
    return min(rates)


def sustained_rate(clients: LoadClients) -> float:
    """Requests a second that are sustained without queueing: latency does not grow over the window, and p99 is at most
    five times the median of a light load."""

    def probe(rate: float) -> LoadWindow:
        clients.set_rate(rate)
        time.sleep(PROBE_S)
        until = time.monotonic()
        clients.pause()
        return window(clients.calls(), until - PROBE_S + SETTLE_S, until)

    light_s = quantile(probe(LEAST_RATE).latencies, 0.5)

    def holds(rate: float) -> bool:
        found = probe(rate)
        half = len(found.latencies) // 2
        grows = quantile(found.latencies[half:], 0.5) > 1.5 * quantile(found.latencies[:half], 0.5)
        slow = quantile(found.latencies, 0.99) > 5 * light_s
        complete = len(found.latencies) > 0.97 * rate * (PROBE_S - SETTLE_S)
        middle, late, last = (1e3 * quantile(found.latencies, part) for part in (0.5, 0.9, 0.99))
        print(f"# {rate:.0f}/s: p50 {middle:.1f} ms, p90 {late:.1f} ms, p99 {last:.1f} ms", file=sys.stderr)
        return complete and not found.failed and not grows and not slow

    low, high = LEAST_RATE, LEAST_RATE
    while high == low and high < 4000:
        high = low * 1.4
        if holds(high):
            low = high
    while high > 1.08 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# The methods


@dataclass(frozen=True, slots=True)
class MoveMethod:
    """A way to move the workload."""

    # Name in the table.
    name: str
    # The `migration` section of the policy.
    migration: str
    # Seconds that the method waits on purpose.
    holds_s: float
    # Moves the workload to a node; returns when it is there and every front has the routes.
    move: Callable[[Scene, str], Stages]
    # Replicas before, during and after the move.
    replicas: int = 1


def migrate(at: Scene, target: str) -> Stages:
    """Raises SystemExit if the migration is aborted."""
    wall_s = time.time() - time.monotonic()
    begun = at.api.migrate("default", WORKLOAD, at.names[target])

    def over() -> operator_pb2.MigrationView | None:
        (one,) = at.api.get("migrations", begun.id).migrations
        return one if one.stage in ("done", "aborted") else None

    ended = wait_until(over, TIMEOUT_S, "the move to end", every_s=POLL_S)
    assert ended is not None
    if ended.stage != "done":
        raise SystemExit(f"{ended.id} was aborted: {ended.reason.code} {ended.reason.found}")
    at.serving()
    return tuple((each.stage, each.at - wall_s) for each in ended.stages)


def stop_start(at: Scene, target: str) -> Stages:
    at.api.delete("workload", WORKLOAD)
    wait_until(lambda: not at.api.get("workloads").workloads, TIMEOUT_S, "the workload to be gone", every_s=POLL_S)
    at.apply(target)
    at.serving()
    return ()


def no_move(like: MoveMethod, took_s: float, replicas: int = 1) -> MoveMethod:
    """Windows of the same length in which nothing moves: the machine's own noise, and the cost of two replicas on its
    cores."""

    def wait(at: Scene, target: str) -> Stages:
        time.sleep(took_s)
        return ()

    return MoveMethod("no move" if replicas == 1 else f"no move, {replicas}", like.migration, took_s, wait, replicas)


LIVE: Final = MoveMethod("live", STEPS, 2 * HOLD_S, migrate)
OWN_STEPS: Final = MoveMethod("own steps", "shift: {steps: [5%, 25%, 50%, 100%], hold: 10s}", 4 * 10.0, migrate)
"""The steps of a policy without settings."""
OTHER_METHODS: Final = (
    MoveMethod("stop-start", STEPS, 0.0, stop_start),
    MoveMethod("rolling", "verify: {against: none}, shift: {steps: [100%]}", HOLD_S, migrate),
)


class LoadPart:
    """One share of the rate at one RTT."""

    def __init__(self, at: Scene, clients: LoadClients, share: float, rate: float, rtt_ms: float) -> None:
        self._at = at
        self._clients = clients
        self._share = share
        self._rate = rate
        self._rtt_ms = rtt_ms
        self._bandwidth = bandwidth(at)

    def run(self, way: MoveMethod, moves: int) -> MoveRow:
        at = self._at
        at.apply(*NODES, migration=way.migration, replicas=way.replicas)
        at.serving(way.replicas)
        self._clients.set_rate(self._rate)
        time.sleep(2 * SETTLE_S)
        began = time.monotonic()
        spans, floors, stages = list[tuple[float, float]](), list[float](), list[Stages]()
        for number in range(moves):
            target = at.other(way.replicas)
            time.sleep(BETWEEN_S + BEFORE_S if spans else BEFORE_S)
            since = time.monotonic()
            stages.append(way.move(at, target))
            spans.append((since, time.monotonic()))
            placed = at.serving(way.replicas)
            size = placed.assignment.model_bytes if at.is_first_on(target) else 0
            floors.append(size / self._bandwidth + placed.observed.measured.load_s + way.holds_s)
            if number % 10 == 9:
                print(f"# {way.name}: {number + 1} moves", file=sys.stderr)
        time.sleep(TAIL_S)
        ended = time.monotonic()
        self._clients.pause()
        calls = self._clients.calls()
        return replace(
            self._row(way, calls, spans, floors, began, ended),
            by_stage_ms=by_stage(calls, spans, stages),
            gaps_by_stage=gaps_by_stage(calls, spans, stages),
        )

    def _row(
        self,
        way: MoveMethod,
        calls: np.ndarray[Any, Any],
        spans: Sequence[tuple[float, float]],
        floors: Sequence[float],
        began: float,
        ended: float,
    ) -> MoveRow:
        before = [window(calls, since - BEFORE_S, since) for since, _ in spans]
        during = [window(calls, since, until + TAIL_S) for since, until in spans]
        whole = window(calls, began, ended)
        inside = [latency for one in during for latency in one.latencies]
        ahead = [latency for one in before for latency in one.latencies]
        failed, wrong = (sum(getattr(one, name) for one in during) for name in ("failed", "wrong"))
        return MoveRow(
            way=way.name,
            load=self._share,
            rate=self._rate,
            rtt_ms=self._rtt_ms,
            moves=len(spans),
            requests=sum(len(one.latencies) + one.failed + one.wrong for one in during),
            failed=failed,
            wrong=wrong,
            outside=whole.failed + whole.wrong - failed - wrong,
            p50_before_ms=1e3 * quantile(ahead, 0.5),
            p99_before_ms=1e3 * quantile(ahead, 0.99),
            p99_during_ms=1e3 * quantile(inside, 0.99),
            p99_ratio=quantile(inside, 0.99) / quantile(ahead, 0.99),
            gap_before_ms=1e3 * max(one.gap_s for one in before),
            gap_median_ms=1e3 * statistics.median(one.gap_s for one in during),
            gap_worst_ms=1e3 * max(one.gap_s for one in during),
            took_s=statistics.median(until - since for since, until in spans),
            floor_s=statistics.median(floors),
            machine_load=os.getloadavg()[0],
            ratios=tuple(
                quantile(one.latencies, 0.99) / quantile(other.latencies, 0.99)
                for one, other in zip(during, before, strict=True)
            ),
        )


# The links


def link_delay(at: Scene, rtt: float) -> contextlib.AbstractContextManager[None]:
    """rtt: in ms. At or below the bare RTT, no process handles the packets."""
    return at.net.latency((rtt - BARE_RTT_MS) / 2e3, LINK_NICE) if rtt > BARE_RTT_MS else contextlib.nullcontext()


def rtt_ms(at: Scene) -> float:
    """Median RTT of several connections to the gateway."""
    gateway = HostPort.parse(at.gateway.addresses["data"])
    took = []
    for _ in range(9):
        began = time.perf_counter()
        socket.create_connection((gateway.host, gateway.port), timeout=10).close()
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def bandwidth(at: Scene) -> float:
    """Bytes a second of one connection from a machine of the region to this one, over as many bytes as the model
    has."""
    size = at.model.stat().st_size
    with socket.create_server((at.net.address(TEST_MACHINE), 0)) as server:
        said = f"import socket;socket.create_connection({server.getsockname()!r}).sendall(bytes({size}))"
        inside = at.net.inside(at.names[NODES[0]])
        with subprocess.Popen([*inside, sys.executable, "-c", said]):
            connection, _ = server.accept()
            began, left = time.perf_counter(), size
            with connection:
                while left and (piece := connection.recv(2**20)):
                    left -= len(piece)
    return size / (time.perf_counter() - began)


# The output

COLUMNS: Final = (
    ("way", "way", "<11", ""),
    ("load", "load", ">5", ".0%"),
    ("rate", "req/s", ">6", ".0f"),
    ("rtt_ms", "RTT ms", ">7", ".1f"),
    ("moves", "moves", ">6", "d"),
    ("requests", "requests", ">9", "d"),
    ("failed", "failed", ">7", "d"),
    ("wrong", "wrong", ">6", "d"),
    ("p99_before_ms", "p99 before", ">11", ".1f"),
    ("p99_during_ms", "during", ">7", ".1f"),
    ("p99_ratio", "ratio", ">6", ".2f"),
    ("gap_before_ms", "gap before", ">11", ".0f"),
    ("gap_median_ms", "median", ">7", ".0f"),
    ("gap_worst_ms", "worst", ">7", ".0f"),
    ("took_s", "took s", ">7", ".1f"),
    ("floor_s", "floor", ">6", ".1f"),
    ("machine_load", "machine", ">8", ".1f"),
)


def show(row: MoveRow | None = None) -> None:
    """Prints the table's head, or a row of it. Times are in ms unless the head says s; machine: its load average."""
    cells = [
        format(title if row is None else format(getattr(row, name), number), width)
        for name, title, width, number in COLUMNS
    ]
    print(" ".join(cells), flush=True)
    if row is not None and row.by_stage_ms:
        told = ", ".join(f"{name} {late_ms:.1f} ({count})" for name, late_ms, count in row.by_stage_ms)
        print(f"# p99 by stage, ms (requests): {told}", flush=True)
    if row is not None and row.gaps_by_stage:
        told = ", ".join(f"{name} {moves} ({worst_ms:.0f})" for name, moves, worst_ms in row.gaps_by_stage)
        print(f"# moves whose longest gap began in a stage (worst, ms): {told}", flush=True)
    if row is not None and len(row.ratios) > 1:
        lower, middle, upper = statistics.quantiles(row.ratios, n=4)
        told = f"middle {middle:.2f}, half of them {lower:.2f} to {upper:.2f}"
        print(f"# p99 of a move over that before it: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=float, nargs="+", default=[70.0], help="per cent of the highest rate")
    parser.add_argument("--rtts", type=float, nargs="+", default=[0.1], help="ms between two machines")
    parser.add_argument("--moves", type=int, default=6, help="live ones, of each part")
    parser.add_argument("--peer-moves", type=int, default=2, help="in each other way, of each part; 0 for none")
    parser.add_argument("--no-moves", type=int, default=0, help="windows as long as a live move in which nothing moves")
    parser.add_argument("--own-steps", action="store_true", help="a policy's own steps, 10 s each: a minute a move")
    parser.add_argument("--rate", type=float, help="the highest rate, where it is known")
    parser.add_argument("--json", type=Path, help="a file for the figures too")
    options = parser.parse_args()
    print(machine_line(), flush=True)
    rows: list[MoveRow] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, without_autogroup(), scene(Path(scratch)) as at:
        clients = LoadClients(Path(scratch), at)
        try:
            most = options.rate or highest_rate(at, clients)
            print(f"highest rate held: {most:.0f} requests/s, machine load {os.getloadavg()[0]:.1f}", flush=True)
            show()
            for rtt in options.rtts:
                with link_delay(at, rtt):
                    measured = rtt_ms(at)
                    for load in options.loads:
                        part = LoadPart(at, clients, load / 100, most * load / 100, measured)
                        live = OWN_STEPS if options.own_steps else LIVE
                        for way, moves in (
                            (live, options.moves),
                            *((peer, options.peer_moves) for peer in OTHER_METHODS),
                        ):
                            if moves:
                                rows.append(part.run(way, moves))
                                show(rows[-1])
                        if options.no_moves:
                            took_s = next((row.took_s for row in rows[::-1] if row.way == live.name), live.holds_s)
                            for replicas in (1, len(NODES)):
                                rows.append(part.run(no_move(live, took_s, replicas), options.no_moves))
                                show(rows[-1])
            failures = clients.failures()
        finally:
            clients.end()
    for line in failures[:3]:
        print(f"# failed: {line}", file=sys.stderr)
    if options.json:
        found = {"highest": most, "rows": [asdict(row) for row in rows], "failures": failures[:50]}
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

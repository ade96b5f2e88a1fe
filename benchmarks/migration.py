"""Live moves under load, beside stopping and starting and a rolling replacement: `shoal bench migration`.

A region of real processes on machines of their own (network namespaces): a coordinator, a gateway, two agents of plain
processors; between any two of them every packet takes half the asked RTT, in a process that holds it back where that is
more than the bare road takes. Unmodified tritonclients, a process of their own, send to the gateway at a steady rate,
due times fixed beforehand; an answer's latency counts from when its request was due, and every answer is compared with
ONNX Runtime's in this process, bit for bit. First the highest rate is looked for that the machine holds without
queueing, with the model on one of the agents and with a replica on each, as in the midst of a move: the lower of the
two counts. Then, at shares of it, a model of 4 MB goes to and fro.

For each share and RTT a row: requests failed and wrong; p99 over the times before the moves and during them, and their
ratio; the longest time without an answer; how long a move takes beside its floor (bytes / bandwidth + load + the hold
windows). Below it p99 of each stage, the stages that the longest time without an answer of a move was in, and how much
worse the p99 of a single move is than that of the seconds before it. Moves take two steps of 2 s each, so that there
can be many; `--own-steps` has the four of 10 s of a policy that says nothing. Then the same agents do it in two other
ways: `stop-start` deletes the workload and applies it for the other node; `rolling` compares nothing and gives all
requests to the new replica at once. `--no-moves N` adds N windows as long as the live moves in which nothing moves,
with one replica and with one on each node: how uneven the machine is by itself, and what two replicas on its cores
cost, as in the midst of a move.

Everything shares this machine: clients, gateway, both agents, coordinator and the roads between; sessions' own shares
of its cores are switched off meanwhile (`apart`). Needs root. Without options: the quick form, one share and RTT and 6
moves. The full form is `--loads 50 70 90 --rtts 0.1 2 30 100 --moves 100`, hours in one go; its parts can be run one by
one, at the same rate by `--rate`.
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
from onnx import helper, numpy_helper

from shoal.client import Contexts, Region
from shoal.devstack import layout
from shoal.devstack.control import Up
from shoal.devstack.layout import Member
from shoal.v1 import operator_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import triton_load
from harness.apart import ApartControl
from harness.crafted import model, tensor
from harness.netns import HERE, Network, network
from harness.triton_load import RECORD
from harness.wait import wait_until

NODES: Final[tuple[str, ...]] = ("node-a", "node-b")
WORKLOAD: Final = "dense"
WIDTHS: Final = (256, 1024, 768, 16)
QUESTIONS: Final = 16
CONNECTIONS: Final = 2
LEAST_RATE: Final = 100.0
PROBE_S: Final = 10.0
SETTLE_S: Final = 1.0
TAIL_S: Final = 0.3
"""After a move is done: what was on its way."""
PATIENCE_S: Final = 120.0
LOOK_S: Final = 0.25
BETWEEN_S: Final = 9.0
"""From a move to the time that the next is compared with: what nodes do later, for their next start, is over."""
BEFORE_S: Final = 4.0
"""The time before a move that it is compared with."""
HOLD_S: Final = 2.0
"""Of a step: the least that a coordinator takes, so that every front has heard."""
STEPS: Final = f"shift: {{steps: [25%, 100%], hold: {HOLD_S:g}s}}"
ROAD_MS: Final = 0.2
"""What the road itself takes, there and back."""
CLIENTS_NICE: Final = -10
"""Clients are machines of their own: they are not to be late because a server is busy."""
ROAD_NICE: Final = ("nice", "-n", "-15")
"""A road is as long as it is, however busy the machines at its ends are."""
COORDINATOR_NICE: Final = ("nice", "-n", "10")
"""A machine of its own too, that no request goes through: what it decides is not to take time from those that serve."""

AUTOGROUP: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")

Stages: TypeAlias = tuple[tuple[str, float], ...]
"""What a move went through, and when each began: s of this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class Window:
    """What was asked between two moments. latencies in s, from when a request was due. gap_s: the longest time without
    an answer."""

    latencies: tuple[float, ...]
    failed: int
    wrong: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One way at one load and RTT. requests, failed, wrong: of those due during the moves; outside: failed or wrong of
    all others. p50, p99: over all windows of a kind; gap_before: the worst of them. took_s, floor_s: medians. rtt_ms:
    as measured."""

    way: str
    load: float
    rate: float
    rtt_ms: float
    moves: int
    requests: int
    failed: int
    wrong: int
    outside: int
    p50_before_ms: float
    p99_before_ms: float
    p99_during_ms: float
    p99_ratio: float
    gap_before_ms: float
    gap_median_ms: float
    gap_worst_ms: float
    took_s: float
    floor_s: float
    machine_load: float
    ratios: tuple[float, ...] = ()
    """Of each move: its p99 over that of the time before it."""
    by_stage_ms: tuple[tuple[str, float, int], ...] = ()
    """p99 and number of the requests that were due in each stage of a move, over all moves."""
    gaps_by_stage: tuple[tuple[str, int, float], ...] = ()
    """Of how many moves the longest time without an answer began in that stage, and the worst of those, ms."""


# the region


class Machines(ApartControl):
    """Agents that emulate nothing: each the whole processor of this machine."""

    def _moved(self, member: Member) -> Member:
        return replace(super()._moved(member), emulate="", labels={})


class Scene:
    """The region, and what is known of the model. api: one connection for all that is asked of it: each new one would
    take a core for milliseconds, at the very moments that are looked at."""

    def __init__(self, net: Network, up: Up, api: Region, folder: Path) -> None:
        self.net = net
        self.up = up
        self.api = api
        self.folder = folder
        self.model = folder / "dense.onnx"
        self.model.write_bytes(dense())
        self.names: dict[str, str] = dict(zip(NODES, (member.name for member in up.stack.agents), strict=True))
        self._fetched: set[str] = set()

    @property
    def gateway(self) -> Member:
        return self.up.stack.gateways[0]

    def first_on(self, node: str) -> bool:
        """Whether the model's bytes had to go there; they stay."""
        before = node in self._fetched
        self._fetched.add(node)
        return not before

    def apply(self, *nodes: str, migration: str = STEPS, replicas: int = 1) -> None:
        """The workload, on any of these nodes, on as many of them as it has replicas."""
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
        """The only replica, or one of so many, once all serve and every front knows."""

        def settled() -> operator_pb2.PlacementView | None:
            rows, nodes = self.api.get("placements").placements, self.api.get("nodes").nodes
            heard = all(node.observed == node.desired for node in nodes)
            return rows[0] if heard and len(rows) == replicas and all(row.routed for row in rows) else None

        found = wait_until(settled, PATIENCE_S, "as many replicas as asked to serve", every_s=LOOK_S)
        assert found is not None
        return found

    def node(self, replicas: int = 1) -> str:
        here = self.serving(replicas).node
        return next(node for node, name in self.names.items() if name == here)

    def other(self, replicas: int = 1) -> str:
        """Where it is not, or one replica of several is not."""
        return next(node for node in NODES if node != self.node(replicas))


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Linux weighs sessions against each other, whatever the priorities in them (sched(7), autogroup): what steps aside
    on one machine of the scene would still have its share of the cores that all of them are on. Off, while it lasts."""
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
            up = control.up(layout.Asked(agents=len(NODES)), lambda text: print(f"# {text}", file=sys.stderr))
            with Region(up.operator) as api:
                found = Scene(net, up, api, folder)
                api.push(found.model, WORKLOAD)
                found.apply(*NODES)
                found.first_on(found.node())
                yield found
        finally:
            control.down()


def dense() -> bytes:
    """Layers of these widths with made-up weights, 4 MB: y [1, 16] of x [1, 256]."""
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


def questions(path: Path) -> list[tuple[str, list[int], Any, bytes]]:
    """Datatype, shape and value of each input, and the bytes of its answer."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    chance = np.random.default_rng(5)
    found: list[tuple[str, list[int], Any, bytes]] = []
    for _ in range(QUESTIONS):
        value = chance.standard_normal((1, WIDTHS[0])).astype(np.float32)
        (answer,) = session.run(None, {"x": value})
        found.append(("FP32", list(value.shape), value, np.asarray(answer).tobytes()))
    return found


# the load


class Clients:
    """The process that asks; `window` after it has ended or was told to rest."""

    def __init__(self, folder: Path, at: Scene) -> None:
        self._calls = folder / "calls"
        arrays, spec = folder / "questions.pickle", folder / "load.json"
        arrays.write_bytes(pickle.dumps(questions(at.model)))
        client = at.up.folder / "client"
        told = {
            "url": at.gateway.addresses["grpc"],
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

    def rate(self, rate: float) -> None:
        self._input.write(f"{rate}\n")
        self._input.flush()

    def rest(self) -> None:
        """Sends nothing, and has written what there is."""
        self.rate(0.0)
        time.sleep(SETTLE_S)
        self.rate(0.0)
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


def window(calls: np.ndarray[Any, Any], since: float, until: float) -> Window:
    inside = calls[(calls[:, 0] >= since) & (calls[:, 0] < until)]
    answered = inside[inside[:, 2] == triton_load.OK]
    ends = np.sort(calls[(calls[:, 2] == triton_load.OK) & (calls[:, 1] >= since) & (calls[:, 1] < until), 1])
    gap_s = float(np.max(np.diff(np.concatenate([[since], ends, [until]])))) if len(ends) else until - since
    return Window(
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
    return tuple((name, 1e3 * p(latencies, 0.99), len(latencies)) for name, latencies in found.items())


def p(latencies: Sequence[float], share: float) -> float:
    return float(np.quantile(np.array(latencies), share)) if latencies else float("nan")


def highest(at: Scene, clients: Clients) -> float:
    """Requests a second that are held with one replica and with one on each node: a move goes through both."""
    rates = list[float]()
    for replicas in (1, len(NODES)):
        at.apply(*NODES, replicas=replicas)
        at.serving(replicas)
        print(f"# with {replicas} replicas", file=sys.stderr)
        rates.append(held(clients))
    return min(rates)


def held(clients: Clients) -> float:
    """Requests a second that are held without queueing: nobody waits longer at the end than at the beginning, and the
    slowest hundredth of the answers takes at most five times as long as the middle one of a light load."""

    def probe(rate: float) -> Window:
        clients.rate(rate)
        time.sleep(PROBE_S)
        until = time.monotonic()
        clients.rest()
        return window(clients.calls(), until - PROBE_S + SETTLE_S, until)

    light_s = p(probe(LEAST_RATE).latencies, 0.5)

    def holds(rate: float) -> bool:
        found = probe(rate)
        half = len(found.latencies) // 2
        grows = p(found.latencies[half:], 0.5) > 1.5 * p(found.latencies[:half], 0.5)
        slow = p(found.latencies, 0.99) > 5 * light_s
        complete = len(found.latencies) > 0.97 * rate * (PROBE_S - SETTLE_S)
        middle, late, last = (1e3 * p(found.latencies, part) for part in (0.5, 0.9, 0.99))
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


# the ways


@dataclass(frozen=True, slots=True)
class Way:
    """migration: the policy's section. holds_s: what it waits for on purpose. move: to a node; returns when it is there
    and every front knows. replicas: before, during and after it."""

    name: str
    migration: str
    holds_s: float
    move: Callable[[Scene, str], Stages]
    replicas: int = 1


def migrate(at: Scene, target: str) -> Stages:
    """Raises SystemExit where it does not come about."""
    wall_s = time.time() - time.monotonic()
    begun = at.api.migrate("default", WORKLOAD, at.names[target])

    def over() -> operator_pb2.MigrationView | None:
        (one,) = at.api.get("migrations", begun.id).migrations
        return one if one.stage in ("done", "aborted") else None

    ended = wait_until(over, PATIENCE_S, "the move to end", every_s=LOOK_S)
    assert ended is not None
    if ended.stage != "done":
        raise SystemExit(f"{ended.id} was aborted: {ended.reason.code} {ended.reason.found}")
    at.serving()
    return tuple((each.stage, each.at - wall_s) for each in ended.stages)


def stop_start(at: Scene, target: str) -> Stages:
    at.api.delete("workload", WORKLOAD)
    wait_until(lambda: not at.api.get("workloads").workloads, PATIENCE_S, "the workload to be gone", every_s=LOOK_S)
    at.apply(target)
    at.serving()
    return ()


def no_move(like: Way, took_s: float, replicas: int = 1) -> Way:
    """The same windows with nothing in them: what the machine does by itself, and what two replicas on its cores do."""

    def wait(at: Scene, target: str) -> Stages:
        time.sleep(took_s)
        return ()

    return Way("no move" if replicas == 1 else f"no move, {replicas}", like.migration, took_s, wait, replicas)


LIVE: Final = Way("live", STEPS, 2 * HOLD_S, migrate)
OWN_STEPS: Final = Way("own steps", "shift: {steps: [5%, 25%, 50%, 100%], hold: 10s}", 4 * 10.0, migrate)
"""Those of a policy that says nothing."""
PEERS: Final = (
    Way("stop-start", STEPS, 0.0, stop_start),
    Way("rolling", "verify: {against: none}, shift: {steps: [100%]}", HOLD_S, migrate),
)


class Part:
    """One share of the rate at one RTT."""

    def __init__(self, at: Scene, clients: Clients, share: float, rate: float, rtt_ms: float) -> None:
        self._at = at
        self._clients = clients
        self._share = share
        self._rate = rate
        self._rtt_ms = rtt_ms
        self._bandwidth = bandwidth(at)

    def run(self, way: Way, moves: int) -> Row:
        at = self._at
        at.apply(*NODES, migration=way.migration, replicas=way.replicas)
        at.serving(way.replicas)
        self._clients.rate(self._rate)
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
            size = placed.assignment.model_bytes if at.first_on(target) else 0
            floors.append(size / self._bandwidth + placed.observed.measured.load_s + way.holds_s)
            if number % 10 == 9:
                print(f"# {way.name}: {number + 1} moves", file=sys.stderr)
        time.sleep(TAIL_S)
        ended = time.monotonic()
        self._clients.rest()
        calls = self._clients.calls()
        return replace(
            self._row(way, calls, spans, floors, began, ended),
            by_stage_ms=by_stage(calls, spans, stages),
            gaps_by_stage=gaps_by_stage(calls, spans, stages),
        )

    def _row(
        self,
        way: Way,
        calls: np.ndarray[Any, Any],
        spans: Sequence[tuple[float, float]],
        floors: Sequence[float],
        began: float,
        ended: float,
    ) -> Row:
        before = [window(calls, since - BEFORE_S, since) for since, _ in spans]
        during = [window(calls, since, until + TAIL_S) for since, until in spans]
        whole = window(calls, began, ended)
        inside = [latency for one in during for latency in one.latencies]
        ahead = [latency for one in before for latency in one.latencies]
        failed, wrong = (sum(getattr(one, name) for one in during) for name in ("failed", "wrong"))
        return Row(
            way=way.name,
            load=self._share,
            rate=self._rate,
            rtt_ms=self._rtt_ms,
            moves=len(spans),
            requests=sum(len(one.latencies) + one.failed + one.wrong for one in during),
            failed=failed,
            wrong=wrong,
            outside=whole.failed + whole.wrong - failed - wrong,
            p50_before_ms=1e3 * p(ahead, 0.5),
            p99_before_ms=1e3 * p(ahead, 0.99),
            p99_during_ms=1e3 * p(inside, 0.99),
            p99_ratio=p(inside, 0.99) / p(ahead, 0.99),
            gap_before_ms=1e3 * max(one.gap_s for one in before),
            gap_median_ms=1e3 * statistics.median(one.gap_s for one in during),
            gap_worst_ms=1e3 * max(one.gap_s for one in during),
            took_s=statistics.median(until - since for since, until in spans),
            floor_s=statistics.median(floors),
            machine_load=os.getloadavg()[0],
            ratios=tuple(
                p(one.latencies, 0.99) / p(other.latencies, 0.99) for one, other in zip(during, before, strict=True)
            ),
        )


# the roads


def road(at: Scene, rtt: float) -> contextlib.AbstractContextManager[None]:
    """rtt: in ms. The bare road is as fast as it is; nothing carries its packets."""
    return at.net.slow((rtt - ROAD_MS) / 2e3, ROAD_NICE) if rtt > ROAD_MS else contextlib.nullcontext()


def rtt_ms(at: Scene) -> float:
    """Of a connection to the gateway, the middle of several."""
    host, _, port = at.gateway.addresses["grpc"].rpartition(":")
    took = []
    for _ in range(9):
        began = time.perf_counter()
        socket.create_connection((host, int(port)), timeout=10).close()
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took)


def bandwidth(at: Scene) -> float:
    """Bytes a second of one connection from a machine of the region to this one, of as many as the model has."""
    size = at.model.stat().st_size
    with socket.create_server((at.net.address(HERE), 0)) as server:
        said = f"import socket;socket.create_connection({server.getsockname()!r}).sendall(bytes({size}))"
        inside = at.net.inside(at.names[NODES[0]])
        with subprocess.Popen([*inside, sys.executable, "-c", said]):
            connection, _ = server.accept()
            began, left = time.perf_counter(), size
            with connection:
                while left and (piece := connection.recv(2**20)):
                    left -= len(piece)
    return size / (time.perf_counter() - began)


# what is said

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


def show(row: Row | None = None) -> None:
    """The head of the table, or a row of it. Times in ms but where it says s; machine: its load average."""
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
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, apart(), scene(Path(scratch)) as at:
        clients = Clients(Path(scratch), at)
        try:
            most = options.rate or highest(at, clients)
            print(f"highest rate held: {most:.0f} requests/s, machine load {os.getloadavg()[0]:.1f}", flush=True)
            show()
            for rtt in options.rtts:
                with road(at, rtt):
                    measured = rtt_ms(at)
                    for load in options.loads:
                        part = Part(at, clients, load / 100, most * load / 100, measured)
                        live = OWN_STEPS if options.own_steps else LIVE
                        for way, moves in ((live, options.moves), *((peer, options.peer_moves) for peer in PEERS)):
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

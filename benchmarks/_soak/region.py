"""The region of the soak, and the faults that are done to it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from _serving.models import CLASSIFIER, MB1, SMALL, served_model
from _serving.processes import wait_until
from _soak.memory import workers_of

from harness.models.engine_cases import layers
from harness.models.synthetic import stateful_sum
from shoal.client import Contexts, RegionClient
from shoal.devstack.control import Control, RunningStack
from shoal.devstack.layout import StackOptions
from shoal.v1 import operator_pb2

HURT, STEADY = "agent-1", "agent-2"
"""All processes of the one are killed. Of the other only workers of what has no replica elsewhere are, so that a front,
a supervisor and some workers live as long as the run."""
SINGLE: Final = ("small", "tensor-1mb", "batched", "sums")
"""Workloads with one replica: requests to a front beside it are direct."""
TWICE: Final = ("spread", "classifier")
"""Workloads with a replica on each agent."""
LOUD: Final = "loud"
"""A tenant that asks for more than its quota allows."""
TOKEN_S: Final = 86_400.0
WHOLE_S: Final = 90.0
"""Seconds in which the region must be whole again after a fault."""
STEADY_S: Final = 2.0
"""Seconds for which it must have been whole."""

DOCUMENTS: Final = """apiVersion: shoal/v1
kind: Tenant
metadata: {{name: {loud}}}
spec: {{quota: {{replicas: 2, rate: 10/s, concurrency: 2}}}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {{name: single}}
spec:
  migration: {{shift: {{steps: [50%, 100%], hold: 2s}}}}
---
apiVersion: shoal/v1
kind: Policy
metadata: {{name: twice}}
spec:
  require: {{availability: {{replicas: 2, spread: node}}}}
---
{workloads}
"""
WORKLOAD: Final = """apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {tenant}}}
spec:
  model: {{source: {source}}}
  policy: {policy}
  {more}
"""
MORE: Final = {"batched": "batching: {max: 8, delay: 2ms}", "sums": "session: {state: {state: next}}"}


@dataclass(frozen=True, slots=True)
class SoakRegion:
    """A region that serves all workloads."""

    # Starts, shows and ends it.
    control: Control
    # Its members and their addresses.
    up: RunningStack
    # As its operator.
    api: RegionClient
    # ONNX files by workload.
    models: dict[str, Path]
    # Of the tenant that asks for too much.
    bearer: str

    def doors(self) -> dict[str, str]:
        """host:port of the gateway and of the agents' fronts."""
        return {member.name: member.addresses["data"] for member in (*self.up.stack.gateways, *self.up.stack.agents)}

    def is_whole(self) -> bool:
        """Every replica serves, every front has the routes, and no node is away."""
        nodes = list(self.api.get("nodes").nodes)
        rows = self.api.get("placements").placements
        return (
            len(nodes) == len(self.doors())
            and all(view.liveness == "ready" and view.front_ready and view.observed == view.desired for view in nodes)
            and len(rows) == len(SINGLE) + 2 * len(TWICE) + 1
            and all(row.routed and not row.assignment.draining for row in rows)
            and all(view.state == "ready" for view in self.api.get("workloads").workloads)
        )

    def node_of(self, workload: str) -> str:
        """Where its replica is; empty: nowhere at the moment."""
        rows = self.api.get("placements").placements
        return next((row.node for row in rows if row.assignment.workload.name == workload), "")


@contextmanager
def soak_region(folder: Path, models: dict[str, Path]) -> Iterator[SoakRegion]:
    """models: ONNX files by workload. Raises ShoalError, SystemExit."""
    control = Control(folder / "dev", Contexts(folder / "home"))
    fleet = ((HURT, ""), (STEADY, ""))
    up = control.up(StackOptions(agents=2, fleet=fleet, relayed=False), lambda text: print(f"# {text}", flush=True))
    try:
        with RegionClient(up.operator) as api:
            for name, path in models.items():
                api.push(path, name)
            texts = [
                WORKLOAD.format(
                    name=name, tenant="default", source=name, policy="twice" if name in TWICE else "single",
                    more=MORE.get(name, ""),
                )
                for name in models
            ]  # fmt: skip
            texts.append(WORKLOAD.format(name=SMALL, tenant=LOUD, source=SMALL, policy="single", more=""))
            text = DOCUMENTS.format(loud=LOUD, workloads="---\n".join(texts))
            reply = api.apply([operator_pb2.Document(name="soak.yaml", text=text)])
            if reply.problems:
                raise SystemExit(f"refused: {reply.problems}")
            region = SoakRegion(control, up, api, models, api.create_token("bearer", LOUD, TOKEN_S).token)
            if wait_until(region.is_whole, WHOLE_S, 0.5) is None:
                raise SystemExit(f"the models were not ready within {WHOLE_S:g} s")
            yield region
    finally:
        control.down()


def soak_models(folder: Path) -> dict[str, Path]:
    """ONNX files by workload; those that are made here lie in `folder`."""
    made = {name: served_model(name, folder).path for name in (SMALL, CLASSIFIER, MB1)}
    batched, sums = folder / "batched.onnx", folder / "sums.onnx"
    batched.write_bytes(layers(4, 256))
    sums.write_bytes(stateful_sum().SerializeToString())
    return {**made, "spread": made[SMALL], "batched": batched, "sums": sums}


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to the region."""

    # Its name in the deck.
    kind: str
    # To what.
    target: str
    # When it began, by the monotonic clock.
    since: float
    # When the region was whole again; infinity: not within WHOLE_S.
    until: float

    @property
    def workload(self) -> str:
        """Of the killed worker; empty where it was none, or another tenant's."""
        tenant, _, name = self.target.partition(" ")[0].partition("/")
        return name if self.kind.endswith("worker") and tenant == "default" else ""


@dataclass(slots=True)
class FaultDeck:
    """Every kind of fault comes up once before any comes again, in an order that the seed gives."""

    region: SoakRegion
    rng: random.Random
    _left: list[str] = field(default_factory=list)
    _since: float = 0.0

    def next(self) -> Fault:
        """Do the next fault, and wait until the region is whole again."""
        if not self._left:
            self._left = [*KINDS]
            self.rng.shuffle(self._left)
        kind = self._left.pop()
        self._since = time.monotonic()
        target = KINDS[kind](self)
        return Fault(kind, target, self._since, self._wait_until_whole())

    def _wait_until_whole(self) -> float:
        """Since when it has been so for STEADY_S: the coordinator hears of a fault a moment later."""
        since: float | None = None

        def is_steady() -> bool:
            nonlocal since
            if not self.region.is_whole():
                since = None
            elif since is None:
                since = time.monotonic()
            return since is not None and time.monotonic() - since >= STEADY_S

        return since if wait_until(is_steady, WHOLE_S, 0.25) is not None and since is not None else float("inf")

    def _signal(self, pid: int, number: signal.Signals) -> None:
        self._since = time.monotonic()
        os.kill(pid, number)

    def _kill_front(self, member: str) -> str:
        (pid,) = self._pids(member, "front")
        self._signal(pid, signal.SIGKILL)
        wait_until(lambda: bool(set(self._pids(member, "front")) - {pid}), WHOLE_S)
        return f"{member} [{pid}]"

    def _pids(self, member: str, role: str) -> list[int]:
        return [row["pid"] for row in self.region.control.status() if (row["name"], row["role"]) == (member, role)]

    def kill_worker(self) -> str:
        served = workers_of(self.region.control.folder)
        hurt = set(self._pids(HURT, "worker"))
        kept = {f"default/{name}" for name in TWICE}
        pid = self.rng.choice(sorted(pid for pid, what in served.items() if pid in hurt or what not in kept))
        self._signal(pid, signal.SIGKILL)
        wait_until(lambda: pid not in workers_of(self.region.control.folder), WHOLE_S)
        return f"{served[pid]} [{pid}]"

    def kill_front(self) -> str:
        return self._kill_front(HURT)

    def kill_gateway(self) -> str:
        return self._kill_front("gateway")

    def end_agent(self) -> str:
        """SIGTERM: it finishes what is in flight, and ends; whoever is in charge starts it again."""
        (pid,) = self._pids(HURT, "supervisor")
        self._signal(pid, signal.SIGTERM)
        wait_until(lambda: pid not in self._pids(HURT, "supervisor"), WHOLE_S)
        return f"{HURT} [{pid}]"

    def drain(self) -> str:
        """All that can be elsewhere moves away; then the node takes work again."""
        api = self.region.api
        api.drain(HURT)
        moved = wait_until(lambda: all(self.region.node_of(name) == STEADY for name in SINGLE), WHOLE_S, 0.5)
        api.cordon(HURT, cordoned=False)
        return f"{HURT}{'' if moved is not None else f', not empty after {WHOLE_S:g} s'}"

    def move(self) -> str:
        """Another node for a workload with one replica, live."""
        api, name = self.region.api, self.rng.choice(SINGLE)
        to = HURT if self.region.node_of(name) == STEADY else STEADY
        begun = api.migrate("default", name, to)

        def stage() -> str:
            return next(each.stage for each in api.get("migrations", begun.id).migrations)

        wait_until(lambda: stage() in ("done", "aborted"), WHOLE_S, 0.5)
        return f"{name} to {to}: {stage()}"


KINDS: Final[dict[str, Callable[[FaultDeck], str]]] = {
    "worker": FaultDeck.kill_worker,
    "another worker": FaultDeck.kill_worker,
    "front": FaultDeck.kill_front,
    "gateway": FaultDeck.kill_gateway,
    "SIGTERM": FaultDeck.end_agent,
    "drain": FaultDeck.drain,
    "move": FaultDeck.move,
    "another move": FaultDeck.move,
}

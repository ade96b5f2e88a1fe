"""The operators and clients of a run: documents applied and deleted, nodes cordoned, requests sent.

Each change of a document is recorded with its outcome. `ok`: acknowledged. `refused`: not done. `unknown`: the
coordinator died or fell silent before it answered, or the caller hung up, so it may have happened. A change passes an
edge like the operator API: it is finished even if the caller leaves, and it is audited.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from shoal.coordinator import codec
from shoal.coordinator.controllers.fleet.records import NODES, NodeRecord
from shoal.coordinator.controllers.log.events import AUDIT, AuditEntry, digest_of
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.controllers.workloads.desired_sets import DESIRED
from shoal.coordinator.controllers.workloads.migrations import MIGRATIONS
from shoal.coordinator.controllers.workloads.move_queue import QUEUE
from shoal.coordinator.core.catalog.model import DOCUMENTS, DocumentKey, StoredDocument
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.core.migration.queue import QueuedMove
from shoal.coordinator.core.placement.model import Aim
from shoal.coordinator.uncancelled import run_to_completion
from shoal.policies import Workload
from shoal.simulator.parts.front import TIMEOUT_S
from shoal.simulator.parts.network import REGION
from shoal.simulator.world.rng import Rng
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.parts.cluster import SimCluster

OPERATOR_URI = "shoal://sim/operator/ann"
TENANT = "shop"
NAMES = ("text", "faces", "speech", "files")
ANSWER_TIMEOUT_S = 10.0
REQUEST_INTERVAL_S = 0.2

Act = Callable[[RegionalCoordinator], Awaitable[object]]


class SimOperators:
    """Calls whatever coordinator is up."""

    def __init__(self, cluster: "SimCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.rng.stream("operators")
        self._locks = {name: asyncio.Lock() for name in NAMES}
        self._wanted: set[str] = set()
        self.deleted_at: dict[str, float] = {}
        """Workload -> when its deletion was last requested."""
        self._moves = self._rng.stream("moves")
        self._queued_moves = self._rng.stream("queued moves")  # its own stream: it leaves other draws unchanged
        self._edition = 0
        self._changes = 0
        self._hang_up_after_s: float | None = None
        self.quota = 0
        self.counts: dict[str, int] = {}
        self._requests = 0

    async def set_up(self, rng: Rng) -> None:
        """Push every model, then apply a first set of documents."""
        self.quota = quota = rng.randint(3, 8)
        self._world.record("operator.quota", tenant=TENANT, replicas=quota)
        await self._retry_until_done(self._push)
        first = [("tenant.yaml", _tenant(quota))]
        if (after_s := self._cluster.spec.sleep_after_s) is not None:
            first.append(("region.yaml", _region(after_s)))
        await self._retry_until_done(lambda region: region.documents.apply(first, {}, "", OPERATOR_URI))
        for name in NAMES[: rng.randint(1, 3)]:
            await self.apply(name, rng)

    async def act(self, rng: Rng) -> None:
        """One change by an operator while faults strike."""
        if self._moves.happens(0.4):
            await self.move()
            return
        name = rng.choice(NAMES)
        await (self.delete(name) if rng.happens(0.3) else self.apply(name, rng))

    async def hang_up(self, rng: Rng) -> None:
        """One change whose caller does not wait for the answer."""
        self._hang_up_after_s = rng.exponential(rng.choice([0.001, 0.01, 0.5]))
        await self.act(rng)

    async def apply(self, name: str, rng: Rng) -> None:
        self._edition += 1
        edition = f"e{self._edition}"
        model = rng.choice(sorted(self._cluster.spec.profiles))
        replicas = rng.randint(1, 3)
        spread = rng.choice(["none", "device", "node"]) if replicas > 1 else "none"
        spare = self._rng.stream(f"standby of {edition}")
        standby = spare.choice(["warm", "staged"]) if spare.happens(0.25) else "none"
        lazy = self._rng.stream(f"scale to zero of {edition}")
        to_zero_s = lazy.uniform(1.0, 6.0) if lazy.happens(self._cluster.spec.to_zero) else None
        text = _documents(name, edition, model, replicas, spread, standby, to_zero_s)

        async def act(region: RegionalCoordinator) -> None:
            applied = await region.documents.apply([(f"{name}.yaml", text)], {}, "", OPERATOR_URI)
            if applied.plan_result.problems:
                raise ShoalError(applied.plan_result.problems[0].refusal)

        async with self._locks[name]:
            outcome = await self._change(name, edition, act)
            if outcome == "ok":
                self._record_wanted({*self._wanted, f"{TENANT}/{name}"})

    async def delete(self, name: str) -> None:
        async def act(region: RegionalCoordinator) -> None:
            await region.documents.delete(DocumentKey("Workload", f"{TENANT}/{name}"), OPERATOR_URI)

        async with self._locks[name]:
            self.deleted_at[f"{TENANT}/{name}"] = self._world.now()
            self._record_wanted(self._wanted - {f"{TENANT}/{name}"})
            await self._change(name, "", act)

    async def move(self) -> None:
        """Migrate some workload to some node, or drain a node; at times cancel it."""
        rng = self._moves
        node = rng.choice([machine.name for machine in self._cluster.machines if machine.chips])
        key = WorkloadKey(TENANT, rng.choice(NAMES))
        drains, cancels = rng.happens(0.2), rng.happens(0.15)

        async def act(region: RegionalCoordinator) -> None:
            if drains:
                await region.moves.drain(node, OPERATOR_URI)
                return
            begun = await region.moves.migrate(key, Aim(node), OPERATOR_URI)
            if cancels:
                await asyncio.sleep(rng.exponential(2.0))
                await region.moves.cancel(begun.id, OPERATOR_URI)

        outcome = await self._attempt(act)
        self._world.record("operator.moves", node=node, workload=str(key), drains=drains, outcome=outcome)

    async def retry_until_done(self, what: str, act: Act) -> None:
        """Repeat the call until it succeeds."""
        await self._retry_until_done(act)
        self._world.record("operator.insisted", what=what)

    async def try_once(self, what: str, act: Act) -> str:
        """Call once; the outcome."""
        outcome = await self._attempt(act)
        self._world.record("operator.offered", what=what, outcome=outcome)
        return outcome

    def set_wanted(self, workloads: set[str]) -> None:
        """Workloads that must exist from now on, by `tenant/name`."""
        self._record_wanted(workloads)

    async def cordon(self, node: str, *, on: bool) -> str:
        outcome = await self._attempt(lambda region: region.fleet.cordon(node, on, OPERATOR_URI))
        self._world.record("operator.cordon", node=node, on=on, outcome=outcome)
        return outcome

    async def queue_moves(self, every_s: float) -> None:
        """Ask for moves that may wait until cancelled, at times of a node that takes nothing for a while. every_s: mean
        seconds between two."""
        rng = self._queued_moves
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.exponential(every_s))
                node = rng.choice([machine.name for machine in self._cluster.machines if machine.chips])
                names = sorted(self._wanted)
                if names:
                    key = WorkloadKey(TENANT, rng.choice(names).removeprefix(f"{TENANT}/"))
                    closed_s = rng.uniform(1.0, 8.0) if rng.happens(0.5) else 0.0
                    group.create_task(self._queue_move(key, node, closed_s, cancels=rng.happens(0.15)))

    async def _queue_move(self, key: WorkloadKey, node: str, closed_s: float, *, cancels: bool) -> None:
        async def act(region: RegionalCoordinator) -> None:
            begun = await region.queued_moves.migrate(key, Aim(node), OPERATOR_URI)
            if cancels:
                await asyncio.sleep(closed_s / 2)
                await region.queued_moves.cancel(begun.id, OPERATOR_URI)

        if closed_s:
            await self.cordon(node, on=True)
        outcome = await self._attempt(act)
        self._world.record("operator.queues", node=node, workload=str(key), outcome=outcome)
        if closed_s:
            await asyncio.sleep(closed_s)
            await self.cordon(node, on=False)

    async def empty_queue(self) -> None:
        """Take back every move that still waits."""
        region = self._cluster.region
        for waits in tuple(region.workloads.queue.waiting) if region is not None else ():
            await self._retry_until_done(partial(_take_back, name=waits.id))

    async def uncordon_all(self) -> None:
        """Uncordon every node once the faults are over."""
        for machine in self._cluster.machines:
            await self._retry_until_done(partial(_uncordon, node=machine.name))

    def read_all(self) -> None:
        """Record the documents that the region reports as applied."""
        region = self._cluster.region
        if region is None:
            return
        found = [
            (workload.metadata.name, dict(workload.metadata.labels)["edition"])
            for _, workload in region.workloads.catalog.of_kind(Workload)
        ]
        self._world.record("operator.read", documents=tuple(sorted(found)))

    def read_memory(self) -> None:
        """Record what the region acts on, beside what its next start would read."""
        region, store = self._cluster.region, self._cluster.store
        if region is None or store is None:
            return
        acts_on: dict[str, object] = {
            key.store_key: each.revision for key, each in region.workloads.catalog.documents.items()
        }
        acts_on |= {DESIRED + node: each.version.generation for node, each in region.workloads.desired.items()}
        acts_on |= {NODES + name: (each.epoch, each.cordoned) for name, each in region.fleet.fleet.nodes.items()}
        acts_on |= {MIGRATIONS + name: str(each.stage) for name, each in region.workloads.migrations.all.items()}
        acts_on |= {QUEUE + name: each.stage for name, each in region.workloads.queue.all.items()}
        found: dict[str, object] = {}
        for key, value in store.contents().items():
            if key.startswith(DOCUMENTS):
                found[key] = codec.load(StoredDocument, value).revision
            elif key.startswith(DESIRED):
                found[key] = codec.load(DesiredSet, value).version.generation
            elif key.startswith(MIGRATIONS):
                found[key] = str(codec.load(Migration, value).stage)
            elif key.startswith(QUEUE):
                found[key] = codec.load(QueuedMove, value).stage
            elif key.startswith(NODES):
                node = codec.load(NodeRecord, value)
                found[key] = (node.epoch, node.cordoned)
        self._world.record("region.memory", acts_on=tuple(sorted(acts_on.items())), stored=tuple(sorted(found.items())))

    def read_audit(self) -> None:
        """Record the audit log from its first entry."""
        store = self._cluster.store
        if store is None:
            return
        kept = sorted((key, value) for key, value in store.contents().items() if key.startswith(AUDIT))
        entries = [(codec.load(AuditEntry, value), digest_of(value)) for _, value in kept]
        told = tuple((each.sequence, each.subject, each.previous, digest) for each, digest in entries)
        self._world.record("operator.audit", entries=told)

    async def send_requests(self, every_s: float, timeouts_s: tuple[Seconds, ...] = (TIMEOUT_S,)) -> None:
        """Send client requests to every front until cancelled. every_s: mean seconds between two. timeouts_s: what
        their clients choose from."""
        rng = self._rng.stream("requests")
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(rng.exponential(every_s))
                front = rng.choice(self._cluster.machines)
                if front.front.routes:
                    workload = rng.choice(sorted(front.front.routes))
                    group.create_task(self.count_request(front.name, workload, timeout_s=rng.choice(timeouts_s)))

    async def count_request(
        self, node: str, workload: WorkloadKey, content: bytes = b"", timeout_s: Seconds = TIMEOUT_S
    ) -> None:
        """As `request`, and count its outcome."""
        code = await self.request(node, workload, content, timeout_s)
        outcome = "ok" if code is None else str(code)
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    async def request(
        self, node: str, workload: WorkloadKey, content: bytes = b"", timeout_s: Seconds = TIMEOUT_S
    ) -> Code | None:
        """Send one request to that node's front; None: it was answered. content: equal contents are the same request
        again; empty: one of its own."""
        self._requests += 1
        front = self._cluster.network.machines[node].front
        code, assignment = await front.request(
            workload, content or f"request {self._requests}".encode(), timeout_s=timeout_s
        )
        outcome = "ok" if code is None else str(code)
        self._world.record("request", front=node, workload=str(workload), by=assignment, outcome=outcome)
        return code

    async def _push(self, region: RegionalCoordinator) -> None:
        for digest, profile in self._cluster.spec.profiles.items():
            await region.models.push("", profile.size_bytes, digest, _no_chunks(), actor=OPERATOR_URI)

    def _record_wanted(self, wanted: set[str]) -> None:
        self._wanted = wanted
        self._world.record("operator.wanted", workloads=tuple(sorted(wanted)))

    async def _change(self, name: str, edition: str, act: Act) -> str:
        self._world.record("operator.asks", document=name, content=edition)
        self._changes += 1
        outcome = await self._attempt(act, f"change {self._changes}: {name} {edition}")
        self._world.record("operator.done", document=name, content=edition, outcome=outcome)
        return outcome

    async def _retry_until_done(self, act: Act) -> None:
        while await self._attempt(act) != "ok":  # noqa: ASYNC110 - people try again, they are not woken
            await asyncio.sleep(1.0)

    async def _attempt(self, act: Act, subject: str = "") -> str:
        """`ok`, `unknown`, or `refused` with the code. subject: of the audit entry, if there is one."""
        region, process = self._cluster.region, self._cluster.coordinator
        if region is None or process is None or not process.alive:
            return "refused"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def resolve(outcome: str) -> None:
            if not answer.done():
                answer.set_result(outcome)

        async def handle() -> None:
            await act(region)
            if subject:
                await self._audit(region, subject)

        async def serve() -> None:
            try:
                await run_to_completion(handle())
            except ShoalError as error:
                resolve(f"refused {error.code}")
            else:
                resolve("ok")

        process.on_death(lambda: resolve("unknown"))
        serving = process.spawn(serve(), "operator")
        hang_up_after_s, self._hang_up_after_s = self._hang_up_after_s, None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S if hang_up_after_s is None else hang_up_after_s):
                return await answer
        except TimeoutError:
            if process.alive:
                self._world.record("fault.hang-up", subject=subject)
                serving.cancel()
            return "unknown"

    async def _audit(self, region: RegionalCoordinator, subject: str) -> None:
        """As the API's audit trail: an entry that the store refuses is dropped, because the change has already
        happened."""
        try:
            await region.events.audit(OPERATOR_URI, "Change", subject, "done")
        except ShoalError as error:
            self._world.record("audit.dropped", subject=subject, code=str(error.code))
        else:
            self._world.record("audit.kept", subject=subject)


async def _take_back(region: RegionalCoordinator, name: str) -> None:
    waits = region.workloads.queue.all.get(name)
    if waits is not None and not waits.is_over:
        await region.queued_moves.cancel(name, OPERATOR_URI)


async def _uncordon(region: RegionalCoordinator, node: str) -> None:
    if node in region.fleet.fleet.nodes:
        await region.fleet.cordon(node, False, OPERATOR_URI)


async def _no_chunks() -> AsyncIterator[bytes]:
    return
    yield b""


def _tenant(replicas: int) -> str:
    return f"""apiVersion: shoal/v1
kind: Tenant
metadata: {{name: {TENANT}}}
spec: {{quota: {{replicas: {replicas}}}}}
"""


def _region(sleep_after_s: float) -> str:
    return f"""apiVersion: shoal/v1
kind: Region
metadata: {{name: {REGION}}}
spec: {{sleep: {{after: {sleep_after_s:.1f}s}}}}
"""


def _documents(
    name: str, edition: str, model: str, replicas: int, spread: str, standby: str, to_zero_s: float | None
) -> str:
    scale = "" if to_zero_s is None else f"  scale: {{to_zero_after: {to_zero_s:.1f}s}}\n"
    return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: {name}}}
spec:
  require: {{availability: {{replicas: {replicas}, spread: {spread}, standby: {standby}}}}}
{scale}---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {TENANT}, labels: {{edition: {edition}}}}}
spec:
  model: {{source: "{model}"}}
  policy: {name}
"""

"""The people and clients of a run: documents applied and deleted, nodes cordoned, requests sent.

Each change of a document is recorded with its outcome: `ok` when it was acknowledged, `refused` when it was not done,
`unknown` when the coordinator died or fell silent before it answered, or its caller hung up (it may have happened or
not). A change goes through an edge as the operator API is one: it is finished whoever leaves, and audited.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from shoal.coordinator.controllers import records
from shoal.coordinator.controllers.catalog import DOCUMENTS, DocumentKey, StoredDocument
from shoal.coordinator.controllers.events import AUDIT, AuditEntry, digest_of
from shoal.coordinator.controllers.finish import finish
from shoal.coordinator.controllers.fleet import NODES, NodeRecord
from shoal.coordinator.controllers.migrations import MIGRATIONS, StoredMigration
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.controllers.workloads import DESIRED
from shoal.coordinator.core.placement.model import Aim
from shoal.policies import Workload
from shoal.simulator.chance import Chance
from shoal.simulator.network import REGION
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, ShoalError
from shoal.types.workload import WorkloadKey

if TYPE_CHECKING:
    from shoal.simulator.cluster import Cluster

WHO = "shoal://sim/operator/ann"
TENANT = "shop"
NAMES = ("text", "faces", "speech", "files")
PATIENCE_S = 10.0
REQUEST_EVERY_S = 0.2

Act = Callable[[Region], Awaitable[object]]


class Operators:
    """Acts on whatever coordinator is up."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._chance = cluster.world.chance.stream("operators")
        self._one_at_a_time = {name: asyncio.Lock() for name in NAMES}
        self._wanted: set[str] = set()
        self.deleted: dict[str, float] = {}
        """workload -> when its deletion was last asked for."""
        self._moves = self._chance.stream("moves")
        self._edition = 0
        self._changes = 0
        self._hangs_up_after: float | None = None
        self.quota = 0
        self.counts: dict[str, int] = {}

    async def set_up(self, chance: Chance) -> None:
        """Pushes every model, then applies a first set of documents."""
        self.quota = quota = chance.whole(3, 8)
        self._world.record("operator.quota", tenant=TENANT, replicas=quota)
        await self._insist(self._push)
        first = [("tenant.yaml", _tenant(quota))]
        if (after_s := self._cluster.spec.sleep_after_s) is not None:
            first.append(("region.yaml", _region(after_s)))
        await self._insist(lambda region: region.workloads.apply(first, {}, "", WHO))
        for name in NAMES[: chance.whole(1, 3)]:
            await self.apply(name, chance)

    async def act(self, chance: Chance) -> None:
        """One change by an operator in the storm."""
        if self._moves.happens(0.4):
            await self.move()
            return
        name = chance.pick(NAMES)
        await (self.delete(name) if chance.happens(0.3) else self.apply(name, chance))

    async def hang_up(self, chance: Chance) -> None:
        """One change whose caller does not wait for the answer."""
        self._hangs_up_after = chance.delay(chance.pick([0.001, 0.01, 0.5]))
        await self.act(chance)

    async def apply(self, name: str, chance: Chance) -> None:
        self._edition += 1
        edition = f"e{self._edition}"
        model = chance.pick(sorted(self._cluster.spec.profiles))
        replicas = chance.whole(1, 3)
        spread = chance.pick(["none", "device", "node"]) if replicas > 1 else "none"
        spare = self._chance.stream(f"standby of {edition}")
        standby = spare.pick(["warm", "staged"]) if spare.happens(0.25) else "none"
        text = _documents(name, edition, model, replicas, spread, standby)

        async def act(region: Region) -> None:
            applied = await region.workloads.apply([(f"{name}.yaml", text)], {}, "", WHO)
            if applied.planned.problems:
                raise ShoalError(applied.planned.problems[0].refusal)

        async with self._one_at_a_time[name]:
            outcome = await self._change(name, edition, act)
            if outcome == "ok":
                self._want({*self._wanted, f"{TENANT}/{name}"})

    async def delete(self, name: str) -> None:
        async def act(region: Region) -> None:
            await region.workloads.delete(DocumentKey("Workload", f"{TENANT}/{name}"), WHO)

        async with self._one_at_a_time[name]:
            self.deleted[f"{TENANT}/{name}"] = self._world.now()
            self._want(self._wanted - {f"{TENANT}/{name}"})
            await self._change(name, "", act)

    async def move(self) -> None:
        """A live move of some workload to some node, or of all that a node has; now and then it is taken back."""
        chance = self._moves
        node = chance.pick([machine.name for machine in self._cluster.machines if machine.chips])
        key = WorkloadKey(TENANT, chance.pick(NAMES))
        drains, cancels = chance.happens(0.2), chance.happens(0.15)

        async def act(region: Region) -> None:
            if drains:
                await region.moving.drain(node, WHO)
                return
            begun = await region.moving.migrate(key, Aim(node), WHO)
            if cancels:
                await asyncio.sleep(chance.delay(2.0))
                await region.moving.cancel(begun.id, WHO)

        outcome = await self._attempt(act)
        self._world.record("operator.moves", node=node, workload=str(key), drains=drains, outcome=outcome)

    async def insist(self, what: str, act: Act) -> None:
        """Somebody asks until it is done."""
        await self._insist(act)
        self._world.record("operator.insisted", what=what)

    async def offer(self, what: str, act: Act) -> str:
        """Somebody asks once."""
        outcome = await self._attempt(act)
        self._world.record("operator.offered", what=what, outcome=outcome)
        return outcome

    def wants(self, workloads: set[str]) -> None:
        """What shall be there from now on, by `tenant/name`."""
        self._want(workloads)

    async def cordon(self, node: str, *, on: bool) -> str:
        outcome = await self._attempt(lambda region: region.fleet.cordon(node, on, WHO))
        self._world.record("operator.cordon", node=node, on=on, outcome=outcome)
        return outcome

    async def uncordon_all(self) -> None:
        """The storm is over: no node stays cordoned."""
        for machine in self._cluster.machines:
            await self._insist(partial(_uncordon, node=machine.name))

    def read_all(self) -> None:
        """What the region says is applied."""
        region = self._cluster.region
        if region is None:
            return
        found = [
            (workload.metadata.name, dict(workload.metadata.labels)["edition"])
            for _, workload in region.workloads.catalog.of_kind(Workload)
        ]
        self._world.record("operator.read", documents=tuple(sorted(found)))

    def read_memory(self) -> None:
        """What the region acts on, beside what its next start would find."""
        region, store = self._cluster.region, self._cluster.store
        if region is None or store is None:
            return
        acts_on: dict[str, object] = {
            key.stored_at: each.revision for key, each in region.workloads.catalog.documents.items()
        }
        acts_on |= {DESIRED + node: each.version.generation for node, each in region.workloads.desired.items()}
        acts_on |= {NODES + name: (each.epoch, each.cordoned) for name, each in region.fleet.fleet.nodes.items()}
        acts_on |= {MIGRATIONS + name: str(each.stage) for name, each in region.workloads.migrations.all.items()}
        found: dict[str, object] = {}
        for key, value in store.contents().items():
            if key.startswith(DOCUMENTS):
                found[key] = records.load(StoredDocument, value).revision
            elif key.startswith(DESIRED):
                found[key] = records.load(DesiredSet, value).version.generation
            elif key.startswith(MIGRATIONS):
                found[key] = str(records.load(StoredMigration, value).migration.stage)
            elif key.startswith(NODES):
                node = records.load(NodeRecord, value)
                found[key] = (node.epoch, node.cordoned)
        self._world.record("region.memory", acts_on=tuple(sorted(acts_on.items())), stored=tuple(sorted(found.items())))

    def read_audit(self) -> None:
        """What the audit log says, from its first entry."""
        store = self._cluster.store
        if store is None:
            return
        kept = sorted((key, value) for key, value in store.contents().items() if key.startswith(AUDIT))
        entries = [(records.load(AuditEntry, value), digest_of(value)) for _, value in kept]
        told = tuple((each.sequence, each.subject, each.previous, digest) for each, digest in entries)
        self._world.record("operator.audit", entries=told)

    async def send_requests(self) -> None:
        """Clients at every front, until cancelled."""
        chance = self._chance.stream("requests")
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(chance.delay(REQUEST_EVERY_S))
                front = chance.pick(self._cluster.machines)
                if front.front.routes:
                    group.create_task(self._request(front.name, chance.pick(sorted(front.front.routes))))

    async def _request(self, node: str, workload: WorkloadKey) -> None:
        code = await self.request(node, workload)
        outcome = "ok" if code is None else str(code)
        self.counts[outcome] = self.counts.get(outcome, 0) + 1

    async def request(self, node: str, workload: WorkloadKey) -> Code | None:
        """One request at that node's front; None: answered."""
        code, assignment = await self._cluster.network.machines[node].request(workload)
        outcome = "ok" if code is None else str(code)
        self._world.record("request", front=node, workload=str(workload), by=assignment, outcome=outcome)
        return code

    async def _push(self, region: Region) -> None:
        for digest, profile in self._cluster.spec.profiles.items():
            await region.models.push("", profile.size_bytes, digest, _nothing(), actor=WHO)

    def _want(self, wanted: set[str]) -> None:
        self._wanted = wanted
        self._world.record("operator.wanted", workloads=tuple(sorted(wanted)))

    async def _change(self, name: str, edition: str, act: Act) -> str:
        self._world.record("operator.asks", document=name, content=edition)
        self._changes += 1
        outcome = await self._attempt(act, f"change {self._changes}: {name} {edition}")
        self._world.record("operator.done", document=name, content=edition, outcome=outcome)
        return outcome

    async def _insist(self, act: Act) -> None:
        while await self._attempt(act) != "ok":  # noqa: ASYNC110 - people try again, they are not woken
            await asyncio.sleep(1.0)

    async def _attempt(self, act: Act, subject: str = "") -> str:
        """`ok`, `unknown`, or `refused` with the code. subject: of the entry in the audit log, where there is one."""
        region, process = self._cluster.region, self._cluster.coordinator
        if region is None or process is None or not process.alive:
            return "refused"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def settle(outcome: str) -> None:
            if not answer.done():
                answer.set_result(outcome)

        async def handle() -> None:
            await act(region)
            if subject:
                await self._audit(region, subject)

        async def serve() -> None:
            try:
                await finish(handle())
            except ShoalError as error:
                settle(f"refused {error.code}")
            else:
                settle("ok")

        process.on_death(lambda: settle("unknown"))
        serving = process.spawn(serve(), "operator")
        patience, self._hangs_up_after = self._hangs_up_after, None
        try:
            async with asyncio.timeout(PATIENCE_S if patience is None else patience):
                return await answer
        except TimeoutError:
            if process.alive:
                self._world.record("fault.hang-up", subject=subject)
                serving.cancel()
            return "unknown"

    async def _audit(self, region: Region, subject: str) -> None:
        """As the API's audit trail: an entry that the store does not take is dropped, for the act has happened."""
        try:
            await region.events.audit(WHO, "Change", subject, "done")
        except ShoalError as error:
            self._world.record("audit.dropped", subject=subject, code=str(error.code))
        else:
            self._world.record("audit.kept", subject=subject)


async def _uncordon(region: Region, node: str) -> None:
    if node in region.fleet.fleet.nodes:
        await region.fleet.cordon(node, False, WHO)


async def _nothing() -> AsyncIterator[bytes]:
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


def _documents(name: str, edition: str, model: str, replicas: int, spread: str, standby: str) -> str:
    return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: {name}}}
spec:
  require: {{availability: {{replicas: {replicas}, spread: {spread}, standby: {standby}}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {TENANT}, labels: {{edition: {edition}}}}}
spec:
  model: {{source: "{model}"}}
  policy: {name}
"""

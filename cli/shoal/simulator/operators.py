"""The people and clients of a run: documents applied and deleted, nodes cordoned, requests sent.

Each change of a document is recorded with its outcome: `ok` when it was acknowledged, `refused` when it was not done,
`unknown` when the coordinator died or fell silent before it answered (it may have happened or not).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.region import Region
from shoal.policies import Workload
from shoal.simulator.chance import Chance
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
        self._edition = 0
        self.quota = 0
        self.counts: dict[str, int] = {}

    async def set_up(self, chance: Chance) -> None:
        """Pushes every model, then applies a first set of documents."""
        self.quota = quota = chance.whole(3, 8)
        self._world.record("operator.quota", tenant=TENANT, replicas=quota)
        await self._insist(self._push)
        await self._insist(lambda region: region.workloads.apply([("tenant.yaml", _tenant(quota))], {}, "", WHO))
        for name in NAMES[: chance.whole(1, 3)]:
            await self.apply(name, chance)

    async def act(self, chance: Chance) -> None:
        """One change by an operator in the storm."""
        name = chance.pick(NAMES)
        await (self.delete(name) if chance.happens(0.3) else self.apply(name, chance))

    async def apply(self, name: str, chance: Chance) -> None:
        self._edition += 1
        edition = f"e{self._edition}"
        model = chance.pick(sorted(self._cluster.spec.profiles))
        replicas = chance.whole(1, 3)
        spread = chance.pick(["none", "device", "node"]) if replicas > 1 else "none"
        text = _documents(name, edition, model, replicas, spread)

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
        outcome = await self._attempt(act)
        self._world.record("operator.done", document=name, content=edition, outcome=outcome)
        return outcome

    async def _insist(self, act: Act) -> None:
        while await self._attempt(act) != "ok":  # noqa: ASYNC110 - people try again, they are not woken
            await asyncio.sleep(1.0)

    async def _attempt(self, act: Act) -> str:
        """`ok`, `unknown`, or `refused` with the code."""
        region, process = self._cluster.region, self._cluster.coordinator
        if region is None or process is None or not process.alive:
            return "refused"
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def settle(outcome: str) -> None:
            if not answer.done():
                answer.set_result(outcome)

        async def work() -> None:
            try:
                await act(region)
            except ShoalError as error:
                settle(f"refused {error.code}")
            else:
                settle("ok")

        process.on_death(lambda: settle("unknown"))
        process.spawn(work(), "operator")
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await answer
        except TimeoutError:
            return "unknown"


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


def _documents(name: str, edition: str, model: str, replicas: int, spread: str) -> str:
    return f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: {name}}}
spec:
  require: {{availability: {{replicas: {replicas}, spread: {spread}}}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: {name}, tenant: {TENANT}, labels: {{edition: {edition}}}}}
spec:
  model: {{source: "{model}"}}
  policy: {name}
"""

"""A52: a tenant that floods. Its limits end it with a code, and others do not wait behind what it sends."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from harness.attacks.bystander import Attack, AttackCost, run_beside
from harness.attacks.tenant_flood import INPUTS
from harness.clients.oip import GrpcClient, InferenceError
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models import synthetic
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AdmissionLimits
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.route import Route
from shoal.types.tenant import TenantLimit
from shoal.types.units import PerSecond
from shoal.types.workload import WorkloadKey

LOUD, QUIET, SLOW = WorkloadKey("loud", "relu"), WorkloadKey("quiet", "relu"), WorkloadKey("loud", "slow")
SLOTS = 8
FLOOD = 64
ROUND_S = 4.0
ROUNDS = 6
"""At most: the test machine has other work, and what we do wrong is wrong in every round."""
BURST_S = 1.0
"""Of a rate, what may come at once."""


@dataclass
class Pair:
    """A gateway, and an agent with the replicas of two tenants."""

    gateway: DataPlaneNode
    agent: DataPlaneNode

    async def limit(self, *limits: TenantLimit, at_agent: tuple[TenantLimit, ...] = ()) -> None:
        await self.agent.configure(tenants=at_agent)
        routes = [
            Route(key, 1, (self.agent.endpoint(name, at=self.gateway),)) for name, key in self.agent.models.items()
        ]
        await self.gateway.configure(routes, tenants=limits)

    def client(self, tenant: str, at: DataPlaneNode | None = None) -> GrpcClient:
        return (at or self.gateway).grpc_client(self.gateway.authority.issue(Role.TENANT, tenant))

    async def flood(self, model: str, suffers: Callable[[AttackCost], bool]) -> list[AttackCost]:
        """The calls of the quiet tenant beside the flood, in rounds until there is one in which it does not suffer."""
        files = self.gateway.authority.issue(Role.TENANT, LOUD.tenant)
        address = f"127.0.0.1:{self.gateway.front.config.port}"
        client = self.client(QUIET.tenant)
        pids = [node.front.pid for node in (self.gateway, self.agent) if node.front.pid is not None]
        attack = Attack(model, address, FLOOD, files, "harness.attacks.tenant_flood")
        costs = list[AttackCost]()
        try:
            while len(costs) < ROUNDS and (not costs or suffers(costs[-1])):
                costs.append(
                    await run_beside(lambda: client.infer("relu", INPUTS["relu"]), pids, [attack], for_s=ROUND_S)
                )
        finally:
            await client.close()
        assert not [error for cost in costs for error in cost.errors], "the quiet tenant lost calls"
        return costs


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    limits = AdmissionLimits(slots=SLOTS)
    gateway = DataPlaneNode("gw", authority, tmp_path / "gw", role=Role.GATEWAY, limits=limits)
    agent = DataPlaneNode("n1", authority, tmp_path / "n1", limits=limits)
    relu, slow = tmp_path / "relu.onnx", tmp_path / "slow.onnx"
    relu.write_bytes(synthetic.relu().SerializeToString())
    slow.write_bytes(synthetic.slow(64).SerializeToString())
    found = Pair(gateway, agent)
    try:
        await asyncio.gather(gateway.start(), agent.start())
        for name, key, model in (("a1", LOUD, relu), ("a2", QUIET, relu), ("a3", SLOW, slow)):
            await agent.load(name, key, model)
        await found.limit()
        yield found
    finally:
        await asyncio.gather(gateway.stop(), agent.stop())


async def refusal(client: GrpcClient) -> InferenceError:
    with pytest.raises(InferenceError) as refused:
        await client.infer("relu", INPUTS["relu"])
    return refused.value


async def test_a52_a_request_is_charged_where_it_enters_and_not_at_the_next_front(pair: Pair) -> None:
    nothing = TenantLimit(LOUD.tenant, concurrency=0)
    await pair.limit(TenantLimit(LOUD.tenant, concurrency=1), at_agent=(nothing,))
    client, direct, other = pair.client("loud"), pair.client("loud", at=pair.agent), pair.client("quiet")
    await client.infer("relu", INPUTS["relu"])
    refused = await refusal(direct)
    assert (refused.status, refused.code) == ("RESOURCE_EXHAUSTED", Code.TENANT_CONCURRENCY)
    await other.infer("relu", INPUTS["relu"])
    uses = (await pair.gateway.front.stats()).tenants, (await pair.agent.front.stats()).tenants
    assert [[(each.admitted, each.over_concurrency, each.inside) for each in use] for use in uses] == [
        [(1, 0, 0)],
        [(0, 1, 0)],
    ]
    for each in (client, direct, other):
        await each.close()


async def test_a52_the_rate_holds_while_fronts_are_killed(pair: Pair) -> None:
    rate, front = 20.0, pair.gateway.front

    def has_restarted(before: int) -> bool:
        return front.restarts > before

    await pair.limit(TenantLimit(LOUD.tenant, PerSecond(rate)))
    loop, answered = asyncio.get_running_loop(), 0
    begin = loop.time()
    for kills in range(4):
        client, end = pair.client("loud"), loop.time() + 1.5
        while loop.time() < end:
            codes = await asyncio.gather(*(code_of(client) for _ in range(16)))
            answered += codes.count("answered")
            assert set(codes) <= {"answered", Code.TENANT_RATE}
        await client.close()
        if kills < 3:
            assert front.pid is not None
            before = front.restarts
            os.kill(front.pid, signal.SIGKILL)
            await until(partial(has_restarted, before), 20, "the front is started again")
            await pair.limit(TenantLimit(LOUD.tenant, PerSecond(rate)))  # returns when it listens
    took = loop.time() - begin
    assert rate < answered <= rate * took + rate
    record("A52", "P", 1, fronts_killed=3, rate=rate, answered_per_s=round(answered / took, 1))


async def code_of(client: GrpcClient) -> str:
    try:
        await client.infer("relu", INPUTS["relu"], timeout=10)
    except InferenceError as error:
        return error.code
    return "answered"


@pytest.mark.alone
async def test_a52_a_flood_that_its_limits_end_moves_others_little(pair: Pair) -> None:
    rate, loop = 50.0, asyncio.get_running_loop()
    await pair.limit(TenantLimit(LOUD.tenant, PerSecond(rate), 4))
    begin = loop.time()
    costs = await pair.flood("relu", lambda cost: cost.slower_p99 > 1.5)
    most = rate * (loop.time() - begin) + BURST_S * rate
    seen = sum((Counter(cost.attackers[0]["seen"]) for cost in costs), Counter[str]())
    assert seen.keys() <= {"answered", Code.TENANT_RATE, Code.TENANT_CONCURRENCY}
    assert seen.total() > seen["answered"] > 0, "some were refused"
    assert seen["answered"] <= most
    cost = min(costs, key=lambda each: each.slower_p99)
    record("A52", "P", len(costs), flood="over its limits", got=seen, **cost.figures())
    assert cost.slower_p99 <= 1.5


@pytest.mark.alone
async def test_a52_others_do_not_wait_behind_slow_requests_that_nothing_limits(pair: Pair) -> None:
    """How long a slow request takes on this machine now, the flood's answers tell: one after the other, as many in the
    same seconds."""

    def all_slots_ms(cost: AttackCost) -> float:
        answered: int = cost.attackers[0]["seen"].get("answered", 0)
        return SLOTS * ROUND_S / max(1, answered) * 1e3

    costs = await pair.flood("slow", lambda cost: cost.p99_ms >= all_slots_ms(cost))
    cost = min(costs, key=lambda each: each.p99_ms / all_slots_ms(each))
    slow_ms = round(all_slots_ms(cost) / SLOTS, 1)
    record("A52", "P", len(costs), flood="no limit, slow model", slow_ms=slow_ms, **cost.figures())
    assert cost.p99_ms < all_slots_ms(cost), "it waited for the requests in all slots"

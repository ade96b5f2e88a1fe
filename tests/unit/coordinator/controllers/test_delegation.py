"""A whole region that has others run its work: documents in, routes to their gateways out, and home again."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.fakes.peers import FakePeers, FakeRegion
from harness.fakes.region import FakeAgent, RegionFixture
from shoal.coordinator.api.views import workload_views
from shoal.coordinator.controllers.queries.delegation import delegation_previews
from shoal.coordinator.core.negotiation.trade_times import LOCAL_STABLE_S
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.offer import Directory, Member
from shoal.types.route import EndpointKind
from shoal.types.units import Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")


def documents(delegate: str) -> list[tuple[str, str]]:
    margin = ', margin: "10 %"' if delegate == "when-better" else ""
    text = f"""apiVersion: shoal/v1
kind: Policy
metadata: {{name: burst}}
spec:
  optimize: {{latency: 0.5, cost: 0.5}}
  federation: {{delegate: {delegate}{margin}}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {{name: reader}}
spec: {{model: {{source: ocr}}, policy: burst}}
"""
    return [("w.yaml", text)]


@dataclass
class Trading:
    """A region with a gateway and neighbours; a step is everything that one look of the region does."""

    world: RegionFixture
    wire: FakePeers
    gateway: FakeAgent
    agents: list[FakeAgent]
    members: tuple[Member, ...] = (Member("a", "a:7447", ("root-a",), "eu"),)

    @classmethod
    async def open(cls, folder: Path) -> "Trading":
        world = await RegionFixture.open(folder)
        await world.push()
        wire = FakePeers({"a": FakeRegion("a", world.clock)})
        gateway = FakeAgent(world, "gw-1", role=Role.GATEWAY)
        opened = cls(world, wire, gateway, [gateway])
        await world.region.federate(
            wire,
            federation=wire,
            directory=lambda: Directory("fed", 1, opened.members),
            rtt=lambda: {"a": Seconds(0.002)},
        )
        await gateway.connect()
        return opened

    async def apply(self, texts: list[tuple[str, str]]) -> None:
        applied = await self.world.region.documents.apply(texts, {}, "", "test")
        assert applied.plan_result.problems == ()

    async def run(self, seconds: float) -> None:
        trades = self.world.region.origin
        assert trades is not None
        for _ in range(round(seconds / 0.5)):
            await self.world.step()
            await trades.tick()
            while trades.calls:
                await asyncio.wait(trades.calls)
            for agent in self.agents:
                if self.world.links.desired_sets(agent.name):
                    await agent.apply_desired()
                else:
                    await agent.report()
            self.world.clock.advance(0.5)

    def routed_targets(self) -> list[str]:
        """Where the gateway sends requests: regions, or nodes of its own."""
        desired = self.world.region.workloads.desired["gw-1"]
        routes = [route for route in desired.routes if route.workload == KEY]
        return [each.region or each.node for route in routes for each in route.endpoints]


@pytest.fixture
async def trading(tmp_path: Path) -> AsyncIterator[Trading]:
    opened = await Trading.open(tmp_path)
    yield opened
    assert opened.world.region.origin is not None
    opened.world.region.origin.stop()
    await opened.world.store.close()


async def test_what_has_no_place_is_answered_by_another_regions_gateway(trading: Trading) -> None:
    await trading.apply(documents("when-infeasible"))
    await trading.run(1.5)
    assert trading.routed_targets() == ["a"]
    desired = trading.world.region.workloads.desired["gw-1"]
    (endpoint,) = desired.routes[0].endpoints
    assert (endpoint.kind, endpoint.node, endpoint.address) == (EndpointKind.GATEWAY, "gw-a", "a:1")
    assert [(peer.region, peer.roots, peer.gateways) for peer in desired.peers] == [("a", ("root-a",), ("gw-a",))]


async def test_what_no_region_takes_says_what_each_answered(trading: Trading) -> None:
    ((name, text),) = documents("when-infeasible")
    bounded = [(name, text.replace("optimize:", "limits: {cost: 0.50 USD/h}\n  optimize:"))]
    trading.members += (Member("b", "b:7447", ("root-b",), "eu"),)
    await trading.apply(bounded)
    await trading.run(2.0)
    await trading.world.region._step()  # which tells what the trades came to
    workloads = trading.world.region.workloads
    (view,) = workload_views(workloads, trading.world.region.fleet.fleet)
    assert view.state == "pending"
    answers = {each.region: each.refusal for each in view.elsewhere}
    assert (answers["a"].code, answers["a"].found, answers["a"].asked) == ("COST_OVER", "1 USD/h", "at most 0.5 USD/h")
    assert answers["b"].code == "PEER_UNREACHABLE"
    assert trading.world.region.origin is not None
    (plan,) = (await trading.world.region.placement.explain(KEY)).workloads
    found = await delegation_previews(trading.world.region.origin, workloads.catalog, (plan,))
    bids = {each.assessment.answer.region: each.assessment.refusal for each in found[KEY].bids}
    assert {region: why.code if why else None for region, why in bids.items()} == {
        "a": Code.COST_OVER, "b": Code.PEER_UNREACHABLE,
    }  # fmt: skip
    await trading.apply(documents("never"))
    await trading.run(2.0)
    await trading.world.region._step()
    (view,) = workload_views(workloads, trading.world.region.fleet.fleet)
    assert list(view.elsewhere) == []


async def test_never_stays_without_a_place(trading: Trading) -> None:
    await trading.apply(documents("never"))
    await trading.run(2.0)
    assert trading.routed_targets() == []
    assert trading.wire.sent_methods == []


async def test_it_comes_home_when_home_has_had_a_place_for_a_while_and_not_a_moment_without_an_endpoint(
    trading: Trading,
) -> None:
    await trading.apply(documents("when-infeasible"))
    await trading.run(1.5)
    edge = FakeAgent(trading.world, "edge-1")
    await edge.connect()
    trading.agents.append(edge)
    await trading.run(LOCAL_STABLE_S - 5.0)
    assert trading.routed_targets() == ["a"]
    for _ in range(50):
        await trading.run(0.5)
        assert trading.routed_targets() != [], "make before break"
        if trading.routed_targets() == ["edge-1"]:
            break
    assert trading.routed_targets() == ["edge-1"]
    await trading.run(5.0)
    assert trading.wire.regions["a"].running_agreements == []


@pytest.mark.parametrize(("cost", "ends"), [(0.01, ["a"]), (1000.0, ["edge-1"])])
async def test_what_is_dearer_at_home_moves_past_the_margin_only(
    trading: Trading, cost: float, ends: list[str]
) -> None:
    edge = FakeAgent(trading.world, "edge-1")
    await edge.connect()
    trading.agents.append(edge)
    price = "apiVersion: shoal/v1\nkind: Region\nmetadata: {name: eu}\nspec: {price: 1.0 USD/h}\n"
    neighbour = trading.wire.regions["a"]
    neighbour.p95_s, neighbour.cost = 0.0001, cost
    await trading.apply([*documents("when-better"), ("r.yaml", price)])
    for _ in range(20):
        await trading.run(0.5)
        codes = [event.code for event in await trading.world.region.events.events_after(0, 100)]
        assert "READY" not in codes or trading.routed_targets() != []
    assert trading.routed_targets() == ends


async def test_without_a_federation_nothing_is_asked(tmp_path: Path) -> None:
    world = await RegionFixture.open(tmp_path)
    await world.push()
    await world.region.documents.apply(documents("when-better"), {}, "", "test")
    await world.step()
    assert world.region.origin is None
    assert world.region.workloads.delegations == {}
    await world.store.close()


async def test_a51_many_names_at_once_share_the_budget_through_a_delegate(trading: Trading) -> None:
    """Six workloads without a place here, 1 USD/h each elsewhere: as many go as the budget covers, and a place here
    comes out of the same budget."""
    tenant = "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: default}\nspec: {quota: {cost: 3 USD/h}}\n"
    (_, text), *_ = documents("when-infeasible")
    policy, workload = text.split("---\n")
    many = "---\n".join(workload.replace("reader", f"reader-{number}") for number in range(6))
    await trading.apply([("t.yaml", tenant), ("w.yaml", f"{policy}---\n{many}")])
    origin, most = trading.world.region.origin, 0
    assert origin is not None
    for _ in range(40):
        await trading.run(0.5)
        running = trading.wire.regions["a"].running_agreements
        most = max(most, len(running))
        assert len(running) <= len(origin.awarded_prices) <= 3
        plan = trading.world.region.workloads.last_plan
        assert plan is not None
        (budget,) = plan.budgets
        assert not budget.is_exceeded
    assert most == 3
    plan = trading.world.region.workloads.last_plan
    assert plan is not None
    assert plan.budgets[0].cost.usd_per_h == 3.0, "what runs there is counted here"
    assert len([each for each in origin.last_refusals.values() if "QUOTA" in str(each)]) == 3
    edge = FakeAgent(trading.world, "edge-1")
    await edge.connect()
    trading.agents.append(edge)
    await trading.run(5.0)
    plan = trading.world.region.workloads.last_plan
    assert plan is not None
    refused = [each.refusal.code for each in plan.workloads if each.refusal is not None]
    assert refused == [Code.QUOTA] * 3, "its price is not known, and there is no budget left"

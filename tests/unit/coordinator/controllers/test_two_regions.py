"""Two whole regions in one process, each with its own store: what one has no place for, the other runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.fakes.region import DIGEST, FakeAgent, RegionFixture
from harness.wait import until
from shoal.coordinator.api import views
from shoal.coordinator.controllers.federation.delegate import DelegateController
from shoal.coordinator.controllers.queries.delegation import NOT_JOINED, delegation_previews
from shoal.coordinator.controllers.region.region import RegionalCoordinator
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.negotiation.hold import GrantedBid
from shoal.coordinator.ports import AdvertiseAnswer, VerifiedMessage
from shoal.types.agreement import (
    GUEST_TENANT,
    Award,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    ReportContent,
    ServiceReport,
)
from shoal.types.assignment import Trust
from shoal.types.chain import first_break
from shoal.types.codes import Code, refuse
from shoal.types.device import EnergySource, Role
from shoal.types.offer import Advertisement, Answer, Directory, Member, Solicitation
from shoal.types.route import EndpointKind
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey

KEY = WorkloadKey("default", "reader")
SEEN = ServiceReport(7, 0, Seconds(0.02), Joules(0.0), EnergySource.ESTIMATED, 0.0)
WORKLOAD = """apiVersion: shoal/v1
kind: Policy
metadata: {name: burst}
spec:
  optimize: {latency: 0.5, cost: 0.5}
  federation: {delegate: when-infeasible}
---
apiVersion: shoal/v1
kind: Workload
metadata: {name: reader}
spec: {model: {source: ocr}, policy: burst}
"""
TRADE = """apiVersion: shoal/v1
kind: Region
metadata: {name: away}
spec: {trade: [{with: home, hold_share: 100 %}]}
"""


@dataclass
class ConnectedPeers:
    """What one region can say to all: ports.Peers and ports.FederationLink over the others' controllers."""

    name: str
    regions: dict[str, RegionalCoordinator]
    cut: set[str] = field(default_factory=set)

    def _to(self, region: str) -> DelegateController:
        if region in self.cut:
            raise refuse(Code.PEER_UNREACHABLE, region)
        bids = self.regions[region].delegate
        assert bids is not None
        return bids

    async def solicit(self, solicitation: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        return tuple([await self.request_bid(name, solicitation) for name in sorted(self.regions) if name != self.name])

    async def request_bid(self, region: str, solicitation: Solicitation) -> VerifiedMessage[Answer]:
        return VerifiedMessage(
            region, await self._to(region).on_solicitation(VerifiedMessage(self.name, solicitation, b"")), b""
        )

    async def award(self, region: str, award: Award) -> VerifiedMessage[Grant]:
        return VerifiedMessage(region, await self._to(region).on_award(VerifiedMessage(self.name, award, b"")), b"")

    async def release(self, region: str, release: Release) -> None:
        await self._to(region).on_release(VerifiedMessage(self.name, release, b""))

    async def renew(self, region: str, renewal: Renewal) -> VerifiedMessage[Renewed]:
        return VerifiedMessage(region, await self._to(region).on_renewal(VerifiedMessage(self.name, renewal, b"")), b"")

    async def notify(self, region: str, notice: Notice) -> None:
        await self._to(region).on_notice(VerifiedMessage(self.name, notice, b""))

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        await self._to(region).authorise_fetch(self.name, agreement, digest)
        yield b"x" * (1000 - offset)

    async def measure(self, region: str) -> Seconds:
        return Seconds(0.002)

    async def advertise(self, advertisement: Advertisement) -> AdvertiseAnswer:
        return AdvertiseAnswer()

    async def report(self, content: ReportContent) -> int:
        return 1


@dataclass
class Pair:
    """home has a gateway and no device; away has both."""

    origin_region: RegionFixture
    away: RegionFixture
    peers: dict[str, ConnectedPeers]
    agents: list[FakeAgent]

    @classmethod
    async def open(cls, folder: Path) -> "Pair":
        home = await RegionFixture.open(folder / "home", name="home")
        away = await RegionFixture.open(folder / "away", name="away", clock=home.clock)
        regions = {"home": home.region, "away": away.region}
        members = tuple(Member(name, f"{name}:7447", (f"root-{name}",), "") for name in regions)
        roads = {name: ConnectedPeers(name, regions) for name in regions}
        for name, region in regions.items():
            await region.federate(
                roads[name],
                federation=roads[name],
                directory=lambda: Directory("fed", 1, members),
                rtt=lambda: dict.fromkeys(("home", "away"), Seconds(0.002)),
            )
        agents = [FakeAgent(home, "gw-home", role=Role.GATEWAY), FakeAgent(away, "gw-away", role=Role.GATEWAY)]
        agents.append(FakeAgent(away, "edge-1"))
        for agent in agents:
            await agent.connect()
        await home.push()
        for world, text in ((away, TRADE), (home, WORKLOAD)):
            applied = await world.region.documents.apply([("d.yaml", text)], {}, "", "test")
            assert applied.plan_result.problems == ()
        return cls(home, away, roads, agents)

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            for world in (self.origin_region, self.away):
                trades, bids = world.region.origin, world.region.delegate
                assert trades is not None
                assert bids is not None
                await world.step()
                await trades.tick()
                await bids.tick()
                while trades.calls:
                    await asyncio.wait(trades.calls)
            if not any(road.cut for road in self.peers.values()):  # bytes come in real time, not in the clock's
                await until(lambda: not self._is_fetching(), 10, "the models of agreements")
            for agent in self.agents:
                if agent.world.links.desired_sets(agent.name):
                    await agent.apply_desired()
                else:
                    await agent.report()
            self.origin_region.clock.advance(0.5)

    def _is_fetching(self) -> bool:
        bids, known = self.away.region.delegate, self.away.region.workloads.catalog.models
        assert bids is not None
        granted = (state for state in bids.states.values() if isinstance(state, GrantedBid))
        return any(state.offer.model not in known for state in granted)

    @property
    def guests(self) -> list[str]:
        return [
            key.name for key in (each.key for each in self.away.region.workloads.intents) if key.tenant == GUEST_TENANT
        ]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    opened = await Pair.open(tmp_path)
    yield opened
    for world in (opened.origin_region, opened.away):
        world.region.stop()
        await world.store.close()


async def test_the_model_is_fetched_run_and_routed_to(pair: Pair) -> None:
    await pair.run(6.0)
    desired = pair.origin_region.region.workloads.desired["gw-home"]
    (endpoint,) = desired.routes[0].endpoints
    assert (endpoint.kind, endpoint.region, endpoint.node) == (EndpointKind.GATEWAY, "away", "gw-away")
    assert pair.guests == [endpoint.agreement]
    (assignment,) = pair.away.region.workloads.desired["edge-1"].assignments
    assert assignment.workload == WorkloadKey(GUEST_TENANT, endpoint.agreement)
    assert await pair.away.models.stat(DIGEST) is not None
    (trust,) = pair.away.region.workloads.desired["gw-away"].peers
    assert (trust.region, trust.gateways, trust.agreements) == ("home", ("gw-home",), (endpoint.agreement,))
    for world in (pair.origin_region, pair.away):
        entries = await world.region.ledger.entries_after(0)
        assert {"granted"} <= {entry.what for entry in entries}
        assert first_break(entries) is None


async def test_what_is_deleted_at_home_is_gone_away(pair: Pair) -> None:
    await pair.run(6.0)
    await pair.origin_region.region.documents.delete(DocumentKey("Workload", str(KEY)), "test")
    await pair.run(6.0)
    assert pair.guests == []
    assert (await pair.origin_region.region.ledger.entries_after(0))[-1].what == "ended"
    assert (await pair.away.region.ledger.entries_after(0))[-1].what == "ended"


async def test_regions_that_cannot_meet_end_it_on_both_sides(pair: Pair) -> None:
    await pair.run(6.0)
    pair.peers["home"].cut.add("away")
    pair.peers["away"].cut.add("home")
    await pair.run(40.0)
    assert pair.guests == []
    assert pair.origin_region.region.workloads.delegations == {}
    assert "breached" in {entry.what for entry in await pair.origin_region.region.ledger.entries_after(0)}
    pair.peers["home"].cut.clear()
    pair.peers["away"].cut.clear()
    await pair.run(80.0)
    assert len(pair.guests) == 1
    assert pair.origin_region.region.workloads.delegations[KEY].is_ready


async def test_a_plan_shows_what_others_would_offer_and_holds_nothing(pair: Pair) -> None:
    home = pair.origin_region.region
    await pair.away.step()
    found = await delegation_previews(home.origin, home.workloads.catalog, (await home.placement.explain()).workloads)
    outlook = found[KEY]
    assert outlook.winner == "away"
    plan = (await home.placement.explain(KEY)).of(KEY)
    assert plan is not None
    view = views.workload_plan_view(plan, home.fleet.fleet, outlook)
    (bid,) = view.bids
    assert (bid.region, bid.chosen, bid.offer.region) == ("away", True, "away")
    assert bid.latency_p95_s == pytest.approx(bid.offer.latency_p95_s + 0.002)
    assert pair.away.region.workloads.reservations == ()
    alone = await delegation_previews(None, home.workloads.catalog, (plan,))
    assert alone[KEY].refusal == NOT_JOINED


async def test_both_sides_list_the_agreement(pair: Pair) -> None:
    await pair.run(6.0)
    rows = []
    for world in (pair.origin_region, pair.away):
        trades, bids = world.region.origin, world.region.delegate
        assert trades is not None
        assert bids is not None
        rows += list(views.agreement_views(trades.trades, bids.states.values(), world.clock.now(), lambda _: SEEN))
    assert {row.delivered.requests for row in rows} == {7}
    assert [(row.side, row.counterpart, row.state, row.service) for row in rows] == [
        ("origin", "away", "active", "ready"),
        ("delegate", "home", "granted", ""),
    ]
    assert {row.agreement for row in rows} == set(pair.guests)
    (listed,) = views.workload_views(pair.origin_region.region.workloads, pair.origin_region.region.fleet.fleet)
    assert (listed.state, listed.reason.code, listed.ready, listed.wanted) == ("ready", "DELEGATED", 1, 1)
    found = await delegation_previews(
        pair.origin_region.region.origin,
        pair.origin_region.region.workloads.catalog,
        (await pair.origin_region.region.placement.explain()).workloads,
    )
    assert (found[KEY].region, found[KEY].bids) == ("away", ())


async def test_a_gateway_that_one_region_revokes_the_other_refuses(pair: Pair) -> None:
    """Told with the renewals of both sides, and kept: who came back under its name had another certificate before."""
    await pair.run(6.0)
    worlds = {"home": pair.origin_region, "away": pair.away}
    for number, world in enumerate(worlds.values()):
        serial = str(7000 + number)
        world.region.workloads.adopt_trust(Trust(("root",), (serial, "8")), (serial,))
    await pair.run(4.0)
    for name, serial in (("home", "7001"), ("away", "7000")):
        (peer,) = worlds[name].region.workloads.peers
        assert (peer.region, peer.revoked) == ("away" if name == "home" else "home", (serial,))
    bids = pair.away.region.delegate
    assert bids is not None
    await bids.start()
    assert [peer.revoked for peer in bids.peers] == [("7000",)]
    trades = pair.origin_region.region.origin
    assert trades is not None
    await trades.start()
    assert [peer.revoked for peer in trades.peers] == [("7001",)]


@pytest.mark.parametrize("leaver", ["home", "away"])
async def test_a_region_that_is_to_leave_ends_its_agreements_first(pair: Pair, leaver: str) -> None:
    await pair.run(6.0)
    region = {"home": pair.origin_region, "away": pair.away}[leaver].region
    assert len(pair.guests) == 1
    assert region.drain() == 1
    left = []
    for _ in range(100):
        await pair.run(1.0)
        left.append(region.drain())
    assert left[0] == 1
    assert left[-1] == 0
    assert pair.guests == []
    told = [each.what for each in await pair.origin_region.region.ledger.entries_after(0)]
    assert told[-1] == "ended"
    assert "noticed" in told, "in good order"
    assert "breached" not in told
    await pair.run(40.0)
    assert len(pair.guests) == 1, "who does not leave after all trades on"

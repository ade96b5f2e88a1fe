"""Two whole regions in one process, each with its own store: what one has no place for, the other runs."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.region import DIGEST, Agent, World
from shoal.coordinator.api import views
from shoal.coordinator.controllers.bids import BidsController
from shoal.coordinator.controllers.catalog import DocumentKey
from shoal.coordinator.controllers.outlook import NOT_JOINED, outlooks
from shoal.coordinator.controllers.region import Region
from shoal.coordinator.ports import Heard
from shoal.types.agreement import GUESTS, Award, Delivered, Grant, Notice, Release, Renewal, Renewed, ServiceReport
from shoal.types.assignment import Trust
from shoal.types.chain import LedgerEntry, first_broken
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
class Roads:
    """What one region can say to all: ports.Peers and ports.FederationLink over the others' controllers."""

    name: str
    regions: dict[str, Region]
    cut: set[str] = field(default_factory=set)

    def _to(self, region: str) -> BidsController:
        if region in self.cut:
            raise refuse(Code.PEER_UNREACHABLE, region)
        bids = self.regions[region].bids
        assert bids is not None
        return bids

    async def solicit(self, solicitation: Solicitation) -> tuple[Heard[Answer], ...]:
        return tuple([await self.bid(name, solicitation) for name in sorted(self.regions) if name != self.name])

    async def bid(self, region: str, solicitation: Solicitation) -> Heard[Answer]:
        return Heard(region, await self._to(region).bid(Heard(self.name, solicitation, b"")), b"")

    async def award(self, region: str, award: Award) -> Heard[Grant]:
        return Heard(region, await self._to(region).awarded(Heard(self.name, award, b"")), b"")

    async def release(self, region: str, release: Release) -> None:
        await self._to(region).released(Heard(self.name, release, b""))

    async def renew(self, region: str, renewal: Renewal) -> Heard[Renewed]:
        return Heard(region, await self._to(region).renewed(Heard(self.name, renewal, b"")), b"")

    async def notify(self, region: str, notice: Notice) -> None:
        await self._to(region).noticed(Heard(self.name, notice, b""))

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        await self._to(region).lend(self.name, agreement, digest)
        yield b"x" * (1000 - offset)

    async def measure(self, region: str) -> Seconds:
        return Seconds(0.002)

    async def advertise(self, advertisement: Advertisement) -> Directory | None:
        return None

    async def report(self, delivered: tuple[Delivered, ...], entries: tuple[LedgerEntry, ...]) -> int:
        return 1


@dataclass
class Pair:
    """home has a gateway and no device; away has both."""

    home: World
    away: World
    roads: dict[str, Roads]
    agents: list[Agent]

    @classmethod
    async def open(cls, folder: Path) -> "Pair":
        home = await World.open(folder / "home", name="home")
        away = await World.open(folder / "away", name="away", clock=home.clock)
        regions = {"home": home.region, "away": away.region}
        members = tuple(Member(name, f"{name}:7447", (f"root-{name}",), "") for name in regions)
        roads = {name: Roads(name, regions) for name in regions}
        for name, region in regions.items():
            await region.federate(
                roads[name],
                federation=roads[name],
                directory=lambda: Directory("fed", 1, members),
                rtt=lambda: dict.fromkeys(("home", "away"), Seconds(0.002)),
            )
        agents = [Agent(home, "gw-home", role=Role.GATEWAY), Agent(away, "gw-away", role=Role.GATEWAY)]
        agents.append(Agent(away, "edge-1"))
        for agent in agents:
            await agent.connect()
        await home.push()
        for world, text in ((away, TRADE), (home, WORKLOAD)):
            applied = await world.region.workloads.apply([("d.yaml", text)], {}, "", "test")
            assert applied.planned.problems == ()
        return cls(home, away, roads, agents)

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            for world in (self.home, self.away):
                trades, bids = world.region.trades, world.region.bids
                assert trades is not None
                assert bids is not None
                await world.step()
                await trades.tick()
                await bids.tick()
                while trades.calls:
                    await asyncio.wait(trades.calls)
            for agent in self.agents:
                if agent.world.sent.desired(agent.name):
                    await agent.obey()
                else:
                    await agent.report()
            self.home.clock.advance(0.5)

    @property
    def guests(self) -> list[str]:
        return [key.name for key in (each.key for each in self.away.region.workloads.intents) if key.tenant == GUESTS]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    opened = await Pair.open(tmp_path)
    yield opened
    for world in (opened.home, opened.away):
        world.region.stop()
        await world.store.close()


async def test_the_model_is_fetched_run_and_routed_to(pair: Pair) -> None:
    await pair.run(6.0)
    desired = pair.home.region.workloads.desired["gw-home"]
    (endpoint,) = desired.routes[0].endpoints
    assert (endpoint.kind, endpoint.region, endpoint.node) == (EndpointKind.GATEWAY, "away", "gw-away")
    assert pair.guests == [endpoint.agreement]
    (assignment,) = pair.away.region.workloads.desired["edge-1"].assignments
    assert assignment.workload == WorkloadKey(GUESTS, endpoint.agreement)
    assert await pair.away.models.stat(DIGEST) is not None
    (trust,) = pair.away.region.workloads.desired["gw-away"].peers
    assert (trust.region, trust.gateways, trust.agreements) == ("home", ("gw-home",), (endpoint.agreement,))
    for world in (pair.home, pair.away):
        entries = await world.region.ledger.past(0)
        assert {"granted"} <= {entry.what for entry in entries}
        assert first_broken(entries) is None


async def test_what_is_deleted_at_home_is_gone_away(pair: Pair) -> None:
    await pair.run(6.0)
    await pair.home.region.workloads.delete(DocumentKey("Workload", str(KEY)), "test")
    await pair.run(6.0)
    assert pair.guests == []
    assert (await pair.home.region.ledger.past(0))[-1].what == "ended"
    assert (await pair.away.region.ledger.past(0))[-1].what == "ended"


async def test_regions_that_cannot_meet_end_it_on_both_sides(pair: Pair) -> None:
    await pair.run(6.0)
    pair.roads["home"].cut.add("away")
    pair.roads["away"].cut.add("home")
    await pair.run(40.0)
    assert pair.guests == []
    assert pair.home.region.workloads.delegated == {}
    assert "breached" in {entry.what for entry in await pair.home.region.ledger.past(0)}
    pair.roads["home"].cut.clear()
    pair.roads["away"].cut.clear()
    await pair.run(80.0)
    assert len(pair.guests) == 1
    assert pair.home.region.workloads.delegated[KEY].ready


async def test_a_plan_shows_what_others_would_offer_and_holds_nothing(pair: Pair) -> None:
    home = pair.home.region
    await pair.away.step()
    found = await outlooks(home.trades, home.workloads.catalog, home.workloads.explained().workloads)
    outlook = found[KEY]
    assert outlook.winner == "away"
    plan = home.workloads.explain(KEY)
    view = views.workload_plan_view(plan, outlook)
    (bid,) = view.bids
    assert (bid.region, bid.chosen, bid.offer.region) == ("away", True, "away")
    assert bid.latency_p95_s == pytest.approx(bid.offer.latency_p95_s + 0.002)
    assert pair.away.region.workloads.reserved == ()
    alone = await outlooks(None, home.workloads.catalog, (plan,))
    assert alone[KEY].refusal == NOT_JOINED


async def test_both_sides_list_the_agreement(pair: Pair) -> None:
    await pair.run(6.0)
    rows = []
    for world in (pair.home, pair.away):
        trades, bids = world.region.trades, world.region.bids
        assert trades is not None
        assert bids is not None
        rows += list(views.agreement_views(trades.trades, bids.states.values(), world.clock.now(), lambda _: SEEN))
    assert {row.delivered.requests for row in rows} == {7}
    assert [(row.side, row.counterpart, row.state, row.service) for row in rows] == [
        ("origin", "away", "active", "ready"),
        ("delegate", "home", "granted", ""),
    ]
    assert {row.agreement for row in rows} == set(pair.guests)
    (listed,) = views.workload_views(pair.home.region.workloads, pair.home.region.fleet.fleet)
    assert (listed.state, listed.reason.code, listed.ready, listed.wanted) == ("ready", "DELEGATED", 1, 1)
    found = await outlooks(
        pair.home.region.trades, pair.home.region.workloads.catalog, pair.home.region.workloads.explained().workloads
    )
    assert (found[KEY].region, found[KEY].bids) == ("away", ())


async def test_a_gateway_that_one_region_revokes_the_other_refuses(pair: Pair) -> None:
    """Told with the renewals of both sides, and kept: who came back under its name had another certificate before."""
    await pair.run(6.0)
    worlds = {"home": pair.home, "away": pair.away}
    for number, world in enumerate(worlds.values()):
        serial = str(7000 + number)
        world.region.workloads.adopt_trust(Trust(("root",), (serial, "8")), (serial,))
    await pair.run(4.0)
    for name, serial in (("home", "7001"), ("away", "7000")):
        (peer,) = worlds[name].region.workloads.peers
        assert (peer.region, peer.revoked) == ("away" if name == "home" else "home", (serial,))
    bids = pair.away.region.bids
    assert bids is not None
    await bids.start()
    assert [peer.revoked for peer in bids.peers] == [("7000",)]
    trades = pair.home.region.trades
    assert trades is not None
    await trades.start()
    assert [peer.revoked for peer in trades.peers] == [("7001",)]


@pytest.mark.parametrize("leaver", ["home", "away"])
async def test_a_region_that_is_to_leave_ends_its_agreements_first(pair: Pair, leaver: str) -> None:
    await pair.run(6.0)
    region = {"home": pair.home, "away": pair.away}[leaver].region
    assert len(pair.guests) == 1
    assert region.drain() == 1
    left = []
    for _ in range(100):
        await pair.run(1.0)
        left.append(region.drain())
    assert left[0] == 1
    assert left[-1] == 0
    assert pair.guests == []
    told = [each.what for each in await pair.home.region.ledger.past(0)]
    assert told[-1] == "ended"
    assert "noticed" in told, "in good order"
    assert "breached" not in told
    await pair.run(40.0)
    assert len(pair.guests) == 1, "who does not leave after all trades on"

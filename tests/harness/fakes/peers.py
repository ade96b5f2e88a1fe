"""Other regions in one process: the delegate's own state machine behind ports.Peers and ports.FederationLink."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from harness.builders.offers import offer
from harness.fakes.region import DIGEST
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.ports import AdvertiseAnswer, Clock, VerifiedMessage
from shoal.types.agreement import (
    Award,
    Delivered,
    GatewayRef,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    ReportContent,
    ServiceReport,
    ServiceState,
)
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.offer import Answer, Solicitation
from shoal.types.units import Elapsed, Joules, Seconds
from shoal.types.workload import Requirements

NOTHING = ServiceReport(0, 0, Seconds(0.0), Joules(0.0), EnergySource.ESTIMATED, 0.0)


@dataclass
class FakeRegion:
    """Another region: it bids as configured, and the delegate's own state machine decides the rest."""

    # Region name.
    name: str
    # Shared with the region under test.
    clock: Clock
    # Latency that its bids promise.
    p95_s: float = 0.02
    # USD/h that its bids ask.
    cost: float = 1.0
    # What its renewals report.
    service: ServiceState = ServiceState.READY
    # Bid id -> state.
    bids: dict[str, hold.BidState] = field(default_factory=dict)

    def bid(self, solicitation: Solicitation) -> Answer:
        bound: Requirements = solicitation.require
        slow = bound.latency_p95_s is not None and self.p95_s + solicitation.way_s[self.name] > bound.latency_p95_s
        answer = offer(
            self.name,
            self.p95_s,
            self.cost,
            id=f"{solicitation.id}-{solicitation.round}-{self.name}",
            solicitation=solicitation.id,
            round=solicitation.round,
            origin=solicitation.origin,
            model=DIGEST,
            hold_s=Seconds(0.0 if slow or solicitation.indicative else 10.0),
            changes=(f"latency: {{p95: {self.p95_s}s}}",) if slow else (),
        )
        if answer.hold_s:
            until = Elapsed(self.clock.now() + answer.hold_s)
            self.bids[answer.id] = hold.HeldBid(solicitation, answer, (), until)
        return answer

    def apply_event(self, bid: str, event: hold.BidEvent) -> Seconds:
        if bid not in self.bids:
            raise refuse(Code.BID_UNKNOWN, bid)
        self.bids[bid], effects = hold.step(self.bids[bid], event, self.clock.now())
        for effect in effects:
            if isinstance(effect, hold.Refuse):
                raise ShoalError(effect.refusal)
        return next((effect.lease_s for effect in effects if isinstance(effect, hold.LeaseAnswer)), Seconds(0.0))

    def bid_of(self, agreement: str) -> str:
        for name, state in self.bids.items():
            agreed = hold.agreement_of(state)
            if agreed is not None and agreed.award.agreement == agreement:
                return name
        raise refuse(Code.AGREEMENT_UNKNOWN, agreement)

    @property
    def running_agreements(self) -> list[str]:
        return [
            agreed.award.agreement for state in self.bids.values() if (agreed := hold.agreement_of(state)) is not None
        ]

    @property
    def active_holds(self) -> list[str]:
        return [
            name
            for name, state in self.bids.items()
            if isinstance(state, hold.HeldBid) and self.clock.now() < state.until
        ]


@dataclass
class FakePeers:
    """ports.Peers and ports.FederationLink in front of fake regions."""

    # By name.
    regions: dict[str, FakeRegion]
    # Methods whose request does not arrive.
    lost_requests: set[str] = field(default_factory=set)
    # Regions that nothing reaches.
    down: set[str] = field(default_factory=set)
    # Methods that take effect, but whose answer does not arrive.
    lost_answers: set[str] = field(default_factory=set)
    # True: solicit and report are refused.
    federation_down: bool = False
    # Code by which reports with ledger entries are refused; None: they are taken.
    entries_refused: Code | None = None
    # What was reported to the federation.
    delivered_reports: list[Delivered] = field(default_factory=list)
    # Ledger entries that the federation holds, without a gap.
    copies: list[LedgerEntry] = field(default_factory=list)
    # Every method called, in order.
    sent_methods: list[str] = field(default_factory=list)

    def _pass(self, method: str, region: str) -> None:
        self.sent_methods.append(method)
        if method in self.lost_requests or region in self.down:
            raise refuse(Code.PEER_UNREACHABLE, method)

    def _answer(self, method: str) -> None:
        if method in self.lost_answers:
            raise refuse(Code.PEER_UNREACHABLE, method)

    async def solicit(self, solicitation: Solicitation) -> tuple[VerifiedMessage[Answer], ...]:
        if self.federation_down:
            raise refuse(Code.FEDERATION_UNREACHABLE)
        return tuple([await self.request_bid(region, solicitation) for region in sorted(self.regions)])

    async def request_bid(self, region: str, solicitation: Solicitation) -> VerifiedMessage[Answer]:
        self._pass("bid", region)
        return VerifiedMessage(region, self.regions[region].bid(solicitation), b"signed")

    async def award(self, region: str, award: Award) -> VerifiedMessage[Grant]:
        self._pass("award", region)
        lease_s = self.regions[region].apply_event(award.bid, hold.AwardReceived(award))
        self._answer("award")
        gateways = (GatewayRef(f"gw-{region}", f"{region}:1"),)
        return VerifiedMessage(region, Grant(award.agreement, award.bid, region, lease_s, gateways), b"signed")

    async def release(self, region: str, release: Release) -> None:
        self._pass("release", region)
        self.regions[region].apply_event(release.bid, hold.ReleaseReceived())
        self._answer("release")

    async def renew(self, region: str, renewal: Renewal) -> VerifiedMessage[Renewed]:
        self._pass("renew", region)
        neighbour = self.regions[region]
        bid = neighbour.bid_of(renewal.agreement)
        lease_s = neighbour.apply_event(bid, hold.RenewalReceived(renewal))
        self._answer("renew")
        stopping = isinstance(neighbour.bids[bid], hold.StoppingBid)
        gateways = (GatewayRef(f"gw-{region}", f"{region}:1"),)
        service = ServiceState.STOPPING if stopping else neighbour.service
        return VerifiedMessage(
            region, Renewed(renewal.agreement, renewal.nonce, lease_s, service, NOTHING, gateways, "head"), b""
        )

    async def notify(self, region: str, notice: Notice) -> None:
        self._pass("notify", region)
        neighbour = self.regions[region]
        neighbour.apply_event(neighbour.bid_of(notice.agreement), hold.OriginNotice(notice))
        self._answer("notify")

    async def measure(self, region: str) -> Seconds:
        return Seconds(0.002)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        yield b""

    async def advertise(self, advertisement: object) -> AdvertiseAnswer:
        return AdvertiseAnswer()

    async def report(self, content: ReportContent) -> int:
        if self.federation_down:
            raise refuse(Code.FEDERATION_UNREACHABLE)
        if self.entries_refused is not None and content.entries:
            raise refuse(self.entries_refused)
        self.delivered_reports += content.delivered
        self.copies += [each for each in content.entries if each.sequence == len(self.copies) + 1]
        return len(self.copies) + 1

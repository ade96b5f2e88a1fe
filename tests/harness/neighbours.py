"""Other regions in one process: the delegate's own machine behind ports.Peers and ports.FederationLink."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from harness.offers import offer
from harness.region import DIGEST
from shoal.coordinator.core.negotiation import hold
from shoal.coordinator.ports import Clock, Heard
from shoal.types.agreement import (
    Award,
    Delivered,
    GatewayRef,
    Grant,
    Notice,
    Release,
    Renewal,
    Renewed,
    Service,
    ServiceReport,
)
from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import EnergySource
from shoal.types.offer import Answer, Directory, Solicitation
from shoal.types.units import Elapsed, Joules, Seconds
from shoal.types.workload import Requirements

NOTHING = ServiceReport(0, 0, Seconds(0.0), Joules(0.0), EnergySource.ESTIMATED, 0.0)


@dataclass
class Neighbour:
    """Another region: one bid as told, and what becomes of it by the delegate's own machine."""

    name: str
    clock: Clock
    p95_s: float = 0.02
    cost: float = 1.0
    service: Service = Service.READY
    bids: dict[str, hold.State] = field(default_factory=dict)

    def bid(self, asked: Solicitation) -> Answer:
        bound: Requirements = asked.require
        slow = bound.latency_p95_s is not None and self.p95_s + asked.way_s[self.name] > bound.latency_p95_s
        answer = offer(
            self.name, self.p95_s, self.cost, id=f"{asked.id}-{asked.round}-{self.name}", solicitation=asked.id,
            round=asked.round, origin=asked.origin, model=DIGEST,
            hold_s=Seconds(0.0 if slow or asked.indicative else 10.0),
            changes=(f"latency: {{p95: {self.p95_s}s}}",) if slow else (),
        )  # fmt: skip
        if answer.hold_s:
            until = Elapsed(self.clock.now() + answer.hold_s)
            self.bids[answer.id] = hold.Held(asked, answer, (), until)
        return answer

    def tell(self, bid: str, event: hold.Event) -> Seconds:
        if bid not in self.bids:
            raise refuse(Code.BID_UNKNOWN, bid)
        self.bids[bid], effects = hold.step(self.bids[bid], event, self.clock.now())
        for effect in effects:
            if isinstance(effect, hold.Refuse):
                raise ShoalError(effect.refusal)
        return next((effect.lease_s for effect in effects if isinstance(effect, hold.Answer)), Seconds(0.0))

    def bid_of(self, agreement: str) -> str:
        for name, state in self.bids.items():
            agreed = hold.agreed(state)
            if agreed is not None and agreed.award.agreement == agreement:
                return name
        raise refuse(Code.AGREEMENT_UNKNOWN, agreement)

    @property
    def runs(self) -> list[str]:
        return [agreed.award.agreement for state in self.bids.values() if (agreed := hold.agreed(state)) is not None]

    @property
    def held(self) -> list[str]:
        return [
            name for name, state in self.bids.items() if isinstance(state, hold.Held) and self.clock.now() < state.until
        ]


@dataclass
class Wire:
    """ports.Peers and ports.FederationLink. lost: methods whose message does not come; deaf: whose
    answer does not. down: regions that nothing reaches."""

    regions: dict[str, Neighbour]
    lost: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    federation_down: bool = False
    told: list[Delivered] = field(default_factory=list)
    copies: list[LedgerEntry] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    def _pass(self, method: str, region: str) -> None:
        self.sent.append(method)
        if method in self.lost or region in self.down:
            raise refuse(Code.PEER_UNREACHABLE, method)

    def _answer(self, method: str) -> None:
        if method in self.deaf:
            raise refuse(Code.PEER_UNREACHABLE, method)

    async def solicit(self, solicitation: Solicitation) -> tuple[Heard[Answer], ...]:
        if self.federation_down:
            raise refuse(Code.FEDERATION_UNREACHABLE)
        return tuple([await self.bid(region, solicitation) for region in sorted(self.regions)])

    async def bid(self, region: str, solicitation: Solicitation) -> Heard[Answer]:
        self._pass("bid", region)
        return Heard(region, self.regions[region].bid(solicitation), b"signed")

    async def award(self, region: str, award: Award) -> Heard[Grant]:
        self._pass("award", region)
        lease_s = self.regions[region].tell(award.bid, hold.Awarded(award))
        self._answer("award")
        gateways = (GatewayRef(f"gw-{region}", f"{region}:1"),)
        return Heard(region, Grant(award.agreement, award.bid, region, lease_s, gateways), b"signed")

    async def release(self, region: str, release: Release) -> None:
        self._pass("release", region)
        self.regions[region].tell(release.bid, hold.Released())
        self._answer("release")

    async def renew(self, region: str, renewal: Renewal) -> Heard[Renewed]:
        self._pass("renew", region)
        neighbour = self.regions[region]
        bid = neighbour.bid_of(renewal.agreement)
        lease_s = neighbour.tell(bid, hold.Renewed(renewal))
        self._answer("renew")
        stopping = isinstance(neighbour.bids[bid], hold.Stopping)
        gateways = (GatewayRef(f"gw-{region}", f"{region}:1"),)
        service = Service.STOPPING if stopping else neighbour.service
        return Heard(
            region, Renewed(renewal.agreement, renewal.nonce, lease_s, service, NOTHING, gateways, "head"), b""
        )

    async def notify(self, region: str, notice: Notice) -> None:
        self._pass("notify", region)
        neighbour = self.regions[region]
        neighbour.tell(neighbour.bid_of(notice.agreement), hold.Noticed(notice))
        self._answer("notify")

    async def measure(self, region: str) -> Seconds:
        return Seconds(0.002)

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        yield b""

    async def advertise(self, advertisement: object) -> Directory | None:
        return None

    async def report(self, delivered: tuple[Delivered, ...], entries: tuple[LedgerEntry, ...]) -> int:
        if self.federation_down:
            raise refuse(Code.FEDERATION_UNREACHABLE)
        self.told += delivered
        self.copies += [each for each in entries if each.sequence == len(self.copies) + 1]
        return len(self.copies) + 1

"""The delegate side of a region over a real store, and the regions that it meets."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from harness.builders.negotiation import award, signed_message, solicitation
from harness.fakes.region import DIGEST, RegionFixture
from harness.wait import until
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.delegate import DelegateController
from shoal.coordinator.controllers.federation.ledger import Ledger
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.ports import PeerRegions, VerifiedMessage
from shoal.types.agreement import Grant, Notice
from shoal.types.chain import first_break
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.offer import Member, Offer

LISTED = Member("", "", ("root",), "")
"""What the federation says of every region by default."""


@dataclass
class FakePeerRegions:
    """ports.PeerRegions, and the origin's side as far as a delegate meets it."""

    # (region, agreement, digest) of every fetch.
    fetched: list[tuple[str, str, str]] = field(default_factory=list)
    # Notices sent to other regions.
    notices: list[Notice] = field(default_factory=list)
    # Agreements whose fetches were authorised.
    authorised_fetches: list[str] = field(default_factory=list)
    # Notices from other regions about this region's own delegations.
    noticed_here: list[Notice] = field(default_factory=list)
    # How many of the next calls fail.
    failures: int = 0

    def _fails(self) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise ShoalError(Refusal(Code.PEER_UNREACHABLE))

    async def fetch(self, region: str, agreement: str, digest: str, offset: int) -> AsyncIterator[bytes]:
        self.fetched.append((region, agreement, digest))
        self._fails()
        yield b"x" * 1000

    async def notify(self, region: str, notice: Notice) -> None:
        self._fails()
        self.notices.append(notice)

    async def on_notice(self, notice: VerifiedMessage[Notice]) -> None:
        self.noticed_here.append(notice.content)

    async def authorise_fetch(self, region: str, agreement: str, digest: str) -> None:
        self.authorised_fetches.append(agreement)


@dataclass(frozen=True, slots=True)
class ListedAccess(FederationAccess):
    """Every region is listed, as `LISTED` unless `listed` says otherwise."""

    # By name; None: no member.
    listed: dict[str, Member | None]

    def member_of(self, region: str) -> Member | None:
        return self.listed.get(region, replace(LISTED, region=region))


@dataclass
class DelegateFixture:
    """The federation's delegate side of region `eu`, which `us-east` solicits."""

    # The region itself.
    world: RegionFixture
    # Its real ledger.
    ledger: Ledger
    # The controller under test.
    bids: DelegateController
    # The other regions.
    elsewhere: FakePeerRegions
    # Members of the federation that differ from `LISTED`; None: no member.
    listed: dict[str, Member | None]

    @classmethod
    async def open(
        cls, world: RegionFixture, *, compute: Compute = inline, thread_time: Callable[[], float] = lambda: 0.0
    ) -> "DelegateFixture":
        elsewhere, listed = FakePeerRegions(), dict[str, Member | None]()
        region = world.region
        ledger = Ledger(world.store, region.fence, region.clock)
        bids = DelegateController(
            region.context, ledger, region.workloads, region.models,
            ListedAccess(cast(PeerRegions, elsewhere), None, lambda: None, dict, listed),
            origin=elsewhere, on_change=lambda: None, compute=compute, thread_time=thread_time,
        )  # fmt: skip
        await ledger.start()
        await bids.start()
        return cls(world, ledger, bids, elsewhere, listed)

    async def ask(self, name: str = "s-1", **changes: Any) -> Any:
        return await self.bids.on_solicitation(
            signed_message(solicitation(name, models=(await self.profile(),), **changes))
        )

    async def profile(self) -> Any:
        return await self.world.models.inspect("", DIGEST)

    async def grant(self, agreement: str = "g-1", name: str = "s-1") -> Grant:
        offer = await self.ask(name)
        assert isinstance(offer, Offer)
        return await self.bids.on_award(signed_message(award(agreement, offer.id, solicitation=name)))

    async def later(self, seconds: float) -> None:
        self.world.clock.advance(seconds)
        await self.bids.tick()

    async def wait_fetched(self) -> None:
        """Wait until the model of the agreement is in the catalog."""
        await self.bids.tick()
        await until(lambda: DIGEST in self.world.region.workloads.catalog.models, 5.0, "the model to be here")

    async def ledger_entries(self) -> list[tuple[str, str]]:
        entries = await self.ledger.entries_after(0)
        assert first_break(entries, self.ledger.head) is None
        return [(each.what, each.agreement) for each in entries]

    @property
    def reserved_bytes(self) -> int:
        return sum(each.memory_bytes for each in self.world.region.workloads.open_reservations)

    def state(self, offer: str) -> Any:
        return self.bids.states[offer]

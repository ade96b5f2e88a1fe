"""A delegate through random stories: two origins that ask, award, renew, release and give notice, early, late and
twice; a store that refuses or does not answer; restarts. After each act all that must hold does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.builders.negotiation import award, notice, renewal, signed_message, solicitation
from harness.fakes.delegate import DelegateFixture
from harness.fakes.region import DOCUMENTS, FakeAgent, RegionFixture
from shoal.coordinator.core.negotiation.hold import HoldTerms, agreement_of
from shoal.coordinator.core.workloads.invariants import check
from shoal.coordinator.ports import Transaction
from shoal.types.agreement import Grant, Release
from shoal.types.chain import first_break
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Role
from shoal.types.offer import Demand, Offer
from shoal.types.units import PerSecond, Seconds

SEEDS = 12
ACTS = 60
ORIGINS = ("us-east", "us-west")
TERMS = HoldTerms()
DOCUMENT = """apiVersion: shoal/v1
kind: Region
metadata: {name: eu}
spec: {trade: [{with: "*", hold_share: 60%}]}
"""


@dataclass
class DelegateScenario:
    """One delegate, and what it has answered so far."""

    rng: np.random.Generator
    folder: Path
    here: DelegateFixture
    asked: list[Any] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    grants: dict[str, Grant] = field(default_factory=dict)
    granted_at: dict[str, float] = field(default_factory=dict)
    sequence: int = 0
    agents: tuple[FakeAgent, ...] = ()

    @classmethod
    async def open(cls, folder: Path, seed: int) -> "DelegateScenario":
        world = await RegionFixture.open(folder)
        await world.region.documents.apply([("r.yaml", DOCUMENT)], {}, "", "test")
        story = cls(np.random.default_rng(seed), folder, await DelegateFixture.open(world))
        await story.nodes()
        return story

    async def nodes(self) -> None:
        world = self.here.world
        self.agents = (FakeAgent(world, "edge-1"), FakeAgent(world, "gw", role=Role.GATEWAY))
        for agent in self.agents:
            await agent.connect()
        await world.step()

    async def act(self) -> None:
        acts = (
            self.ask,
            self.award,
            self.award,
            self.renew,
            self.release,
            self.notice,
            self.apply_local_workload,
            self.wait,
        )
        chosen = acts[int(self.rng.integers(len(acts)))]
        if self.rng.random() < 0.05:
            await self.restart()
        trouble = self.rng.random()
        store = self.here.world.store
        with pytest.MonkeyPatch.context() as patched:
            if trouble < 0.15:
                patched.setattr(store, "commit", _without_answer(store.commit) if trouble < 0.08 else _refuse_commit)
            with suppress(ShoalError):
                await chosen()
        await self.here.bids.tick()
        await asyncio.wait([asyncio.ensure_future(_nothing())])  # what it began in the background goes on
        await self.here.world.step()
        for agent in self.agents:
            if self.here.world.links.desired_sets(agent.name):
                await agent.apply_desired()
        await self.check_invariants()

    async def ask(self) -> None:
        if self.asked and self.rng.random() < 0.3:
            what = self._one(self.asked)
        else:
            rate = float(self.rng.choice([0.0, 5.0, 40.0]))
            profile = await self.here.profile()
            what = solicitation(
                f"s-{len(self.asked)}",
                origin=self._one(ORIGINS),
                models=(profile,),
                traffic=(Demand("home", PerSecond(rate), PerSecond(rate)),),
            )
            self.asked.append(what)
        answered = await self.here.bids.on_solicitation(signed_message(what, what.origin))
        if isinstance(answered, Offer) and answered.hold_s > 0:
            self.offers.append(answered)

    async def award(self) -> None:
        offer = self._one(self.offers)
        if offer is None:
            return
        name = f"g-{offer.id}" if self.rng.random() < 0.9 else f"g-{int(self.rng.integers(1000))}"
        what = award(name, offer.id, solicitation=offer.solicitation, origin=offer.origin)
        held_until = self.here.bids.states.get(offer.id)
        grant = await self.here.bids.on_award(signed_message(what, offer.origin))
        first = self.grants.setdefault(offer.id, grant)
        assert (grant.agreement, grant.bid) == (first.agreement, first.bid), "a bid becomes one agreement"
        assert held_until is not None, "what nobody holds is not granted"
        self.granted_at[grant.agreement] = self.here.world.region.clock.now()

    async def renew(self) -> None:
        grant = self._one(list(self.grants.values()))
        if grant is not None:
            self.sequence += 1
            sequence = self.sequence if self.rng.random() < 0.7 else int(self.rng.integers(1, self.sequence + 1))
            what = renewal(sequence, agreement=grant.agreement)
            await self.here.bids.on_renewal(signed_message(what, self._origin(grant)))
            self.granted_at[grant.agreement] = self.here.world.region.clock.now()

    async def release(self) -> None:
        offer = self._one(self.offers)
        if offer is not None:
            await self.here.bids.on_release(
                signed_message(Release(offer.solicitation, offer.id, offer.origin), offer.origin)
            )

    async def notice(self) -> None:
        grant = self._one(list(self.grants.values()))
        if grant is not None:
            by = self._origin(grant)
            ends_s = float(self.rng.choice([0.0, 3.0, 20.0]))
            await self.here.bids.on_notice(signed_message(notice(ends_s, agreement=grant.agreement, by=by), by))

    async def apply_local_workload(self) -> None:
        """A workload of the region's own comes."""
        await self.here.world.push()
        name = f"home-{int(self.rng.integers(4))}"
        documents = [(DOCUMENTS[0][0], DOCUMENTS[0][1].replace("name: reader", f"name: {name}"))]
        await self.here.world.region.documents.apply(documents, {}, "", "test")

    async def wait(self) -> None:
        self.here.world.clock.advance(float(self.rng.choice([0.1, 2.0, 5.0, 11.0, 20.0])))

    async def restart(self) -> None:
        """The machine boots: elapsed time begins anew."""
        self.here.bids.stop()
        await self.here.world.store.close()
        self.here.world.clock.elapsed = 1.0
        self.here = await DelegateFixture.open(await RegionFixture.open(self.folder, self.here.world))
        self.granted_at = dict.fromkeys(self.granted_at, self.here.world.region.clock.now())
        await self.nodes()

    async def check_invariants(self) -> None:
        region = self.here.world.region
        assert check(region.workloads.snapshot()) == ()
        entries = await self.here.ledger.entries_after(0)
        assert first_break(entries) is None
        granted = [each.agreement for each in entries if each.what == "granted"]
        assert len(granted) == len(set(granted))
        over = [each.agreement for each in entries if each.what in ("expired", "released", "breached", "ended")]
        assert len(over) == len(set(over)), "what is over does not end again"
        now = self.here.world.region.clock.now()
        for state in self.here.bids.states.values():
            if (agreement := agreement_of(state)) is not None:
                last = self.granted_at.get(agreement.award.agreement, now)
                assert now <= last + TERMS.lease_s + TERMS.allowance_s, "nobody keeps a guest beyond its lease"
                assert agreement.award.agreement not in over
        agreements = [
            agreement for each in self.here.bids.states.values() if (agreement := agreement_of(each)) is not None
        ]
        guests = [guest.intent.key.name for guest in region.workloads.catalog.guests]
        assert sorted(guests) == sorted(agreement.award.agreement for agreement in agreements)

    def _one(self, among: Any) -> Any:
        return among[int(self.rng.integers(len(among)))] if among else None

    def _origin(self, grant: Grant) -> str:
        return next(offer.origin for offer in self.offers if offer.id == grant.bid)


async def _nothing() -> None:
    pass


async def _refuse_commit(_: Transaction) -> int:
    raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))


def _without_answer(commit: Any) -> Any:
    async def commit_without_answer(transaction: Transaction) -> int:
        await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    return commit_without_answer


@pytest.fixture
async def scenario(tmp_path: Path, seed: int) -> AsyncIterator[DelegateScenario]:
    opened = await DelegateScenario.open(tmp_path, seed)
    yield opened
    opened.here.bids.stop()
    await opened.here.world.store.close()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_nothing_is_oversold_promised_twice_or_forgotten(scenario: DelegateScenario) -> None:
    for _ in range(ACTS):
        await scenario.act()
    assert scenario.offers
    await scenario.here.later(Seconds(TERMS.lease_s + TERMS.allowance_s))
    assert scenario.here.reserved_bytes == 0, "when nobody says anything any more, all is free again"
    assert scenario.here.world.region.workloads.catalog.guests == ()

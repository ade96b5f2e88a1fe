"""Bids and agreements over a real store: what is answered is written, what is repeated is answered alike, what ends is
free, and what a crash leaves is taken up."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from harness.builders.negotiation import ORIGIN, award, notice, renewal, signed_message, solicitation
from harness.fakes.delegate import LISTED, DelegateFixture
from harness.fakes.region import DIGEST, DOCUMENTS, FakeAgent, RegionFixture
from harness.wait import until
from shoal.coordinator.api.views import agreements, workload_views
from shoal.coordinator.controllers.federation.bids import BIDS
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.core.catalog.model import DocumentKey
from shoal.coordinator.core.negotiation.hold import ClosedBid, GrantedBid, HeldBid, StoppingBid
from shoal.coordinator.core.workloads.invariants import check
from shoal.coordinator.ports import Transaction, VerifiedMessage
from shoal.types.agreement import GUEST_TENANT, Award, Notice, Release, Renewal, ServiceState
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.link import Welcome
from shoal.types.offer import Decline, Offer
from shoal.types.units import Elapsed, Seconds
from shoal.types.workload import WorkloadKey

TRADE = [
    (
        "r.yaml",
        """apiVersion: shoal/v1
kind: Region
metadata: {name: eu}
spec: {location: {residency: eu}, trade: [{with: "us-*", hold_share: 90%}]}
""",
    )
]
GUEST = WorkloadKey(GUEST_TENANT, "g-1")


def raises_code(code: Code) -> Any:
    return pytest.raises(ShoalError, match=code)


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[DelegateFixture]:
    world = await RegionFixture.open(tmp_path / "first")
    assert not (await world.region.documents.apply(TRADE, {}, "", "test")).plan_result.problems
    for agent in (FakeAgent(world, "edge-1"), FakeAgent(world, "gw", role=Role.GATEWAY)):
        await agent.connect()
    await world.step()
    opened = await DelegateFixture.open(world)
    assert check(world.region.workloads.snapshot()) == ()
    yield opened
    opened.bids.stop()
    await world.store.close()


async def test_a60_what_is_held_for_a_region_ends_with_its_membership(here: DelegateFixture) -> None:
    offer = await here.ask()
    assert isinstance(offer, Offer)
    assert here.reserved_bytes
    here.listed[offer.origin] = None
    await here.later(0.1)
    assert here.reserved_bytes == 0
    assert [what for what, _ in await here.ledger_entries()] == ["offered", "released"]
    with raises_code(Code.HOLD_RELEASED):
        await here.bids.on_award(signed_message(award("g-1", offer.id, solicitation="s-1")))


async def test_an_offer_holds_room_that_is_written_before_it_is_told(here: DelegateFixture) -> None:
    offer = await here.ask()
    assert isinstance(offer, Offer)
    assert (offer.region, offer.hold_s, offer.residency, offer.cached) == ("eu", 10.0, "eu", False)
    assert here.reserved_bytes > 0
    assert await here.world.store.read(BIDS + offer.id) is not None
    assert await here.ledger_entries() == [("offered", offer.id)]
    assert check(here.world.region.workloads.snapshot()) == ()


async def test_a_region_that_nobody_can_reach_offers_nothing(here: DelegateFixture) -> None:
    for _ in range(20):
        here.world.clock.advance(1.0)
        await here.world.step()
    told = await here.ask()
    assert isinstance(told, Decline)
    assert told.refusal.code is Code.NODE_NOT_READY


async def test_a22_the_same_solicitation_again_gets_the_first_answer(here: DelegateFixture) -> None:
    offer = await here.ask()
    kept = here.reserved_bytes
    here.world.clock.advance(3.0)
    assert await here.ask() == replace(offer, hold_s=Seconds(7.0))
    assert here.reserved_bytes == kept
    with raises_code(Code.REPLAYED):
        await here.ask(replicas=2)
    await here.later(8.0)
    gone = await here.ask()
    assert isinstance(gone, Decline)
    assert gone.refusal.code is Code.HOLD_EXPIRED
    assert here.reserved_bytes == 0


async def test_a_hold_is_free_the_moment_it_ends(here: DelegateFixture) -> None:
    offer = await here.ask()
    await here.later(9.99)
    assert here.reserved_bytes > 0
    await here.later(0.01)
    assert here.reserved_bytes == 0
    assert isinstance(here.state(offer.id), ClosedBid)
    assert await here.ledger_entries() == [("offered", offer.id), ("expired", offer.id)]
    with raises_code(Code.HOLD_EXPIRED):
        await here.bids.on_award(signed_message(award(bid=offer.id)))
    assert here.world.region.workloads.intents == ()


async def test_an_award_makes_a_guest_that_runs_once_its_model_is_here(here: DelegateFixture) -> None:
    grant = await here.grant()
    assert (grant.agreement, grant.region, grant.lease_s) == ("g-1", "eu", 30.0)
    assert here.reserved_bytes > 0, "its room is kept while its model is fetched"
    await here.world.step()
    assert not here.world.region.workloads.desired["edge-1"].assignments
    waits = [(wait.workload, wait.code) for wait in here.world.region.workloads.waits]
    assert waits == [(GUEST, Code.WAITING_FOR_FETCH)]
    assert check(here.world.region.workloads.snapshot()) == ()
    await here.wait_fetched()
    assert here.elsewhere.fetched == [(ORIGIN, "g-1", DIGEST)]
    await here.world.step()
    (assignment,) = here.world.region.workloads.desired["edge-1"].assignments
    assert assignment.workload == GUEST
    assert here.reserved_bytes == 0, "from now on its replica is its room"
    assert check(here.world.region.workloads.snapshot()) == ()
    assert [what for what, _ in await here.ledger_entries()] == ["offered", "granted"]


async def test_a_guest_that_is_granted_while_documents_are_written_is_run_all_the_same(here: DelegateFixture) -> None:
    workloads = here.world.region.workloads
    decided_before = workloads.catalog
    await here.grant()
    workloads.adopt(decided_before)
    assert GUEST in [intent.key for intent in workloads.intents]


async def test_two_agreements_fetch_a_model_once(here: DelegateFixture) -> None:
    await here.grant("g-1", "s-1")
    await here.grant("g-2", "s-2")
    await here.wait_fetched()
    await here.bids.tick()
    assert len(here.elsewhere.fetched) == 1
    await here.world.step()
    assert len(here.world.region.workloads.desired["edge-1"].assignments) == 2


async def test_a27_a_lent_model_is_nobodys_here(here: DelegateFixture) -> None:
    """No tenant of this region can name it, and it stays while a guest runs it."""
    await here.grant()
    await here.wait_fetched()
    catalog = here.world.region.workloads.catalog
    assert catalog.digest_of(DIGEST) is None
    reader = [(DOCUMENTS[0][0], DOCUMENTS[0][1].replace("source: ocr", f"source: {DIGEST!r}"))]
    planned = await here.world.region.documents.plan(reader, {}, "test")
    assert [problem.refusal.code for problem in planned.problems] == [Code.MODEL_UNKNOWN]
    with raises_code(Code.IN_USE):
        await here.world.region.models.remove(DIGEST, "test")
    await here.world.push()
    assert here.world.region.workloads.catalog.digest_of("ocr") == DIGEST, "pushed here, it is this region's too"


async def test_a_lent_model_goes_an_hour_after_its_last_guest(here: DelegateFixture) -> None:
    grant = await here.grant()
    await here.wait_fetched()
    await here.bids.on_release(signed_message(Release("s-1", grant.bid, ORIGIN)))
    await here.later(0.25)
    assert (await here.ask("s-2")).cached
    await here.later(3590.0)
    assert DIGEST in here.world.models.kept
    await here.later(20.0)
    await until(lambda: DIGEST not in here.world.models.kept, 5.0, "the bytes to be gone")
    assert here.world.region.workloads.catalog.models == {}


async def test_what_a_counterpart_signed_is_kept_as_evidence(here: DelegateFixture) -> None:
    """Of what binds it; a solicitation does not."""
    grant = await here.grant()
    await here.bids.on_notice(VerifiedMessage(ORIGIN, notice(5.0), b"the notice"))
    await here.bids.on_release(VerifiedMessage(ORIGIN, Release("s-1", grant.bid, ORIGIN), b"the release"))
    entries = await here.ledger.entries_after(0)
    assert [(each.what, b64decode(each.evidence)) for each in entries] == [
        ("offered", b""),
        ("granted", b"said"),
        ("noticed", b"the notice"),
        ("released", b"the release"),
    ]
    assert {(each.counterpart, each.workload) for each in entries} == {(ORIGIN, "shop/ocr")}
    for long in (
        signed_message(award(bid=grant.bid)),
        signed_message(renewal(9)),
        signed_message(notice(1.0)),
        signed_message(solicitation()),
    ):
        with raises_code(Code.TOO_LARGE):
            await _say(here, replace(long, evidence=b"x" * 300_000))


async def _say(here: DelegateFixture, what: VerifiedMessage[Any]) -> None:
    calls = {Award: here.bids.on_award, Renewal: here.bids.on_renewal, Notice: here.bids.on_notice}
    await cast(Any, calls.get(type(what.content), here.bids.on_solicitation))(what)


async def test_a_guest_is_listed_as_one(here: DelegateFixture) -> None:
    await here.grant()
    await here.world.step()
    region = here.world.region
    (view,) = workload_views(region.workloads, region.fleet.fleet)
    assert (view.workload.tenant, view.workload.name) == (GUEST_TENANT, "g-1")
    assert (view.policy, view.document, view.reason.code) == ("guest of us-east", "", Code.WAITING_FOR_FETCH)
    plan = (await region.placement.explain(GUEST)).of(GUEST)
    assert plan is not None
    assert plan.wanted == 1


async def test_a_coordinator_that_follows_lists_guests_too(here: DelegateFixture) -> None:
    await here.grant()
    await here.wait_fetched()
    await here.world.step()
    world = here.world
    follower = RegionalCoordinator(
        world.store, world.links, world.models, world.models, world.clock, world.ids, RegionConfig("eu")
    )
    await follower.follow()
    (view,) = workload_views(follower.workloads, follower.fleet.fleet)
    assert (view.workload.tenant, view.workload.name, view.policy) == (GUEST_TENANT, "g-1", "guest of us-east")
    await follower.start(elected=True)
    assert follower.workloads.catalog.guests == (), "until it is told that it trades"


async def test_nothing_of_a_guest_is_a_document_and_no_document_is_a_guest(here: DelegateFixture) -> None:
    await here.grant()
    workloads, documents = here.world.region.workloads, here.world.region.documents
    assert [intent.key for intent in workloads.intents] == [GUEST]
    assert [key.kind for key in workloads.catalog.documents] == ["Region"]
    with raises_code(Code.WORKLOAD_UNKNOWN):
        await documents.delete(DocumentKey("Workload", str(GUEST)), "test")
    named = [("t.yaml", "apiVersion: shoal/v1\nkind: Tenant\nmetadata: {name: guests}\nspec: {quota: {replicas: 1}}\n")]
    assert [each.refusal.code for each in (await documents.plan(named, {}, "test")).problems] == [Code.NAME_INVALID]
    guests = [(DOCUMENTS[0][0], DOCUMENTS[0][1].replace("name: reader", "name: reader, tenant: guests"))]
    assert Code.NAME_INVALID in [each.refusal.code for each in (await documents.plan(guests, {}, "test")).problems]


async def test_a22_the_same_award_gets_the_same_answer_and_another_is_replayed(here: DelegateFixture) -> None:
    offer = await here.ask()
    first = await here.bids.on_award(signed_message(award(bid=offer.id)))
    here.world.clock.advance(4.0)
    again = await here.bids.on_award(signed_message(award(bid=offer.id)))
    assert again == replace(first, lease_s=Seconds(26.0))
    with raises_code(Code.REPLAYED):
        await here.bids.on_award(signed_message(award("g-2", offer.id)))
    other = await here.ask("s-2")
    with raises_code(Code.REPLAYED):
        await here.bids.on_award(signed_message(award("g-1", other.id, solicitation="s-2")))
    assert [what for what, _ in await here.ledger_entries()].count("granted") == 1
    assert len(here.world.region.workloads.catalog.guests) == 1


async def test_a21_who_did_not_ask_gets_nothing(here: DelegateFixture) -> None:
    grant = await here.grant()
    held = await here.ask("s-2")
    for by in ("us-west", "eu"):
        with raises_code(Code.BID_UNKNOWN):
            await here.bids.on_award(signed_message(award("g-9", held.id, solicitation="s-2", origin=by), by))
        with raises_code(Code.AGREEMENT_UNKNOWN):
            await here.bids.on_renewal(signed_message(renewal(1), by))
        await here.bids.on_release(signed_message(Release("s-2", held.id, by), by))
        await here.bids.on_notice(signed_message(notice(0.0, by=by), by))
        with raises_code(Code.REGION_MISMATCH):
            await here.bids.on_award(signed_message(award(bid=held.id, solicitation="s-2"), by))
        with raises_code(Code.REGION_MISMATCH):
            await here.bids.on_release(signed_message(Release("s-2", held.id, ORIGIN), by))
        with raises_code(Code.REGION_MISMATCH):
            await here.bids.on_notice(signed_message(notice(0.0), by))
        with raises_code(Code.REGION_MISMATCH):
            await here.bids.on_solicitation(signed_message(solicitation("s-3"), by))
    assert isinstance(here.state(held.id), HeldBid)
    assert isinstance(here.state(grant.bid), GrantedBid)
    assert [each.by for each in here.elsewhere.noticed_here] == ["us-west", "eu"], "they may be about what runs there"


async def test_a_release_frees_and_is_acknowledged_as_often_as_it_comes(here: DelegateFixture) -> None:
    offer = await here.ask()
    for _ in range(3):
        await here.bids.on_release(signed_message(Release("s-1", offer.id, ORIGIN)))
    await here.bids.on_release(signed_message(Release("s-1", "bid-unknown", ORIGIN)))
    assert here.reserved_bytes == 0
    with raises_code(Code.HOLD_RELEASED):
        await here.bids.on_award(signed_message(award(bid=offer.id)))
    assert await here.ledger_entries() == [("offered", offer.id), ("released", offer.id)]


async def test_renewals_keep_a_guest_and_are_rarely_written(here: DelegateFixture) -> None:
    await here.grant()
    before = len(await here.ledger_entries())
    for sequence in range(1, 30):
        here.world.clock.advance(1.5)
        await here.bids.tick()
        answered = await here.bids.on_renewal(signed_message(renewal(sequence, ledger_head=f"{sequence:064}")))
        assert (answered.nonce, answered.lease_s, answered.ledger_head) == (f"n-{sequence}", 30.0, here.ledger.head)
    assert len(await here.ledger_entries()) == before
    assert here.ledger.heads == {ORIGIN: f"{29:064}"}
    with raises_code(Code.REPLAYED):
        await here.bids.on_renewal(signed_message(renewal(3)))
    here.world.clock.advance(25.0)
    await here.bids.on_renewal(signed_message(renewal(30)))
    assert (await here.ledger_entries())[before:] == [("renewed", "g-1")], "after a minute it is told"
    await here.later(34.9)
    assert [guest.region for guest in here.world.region.workloads.catalog.guests] == [ORIGIN]
    await here.later(0.1)
    assert here.world.region.workloads.catalog.guests == ()
    assert (await here.ledger_entries())[-1] == ("breached", "g-1")
    with raises_code(Code.AGREEMENT_ENDED):
        await here.bids.on_renewal(signed_message(renewal(31)))


async def test_a22_a_renewal_that_comes_again_changes_nothing(here: DelegateFixture) -> None:
    await here.grant()
    first = await here.bids.on_renewal(signed_message(renewal(1)))
    here.world.clock.advance(4.0)
    again = await here.bids.on_renewal(signed_message(renewal(1)))
    assert again == replace(first, lease_s=Seconds(26.0), report=again.report)
    for other in (renewal(1, "other"), renewal(0)):
        with raises_code(Code.REPLAYED):
            await here.bids.on_renewal(signed_message(other))
    await here.later(30.9)
    assert here.world.region.workloads.catalog.guests
    await here.later(0.1)
    assert here.world.region.workloads.catalog.guests == (), "its lease was that of the first"


async def test_gateways_of_the_origin_follow_its_renewals(here: DelegateFixture) -> None:
    grant = await here.grant()
    (trust,) = here.bids.peers
    assert (trust.region, trust.roots, trust.gateways, trust.agreements) == (ORIGIN, ("root",), ("gw",), ("g-1",))
    (gateway,) = award().gateways
    await here.bids.on_renewal(signed_message(renewal(1, gateways=(gateway, replace(gateway, name="gw-2")))))
    assert here.bids.peers[0].gateways == ("gw", "gw-2")
    await here.bids.on_release(signed_message(Release("s-1", grant.bid, ORIGIN)))
    assert here.bids.peers == ()


async def test_how_far_it_is_is_told_as_it_is(here: DelegateFixture) -> None:
    await here.grant()
    world = here.world

    async def service_after_renewal(sequence: int) -> ServiceState:
        return (await here.bids.on_renewal(signed_message(renewal(sequence)))).service

    assert await service_after_renewal(1) is ServiceState.STARTING
    await here.wait_fetched()
    await world.step()
    agent = FakeAgent(world, "edge-1")
    agent.epoch, agent.sequence = 1, 1
    await agent.apply_desired()
    await world.step()
    assert await service_after_renewal(2) is ServiceState.READY
    agent.observed = ()
    await agent.report()
    await world.step()
    assert await service_after_renewal(3) is ServiceState.SHORT
    await here.bids.on_notice(signed_message(notice(20.0)))
    assert await service_after_renewal(4) is ServiceState.STOPPING


async def test_a_notice_lets_it_serve_on_until_it_is_not_needed(here: DelegateFixture) -> None:
    grant = await here.grant()
    await here.bids.on_notice(signed_message(notice(20.0)))
    await here.bids.on_notice(signed_message(notice(20.0)))
    assert isinstance(here.state(grant.bid), StoppingBid)
    assert here.world.region.workloads.catalog.guests
    for _ in range(2):
        await here.bids.on_notice(signed_message(notice(0.0)))
    assert here.world.region.workloads.catalog.guests == ()
    assert (await here.ledger_entries())[-2:] == [("noticed", "g-1"), ("ended", "g-1")]
    assert here.elsewhere.noticed_here == []
    await here.bids.on_notice(signed_message(notice(0.0, agreement="of-another")))
    assert [each.agreement for each in here.elsewhere.noticed_here] == ["of-another"]


async def test_whoever_may_not_trade_any_more_is_given_notice(here: DelegateFixture) -> None:
    grant = await here.grant()
    here.elsewhere.failures = 3
    text = TRADE[0][1].replace("us-*", "asia")
    assert not (await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")).plan_result.problems
    await here.bids.tick()
    state = here.state(grant.bid)
    assert isinstance(state, StoppingBid)
    assert (state.code, state.by) == (Code.TRADE_DENIED, "eu")
    await until(lambda: bool(here.elsewhere.notices), 5.0, "the notice to be heard")
    (told,) = here.elsewhere.notices
    assert (told.agreement, told.by, told.code) == ("g-1", "eu", Code.TRADE_DENIED)
    await here.later(31.0)
    assert isinstance(here.state(grant.bid), ClosedBid)
    held = await here.ask("s-2")
    assert isinstance(held, Decline)
    assert held.refusal.code is Code.TRADE_DENIED


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_notice_of_the_origin_far_ahead_keeps_no_guest_that_may_not_stay(
    here: DelegateFixture, leaves: bool
) -> None:
    grant = await here.grant()
    await here.bids.on_notice(signed_message(notice(1e9)))
    await here.bids.tick()
    assert here.elsewhere.notices == []
    if leaves:
        here.bids.drain(Elapsed(here.world.clock.now() + 120.0))
    else:
        text = TRADE[0][1].replace("us-*", "asia")
        assert not (await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")).plan_result.problems
    await here.bids.tick()
    await until(lambda: bool(here.elsewhere.notices), 5.0, "the notice to be heard")
    (told,) = here.elsewhere.notices
    assert (told.agreement, told.by) == ("g-1", "eu")
    assert told.ends_s == pytest.approx(30.0)
    for number in range(1, 4):
        await here.bids.on_renewal(signed_message(renewal(number)))
        await here.later(9.0)
    assert isinstance(here.state(grant.bid), StoppingBid)
    entries = await here.ledger_entries()
    await here.bids.tick()
    assert await here.ledger_entries() == entries, "it gives no notice again"
    await here.later(4.0)
    assert isinstance(here.state(grant.bid), ClosedBid)
    assert here.reserved_bytes == 0


async def test_an_award_of_what_the_documents_do_not_allow_any_more_is_refused(here: DelegateFixture) -> None:
    offer = await here.ask()
    text = TRADE[0][1].replace("us-*", "asia")
    await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")
    with raises_code(Code.TRADE_DENIED):
        await here.bids.on_award(signed_message(award(bid=offer.id)))


async def test_bytes_that_are_no_model_end_the_agreement(
    here: DelegateFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.elsewhere.failures = 1  # so that it is not there before it is found to be bad
    grant = await here.grant()

    async def bad(*_: object) -> None:
        raise refuse(Code.MODEL_INVALID, "no graph")

    monkeypatch.setattr(here.world.models, "inspect", bad)
    await here.bids.tick()
    await until(lambda: isinstance(here.state(grant.bid), StoppingBid | ClosedBid), 5.0, "notice")
    assert DIGEST not in here.world.models.kept, "what is refused leaves no bytes"
    await here.later(0.25)
    assert (await here.ledger_entries())[-1] == ("ended", "g-1")
    assert here.world.region.workloads.catalog.guests == ()


async def test_a_model_that_is_not_to_be_had_is_tried_again(here: DelegateFixture) -> None:
    here.elsewhere.failures = 3
    await here.grant()
    await here.wait_fetched()
    assert len(here.elsewhere.fetched) == 4


@pytest.mark.parametrize("moment", ["offered", "granted", "released", "ended"])
async def test_what_the_store_does_not_take_has_not_happened(
    here: DelegateFixture, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    async def full(_: Transaction) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    offer = await here.ask() if moment != "offered" else None
    if offer is not None and moment == "ended":
        await here.bids.on_award(signed_message(award(bid=offer.id)))
    before = (dict(here.bids.states), await here.ledger_entries())
    with monkeypatch.context() as patched:
        patched.setattr(here.world.store, "commit", full)
        with raises_code(Code.STORE_FULL):
            await _do(here, moment, offer)
        assert (dict(here.bids.states), await here.ledger_entries()) == before
    await _do(here, moment, offer)
    assert (await here.ledger_entries())[-1][0] == moment
    assert check(here.world.region.workloads.snapshot()) == ()


@pytest.mark.parametrize("moment", ["offered", "granted", "released", "ended"])
async def test_a_write_that_was_not_answered_is_found_and_not_done_twice(
    here: DelegateFixture, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The store took it, and the coordinator was not told."""
    commit = here.world.store.commit

    async def commit_without_answer(transaction: Transaction) -> int:
        await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    offer = await here.ask() if moment != "offered" else None
    if offer is not None and moment == "ended":
        await here.bids.on_award(signed_message(award(bid=offer.id)))
    with monkeypatch.context() as patched:
        patched.setattr(here.world.store, "commit", commit_without_answer)
        with raises_code(Code.STORE_UNAVAILABLE):
            await _do(here, moment, offer)
    if moment == "granted":
        here.world.clock.advance(11.0)
        assert here.reserved_bytes > 0, "what may have been granted keeps its room"
    await _do(here, moment, offer)
    assert [what for what, _ in await here.ledger_entries()].count(moment) == 1
    assert check(here.world.region.workloads.snapshot()) == ()


async def _do(here: DelegateFixture, moment: str, offer: Offer | None) -> None:
    if moment == "offered":
        await here.ask()
        return
    assert offer is not None
    if moment == "granted":
        await here.bids.on_award(signed_message(award(bid=offer.id)))
    elif moment == "released":
        await here.bids.on_release(signed_message(Release("s-1", offer.id, ORIGIN)))
    else:
        await here.bids.on_notice(signed_message(notice(0.0)))


async def _restart(here: DelegateFixture, folder: Path) -> DelegateFixture:
    """kill -9, and another boot, whose clock begins anew."""
    here.bids.stop()
    await here.world.store.close()
    here.world.clock.elapsed = 5.0
    world = await RegionFixture.open(folder, here.world)
    here.world.store = world.store
    return await DelegateFixture.open(world)


async def test_a_restart_ends_what_was_only_held(here: DelegateFixture, tmp_path: Path) -> None:
    offer = await here.ask()
    again = await _restart(here, tmp_path / "first")
    assert again.reserved_bytes == 0
    with raises_code(Code.HOLD_EXPIRED):
        await again.bids.on_award(signed_message(award(bid=offer.id)))
    assert await again.ledger_entries() == [("offered", offer.id), ("expired", offer.id)]


async def _serve_guest(here: DelegateFixture) -> FakeAgent:
    """Grants an award, and has a node serve it."""
    await here.grant()
    await here.wait_fetched()
    await here.world.step()
    agent = FakeAgent(here.world, "edge-1")
    agent.epoch, agent.sequence = 1, 1
    await agent.apply_desired()
    await here.world.step()
    return agent


async def test_what_was_ready_is_ready_after_a_restart_before_any_node_reports(
    here: DelegateFixture, tmp_path: Path
) -> None:
    agent = await _serve_guest(here)

    async def service_after_renewal(side: DelegateFixture, sequence: int) -> ServiceState:
        return (await side.bids.on_renewal(signed_message(renewal(sequence)))).service

    assert await service_after_renewal(here, 1) is ServiceState.READY
    again = await _restart(here, tmp_path / "first")
    assert await service_after_renewal(again, 2) is ServiceState.READY, "before its first step"
    await again.world.step()
    assert await service_after_renewal(again, 3) is ServiceState.READY
    agent.world = again.world
    assert isinstance(await agent.connect(), Welcome)
    await again.world.step()
    assert await service_after_renewal(again, 4) is ServiceState.READY
    agent.observed = ()
    await agent.report()
    await again.world.step()
    assert await service_after_renewal(again, 5) is ServiceState.SHORT, "its node says that it does not serve"
    again.bids.stop()


async def test_what_was_ready_is_not_once_its_nodes_stay_silent_after_a_restart(
    here: DelegateFixture, tmp_path: Path
) -> None:
    await _serve_guest(here)
    assert (await here.bids.on_renewal(signed_message(renewal(1)))).service is ServiceState.READY
    again = await _restart(here, tmp_path / "first")
    await again.world.step()
    timing = again.world.region.fleet.fleet.timing
    for _ in range(int(timing.lost_after_s / timing.heartbeat_s) + 1):
        await again.later(timing.heartbeat_s)
        await again.world.step()
    told = await again.bids.on_renewal(signed_message(renewal(2)))
    assert (told.service, told.gateways) == (ServiceState.SHORT, ())
    again.bids.stop()


async def test_an_agreement_says_after_a_restart_when_it_was_granted(here: DelegateFixture, tmp_path: Path) -> None:
    def times_of(side: DelegateFixture) -> list[float]:
        return [view.agreed_at for view in agreements({}, side.bids.states.values(), Elapsed(0.0))]

    await here.ask()
    here.world.clock.advance(3.0)
    at = here.world.clock.wall()
    await here.grant()
    here.world.clock.advance(5.0)
    await here.bids.on_renewal(signed_message(renewal(1)))
    assert times_of(here) == [at]
    again = await _restart(here, tmp_path / "first")
    assert times_of(again) == [at]
    await again.bids.withdraw("g-1", Code.TRADE_DENIED)
    assert times_of(again) == [at], "under notice"


async def test_a_restart_between_commit_and_answer_grants_once(
    here: DelegateFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = await here.ask()
    commit = here.world.store.commit

    async def commit_then_die(transaction: Transaction) -> int:
        await commit(transaction)
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(here.world.store, "commit", commit_then_die)
        with pytest.raises(asyncio.CancelledError):
            await here.bids.on_award(signed_message(award(bid=offer.id)))
    again = await _restart(here, tmp_path / "first")
    grant = await again.bids.on_award(signed_message(award(bid=offer.id)))
    assert (grant.agreement, grant.lease_s) == ("g-1", 30.0)
    assert [what for what, _ in await again.ledger_entries()] == ["offered", "granted"]
    assert [guest.intent.key for guest in again.world.region.workloads.catalog.guests] == [GUEST]
    await again.later(34.9)
    assert again.world.region.workloads.catalog.guests, "its lease counts anew"
    await again.later(0.2)
    assert again.world.region.workloads.catalog.guests == ()


async def test_a28_a_flood_of_solicitations_is_turned_away(here: DelegateFixture) -> None:
    with raises_code(Code.OVERLOADED):
        for count in range(1000):
            await here.ask(f"s-{count}", latency_p95_s=Seconds(1e-9))
    assert isinstance(
        await here.bids.on_solicitation(signed_message(solicitation(origin="us-west"), "us-west")), Offer | Decline
    )


async def test_a28_a51_one_counterpart_never_has_more_than_its_share(here: DelegateFixture) -> None:
    text = TRADE[0][1].replace("90%", "2%")
    await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")
    answers = list[Any]()
    for count in range(40):
        answers.append(await here.ask(f"s-{count}"))
        if isinstance(answers[-1], Offer) and count % 2:
            await here.bids.on_award(signed_message(award(f"g-{count}", answers[-1].id, solicitation=f"s-{count}")))
    declines = [each for each in answers if isinstance(each, Decline)]
    assert {each.refusal.code for each in declines} == {Code.HOLD_SHARE}
    assert 0 < here.reserved_bytes <= 0.02 * 2**34
    assert here.world.region.workloads.catalog.quotas == {}, "guests are no tenant's"
    await here.later(11.0)
    assert isinstance(await here.ask("s-after"), Offer), "what was not awarded is free again"


async def leave_unclaimed(here: DelegateFixture, count: int) -> list[Any]:
    answers = [await here.ask(f"idle-{number}") for number in range(count)]
    await here.later(10.1)
    return answers


async def test_a28_who_never_awards_may_hold_less(here: DelegateFixture, tmp_path: Path) -> None:
    text = TRADE[0][1].replace("90%", "2%")
    await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")
    assert here.bids.standing(ORIGIN) == 1.0
    first = sum(isinstance(each, Offer) for each in await leave_unclaimed(here, 20))
    fallen = here.bids.standing(ORIGIN)
    assert fallen < 0.7
    assert here.bids.standing("us-west") == 1.0, "each for itself"
    again = [await here.ask(f"more-{number}") for number in range(20)]
    assert sum(isinstance(each, Offer) for each in again) < first
    declined = next(each.refusal for each in again if isinstance(each, Decline))
    assert declined.code is Code.HOLD_SHARE
    assert "came to nothing" in declined.asked
    restarted = await _restart(here, tmp_path / "first")
    assert restarted.bids.standing(ORIGIN) == pytest.approx(fallen, abs=0.05), "it is written down"
    await restarted.later(10.1)
    assert restarted.bids.standing(ORIGIN) >= fallen, "what a restart cut short is not held against it"
    await restarted.later(1200.0)
    assert restarted.bids.standing(ORIGIN) > 0.99


async def test_a28_who_awards_or_lets_go_at_once_stands_well(here: DelegateFixture) -> None:
    for number in range(5):
        offer = await here.ask(f"s-{number}")
        here.world.clock.advance(0.1)
        if number % 2:
            await here.bids.on_award(signed_message(award(f"g-{number}", offer.id, solicitation=f"s-{number}")))
        else:
            await here.bids.on_release(signed_message(Release(f"s-{number}", offer.id, ORIGIN)))
    assert here.bids.standing(ORIGIN) > 0.99


async def test_a28_what_others_tell_of_a_stranger_counts_until_it_was_seen_here(here: DelegateFixture) -> None:
    here.listed["us-west"] = replace(LISTED, region="us-west", standing=0.01)
    asked = solicitation(origin="us-west", models=(await here.profile(),))
    text = TRADE[0][1].replace("90%", "2%")
    await here.world.region.documents.apply([("r.yaml", text)], {}, "", "test")
    told = await here.bids.on_solicitation(signed_message(asked, "us-west"))
    assert isinstance(told, Decline)
    assert told.refusal.code is Code.HOLD_SHARE
    del here.listed["us-west"]
    assert isinstance(await here.bids.on_solicitation(signed_message(replace(asked, id="s-2"), "us-west")), Offer)

"""The origin's controller against the delegate's own machine, over a real store and a wire that fails when told."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from harness.builders.offers import requirements, term_values
from harness.fakes.clock import ManualClock
from harness.fakes.peers import NOTHING, FakePeers, FakeRegion
from harness.fakes.region import DIGEST, CountingIds, KnownModels
from shoal.coordinator.api.views import agreements
from shoal.coordinator.controllers.federation.access import FederationAccess
from shoal.coordinator.controllers.federation.ledger import LEDGER, Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.federation.local_region import LocalPlacement
from shoal.coordinator.controllers.federation.origin import TRADES, OriginController
from shoal.coordinator.controllers.federation.reputation import ENTRY_CHARS_MOST
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.core.negotiation import hold, trade_times
from shoal.coordinator.core.negotiation.model import Active, IdleTrade, Withdrawing
from shoal.coordinator.core.negotiation.offer_selection import request_hash
from shoal.coordinator.core.placement.rank import TermValues
from shoal.coordinator.core.workloads.cross_region_state import CrossRegionState, DrainingHere, ReturnCooldown
from shoal.coordinator.ports import Transaction, VerifiedMessage
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.agreement import (
    GatewayRef,
    Notice,
    ReportContent,
    ServiceReport,
    ServiceState,
)
from shoal.types.chain import first_break
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.offer import Answer, Decline, Directory, Member, Offer, Solicitation
from shoal.types.profile import ModelProfile
from shoal.types.units import Elapsed, Seconds, UsdPerHour, Wall
from shoal.types.workload import (
    DelegationMode,
    DelegationRule,
    Intent,
    Limits,
    ModelRef,
    PartitionRule,
    Relaxation,
    WorkloadKey,
)

KEY = WorkloadKey("default", "detect")


def intent(
    mode: DelegationMode = DelegationMode.WHEN_INFEASIBLE, *, p95_s: float | None = None, relax: tuple[float, ...] = ()
) -> Intent:
    return Intent(
        key=KEY,
        revision=1,
        labels={},
        policy="fast",
        models=(ModelRef("detect", DIGEST, ""),),
        require=requirements(p95_s),
        limits=Limits(),
        weights={"latency": 0.5, "cost": 0.5},
        relax=tuple(Relaxation(f"latency: {{p95: {step}s}}", requirements(step), Limits()) for step in relax),
        traffic=(),
        partition=PartitionRule(),
        priority=0,
        shared_worker=False,
        delegation=DelegationRule(mode, margin=0.1),
    )


@dataclass
class FakeLocalRegion:
    """trades.Home as a test says."""

    wanted: tuple[Intent, ...]
    profile: ModelProfile
    placed: bool = False
    serves: bool = False
    own: TermValues | None = None
    reports: Mapping[str, ServiceReport] = field(default_factory=dict)
    cross_region: CrossRegionState | None = None
    stays: bool = False
    wrong: frozenset[tuple[str, str]] = frozenset()
    # What is left of the tenant's budget; None: it has none.
    budget: UsdPerHour | None = None
    step_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def intents(self) -> tuple[Intent, ...]:
        return self.wanted

    def profiles(self) -> Mapping[str, ModelProfile]:
        return {DIGEST: self.profile}

    def placement(self, key: WorkloadKey) -> LocalPlacement:
        return LocalPlacement(self.placed, self.serves)

    def cross_region_state(self, key: WorkloadKey) -> CrossRegionState | None:
        return self.cross_region

    def may_leave(self, intent: Intent) -> bool:
        return not self.stays

    def exclusions(self, key: WorkloadKey) -> frozenset[tuple[str, str]]:
        return self.wrong

    @property
    def moves_live(self) -> bool:
        return False

    def figures(self, key: WorkloadKey) -> TermValues | None:
        return self.own

    def has_budget(self, key: WorkloadKey) -> bool:
        return self.budget is not None

    def budget_left(self, key: WorkloadKey) -> UsdPerHour | None:
        return self.budget

    def gateway_revocations(self) -> tuple[str, ...]:
        return ()

    def gateways(self) -> tuple[GatewayRef, ...]:
        return (GatewayRef("gw-1", "home:1"),)

    def service_report(self, agreement: str) -> ServiceReport:
        return self.reports.get(agreement, NOTHING)


class Uptime:
    """A machine's clock: elapsed time since it booted, five seconds before the process began."""

    def __init__(self, time: ManualClock, booted_at: float) -> None:
        self._time = time
        self._booted_at = booted_at

    def now(self) -> Elapsed:
        return Elapsed(self._time.now() - self._booted_at)

    def wall(self) -> Wall:
        return self._time.wall()

    async def sleep(self, seconds: Seconds) -> None:
        await self._time.sleep(seconds)


@dataclass
class Origin:
    """One region's trades, its machine and its neighbours."""

    store: SqliteStore
    time: ManualClock
    ids: CountingIds
    local_region: FakeLocalRegion
    wire: FakePeers
    ledger: Ledger
    events: EventLog
    fence: RegionFence
    trades: OriginController

    @classmethod
    async def open(cls, folder: Path, before: "Origin | None" = None, *, want: Intent | None = None) -> "Origin":
        store = await SqliteStore.open(folder, reserve_bytes=0)
        time = before.time if before else ManualClock()
        ids = before.ids if before else CountingIds()
        clock = RegionClock(Uptime(time, time.now() - 5.0))
        events = EventLog(store, clock, kept=1000, audit_kept=1000)
        await events.start()
        truth = RegionFence("home", store, events, clock, ids, NoMeter())
        await truth.start()
        ledger = Ledger(store, truth, clock)
        await ledger.start()
        if before is not None:
            home, wire = before.local_region, before.wire
        else:
            profile = await KnownModels().inspect("", DIGEST)
            home = FakeLocalRegion((want or intent(),), profile)
            wire = FakePeers({name: FakeRegion(name, time) for name in "ab"})
            wire.regions["b"].p95_s = 0.05
        members = tuple(Member(name, f"{name}:7447", (f"root-{name}",), "eu") for name in "ab")
        trades = OriginController(
            ControllerContext("home", store, events, clock, ids, NoMeter()), ledger, home,
            FederationAccess(
                wire, wire, lambda: Directory("fed", 1, members), lambda: dict.fromkeys("ab", Seconds(0.002))
            ),
            on_change=lambda: None,
        )  # fmt: skip
        await trades.start()
        return cls(store, time, ids, home, wire, ledger, events, truth, trades)

    async def run(self, seconds: float = 1.0, step: float = 0.25) -> None:
        """So long, by ticks; what is under way is heard before the next."""
        for _ in range(max(1, round(seconds / step))):
            await self.trades.tick()
            while self.trades.calls:
                await asyncio.wait(self.trades.calls)
            self.time.advance(step)
        await self.trades.tick()

    async def reboot(self, folder: Path, *, away_s: float) -> "Origin":
        """Its machine rebooted: elapsed time starts anew."""
        self.trades.stop()
        await self.store.close()
        self.time.advance(away_s)
        return await Origin.open(folder, self)

    async def log(self) -> list[str]:
        return [event.code for event in await self.events.events_after(0, 1000)]

    @property
    def phase(self) -> type:
        return type(self.trades.trades[KEY].phase)


@pytest.fixture
async def origin(tmp_path: Path) -> AsyncIterator[Origin]:
    opened = await Origin.open(tmp_path)
    yield opened
    opened.trades.stop()
    await opened.store.close()


async def test_a_workload_without_a_place_is_run_by_the_best_bidder(origin: Origin) -> None:
    await origin.run(0.5)
    each = origin.trades.delegations[KEY]
    assert (each.region, each.is_ready, each.is_wanted) == ("a", True, True)
    assert [ref.name for ref in each.gateways] == ["gw-a"]
    assert origin.wire.regions["a"].running_agreements == [each.agreement]
    assert origin.wire.regions["b"].active_holds == [], "the other hold was released"
    assert [(peer.region, peer.roots, peer.gateways) for peer in origin.trades.peers] == [("a", ("root-a",), ("gw-a",))]
    log = await origin.log()
    assert [code for code in log if code != "HISTORY_OPENED"] == [
        "SOLICITED",
        "BID",
        "BID",
        "AWARDED",
        "GRANTED",
        "RENEWED",
    ]
    entries = await origin.ledger.entries_after(0)
    assert [entry.what for entry in entries] == ["awarded", "granted", "renewed"]
    assert first_break(entries, origin.ledger.head) is None
    assert origin.ledger.heads == {"a": "head"}


async def test_it_is_run_before_its_delegate_says_that_it_is_ready_but_not_routed_to(origin: Origin) -> None:
    origin.wire.regions["a"].service = ServiceState.STARTING
    await origin.run(0.5)
    assert not origin.trades.delegations[KEY].is_ready
    origin.wire.regions["a"].service = ServiceState.READY
    await origin.run(1.0)
    assert origin.trades.delegations[KEY].is_ready


async def test_what_is_never_to_be_delegated_is_not_solicited(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.NEVER))
    await origin.run(1.0)
    assert origin.wire.sent_methods == []
    assert origin.trades.delegations == {}
    await origin.store.close()


async def test_nobody_meets_30ms_and_the_best_within_relax_gets_it_in_the_second_round(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(p95_s=0.03, relax=(0.04, 0.06)))
    origin.wire.regions["a"].p95_s, origin.wire.regions["b"].p95_s = 0.05, 0.2
    await origin.run(0.5)
    assert origin.trades.delegations[KEY].region == "a"
    told = [f"{event.code} {event.message}" for event in await origin.events.events_after(0, 1000)]
    rounds = [line for line in told if line.startswith("SOLICITED")]
    assert len(rounds) == 2
    assert "round 2, relaxed: latency: {p95: 0.06s}" in rounds[1]
    assert sum(line.startswith("COUNTERED") for line in told) == 3
    await origin.store.close()


async def test_without_the_federation_known_regions_are_asked_directly(origin: Origin) -> None:
    origin.wire.federation_down = True
    await origin.run(0.5)
    assert origin.trades.delegations[KEY].region == "a"


@pytest.mark.parametrize(("cost", "moved"), [(0.5, True), (0.95, False)])
async def test_what_has_a_place_moves_only_past_the_margin(tmp_path: Path, cost: float, moved: bool) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.WHEN_BETTER))
    origin.local_region.placed, origin.local_region.own = True, term_values(latency=0.022, cost=1.0)
    origin.wire.regions["a"].cost = cost
    await origin.run(2.0)
    assert (KEY in origin.trades.delegations) == moved
    assert (await origin.log()).count("SOLICITED") == 1, "once in its cooldown"
    await origin.store.close()


@pytest.mark.parametrize("asked", ["", "the same", "something else"])
async def test_what_was_brought_home_goes_for_no_better_place(tmp_path: Path, asked: str) -> None:
    want = intent(DelegationMode.WHEN_BETTER)
    origin = await Origin.open(tmp_path, want=want)
    origin.local_region.placed, origin.local_region.own = True, term_values(latency=0.022, cost=1.0)
    asked = request_hash(want) if asked == "the same" else asked
    origin.local_region.cross_region = ReturnCooldown("a", "g-0", asked)
    origin.wire.regions["a"].cost = 0.5
    await origin.run(2.0)
    assert (KEY in origin.trades.delegations) == (asked == "something else"), "its documents are others than then"
    origin.local_region.placed = False
    await origin.run(2.0)
    assert KEY in origin.trades.delegations, "where home has no place for it, it goes"
    await origin.store.close()


async def test_what_could_as_well_wait_is_offered_to_nobody_before_it_may_leave(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.WHEN_BETTER))
    origin.local_region.placed, origin.local_region.own, origin.local_region.stays = (
        True,
        term_values(latency=0.022, cost=1.0),
        True,
    )
    origin.wire.regions["a"].cost = 0.5
    await origin.run(2.0)
    assert "SOLICITED" not in await origin.log()
    origin.local_region.stays = False
    await origin.run(2.0)
    assert origin.trades.delegations[KEY].region == "a"
    await origin.store.close()


async def test_what_could_not_wait_does_not(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.WHEN_BETTER))
    origin.local_region.placed, origin.local_region.stays = False, True
    await origin.run(2.0)
    assert KEY in origin.trades.delegations
    await origin.store.close()


async def test_a_region_that_answered_otherwise_is_given_that_model_no_more(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.WHEN_BETTER))
    origin.local_region.placed, origin.local_region.own = True, term_values(latency=0.2, cost=1.0)
    origin.wire.regions["a"].cost = 0.1
    origin.local_region.wrong = frozenset({("a", DIGEST)})
    await origin.run(2.0)
    assert origin.trades.delegations[KEY].region == "b"
    await origin.store.close()


async def test_what_an_agreement_did_before_draws_no_other(tmp_path: Path) -> None:
    origin = await Origin.open(tmp_path, want=intent(DelegationMode.WHEN_BETTER))
    origin.local_region.placed, origin.local_region.own = True, term_values(latency=0.022, cost=1.0)
    origin.local_region.cross_region = DrainingHere("b", "g-0", is_permanent=False)
    origin.wire.regions["a"].cost = 0.5
    await origin.run(2.0)
    assert origin.trades.delegations[KEY].region == "a", "by its own terms, not because g-0 went to b"
    await origin.store.close()


async def test_an_award_whose_answer_is_lost_is_repeated_and_granted_once(origin: Origin) -> None:
    origin.wire.lost_answers.add("award")
    await origin.run(2.0)
    assert origin.wire.sent_methods.count("award") > 1
    origin.wire.lost_answers.clear()
    await origin.run(1.0)
    assert origin.wire.regions["a"].running_agreements == [origin.trades.delegations[KEY].agreement]
    assert origin.wire.regions["b"].running_agreements == []


async def test_an_award_whose_outcome_never_comes_is_withdrawn_before_another_begins(origin: Origin) -> None:
    origin.wire.lost_answers.add("award")
    origin.wire.lost_requests.add("release")
    await origin.run(20.0)
    assert origin.phase is Withdrawing
    assert (await origin.log()).count("SOLICITED") == 1
    origin.wire.lost_answers.clear()
    origin.wire.lost_requests.clear()
    await origin.run(5.0)
    assert (await origin.log()).count("SOLICITED") == 2
    assert len(origin.wire.regions["a"].running_agreements) == 1


async def test_a_lost_region_is_in_breach_at_its_leases_end_and_another_takes_over(origin: Origin) -> None:
    await origin.run(1.0)
    first = origin.trades.delegations[KEY]
    origin.wire.lost_requests.update(("award", "renew", "notify", "release"))
    await origin.run(5.0)
    assert origin.trades.delegations[KEY].is_ready
    assert not origin.trades.delegations[KEY].is_wanted, "home makes ready where it can"
    del origin.wire.regions["a"]
    await origin.run(26.0)
    origin.wire.lost_requests.clear()
    await origin.run(5.0)
    assert "BREACHED" in await origin.log()
    assert origin.trades.delegations[KEY].region == "b" != first.region
    assert origin.trades.reputation.trust["a"] < 1.0
    await origin.run(11.0)
    assert [each.breached for each in origin.wire.delivered_reports] == [True]
    assert origin.trades.reputation.unreported == ()
    assert origin.wire.copies == list(await origin.ledger.entries_after(0))[: len(origin.wire.copies)]
    assert len(origin.wire.copies) > 3


async def test_a_restart_changes_no_route_and_goes_on_with_the_agreement(origin: Origin, tmp_path: Path) -> None:
    await origin.run(3.0)
    before = origin.trades.delegations
    again = await origin.reboot(tmp_path, away_s=5.0)
    assert again.trades.delegations == before
    await again.run(5.0)
    assert again.trades.delegations == before
    assert again.wire.regions["a"].running_agreements == [before[KEY].agreement]
    assert again.wire.sent_methods.count("award") == 1
    await again.store.close()


async def test_an_agreement_says_after_a_restart_when_it_was_awarded(origin: Origin, tmp_path: Path) -> None:
    def times_of(world: Origin) -> list[float]:
        return [view.agreed_at for view in agreements(world.trades.trades, (), Elapsed(0.0))]

    origin.time.advance(10.0)
    begun = origin.time.wall()
    await origin.run(1.0)
    (at,) = times_of(origin)
    assert begun <= at < origin.time.wall()
    origin = await origin.reboot(tmp_path, away_s=5.0)
    assert times_of(origin) == [at]
    await origin.run(3.0)
    origin.local_region.wanted = ()
    await origin.run(0.5)
    assert isinstance(origin.trades.trades[KEY].phase, IdleTrade)
    assert times_of(origin) == [at], "under notice"
    await origin.store.close()


async def test_after_a_restart_an_agreement_that_ended_meanwhile_is_in_breach(origin: Origin, tmp_path: Path) -> None:
    await origin.run(1.0)
    first = origin.trades.delegations[KEY].agreement
    again = await origin.reboot(tmp_path, away_s=100.0)
    await again.run(3.0)
    assert "BREACHED" in await again.log()
    assert again.trades.delegations[KEY].agreement != first
    assert len(again.wire.regions["a"].running_agreements) == 1
    await again.store.close()


@pytest.mark.parametrize("lost", ["bid", "award", "renew"])
async def test_killed_at_any_step_it_ends_with_one_agreement(origin: Origin, tmp_path: Path, lost: str) -> None:
    origin.wire.lost_requests.add(lost)
    await origin.run(0.5)
    origin.wire.lost_requests.clear()
    again = await origin.reboot(tmp_path, away_s=1.0)
    await again.run(8.0)
    assert again.phase is Active
    running = [name for each in again.wire.regions.values() for name in each.running_agreements]
    assert running == [again.trades.delegations[KEY].agreement]
    await again.store.close()


@pytest.mark.parametrize("takes_effect", [True, False])
async def test_an_award_whose_commit_got_no_answer_is_sent_only_once_it_is_known_to_be_stored(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, takes_effect: bool
) -> None:
    commit = origin.store.commit

    async def commit_without_answer(transaction: Transaction) -> int:
        is_award = any(key.startswith(LEDGER) for key in transaction.puts)
        revision = await commit(transaction) if takes_effect or not is_award else 0
        if is_award:
            raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))
        return revision

    with monkeypatch.context() as patched:
        patched.setattr(origin.store, "commit", commit_without_answer)
        await origin.run(0.5)
    assert "award" not in origin.wire.sent_methods
    await origin.run(8.0)
    assert origin.phase is Active
    assert origin.wire.sent_methods.count("award") == 1
    entries = await origin.ledger.entries_after(0)
    assert [entry.what for entry in entries] == ["awarded", "granted", "renewed"]
    assert first_break(entries, origin.ledger.head) is None


async def test_deliveries_are_reported_though_the_ledger_is_refused(origin: Origin) -> None:
    await origin.run(11.0)
    assert origin.wire.copies != []
    assert origin.trades.report_refusal is None
    origin.wire.entries_refused = Code.MESSAGE_INVALID
    lost = origin.trades.delegations[KEY].agreement
    origin.wire.lost_requests.update(("award", "renew", "notify", "release"))
    await origin.run(62.0)
    assert [each.agreement for each in origin.wire.delivered_reports] == [lost]
    assert origin.trades.reputation.unreported == ()
    refusal = origin.trades.report_refusal
    assert refusal is not None
    assert refusal.code is Code.MESSAGE_INVALID
    copies = len(origin.wire.copies)
    origin.wire.entries_refused = None
    await origin.run(21.0)
    assert origin.trades.report_refusal is None
    assert len(origin.wire.copies) > copies


async def test_a_report_has_no_more_entries_than_a_message_may_carry(origin: Origin) -> None:
    draft = LedgerDraft("noticed", "g-1", "a", "t/w", "", "t" * (ENTRY_CHARS_MOST // 3))
    await origin.ledger.commit(LedgerWrites(drafts=(draft,) * 7))
    reported = list[int]()
    report = origin.wire.report

    async def count(content: ReportContent) -> int:
        reported.append(len(content.entries))
        return await report(content)

    origin.wire.report = count  # type: ignore[method-assign]
    await origin.run(60.0)
    assert max(reported) == 2
    assert len(origin.wire.copies) > 2


async def test_in_another_history_of_its_store_it_asks_again_what_the_federation_lacks(origin: Origin) -> None:
    reports = list[ReportContent]()
    report = origin.wire.report

    async def keep(content: ReportContent) -> int:
        reports.append(content)
        return await report(content)

    origin.wire.report = keep  # type: ignore[method-assign]
    await origin.run(22.0)
    first = origin.ledger.history
    assert {each.history for each in reports} == {first}
    assert [len(each.entries) > 0 for each in reports[:2]] == [False, True]
    seen = len(reports)
    await origin.fence.open_history("the store is an old copy")
    await origin.run(11.0)
    assert reports[seen] == ReportContent((), (), origin.ledger.history)
    assert origin.ledger.history != first


async def test_a_noticed_agreement_is_replaced_before_it_leaves_the_routes(origin: Origin) -> None:
    await origin.run(1.0)
    first = origin.trades.delegations[KEY]
    neighbour = origin.wire.regions["a"]
    neighbour.apply_event(neighbour.bid_of(first.agreement), hold.OwnNotice("a", Code.NODE_CORDONED, Seconds(60.0)))
    neighbour.p95_s = 5.0
    notice = Notice(first.agreement, "a", Code.NODE_CORDONED, Seconds(60.0))
    await origin.trades.on_notice(VerifiedMessage("a", notice, b"signed"))
    assert origin.trades.delegations[KEY].agreement == first.agreement
    assert not origin.trades.delegations[KEY].is_wanted
    await origin.run(4.0)
    assert origin.trades.delegations[KEY].region == "b"
    await origin.run(4.0)
    assert neighbour.running_agreements == []
    assert [entry.what for entry in await origin.ledger.entries_after(0)][-1] in ("ended", "renewed")


async def test_a25_what_may_not_go_there_any_more_leaves_the_routes_at_once(origin: Origin) -> None:
    """With nobody to take its place: better no answer than one from there."""
    await origin.run(3.0)
    before = origin.trades.delegations[KEY]
    assert before.is_ready
    (want,) = origin.local_region.wanted
    origin.local_region.wanted = (replace(want, require=replace(want.require, residency=("moon",))),)
    await origin.trades.tick()
    assert KEY not in origin.trades.delegations
    with pytest.raises(ShoalError) as error:
        await origin.trades.authorise_fetch(before.region, before.agreement, DIGEST)
    assert error.value.code is Code.RESIDENCY


async def test_home_that_serves_again_ends_it(origin: Origin) -> None:
    await origin.run(1.0)
    origin.local_region.placed = True
    await origin.run(trade_times.LOCAL_STABLE_S + 2.0, step=1.0)
    assert not origin.trades.delegations[KEY].is_wanted
    assert origin.trades.delegations[KEY].is_ready, "until home serves"
    origin.local_region.serves = True
    await origin.run(5.0)
    assert origin.trades.delegations == {}
    assert origin.wire.regions["a"].running_agreements == []
    assert origin.phase is IdleTrade


async def test_what_is_deleted_is_given_back_and_forgotten(origin: Origin) -> None:
    await origin.run(1.0)
    origin.local_region.wanted = ()
    await origin.run(5.0)
    assert origin.trades.trades == {}
    assert origin.wire.regions["a"].running_agreements == []
    assert await origin.store.scan(TRADES) == ()


async def test_notices_and_loans_are_for_ones_own_agreements_only(origin: Origin) -> None:
    await origin.run(1.0)
    name = origin.trades.delegations[KEY].agreement
    await origin.trades.authorise_fetch("a", name, DIGEST)
    for region, agreement, digest, code in (
        ("b", name, DIGEST, Code.AGREEMENT_UNKNOWN),
        ("a", "g-other", DIGEST, Code.AGREEMENT_UNKNOWN),
        ("a", name, "sha256:" + "b" * 64, Code.TENANT_DENIED),
    ):
        with pytest.raises(ShoalError) as refused:
            await origin.trades.authorise_fetch(region, agreement, digest)
        assert refused.value.code is code
    with pytest.raises(ShoalError):
        await origin.trades.on_notice(VerifiedMessage("b", Notice(name, "b", Code.NODE_LOST, Seconds(0.0)), b""))
    assert origin.phase is Active


async def test_answers_of_another_name_or_trade_are_left_out(origin: Origin) -> None:
    liar = origin.wire.regions["a"]
    honest = liar.bid

    def bid(solicitation: Solicitation) -> Answer:
        answer = honest(solicitation)
        assert isinstance(answer, Offer)
        return replace(answer, region="b", cost=UsdPerHour(0.0001))

    liar.bid = bid  # type: ignore[method-assign]
    await origin.run(0.5)
    assert origin.trades.delegations[KEY].region == "b"
    assert origin.wire.regions["b"].running_agreements != []


async def test_indicative_bids_hold_nothing(origin: Origin) -> None:
    found = await origin.trades.preview_offers(intent(), origin.local_region.profiles(), None)
    assert found is not None
    assert found.selection.winner is not None
    assert found.selection.winner.region == "a"
    slow = intent(p95_s=0.01, relax=(0.015, 0.03))
    relaxed = await origin.trades.preview_offers(slow, origin.local_region.profiles(), None)
    assert relaxed is not None
    assert relaxed.relaxation == "latency: {p95: 0.03s}"
    assert relaxed.selection.winner is not None
    assert [each.active_holds for each in origin.wire.regions.values()] == [[], []]
    assert await origin.trades.preview_offers(intent(), origin.local_region.profiles(), (1.0, 1.0, 1.0)) is None
    assert (
        await origin.trades.preview_offers(intent(DelegationMode.NEVER), origin.local_region.profiles(), None) is None
    )


async def test_a_decline_of_all_rests_and_says_why(origin: Origin) -> None:
    def decline(asked: Solicitation, name: str) -> Decline:
        return Decline(asked.id, asked.round, name, Refusal(Code.TRADE_DENIED, "no partner", "one"))

    for name, each in origin.wire.regions.items():
        each.bid = lambda asked, name=name: decline(asked, name)  # type: ignore[method-assign,misc]
    await origin.run(0.5)
    state = origin.trades.trades[KEY]
    assert isinstance(state.phase, IdleTrade)
    assert state.phase.refusal is not None
    assert "TRADE_DENIED" in state.phase.refusal.found


async def test_at_the_end_of_its_term_it_goes_on_unless_another_region_offers_better(tmp_path: Path) -> None:
    want = replace(intent(), delegation=DelegationRule(DelegationMode.WHEN_INFEASIBLE, term_s=Seconds(30.0)))
    origin = await Origin.open(tmp_path, want=want)
    await origin.run(40.0, step=1.0)
    first = origin.trades.delegations[KEY]
    assert (first.region, (await origin.log()).count("AWARDED")) == ("a", 1)
    origin.wire.regions["b"].cost = 0.1
    origin.wire.regions["b"].p95_s = 0.01
    await origin.run(40.0, step=1.0)
    assert origin.trades.delegations[KEY].region == "b"
    assert origin.wire.regions["a"].running_agreements == []
    reasons = [event.message for event in await origin.events.events_after(0, 1000) if event.code == "NOTICED"]
    assert len(reasons) == 1
    assert "BETTER_ELSEWHERE" in reasons[0]
    await origin.store.close()


async def test_looking_again_costs_nothing_where_nothing_is_due(origin: Origin) -> None:
    origin.local_region.placed = True
    await origin.run(0.5)
    before = origin.ids.count
    await origin.run(10.0)
    assert origin.ids.count == before


async def test_an_agreement_counts_while_it_lasts(origin: Origin) -> None:
    await origin.run(1.0)
    name = origin.trades.delegations[KEY].agreement
    origin.local_region.reports = {name: replace(NOTHING, requests=10, latency_p95_s=Seconds(0.08))}
    await origin.run(130.0, step=1.0)
    assert origin.trades.reputation.trust["a"] < 0.6
    assert 1 <= len(origin.wire.delivered_reports) <= 2, "requests that were counted once count once"
    assert origin.wire.delivered_reports[0].delivered_p95_s == pytest.approx(0.078)


@pytest.mark.parametrize("look_s", [0.25, 0.01])
async def test_a_region_that_is_lost_under_load_is_replaced_before_its_lease_ends(
    origin: Origin, look_s: float
) -> None:
    """Neither its coordinator nor its gateways answer; silence alone moves nothing (it may be a restart)."""
    await origin.run(3.0)
    name = origin.trades.delegations[KEY].agreement
    origin.local_region.reports = {name: replace(NOTHING, requests=100, errors=1)}
    await origin.run(2.0)
    lost = origin.wire.regions.pop("a")
    origin.wire.down.add("a")
    await origin.run(6.0, step=look_s)
    assert origin.trades.delegations[KEY].agreement == name, "its gateways may serve on"
    origin.local_region.reports = {name: replace(NOTHING, requests=120, errors=20)}
    await origin.run(2.0, step=look_s)
    assert origin.trades.delegations[KEY].region == "b"
    assert "BREACHED" in await origin.log()
    origin.wire.regions["a"] = lost
    origin.wire.down.clear()
    await origin.run(10.0)
    assert lost.running_agreements == [], "it is told when it is back"
    assert origin.trades.delegations[KEY].region == "b"


@pytest.mark.parametrize(
    ("placed", "service", "answered", "breached"),
    [
        (True, ServiceState.READY, 0, True),
        (False, ServiceState.READY, 0, False),  # nobody would serve it but that region, once it can
        (True, ServiceState.SHORT, 0, True),  # it has its time to replace a replica, not to answer nothing
        (True, ServiceState.SHORT, 1, False),
        (True, ServiceState.READY, 1, False),
    ],
)
async def test_home_takes_back_what_no_request_reaches_though_its_delegate_says_that_it_serves(
    origin: Origin, placed: bool, service: ServiceState, answered: int, breached: bool
) -> None:
    """Its coordinator answers all the time."""
    await origin.run(1.0)
    name = origin.trades.delegations[KEY].agreement
    origin.local_region.placed = placed
    origin.wire.regions["a"].service = service
    report = replace(NOTHING, requests=100)
    for _ in range(8):
        report = replace(report, requests=report.requests + 2 + answered, errors=report.errors + 2)
        origin.local_region.reports = {name: report}
        await origin.run(1.5)
    left = origin.trades.delegations.get(KEY)
    if not breached:
        assert left is not None
        assert left.is_wanted
        return
    assert left is None or left.is_broken, "home serves with what it has"
    assert "BREACHED" in await origin.log()


async def test_what_failed_for_a_moment_is_not_taken_back(origin: Origin) -> None:
    """And is asked nothing any more."""
    await origin.run(1.0)
    name = origin.trades.delegations[KEY].agreement
    origin.local_region.placed = True
    origin.local_region.reports = {name: replace(NOTHING, requests=100)}
    await origin.run(3.0)
    origin.local_region.reports = {name: replace(NOTHING, requests=120, errors=20)}
    await origin.run(30.0)
    assert origin.trades.delegations[KEY].is_wanted


async def test_what_is_to_come_home_after_a_notice_waits_for_no_answer_that_cannot_come(origin: Origin) -> None:
    """The other region gave notice, and its gateways are beyond reach: home compares nothing with it."""
    await origin.run(1.0)
    name = origin.trades.delegations[KEY].agreement
    origin.local_region.placed = True
    origin.wire.regions["a"].service = ServiceState.STOPPING
    await origin.trades.on_notice(VerifiedMessage("a", Notice(name, "a", Code.NODE_CORDONED, Seconds(60.0)), b"signed"))
    await origin.run(1.0)
    assert origin.trades.delegations[KEY].return_reason
    for errors in range(4, 40, 4):
        origin.local_region.reports = {name: replace(NOTHING, requests=errors, errors=errors)}
        await origin.run(1.5)
    assert origin.trades.delegations[KEY].is_broken
    assert origin.trades.delegations[KEY].is_ready, "who cannot be served at home is sent there all the same"
    assert (await origin.log()).count("BREACHED") == 1


@pytest.mark.parametrize(("left", "region"), [(0.9, ""), (1.0, "a"), (2.0, "a")])
async def test_a51_an_offer_beyond_what_is_left_of_the_budget_is_no_offer(
    tmp_path: Path, left: float, region: str
) -> None:
    origin = await Origin.open(tmp_path)
    origin.local_region.budget = UsdPerHour(left)
    origin.wire.regions["b"].cost = 3.0
    await origin.run(1.0)
    delegated = origin.trades.delegations.get(KEY)
    assert (delegated.region if delegated is not None else "") == region
    assert origin.trades.awarded_prices == ({KEY: 1.0} if region else {})
    if not region:
        refused = str(origin.trades.last_refusals[KEY])
        assert "a: found: 1 USD/h; wanted: 0.9 USD/h, which is left of the tenant's budget (QUOTA)" in refused
        assert all(not each.active_holds for each in origin.wire.regions.values()), "released"
    await origin.store.close()


async def test_a51_what_was_awarded_counts_after_a_restart_until_it_is_over(origin: Origin, tmp_path: Path) -> None:
    await origin.run(0.5)
    assert origin.trades.awarded_prices == {KEY: 1.0}
    origin = await origin.reboot(tmp_path, away_s=1.0)
    assert origin.trades.awarded_prices == {KEY: 1.0}
    origin.local_region.wanted = ()
    await origin.run(200.0, step=5.0)
    assert origin.trades.awarded_prices == {}
    origin.trades.stop()
    await origin.store.close()

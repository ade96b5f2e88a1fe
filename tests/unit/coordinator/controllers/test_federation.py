"""The federation over a real store: members, advertisements, solicitations, records; several replicas on one store."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from harness.builders.federation_members import advertisement, capacity, member
from harness.builders.negotiation import offer, solicitation
from harness.fakes.region import SteppedClock
from harness.wait import until
from shoal.coordinator import codec
from shoal.coordinator.api.federation import FederationService
from shoal.coordinator.controllers.federation import service
from shoal.coordinator.controllers.federation.reputation import REPORTS_MOST
from shoal.coordinator.controllers.federation.service import (
    ASKERS,
    CHAIN_BURST,
    COPIES,
    COPIES_KEPT,
    DELIVERIES,
    DIRECTORY_S,
    REPORT_BURST,
    SOLICITATION_BURST,
    FederationController,
)
from shoal.coordinator.controllers.log.events import EVENTS, EventLog, LogEvent
from shoal.coordinator.controllers.region.region import NoMeter
from shoal.coordinator.core.federation.directory import FederationState, make_directory
from shoal.coordinator.core.federation.rules import SOLICITATION_BYTES
from shoal.coordinator.ports import (
    Compacted,
    RotatingAuthority,
    SpanExporter,
    StaleRevision,
    StoreChange,
    StoreRecord,
    Transaction,
    VerifiedMessage,
)
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.agreement import Delivered, ReportContent
from shoal.types.chain import LedgerEntry, digest
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.offer import Answer, Directory, Member
from shoal.types.trace import Span
from shoal.types.units import Seconds, Wall
from shoal.v1 import federation_pb2

T = TypeVar("T")


def signed_message(by: str, what: T) -> VerifiedMessage[T]:
    return VerifiedMessage(by, what, f"signed by {by}".encode())


@dataclass
class Bidders:
    """ports.Candidates. offers: by region what it answers; one that is not in it does not answer at all."""

    offers: dict[str, Callable[[], Answer]] = field(default_factory=dict)
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    async def ask(self, member: Member, request: bytes, timeout_s: Seconds) -> VerifiedMessage[Answer]:
        self.asked.append((member.region, request))
        if member.region in self.silent:
            await asyncio.Event().wait()
        if member.region not in self.offers:
            raise refuse(Code.PEER_UNREACHABLE, member.region)
        return signed_message(member.region, self.offers[member.region]())


@dataclass
class World:
    store: SqliteStore
    clock: SteppedClock
    bidders: Bidders

    async def replica(self, kept: int = COPIES_KEPT, traces: SpanExporter | None = None) -> FederationController:
        events = EventLog(self.store, self.clock, kept=100, audit_kept=100)
        await events.start()
        controller = FederationController(
            "fed", self.store, events, self.clock, NoMeter(), self.bidders, kept=kept, exporter=traces
        )
        await controller.start()
        return controller


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    store = await SqliteStore.open(tmp_path, reserve_bytes=0)
    yield World(store, SteppedClock(), Bidders())
    await store.close()


async def test_a_replica_that_must_list_anew_while_the_store_answers_nothing_tries_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, other = await world.replica(), await world.replica()
    watch, scan = SqliteStore.watch, SqliteStore.scan
    wrong: list[Exception] = [refuse(Code.STORE_UNAVAILABLE, "no answer"), Compacted(1)]

    async def watch_compacted(store: SqliteStore, prefix: str, after: int) -> AsyncIterator[StoreChange]:
        if len(wrong) == 2:
            raise wrong.pop()
        async for change in watch(store, prefix, after):
            yield change

    async def scan_without_answer(store: SqliteStore, prefix: str, **more: Any) -> tuple[StoreRecord, ...]:
        if wrong:
            raise wrong.pop()
        return await scan(store, prefix, **more)

    monkeypatch.setattr(SqliteStore, "watch", watch_compacted)
    monkeypatch.setattr(SqliteStore, "scan", scan_without_answer)
    running = asyncio.create_task(controller.run())
    await until(lambda: not wrong, 5, "both to have struck")
    await other.admit(member("eu-west"))
    await until(lambda: controller.roots_of("eu-west"), 5, "what another replica wrote")
    running.cancel()


async def refusal_of(asked: object) -> Code:
    with pytest.raises(ShoalError) as error:
        await asked  # type: ignore[misc]
    return error.value.code


async def join_regions(world: World, *regions: str) -> FederationController:
    federation = await world.replica()
    for region in regions:
        await federation.admit(member(region))
        await federation.advertise(signed_message(region, advertisement(region)))
    return federation


async def test_members_are_known_after_a_restart_and_their_advertisements_for_a_lease(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    world.clock.advance(9.0)
    again = await world.replica()
    assert again.directory() == federation.directory(), "the same version of every replica that knows the same"
    world.clock.advance(9.0)
    assert [each.advertisement is None for each in federation.directory().members] == [True, True]
    assert [each.advertisement is None for each in again.directory().members] == [False, False]
    assert again.roots_of("eu") == ("CA of eu",)
    assert again.roots_of("ap") == ()


async def test_a_region_gets_the_directory_only_where_it_has_another(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    directory = await federation.advertise(signed_message("eu", advertisement("eu", 2)))
    assert directory is not None
    assert await federation.advertise(signed_message("eu", advertisement("eu", 3, directory=directory.version))) is None
    await federation.remove("us")
    told = await federation.advertise(signed_message("eu", advertisement("eu", 4, directory=directory.version)))
    assert told is not None
    assert [each.region for each in told.members] == ["eu"]


async def test_which_cas_a_region_trusts_is_told_to_no_other(world: World) -> None:
    federation = await join_regions(world, "eu")
    told = advertisement("eu", 2, trusted_roots=("a" * 64,))
    await federation.advertise(signed_message("eu", told))
    assert federation.advertisements() == (told,)
    world.clock.advance(DIRECTORY_S)
    assert [each.advertisement for each in federation.directory().members] == [advertisement("eu", 2)]
    world.clock.advance(10.0)
    assert federation.advertisements() == ()


async def test_a_directory_is_made_when_members_change_and_not_for_each_advertisement(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 200 regions, which advertise 250 times a second, it took 1.6 s of the loop each second."""
    federation = await join_regions(world, "eu", "us")
    made = list[FederationState]()

    def count(state: FederationState, *args: Any) -> Directory:
        made.append(state)
        return make_directory(state, *args)

    monkeypatch.setattr(service, "make_directory", count)
    for sequence in range(2, 7):
        for region in ("eu", "us"):
            classes = (capacity(free_bytes=capacity().free_bytes + sequence),)
            await federation.advertise(signed_message(region, advertisement(region, sequence, classes=classes)))
    assert len(made) <= 1
    version = federation.directory().version
    await federation.advertise(signed_message("eu", advertisement("eu", 7, classes=(capacity(free_bytes=1),))))
    assert federation.directory().version != version, "another capacity counts at once"
    await federation.admit(member("ap"))
    assert [each.region for each in federation.directory().members] == ["ap", "eu", "us"]
    await federation.remove("us")
    assert [each.region for each in federation.directory().members] == ["ap", "eu"]
    world.clock.advance(11.0)
    assert [each.advertisement for each in federation.directory().members] == [None, None]


async def test_a_region_is_told_what_others_measured_to_itself(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    told = advertisement("us", 2, rtt_s={"eu": 0.1, "ap": 0.2}, heads={"eu": "a" * 64, "ap": "b" * 64}, directory=1)
    await federation.advertise(signed_message("us", told))
    world.clock.advance(DIRECTORY_S)
    found = await federation.advertise(signed_message("eu", advertisement("eu", 3, directory=1)))
    assert found is not None
    seen = {each.region: each.advertisement for each in found.members}["us"]
    assert seen is not None
    assert (seen.rtt_s, seen.heads) == ({"eu": 0.1}, {"eu": "a" * 64})
    assert found.version == federation.directory().version


async def test_a24_what_is_refused_leaves_the_last_good_one_until_it_is_old(world: World) -> None:
    federation = await join_regions(world, "eu")
    absurd = advertisement("eu", 2, classes=(capacity(devices=10**12),))
    assert await refusal_of(federation.advertise(signed_message("eu", absurd))) is Code.ADVERT_INVALID
    (known,) = federation.directory().members
    assert known.advertisement is not None
    assert known.advertisement.sequence == 1
    world.clock.advance(10.0)
    assert await refusal_of(federation.advertise(signed_message("eu", absurd))) is Code.ADVERT_INVALID
    assert federation.directory().members[0].advertisement is None


async def test_a21_a_region_says_things_of_itself_alone(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    assert await refusal_of(federation.advertise(signed_message("us", advertisement("eu", 9)))) is Code.REGION_MISMATCH
    assert await refusal_of(federation.solicit(signed_message("us", solicitation(origin="eu")))) is Code.REGION_MISMATCH
    assert (
        await refusal_of(federation.update(signed_message("us", member("eu", roots=("mine",))))) is Code.REGION_MISMATCH
    )
    assert await refusal_of(federation.advertise(signed_message("ap", advertisement("ap")))) is Code.REGION_UNKNOWN
    assert federation.roots_of("eu") == ("CA of eu",)


async def test_a_name_belongs_to_whose_ca_it_is(world: World) -> None:
    federation = await join_regions(world, "eu")
    assert await refusal_of(federation.admit(member("eu", roots=("another CA",)))) is Code.CONFLICT
    assert await refusal_of(federation.admit(member("fed"))) is Code.CONFLICT
    again = await federation.admit(member("eu", roots=("CA of eu", "next CA"), address="eu:1"))
    assert again.members[0].address == "eu:1"


async def test_what_a_token_was_spent_for_is_written_with_it_or_not_at_all(world: World) -> None:
    federation = await world.replica()
    await world.store.commit(Transaction({"token": b"unused"}))
    with pytest.raises(StaleRevision):
        await federation.admit(member("eu"), extra=Transaction({"token": b"used"}, expect={"token": 0}))
    assert federation.directory().members == ()
    assert (await world.store.read("token")).value == b"unused"  # type: ignore[union-attr]


async def test_a_region_that_turns_its_ca_tells_it(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    told = await federation.update(signed_message("eu", member("eu", roots=("CA of eu", "next CA"))))
    assert told.members[0].roots == ("CA of eu", "next CA")
    assert (await world.replica()).roots == (("eu", "CA of eu"), ("eu", "next CA"), ("us", "CA of us"))


async def test_candidates_are_asked_at_once_with_what_the_origin_signed(world: World) -> None:
    federation = await join_regions(world, "eu", "us", "ap", "sa")
    world.bidders.offers = {"eu": lambda: offer("b-eu"), "ap": lambda: offer("b-ap")}
    answers = await federation.solicit(signed_message("us", solicitation(origin="us")))
    assert sorted(each.signer for each in answers) == ["ap", "eu"], "sa does not answer, and nobody waits for it"
    assert sorted(world.bidders.asked) == [(name, b"signed by us") for name in ("ap", "eu", "sa")]


class Collected:
    """ports.Traces"""

    is_enabled = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def export(self, spans: Sequence[Span]) -> None:
        self.spans += spans


async def test_what_is_solicited_is_told_to_who_collects_traces(world: World) -> None:
    await join_regions(world, "eu", "us", "ap")
    world.bidders.offers = {"eu": lambda: offer("b-eu")}
    collected = Collected()
    federation = await world.replica(traces=collected)
    await federation.solicit(signed_message("us", solicitation(origin="us", indicative=True)))
    assert not collected.spans, "a plan's question begins no negotiation"
    await federation.solicit(signed_message("us", solicitation(origin="us")))
    (span,) = collected.spans
    assert (span.name, span.region, span.attributes["shoal.from.region"]) == ("fan out", "fed", "us")
    assert (span.attributes["shoal.asked"], span.attributes["shoal.answers"]) == ("2 regions", "1")


async def test_who_does_not_answer_in_time_is_left_out(world: World) -> None:
    federation = await join_regions(world, "eu", "us", "ap")
    world.bidders.offers = {"eu": lambda: offer("b-eu")}
    world.bidders.silent = {"ap"}
    answers = await federation.solicit(signed_message("us", solicitation(origin="us", answer_s=0.05)))
    assert [each.signer for each in answers] == ["eu"]


async def test_who_broke_its_word_is_asked_last_and_everybody_is_told(world: World) -> None:
    federation = await join_regions(world, "eu", "us", "ap")
    broken = tuple(Delivered("ap", f"a{n}", Seconds(0.1), Seconds(1.0), 100, True) for n in range(5))
    await federation.report(signed_message("us", ReportContent(broken, ())))
    trust = {each.region: each.trust for each in federation.directory().members}
    assert trust["ap"] < 0.5
    assert trust["eu"] == 1.0
    assert (await world.replica()).directory() == federation.directory()
    own = tuple(replace(each, region="us", breached=False) for each in broken)
    await federation.report(signed_message("us", ReportContent(own, ())))
    assert {each.region: each.trust for each in federation.directory().members} == trust, "nobody is his own judge"


def chain(count: int) -> tuple[LedgerEntry, ...]:
    found: list[LedgerEntry] = []
    for number in range(1, count + 1):
        previous = digest(found[-1]) if found else ""
        found.append(LedgerEntry(number, Wall(1.0), "granted", "a", "us", "t/w", "", "", "", previous))
    return tuple(found)


async def test_a_copy_of_each_ledger_is_kept_and_one_that_is_rewritten_is_refused(world: World) -> None:
    federation = await join_regions(world, "eu")
    entries = chain(5)
    assert await federation.report(signed_message("eu", ReportContent((), entries[:2]))) == 3
    assert await federation.report(signed_message("eu", ReportContent((), entries[3:]))) == 3, "a gap is asked for"
    assert await federation.report(signed_message("eu", ReportContent((), entries[1:]))) == 6
    assert tuple(await federation.copies("eu", 10)) == entries
    forged = LedgerEntry(6, Wall(1.0), "ended", "a", "us", "t/w", "", "", "", "0" * 64)
    assert await refusal_of(federation.report(signed_message("eu", ReportContent((), (forged,))))) is Code.LEDGER_BROKEN


async def test_the_oldest_copies_go_and_the_chain_goes_on(world: World) -> None:
    federation = await world.replica(kept=3)
    await federation.admit(member("eu"))
    entries = chain(9)
    assert await federation.report(signed_message("eu", ReportContent((), entries[:2]))) == 3
    assert await federation.report(signed_message("eu", ReportContent((), entries[2:7]))) == 8
    kept = [record.key for record in await world.store.scan(COPIES)]
    assert kept == [f"{COPIES}eu/{number:012}" for number in (5, 6, 7)]
    again = await world.replica(kept=3)
    assert await again.report(signed_message("eu", ReportContent((), ()))) == 8, "after a restart too"
    forged = replace(entries[7], previous="0" * 64)
    assert await refusal_of(again.report(signed_message("eu", ReportContent((), (forged,))))) is Code.LEDGER_BROKEN
    assert await again.report(signed_message("eu", ReportContent((), entries[7:]))) == 10
    assert tuple(await again.copies("eu", 2)) == entries[7:]
    assert tuple(await again.copies("eu", 100)) == entries[6:]


def fork_of(entries: tuple[LedgerEntry, ...], kept: int, count: int) -> tuple[LedgerEntry, ...]:
    """The ledger of a region whose store was an old copy, with `kept` entries: it goes on otherwise than before."""
    found = list(entries[:kept])
    while len(found) < count:
        found.append(replace(found[-1], sequence=len(found) + 1, agreement="other", previous=digest(found[-1])))
    return tuple(found)


async def report_all(federation: FederationController, entries: tuple[LedgerEntry, ...], history: str) -> None:
    """As a region does: it asks first what is lacking."""
    lacking = await federation.report(signed_message("eu", ReportContent((), (), history)))
    for _ in range(3):
        content = ReportContent((), entries[lacking - 1 :], history)
        lacking = await federation.report(signed_message("eu", content))
    assert lacking == len(entries) + 1


async def regions_with_another_ledger(world: World) -> list[str]:
    events = [codec.load(LogEvent, each.value) for each in await world.store.scan(EVENTS)]
    return [event.subject for event in events if event.code == "LEDGER_RESTARTED"]


async def test_a_restored_region_reports_again_and_its_old_ledger_is_kept(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    before = chain(60)
    after = fork_of(before, 50, 61)
    await report_all(federation, before, "first")
    await report_all(federation, after[:55], "second")
    await report_all(federation, after, "second")
    assert tuple(await federation.copies("eu", 100)) == after
    assert await regions_with_another_ledger(world) == ["eu"]
    kept = [codec.load(LedgerEntry, each.value) for each in await world.store.scan(f"{COPIES}eu/")]
    assert tuple(kept) == before
    forged = replace(after[-1], sequence=62, previous="0" * 64)
    content = ReportContent((), (forged,), "second")
    assert await refusal_of(federation.report(signed_message("eu", content))) is Code.LEDGER_BROKEN
    third = fork_of(before, 3, 6)
    await report_all(federation, third, "third")
    assert tuple(await federation.copies("eu", 100)) == third
    assert tuple(await (await world.replica()).copies("eu", 100)) == third


async def test_deliveries_count_in_the_report_that_begins_another_ledger(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    await report_all(federation, chain(3), "first")
    delivered = Delivered("us", "a-1", Seconds(0.1), Seconds(0.05), 100, False)
    content = ReportContent((delivered,), (), "second")
    assert await federation.report(signed_message("eu", content)) == 1
    assert federation._state.deliveries_to("eu", "us") == (delivered,)


async def test_a_region_that_tells_its_history_from_now_on_goes_on_or_begins_anew(world: World) -> None:
    """It was of an older version before: what it reported counts where its ledger goes on."""
    federation = await join_regions(world, "eu", "us")
    before = chain(6)
    await report_all(federation, before[:4], "")
    await report_all(federation, before[:5], "first")
    await report_all(federation, before, "first")
    assert await regions_with_another_ledger(world) == []
    await federation.remove("us")
    other = await join_regions(world, "us")
    assert await other.report(signed_message("us", ReportContent((), before[:4]))) == 5
    fork = fork_of(before, 2, 5)
    assert await other.report(signed_message("us", ReportContent((), fork[4:], "restored"))) == 1
    assert await other.report(signed_message("us", ReportContent((), fork, "restored"))) == 6
    assert await regions_with_another_ledger(world) == ["us"]


@pytest.mark.parametrize("history", ["", "another"])
async def test_another_region_of_a_name_that_is_free_again_reports_from_its_first_entry(
    world: World, history: str
) -> None:
    federation = await join_regions(world, "eu", "us")
    await report_all(federation, chain(60), "first" if history else "")
    await federation.remove("eu", "operator")
    await federation.admit(member("eu", roots=("another CA",)))
    other = fork_of(chain(3), 1, 3)
    await report_all(federation, other, history)
    assert tuple(await federation.copies("eu", 100)) == other


async def test_a_region_begins_few_ledgers(world: World) -> None:
    federation = await join_regions(world, "eu", "us")
    await report_all(federation, chain(2), "0")
    for number in range(1, 1 + int(CHAIN_BURST)):
        await report_all(federation, chain(2), str(number))
    content = ReportContent((), (), "more")
    assert await refusal_of(federation.report(signed_message("eu", content))) is Code.OVERLOADED
    assert len(await world.store.scan(COPIES)) == 4, "of two ledgers"


async def test_replicas_learn_what_the_others_wrote(world: World) -> None:
    first, second = await world.replica(), await world.replica()
    watching = asyncio.create_task(second.run())
    try:
        await first.admit(member("eu"))
        await first.advertise(signed_message("eu", advertisement("eu")))
        await until(lambda: second.directory() == first.directory(), 10, "the other replica knows it")
        await first.remove("eu")
        await until(lambda: not second.directory().members, 10, "the other replica forgets it")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a28_who_has_others_hold_for_nothing_is_asked_for_less(world: World) -> None:
    """As the delegates' ledgers tell it; another replica, and a restart, judge alike."""
    federation = await join_regions(world, "eu", "us", "ap", "sa")
    entries, previous = list[LedgerEntry](), ""
    for number in range(1, 31):
        what, code = ("offered", "") if number % 2 else ("expired", Code.HOLD_EXPIRED)
        entries.append(
            LedgerEntry(number, world.clock.wall(), what, f"b-{number}", "us", "t/w", code, "", "", previous)
        )
        previous = digest(entries[-1])
    await federation.report(signed_message("eu", ReportContent((), tuple(entries))))
    assert {each.standing for each in federation.directory().members} == {1.0}, "one that lies ruins nobody alone"
    await federation.report(signed_message("ap", ReportContent((), tuple(entries))))
    standing = {each.region: round(each.standing, 2) for each in federation.directory().members}
    assert standing.pop("us") < 0.3
    assert set(standing.values()) == {1.0}
    again = await world.replica()
    assert again.directory().members == federation.directory().members

    await federation.solicit(signed_message("us", solicitation(origin="us")))
    assert len(world.bidders.asked) == 3, "there are no more"
    refusal = await _flood(federation, "us")
    assert refusal is not None
    assert refusal.code is Code.OVERLOADED
    assert "standing" in refusal.asked
    assert await _flood(federation, "eu") is None


async def test_a28_who_is_no_member_takes_no_room_among_those_who_ask(world: World) -> None:
    federation = await join_regions(world, "eu")
    entries, previous = list[LedgerEntry](), ""
    for number in range(1, 41):
        entries.append(
            LedgerEntry(
                number,
                world.clock.wall(),
                "expired",
                f"b-{number}",
                f"made-up-{number}",
                "t/w",
                Code.HOLD_EXPIRED,
                "",
                "",
                previous,
            )
        )
        previous = digest(entries[-1])
    assert await federation.report(signed_message("eu", ReportContent((), tuple(entries)))) == 41
    assert await world.store.read(f"{ASKERS}eu") is None


async def test_reports_to_two_replicas_that_know_different_things_lose_nothing(world: World) -> None:
    """The second has not heard yet what the first took in."""
    first = await join_regions(world, "eu", "us")
    second = await world.replica()
    entries, previous = list[LedgerEntry](), ""
    for number in range(1, 4):
        entries.append(
            LedgerEntry(number, world.clock.wall(), "offered", f"b-{number}", "us", "t/w", "", "", "", previous)
        )
        previous = digest(entries[-1])
    early, late = (Delivered("us", name, Seconds(0.1), Seconds(0.05), 100, False) for name in ("a-1", "a-2"))
    assert await first.report(signed_message("eu", ReportContent((early,), tuple(entries)))) == 4
    assert await second.report(signed_message("eu", ReportContent((late,), tuple(entries[:1])))) == 4
    third = await world.replica()
    assert {each.agreement for each in third._state.deliveries_to("eu", "us")} == {"a-1", "a-2"}
    assert [each.sequence for each in await third.copies("eu", 10)] == [1, 2, 3]


async def _flood(federation: FederationController, origin: str) -> Refusal | None:
    try:
        for number in range(int(SOLICITATION_BURST / 2)):
            await federation.solicit(signed_message(origin, solicitation(f"f-{number}", origin=origin)))
    except ShoalError as refused:
        return refused.refusal
    return None


async def test_a_solicitation_that_no_delegate_would_take_is_not_read(world: World) -> None:
    port = FederationService("fed", await world.replica(), world.clock, cast(RotatingAuthority, None))
    with pytest.raises(ShoalError) as refused:
        await port.Solicit(federation_pb2.Said(content=bytes(SOLICITATION_BYTES + 1)), None)
    assert refused.value.code is Code.TOO_LARGE


async def test_a_report_is_of_members_bounded_and_not_made_all_the_time(world: World) -> None:
    """A report with 8,000 regions that are none held the loop for 2.8 s, and was kept for ever."""
    federation = await join_regions(world, "eu", "us")
    many = tuple(Delivered(f"r{n}", "a", Seconds(0.1), Seconds(0.1), 1, False) for n in range(REPORTS_MOST - 1))
    known = Delivered("us", "a", Seconds(0.1), Seconds(0.1), 1, False)
    await federation.report(signed_message("eu", ReportContent((*many, known), ())))
    assert [each.key for each in await world.store.scan(DELIVERIES)] == [f"{DELIVERIES}eu/us"]
    assert federation._state.deliveries.keys() == {"us"}
    too_many = ReportContent((*many, known, known), ())
    assert await refusal_of(federation.report(signed_message("eu", too_many))) is Code.MESSAGE_INVALID
    empty = signed_message("eu", ReportContent((), ()))
    for _ in range(int(REPORT_BURST) - 1):
        await federation.report(empty)
    assert await refusal_of(federation.report(empty)) is Code.OVERLOADED
    await federation.report(signed_message("us", ReportContent((), ())))
    world.clock.advance(1.0)
    await federation.report(empty)

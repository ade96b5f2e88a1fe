"""The ledger over a real store: with what it tells about or not at all, and no way to change it unseen (A23)."""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.region import RegionFixture
from shoal.coordinator import codec
from shoal.coordinator.controllers.federation import ledger as module
from shoal.coordinator.controllers.federation.ledger import LEDGER, Ledger, LedgerDraft, LedgerWrites
from shoal.coordinator.controllers.federation.origin import OriginController
from shoal.coordinator.controllers.region.doctor import examine
from shoal.coordinator.ports import StaleRevision, StoreRecord, Transaction
from shoal.types.agreement import ReportContent
from shoal.types.chain import EVIDENCE_CHARS, EVIDENCE_CHARS_TAKEN, LedgerEntry, digest, first_break
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Wall
from shoal.wire import nouns


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegionFixture]:
    opened = await RegionFixture.open(tmp_path / "first")
    yield opened
    await opened.store.close()


def draft(name: str, what: str = "granted") -> LedgerDraft:
    return LedgerDraft(what, name, "us", "shop/ocr", evidence=b"said")


async def write_entries(ledger: Ledger, count: int) -> None:
    for number in range(count):
        await ledger.commit(LedgerWrites(drafts=(draft(f"g-{number}"),)))


async def test_entries_are_there_with_what_they_tell_about_or_not_at_all(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = world.region.ledger
    first = LedgerWrites({"bids/x": b"one"}, expect={"bids/x": 0}, drafts=(draft("g-1", "offered"), draft("g-1")))
    await ledger.commit(first)
    with pytest.raises(StaleRevision):
        await ledger.commit(LedgerWrites({"bids/x": b"two"}, expect={"bids/x": 0}, drafts=(draft("g-2"),)))

    async def full(_: Transaction) -> int:
        raise ShoalError(Refusal(Code.STORE_FULL))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", full)
        with pytest.raises(ShoalError):
            await ledger.commit(LedgerWrites({"bids/y": b"one"}, drafts=(draft("g-3"),)))
    entries = await ledger.entries_after(0)
    assert [(each.sequence, each.what, each.agreement) for each in entries] == [
        (1, "offered", "g-1"),
        (2, "granted", "g-1"),
    ]
    assert first_break(entries, ledger.head) is None
    await ledger.commit(LedgerWrites(drafts=(draft("g-4"),)))
    assert first_break(await ledger.entries_after(0), ledger.head) is None


async def test_evidence_that_is_too_long_for_a_report_is_its_digest(world: RegionFixture) -> None:
    """Whoever pads a message must not silence the ledger that holds it, nor need a newer federation."""
    ledger, said = world.region.ledger, b"x" * (EVIDENCE_CHARS // 4 * 3)
    await ledger.commit(LedgerWrites(drafts=(replace(draft("g-1"), evidence=said),)))
    await ledger.commit(LedgerWrites(drafts=(replace(draft("g-2"), evidence=said + b"x"),)))
    entries = await ledger.entries_after(0)
    assert [b64decode(entries[0].evidence), entries[1].evidence] == [
        said,
        f"sha256:{hashlib.sha256(said + b'x').hexdigest()}",
    ]
    assert all(len(each.evidence) <= nouns.MAX_TEXT for each in entries)
    assert first_break(entries, ledger.head) is None


async def test_what_older_versions_wrote_as_evidence_is_taken(world: RegionFixture) -> None:
    """An award with 80 gateways has 3,226 bytes."""
    entry = LedgerEntry(1, Wall(0.5), "granted", "g-1", "us", "shop/ocr", "", "", b64encode(b"x" * 3226).decode(), "")
    report = ReportContent((), (entry,))
    assert nouns.decode(ReportContent, nouns.encode(report)) == report
    long = "x" * (EVIDENCE_CHARS_TAKEN + 1)
    for wrong in (replace(entry, evidence=long), replace(entry, terms=long)):
        with pytest.raises(ShoalError, match=Code.MESSAGE_INVALID):
            nouns.decode(ReportContent, nouns.encode(ReportContent((), (wrong,))))


async def test_doctor_says_that_the_federation_refuses_reports(world: RegionFixture) -> None:
    async def refusals() -> list[Refusal | None]:
        checks = [check async for check in examine(world.region, world.store)]
        return [check.refusal for check in checks if check.name == "the federation takes its reports"]

    assert await refusals() == [], "it is in none"
    refused = Refusal(Code.LEDGER_BROKEN, "entry 61", "the ledger that it showed before")
    world.region.origin = cast("OriginController", SimpleNamespace(report_refusal=refused))
    assert await refusals() == [refused]


async def test_a_commit_that_was_not_answered_is_linked_to(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, commit = world.region.ledger, world.store.commit

    async def commit_without_answer(transaction: Transaction) -> int:
        await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", commit_without_answer)
        with pytest.raises(ShoalError):
            await ledger.commit(LedgerWrites(drafts=(draft("g-1"),)))
    await ledger.commit(LedgerWrites(drafts=(draft("g-2"),)))
    entries = await ledger.entries_after(0)
    assert [each.agreement for each in entries] == ["g-1", "g-2"]
    assert first_break(entries, ledger.head) is None


async def test_a_restart_goes_on_where_it_was(world: RegionFixture, tmp_path: Path) -> None:
    await write_entries(world.region.ledger, 3)
    world.region.ledger.record_head("us", "f" * 64)
    await world.region.ledger.save()
    head = world.region.ledger.head
    await world.store.close()
    again = await RegionFixture.open(tmp_path / "first", world)
    world.store = again.store
    assert again.region.ledger.head == head
    assert again.region.ledger.heads == {"us": "f" * 64}
    await write_entries(again.region.ledger, 1)
    assert first_break(await again.region.ledger.entries_after(0)) is None
    assert digest((await again.region.ledger.entries_after(2))[0]) == head


async def test_old_entries_go_first(world: RegionFixture) -> None:
    ledger = Ledger(world.store, world.region.fence, ManualClock(), kept=5)
    await ledger.start()
    await write_entries(ledger, 12)
    entries = await ledger.entries_after(0)
    assert [each.sequence for each in entries] == [8, 9, 10, 11, 12]
    assert await ledger.verify({"us": digest(entries[0])}) is None
    assert await ledger.verify({"us": "0" * 64}) is None, "what was dropped may have been shown"


def edit_record(record: StoreRecord) -> bytes:
    return codec.dump(replace(codec.load(LedgerEntry, record.value), terms="cheaper"))


@pytest.mark.parametrize(
    ("number", "attack"),
    [(2, edit_record), (2, None), (2, lambda _: b"no entry"), (4, edit_record), (4, None), (5, None)],
)
async def test_a23_whatever_is_done_to_the_stored_chain_is_told(
    world: RegionFixture, number: int, attack: Callable[[StoreRecord], bytes] | None
) -> None:
    """Edited or dropped: inside, at the end, and all of it (5: every entry)."""
    await write_entries(world.region.ledger, 4)
    assert await _ledger_refusal(world) is None
    for record in await world.store.scan(LEDGER):
        if number in (5, int(record.key.removeprefix(LEDGER))):
            if attack is None:
                await world.store.commit(Transaction(deletes=(record.key,)))
            else:
                await world.store.commit(Transaction({record.key: attack(record)}))
    refusal = await _ledger_refusal(world)
    assert refusal is not None
    assert refusal.code is Code.LEDGER_BROKEN


async def test_a23_entries_that_changed_places_are_told(world: RegionFixture) -> None:
    await write_entries(world.region.ledger, 4)
    second, third = (await world.store.scan(LEDGER))[1:3]
    await world.store.commit(Transaction({second.key: third.value, third.key: second.value}))
    refusal = await _ledger_refusal(world)
    assert refusal is not None
    assert "entry 2" in refusal.found


async def test_a23_a_cut_tail_or_a_fork_is_told_by_who_was_shown_more(world: RegionFixture) -> None:
    """After a restart, when nobody here remembers the end."""
    await write_entries(world.region.ledger, 4)
    shown = world.region.ledger.head
    last = (await world.store.scan(LEDGER))[-1]
    await world.store.commit(Transaction(deletes=(last.key,)))
    reread = Ledger(world.store, world.region.fence, world.region.clock)
    await reread.start()
    assert await reread.verify({}) is None
    assert await reread.verify({"us": digest((await reread.entries_after(0))[-1])}) is None
    cut = await reread.verify({"us": shown})
    assert cut is not None
    assert "us" in cut.found
    await reread.commit(LedgerWrites(drafts=(draft("g-other"),)))
    forked = await reread.verify({"us": shown})
    assert forked is not None
    assert forked.code is Code.LEDGER_BROKEN


def test_a_digest_is_of_the_entrys_fields_alone() -> None:
    """As documented, so that anybody can verify one: SHA-256 over canonical JSON."""
    entry = LedgerEntry(1, Wall(0.5), "granted", "g-1", "us", "shop/ocr", "", "terms", "c2FpZA==", "")
    canonical = json.dumps(asdict(entry), sort_keys=True, separators=(",", ":")).encode()
    assert digest(entry) == hashlib.sha256(canonical).hexdigest()
    found = "b2c33dbfd37a89fdf1649015d73b489b999fc5561d24acfdcd9485b6365d013a"
    assert digest(entry) == found, "the versions before and after find another"


async def _ledger_refusal(world: RegionFixture) -> Refusal | None:
    (found,) = [each async for each in examine(world.region, world.store) if "ledger" in each.name]
    return found.refusal


@pytest.mark.parametrize("count", [5, 6])
async def test_a_start_parses_the_newest_entry_alone(
    world: RegionFixture, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """20,000 entries held the loop for 1.8 s at each start and each election."""
    await write_entries(world.region.ledger, count)
    monkeypatch.setattr(module, "PAGE", 3)
    parsed = list[LedgerEntry]()

    def count_digests(entry: LedgerEntry) -> str:
        parsed.append(entry)
        return digest(entry)

    again = Ledger(world.store, world.region.fence, world.region.clock)
    with monkeypatch.context() as patched:
        patched.setattr(module, "digest", count_digests)
        await again.start()
    assert [each.sequence for each in parsed] == [count]
    assert again.head == world.region.ledger.head
    await again.commit(LedgerWrites(drafts=(draft("g-last"),)))
    assert first_break(await again.entries_after(0), again.head) is None

"""What is known of a store that takes no writes: by whom it is asked, and when it is over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from shoal.coordinator.controllers.log.events import (
    AUDIT,
    AUDIT_ATTEMPTS,
    EVENTS,
    OVERDUE_EVICTED,
    EventLog,
    LogEvent,
)
from shoal.coordinator.ports import StaleRevision, StoreRecord, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.units import Seconds


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    found = await SqliteStore.open(tmp_path, reserve_bytes=0)
    yield found
    await found.close()


@pytest.fixture
async def log(store: SqliteStore) -> EventLog:
    found = EventLog(store, ManualClock(), kept=100, audit_kept=100)
    await found.start()
    return found


async def full(_: Transaction) -> int:
    raise ShoalError(Refusal(Code.STORE_FULL))


def code_of(log: EventLog) -> Code | None:
    return None if log.refusal is None else log.refusal.code


async def test_a_store_that_refused_is_tried_until_it_takes_a_write(
    store: SqliteStore, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", full)
        with pytest.raises(ShoalError):
            await log.write(LogEvent("MADE", "x", ""))
        await log.probe()
        assert code_of(log) is Code.STORE_FULL
    await log.probe()
    assert code_of(log) is None
    (told,) = await log.events_after(0, 10)
    assert told.code == "STORE_BACK"
    assert Code.STORE_FULL in told.message


async def test_an_audit_entry_that_was_not_taken_says_so_too(
    store: SqliteStore, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", full)
        with pytest.raises(ShoalError):
            await log.audit("op", "Logs", "", "")
    assert code_of(log) is Code.STORE_FULL
    await log.audit("op", "Logs", "", "")
    assert code_of(log) is None


async def test_a_store_that_does_not_answer_is_seen_though_nobody_writes(store: SqliteStore, log: EventLog) -> None:
    await log.probe()
    assert code_of(log) is None
    await store.close()
    await log.probe()
    assert code_of(log) is Code.STORE_UNAVAILABLE


async def test_a_sound_store_is_not_written_to(store: SqliteStore, log: EventLog) -> None:
    await log.probe()
    assert await store.scan("") == ()


async def stored_events(store: SqliteStore) -> int:
    return len(await store.scan(EVENTS))


@pytest.mark.parametrize("shared", [False, True])
async def test_events_that_a_store_refused_displace_none_and_leave_none_behind(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    log = EventLog(store, ManualClock(), kept=20, audit_kept=100, shared=shared)
    await log.start()
    for number in range(30):
        await log.write(LogEvent("MADE", f"{number}", ""))
    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", full)
            for _ in range(50):
                await log.probe()
                with pytest.raises(ShoalError):
                    await log.write(LogEvent("MADE", "refused", ""))
        assert await stored_events(store) == 20, "the outage cost none of those before it"
        await log.write(LogEvent("MADE", "back", ""))
        assert await stored_events(store) == 20
        for number in range(25):
            await log.write(LogEvent("MADE", f"{number}", ""))
        assert await stored_events(store) == 20, "each entry has one successor"


async def test_of_commits_at_once_only_the_refused_ones_give_back_what_they_displaced(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(store, ManualClock(), kept=20, audit_kept=100)
    await log.start()
    for number in range(20):
        await log.write(LogEvent("MADE", f"{number}", ""))
    commit = store.commit

    async def refuse_odd(transaction: Transaction) -> int:
        if any(b'"odd"' in value for value in transaction.puts.values()):
            await store.read(EVENTS)
            return await full(transaction)
        return await commit(transaction)

    monkeypatch.setattr(store, "commit", refuse_odd)
    await asyncio.gather(
        *(log.write(LogEvent("MADE", "odd" if number % 2 else "even", "")) for number in range(16)),
        return_exceptions=True,
    )
    assert await stored_events(store) == 20
    for _ in range(20):
        await log.write(LogEvent("MADE", "later", ""))
    assert {event.subject for event in await log.events_after(0, 1000)} == {"later"}


async def test_a_longer_log_of_before_is_cut_a_little_with_each_event(store: SqliteStore) -> None:
    """More than etcd deletes in one transaction may be left by an older version, or by a higher limit."""
    before = EventLog(store, ManualClock(), kept=1000, audit_kept=100)
    await before.start()
    await before.write(*(LogEvent("MADE", f"{number}", "") for number in range(200)))
    log = EventLog(store, ManualClock(), kept=100, audit_kept=100)
    await log.start()
    writes = await log.entries([LogEvent("MADE", "x", ""), LogEvent("MADE", "y", "")])
    assert len(writes.deletes) == 2 + OVERDUE_EVICTED
    log = EventLog(store, ManualClock(), kept=100, audit_kept=100)
    await log.start()
    for _ in range(10):
        await log.write(LogEvent("MADE", "x", ""))
    assert await stored_events(store) == 100


async def test_more_events_at_once_than_are_kept_are_cut_by_later_ones(store: SqliteStore) -> None:
    log = EventLog(store, ManualClock(), kept=10, audit_kept=100)
    await log.start()
    await log.write(*(LogEvent("MADE", f"{number}", "") for number in range(30)))
    await log.write(LogEvent("MADE", "x", ""))
    await log.write(LogEvent("MADE", "x", ""))
    assert await stored_events(store) == 10


async def test_an_entry_that_was_stored_though_its_commit_timed_out_counts_where_the_store_is_shared(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(store, ManualClock(), kept=5, audit_kept=100, shared=True)
    await log.start()
    commit = store.commit

    async def time_out(transaction: Transaction) -> int:
        await commit(transaction)
        raise ShoalError(Refusal(Code.STORE_UNAVAILABLE))

    with monkeypatch.context() as patched:
        patched.setattr(store, "commit", time_out)
        for _ in range(10):
            with pytest.raises(ShoalError):
                await log.write(LogEvent("MADE", "x", ""))
    await log.write(LogEvent("MADE", "y", ""))
    assert await stored_events(store) == 5
    assert [event.sequence for event in await log.events_after(0, 100)] == [7, 8, 9, 10, 11]


async def test_an_audit_entry_that_loses_to_others_without_end_is_refused_with_a_code(
    log: EventLog, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as the last attempt has failed: a pause and a look at the store after it would be for nothing."""
    done: list[str] = []

    async def lose(_: Transaction) -> int:
        done.append("try")
        raise StaleRevision(AUDIT)

    async def look(prefix: str, *, after: str) -> tuple[StoreRecord, ...]:
        done.append("look")
        return ()

    async def pause(_: Seconds) -> None:
        done.append("pause")

    monkeypatch.setattr(store, "commit", lose)
    monkeypatch.setattr(store, "scan", look)
    monkeypatch.setattr(log._clock, "sleep", pause)
    with pytest.raises(ShoalError, match=Code.STORE_UNAVAILABLE):
        await log.audit("op", "Apply", "x", "applied")
    assert done == ["try", *["pause", "look", "try"] * (AUDIT_ATTEMPTS - 1)]

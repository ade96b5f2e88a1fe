"""What is known of a store that takes no writes: by whom it is asked, and when it is over."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.ports import Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, Refusal, ShoalError


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

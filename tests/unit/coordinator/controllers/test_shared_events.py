"""Events of several replicas on one store: each is there once, in one order, whoever wrote it."""

from pathlib import Path

import pytest

from harness.fakes.region import SteppedClock
from shoal.coordinator.api.events import stream_events
from shoal.coordinator.controllers.log.events import EventLog, LogEvent
from shoal.coordinator.ports import StaleRevision, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError, refuse
from shoal.v1 import operator_pb2


async def test_no_number_is_taken_twice(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), SteppedClock()
    logs = [EventLog(store, clock, kept=100, audit_kept=100, shared=True) for _ in range(3)]
    for each in logs:
        await each.start()
    for number in range(4):
        for name, each in enumerate(logs):
            await each.write(LogEvent("JOINED", f"{name}-{number}", ""))
    found = await logs[0].events_after(0, 100)
    assert [event.subject for event in found] == [f"{name}-{number}" for number in range(4) for name in range(3)]
    assert [event.sequence for event in found] == list(range(1, 13))
    await store.close()


async def test_what_the_caller_expected_is_still_the_callers_to_judge(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), SteppedClock()
    log = EventLog(store, clock, kept=100, audit_kept=100, shared=True)
    await log.start()
    await log.commit({"token": b"new"}, expect={"token": 0}, events=[LogEvent("MADE", "token", "")])
    with pytest.raises(StaleRevision):
        await log.commit({"token": b"used"}, expect={"token": 0}, events=[LogEvent("USED", "token", "")])
    assert [event.code for event in await log.events_after(0, 10)] == ["MADE"]
    await store.close()


async def test_deletes_free_a_full_store_that_takes_no_event_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), SteppedClock()
    log = EventLog(store, clock, kept=100, audit_kept=100, shared=True)
    await log.start()
    await log.commit({"old": b"old"})
    commit = store.commit

    async def refuse_puts(transaction: Transaction) -> int:
        if transaction.puts:
            raise refuse(Code.STORE_FULL, "no space", "some")
        return await commit(transaction)

    monkeypatch.setattr(store, "commit", refuse_puts)
    with pytest.raises(StaleRevision):
        await log.commit({}, deletes=("old",), expect={"old": 9}, events=[LogEvent("LEFT", "old", "")])
    await log.commit({}, deletes=("old",), events=[LogEvent("LEFT", "old", "")])
    assert await store.read("old") is None
    with pytest.raises(ShoalError, match=Code.STORE_FULL):
        await log.commit({"new": b"new"}, deletes=("old",), events=[LogEvent("JOINED", "new", "")])
    await store.close()


@pytest.mark.parametrize(("limit", "first"), [(2, [3, 4]), (0, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
async def test_who_follows_is_told_no_more_of_the_past_than_asked_for(
    tmp_path: Path, limit: int, first: list[int]
) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), SteppedClock()
    log = EventLog(store, clock, kept=100, audit_kept=100)
    await log.start()
    for number in range(4):
        await log.write(LogEvent("JOINED", f"{number}", ""))
    told = stream_events(log, operator_pb2.EventsRequest(follow=True, limit=limit))
    assert [(await anext(told)).sequence for _ in first] == first
    await log.write(LogEvent("JOINED", "new", ""))
    assert (await anext(told)).subject == "new"
    await store.close()

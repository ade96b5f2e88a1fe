"""Events of several replicas on one store: each is there once, in one order, whoever wrote it."""

from pathlib import Path

import pytest

from harness.region import ManualClock
from shoal.coordinator.controllers.events import Event, EventLog
from shoal.coordinator.ports import StaleRevision
from shoal.coordinator.store.sqlite import SqliteStore


async def test_no_number_is_taken_twice(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), ManualClock()
    logs = [EventLog(store, clock, kept=100, audit_kept=100, shared=True) for _ in range(3)]
    for each in logs:
        await each.start()
    for number in range(4):
        for name, each in enumerate(logs):
            await each.write(Event("JOINED", f"{name}-{number}", ""))
    found = await logs[0].past(0, 100)
    assert [event.subject for event in found] == [f"{name}-{number}" for number in range(4) for name in range(3)]
    assert [event.sequence for event in found] == list(range(1, 13))
    await store.close()


async def test_what_the_caller_expected_is_still_the_callers_to_judge(tmp_path: Path) -> None:
    store, clock = await SqliteStore.open(tmp_path, reserve_bytes=0), ManualClock()
    log = EventLog(store, clock, kept=100, audit_kept=100, shared=True)
    await log.start()
    await log.commit({"token": b"new"}, expect={"token": 0}, events=[Event("MADE", "token", "")])
    with pytest.raises(StaleRevision):
        await log.commit({"token": b"used"}, expect={"token": 0}, events=[Event("USED", "token", "")])
    assert [event.code for event in await log.past(0, 10)] == ["MADE"]
    await store.close()

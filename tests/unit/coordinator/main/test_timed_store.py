"""What a store's operations take is on the page that Prometheus reads, whatever became of them."""

from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from shoal.coordinator import metrics
from shoal.coordinator.ports import StaleRevision, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.coordinator.telemetry.metrics import PrometheusMeter
from shoal.coordinator.telemetry.store import TimedStore


async def test_operations_are_timed_and_those_that_fail_too(tmp_path: Path) -> None:
    meter = PrometheusMeter(metrics.REGION)
    store = TimedStore(await SqliteStore.open(tmp_path, reserve_bytes=0), ManualClock(), meter.observe_store)
    await store.commit(Transaction({"a": b"1"}))
    with pytest.raises(StaleRevision):
        await store.commit(Transaction({"a": b"2"}, expect={"a": 0}))
    assert await store.scan("") == (await store.snapshot()).records == (await store.read("a"),)
    await store.close()
    said = meter.text()
    for operation, times in (("commit", 2), ("read", 1), ("scan", 1), ("snapshot", 1)):
        assert f'shoal_coordinator_store_seconds_count{{operation="{operation}"}} {times}.0' in said

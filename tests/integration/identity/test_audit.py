"""An audit log that somebody edited in the store, checksums and all: `shoal doctor` names the first bad entry."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.agents import api
from harness.cluster.coordinator import CoordinatorServer
from shoal.coordinator import codec
from shoal.coordinator.controllers.log.events import AUDIT, AuditEntry
from shoal.coordinator.ports import StoreRecord, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

Edit = Callable[[Sequence[StoreRecord]], Transaction]


def blame_another(entries: Sequence[StoreRecord]) -> Transaction:
    """Somebody else is said to have done it."""
    entry = codec.load(AuditEntry, entries[2].value)
    return Transaction({entries[2].key: codec.dump(replace(entry, actor="shoal://eu/operator/bob"))})


def drop_entry(entries: Sequence[StoreRecord]) -> Transaction:
    return Transaction(deletes=(entries[2].key,))


def unreadable(entries: Sequence[StoreRecord]) -> Transaction:
    return Transaction({entries[3].key: b"{}"})


def audit_check(coordinator: CoordinatorServer) -> operator_pb2.Check:
    with api(coordinator) as operator:
        return next(check for check in operator.doctor().checks if "audit" in check.name)


@pytest.fixture
def coordinator(tmp_path: Path) -> CoordinatorServer:
    """Stopped, after some acts of its operator."""
    found = CoordinatorServer(tmp_path)
    found.start()
    with api(found) as operator:
        for number in range(5):
            operator.create_token("agent", f"edge-{number}", 60.0)
    assert audit_check(found).ok
    assert found.end() == 0
    return found


@pytest.mark.parametrize("edit", [blame_another, drop_entry, unreadable], ids=lambda edit: edit.__name__)
def test_an_edited_audit_log_is_told_with_its_first_bad_entry(coordinator: CoordinatorServer, edit: Edit) -> None:
    async def tamper() -> int:
        store = await SqliteStore.open(coordinator.data / "store")
        entries = await store.scan(AUDIT)
        await store.commit(edit(entries))
        await store.close()
        return codec.load(AuditEntry, entries[3].value).sequence

    first_bad = asyncio.run(tamper())
    coordinator.start()
    try:
        check = audit_check(coordinator)
        assert not check.ok
        assert check.refusal.code == Code.STATE_CORRUPT
        assert f"entry {first_bad} " in check.refusal.found
        assert check.refusal.remedy
    finally:
        assert coordinator.end() == 0

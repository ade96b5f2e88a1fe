"""Going back to a copy of the store: by the tool, and by who copies files (F16)."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.fakes.clock import ManualClock
from harness.fakes.meter import RecordedMeter
from harness.fakes.region import RegionFixture
from harness.wait import until
from shoal.artifacts.backup import Backup
from shoal.coordinator import metrics
from shoal.coordinator.api.backup import BackupModels, Backups
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.log.events import LogEvent
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.main.backups import BackupSchedule, keyring_of
from shoal.coordinator.main.restore import RestoreConfig
from shoal.coordinator.main.restore import restore as put_back
from shoal.coordinator.ports import StoreOptions, StoreRecord, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Bytes, Seconds

SECRET = b"a secret of enough bytes"


def restore(
    region: str, folder: Path, copy: Path, *, replace: bool = True, role: str = "region", key_file: Path | None = None
) -> dict[str, object]:
    options = StoreOptions(folder / "store", f"{role}/{region}")
    return put_back(RestoreConfig(role, region, folder, folder, copy, "sqlite", options, replace, key_file))


async def store_and_copy(folder: Path) -> tuple[Path, str]:
    """An earlier copy of a region's store, which goes on after it; its history."""
    world = await RegionFixture.open(folder / "store")
    copy = await world.store.backup()
    await world.region.events.write(LogEvent("LATER", "x", ""))
    await world.store.backup()
    await world.store.close()
    return copy, world.region.fence.history


async def history_and_events(folder: Path) -> tuple[str, list[str]]:
    """The history, and the events, that a coordinator finds."""
    world = await RegionFixture.open(folder / "store")
    found = world.region.fence.history, [event.code for event in await world.region.events.events_after(0, 100)]
    await world.store.close()
    return found


def test_f16_the_tool_puts_a_copy_in_place_with_a_history_of_its_own(tmp_path: Path) -> None:
    copy, history = asyncio.run(store_and_copy(tmp_path))
    said = restore("eu", tmp_path, copy)
    found, events = asyncio.run(history_and_events(tmp_path))
    assert said == {"event": "restored", "from": copy.name, "history": found, "replaced": "state.db.replaced-1"}
    assert found != history
    assert events == ["HISTORY_OPENED", "HISTORY_OPENED"]
    left = sorted(path.name for path in (tmp_path / "store" / "backups").iterdir())
    assert [name.partition("-")[0] for name in left] == ["newer", "state"]
    assert not (tmp_path / "store" / "restoring").exists()


def test_f16_a_store_that_is_older_than_its_copies_says_so(tmp_path: Path) -> None:
    copy, _ = asyncio.run(store_and_copy(tmp_path))

    async def recovery_codes() -> tuple[Code | None, Code | None]:
        found = []
        for _ in range(2):
            store = await SqliteStore.open(tmp_path / "store")
            found.append(store.recovery.code if store.recovery else None)
            await store.close()
        return found[0], found[1]

    assert asyncio.run(recovery_codes()) == (None, None)
    shutil.copy(copy, tmp_path / "store" / "state.db")
    assert asyncio.run(recovery_codes()) == (Code.STORE_CORRUPT, None), "once"


def test_f16_what_the_tool_refuses_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    copy, history = asyncio.run(store_and_copy(tmp_path))
    damaged, other = tmp_path / "damaged.db", tmp_path / "other"
    damaged.write_bytes(copy.read_bytes()[:-4096] + bytes(4096))

    async def empty() -> Path:
        store = await SqliteStore.open(other)
        made = await store.backup()
        await store.close()
        return made

    refused = {
        Code.NOT_FOUND: ("eu", tmp_path / "nowhere.db"),
        Code.STORE_CORRUPT: ("eu", damaged),
        Code.REGION_MISMATCH: ("us", copy),
    }
    for code, (region, source) in refused.items():
        with pytest.raises(ShoalError) as error:
            restore(region, tmp_path, source)
        assert error.value.code is code
    with pytest.raises(ShoalError) as nothing:
        restore("eu", tmp_path, asyncio.run(empty()))
    assert nothing.value.code is Code.STORE_CORRUPT

    running = asyncio.run(SqliteStore.open(tmp_path / "store"))
    with pytest.raises(ShoalError) as busy:
        restore("eu", tmp_path, copy)
    assert busy.value.code is Code.STORE_UNAVAILABLE
    asyncio.run(running.close())
    found, events = asyncio.run(history_and_events(tmp_path))
    assert (found, events[-1]) == (history, "LATER")


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    return path


def authority(folder: Path, *, may_create: bool = False) -> FileAuthority:
    return FileAuthority.open(folder / "ca", "eu", wall=CoordinatorClock().wall(), may_create=may_create)


async def make_backup(folder: Path, file: Path, *, secret: bytes = SECRET) -> tuple[tuple[StoreRecord, ...], str]:
    """What a region's store held, and its history; its backup is `file`. It has a CA, a model, and too many records for
    one transaction."""
    authority(folder, may_create=True)
    world = await RegionFixture.open(folder / "store")
    await world.store.commit(Transaction({f"filler/{number:05}": bytes(100) for number in range(2500)}))
    blobs = DirectoryBlobs(folder / "models", Bytes(10_000))
    content = b"onnx" * 100
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    await blobs.write(chunks(), size=Bytes(len(content)), digest=digest)
    models = BackupModels(blobs, lambda: (digest, "sha256:" + "0" * 64))
    backups = Backups(
        "region", "eu", "sqlite", world.store, CoordinatorClock(), keyring_of(folder / "ca"), secret, models
    )
    file.write_bytes(b"".join([piece async for piece in backups.stream(models=True)]))
    records = await world.store.scan("")
    await world.region.events.write(LogEvent("LATER", "x", ""))
    await world.store.close()
    return records, world.region.fence.history


async def read_store(folder: Path) -> dict[str, bytes]:
    store = await SqliteStore.open(folder / "store")
    try:
        return {record.key: record.value for record in await store.scan("")}
    finally:
        await store.close()


def test_a_backup_goes_into_a_folder_that_was_wiped_keys_and_models_too(tmp_path: Path, key_file: Path) -> None:
    folder, file = tmp_path / "data", tmp_path / "b.tar"
    records, history = asyncio.run(make_backup(folder, file))
    fingerprint = authority(folder).fingerprint
    models = {path.name: path.read_bytes() for path in (folder / "models").iterdir() if path.is_file()}
    shutil.rmtree(folder)
    said = restore("eu", folder, file, replace=False, key_file=key_file)
    assert (said["ca"], said["models"], said["records"], said["replaced"]) == ("restored", 1, len(records), "")
    assert authority(folder).fingerprint == fingerprint
    assert {path.stat().st_mode & 0o077 for path in (folder / "ca").iterdir()} == {0}
    assert {path.name: path.read_bytes() for path in (folder / "models").iterdir() if path.is_file()} == models
    found = asyncio.run(read_store(folder))
    before = {record.key: record.value for record in records}
    new = found.keys() - before.keys()
    assert {key for key in found if found[key] != before.get(key)} == {"region", "clock", *new}
    assert all(key.startswith("events/") for key in found.keys() - before.keys())
    assert before.keys() <= found.keys()
    assert asyncio.run(history_and_events(folder))[0] == said["history"] != history


def test_a_store_that_is_there_is_replaced_only_where_that_is_said(tmp_path: Path, key_file: Path) -> None:
    folder, file = tmp_path / "data", tmp_path / "b.tar"
    asyncio.run(make_backup(folder, file))
    before = asyncio.run(read_store(folder))
    with pytest.raises(ShoalError) as refused:
        restore("eu", folder, file, replace=False, key_file=key_file)
    assert refused.value.code is Code.CONFLICT
    assert asyncio.run(read_store(folder)) == before
    said = restore("eu", folder, file)
    assert (said["replaced"], said["ca"]) == ("state.db.replaced-1", "kept")
    _, events = asyncio.run(history_and_events(folder))
    assert "LATER" not in events
    assert not (folder / "store" / "restoring").exists()


def test_what_a_backup_cannot_be_put_back_for_leaves_everything_as_it_was(tmp_path: Path, key_file: Path) -> None:
    folder, file, bare = tmp_path / "data", tmp_path / "b.tar", tmp_path / "bare.tar"
    asyncio.run(make_backup(folder, file))
    asyncio.run(make_backup(tmp_path / "other", bare, secret=b""))
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(file.read_bytes()[:-9000])
    before = asyncio.run(read_store(folder))
    empty = tmp_path / "empty"
    for code, into, copy, region, key in (
        (Code.STATE_CORRUPT, folder, damaged, "eu", key_file),
        (Code.REGION_MISMATCH, folder, file, "us", key_file),
        (Code.STATE_CORRUPT, empty, file, "eu", None),  # nobody would know its CA
        (Code.STATE_CORRUPT, empty, bare, "eu", key_file),
    ):
        with pytest.raises(ShoalError) as refused:
            restore(region, into, copy, key_file=key)
        assert refused.value.code is code, (into, copy)
    with pytest.raises(ShoalError) as role:
        restore("eu", folder, file, role="federation")
    assert role.value.code is Code.REGION_MISMATCH
    assert asyncio.run(read_store(folder)) == before
    assert not (empty / "store" / "state.db").exists()


def test_another_ca_is_set_aside_and_one_that_followed_is_kept(tmp_path: Path, key_file: Path) -> None:
    folder, file = tmp_path / "data", tmp_path / "b.tar"
    asyncio.run(make_backup(folder, file))
    first = authority(folder)
    wall = CoordinatorClock().wall()
    asyncio.run(first.begin(wall))
    assert restore("eu", folder, file, key_file=key_file)["ca"] == "kept"
    assert authority(folder).stage == "trust", "the rotation goes on"
    shutil.rmtree(folder / "ca")
    made = authority(folder, may_create=True).fingerprint
    with pytest.raises(ShoalError) as refused:
        restore("eu", tmp_path / "none", file, key_file=tmp_path / "no-secret")
    assert refused.value.code is Code.FIELD_INVALID
    assert restore("eu", folder, file, key_file=key_file)["ca"] == "replaced"
    assert authority(folder).fingerprint != made
    assert (folder / "ca.replaced-1" / "key.pem").exists()


class Yielding(ManualClock):
    """Moves as far as anybody wants to sleep, and lets others have their turn."""

    async def sleep(self, seconds: Seconds) -> None:
        self.advance(seconds)
        await asyncio.sleep(0.0)  # noqa: TID251


async def test_a_folder_that_cannot_be_is_counted_as_any_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    world, clock, meter = await RegionFixture.open(tmp_path / "store"), Yielding(), RecordedMeter()
    backups = Backups("region", "eu", "sqlite", world.store, clock, dict, b"")
    running = asyncio.ensure_future(BackupSchedule(tmp_path / "file" / "none", 100.0, 3, backups, clock, meter).run())
    await until(lambda: meter.counts or running.done(), 20.0, "one that fails")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.store.close()
    assert meter.counts.keys() == {(metrics.BACKUPS_FAILED, (Code.DISK_FULL,))}


async def test_a_schedule_keeps_the_newest_and_counts_what_fails(tmp_path: Path) -> None:
    world, clock, meter = await RegionFixture.open(tmp_path / "store"), Yielding(), RecordedMeter()
    backups = Backups("region", "eu", "sqlite", world.store, clock, dict, b"")
    folder, began = tmp_path / "archive", clock.wall()
    schedule = BackupSchedule(folder, 100.0, 3, backups, clock, meter)
    await schedule.make()
    running = asyncio.ensure_future(schedule.run())  # this clock waits for nobody
    await until(lambda: schedule.made_at >= began + 500.0, 20.0, "backups, 100 s apart")
    await world.store.close()
    await until(lambda: meter.counts, 20.0, "one that fails")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    kept = sorted(folder.glob("*.tar"))
    made = [Backup.open(path).manifest.made_at for path in kept]
    assert len(kept) == 3
    assert made == [schedule.made_at - 200.0, schedule.made_at - 100.0, schedule.made_at]
    assert meter.counts.keys() == {(metrics.BACKUPS_FAILED, (Code.STORE_UNAVAILABLE,))}
    assert {path.stat().st_mode & 0o077 for path in kept} == {0}
    assert [path.name for path in folder.glob(".*")] == []

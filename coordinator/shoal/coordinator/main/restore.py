"""`shoal-coordinator restore`: puts a backup, or a copy of the SQLite file, in the store's place, with a new history.

Models come first, then the CA's keys, then the store, so the same command completes an interrupted restore. In etcd,
the record `RESTORE_KEY` marks a restore until it is complete; no coordinator serves from the store before.
"""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from shoal.artifacts.backup import Backup, Keyring, read_secret
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.log.fencing import RegionFence
from shoal.coordinator.controllers.log.region_clock import RegionClock
from shoal.coordinator.controllers.region.region import NoMeter, RegionConfig
from shoal.coordinator.main.backups import keyring_of
from shoal.coordinator.main.federation import NAME_KEY
from shoal.coordinator.main.serving import RESTORE_KEY, open_store
from shoal.coordinator.ports import OpenStore, Store, StoreOptions, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.coordinator.store.sqlite_file import create_from_copy, put_in_place
from shoal.host.private_files import write_private
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes
from shoal.wire.limits import CHUNK_BYTES, MODEL_BYTES

BATCH: Final = 1000
"""Records in one transaction."""
BATCH_BYTES: Final = 2 * 2**20
ELECTED_WITHIN_S: Final = 5.0
_SQLITE: Final = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class RestoreConfig:
    """Settings of `shoal-coordinator restore`."""

    # "region" or "federation".
    role: str
    # Name of the region or federation, which must be the backup's.
    region: str
    # Folder of the SQLite store, and of what else the coordinator keeps.
    data_dir: Path
    # Folder of CA and models.
    shared_dir: Path
    # The backup, or the copy of a region's SQLite file.
    copy: Path
    # Entry point name of the store to fill: "sqlite" or "etcd".
    store: str
    # Where the store is, and its settings.
    store_options: StoreOptions
    # True: replace an existing store or CA. Replaced files stay beside the new ones; replaced etcd records are deleted.
    replace: bool = False
    # File of the secret that the CA's keys were sealed with; None: restore no keys.
    key_file: Path | None = None


def restore(config: RestoreConfig) -> dict[str, object]:
    """Restores and returns a summary. The coordinator must not run; a refused restore leaves everything unchanged.

    Raises ShoalError(STORE_CORRUPT | STATE_CORRUPT | STORE_UNAVAILABLE | REGION_MISMATCH | NOT_FOUND | CONFLICT | ..).
    """
    if not config.copy.is_file():
        raise refuse(Code.NOT_FOUND, str(config.copy), "a backup, or a copy of the store", "see store/backups/")
    with config.copy.open("rb") as file:
        of_file = file.read(len(_SQLITE)) == _SQLITE
    if config.store == "sqlite" and not config.replace and (config.data_dir / "store" / "state.db").exists():
        raise _not_empty(f"{config.data_dir / 'store'} holds a store")
    if of_file:
        return _from_copy(config)
    backup = Backup.open(config.copy)
    found = (backup.manifest.role, backup.manifest.name)
    if found != (config.role, config.region):
        raise refuse(
            Code.REGION_MISMATCH, f"a backup of {' '.join(found)}", f"one of {config.role} {config.region}",
            f"start with --role {found[0]} --region {found[1]}",
        )  # fmt: skip
    keyring, ca = _keys_to_write(config, backup)
    asyncio.run(_put_models(config, backup))
    history, aside = (_into_file if config.store == "sqlite" else _into_servers)(config, backup, keyring)
    return {
        "event": "restored", "from": config.copy.name, "revision": backup.manifest.revision,
        "records": backup.manifest.records, "models": len(backup.manifest.models), "ca": ca, "history": history,
        "replaced": aside,
    }  # fmt: skip


def _from_copy(config: RestoreConfig) -> dict[str, object]:
    if (config.store, config.role) != ("sqlite", "region"):
        raise refuse(
            Code.FIELD_INVALID, "a copy of a region's SQLite file", "a backup", "see `shoal backup`, --archive-dir"
        )
    directory = config.data_dir / "store"
    with _staging_folder(directory) as unfinished:
        revision = create_from_copy(config.copy, unfinished)
        history = asyncio.run(_open_history_in_file(config, unfinished))
        aside = put_in_place(unfinished / "state.db", directory, revision)
    return {"event": "restored", "from": config.copy.name, "history": history, "replaced": aside.name if aside else ""}


def _into_file(config: RestoreConfig, backup: Backup, keyring: Keyring | None) -> tuple[str, str]:
    """The new history, and the file that the previous store was moved to; empty if there was none."""
    directory = config.data_dir / "store"
    with _staging_folder(directory) as unfinished:
        history = asyncio.run(_fill_file(config, unfinished, backup))
        _put_keys(config.shared_dir / "ca", keyring)
        # Revision 0: a restored store has revisions of its own, so no copy of another store is a copy of this one.
        aside = put_in_place(unfinished / "state.db", directory, 0)
    return history, aside.name if aside else ""


async def _fill_file(config: RestoreConfig, directory: Path, backup: Backup) -> str:
    store = await SqliteStore.open(directory, reserve_bytes=0)
    try:
        for puts in _batches(backup.records()):
            await store.commit(Transaction(puts))
        return await _open_history(config, store)
    finally:
        await store.close()


async def _open_history_in_file(config: RestoreConfig, directory: Path) -> str:
    """Opens the new history before the store is put in place, so that no coordinator ever leads from the copy as it
    was."""
    store = await SqliteStore.open(directory, reserve_bytes=0)
    try:
        return await _open_history(config, store)
    finally:
        await store.close()


def _into_servers(config: RestoreConfig, backup: Backup, keyring: Keyring | None) -> tuple[str, str]:
    return asyncio.run(_fill_servers(config, backup, keyring)), ""


async def _fill_servers(config: RestoreConfig, backup: Backup, keyring: Keyring | None) -> str:
    store = await open_store(config)
    try:
        async with _hold_election(store):
            there = [record.key for record in (await store.snapshot()).records]
            if there and RESTORE_KEY not in there and not config.replace:
                raise _not_empty(f"{len(there)} records under {config.store_options.scope}")
            await store.commit(Transaction({RESTORE_KEY: config.copy.name.encode()}))
            _put_keys(config.shared_dir / "ca", keyring)
            gone = [key for key in there if key != RESTORE_KEY]
            for start in range(0, len(gone), BATCH):
                await store.commit(Transaction(deletes=tuple(gone[start : start + BATCH])))
            for puts in _batches(backup.records()):
                await store.commit(Transaction(puts))
            history = await _open_history(config, store)
            await store.commit(Transaction(deletes=(RESTORE_KEY,)))
            return history
    finally:
        await store.close()


@asynccontextmanager
async def _hold_election(store: OpenStore) -> AsyncIterator[None]:
    """Holds leadership meanwhile, so that no coordinator can be elected. Raises ShoalError(CONFLICT) if one leads
    already."""
    election = store.election(b"restore")
    try:
        async with asyncio.timeout(ELECTED_WITHIN_S):
            await election.campaign()
    except TimeoutError as cause:
        raise refuse(
            Code.CONFLICT, "a coordinator leads from this store", "a store that nobody uses", "stop its coordinators"
        ) from cause
    holding = asyncio.ensure_future(election.wait_lost())
    try:
        yield
    finally:
        holding.cancel()
        await election.resign()


async def _open_history(config: RestoreConfig, store: Store) -> str:
    """A region's new history; empty for a federation, which has none."""
    name = config.copy.name
    if config.role == "federation":
        said = await store.read(NAME_KEY)
        if said is None or said.value.decode() != config.region:
            raise refuse(Code.STORE_CORRUPT, f"{name} holds no federation", config.region, "choose another copy")
        return ""
    clock, defaults = CoordinatorClock(), RegionConfig(config.region)
    events = EventLog(store, clock, kept=defaults.events_kept, audit_kept=defaults.audit_kept)
    truth = RegionFence(config.region, store, events, RegionClock(clock), SystemIds(), NoMeter())
    await truth.start()
    await events.start()
    if not truth.history:
        asked = f"the state of {config.region}"
        raise refuse(Code.STORE_CORRUPT, f"{name} holds no region", asked, "choose another copy")
    await truth.open_history(f"restored by hand from {name}")
    return truth.history


async def _put_models(config: RestoreConfig, backup: Backup) -> None:
    blobs = DirectoryBlobs(config.shared_dir / "models", Bytes(MODEL_BYTES))
    for digest, size in backup.manifest.models.items():
        if await blobs.stat(digest) != size:
            await blobs.write(_aiter(backup.model(digest, CHUNK_BYTES)), size=Bytes(size), digest=digest)


def _keys_to_write(config: RestoreConfig, backup: Backup) -> tuple[Keyring | None, str]:
    """The keyring to write into `ca/` (None: the keys there stay), and a word for the summary."""
    folder = config.shared_dir / "ca"
    there = keyring_of(folder)() if folder.is_dir() else {}
    known = _certificates(there)
    if config.key_file is not None and backup.manifest.keys:
        keyring = backup.keys(read_secret(config.key_file))
        if not known:
            return keyring, "restored"
        if not known.isdisjoint(_certificates(keyring)):
            return None, "kept"  # the same CA, or a successor of the one in the backup
        if not config.replace:
            raise _not_empty(f"{folder} holds another CA")
        return keyring, "replaced"
    if not known:
        raise refuse(
            Code.STATE_CORRUPT,
            f"no CA in {folder}, and {'sealed keys' if backup.manifest.keys else 'no keys'} in {backup.path.name}",
            "the CA's keys",
            "give --backup-key-file" if backup.manifest.keys else f"put {folder} back first",
        )
    return None, "kept"


def _certificates(keyring: Keyring) -> set[bytes]:
    return {content for name, content in keyring.items() if Path(name).name == "cert.pem"}


def _put_keys(folder: Path, keyring: Keyring | None) -> None:
    if keyring is None:
        return
    if folder.exists():
        aside = (folder.with_name(f"{folder.name}.replaced-{number}") for number in count(1))
        folder.rename(next(path for path in aside if not path.exists()))
    # A folder without a certificate is no CA, so the certificate is written last.
    for name in sorted(keyring, key=lambda name: Path(name).name == "cert.pem"):
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise refuse(Code.STATE_CORRUPT, f"a key file {name!r:.80}", "a name in ca/", "use another copy")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, keyring[name])


def _batches(records: Iterable[tuple[str, bytes]]) -> Iterator[dict[str, bytes]]:
    puts, size = dict[str, bytes](), 0
    for key, value in records:
        if puts and (len(puts) == BATCH or size + len(value) > BATCH_BYTES):
            yield puts
            puts, size = {}, 0
        puts[key] = value
        size += len(value)
    if puts:
        yield puts


async def _aiter(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@contextmanager
def _staging_folder(directory: Path) -> Iterator[Path]:
    """A folder for files that are not in place yet. Raises ShoalError(STORE_UNAVAILABLE) for errors of the disk and
    SQLite."""
    unfinished = directory / "restoring"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(unfinished, ignore_errors=True)
        yield unfinished
    except (OSError, sqlite3.Error) as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE,
            f"{directory}: {cause}",
            "a store that nobody has open",
            "stop its coordinator first",
        ) from cause
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _not_empty(found: str) -> ShoalError:
    return refuse(Code.CONFLICT, found, "an empty one", "add --replace to put the backup in its place")

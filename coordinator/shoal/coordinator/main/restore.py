"""`shoal-coordinator restore`: a copy of the store in its place, and with it a new history."""

import asyncio
import shutil
import sqlite3
from pathlib import Path

from shoal.coordinator.clock import SystemClock, SystemIds
from shoal.coordinator.controllers.events import EventLog
from shoal.coordinator.controllers.region import NoMeter, RegionConfig
from shoal.coordinator.controllers.truth import Truth
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.coordinator.store.sqlite_file import lay_out, put_in_place
from shoal.types.codes import Code, refuse


def restore(region: str, data_dir: Path, copy: Path) -> dict[str, object]:
    """What is said of it. The coordinator must not run; whatever fails leaves its store as it was.

    Raises ShoalError(STORE_CORRUPT | STORE_UNAVAILABLE | REGION_MISMATCH | NOT_FOUND)."""
    if not copy.is_file():
        raise refuse(Code.NOT_FOUND, str(copy), "a copy of the store", f"see {data_dir}/store/backups/")
    directory = data_dir / "store"
    unfinished = directory / "restoring"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        revision = lay_out(copy, unfinished)
        history = asyncio.run(_begin_history(region, unfinished, copy.name))
        aside = put_in_place(unfinished / "state.db", directory, revision)
    except (OSError, sqlite3.Error) as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE,
            f"{directory}: {cause}",
            "a store that nobody has open",
            "stop its coordinator first",
        ) from cause
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"event": "restored", "from": copy.name, "history": history, "replaced": aside.name if aside else ""}


async def _begin_history(region: str, directory: Path, name: str) -> str:
    """In the store that is about to be put in place, so that no coordinator ever leads from the copy as it was."""
    store = await SqliteStore.open(directory, reserve_bytes=0)
    try:
        clock, config = SystemClock(), RegionConfig(region)
        events = EventLog(store, clock, kept=config.events_kept, audit_kept=config.audit_kept)
        truth = Truth(region, store, events, SystemIds(), NoMeter())
        await truth.start()
        await events.start()
        if not truth.history:
            raise refuse(Code.STORE_CORRUPT, f"{name} holds no region", f"the state of {region}", "choose another copy")
        await truth.open_history(f"restored by hand from {name}")
        return truth.history
    finally:
        await store.close()

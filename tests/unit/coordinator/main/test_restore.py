"""Going back to a copy of the store: by the tool, and by who copies files (F16)."""

import asyncio
import shutil
from pathlib import Path

import pytest

from harness.region import World
from shoal.coordinator.controllers.events import Event
from shoal.coordinator.main.restore import restore
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError


async def lived(folder: Path) -> tuple[Path, str]:
    """An earlier copy of a region's store, which goes on after it; its history."""
    world = await World.open(folder / "store")
    copy = await world.store.backup()
    await world.region.events.write(Event("LATER", "x", ""))
    await world.store.backup()
    await world.store.close()
    return copy, world.region.truth.history


async def told(folder: Path) -> tuple[str, list[str]]:
    """The history, and the events, that a coordinator finds."""
    world = await World.open(folder / "store")
    found = world.region.truth.history, [event.code for event in await world.region.events.past(0, 100)]
    await world.store.close()
    return found


def test_f16_the_tool_puts_a_copy_in_place_with_a_history_of_its_own(tmp_path: Path) -> None:
    copy, history = asyncio.run(lived(tmp_path))
    said = restore("eu", tmp_path, copy)
    found, events = asyncio.run(told(tmp_path))
    assert said == {"event": "restored", "from": copy.name, "history": found, "replaced": "state.db.replaced-1"}
    assert found != history
    assert events == ["HISTORY_OPENED", "HISTORY_OPENED"]
    left = sorted(path.name for path in (tmp_path / "store" / "backups").iterdir())
    assert [name.partition("-")[0] for name in left] == ["newer", "state"]
    assert not (tmp_path / "store" / "restoring").exists()


def test_f16_a_store_that_is_older_than_its_copies_says_so(tmp_path: Path) -> None:
    copy, _ = asyncio.run(lived(tmp_path))

    async def opened() -> tuple[Code | None, Code | None]:
        found = []
        for _ in range(2):
            store = await SqliteStore.open(tmp_path / "store")
            found.append(store.recovery.code if store.recovery else None)
            await store.close()
        return found[0], found[1]

    assert asyncio.run(opened()) == (None, None)
    shutil.copy(copy, tmp_path / "store" / "state.db")
    assert asyncio.run(opened()) == (Code.STORE_CORRUPT, None), "once"


def test_f16_what_the_tool_refuses_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    copy, history = asyncio.run(lived(tmp_path))
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
    found, events = asyncio.run(told(tmp_path))
    assert (found, events[-1]) == (history, "LATER")

"""A process that writes to a coordinator's CA and store and reports what was acknowledged; run as `python -m`.

A transaction follows from its number alone, so that a reader of the remains knows what must be there.
"""

import asyncio
import ctypes
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.faults.disk import SeededRng
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Store, Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import ShoalError
from shoal.types.units import Wall

REGION = "eu"
WALL = Wall(1_800_000_000.0)
RESERVE_BYTES = 64 * 2**10


def transaction(number: int) -> Transaction:
    """One to three puts of up to 12 KiB and up to one delete among 40 keys."""
    chance = SeededRng(number)
    keys = [f"k/{chance.below(40):02}" for _ in range(1 + chance.below(3))]
    puts = {key: bytes([number % 251]) * chance.below(12 * 2**10) for key in keys}
    deletes = tuple(key for key in (f"k/{chance.below(40):02}",) if key not in puts)
    return Transaction(puts, deletes)


def states(count: int) -> list[Mapping[str, bytes]]:
    """The content after 0, 1, .. `count` transactions."""
    found: list[Mapping[str, bytes]] = [{}]
    for number in range(count):
        step = transaction(number)
        found.append({key: value for key, value in found[-1].items() if key not in step.deletes} | dict(step.puts))
    return found


async def content(store: Store) -> Mapping[str, bytes]:
    return {record.key: record.value for record in await store.scan("")}


def open_authority(root: Path) -> FileAuthority:
    return FileAuthority.open(root / "ca", REGION, wall=WALL, may_create=True)


async def write(root: Path, count: int) -> None:
    """Acknowledges the CA with its fingerprint, then each transaction with its number, in the file `acks`."""
    acks = os.open(root / "acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(acks, f"{open_authority(root).fingerprint}\n".encode())
    store = await SqliteStore.open(root / "store", reserve_bytes=RESERVE_BYTES)
    for number in range(count):
        await store.commit(transaction(number))
        os.write(acks, f"{number}\n".encode())
        if number % 40 == 39:
            await store.backup()
    os._exit(0)  # no tidy end: the last cut finds the WAL as it is


async def fill(root: Path, library: str) -> None:
    """A disk that is full at each write in turn: prints for each amount of room what became of one transaction."""
    disk = ctypes.CDLL(library)
    disk.disk_available.argtypes = [ctypes.c_int64]
    store = await SqliteStore.open(root / "store", reserve_bytes=RESERVE_BYTES)
    expected: dict[str, bytes] = {}
    for number in range(60):
        step = transaction(number)
        await store.commit(step)
        expected = {key: value for key, value in expected.items() if key not in step.deletes} | dict(step.puts)
    report = {"refused": 0, "kept": 0, "partial": 0, "unread": 0, "deletes": 0, "stuck": 0}
    growing = Transaction({f"big/{number}": b"x" * 40_000 for number in range(8)})
    rooms = range(0, 1_200_000, 4_096 * 5 // 2)
    await store.commit(Transaction({f"old/{room}": b"o" * 20_000 for room in rooms}))
    for room in rooms:
        await store.close()
        store = await SqliteStore.open(root / "store", reserve_bytes=RESERVE_BYTES)
        disk.disk_available(room)
        before = await content(store)
        try:
            await store.commit(growing)
            report["kept"] += 1
            now: Mapping[str, bytes] = {**before, **growing.puts}
        except ShoalError as error:
            report["refused"] += error.code == "STORE_FULL"
            now = before
        found = await content(store)
        report["partial"] += found != now
        report["unread"] += not found
        disk.disk_available(0)
        try:
            await store.commit(Transaction(deletes=(f"old/{room}", *growing.puts)))
            report["deletes"] += await store.read(f"old/{room}") is None
        except ShoalError:
            report["stuck"] += 1
        disk.disk_available(-1)
        await store.commit(Transaction({"alive": b"%d" % room}))
    await store.close()
    store = await SqliteStore.open(root / "store", reserve_bytes=RESERVE_BYTES)
    report["sound"] = int(store.recovery is None)
    report["same"] = int({k: v for k, v in (await content(store)).items() if k != "alive"} == dict(expected))
    await store.close()
    print(json.dumps(report))


async def flush(root: Path, library: str) -> None:
    """A disk that fails flushes, and then works again: prints which of the keys were acknowledged."""
    disk = ctypes.CDLL(library)
    store = await SqliteStore.open(root / "store", reserve_bytes=0)
    acknowledged = []

    async def commit(key: str, size: int) -> None:
        with suppress(ShoalError):
            await store.commit(Transaction({key: b"x" * size}))
            acknowledged.append(key)

    await commit("before the copy", 1)
    await store.backup()
    await commit("after the copy", 1)
    for size in (400_000, 200_000, 100_000):
        disk.disk_fails_flushes(1)
        await commit(f"refused {size}", size)
        disk.disk_fails_flushes(0)
        await commit(f"after {size}", 1)
    print(json.dumps(acknowledged), flush=True)
    os._exit(0)  # no tidy end: the next start finds the WAL as it is


RUNS = {"fill": fill, "flush": flush}

if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "write":
        asyncio.run(write(folder, int(sys.argv[3])))
    else:
        asyncio.run(RUNS[sys.argv[1]](folder, sys.argv[3]))

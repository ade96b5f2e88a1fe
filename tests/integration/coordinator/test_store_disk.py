"""The store and the CA on a disk that loses power, is full, or lies: rows F13, F14 and F15, with real processes."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.faults import store_writer
from harness.faults.disk import PowerCutDisk, SeededRng, compile_disk, operations, trace_environment
from harness.faults.store_writer import RESERVE_BYTES, content, open_authority, states
from harness.report import record
from shoal.coordinator.ports import Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.codes import Code, ShoalError

CUTS = 1000
COMMITS = 150
DAMAGES = 100


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_disk(tmp_path_factory.mktemp("disk"))


def run_writer(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "harness.faults.store_writer", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_f14_no_acknowledged_write_is_lost_to_a_power_cut(tmp_path: Path, library: Path) -> None:
    """1,000 cuts through one run of a real process: all acknowledged commits are there, whole, and at most the next."""
    root = (tmp_path / "disk").resolve()
    root.mkdir()
    trace = tmp_path / "trace"
    run_writer("write", str(root), str(COMMITS), environment=trace_environment(library, root, trace))
    steps = list(operations(trace.read_bytes()))
    flushes = sum(step.kind == "s" for step in steps)
    assert flushes > COMMITS, "a commit that is not flushed is no commit"
    expected = states(COMMITS)
    chance = SeededRng(14)
    cuts = sorted(chance.below(len(steps)) for _ in range(CUTS))
    platter, acknowledged, fingerprint, lost = PowerCutDisk(root), 0, "", list[str]()
    done = 0
    for number, cut in enumerate(cuts):
        for step in steps[done:cut]:
            if not step.path.endswith("/acks"):
                platter.apply(step)
            elif step.kind == "w":
                text = step.data.decode().strip()
                fingerprint, acknowledged = (text, 0) if not fingerprint else (fingerprint, int(text) + 1)
        done = cut
        found = tmp_path / f"cut-{number}"
        platter.cut_power(found, SeededRng(number))
        lost += [f"cut {number}: {what}" for what in await missing(found, fingerprint, acknowledged, expected)]
        shutil.rmtree(found)
    assert not lost, lost[:5]
    assert acknowledged > COMMITS * 0.9, "the cuts did not reach the end"
    record("F14", "P", CUTS, what="store and CA", commits=COMMITS, flushes=flushes, lost=len(lost))


async def missing(root: Path, fingerprint: str, acknowledged: int, expected: list[Mapping[str, bytes]]) -> list[str]:
    """What a start on this disk would miss or make up."""
    try:
        if open_authority(root).fingerprint != fingerprint and fingerprint:
            return ["another CA"]
        store = await SqliteStore.open(root / "store", reserve_bytes=0)
    except ShoalError as error:
        return [str(error.refusal)]
    try:
        kept = await content(store)
        if store.recovery is not None:
            return [f"sound bytes were taken for damage: {store.recovery}"]
        return [] if kept in expected[acknowledged : acknowledged + 2] else [f"{acknowledged} commits acknowledged"]
    finally:
        await store.close()


def test_f13_a_full_disk_refuses_writes_whole_and_lets_deletes_go_on(tmp_path: Path, library: Path) -> None:
    root = (tmp_path / "disk").resolve()
    root.mkdir()
    report = json.loads(run_writer("fill", str(root), str(library), environment=trace_environment(library, root)))
    assert report["refused"] >= 10, "the disk was never full: this run shows nothing"
    assert report["kept"] >= 10, "the disk was always full: this run shows nothing"
    assert report["deletes"] == report["refused"] + report["kept"], report
    assert (report["partial"], report["unread"], report["stuck"]) == (0, 0, 0), report
    assert (report["sound"], report["same"]) == (1, 1), report
    figures = {name: report[name] for name in ("refused", "kept", "deletes", "partial", "stuck")}
    record("F13", "P", report["refused"] + report["kept"], **figures)


async def make_filled_store(directory: Path) -> dict[str, bytes]:
    """A store with a copy of everything in it, closed."""
    store = await SqliteStore.open(directory, reserve_bytes=0)
    for number in range(30):
        await store.commit(store_writer.transaction(number))
    await store.backup()
    kept = dict(await content(store))
    await store.close()
    return kept


def damage(path: Path, kind: int, chance: SeededRng) -> None:
    """One of: bits of live bytes flipped, a page of zeros, cut short, emptied, another file, gone."""
    data = bytearray(path.read_bytes())
    live = [at for at in range(len(data)) if data[at]]
    match kind:
        case 0:
            for _ in range(1 + chance.below(64)):
                data[live[chance.below(len(live))]] ^= 1 << chance.below(8)
        case 1:
            page = 4096 * chance.below(len(data) // 4096)
            data[page : page + 4096] = bytes(4096)
        case 2:
            del data[chance.below(len(data)) :]
        case 3:
            data.clear()
        case 4:
            data = bytearray(b"not a database\n" * 500)
        case 5:
            path.unlink()
            return
    path.write_bytes(data)


async def test_f15_a_damaged_store_is_found_set_aside_and_restored(tmp_path: Path) -> None:
    """100 damages: found, or without effect on what is read; the damaged file is kept; the copy takes its place."""
    original = tmp_path / "original"
    kept = await make_filled_store(original)
    outcomes = {"found": 0, "harmless": 0}
    for number in range(DAMAGES):
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(original, directory)
        kind = number % 6
        damage(directory / "state.db", kind, SeededRng(number))
        damaged = (directory / "state.db").read_bytes() if kind != 5 else b""
        store = await SqliteStore.open(directory, reserve_bytes=RESERVE_BYTES)
        assert await content(store) == kept, f"damage {number} of kind {kind} went unseen"
        if store.recovery is None:
            outcomes["harmless"] += 1
        else:
            outcomes["found"] += 1
            assert store.recovery.code is Code.STORE_CORRUPT
            if kind != 5:
                assert (directory / "state.db.corrupt-1").read_bytes() == damaged
        await store.commit(Transaction({"after": b"1"}))
        await store.close()
        again = await SqliteStore.open(directory, reserve_bytes=RESERVE_BYTES)
        assert again.recovery is None, "a restored store is sound"
        await again.close()
        shutil.rmtree(directory)
    # Bytes that SQLite does not read (free space within a page, reserved header fields) may be damaged without effect.
    assert outcomes["found"] >= DAMAGES * 0.9, outcomes
    record("F15", "P", DAMAGES, what="the store", **outcomes, unseen=0)


async def test_f15_commits_behind_a_damaged_frame_of_the_wal_are_not_forgotten_silently(
    tmp_path: Path, library: Path
) -> None:
    root = (tmp_path / "disk").resolve()
    root.mkdir()
    run_writer("write", str(root), "45", environment=trace_environment(library, root))
    wal = root / "store" / "state.db-wal"
    size = wal.stat().st_size
    assert size > 4096 * 8
    chance = SeededRng(15)
    for number in range(20):
        directory = tmp_path / f"damaged-{number}"
        shutil.copytree(root / "store", directory)
        data = bytearray(wal.read_bytes())
        data[chance.below(32 + 24 + 4096)] ^= 0x10  # the header, or the first frame: all commits lie behind it
        (directory / "state.db-wal").write_bytes(data)
        store = await SqliteStore.open(directory, reserve_bytes=0)
        assert store.recovery is not None, f"damage {number} went unseen"
        assert await content(store) == states(40)[40], "the newest copy was taken after 40 commits"
        await store.close()


async def test_f15_commits_that_the_disk_failed_to_flush_are_no_damage(tmp_path: Path, library: Path) -> None:
    root = (tmp_path / "disk").resolve()
    root.mkdir()
    printed = run_writer("flush", str(root), str(library), environment=trace_environment(library, root))
    acknowledged = json.loads(printed)
    assert len(acknowledged) == 5, "every commit but the three that were not flushed"
    store = await SqliteStore.open(root / "store", reserve_bytes=0)
    assert store.recovery is None, f"sound bytes were taken for damage: {store.recovery}"
    assert sorted(await content(store)) == sorted(acknowledged)
    await store.close()


async def test_f15_what_two_power_cuts_tore_is_no_damage(tmp_path: Path) -> None:
    """A folder that is copied while the store is open is what a power cut leaves; then the last commit is torn."""
    keys, directory = list[str](), tmp_path / "disk-0"
    for number, size in enumerate((400_000, 200_000, 100_000)):
        store = await SqliteStore.open(directory, reserve_bytes=0)
        assert store.recovery is None, f"sound bytes were taken for damage: {store.recovery}"
        assert sorted(await content(store)) == keys
        keys.append(f"key {number}")
        await store.commit(Transaction({keys[-1]: b"x"}))
        wal = directory / "state.db-wal"
        acknowledged = wal.read_bytes()
        await store.commit(Transaction({"torn": b"x" * size}))
        torn = bytearray(wal.read_bytes())
        pairs = enumerate(zip(acknowledged, torn, strict=False))
        first = next((at for at, (before, after) in pairs if before != after), len(acknowledged))
        torn[first : first + 4096] = bytes(4096)
        directory = Path(shutil.copytree(directory, tmp_path / f"disk-{number + 1}"))
        (directory / "state.db-wal").write_bytes(torn)
        await store.close()


async def test_f15_without_a_copy_the_store_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    await make_filled_store(tmp_path)
    shutil.rmtree(tmp_path / "backups")
    damage(tmp_path / "state.db", 4, SeededRng(0))
    for _ in range(2):
        with pytest.raises(ShoalError) as refused:
            await SqliteStore.open(tmp_path)
        assert refused.value.code is Code.STATE_CORRUPT
        assert "backups/" in refused.value.refusal.remedy
    assert (tmp_path / "state.db.corrupt-1").exists()
    assert not (tmp_path / "state.db").exists(), "never silently empty"
    (tmp_path / "created").unlink()
    store = await SqliteStore.open(tmp_path)
    assert await content(store) == {}
    await store.close()


async def test_f15_a_damaged_copy_is_passed_over_for_an_older_one(tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path, reserve_bytes=0)
    await store.commit(Transaction({"a": b"1"}))
    older = await store.backup()
    await store.commit(Transaction({"a": b"2"}))
    newer = await store.backup()
    await store.close()
    damage(newer, 2, SeededRng(3))
    damage(tmp_path / "state.db", 3, SeededRng(0))
    store = await SqliteStore.open(tmp_path, reserve_bytes=0)
    assert await content(store) == {"a": b"1"}
    assert store.recovery is not None
    assert older.name in store.recovery.asked
    assert newer.name in store.recovery.found
    await asyncio.gather(store.close())

"""The Journal port on a real directory: power cuts, corruption, a full disk."""

import errno
import json
import os
import random  # noqa: TID251 - seeded
import subprocess
import sys
from pathlib import Path

import pytest
from contract.agent.builders import desired_sets, journal
from contract.agent.platter import Platter

from harness.builders.agent_values import CPU, GPU, assignment, desired_set, receipt
from harness.fakes.log import RecordingLog
from harness.report import record
from shoal.agent.journal.files import FileJournal
from shoal.agent.journal.slots import Slots
from shoal.types.assignment import DesiredSet
from shoal.types.codes import Code, ShoalError
from shoal.types.receipt import SignedReceipt
from shoal.wire import nouns


async def test_what_was_saved_is_loaded_by_the_next_process(tmp_path: Path) -> None:
    first = journal(tmp_path)
    assert await first.load() is None
    for each in desired_sets(5):
        await first.save(each)
        assert await journal(tmp_path).load() == each


async def test_f41_a_set_that_a_newer_version_wrote_is_asked_for_again(tmp_path: Path) -> None:
    """It has a value that this version has no word for: nothing is held, and it says so."""
    heard = RecordingLog()
    message = nouns.to_wire(desired_set(3, assignment("a-1")))
    message.routes.add(workload={"tenant": "default", "name": "w"}, generation=1).endpoints.add(
        assignment="a-1", node="edge-1", kind="teleport", state="ready", weight=1.0
    )
    Slots(tmp_path, "desired", lambda aside: None).save(message.SerializeToString())
    assert await journal(tmp_path, heard).load() is None
    assert heard.events == ["state_unreadable"]


async def test_receipts_are_kept_beside(tmp_path: Path) -> None:
    signed: tuple[SignedReceipt, ...] = tuple(
        nouns.make_signed_receipt(receipt(device).receipt, b"signature") for device in (CPU, GPU)
    )
    await journal(tmp_path).save_receipts(signed)
    assert await journal(tmp_path).load_receipts() == signed
    assert await journal(tmp_path).load() is None


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x0a\x04\x0a\x02\xff\xff"], ids=["no message", "no receipt"])
async def test_f41_receipts_that_a_newer_version_wrote_are_measured_again(tmp_path: Path, content: bytes) -> None:
    heard = RecordingLog()
    Slots(tmp_path, "receipts", lambda aside: None).save(content)
    assert await journal(tmp_path, heard).load_receipts() == ()
    assert heard.events == ["state_unreadable"]


async def test_f14_power_cut_at_any_operation_loses_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 cuts: what is found is the last set whose save returned, or the one that was being saved."""
    folder = tmp_path / "journal"
    kept = journal(folder)
    platter = Platter(folder, monkeypatch)
    saved = desired_sets(40)
    acknowledged = [(0, None), *[(await _save(kept, each, platter), each) for each in saved]]
    monkeypatch.undo()
    assert platter.count >= 5 * len(saved), "open, write, flush, rename, flush of the folder"
    lost = 0
    for cut in range(1000):
        chance = random.Random(cut)
        at = chance.randint(0, platter.count)
        where = tmp_path / f"cut-{cut}"
        where.mkdir()
        platter.after_cut(at, chance, where)
        found = await journal(where).load()
        done = max(number for number, (count, _) in enumerate(acknowledged) if count <= at)
        allowed = [each for _, each in acknowledged[done : done + 2]]
        lost += found not in allowed
        _remove(where)
    assert lost == 0
    record("F14", "I", 1000, what="an agent's desired set", lost=lost)


async def _save(kept: FileJournal, each: DesiredSet, platter: Platter) -> int:
    await kept.save(each)
    return platter.count


def _remove(where: Path) -> None:
    for each in where.iterdir():
        each.unlink()
    where.rmdir()


async def test_f14_what_a_new_process_loaded_is_there_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before was killed between the rename and the flush of the folder."""
    folder = tmp_path / "journal"
    platter = Platter(folder, monkeypatch)
    kept = journal(folder)
    first, second = desired_sets(2)
    await kept.save(first)
    flushed = platter.count
    await kept.save(second)
    late = range(flushed, platter.count)
    platter.operations = [
        ("nothing",) if number in late and each == ("flush folder",) else each
        for number, each in enumerate(platter.operations)
    ]
    assert ("nothing",) in platter.operations
    assert await journal(folder).load() == second
    monkeypatch.undo()
    for cut in range(20):
        where = tmp_path / f"cut-{cut}"
        where.mkdir()
        platter.after_cut(platter.count, random.Random(cut), where)
        assert await journal(where).load() == second


async def test_f14_the_test_sees_a_journal_that_does_not_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cuts over the same saves with the flushes of the file taken out: they must be noticed."""
    folder = tmp_path / "journal"
    kept = journal(folder)
    platter = Platter(folder, monkeypatch)
    saved = desired_sets(10)
    marks = [await _save(kept, each, platter) for each in saved]
    monkeypatch.undo()
    platter.operations = [each if each[0] != "flush" else ("nothing",) for each in platter.operations]
    lost = 0
    for cut in range(100):
        where = tmp_path / f"cut-{cut}"
        where.mkdir()
        platter.after_cut(marks[-1], random.Random(cut), where)
        lost += await journal(where).load() != saved[-1]
    assert lost > 50


def _damage(path: Path, kind: int, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if kind == 0:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[chance.randrange(len(data)) :]
    elif kind == 2:
        data = bytearray(chance.randbytes(len(data)))
    else:
        data += b"\0" * chance.randint(1, 5000)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", range(4), ids=["bit flip", "truncated", "another file", "grown"])
async def test_f15_corruption_is_found_and_the_last_verified_copy_restored(tmp_path: Path, kind: int) -> None:
    """25 of each kind, 100 in all."""
    for number in range(25):
        chance = random.Random(100 * kind + number)
        folder = tmp_path / f"{number}"
        older, newer = desired_sets(2)
        kept = journal(folder)
        await kept.save(older)
        newest = next(iter(folder.glob("desired.*")))
        await kept.save(newer)
        newest = next(each for each in folder.glob("desired.*") if each != newest)
        _damage(newest, kind, chance)
        heard = RecordingLog()
        again = journal(folder, heard)
        assert await again.load() == older
        assert heard.events == ["state_corrupt"]
        assert [each.name for each in folder.glob("*.corrupt-*")] == [f"{newest.name}.corrupt-1"], (
            "set aside, not deleted"
        )
        await again.save(newer)
        assert await journal(folder).load() == newer
    record("F15", "I", 25, what="an agent's desired set", found=25)


async def test_f15_with_no_verified_copy_it_says_so_and_goes_on(tmp_path: Path) -> None:
    older, newer, next_one = desired_sets(3)
    kept = journal(tmp_path)
    await kept.save(older)
    await kept.save(newer)
    for slot in tuple(tmp_path.glob("desired.*")):
        _damage(slot, 0, random.Random(1))
    heard = RecordingLog()
    again = journal(tmp_path, heard)
    assert await again.load() is None
    assert heard.events == ["state_corrupt", "state_corrupt"]
    assert len(tuple(tmp_path.glob("*.corrupt-*"))) == 2
    await again.save(next_one)
    assert await journal(tmp_path).load() == next_one


async def test_f15_a_sector_that_cannot_be_read_costs_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer, next_one = desired_sets(3)
    kept = journal(tmp_path)
    for each in (older, newer):
        await kept.save(each)
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path.name == "desired.b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    heard = RecordingLog()
    again = journal(tmp_path, heard)
    assert await again.load() == older
    assert heard.events == ["state_corrupt"]
    await again.save(next_one)
    monkeypatch.undo()
    assert await journal(tmp_path).load() == next_one, "in the place of the lost copy"


async def test_f15_a_disk_that_takes_no_writes_any_more_gives_the_copy_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, newer = desired_sets(2)
    kept = journal(tmp_path)
    for each in (older, newer):
        await kept.save(each)
    _damage(tmp_path / "desired.b", 0, random.Random(1))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "replace", refuse)
    heard = RecordingLog()
    assert await journal(tmp_path, heard).load() == older
    assert heard.events == ["state_corrupt"]


def test_what_is_set_aside_never_overwrites_what_was(tmp_path: Path) -> None:
    aside: list[Path] = []
    slots = Slots(tmp_path, "x", aside.append)
    for content in (b"one", b"two", b"three"):
        slots.save(content)
        (tmp_path / "x.a").write_bytes(b"junk " + content)
        slots.load()
    assert len(set(aside)) == 3
    assert all(each.exists() for each in aside)


_FULL_DISK = """
import asyncio, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from contract.agent.builders import desired_sets, journal
from harness.fakes.log import RecordingLog
from shoal.types.codes import ShoalError

folder = Path(sys.argv[1])

def fill():
    ballast = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (65536, 4096, 1):
        try:
            while True:
                os.write(ballast, b"x" * size)
        except OSError:
            pass
    os.close(ballast)

async def story():
    first, *rest = desired_sets(12)
    heard = RecordingLog()
    kept = journal(folder / "journal", heard, reserve_bytes=512 * 1024)
    await kept.save(first)
    fill()
    saved = []
    for each in rest:
        await kept.save(each)
        saved.append((await journal(folder / "journal", reserve_bytes=0).load()) == each)
    refused = []
    (folder / "journal" / "reserve").unlink(missing_ok=True)
    fill()
    try:
        await kept.save(first)
    except ShoalError as error:
        refused.append(error.code)
    stands = (await journal(folder / "journal", reserve_bytes=0).load()) == rest[-1]
    (folder / "ballast").unlink()
    await kept.save(first)
    recovered = (await journal(folder / "journal", reserve_bytes=0).load()) == first
    print(json.dumps({"saved": saved, "full": "disk_full" in heard.events, "refused": refused, "stands": stands,
        "recovered": recovered, "reserve": (folder / "journal" / "reserve").stat().st_size}))

asyncio.run(story())
"""


def test_f32_on_a_full_disk_the_desired_set_is_still_saved(tmp_path: Path) -> None:
    """A file system of 4 MiB, filled to the last byte: 11 sets in a row are saved in the reserved space; with that gone
    too a save is refused and the last set stands; with space again all is as before."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tests = Path(__file__).parents[2]
    script = f'mount -t tmpfs -o size=4m tmpfs {disk} && exec {sys.executable} -c "$STORY" {disk} {tests}'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env={**os.environ, "STORY": _FULL_DISK},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "saved": [True] * 11,
        "full": True,
        "refused": [Code.DISK_FULL],
        "stands": True,
        "recovered": True,
        "reserve": 512 * 1024,
    }


async def test_a_directory_that_cannot_be_written_is_no_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    kept = journal(folder)
    folder.rmdir()
    with pytest.raises(ShoalError) as caught:
        await kept.save(desired_sets(1)[0])
    assert caught.value.code is Code.STORE_UNAVAILABLE

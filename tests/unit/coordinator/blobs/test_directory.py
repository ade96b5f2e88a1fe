"""Models by digest: all of it or nothing, verified, durable, without links. Also A36 where bytes come in."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from harness.models.push import chunks_of
from harness.models.synthetic import digest_of
from harness.wait import until, wait_until
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.types.codes import Code, ShoalError
from shoal.types.units import Bytes

CONTENT = np.random.default_rng(3).bytes(700_001)
DIGEST = digest_of(CONTENT)
SIZE = Bytes(len(CONTENT))


@pytest.fixture
def blobs(tmp_path: Path) -> DirectoryBlobs:
    return DirectoryBlobs(tmp_path / "models", Bytes(2**20))


async def gather(blobs: DirectoryBlobs, digest: str = DIGEST, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in blobs.read(digest, offset)])


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def refusal_code(blobs: DirectoryBlobs, chunks: AsyncIterator[bytes], size: int, digest: str) -> Code:
    """The code, having checked that nothing is left of it."""
    with pytest.raises(ShoalError) as caught:
        await blobs.write(chunks, size=Bytes(size), digest=digest)
    assert files(blobs) == []
    return caught.value.code


def files(blobs: DirectoryBlobs) -> list[Path]:
    return [path for path in blobs._root.rglob("*") if not path.is_dir()]


async def test_what_is_written_is_read_from_any_offset(blobs: DirectoryBlobs) -> None:
    path = await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    assert Path(path).read_bytes() == CONTENT
    assert blobs.path(DIGEST) == path
    assert await blobs.stat(DIGEST) == SIZE
    assert await gather(blobs) == CONTENT
    assert await gather(blobs, offset=654_321) == CONTENT[654_321:]
    assert await gather(blobs, offset=SIZE + 5) == b""
    assert files(blobs) == [Path(path)]


async def test_unknown_and_deleted(blobs: DirectoryBlobs) -> None:
    assert await blobs.stat(DIGEST) is None
    with pytest.raises(ShoalError) as caught:
        await gather(blobs)
    assert caught.value.code is Code.MODEL_UNKNOWN
    await blobs.delete(DIGEST, yes)
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    await blobs.delete(DIGEST, yes)
    assert await blobs.stat(DIGEST) is None


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:" + "A" * 64, "sha256:../../etc/passwd", "md5:" + "0" * 32, DIGEST + "\n"]
)
async def test_a_name_that_is_no_digest_reaches_no_file(blobs: DirectoryBlobs, digest: str) -> None:
    for call in (blobs.stat(digest), blobs.delete(digest, yes), gather(blobs, digest)):
        with pytest.raises(ShoalError) as caught:
            await call
        assert caught.value.code is Code.MODEL_DIGEST
    with pytest.raises(ShoalError) as caught:
        blobs.path(digest)
    assert caught.value.code is Code.MODEL_DIGEST


async def test_one_changed_bit_is_found(blobs: DirectoryBlobs) -> None:
    for at in range(0, len(CONTENT), 70_000):
        damaged = bytearray(CONTENT)
        damaged[at] ^= 1
        assert await refusal_code(blobs, chunks_of(bytes(damaged)), SIZE, DIGEST) is Code.MODEL_DIGEST


async def test_bytes_that_stop_early_or_go_on(blobs: DirectoryBlobs) -> None:
    assert await refusal_code(blobs, chunks_of(CONTENT[:-1]), SIZE, DIGEST) is Code.MODEL_DIGEST
    assert await refusal_code(blobs, chunks_of(CONTENT), SIZE - 1, DIGEST) is Code.MODEL_TOO_LARGE


@pytest.mark.parametrize("size", [0, -1, 2**20 + 1, 2**62])
async def test_a_declared_size_is_refused_before_a_byte_is_taken(blobs: DirectoryBlobs, size: int) -> None:
    taken: list[int] = []

    async def chunks() -> AsyncIterator[bytes]:
        taken.append(1)
        yield b"x"

    assert await refusal_code(blobs, chunks(), size, DIGEST) is Code.MODEL_TOO_LARGE
    assert not taken


async def test_a_disk_that_fills_up_midway_leaves_nothing(
    blobs: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if sum(written) > 300_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write(descriptor, content))
        return written[-1]

    monkeypatch.setattr(os, "write", full)
    assert await refusal_code(blobs, chunks_of(CONTENT), SIZE, DIGEST) is Code.DISK_FULL
    assert sum(written) > 300_000


async def test_a_disk_that_is_too_small_is_known_before(tmp_path: Path) -> None:
    blobs = DirectoryBlobs(tmp_path / "models", Bytes(2**20), spare_bytes=Bytes(2**62))
    assert await refusal_code(blobs, chunks_of(CONTENT), SIZE, DIGEST) is Code.DISK_FULL


async def test_no_two_pushes_are_promised_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=3_000_000 - sum(each.stat().st_size for each in files(blobs)))

    async def slow() -> AsyncIterator[bytes]:
        yield CONTENT[:300_000]
        await goes_on.wait()
        yield CONTENT[300_000:]

    blobs, goes_on = DirectoryBlobs(tmp_path / "models", Bytes(2**20), spare_bytes=Bytes(1_000_000)), asyncio.Event()
    monkeypatch.setattr(shutil, "disk_usage", usage)
    pushes = [asyncio.create_task(blobs.write(slow(), size=SIZE, digest=DIGEST)) for _ in range(4)]
    await until(lambda: sum(each.done() for each in pushes) == 2, 10.0, "two to be refused, and two to have room")
    goes_on.set()
    ended = await asyncio.gather(*pushes, return_exceptions=True)
    assert [each.code for each in ended if isinstance(each, ShoalError)] == [Code.DISK_FULL] * 2
    for _ in range(3):
        with pytest.raises(ShoalError) as caught:
            await blobs.write(chunks_of(CONTENT[1:]), size=SIZE, digest=DIGEST)
        assert caught.value.code is Code.MODEL_DIGEST, "what a failed push was promised is free again"
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)


@pytest.mark.parametrize("failing", [(os, "close"), (Path, "unlink")], ids=["close", "unlink"])
async def test_a_disk_that_errs_as_a_failed_push_is_forgotten_keeps_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[object, str]
) -> None:
    """Else each such push would have later ones refused until a restart, however much is free."""
    call = getattr(*failing)

    def fail(*args: object, **options: object) -> None:
        call(*args, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def break_off() -> AsyncIterator[bytes]:
        yield CONTENT[:1]
        erring.setattr(*failing, fail)
        raise RuntimeError

    blobs = DirectoryBlobs(tmp_path / "models", Bytes(2**20), spare_bytes=Bytes(0))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=SIZE))
    with monkeypatch.context() as erring, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        await blobs.write(break_off(), size=SIZE, digest=DIGEST)
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    assert await gather(blobs) == CONTENT


async def test_a_reader_of_a_deleted_or_replaced_model_reads_on(blobs: DirectoryBlobs) -> None:
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    reading = blobs.read(DIGEST, 0)
    first = await anext(reading)
    await blobs.delete(DIGEST, yes)
    assert first + b"".join([chunk async for chunk in reading]) == CONTENT


async def test_recorded_bytes_and_those_that_came_after_the_question_stay(blobs: DirectoryBlobs) -> None:
    async def pushed_again() -> bool:
        await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
        return True

    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    for answer in (no, pushed_again):
        await blobs.delete(DIGEST, answer)
        assert await gather(blobs) == CONTENT
    await blobs.delete(DIGEST, yes)
    assert files(blobs) == []


async def test_complete_models_alone_are_listed(blobs: DirectoryBlobs) -> None:
    assert await blobs.digests() == ()
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    (Path(blobs.path(DIGEST)).parent / "notes.txt").write_text("an operator's")
    assert await blobs.digests() == (DIGEST,)


async def test_two_that_push_the_same_model(blobs: DirectoryBlobs) -> None:
    paths = await asyncio.gather(
        *(blobs.write(chunks_of(CONTENT, size), size=SIZE, digest=DIGEST) for size in (1_000, 9_999, 70_000))
    )
    assert len(set(paths)) == 1
    assert await gather(blobs) == CONTENT
    assert len(files(blobs)) == 1


async def test_a_damaged_copy_is_healed_by_the_next_push(blobs: DirectoryBlobs) -> None:
    path = Path(await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST))
    path.chmod(0o600)
    path.write_bytes(b"rot")
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    assert await gather(blobs) == CONTENT


@pytest.mark.parametrize("kind", ["symlink", "hardlink", "fifo", "folder"])
async def test_no_links_and_nothing_but_files(blobs: DirectoryBlobs, tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(CONTENT)
    place = blobs._path(DIGEST)
    match kind:
        case "symlink":
            place.symlink_to(elsewhere)
        case "hardlink":
            place.hardlink_to(elsewhere)
        case "fifo":
            os.mkfifo(place)
        case "folder":
            place.mkdir()
    assert await blobs.stat(DIGEST) is None
    with pytest.raises(ShoalError) as caught:
        await gather(blobs)
    assert caught.value.code is Code.MODEL_PATH


async def test_bytes_are_on_disk_before_the_name(blobs: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(descriptor: int) -> None:
        seen.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def record_rename(path: Path, target: Path) -> Path:
        seen.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    await blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST)
    assert seen == ["file", "rename", "folder"]


_WRITER = """
import asyncio, sys
from shoal.coordinator.blobs.directory import DirectoryBlobs
async def chunks():
    yield b"a" * 100_000
    print("midway", flush=True)
    await asyncio.Event().wait()
asyncio.run(DirectoryBlobs(sys.argv[1], 2**20).write(chunks(), size=200_000, digest="sha256:" + "0" * 64))
"""


def test_what_a_killed_coordinator_was_taking_is_gone_at_the_next_start(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "midway\n"
        wait_until(lambda: list((tmp_path / "incoming").iterdir()), 5, "a model midway")
        writer.send_signal(signal.SIGKILL)
    assert [path.stat().st_size for path in (tmp_path / "incoming").iterdir()] == [100_000]
    blobs = DirectoryBlobs(tmp_path, Bytes(2**20))
    assert files(blobs) == []


@pytest.mark.parametrize(("module", "function"), [(tempfile, "mkstemp"), (os, "write"), (os, "fchmod")])
async def test_a_write_that_is_cancelled_while_a_thread_works_leaves_nothing_half(
    blobs: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch, module: ModuleType, function: str
) -> None:
    """A thread cannot be stopped: what it opens is closed and removed, and never closed under its hands."""
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()
    real = getattr(module, function)

    def slow(*arguments: object, **named: object) -> object:
        begun.set()
        assert released.wait(10)
        try:
            return real(*arguments, **named)
        finally:
            ended.set()

    monkeypatch.setattr(module, function, slow)
    descriptors = open_descriptors()
    writing = asyncio.create_task(blobs.write(chunks_of(CONTENT), size=SIZE, digest=DIGEST))
    await until(begun.is_set, 10, f"{function} to begin")
    writing.cancel()
    asyncio.get_running_loop().call_later(0.05, released.set)
    with pytest.raises(asyncio.CancelledError):
        await writing
    await until(ended.is_set, 10, "the thread to end")
    monkeypatch.undo()
    assert [path for path in files(blobs) if path.parent.name == "incoming"] == []
    assert open_descriptors() == descriptors


def open_descriptors() -> list[str]:
    """Files of the store that this process holds open."""
    held = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            held.append(str(each.readlink()))
    return [name for name in held if "/models/" in name]

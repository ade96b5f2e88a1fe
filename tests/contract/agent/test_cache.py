"""The Cache port on a real directory: resumed fetches, wrong bytes, quota, a full disk."""

import asyncio
import errno
import hashlib
import os
import random  # noqa: TID251 - seeded
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from harness.fakes.log import RecordingLog
from harness.report import record
from harness.wait import until
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import SignatureVerifier
from shoal.artifacts.signature_bundle import verify_file
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes

CHUNK = 1000


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Origin:
    """Where models come from. break_after: bytes until the connection is lost, once; bend: what it sends instead."""

    def __init__(self, *models: bytes) -> None:
        self.models = {digest_of(model): model for model in models}
        self.asked: list[tuple[str, int]] = []
        self.break_after: int | None = None
        self.pause = asyncio.Event()
        self.pause.set()

    async def fetch(self, digest: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.asked.append((digest, offset))
        if digest not in self.models:
            raise refuse(Code.MODEL_UNKNOWN, digest)
        sent = 0
        for start in range(offset, len(self.models[digest]), CHUNK):
            await self.pause.wait()
            if self.break_after is not None and sent >= self.break_after:
                self.break_after = None
                raise refuse(Code.FETCH_FAILED, "connection lost")
            chunk = self.models[digest][start : start + CHUNK]
            sent += len(chunk)
            yield chunk


def cache(folder: Path, origin: Origin, *, quota: int = 10**9, low_water: int = 0) -> DirectoryCache:
    publishers = SignatureVerifier(folder / "publishers.json", (), RecordingLog(), verify=verify_file)
    return DirectoryCache(
        folder, origin.fetch, publishers, RecordingLog(), quota=Bytes(quota), low_water=Bytes(low_water)
    )


def model(seed: int, size: int = 10_000) -> bytes:
    return random.Random(seed).randbytes(size)


async def ensure(kept: DirectoryCache, data: bytes) -> Path:
    return Path(await kept.ensure(digest_of(data), Bytes(len(data))))


async def code_of(kept: DirectoryCache, digest: str, size: int) -> Code:
    with pytest.raises(ShoalError) as caught:
        await kept.ensure(digest, Bytes(size))
    return caught.value.code


async def test_fetched_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    path = await ensure(cache(tmp_path, origin), data)
    assert path.read_bytes() == data
    assert await ensure(cache(tmp_path, origin), data) == path
    assert origin.asked == [(digest_of(data), 0)]


async def test_a_disk_that_takes_no_writes_any_more_gives_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = model(1)
    origin = Origin(data)
    path = await ensure(cache(tmp_path, origin), data)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Path, "replace", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    kept = cache(tmp_path, origin)
    assert await ensure(kept, data) == path
    path.write_bytes(b"\0" + data[1:])
    with pytest.raises(ShoalError) as refused:
        await kept.discard(digest_of(data))
    assert refused.value.code is Code.FETCH_FAILED
    assert await code_of(kept, digest_of(data), len(data) + 1) is Code.FETCH_FAILED


async def test_a_cache_whose_folder_is_gone_has_nothing_to_collect(tmp_path: Path) -> None:
    kept = cache(tmp_path / "cache", Origin())
    (tmp_path / "cache").rmdir()
    assert await kept.collect(frozenset()) == ()


async def test_two_at_once_fetch_once(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    kept = cache(tmp_path, origin)
    origin.pause.clear()
    both = asyncio.gather(ensure(kept, data), ensure(kept, data))
    origin.pause.set()
    first, second = await both
    assert first == second
    assert len(origin.asked) == 1


async def test_a_broken_fetch_is_resumed_where_it_broke(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    origin.break_after = 4000
    assert await code_of(cache(tmp_path, origin), digest_of(data), len(data)) is Code.FETCH_FAILED
    path = await ensure(cache(tmp_path, origin), data)
    assert path.read_bytes() == data
    assert origin.asked == [(digest_of(data), 0), (digest_of(data), 4000)]


async def test_a_cancelled_fetch_is_resumed_too(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    kept = cache(tmp_path, origin)
    origin.pause.clear()
    waiting = asyncio.create_task(ensure(kept, data))
    await until(lambda: origin.asked, 5.0, "the fetch to begin")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    origin.pause.set()
    assert (await ensure(kept, data)).read_bytes() == data


async def test_a36_other_bytes_than_the_digest_says_are_refused_and_not_kept(tmp_path: Path) -> None:
    data = model(1)
    digest = digest_of(data)
    origin = Origin()
    kept = cache(tmp_path, origin)
    for wrong in (model(2), data + b"more", data[:-1] + b"\0"):
        origin.models[digest] = wrong
        assert await code_of(kept, digest, len(data)) is Code.MODEL_DIGEST
        assert list(tmp_path.iterdir()) == []
    origin.models[digest] = data[:-10]
    assert await code_of(kept, digest, len(data)) is Code.FETCH_FAILED
    origin.models[digest] = data
    assert (await ensure(kept, data)).read_bytes() == data


async def test_f33_a_part_that_rotted_on_disk_is_found_and_fetched_again(tmp_path: Path) -> None:
    for number in range(100):
        data = model(number, 5000)
        origin = Origin(data)
        origin.break_after = 3000
        kept = cache(tmp_path / str(number), origin)
        await code_of(kept, digest_of(data), len(data))
        part = next((tmp_path / str(number)).glob("*.part"))
        bent = bytearray(part.read_bytes())
        bent[number * 29 % len(bent)] ^= 1 << (number % 8)
        part.write_bytes(bent)
        assert await code_of(kept, digest_of(data), len(data)) is Code.MODEL_DIGEST
        assert (await ensure(kept, data)).read_bytes() == data
    record("F33", "I", 100, what="a part that was fetched", found=100)


async def test_f33_bytes_that_the_worker_found_wrong_are_set_aside_and_fetched_again(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    kept = cache(tmp_path, origin)
    path = await ensure(kept, data)
    path.write_bytes(b"\0" + data[1:])
    assert await kept.discard(digest_of(data))
    assert not await kept.discard(digest_of(data)), "it is gone"
    assert (await ensure(kept, data)).read_bytes() == data
    assert path.with_name(f"{path.name}.corrupt").exists()
    assert len(origin.asked) == 2
    assert not await kept.discard(digest_of(data)), "another load, that read what was there before, is late"
    assert path.exists()


async def test_f33_a_truncated_model_is_fetched_again(tmp_path: Path) -> None:
    data = model(1)
    origin = Origin(data)
    path = await ensure(cache(tmp_path, origin), data)
    path.write_bytes(data[:-1])
    assert (await ensure(cache(tmp_path, origin), data)).read_bytes() == data


async def test_a_digest_is_a_name_and_no_path(tmp_path: Path) -> None:
    kept = cache(tmp_path / "cache", Origin())
    for digest in ("sha256:../../etc/passwd", "sha256:" + "g" * 64, "md5:" + "0" * 32, "sha256:" + "0" * 64 + "/x", ""):
        assert await code_of(kept, digest, 10) is Code.MODEL_UNKNOWN
    assert await code_of(kept, "sha256:" + "0" * 64, 10) is Code.MODEL_UNKNOWN, "unknown to the coordinator too"


async def test_over_its_quota_the_least_recently_used_goes_and_never_a_pinned_one(tmp_path: Path) -> None:
    models = [model(number) for number in range(4)]
    origin = Origin(*models)
    kept = cache(tmp_path, origin, quota=30_000)
    for age, data in enumerate(models[:3]):
        path = await ensure(kept, data)
        os.utime(path, (age, age))
    assert await code_of(kept, digest_of(models[3]), 10_000) is Code.DISK_FULL, "what is pinned is not known yet"
    assert await kept.collect(frozenset({digest_of(models[0]), digest_of(models[3])})) == ()
    await ensure(kept, models[3])
    assert [(tmp_path / digest_of(each)[7:]).exists() for each in models] == [True, False, True, True]
    assert await kept.collect(frozenset(digest_of(each) for each in models)) == ()
    assert await code_of(kept, digest_of(models[1]), 10_000) is Code.DISK_FULL, "all the others are pinned"
    small = cache(tmp_path, origin, quota=15_000)
    assert await small.collect(frozenset({digest_of(models[0])})) == (digest_of(models[2]), digest_of(models[3]))


async def test_two_at_once_are_not_promised_the_same_room(tmp_path: Path) -> None:
    one, two = b"1" * 5 * CHUNK, b"2" * 5 * CHUNK
    origin = Origin(one, two)
    origin.pause.clear()
    made = cache(tmp_path, origin, quota=8 * CHUNK)
    await made.collect(frozenset())
    first = asyncio.create_task(made.ensure(digest_of(one), Bytes(len(one))))
    await until(lambda: origin.asked, 5, "the first fetch to begin")
    with pytest.raises(ShoalError) as refused:
        await made.ensure(digest_of(two), Bytes(len(two)))
    assert refused.value.code is Code.DISK_FULL
    origin.pause.set()
    assert Path(await first).read_bytes() == one, "nor is what comes evicted for another"
    assert Path(await made.ensure(digest_of(two), Bytes(len(two)))).read_bytes() == two, "in the place of the first"


async def test_f32_the_disk_s_low_water_is_left_free(tmp_path: Path) -> None:
    data = model(1)
    kept = cache(tmp_path, Origin(data), low_water=2**60)
    assert await code_of(kept, digest_of(data), len(data)) is Code.DISK_FULL
    assert list(tmp_path.iterdir()) == []


async def test_f32_a_disk_that_fills_while_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = model(1)
    origin = Origin(data)
    kept = cache(tmp_path, origin)
    real = os.fsync

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert await code_of(kept, digest_of(data), len(data)) is Code.DISK_FULL
    monkeypatch.setattr(os, "fsync", real)
    assert (await ensure(kept, data)).read_bytes() == data

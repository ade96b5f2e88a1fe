"""The program that prepares a model, and what is kept of it."""

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.builders.agent_values import assignment
from harness.fakes.log import RecordingLog
from harness.models.architectures import ARCHITECTURES, samples_of, separable
from harness.wait import until
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import SignatureVerifier
from shoal.agent.clock import SystemClock
from shoal.agent.ports import PreparedModel
from shoal.agent.preparation import preparer as preparer_module
from shoal.agent.preparation.messages import PreparationResult
from shoal.agent.preparation.preparer import ProgramPreparer
from shoal.artifacts.signature_bundle import verify_file
from shoal.types.assignment import Assignment, Preparation
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import Metric, Tolerance
from shoal.types.tolerance import default
from shoal.types.units import Bytes

SHAPES = ARCHITECTURES["separable"][1]
ENDS_S = 60.0


async def nothing(digest: str, offset: int) -> AsyncGenerator[bytes, None]:
    raise refuse(Code.MODEL_UNKNOWN, digest)
    yield b""


def preparer(folder: Path) -> ProgramPreparer:
    log = RecordingLog()
    publishers = SignatureVerifier(folder / "publishers.json", (), log, verify=verify_file)
    kept = DirectoryCache(folder / "cache", nothing, publishers, log, quota=Bytes(2**30), low_water=Bytes(0))
    return ProgramPreparer(folder / "prepared", kept, SystemClock(), log)


def order_of(folder: Path, model: bytes, samples: bytes) -> Assignment:
    (folder / "model").write_bytes(model)
    (folder / "samples").write_bytes(samples)
    model_digest, samples_digest = (f"sha256:{hashlib.sha256(each).hexdigest()}" for each in (model, samples))
    return assignment(
        model=model_digest,
        model_bytes=Bytes(len(model)),
        samples=samples_digest,
        precision="int8",
        shapes=SHAPES,
        preparation=Preparation(default("fp32", "int8")),
    )


async def prepare(by: ProgramPreparer, one: Assignment, folder: Path) -> PreparedModel:
    made = await by.prepare(one, str(folder / "model"), str(folder / "samples"), lambda: None)
    assert made is not None
    return made


async def test_made_once_and_found_by_the_next_supervisor(tmp_path: Path) -> None:
    one = order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    first = await prepare(preparer(tmp_path), one, tmp_path)
    content = Path(first.path).read_bytes()
    assert first.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert first.prepare_s > 0
    (tmp_path / "model").unlink()
    assert await prepare(preparer(tmp_path), one, tmp_path) == first, "nothing was made again"
    assert not list((tmp_path / "prepared").glob("work-*"))


async def test_another_order_is_made_of_its_own(tmp_path: Path) -> None:
    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    await prepare(by, one, tmp_path)
    strict = replace(one, preparation=Preparation(default("fp32", "fp32")))
    with pytest.raises(ShoalError) as refused:
        await prepare(by, strict, tmp_path)
    assert refused.value.code is Code.PREPARE_FAILED


async def test_what_was_evicted_is_made_again(tmp_path: Path) -> None:
    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    first = await prepare(by, one, tmp_path)
    Path(first.path).unlink()
    again = await prepare(by, one, tmp_path)
    assert again.digest == first.digest, "the same order gives the same bytes"
    assert Path(again.path).is_file()


async def test_a_model_that_cannot_be_recorded_serves_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    monkeypatch.setattr(preparer_module, "write_private", refuse_write)
    first = await prepare(by, one, tmp_path)
    assert Path(first.path).is_file()
    monkeypatch.undo()
    assert (await prepare(by, one, tmp_path)).digest == first.digest
    assert list((tmp_path / "prepared").glob("*.json"))


async def test_a_disk_that_takes_no_folder_is_a_refusal(tmp_path: Path) -> None:
    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    (tmp_path / "prepared").rmdir()
    with pytest.raises(ShoalError) as refused:
        await prepare(by, one, tmp_path)
    assert refused.value.code is Code.DISK_FULL


async def test_refusals_come_back_as_they_are(tmp_path: Path) -> None:
    one = order_of(tmp_path, separable(), samples_of((1, 16)))
    with pytest.raises(ShoalError) as refused:
        await prepare(preparer(tmp_path), one, tmp_path)
    assert refused.value.code is Code.MODEL_INVALID
    (tmp_path / "samples").write_bytes(b"other bytes")
    with pytest.raises(ShoalError) as refused:
        await prepare(preparer(tmp_path), one, tmp_path)
    assert refused.value.code is Code.MODEL_DIGEST
    assert not list((tmp_path / "prepared").iterdir())


async def test_given_up_it_leaves_no_process_and_the_next_one_runs(tmp_path: Path) -> None:
    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"], 4000))
    task = asyncio.create_task(prepare(by, one, tmp_path))

    def programs() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "shoal.agent.preparation.main" in each.cmdline()]

    await until(programs, ENDS_S, "the program to run")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not programs()
    small = order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    assert (await prepare(by, small, tmp_path)).note


async def test_a_program_that_dies_is_told(tmp_path: Path) -> None:
    by, one = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"], 4000))
    task = asyncio.create_task(prepare(by, one, tmp_path))

    def kill() -> bool:
        for each in psutil.Process().children():
            if "shoal.agent.preparation.main" in each.cmdline():
                each.kill()
                return True
        return False

    await until(kill, ENDS_S, "the program to run")
    with pytest.raises(ShoalError) as refused:
        await task
    assert refused.value.code is Code.PREPARE_FAILED
    assert "SIGKILL" in refused.value.refusal.found


def test_the_end_of_what_a_program_printed_is_kept(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 5000 + b"Traceback: \xff")
    assert preparer_module._tail(tmp_path / "log").endswith("xTraceback: \ufffd")
    assert len(preparer_module._tail(tmp_path / "log")) == 2000
    assert preparer_module._tail(tmp_path / "none") == ""


async def test_each_waits_for_its_turn_and_says_when_it_begins(tmp_path: Path) -> None:
    by, first = preparer(tmp_path), order_of(tmp_path, separable(), samples_of(SHAPES["x"]))
    second = replace(first, preparation=Preparation((*default("fp32", "int8"), Tolerance("y", Metric.COSINE, 0.5))))
    begun: list[str] = []
    model, samples = str(tmp_path / "model"), str(tmp_path / "samples")
    held = asyncio.create_task(by.prepare(first, model, samples, lambda: begun.append("first")))
    await until(lambda: begun, ENDS_S, "one to begin")
    later = [
        asyncio.create_task(by.prepare(one, model, samples, lambda name=name: begun.append(name)))  # type: ignore[misc]
        for name, one in (("second", second), ("first again", first))
    ]
    await held
    assert begun == ["first"], "it has the turn until it ends"
    await asyncio.gather(*later)
    assert begun == ["first", "second"], "what is kept needs no turn"


async def test_a_program_that_fills_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "_MOST_FILES", 0)
    one = order_of(tmp_path, separable(), samples_of(SHAPES["x"], 4000))
    with pytest.raises(ShoalError) as refused:
        await prepare(preparer(tmp_path), one, tmp_path)
    assert refused.value.code is Code.DISK_FULL
    assert not list((tmp_path / "prepared").glob("work-*"))


def test_a_link_in_the_place_of_the_result_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "result.json").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="result"):
        preparer_module._read_result(tmp_path / "result.json")


def test_texts_are_as_long_as_a_report_may_have() -> None:
    long = "x" * 60_000
    result = preparer_module._clipped(
        PreparationResult(
            long, refusal=Refusal(Code.PREPARE_FAILED, long, long, long), operators=(long,) * 999, not_compiled=long
        )
    )
    assert result.refusal is not None
    assert max(map(len, (result.note, result.refusal.words, result.not_compiled, *result.operators))) < 4096
    assert len(result.operators) <= 512

"""How much a worker that several models share may map."""

import asyncio
import gc
import mmap
import weakref
from pathlib import Path

import pytest
from unit.agent.worker.loaded import load

from harness.wait import until
from shoal.agent.frames import FrameMessage
from shoal.agent.worker import isolation
from shoal.agent.worker.engine import Engine
from shoal.agent.worker.service import WorkerService


def engine_of(service: WorkerService, name: str) -> Engine:
    made = service._assignments[name].engine
    engine = made() if made is not None else None
    assert engine is not None
    return engine


async def test_models_that_share_a_worker_share_what_their_provider_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    monkeypatch.setattr(isolation, "limit_memory", lambda _, extra: limits.append(extra))
    service = WorkerService(mmap.mmap(-1, 4096), asyncio.Event())
    handlers = service.handlers()
    await load(service, tmp_path, "a")
    assert limits == [1010]
    await load(service, tmp_path, "b")
    assert limits == [1010, 1020]
    model = weakref.ref(engine_of(service, "a"))
    await handlers["unload"](FrameMessage("unload", {"assignment": "a"}))
    assert limits == [1010, 1020], "the memory of a model that left is nobody else's yet"
    await until(lambda: len(limits) > 2, 30, "it to be gone")
    assert model() is None
    await handlers["unload"](FrameMessage("unload", {"assignment": "b"}))
    assert limits == [1010, 1020, 1010, 0], "none that it holds: no limit"


async def test_a_model_that_still_runs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(isolation, "limit_memory", lambda _, extra: limits.append(extra))
    service = WorkerService(mmap.mmap(-1, 4096), asyncio.Event())
    for name in ("a", "b"):
        await load(service, tmp_path, name)
    running = [engine_of(service, "a")]
    looked = asyncio.Event()
    monkeypatch.setattr(gc, "collect", looked.set)
    await service.handlers()["unload"](FrameMessage("unload", {"assignment": "a"}))
    await asyncio.wait_for(looked.wait(), 30)
    monkeypatch.undo()
    monkeypatch.setattr(isolation, "limit_memory", lambda _, extra: limits.append(extra))
    assert limits == [1010, 1020]
    running.clear()
    await until(lambda: len(limits) > 2, 30, "it to be gone")

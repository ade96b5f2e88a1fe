"""Requests that a worker asks of itself: of trials, and of comparisons with another replica."""

import asyncio
import math
import mmap
from pathlib import Path

import numpy as np
import pytest
from unit.agent.worker.loaded import load

from shoal.agent.frames import FrameMessage
from shoal.agent.worker import isolation
from shoal.agent.worker.model_runner import ModelRunner
from shoal.agent.worker.service import WorkerService
from shoal.agent.worker.tensors import make_request
from shoal.types.codes import Code, ShoalError


async def test_who_fills_the_queue_keeps_no_comparison_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "limit_memory", lambda *_: None)  # of this process
    service = WorkerService(mmap.mmap(-1, 4096), asyncio.Event())
    await load(service, tmp_path, "a")
    runner = service._assignments["a"].replica
    assert runner is not None
    accept_one(runner)
    with pytest.raises(ShoalError) as refused:
        accept_one(runner)
    assert refused.value.code is Code.OVERLOADED
    spec = runner.loaded.inputs[0]
    request = make_request({spec.name: np.ones([max(each, 1) for each in spec.shape], np.float32)})
    answer = await runner.infer_when_idle(FrameMessage("answer", {}, request.SerializeToString()))
    assert answer.kind == "answer"


def accept_one(runner: ModelRunner) -> None:
    """A client's request, which waits for ever."""
    runner._accept(b"", "", "", math.inf, lambda *_: None, lambda _: None, is_metered=True)

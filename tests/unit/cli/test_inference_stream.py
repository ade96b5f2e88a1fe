"""A stream of requests whose server ends it early, or that its reader leaves."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.client import AsyncInferenceClient, Context
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError

X = {"x": np.zeros(1, np.float32)}


class Call:
    """Answers as many requests as `answers`, then ends in good order."""

    def __init__(self, answers: int) -> None:
        self.is_over = False
        self._left = answers
        self._written = asyncio.Semaphore(0)

    async def write(self, message: bytes) -> None:
        self._written.release()

    def half_close(self) -> None: ...

    async def read(self) -> bytes | None:
        if not self._left:
            self.is_over = True
            return None
        await self._written.acquire()
        self._left -= 1
        tensor = oip.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1])
        answer = oip.ModelInferResponse(outputs=[tensor], raw_output_contents=[bytes(4)])
        return oip.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    def cancel(self) -> None:
        self.is_over = True


def client_of(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncInferenceClient:
    client = AsyncInferenceClient(Context("client", "west", "", str(folder)), "127.0.0.1:1")

    async def stream(*_: object) -> Call:
        return call

    monkeypatch.setattr(client._channel, "stream", stream)
    return client


async def test_a_stream_that_ends_before_its_last_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(Call(2), tmp_path, monkeypatch)
    stream = client.infer_stream("m", [X] * 5)
    for _ in range(2):
        await anext(stream)
    with pytest.raises(ShoalError) as failed:
        await anext(stream)
    assert failed.value.code is Code.REPLICA_UNREACHABLE
    assert "2 of 5" in failed.value.refusal.found
    whole = client_of(Call(5), tmp_path, monkeypatch)
    assert len([answer async for answer in whole.infer_stream("m", [X] * 5)]) == 5


async def test_who_leaves_a_stream_closes_the_generator_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[str]()

    async def requests() -> AsyncGenerator[dict[str, Any]]:
        try:
            while True:
                yield X
        finally:
            closed.append("a camera")

    async with aclosing(client_of(Call(100), tmp_path, monkeypatch).infer_stream("m", requests())) as stream:
        async for _ in stream:
            break
    assert closed == ["a camera"]

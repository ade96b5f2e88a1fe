"""`shoal.client` against a real front and worker: typed answers, streams, codes, deadlines, repetitions."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.synthetic import relu
from shoal.agent.clock import SystemClock
from shoal.client import AsyncInferenceClient, Context, InferenceClient
from shoal.types.codes import Code, ShoalError
from shoal.types.device import Role
from shoal.types.workload import WorkloadKey

X = np.array([[-1, 2, -3, 4]], np.float32)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    """A node whose worker is ready, and whose front does not listen before it is configured."""
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    node = DataPlaneNode("n1", authority, tmp_path / "n1")
    await node.start()
    try:
        (tmp_path / "relu.onnx").write_bytes(relu().SerializeToString())
        await node.load("a1", WorkloadKey("acme", "reader"), tmp_path / "relu.onnx")
        yield node
    finally:
        await node.stop()


@pytest.fixture
def early_context(node: DataPlaneNode, tmp_path: Path) -> Context:
    """Of a client of the tenant, at the node's own front."""
    files = node.authority.issue(Role.TENANT, "acme")
    folder = tmp_path / "client"
    folder.mkdir()
    for name, path in (("cert.pem", files.certificate), ("key.pem", files.key), ("ca.pem", files.authority)):
        (folder / name).write_bytes(path.read_bytes())
    return Context("client", "west", "", str(folder), f"127.0.0.1:{node.front.config.port}", "acme")


@pytest.fixture
async def context(node: DataPlaneNode, early_context: Context) -> Context:
    """The same once the front serves."""
    await node.configure()
    return early_context


def requests(count: int) -> Iterator[dict[str, Any]]:
    return ({"x": X * number} for number in range(count))


async def test_both_clients_answer_alike(context: Context) -> None:
    async with AsyncInferenceClient(context) as client:
        found = await client.infer("reader", {"x": X}, deadline_s=20.0)
        described = await client.metadata("reader")
    assert (found.outputs["y"] == np.maximum(X, 0)).all()
    assert found.datatypes == {"y": "FP32"}
    assert described.inputs[0].name == "x"
    assert described.outputs[0].datatype == "FP32"

    def ask() -> Any:
        with InferenceClient(context) as other:
            return other.metadata("reader"), other.infer("reader", {"x": X}, deadline_s=20.0)

    also_described, same = await asyncio.to_thread(ask)
    assert also_described == described
    assert (same.outputs["y"] == found.outputs["y"]).all()
    assert same.datatypes == found.datatypes


async def test_many_requests_share_a_connection(context: Context) -> None:
    async with AsyncInferenceClient(context) as client:
        found = await asyncio.gather(*(client.infer("reader", each) for each in requests(300)))
    for given, answer in zip(requests(300), found, strict=True):
        assert (answer.outputs["y"] == np.maximum(given["x"], 0)).all()


async def test_a_stream_answers_in_order(context: Context) -> None:
    async def more() -> AsyncIterator[dict[str, Any]]:
        for each in requests(50):
            yield each

    async with AsyncInferenceClient(context) as client:
        for given in (requests(50), more()):
            answers = [answer.outputs["y"] async for answer in client.infer_stream("reader", given)]
            assert len(answers) == 50
            assert all(
                (answer == np.maximum(each["x"], 0)).all() for answer, each in zip(answers, requests(50), strict=True)
            )


async def test_a_stream_ends_at_a_refusal_and_can_be_left(context: Context) -> None:
    async with AsyncInferenceClient(context) as client:
        with pytest.raises(ShoalError) as refused:
            async for _ in client.infer_stream("reader", [{"x": X}, {"other": X}, {"x": X}]):
                pass
        assert refused.value.code is Code.INVALID_ARGUMENT
        async with aclosing(client.infer_stream("reader", requests(1000))) as stream:
            async for _ in stream:
                break
        assert (await client.infer("reader", {"x": X})).outputs["y"].shape == X.shape


async def test_what_makes_a_request_may_fail(context: Context) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield {"x": X}
        raise RuntimeError("no more")

    async with AsyncInferenceClient(context) as client:
        with pytest.raises(RuntimeError, match="no more"):
            async for _ in client.infer_stream("reader", failing()):
                pass


async def test_refusals_come_with_their_code(context: Context) -> None:
    async with AsyncInferenceClient(context) as client:
        with pytest.raises(ShoalError) as refused:
            await client.infer("nobody", {"x": X})
        assert refused.value.code is Code.MODEL_NOT_FOUND
        with pytest.raises(ShoalError) as late:
            await client.infer("reader", {"x": X}, deadline_s=0.0)
        assert late.value.code is Code.DEADLINE_EXCEEDED


async def test_a_call_that_cannot_arrive_is_repeated_until_the_front_listens(
    node: DataPlaneNode, early_context: Context
) -> None:
    async with AsyncInferenceClient(early_context, retries=100) as client:
        asked = asyncio.create_task(client.infer("reader", {"x": X}, deadline_s=60.0))
        done, _ = await asyncio.wait((asked,), timeout=0.5)
        assert not done
        await node.configure()
        assert ((await asked).outputs["y"] == np.maximum(X, 0)).all()


async def test_so_does_the_client_without_asyncio(node: DataPlaneNode, early_context: Context) -> None:
    def ask() -> Any:
        with InferenceClient(early_context, retries=100) as client:
            return client.infer("reader", {"x": X}, deadline_s=60.0)

    asked = asyncio.create_task(asyncio.to_thread(ask))
    done, _ = await asyncio.wait((asked,), timeout=0.5)
    assert not done
    await node.configure()
    assert ((await asked).outputs["y"] == np.maximum(X, 0)).all()


async def test_no_gateway_is_an_end_in_time(context: Context) -> None:
    nowhere = replace(context, gateway="127.0.0.1:9")
    async with AsyncInferenceClient(nowhere, retries=1) as client:
        with pytest.raises(ShoalError) as refused:
            await client.infer("reader", {"x": X}, deadline_s=5.0)
    assert refused.value.code is Code.REPLICA_UNREACHABLE

"""What strangers send: tensors that lie (A43) and bodies that are too large (A14), at both front ends of a real node.

Whatever comes, the answer is a refusal with its code or the right tensors, nothing dies, and memory stays bounded.
"""

import asyncio
import hashlib
import json
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from harness.attacks.frame_fuzzer import mutate
from harness.clients.http2 import declare_4_gib
from harness.clients.oip import GrpcClient, InferenceError, OipClient, RestClient, Tensor, read_response
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.synthetic import model as onnx_model
from harness.models.synthetic import tensor
from harness.report import record
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.transport import MAX_MESSAGE
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey
from shoal.wire.limits import INFER_BYTES

SEED = 43
REQUESTS = 5000
"""At each of the two front ends."""
ALLOWED = frozenset(
    {Code.INVALID_ARGUMENT, Code.FIELD_TOO_MANY, Code.TOO_LARGE, Code.MODEL_NOT_FOUND, Code.UNIMPLEMENTED}
    | {Code.SHM_DENIED}
)
MEMORY_GROWTH = 256 * 2**20
Make = oip.ModelInferRequest
Rng = np.random.Generator


def three_inputs() -> bytes:
    """Sum of floats, negated longs, strings passed on: one input of fixed width, one of another, one without."""
    nodes = [
        helper.make_node("Relu", ["f"], ["f_out"]),
        helper.make_node("Neg", ["i"], ["i_out"]),
        helper.make_node("Identity", ["s"], ["s_out"]),
    ]
    inputs = [
        tensor("f", ["N", 4]),
        tensor("i", ["K"], TensorProto.INT64),
        tensor("s", ["M"], TensorProto.STRING),
    ]
    outputs = [
        tensor("f_out", ["N", 4]),
        tensor("i_out", ["K"], TensorProto.INT64),
        tensor("s_out", ["M"], TensorProto.STRING),
    ]
    return bytes(onnx_model(nodes, inputs, outputs).SerializeToString())


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    authority = Authority(tmp_path / "ca", "west", SystemClock().wall())
    model = tmp_path / "model.onnx"
    model.write_bytes(three_inputs())
    made = DataPlaneNode("n1", authority, tmp_path / "n1")
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "three"), model)
        await made.configure()
        yield made
    finally:
        await made.stop()


@pytest.fixture
def tenant(node: DataPlaneNode) -> Any:
    return node.authority.issue(Role.TENANT, "acme")


def strings(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(t)) + t for t in texts)


def sound(rng: Rng) -> tuple[Tensor, Tensor, Tensor]:
    rows, longs, texts = (int(n) for n in rng.integers(0, 4, 3))
    return (
        Tensor("f", "FP32", (rows, 4), rng.standard_normal(rows * 4).astype("<f4").tobytes()),
        Tensor("i", "INT64", (longs,), rng.integers(-(2**40), 2**40, longs).astype("<i8").tobytes()),
        Tensor("s", "BYTES", (texts,), strings(*(b"t" * int(n) for n in rng.integers(0, 5, texts)))),
    )


def right(inputs: tuple[Tensor, ...]) -> dict[str, bytes]:
    f, i, s = (t.raw for t in inputs)
    return {
        "f_out": np.maximum(np.frombuffer(f, "<f4"), 0).tobytes(),
        "i_out": (-np.frombuffer(i, "<i8")).tobytes(),
        "s_out": s,
    }


def message_of(inputs: tuple[Tensor, ...]) -> oip.ModelInferRequest:
    return Make(
        model_name="three",
        inputs=[Make.InferInputTensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in inputs],
        raw_input_contents=[t.raw for t in inputs],
    )


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


# each takes a sound message and makes it wrong; so each must be refused


def wrong_datatype(m: oip.ModelInferRequest, rng: Rng) -> None:
    pick(rng, m.inputs).datatype = pick(rng, ["FP64", "fp32", "", "INT32", "BF16", "FP8", "BOOL", "\0", "X" * 5000])


def wrong_name(m: oip.ModelInferRequest, rng: Rng) -> None:
    pick(rng, m.inputs).name = pick(rng, ["", "F", "f ", "../../x", "f\0", "\U0001f41f", "n" * 100_000])


def twice_the_name(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[1].name = m.inputs[0].name


def one_too_many(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs.add().CopyFrom(m.inputs[0])
    m.raw_input_contents.append(m.raw_input_contents[0])


def one_too_few(m: oip.ModelInferRequest, rng: Rng) -> None:
    del m.inputs[2]
    del m.raw_input_contents[2]


def negative(m: oip.ModelInferRequest, rng: Rng) -> None:
    pick(rng, m.inputs).shape[0] = pick(rng, [-1, -(2**63), -4])


def overflow(m: oip.ModelInferRequest, rng: Rng) -> None:
    shape = pick(rng, [[2**62, 4], [2**32, 2**32], [2**31, 4], [2**63 - 1], [3] * 40, [1] * 100_000, [2**24 + 1, 4]])
    chosen = pick(rng, m.inputs)
    chosen.shape[:] = shape


def wrong_rank(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].shape[:] = pick(rng, [[], [4], [1, 4, 1], [4, 0, 4]])


def wrong_size(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].shape[1] = pick(rng, [3, 5, 0, 2**20])


def short(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].shape[:] = [3, 4]
    m.raw_input_contents[0] = bytes(int(rng.integers(0, 47)))


def long(m: oip.ModelInferRequest, rng: Rng) -> None:
    at = int(rng.integers(2))
    m.raw_input_contents[at] = m.raw_input_contents[at] + bytes(int(rng.integers(1, 9)))


def lying_strings(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[2].shape[:] = [2]
    m.raw_input_contents[2] = pick(
        rng,
        [
            struct.pack("<I", 2**32 - 1) + b"ab",
            struct.pack("<I", 2**31) * 2,
            strings(b"a"),
            strings(b"a", b"b", b"c"),
            strings(b"a", b"b") + b"\0",
            b"\x01",
            b"",
        ],
    )


def many_empty_strings(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[2].shape[:] = [2**22]


def no_contents(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].shape[:] = [1, 4]
    del m.raw_input_contents[:]


def both_contents(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].shape[:] = [1, 4]
    m.raw_input_contents[0] = bytes(16)
    m.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])


def other_contents(m: oip.ModelInferRequest, rng: Rng) -> None:
    del m.raw_input_contents[:]
    m.inputs[0].shape[:] = [1, 4]
    pick(
        rng,
        [
            m.inputs[0].contents.int_contents,
            m.inputs[0].contents.fp64_contents,
            m.inputs[0].contents.uint64_contents,
        ],
    ).extend([1, 2, 3, 4])


def unknown_output(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.outputs.add(name=pick(rng, ["", "f", "y", "x" * 100_000]))


def unknown_model(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.model_name = pick(rng, ["", "two", "acme/three", "../three", "three\0", "t" * 100_000])


def shared_memory(m: oip.ModelInferRequest, rng: Rng) -> None:
    m.inputs[0].parameters["shared_memory_region"].string_param = "/dev/shm/x"


WRONGS: tuple[Callable[[oip.ModelInferRequest, Rng], None], ...] = (
    wrong_datatype,
    wrong_name,
    twice_the_name,
    one_too_many,
    one_too_few,
    negative,
    overflow,
    wrong_rank,
    wrong_size,
    short,
    long,
    lying_strings,
    many_empty_strings,
    no_contents,
    both_contents,
    other_contents,
    unknown_output,
    unknown_model,
    shared_memory,
)


class Tally:
    """What came of the requests, and what should not have."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def count_answer(self, label: str, fits: bool | None) -> None:
        """fits: whether the answer is right; None where nobody knows what was asked."""
        self.codes["OK"] += 1
        if label not in ("sound", "scrambled") or fits is False:
            self.wrong.append(f"{label}: answered")

    def count_refusal(self, label: str, error: InferenceError) -> None:
        self.codes[error.code or str(error.status)] += 1
        # too large for the transport, or no message at all: said by gRPC itself
        own = not error.code and error.status in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
        # a string that stopped being UTF-8 comes in and cannot come out: the runtime's binding says so
        own = own or (label == "scrambled" and error.code == Code.RUNTIME_FAILED)
        if label == "sound" or not (own or error.code in ALLOWED):
            self.wrong.append(f"{label}: {error}")


async def grpc_fuzz(client: GrpcClient, tally: Tally, rng: Rng) -> None:
    inputs = sound(rng)
    message = message_of(inputs)
    draw = rng.random()
    if draw < 0.1:
        label, data = "sound", message.SerializeToString()
    elif draw < 0.3:
        label, data = "scrambled", mutate(message.SerializeToString(), rng)
    else:
        wrong = pick(rng, WRONGS)
        wrong(message, rng)
        label, data = wrong.__name__, message.SerializeToString()
    try:
        answer = oip.ModelInferResponse.FromString(await client.call("ModelInfer", data))
    except InferenceError as error:
        tally.count_refusal(label, error)
        return
    outputs = {t.name: raw for t, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
    tally.count_answer(label, outputs == right(inputs) if label == "sound" else None)


def rest_body(rng: Rng) -> tuple[str, bytes, dict[str, str], bytes | None]:
    """(label, body, headers, the right sum of f) of one request, sound or not."""
    f = [round(float(x), 3) + 0.0 for x in rng.standard_normal(4)]  # never -0.0, whose maximum with 0 is either
    longs = [int(n) for n in rng.integers(-9, 9, 2)]
    document: dict[str, Any] = {
        "inputs": [
            {"name": "f", "datatype": "FP32", "shape": [1, 4], "data": f},
            {"name": "i", "datatype": "INT64", "shape": [2], "data": longs},
            {"name": "s", "datatype": "BYTES", "shape": [1], "data": ["t"]},
        ]
    }
    one = document["inputs"][int(rng.integers(3))]
    headers: dict[str, str] = {}
    draw = rng.random()
    if draw < 0.1:
        return "sound", json.dumps(document).encode(), headers, np.maximum(np.array(f, "<f4"), 0).tobytes()
    if draw < 0.3:
        return "scrambled", mutate(json.dumps(document).encode(), rng), headers, None
    label = str(
        pick(
            rng,
            ["datatype", "name", "twice", "few", "shape", "data", "deep", "grows", "binary", "header", "text", "keys"],
        )
    )
    body: bytes | None = None
    match label:
        case "datatype":
            one["datatype"] = pick(
                rng, ["FP64", "", None, 7, [], "BF16", "fp32", "INT8" if one["name"] == "s" else "BOOL"]
            )
        case "name":
            one["name"] = pick(rng, ["", None, 7, "F", {}, "\ud800", "n" * 100_000])
        case "twice":
            document["inputs"].append(dict(one))
        case "few":
            document["inputs"].remove(one)
        case "shape":
            one["shape"] = pick(rng, [None, "1", [-1], [2**63], [2**31, 2**31], [1.0], [True], [[1]], [0], [1] * 99])
        case "data":
            one["data"] = pick(rng, [None, 7, "x", {}, [], [None], [[[1]]], [1, "2"], [1e400], [2**70, 1], [1, 2, 3]])
        case "deep":
            body = json.dumps(document).encode()[:-1] + b',"x":' + b"[" * int(rng.integers(2000, 200_000)) + b"}"
        case "grows":
            body = (
                b'{"inputs":[' + pick(rng, [b"[],", b"{},", b"0,"]) * 9_000_000 + b"0]}"
                if rng.random() < 0.02
                else b"["
            )
        case "binary":
            one.pop("data")
            one["parameters"] = {"binary_data_size": pick(rng, [-1, 2**63, 10**30, 1.5, "7", None, 8, True])}
            headers["inference-header-content-length"] = str(len(json.dumps(document)))
        case "header":
            headers["inference-header-content-length"] = str(
                pick(rng, ["-1", "x", "1", "99999999", "1" * 30, "٣"[:0] or "0x1"])
            )
        case "text":
            body = pick(rng, [b"", b"null", b"[]", b'"x"', b"\xff\xfe{}", b"\x00", b"{" * 900, b'{"inputs":', b"1e999"])
        case _:
            document = pick(rng, [{"inputs": {}}, {"inputs": [1]}, {}, {"input": []}, {**document, "outputs": 7}])
    return label, json.dumps(document).encode() if body is None else body, headers, None


class KeptConnection:
    """One connection for many requests, made again when the server has closed it."""

    def __init__(self, client: RestClient) -> None:
        self._client = client
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def infer(self, body: bytes, headers: dict[str, str]) -> Any:
        if self._streams is None:
            self._streams = await self._client.connect()
        reader, writer = self._streams
        writer.write(self._client.request_bytes("POST", "/v2/models/three/infer", body, headers))
        async with asyncio.timeout(20):
            response = await read_response(reader)
        if response.headers.get("connection") == "close":
            self.close()
        return response

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def rest_fuzz(connection: KeptConnection, tally: Tally, rng: Rng) -> None:
    label, body, headers, wanted = rest_body(rng)
    response = await connection.infer(body, headers)
    if response.status == 200:
        found = {o["name"]: o["data"] for o in response.json()["outputs"]}
        fits = None if wanted is None else np.array(found["f_out"], "<f4").tobytes() == wanted
        tally.count_answer(label, fits)
    else:
        tally.count_refusal(
            label, InferenceError(response.status, response.headers["shoal-code"], "", response.body.decode())
        )


def resident(node: DataPlaneNode) -> int:
    """Bytes of front and worker."""
    record = json.loads(Path(node.local_worker("a1").socket).with_suffix(".json").read_text())
    assert node.front.pid is not None
    return sum(psutil.Process(pid).memory_info().rss for pid in (node.front.pid, record["pid"]))


async def test_a43_ten_thousand_fuzzed_requests(node: DataPlaneNode, tenant: Any) -> None:
    front, worker = node.front.pid, node.local_worker("a1")
    clients = [node.grpc_client(tenant) for _ in range(2)]
    connections = [KeptConnection(node.rest_client(tenant)) for _ in range(4)]
    grpc_tally, rest_tally = Tally(), Tally()
    before = resident(node)

    async def some(number: int, count: int, one: Callable[[Rng], Any]) -> None:
        rng = np.random.default_rng((SEED, number))
        for _ in range(count):
            await one(rng)

    try:
        async with asyncio.timeout(150), asyncio.TaskGroup() as group:
            for n in range(8):
                client = clients[n % 2]
                group.create_task(some(n, REQUESTS // 8, partial(grpc_fuzz, client, grpc_tally)))
            for n, connection in enumerate(connections):
                group.create_task(some(100 + n, REQUESTS // 4, partial(rest_fuzz, connection, rest_tally)))
        print(f"seed {SEED}: gRPC {dict(grpc_tally.codes)}; REST {dict(rest_tally.codes)}")
        assert (grpc_tally.wrong[:5], rest_tally.wrong[:5]) == ([], [])
        assert grpc_tally.codes.total() == rest_tally.codes.total() == REQUESTS
        for tally in (grpc_tally, rest_tally):
            assert tally.codes["OK"] >= REQUESTS // 20, "sound requests among them were answered"
            assert tally.codes[Code.INVALID_ARGUMENT] >= REQUESTS // 2
            assert tally.codes[Code.TOO_LARGE] > 0
        assert (node.front.pid, node.local_worker("a1"), node.exits) == (front, worker, []), "nothing died"
        grown = resident(node) - before
        assert grown < MEMORY_GROWTH, f"{grown / 2**20:.0f} MiB more than before"
        answered = {"grpc_answered": grpc_tally.codes["OK"], "rest_answered": rest_tally.codes["OK"]}
        record("A43", "P", 2 * REQUESTS, seed=SEED, crashes=0, wrong=0, grown_mib=grown // 2**20, **answered)
    finally:
        for connection in connections:
            connection.close()
        for client in clients:
            await client.close()


def floats(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose expanded size is rows * 16 bytes."""
    return (
        Tensor("f", "FP32", (rows, 4), bytes(rows * 16)),
        Tensor("i", "INT64", (0,), b""),
        Tensor("s", "BYTES", (0,), b""),
    )


@pytest.mark.parametrize("way", ["grpc", "token", "rest"])
async def test_a14_the_cap_is_met_and_not_passed(node: DataPlaneNode, tenant: Any, way: str) -> None:
    if way == "token":
        bearer = Credential("acme", hashlib.sha256(b"bearer").hexdigest(), Wall(SystemClock().wall() + 3600))
        await node.configure(credentials=(bearer,))
        client: OipClient = node.token_client(tenant.authority.read_bytes(), "bearer")
    else:
        client = node.grpc_client(tenant) if way == "grpc" else node.rest_client(tenant)
    full = INFER_BYTES // 16
    answer = await client.infer("three", floats(full), timeout=60)
    assert len(answer.outputs[0].raw) == INFER_BYTES
    with pytest.raises(InferenceError) as failed:
        await client.infer("three", floats(full + 1), timeout=60)
    assert failed.value.code == Code.TOO_LARGE
    assert failed.value.status in ("RESOURCE_EXHAUSTED", 413)
    one_more = Tensor("f", "UINT8", (INFER_BYTES + 1,), bytes(INFER_BYTES + 1))
    with pytest.raises(InferenceError) as by_one:
        await client.infer("three", (one_more,), timeout=60)
    assert by_one.value.code == Code.TOO_LARGE
    await client.close()
    record("A14", "P", 3, listener=f"data, {way}", cap_bytes=INFER_BYTES)


async def test_a14_declared_sizes_are_refused_before_anything_is_allocated(node: DataPlaneNode, tenant: Any) -> None:
    before = resident(node)
    rest = node.rest_client(tenant)
    head = rest.request_bytes("POST", "/v2/models/three/infer").replace(
        b"content-length: 0", b"content-length: 4294967296"
    )
    response = await rest.exchange(head + b"0123456789")
    assert (response.status, response.json()["code"]) == (413, Code.TOO_LARGE)
    over = head.replace(b"4294967296", str(MAX_MESSAGE + 1).encode())
    assert (await rest.exchange(over)).status == 413

    context = ssl.create_default_context(cafile=str(tenant.authority))
    context.load_cert_chain(tenant.certificate, tenant.key)
    address = f"127.0.0.1:{node.front.config.port}"
    path = "/inference.GRPCInferenceService/ModelInfer"
    answer = await asyncio.to_thread(declare_4_gib, address, path, context, "localhost")
    assert b"grpc-status" in answer
    assert b"TOO_LARGE" in answer
    grown = resident(node) - before
    assert grown < 32 * 2**20
    record("A14", "P", 3, listener="data, gRPC and REST", declared="4 GiB", grown_mib=grown // 2**20)
    with pytest.raises(InferenceError):
        await node.grpc_client(tenant).infer("three", (), timeout=5)

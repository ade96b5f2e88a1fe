"""A57: calls that are held open, and messages that never end, on every gRPC method of a front. Other clients do
not notice, and the front stays within its memory limit, also under nine large requests that are valid."""

import asyncio
import gzip
import hashlib
import itertools
import ssl
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from harness.clients.http2 import SETTINGS, WINDOW_UPDATE, Http2Connection
from harness.clients.oip import GrpcClient, InferenceError, Tensor, infer_request
from harness.cluster.dataplane_node import FRONT, DataPlaneNode
from harness.crypto.pki import Authority, CertificateFiles
from harness.models.synthetic import relu
from harness.report import record
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.call_places import CALLS, STREAMS_PER_CALLER
from shoal.agent.dataplane.ingress_admission import SMALL_S
from shoal.agent.dataplane.process import FrontProcess
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

MIB = 2**20
LIMIT = 512 * MIB
"""Of Kubernetes' gateways: `deploy/kubernetes/region/gateway.yaml`."""
SUPERVISOR = 80 * MIB
"""Room for what is beside a front in that container."""
SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"]
METHODS = [method.name for method in SERVICE.methods]
X = (Tensor("x", "FP32", (1, 4), bytes(16)),)
BEARER, SLOW_BEARER = "a" * 40, "b" * 40
BASELINE_CALLS = 200
POUR_S = 3.0


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[DataPlaneNode]:
    model = tmp_path / "relu.onnx"
    model.write_bytes(relu().SerializeToString())
    made = DataPlaneNode("n1", Authority(tmp_path / "ca", "west", SystemClock().wall()), tmp_path / "n1")
    made.config = replace(made.config, memory_bytes=LIMIT)
    made.front = FrontProcess(made.config, FRONT, SystemClock())
    try:
        await made.start()
        await made.load("a1", WorkloadKey("acme", "relu"), model)
        await made.load("a2", WorkloadKey("heavy", "relu"), model)
        await made.configure(credentials=(credential("acme", BEARER), credential("slow", SLOW_BEARER)))
        front = made.front.pid
        yield made
        assert (made.front.pid, made.front.restarts, made.exits) == (front, 0, []), "nothing died"
    finally:
        await made.stop()


def credential(tenant: str, bearer: str) -> Credential:
    return Credential(tenant, hashlib.sha256(bearer.encode()).hexdigest(), Wall(2.0**40))


class Sampled:
    """Anonymous memory of a process, looked at all the time."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.first = self.most = self.now()

    def now(self) -> int:
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    async def run(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            await asyncio.sleep(0.005)  # noqa: TID251 - a sampler's pace


@asynccontextmanager
async def sample_memory(node: DataPlaneNode) -> AsyncIterator[Sampled]:
    assert node.front.pid is not None
    found = Sampled(node.front.pid)
    running = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        running.cancel()


def trusting(node: DataPlaneNode, files: CertificateFiles | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(node.files.authority))
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context


async def connect_http2(node: DataPlaneNode, files: CertificateFiles | None, *, window: int = 65535) -> Http2Connection:
    """files: None for the port of bearer tokens."""
    config = node.front.config
    port = config.port
    return await Http2Connection.connect(f"127.0.0.1:{port}", trusting(node, files), "localhost", window=window)


class Pour:
    """Messages that never end, as fast as the server's windows allow."""

    def __init__(self, connection: Http2Connection, streams: Sequence[int], size: int) -> None:
        self._connection = connection
        self._left = dict.fromkeys(streams, size)
        self._looked = 0
        self._whole = 65535
        self._initial = 65535
        self._of: Counter[int] = Counter()

    async def run(self) -> None:
        connection = self._connection
        for stream in self._left:
            connection.send_data(stream, b"\0" + struct.pack("!I", 64 * MIB))
            self._whole -= 5
            self._of[stream] -= 5
        for turn in itertools.count():
            if not any(self._left.values()) or connection.closed.is_set():
                return
            self._look()
            for stream, left in self._left.items():
                size = min(left, self._whole, self._initial + self._of[stream], 2**14)
                if turn % 64 == 0 and connection.is_ended(stream):
                    self._left[stream] = 0
                elif size > 0:
                    connection.send_data(stream, bytes(size))
                    self._whole -= size
                    self._of[stream] -= size
                    self._left[stream] -= size
            await asyncio.sleep(0)  # noqa: TID251 - others run too

    def _look(self) -> None:
        for kind, flags, stream, payload in self._connection.seen[self._looked :]:
            if kind == WINDOW_UPDATE:
                size = int.from_bytes(payload)
                if stream:
                    self._of[stream] += size
                else:
                    self._whole += size
            elif kind == SETTINGS and not flags & 1:
                for at in range(0, len(payload), 6):
                    which, value = struct.unpack_from("!HI", payload, at)
                    self._initial = value if which == 4 else self._initial
        self._looked = len(self._connection.seen)


async def latencies(
    ask: Callable[[], Awaitable[object]], *, during: "asyncio.Future[Any] | None" = None
) -> list[float]:
    loop = asyncio.get_running_loop()
    found: list[float] = []
    while len(found) < BASELINE_CALLS or (during is not None and not during.done()):
        start = loop.time()
        await ask()
        found.append(loop.time() - start)
    return sorted(found)


def p99(found: list[float]) -> float:
    return found[int(0.99 * (len(found) - 1))]


def clients(node: DataPlaneNode) -> list[GrpcClient]:
    """One of each port, of a tenant that does nothing wrong."""
    root = node.files.authority.read_bytes()
    return [
        node.grpc_client(node.authority.issue(Role.TENANT, "acme")),
        GrpcClient(node.front.config.port, root, None, BEARER),
    ]


async def test_a57_open_calls_without_credentials_refuse_nobody(node: DataPlaneNode) -> None:
    """As many as there are places for known callers, from callers that do not read either."""
    victims = clients(node)
    calm = [p99(await latencies(partial(each.infer, "relu", X))) for each in victims]
    opened = []
    for _ in range(CALLS // 128):
        connection = await connect_http2(node, None, window=0)
        for stream in range(1, 257, 2):
            connection.open_stream(stream, f"/{SERVICE.full_name}/ServerLive")
        opened.append(connection)
    loop = asyncio.get_running_loop()
    hurt = []
    for each in victims:
        held = loop.create_future()
        loop.call_later(2.0, held.set_result, None)
        hurt.append(p99(await latencies(partial(each.infer, "relu", X), during=held)))
    probe = GrpcClient(node.front.config.port, node.files.authority.read_bytes())
    await until(probe.live, SMALL_S + 5, "no call without credentials is held longer than an answer may take")
    await probe.close()
    for connection in opened:
        await connection.close()
    for each in victims:
        await each.close()
    record("A57", "P", 1, calls=128 * len(opened), calm_p99_ms=ms(calm), hurt_p99_ms=ms(hurt))
    assert all(h <= max(1.5 * c, 0.05) for h, c in zip(hurt, calm, strict=True)), (calm, hurt)


COMPRESSIONS = pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip], ids=["plain", "gzip"]
)


@COMPRESSIONS
@pytest.mark.parametrize("size", [4 * MIB, 12 * MIB])
async def test_a55_one_crowded_request_holds_no_front(
    node: DataPlaneNode, size: int, compression: grpc.Compression
) -> None:
    """Empty requested outputs, two bytes each; compressed they are a few KB."""
    attacker = node.grpc_client(node.authority.issue(Role.TENANT, "heavy"))
    victim = clients(node)[0]
    crowded = b"\x0a\x04relu" + b"\x32\x00" * (size // 2)
    assert node.front.pid is not None
    process = psutil.Process(node.front.pid)
    async with sample_memory(node) as memory:
        before_s = sum(process.cpu_times()[:2])
        asking = asyncio.ensure_future(attacker.call("ModelInfer", crowded, compression=compression))
        taken = await latencies(partial(victim.infer, "relu", X), during=asking)
        used_s = sum(process.cpu_times()[:2]) - before_s
        with pytest.raises(InferenceError) as refused:
            await asking
    assert refused.value.code == Code.FIELD_TOO_MANY
    await attacker.close()
    await victim.close()
    grown = memory.most - memory.first
    record("A55", "P", 1, size=size, cpu_s=round(used_s, 2), longest_ms=round(max(taken) * 1e3), grown_mib=grown // MIB)
    assert max(taken) < 0.5, "no loop was held for longer"
    assert grown <= max(4 * size, 16 * MIB)


def ms(found: list[float]) -> list[float]:
    return [round(each * 1e3, 1) for each in found]


@pytest.mark.parametrize("sure", [True, pytest.param(False, marks=pytest.mark.long)], ids=["certificate", "token"])
async def test_a57_unfinished_messages_of_one_caller_stay_within_the_memory_limit(
    node: DataPlaneNode, sure: bool
) -> None:
    """Eight of 64 MiB each, on every method in turn."""
    victims = clients(node)
    files = node.authority.issue(Role.TENANT, "slow") if sure else None
    said = {} if sure else {"authorization": f"Bearer {SLOW_BEARER}"}
    streams = range(1, 2 * STREAMS_PER_CALLER, 2)
    most: dict[str, int] = {}
    taken: list[float] = []
    for method in METHODS:
        async with sample_memory(node) as memory:
            connection = await connect_http2(node, files)
            for stream in streams:
                connection.open_stream(stream, f"/{SERVICE.full_name}/{method}", **said)
            pouring = asyncio.ensure_future(Pour(connection, streams, 63 * MIB).run())
            for each in victims:
                taken += await latencies(partial(each.infer, "relu", X))
            await asyncio.wait((pouring,), timeout=POUR_S)
            pouring.cancel()
            await connection.close()
        most[method] = memory.most // MIB
    for each in victims:
        await each.close()
    record("A57", "P", len(METHODS), most_mib=most, longest_ms=round(max(taken) * 1e3))
    assert max(most.values()) * MIB < LIMIT - SUPERVISOR, most
    assert max(taken) < 2


BOMBS = 64


@pytest.mark.parametrize("said", [None, 63 * MIB], ids=["honest", "lying"])
async def test_a14_bombs_of_gzip_hold_no_more_than_a_message_may(node: DataPlaneNode, said: int | None) -> None:
    """1 GiB of zeros each, as 1 MiB; lying: the trailer says 63 MiB. Another tenant is answered meanwhile."""
    bomb = gzip.compress(bytes(1024 * MIB), 1)
    if said is not None:
        bomb = bomb[:-4] + said.to_bytes(4, "little")
    heavy = node.grpc_client(node.authority.issue(Role.TENANT, "heavy"))
    victim = clients(node)[0]
    codes: Counter[str] = Counter()

    async def ask() -> None:
        with pytest.raises(InferenceError) as failed:
            await heavy.call("ModelInfer", bomb, timeout=60)
        codes[failed.value.code] += 1

    async with sample_memory(node) as memory:
        asking = asyncio.gather(*(ask() for _ in range(BOMBS)))
        taken = await latencies(lambda: victim.infer("relu", X), during=asking)
        await asking
    await heavy.close()
    await victim.close()
    record("A14", "P", BOMBS, said=said, most_mib=memory.most // MIB, codes=dict(codes), longest_ms=ms(taken[-1:])[0])
    assert memory.most < LIMIT - SUPERVISOR, f"{memory.most / MIB:.0f} MiB"
    if said is None:
        assert codes == {Code.TOO_LARGE: BOMBS}
        assert memory.most - memory.first < 2 * BOMBS * len(bomb), "none of them was expanded"
    else:
        assert codes.keys() <= {Code.INVALID_ARGUMENT, Code.OVERLOADED}
        assert codes[Code.INVALID_ARGUMENT] >= 2


@COMPRESSIONS
async def test_a57_large_requests_that_are_refused_are_not_kept(
    node: DataPlaneNode, compression: grpc.Compression
) -> None:
    """One after another: what each of them took is free before the next, whatever it was refused for."""
    content = bytes(60 * MIB)
    wrong = infer_request("relu", (Tensor("y", "FP32", (15 * MIB // 4, 4), content),)).SerializeToString()
    unknown = infer_request("nothing", (Tensor("x", "FP32", (15 * MIB // 4, 4), content),)).SerializeToString()
    heavy = node.grpc_client(node.authority.issue(Role.TENANT, "heavy"))
    async with sample_memory(node) as memory:
        for turn in range(12):
            with pytest.raises(InferenceError) as failed:
                await heavy.call("ModelInfer", (wrong, unknown)[turn % 2], timeout=60, compression=compression)
            assert failed.value.code == (Code.INVALID_ARGUMENT, Code.MODEL_NOT_FOUND)[turn % 2]
    await heavy.close()
    record("A57", "P", 12, most_mib=memory.most // MIB)
    assert memory.most < LIMIT - SUPERVISOR, f"{memory.most / MIB:.0f} MiB"


@COMPRESSIONS
async def test_a57_nine_large_requests_stay_within_the_memory_limit(
    node: DataPlaneNode, compression: grpc.Compression
) -> None:
    """Valid ones, of one tenant: answered or refused, and another tenant's are answered meanwhile."""
    content = bytes(60 * MIB)
    large = infer_request("relu", (Tensor("x", "FP32", (15 * MIB // 4, 4), content),)).SerializeToString()
    heavy = node.grpc_client(node.authority.issue(Role.TENANT, "heavy"))
    victim = clients(node)[0]
    codes: Counter[str] = Counter()

    async def ask() -> None:
        try:
            answer = await heavy.call("ModelInfer", large, timeout=60, compression=compression)
            assert oip.ModelInferResponse.FromString(answer).raw_output_contents == [content]
            codes["OK"] += 1
        except InferenceError as error:
            codes[error.code] += 1

    async with sample_memory(node) as memory:
        asking = asyncio.gather(*(ask() for _ in range(9)))
        taken = await latencies(lambda: victim.infer("relu", X), during=asking)
        await asking
        codes_in_turn = codes.copy()
        await ask()
    await heavy.close()
    await victim.close()
    record("A57", "P", 1, most_mib=memory.most // MIB, codes=dict(codes), longest_ms=round(max(taken) * 1e3))
    assert memory.most < LIMIT - SUPERVISOR, f"{memory.most / MIB:.0f} MiB"
    assert codes_in_turn.keys() <= {"OK", "OVERLOADED"}
    assert codes["OK"] >= 2, codes

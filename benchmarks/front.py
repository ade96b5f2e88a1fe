"""The CPU time of a front's own code for a request, in one process: no socket, no TLS, no worker, no other program.

`python benchmarks/front.py` builds a front as its process does. Requests come as the bytes of one client's connection;
a connection in memory answers for the worker, with the bytes that the request had. So a figure is that of HTTP/2, gRPC,
routing, admission, metering and frames, by the process's own clock: other programs of the machine hardly change it.
What the kernel and OpenSSL take comes on top, and in `shoal bench serving`. With `--compiled FOLDER`, a folder that
`deploy/compiled/build.py` made, rounds of it alternate with rounds of the Python sources. `--profile` shows where the
time goes, by function.
"""

import asyncio
import cProfile
import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from _builds import run
from _in_memory import Sink, frames_in, pass_bytes
from transport import requests_of

from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.data_port import DataPort
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.memory import KEPT_BYTES
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.dataplane.upstream import ConnectedWorker, PeerClients, WorkerClients
from shoal.agent.frames import FrameClient
from shoal.agent.frames.format import Frame, FrameReader, FrameType, encode_head
from shoal.agent.ports import LocalWorker
from shoal.host import memory as machine
from shoal.http2 import frames
from shoal.http2.grpc_messages import frame_message
from shoal.http2.header_blocks import encode
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

SERVICE: Final = "/inference.GRPCInferenceService"
TOGETHER: Final = "16 x 110 KB"
"""Requests in flight together, whose frames come by turns, within the windows that the front gives."""
BODIES: Final = {"ServerReady": 0, "64 floats": 256, "600 KB": 600_000, "1 MB": 2**20, TOGETHER: 110_592}
"""Bytes of the tensor of a request; 0: a request for no model."""
REQUESTS: Final = {"ServerReady": 4000, "64 floats": 2000, "600 KB": 150, "1 MB": 100, TOGETHER: 400}
IN_FLIGHT: Final = 16
READ_TOGETHER: Final = 180_000
"""Bytes of these that the front reads at once, as it does where it is the slower side."""
TURNS: Final = 20
SHARD: Final = 2**14
"""Bytes that arrive at once of a large request: a record of TLS."""
KEY: Final = WorkloadKey("acme", "echo")
ENDPOINT: Final = Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
TOKEN: Final = "secret"


class _Client:
    """Keeps IN_FLIGHT requests under way on one connection, as a client does that sends a frame of each in turn."""

    def __init__(self, message: bytes, count: int) -> None:
        path = f"{SERVICE}/ModelInfer".encode()
        self._block = encode(
            (
                (b":method", b"POST"), (b":scheme", b"https"), (b":path", path),
                (b"content-type", b"application/grpc"), (b"authorization", f"Bearer {TOKEN}".encode()),
            )
        )  # fmt: skip
        self._body = frame_message(message)
        self._last = 2 * count
        self._next = 1
        self._sent: dict[int, int] = {}
        """Bytes of the body, by stream."""
        self._windows: dict[int, int] = {}
        self._turns: deque[int] = deque()
        """Streams whose body is not sent whole."""
        self._ready = bytearray()
        self._received = bytearray()
        self.answered = 0

    def on_bytes(self, data: bytes) -> None:
        """What the front sends."""
        self._received += data
        received, at = self._received, 0
        while len(received) - at >= frames.HEAD_BYTES:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(received, at)
            end = at + frames.HEAD_BYTES + (high << 16 | low)
            if end > len(received):
                break
            if kind == frames.WINDOW_UPDATE and stream in self._windows:
                self._windows[stream] += int.from_bytes(received[end - 4 : end], "big")
            elif kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
                del self._windows[stream]
                self.answered += 1
            at = end
        del received[:at]

    def send(self) -> bytes:
        """What is read at once next; empty where every request waits for a window or its answer."""
        while len(self._windows) < IN_FLIGHT and self._next < self._last:
            self._sent[self._next], self._windows[self._next] = 0, frames.DEFAULT_WINDOW
            self._ready += frames.headers(self._next, self._block, 2**14, end_stream=False)
            self._turns.append(self._next)
            self._next += 2
        waiting = 0
        while len(self._ready) < READ_TOGETHER and waiting < len(self._turns):
            stream = self._turns.popleft()
            begin = self._sent[stream]
            size = min(2**14, self._windows[stream], len(self._body) - begin)
            is_last = begin + size == len(self._body)
            waiting = 0 if size else waiting + 1
            if size:
                flags = frames.END_STREAM if is_last else 0
                self._ready += frames.head(size, frames.DATA, flags, stream) + self._body[begin : begin + size]
                self._sent[stream] += size
                self._windows[stream] -= size
            if not is_last:
                self._turns.append(stream)
        found = bytes(self._ready[:READ_TOGETHER])
        del self._ready[:READ_TOGETHER]
        return found


class _Worker:
    """Answers for a worker: a request comes back as it came."""

    def __init__(self, client: FrameClient) -> None:
        self._client = client
        self._reader = FrameReader()
        self._waiting: list[Frame] = []

    def on_write(self, data: bytes) -> None:
        self._waiting += frames_in(self._reader, data)

    def answer(self, most: int | None = None, *, with_request: bool = True) -> None:
        """All that came, or at most so many. with_request: an answer is what was asked; otherwise it is empty."""
        waiting, self._waiting = self._waiting[:most], [] if most is None else self._waiting[most:]
        for frame in waiting:
            payload = frame.payload if with_request else b""
            pass_bytes(self._client, encode_head(FrameType.ANSWER, frame.call, b"", len(payload)) + payload)


async def _front() -> tuple[DataPort, _Worker]:
    machine.keep_freed(KEPT_BYTES)  # as a front does
    clock, workers = SystemClock(), WorkerClients()
    files = TlsFiles(Path("certificate"), Path("key"), Path("authority"))
    authorities = Authorities("west", files)
    peers = PeerClients("west", files, authorities)
    sessions = FrontSessions("west", "n1", clock, workers, peers, clock.wall)
    callers = CallerAuth("west", "n1", clock.wall)
    plane = DataPlane(FrontSettings("west", "n1"), clock, workers, peers, callers, sessions)
    known = LocalWorker("a-1", KEY, "socket", "nonce")
    token = Credential(KEY.tenant, hashlib.sha256(TOKEN.encode()).hexdigest(), Wall(4e9))
    plane.configure((Route(KEY, 1, (ENDPOINT,)),), (token,), (known,))
    client = FrameClient(None)
    worker = _Worker(client)
    client.connection_made(Sink(worker.on_write))
    welcome = encode_head(FrameType.WELCOME, 0, b"", 0)
    pass_bytes(client, welcome)
    workers._connected["a-1"] = ConnectedWorker(workers, known, client)
    return DataPort(plane, "127.0.0.1", 0, files, authorities), worker


def _body(name: str) -> bytes:
    size = BODIES[name]
    if not size:
        return b""
    asked = oip.ModelInferRequest(model_name=KEY.name, raw_input_contents=[bytes(size)])
    asked.inputs.add(name="x", datatype="FP32", shape=[size // 4])
    return asked.SerializeToString()


async def measure(names: Sequence[str], profile: cProfile.Profile | None) -> dict[str, float]:
    """CPU microseconds of a request, by case."""
    port, worker = await _front()
    answered = 0

    def on_write(data: bytes) -> None:
        nonlocal answered
        answered += len(data)

    found = {}
    for name in names:
        count, body = REQUESTS[name], _body(name)
        if name == TOGETHER:
            found[name] = await _measure_together(port, worker, _Client(body, count), count, profile)
            continue
        place = port.connections.add("127.0.0.1", lambda: None)
        assert place is not None
        session = port._http2.session(place)
        session.connection_made(Sink(on_write))
        method = "ModelInfer" if body else "ServerReady"
        wanted = requests_of(f"{SERVICE}/{method}", (("authorization", f"Bearer {TOKEN}"),), body, count)
        session.data_received(frames.PREFACE + frames.settings(((frames.INITIAL_WINDOW_SIZE, 2**30),)))
        session.data_received(frames.window_update(0, 2**30))
        before = answered
        if profile is not None:
            profile.enable()
        began = time.process_time()
        for request in wanted:
            for shard in _shards(request):
                session.data_received(shard)
            worker.answer()
            await asyncio.sleep(0)
        for _ in range(TURNS):  # what was left for another turn of the loop
            worker.answer()
            await asyncio.sleep(0)
        found[name] = (time.process_time() - began) / count * 1e6
        if profile is not None:
            profile.disable()
        if answered - before < count * max(1, len(body)):
            raise RuntimeError(f"{name}: {answered - before} bytes answer {count} requests of {len(body)}")
    return found


async def _measure_together(
    port: DataPort, worker: _Worker, client: _Client, count: int, profile: cProfile.Profile | None
) -> float:
    """CPU microseconds of a request without the client's."""
    place = port.connections.add("127.0.0.1", lambda: None)
    assert place is not None
    session = port._http2.session(place)
    session.connection_made(Sink(client.on_bytes))
    session.data_received(frames.PREFACE + frames.settings(()))
    used_s, idle = 0.0, 0
    while client.answered < count:
        data, before = client.send(), client.answered
        if profile is not None:
            profile.enable()
        began = time.process_time()
        if data:
            session.data_received(data)
        await asyncio.sleep(0)
        worker.answer(2, with_request=False)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        used_s += time.process_time() - began
        if profile is not None:
            profile.disable()
        idle = 0 if data or client.answered > before else idle + 1
        if idle > 100 * TURNS:
            raise RuntimeError(f"{client.answered} of {count} requests were answered")
    return used_s / count * 1e6


def _shards(request: bytes) -> Iterator[memoryview]:
    view = memoryview(request)
    for at in range(0, len(view), SHARD):
        yield view[at : at + SHARD]


def main() -> None:
    run(__doc__, tuple(BODIES), measure)


if __name__ == "__main__":
    main()

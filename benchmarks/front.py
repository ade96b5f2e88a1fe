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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from _builds import run
from _in_memory import Sink, feed
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
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Wall
from shoal.types.workload import WorkloadKey

SERVICE: Final = "/inference.GRPCInferenceService"
BODIES: Final = {"ServerReady": 0, "64 floats": 256, "600 KB": 600_000, "1 MB": 2**20}
"""Bytes of the tensor of a request; 0: a request for no model."""
REQUESTS: Final = {"ServerReady": 4000, "64 floats": 2000, "600 KB": 150, "1 MB": 100}
TURNS: Final = 20
SHARD: Final = 2**14
"""Bytes that arrive at once of a large request: a record of TLS."""
KEY: Final = WorkloadKey("acme", "echo")
ENDPOINT: Final = Endpoint("a-1", "n1", EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
TOKEN: Final = "secret"


class _Worker:
    """Answers for a worker: a request comes back as it came."""

    def __init__(self, client: FrameClient) -> None:
        self._client = client
        self._reader = FrameReader()
        self._waiting: list[Frame] = []

    def on_write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = self._reader.buffer()
            size = min(len(room), len(view))
            room[:size] = view[:size]
            self._reader.on_received(size)
            view = view[size:]
            while (frame := self._reader.next_frame(2**25)) is not None:
                self._waiting.append(frame)

    def answer(self) -> None:
        """All that came."""
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            head = encode_head(FrameType.ANSWER, frame.call, b"", len(frame.payload))
            feed(self._client, head + frame.payload)


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
    feed(client, welcome)
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


def _shards(request: bytes) -> Iterator[memoryview]:
    view = memoryview(request)
    for at in range(0, len(view), SHARD):
        yield view[at : at + SHARD]


def main() -> None:
    run(__doc__, tuple(BODIES), measure)


if __name__ == "__main__":
    main()

"""The CPU time of a worker's own code for a request, in one process: no socket, no front, no other program.

`python benchmarks/worker.py` builds a worker's service as its process does, but for the confinement, on one processor.
It loads a model that answers its input, so that nearly nothing is the model's. Requests come as the bytes of a front's
connection. So a figure is that of frames, reading the request, queues, metering, the runtime's call and the answer, by
the process's own clock: other programs of the machine hardly change it. What the kernel takes for the socket comes on
top, and in `shoal bench serving`; that of a large request has the two copies of this program's own front in it.
`runtime alone` is the bare call of the runtime for 64 floats. Options as those of `front.py`.
"""

import asyncio
import cProfile
import hashlib
import json
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
from _builds import run
from _in_memory import Sink, frames_in, pass_bytes
from onnx import TensorProto, helper

from shoal.agent.driver_port import DeviceAccess
from shoal.agent.frames import FrameServer
from shoal.agent.frames.format import FrameReader, FrameType, InferHeader, encode_head, encode_infer, encode_json
from shoal.agent.frames.server import _ServedConnection
from shoal.agent.packing import pack
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.providers import CPU_PROVIDER
from shoal.agent.worker.service import WorkerService
from shoal.host import gc_freeze, logs
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Work

NONCE: Final = "secret"
ALONE: Final = "runtime alone"
CASES: Final = {
    "64 floats": (256, 1, 1),
    "64 floats, 16 at once": (256, 16, 1),
    "64 floats, thread": (256, 1, 2),
    "600 KB": (600_000, 1, 1),
    "1 MB": (2**20, 1, 1),
    ALONE: (256, 1, 1),
}
"""Bytes of the tensor, requests in flight, and threads of the runtime: with more than one, a run has one of ours."""
REQUESTS: Final = {256: 4000}
LARGE_REQUESTS: Final = 200
WARM: Final = 50
LIMIT_S: Final = 60.0


class _Front:
    """The other end of the worker's connection."""

    def __init__(self, server: FrameServer) -> None:
        own, self._socket = socket.socketpair()  # the kernel is asked who is at its end
        self._sink = Sink(self._on_write, socket=own)
        self._reader = FrameReader()
        self._answered = asyncio.Event()
        self._left = 0
        self.connection = _ServedConnection(server)
        self.connection.connection_made(self._sink)
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        hello = encode_json({"nonce": NONCE})
        pass_bytes(self.connection, encode_head(FrameType.HELLO, 0, hello, 0))

    async def load(self, order: LoadOrder) -> None:
        """Returns once it is ready."""
        payload, header = pack(order), encode_json({"kind": "load"})
        self._loaded = asyncio.get_running_loop().create_future()
        pass_bytes(self.connection, encode_head(FrameType.CALL, 1, header, len(payload)) + payload)
        await asyncio.wait_for(self._loaded, LIMIT_S)

    async def ask(self, requests: Sequence[bytes], together: int) -> None:
        """Frames of requests, so many at a time."""
        for at in range(0, len(requests), together):
            some = requests[at : at + together]
            self._left = len(some)
            self._answered.clear()
            pass_bytes(self.connection, b"".join(some))
            if self._left:
                await self._answered.wait()

    def _on_write(self, data: bytes) -> None:
        for frame in frames_in(self._reader, data):
            if frame.frame_type is FrameType.ANSWER:
                self._left -= 1
                if not self._left:
                    self._answered.set()
            elif frame.frame_type is FrameType.REFUSAL:
                raise SystemExit(frame.header.decode())
            elif frame.frame_type is FrameType.PUSH and not self._loaded.done():
                state = json.loads(frame.payload)
                if state["refusal"] is not None:
                    raise SystemExit(str(state["refusal"]))
                if state["state"] == "ready":
                    self._loaded.set_result(None)


def _model(folder: Path, size: int) -> Path:
    """It answers a tensor of so many bytes with itself."""
    tensors = [helper.make_tensor_value_info(each, TensorProto.FLOAT, [1, size // 4]) for each in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", tensors[:1], tensors[1:])
    path = folder / f"{size}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def _order(path: Path, name: str, threads: int) -> LoadOrder:
    return LoadOrder(
        assignment=name,
        shared_by="acme",
        digest=f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        path=str(path),
        provider=CPU_PROVIDER,
        precision="fp32",
        threads=threads,
        runners=1,
        queue=64,
        memory_bytes=0,
        max_request_bytes=2**26,
        warm_up_s=LIMIT_S,
        work=Work(),
        weights=0.0,
        access=DeviceAccess(),
        slots=(),
    )


def _requests(name: str, size: int, count: int) -> list[bytes]:
    """Frames."""
    asked = oip.ModelInferRequest(model_name="echo", raw_input_contents=[np.ones(size // 4, np.float32).tobytes()])
    asked.inputs.add(name="x", datatype="FP32", shape=[1, size // 4])
    body = asked.SerializeToString()
    header = encode_infer(InferHeader(name, "west/acme", "", time.monotonic() + 3600.0))
    return [encode_head(FrameType.INFER, 100 + number, header, len(body)) + body for number in range(count)]


async def measure(names: Sequence[str], profile: cProfile.Profile | None) -> dict[str, float]:
    """CPU microseconds of a request, by case."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as of the serving benchmark's servers
    logs.configure("warning", process="worker")
    service = WorkerService(mmap.mmap(-1, 2**16), asyncio.Event())
    server = FrameServer("unused", NONCE, service.handlers(), on_infer=service.on_infer)
    service.serve_on(server)
    front = _Front(server)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in names:
            size, together, threads = CASES[case]
            path = _model(Path(folder), size)
            count = REQUESTS.get(size, LARGE_REQUESTS)
            if case == ALONE:
                found[case] = _measure_alone(path, size, count)
                continue
            await front.load(_order(path, case, threads))
            await front.ask(_requests(case, size, WARM), together)
            wanted = _requests(case, size, count)
            gc_freeze.freeze()
            if profile is not None:
                profile.enable()
            began = time.process_time()
            await front.ask(wanted, together)
            found[case] = (time.process_time() - began) / count * 1e6
            if profile is not None:
                profile.disable()
    return found


def _measure_alone(path: Path, size: int, count: int) -> float:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_mem_pattern = False
    session = ort.InferenceSession(str(path), options, providers=[CPU_PROVIDER])
    feeds = {"x": np.ones((1, size // 4), np.float32)}
    for _ in range(WARM):
        session.run(["y"], feeds)
    began = time.process_time()
    for _ in range(count):
        session.run(["y"], feeds)
    return (time.process_time() - began) / count * 1e6


def main() -> None:
    run(__doc__, tuple(CASES), measure)


if __name__ == "__main__":
    main()

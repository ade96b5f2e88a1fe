"""A pool of real worker processes under test: records its events, and makes requests as a front does."""

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.builders import agent_values
from harness.models.engine_cases import digest
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.frames import FrameClient, FrameMessage, Header
from shoal.agent.ports import WorkerEvent, WorkerReady, WorkerStats
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.agent.worker.tensors import DATATYPES, to_raw
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Assignment, Batching, Work
from shoal.types.device import Device, DeviceKind
from shoal.types.units import Bytes
from shoal.types.workload import WorkloadKey

Array = NDArray[Any]
E = TypeVar("E", bound=WorkerEvent)

CPU = Device(
    name="cpu0",
    kind=DeviceKind.CPU,
    vendor="test",
    model="test",
    driver="linux",
    driver_version="1",
    runtime_version="onnxruntime",
    provider="CPUExecutionProvider",
    memory_bytes=Bytes(2**34),
    parallelism=2,
)


class WorkerClient:
    """Sends requests to one assignment."""

    def __init__(self, connection: FrameClient, assignment: str) -> None:
        self._connection = connection
        self._assignment = assignment

    @property
    def in_flight(self) -> int:
        return self._connection.in_flight

    async def call(
        self,
        kind: str,
        payload: bytes | memoryview = b"",
        *,
        header: Header | None = None,
        timeout: float | None = None,
    ) -> FrameMessage:
        named = {"assignment": self._assignment, **(header or {})}
        return await self._connection.call(kind, payload, header=named, timeout=timeout)

    async def ask(self, body: bytes, *, origin: str = "test", deadline_s: float = 30.0) -> bytes:
        """The answer to a serialized request."""
        answer = await self._connection.infer(self._assignment, body, deadline_s, origin, patience_s=5)
        return bytes(answer.payload)

    async def close(self) -> None:
        await self._connection.close()


class WorkerPoolHarness:
    """`async with WorkerPoolHarness(folder) as pool`: adopts workers left in `folder`, and ends its own unless told to
    keep them."""

    def __init__(
        self,
        folder: Path,
        options: PoolOptions | None = None,
        device: Device = CPU,
        access: DeviceAccess = DeviceAccess(),  # noqa: B008 - a value
        *,
        keep: bool = False,
        models: Path | None = None,
    ) -> None:
        """models: where they are put, and all that workers may open; by default any temporary file."""
        self.folder = models or folder
        self.run = folder / "run"
        self.device = device
        self.keep = keep
        self.events: list[WorkerEvent] = []
        self.workers = ProcessWorkers(
            self.run,
            models or Path(tempfile.gettempdir()),
            SystemClock(),
            {device.name: device}.get,
            lambda _: access,
            options,
        )

    async def __aenter__(self) -> Self:
        self.adopted = await self.workers.adopt()
        self._listening = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.cancel()
        await self.workers.close(keep=self.keep)

    async def _listen(self) -> None:
        async for event in self.workers.events():
            self.events.append(event)

    def assignment(
        self,
        name: str,
        data: bytes,
        *,
        memory: int = 0,
        work: Work | None = None,
        tenant: str = "default",
        shared: bool = False,
        batching: Batching | None = None,
    ) -> tuple[Assignment, Path]:
        path = self.folder / f"{name}.onnx"
        path.write_bytes(data)
        asked = agent_values.assignment(
            name,
            workload=WorkloadKey(tenant, name),
            model=digest(data),
            model_bytes=Bytes(len(data)),
            device=self.device.name,
            provider=self.device.provider,
            shared_worker=shared,
            memory_bytes=Bytes(memory),
            work=work or Work(),
            batching=batching,
        )
        return asked, path

    async def start(
        self, name: str, data: bytes, *, memory: int = 0, work: Work | None = None, batching: Batching | None = None
    ) -> None:
        assignment, path = self.assignment(name, data, memory=memory, work=work, batching=batching)
        await self.workers.start(assignment, str(path))

    async def serve(
        self, name: str, data: bytes, *, memory: int = 0, work: Work | None = None, batching: Batching | None = None
    ) -> WorkerReady:
        await self.start(name, data, memory=memory, work=work, batching=batching)
        return await self.wait_event(name, WorkerReady)

    async def wait_event(self, name: str, kind: type[E], deadline_s: float = 30.0) -> E:
        """The first event of this kind for this assignment; removes it from the record."""

        def matching_event() -> E | None:
            for event in self.events:
                if isinstance(event, kind) and event.assignment == name:
                    self.events.remove(event)
                    return event
            return None

        event = await until(matching_event, deadline_s, f"{kind.__name__} of {name} in {self.events}")
        assert event is not None
        return event

    async def client(self, name: str) -> WorkerClient:
        local = self.workers.local(name)
        assert local is not None, f"{name} is not ready"
        return WorkerClient(await FrameClient.connect(local.socket, local.nonce), name)

    async def stats(self, name: str) -> WorkerStats:
        return next(stats for stats in await self.workers.stats() if stats.assignment == name)

    def pid(self, name: str) -> int:
        """From the records, as the next supervisor would know it."""
        told = [json.loads(path.read_text()) for path in self.run.glob("worker-*.json")]
        return next(int(one["pid"]) for one in told if name in [each["id"] for each in one["assignments"]])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def datatype(array: Array) -> str:
    return next(found.name for found in DATATYPES.values() if found.dtype == array.dtype)


def request(feeds: Mapping[str, Array], *, outputs: tuple[str, ...] = (), typed: bool = False) -> oip.ModelInferRequest:
    """Raw contents, or typed ones if the protocol has a field for every input's datatype."""
    made = oip.ModelInferRequest(model_name="m", model_version="1", id="7")
    for name, array in feeds.items():
        tensor = made.inputs.add(name=name, datatype=datatype(array), shape=array.shape)
        if typed:
            field = DATATYPES[tensor.datatype].field
            assert field is not None
            values = [item.encode() for item in array.flat] if array.dtype == np.object_ else array.flatten().tolist()
            getattr(tensor.contents, field).extend(values)
        else:
            made.raw_input_contents.append(to_raw(array))
    for name in outputs:
        made.outputs.add(name=name)
    return made


async def infer(
    client: WorkerClient,
    made: oip.ModelInferRequest | Mapping[str, Array],
    *,
    origin: str = "test",
    deadline_s: float = 30.0,
) -> oip.ModelInferResponse:
    body = made if isinstance(made, oip.ModelInferRequest) else request(made)
    answer = await client.ask(body.SerializeToString(), origin=origin, deadline_s=deadline_s)
    return oip.ModelInferResponse.FromString(answer)

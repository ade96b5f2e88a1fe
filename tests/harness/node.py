"""The data plane of one node as real processes: a front, and workers with models, without supervisor or coordinator."""

import asyncio
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import samples
from harness.crafted import digest_of
from harness.oip import GrpcClient, RestClient
from harness.pki import Authority, Files
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import Limits
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.ports import Keeper, LocalWorker, Witness, WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker.pool import PoolOptions, ProcessWorkers
from shoal.types.assignment import Credential, PeerTrust
from shoal.types.device import Device, DeviceKind, Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes
from shoal.types.workload import WorkloadKey

FRONT = (sys.executable, "-m", "shoal.agent.main", "front")
CPU = Device(
    name="cpu0",
    kind=DeviceKind.CPU,
    vendor="",
    model="",
    driver="cpu",
    driver_version="",
    runtime_version="",
    provider="CPUExecutionProvider",
    memory_bytes=Bytes(2**34),
)


@dataclass
class Node:
    """Name, files and ports of one node; `models` are its replicas by assignment."""

    name: str
    authority: Authority
    folder: Path
    role: Role = Role.AGENT
    files: Files = field(init=False)
    config: FrontConfig = field(init=False)
    front: FrontProcess = field(init=False)
    workers: ProcessWorkers | None = None
    device: Device = CPU
    host: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    """What its front's command line begins with: how it comes onto the machine of `host`."""
    limits: Limits = field(default_factory=Limits)
    models: dict[str, WorkloadKey] = field(default_factory=dict)
    exits: list[WorkerExited] = field(default_factory=list)
    _ready: dict[str, asyncio.Future[WorkerReady]] = field(default_factory=dict)
    _listening: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.files = self.authority.issue(self.role, self.name)
        self.config = FrontConfig(
            node=self.name,
            region=self.authority.region,
            host="0.0.0.0" if self.before else self.host,  # its address may be on another machine than this
            grpc_port=0,
            token_port=0,
            rest_port=0,
            certificate=str(self.files.certificate),
            key=str(self.files.key),
            authority=str(self.files.authority),
            run_dir=str(self.folder),
            limits=self.limits,
        )
        self.front = FrontProcess(self.config, (*self.before, *FRONT), SystemClock())

    async def start(self) -> None:
        await self.front.start()

    async def load(self, assignment: str, workload: WorkloadKey, model: Path, **terms: Any) -> None:
        """Starts a worker; terms: of its assignment. Raises AssertionError when it does not become ready."""
        if self.workers is None:
            self.workers = ProcessWorkers(
                self.folder,
                Path(tempfile.gettempdir()),
                SystemClock(),
                lambda name: self.device,
                lambda name: None,
                PoolOptions(spare=False),
            )
            self._listening = asyncio.create_task(self._listen(self.workers))
        content = model.read_bytes()
        self._ready[assignment] = asyncio.get_running_loop().create_future()
        await self.workers.start(
            samples.assignment(
                assignment,
                workload=workload,
                model=digest_of(content),
                model_bytes=Bytes(len(content)),
                memory_bytes=Bytes(0),
                **terms,
            ),
            str(model),
        )
        async with asyncio.timeout(60):
            await self._ready[assignment]
        self.models[assignment] = workload

    def local(self, assignment: str) -> LocalWorker:
        assert self.workers is not None
        found = self.workers.local(assignment)
        assert found is not None, assignment
        return found

    def endpoint(self, assignment: str, *, at: "Node | None" = None, weight: float = 1.0) -> Endpoint:
        """This node's replica as `at` sees it."""
        kind = EndpointKind.LOCAL if at is None or at is self else EndpointKind.AGENT
        address = f"{self.host}:{self.front.config.grpc_port}"
        return Endpoint(assignment, self.name, kind, address, weight, EndpointState.READY)

    async def configure(
        self,
        routes: Iterable[Route] | None = None,
        credentials: tuple[Credential, ...] = (),
        *,
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        witnesses: tuple[Witness, ...] = (),
        keepers: tuple[Keeper, ...] = (),
    ) -> None:
        """By default each replica of this node is routed to it."""
        if routes is None:
            routes = [Route(key, 1, (self.endpoint(name),)) for name, key in self.models.items()]
        workers = tuple(self.local(name) for name in self.models)
        await self.front.configure(tuple(routes), credentials, workers, revoked, peers, witnesses, keepers)

    def grpc(self, files: Files) -> GrpcClient:
        return GrpcClient(self.front.config.grpc_port, files.authority.read_bytes(), files, host=self.host)

    def token(self, authority: bytes, bearer: str) -> GrpcClient:
        return GrpcClient(self.front.config.token_port, authority, bearer=bearer)

    def rest(self, files: Files | None = None, bearer: str = "") -> RestClient:
        return RestClient(self.front.config.rest_port, self.files.authority.read_bytes(), files, bearer)

    async def stop(self) -> None:
        await self.front.close(keep=False)
        if self._listening is not None:
            self._listening.cancel()
        if self.workers is not None:
            await self.workers.close(keep=False)

    async def _listen(self, workers: ProcessWorkers) -> None:
        async for event in workers.events():
            match event:
                case WorkerReady() if not self._ready[event.assignment].done():
                    self._ready[event.assignment].set_result(event)
                case WorkerFailed() if not self._ready[event.assignment].done():
                    self._ready[event.assignment].set_exception(AssertionError(str(event.refusal)))
                case WorkerExited():
                    self.exits.append(event)
                    self.models.pop(event.assignment, None)
                case _:
                    pass

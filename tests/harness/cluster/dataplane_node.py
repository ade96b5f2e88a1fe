"""The data plane of one node as real processes: a front, and workers with models, without supervisor or coordinator."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from harness.builders import agent_values
from harness.clients.oip import GrpcClient, RestClient
from harness.crypto.pki import Authority, CertificateFiles
from harness.models.synthetic import digest_of
from shoal.agent.clock import SystemClock
from shoal.agent.core.routing import AdmissionLimits
from shoal.agent.core.shared_memory import SharedMemoryGrant
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.driver_port import DeviceAccess
from shoal.agent.ports import LocalWorker, StatefulReplica, VerificationSource, WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.types.assignment import Credential, Forwarding, PeerTrust
from shoal.types.device import Device, DeviceKind, Role
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.tenant import TenantLimit
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
class DataPlaneNode:
    """One node's front and workers, with their files and ports."""

    # Node name.
    name: str
    # Issues the node's certificate.
    authority: Authority
    # Run directory of front and workers.
    folder: Path
    # In the node's certificate.
    role: Role = Role.AGENT
    # Certificate of the front.
    files: CertificateFiles = field(init=False)
    # What the front is started with.
    config: FrontConfig = field(init=False)
    # The front process.
    front: FrontProcess = field(init=False)
    # None before the first load.
    workers: ProcessWorkers | None = None
    # The one device that workers run on.
    device: Device = CPU
    # Address at which other nodes and clients reach the front.
    host: str = "127.0.0.1"
    # What the front's command line begins with: how it is started on the machine of `host`.
    command_prefix: tuple[str, ...] = ()
    # Of the front's admission.
    limits: AdmissionLimits = field(default_factory=AdmissionLimits)
    # Who may register shared memory at the front.
    shared_memory: tuple[SharedMemoryGrant, ...] = ()
    # Replicas that are ready: assignment id -> workload.
    models: dict[str, WorkloadKey] = field(default_factory=dict)
    # By assignment id: what its worker says of it for people.
    notes: dict[str, str] = field(default_factory=dict)
    # Every worker exit so far.
    exits: list[WorkerExited] = field(default_factory=list)
    # Assignment id -> completed once its worker is ready or has failed.
    _ready: dict[str, asyncio.Future[WorkerReady]] = field(default_factory=dict)
    # Reads the workers' events; None before the first load.
    _listening: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.files = self.authority.issue(self.role, self.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.private = X25519PrivateKey.generate()
        forward_key = self.folder / "forward.key"
        forward_key.write_bytes(self.private.private_bytes_raw())
        self.config = FrontConfig(
            node=self.name,
            region=self.authority.region,
            host="0.0.0.0" if self.command_prefix else self.host,  # its address may belong to another machine
            port=0,
            certificate=str(self.files.certificate),
            key=str(self.files.key),
            authority=str(self.files.authority),
            run_dir=str(self.folder),
            limits=self.limits,
            forward_key=str(forward_key),
            shared_memory=self.shared_memory,
        )
        self.front = FrontProcess(self.config, (*self.command_prefix, *FRONT), SystemClock())

    @property
    def forward_key(self) -> str:
        """Public key with which other fronts verify requests that this one forwards."""
        return self.private.public_key().public_bytes_raw().hex()

    async def start(self) -> None:
        await self.front.start()

    async def load(self, assignment: str, workload: WorkloadKey, model: Path, **terms: Any) -> None:
        """Start a worker. terms: of its assignment. Raises AssertionError if it does not become ready."""
        if self.workers is None:
            self.workers = ProcessWorkers(
                self.folder,
                Path(tempfile.gettempdir()),
                SystemClock(),
                lambda name: self.device,
                lambda name: DeviceAccess(),
                PoolOptions(keep_spare=False),
            )
            self._listening = asyncio.create_task(self._listen(self.workers))
        content = model.read_bytes()
        self._ready[assignment] = asyncio.get_running_loop().create_future()
        await self.workers.start(
            agent_values.assignment(
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

    def local_worker(self, assignment: str) -> LocalWorker:
        assert self.workers is not None
        found = self.workers.local(assignment)
        assert found is not None, assignment
        return found

    def worker_pid(self, assignment: str) -> int:
        record = json.loads(Path(self.local_worker(assignment).socket).with_suffix(".json").read_text())
        return int(record["pid"])

    def endpoint(self, assignment: str, *, at: "DataPlaneNode | None" = None, weight: float = 1.0) -> Endpoint:
        """This node's replica as node `at` sees it."""
        kind = EndpointKind.LOCAL if at is None or at is self else EndpointKind.AGENT
        address = f"{self.host}:{self.front.config.port}"
        return Endpoint(assignment, self.name, kind, address, weight, EndpointState.READY)

    async def configure(
        self,
        routes: Iterable[Route] | None = None,
        credentials: tuple[Credential, ...] = (),
        *,
        revoked: tuple[str, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
        witnesses: tuple[VerificationSource, ...] = (),
        stateful_replicas: tuple[StatefulReplica, ...] = (),
        forwarding: Forwarding | None = None,
        tenants: tuple[TenantLimit, ...] = (),
    ) -> None:
        """By default, route each replica of this node to it."""
        if routes is None:
            routes = [Route(key, 1, (self.endpoint(name),)) for name, key in self.models.items()]
        workers = tuple(self.local_worker(name) for name in self.models)
        await self.front.configure(
            tuple(routes), credentials, workers, revoked, peers, witnesses, stateful_replicas, forwarding, tenants
        )

    def grpc_client(self, files: CertificateFiles) -> GrpcClient:
        return GrpcClient(self.front.config.port, files.authority.read_bytes(), files, host=self.host)

    def token_client(self, authority: bytes, bearer: str) -> GrpcClient:
        return GrpcClient(self.front.config.port, authority, bearer=bearer)

    def rest_client(self, files: CertificateFiles | None = None, bearer: str = "") -> RestClient:
        return RestClient(self.front.config.port, self.files.authority.read_bytes(), files, bearer)

    async def stop(self) -> None:
        await self.front.close(keep=False)
        if self._listening is not None:
            self._listening.cancel()
        if self.workers is not None:
            await self.workers.close(keep=False)

    async def _listen(self, workers: ProcessWorkers) -> None:
        async for event in workers.events():
            if isinstance(event, WorkerReady):
                self.notes[event.assignment] = event.note
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

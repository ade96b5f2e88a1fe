"""A coordinator and a machine for an agent under test: the test sets the desired set and sees all reports."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from harness.builders import agent_values
from harness.clients.oip import GrpcClient
from harness.crypto.pki import Authority, CertificateFiles
from harness.wait import until, wait_until
from shoal.types.assignment import (
    AgreementCounts,
    Assignment,
    Credential,
    DesiredSet,
    Observed,
    PeerTrust,
    Phase,
    Status,
    Version,
)
from shoal.types.device import Reading, Role, SilentDevice
from shoal.types.link import Hello, NodeEvent, NodeEvents, Receipts, ToAgent, Welcome
from shoal.types.receipt import SignedReceipt
from shoal.types.route import Endpoint, EndpointKind, EndpointState, Route
from shoal.types.units import Bytes, Seconds, Wall
from shoal.types.workload import PartitionRule, WorkloadKey
from shoal.v1 import artifacts_pb2, artifacts_pb2_grpc, link_pb2, link_pb2_grpc
from shoal.wire import nouns
from shoal.wire.limits import LINK_BYTES, server_options

REGION = "eu"
NODE = "edge-1"
CHUNK = 64 * 1024


class FakeCoordinator(link_pb2_grpc.AgentLinkServicer, artifacts_pb2_grpc.ArtifactsServicer):
    """Answers every hello, sends the current desired set, serves models, and records what it receives."""

    def __init__(self, files: CertificateFiles, models: Mapping[str, bytes]) -> None:
        self._files = files
        self.models = dict(models)
        self.history = "h-1"
        self.term = 1
        self.desired: DesiredSet | None = None
        self.hellos: list[Hello] = []
        self.observed: dict[str, Observed] = {}
        self.phases: list[tuple[str, Phase]] = []
        self.stamps: list[Wall] = []
        """When each status was taken, by the node's clock."""
        self.readings: dict[str, Reading] = {}
        self.silent: dict[str, SilentDevice] = {}
        """Of the last status: by device, those that answer."""
        self.unannounced: set[str] = set()
        """Devices that a status told of, and the hello of its session did not: a coordinator quarantines for that."""
        self.may_welcome = asyncio.Event()
        """Cleared: hellos wait for their welcome."""
        self.may_welcome.set()
        self.version: Version | None = None
        self.events: list[NodeEvent] = []
        self.receipts: tuple[SignedReceipt, ...] = ()
        self.fetched: list[tuple[str, int]] = []
        self.front_ready = False
        self.agreement_counts: tuple[AgreementCounts, ...] = ()
        self.port = 0
        self._outbox: asyncio.Queue[ToAgent] | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen on the port it had before, if it had one."""
        certificate, key, ca = self._files.read()
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        self._server = server = grpc.aio.server(options=server_options(LINK_BYTES))
        link_pb2_grpc.add_AgentLinkServicer_to_server(self, server)
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(self, server)
        self.port = server.add_secure_port(self.address, credentials)
        await server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def want(
        self,
        *assignments: Assignment,
        generation: int,
        credentials: tuple[Credential, ...] = (),
        routes: tuple[Route, ...] = (),
        peers: tuple[PeerTrust, ...] = (),
    ) -> None:
        """Set the desired set, with a route to each assignment and `routes` in addition; sent at once if the node is
        connected."""
        self.desired = DesiredSet(
            node=NODE,
            version=Version(self.history, self.term, generation),
            assignments=assignments,
            routes=(*(_route(asked, generation) for asked in assignments), *routes),
            pins=(),
            credentials=credentials,
            heartbeat_s=Seconds(0.5),
            peers=peers,
        )
        if self._outbox is not None:
            self._outbox.put_nowait(self.desired)

    def phase(self, assignment: str) -> Phase | None:
        found = self.observed.get(assignment)
        return found.phase if found else None

    async def Session(
        self, request_iterator: AsyncIterator[link_pb2.FromAgent], context: Any
    ) -> AsyncIterator[link_pb2.ToAgent]:
        hello = nouns.from_agent_from_wire(await anext(request_iterator))
        assert isinstance(hello, Hello)
        self.observed, self.version = {}, None
        self.hellos.append(hello)
        await self.may_welcome.wait()
        outbox: asyncio.Queue[ToAgent] = asyncio.Queue()
        self._outbox = outbox
        wall = hello.sent_at
        outbox.put_nowait(Welcome(len(self.hellos), hello.nonce, self.history, self.term, Seconds(0.5), wall))
        if self.desired is not None:
            outbox.put_nowait(self.desired)
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield nouns.to_agent_to_wire(await outbox.get())
        finally:
            reading.cancel()
            self._outbox = None

    async def _read(self, messages: AsyncIterator[link_pb2.FromAgent]) -> None:
        async for message in messages:
            match nouns.from_agent_from_wire(message):
                case Status() as status:
                    self._on_status(status)
                case Receipts(receipts):
                    self.receipts = receipts
                case NodeEvents(events):
                    self.events += events
                case Hello():
                    raise AssertionError("a second hello in one session")

    def _on_status(self, status: Status) -> None:
        if status.full:
            self.observed = {}
        for each in status.observed:
            self.observed[each.assignment] = each
            self.phases.append((each.assignment, each.phase))
        for name in status.gone:
            self.observed.pop(name, None)
        self.readings = {each.device: each for each in status.readings}
        self.silent = {each.device: each for each in status.silent}
        self.unannounced |= self.readings.keys() - {each.name for each in self.hellos[-1].node.devices}
        self.version = status.version
        self.stamps.append(status.taken_at)
        self.front_ready = status.front_ready
        self.agreement_counts = status.agreement_counts

    async def Push(self, request_iterator: object, context: Any) -> artifacts_pb2.PushReply:
        raise NotImplementedError("operators only")

    async def Inspect(self, request_iterator: object, context: Any) -> artifacts_pb2.PushReply:
        raise NotImplementedError("operators only")

    async def Record(self, request_iterator: object, context: Any) -> artifacts_pb2.PushReply:
        raise NotImplementedError("nobody is asked to")

    async def List(self, request: object, context: Any) -> artifacts_pb2.ListModelsReply:
        raise NotImplementedError("operators only")

    async def Remove(self, request: object, context: Any) -> artifacts_pb2.RemoveModelReply:
        raise NotImplementedError("operators only")

    async def Fetch(self, request: artifacts_pb2.FetchRequest, context: Any) -> AsyncIterator[artifacts_pb2.FetchChunk]:
        self.fetched.append((request.digest, request.offset))
        data = self.models[request.digest]
        yield artifacts_pb2.FetchChunk(size=len(data))
        for start in range(request.offset, len(data), CHUNK):
            yield artifacts_pb2.FetchChunk(data=data[start : start + CHUNK])


def assignment(name: str, workload: str, model: str, size: int, **rule: Any) -> Assignment:
    return agent_values.assignment(
        name,
        workload=WorkloadKey("default", workload),
        model=model,
        model_bytes=Bytes(size),
        memory_bytes=Bytes(256 * 2**20),
        partition=PartitionRule(**rule),
    )


def _route(asked: Assignment, generation: int) -> Route:
    local = Endpoint(asked.id, NODE, EndpointKind.LOCAL, "", 1.0, EndpointState.READY)
    return Route(asked.workload, generation, (local,))


class AgentHost:
    """A host with one agent of role node: a state directory, and the processes that run from it."""

    def __init__(self, folder: Path, authority: Authority, coordinator: str) -> None:
        self.folder = folder
        self.authority = authority
        self.coordinator = coordinator
        self.said: dict[str, Any] = {}
        self.environment: dict[str, str] = {}
        """Added to the environment of its processes."""
        self._process: subprocess.Popen[bytes] | None = None
        identity = folder / "identity"
        identity.mkdir(parents=True, mode=0o700)
        self.identify(authority.issue(Role.AGENT, NODE))
        member = {"name": NODE, "region": REGION, "role": "agent", "coordinator": coordinator, "labels": {}}
        (identity / "member.json").write_text(json.dumps(member))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *more: str) -> None:
        """Returns once the agent listens. Ports stay the same over restarts."""
        addresses = {name: self.said.get(name, "127.0.0.1:0") for name in ("data", "metrics")}
        with (self.folder / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shoal.agent.main", "run", "--state-dir", str(self.folder)),
                    *("--listen", addresses["data"]),
                    *("--metrics", addresses["metrics"], "--front-metrics", "127.0.0.1:0", *more),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
                | self.environment,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the agent did not start:\n{self.log()[-3000:]}"
        self.said = json.loads(line)

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def log_lines(self, event: str, since: int = 0) -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in self.log()[since:].splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == event]

    def workers(self) -> dict[str, int]:
        """Assignment -> pid of its worker."""
        return {one["id"]: told["pid"] for told in self._records() for one in told["assignments"]}

    def has_spare(self) -> bool:
        """Whether a worker without an assignment listens."""
        return any(not told["assignments"] and told["socket"].exists() for told in self._records())

    def _records(self) -> list[dict[str, Any]]:
        found = []
        for record in (self.folder / "run").glob("worker-*.json"):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                found.append({**json.loads(record.read_text()), "socket": record.with_suffix(".sock")})
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything that runs from this state directory."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_supervisor(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def lose_power(self) -> None:
        """Kill every process at once, including those that one of them starts meanwhile."""
        assert self._process is not None
        self._process.kill()

        def kill_all() -> bool:
            left = self.processes()
            for process in left:
                process.kill()
            return not left

        wait_until(kill_all, 10.0, "all processes gone")
        self._process.wait()

    def terminate(self, timeout: float = 20.0) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout)

    def identify(self, files: CertificateFiles) -> None:
        """Use these credentials from the next start on."""
        for name, content in zip(("cert.pem", "key.pem", "ca.pem"), files.read(), strict=True):
            path = self.folder / "identity" / name
            path.touch(0o600)
            path.write_bytes(content)

    def port(self, name: str) -> int:
        """name: data or metrics."""
        return int(self.said[name].rpartition(":")[2])

    def client(self) -> GrpcClient:
        """A client of the tenant `default`."""
        files = self.authority.issue(Role.TENANT, "default")
        return GrpcClient(self.port("data"), self.authority.certificate.read_bytes(), files)


async def ready(coordinator: FakeCoordinator, name: str, deadline_s: float = 30.0) -> Observed:
    await until(lambda: coordinator.phase(name) is Phase.READY, deadline_s, f"{name} to be ready")
    return coordinator.observed[name]

"""Both ends of an agent's link in this process, over a real carrier: a gRPC server, or Mosquitto."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from cryptography import x509

from harness.crypto.pki import Authority
from harness.crypto.pki import CertificateFiles as Issued
from harness.fakes.log import RecordingLog
from harness.fakes.meter import RecordedMeter
from harness.fakes.region import KnownModels
from harness.servers.mosquitto import MosquittoBroker
from harness.servers.mosquitto import identity as broker_identity
from harness.wait import until
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink, GrpcSession
from shoal.agent.link.mqtt import MqttLink, MqttSession
from shoal.agent.ports import CoordinatorLink, LinkSession
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.clock import CoordinatorClock, SystemIds
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.link.mqtt import MqttLinks
from shoal.coordinator.ports import LinkEvents
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import Device, DeviceKind, Node, Reading, Role
from shoal.types.link import FromAgent, Hello, Lease, Reported, ToAgent, Welcome
from shoal.types.topics import Channel
from shoal.types.units import Bytes, Seconds, Watts
from shoal.v1 import link_pb2, link_pb2_grpc
from shoal.wire.limits import LINK_BYTES, server_options
from shoal.wire.trust import check_certificate

REGION: Final = "eu"
NODE: Final = "edge-1"
OTHER: Final = "edge-2"
MODELS: Final = "127.0.0.1:1"
CLOCK: Final = CoordinatorClock()
BEAT_S: Final = Seconds(0.3)


@dataclass
class RecordingListener:
    """ports.LinkEvents in front of the real controller: records what reaches it."""

    events: LinkEvents
    hellos: list[Hello] = field(default_factory=list)
    messages: list[tuple[str, FromAgent]] = field(default_factory=list)
    closed_sessions: list[tuple[str, int]] = field(default_factory=list)

    async def on_hello(self, node: str, role: Role, hello: Hello, **more: Any) -> Welcome | Refusal:
        self.hellos.append(hello)
        return await self.events.on_hello(node, role, hello, **more)

    def on_status(self, node: str, epoch: int, status: Status) -> Refusal | Lease | None:
        self.messages.append((node, status))
        return self.events.on_status(node, epoch, status)

    async def on_message(self, node: str, epoch: int, message: Reported | Hello) -> Refusal | None:
        self.messages.append((node, message))
        return await self.events.on_message(node, epoch, message)

    async def on_close(self, node: str, epoch: int) -> None:
        self.closed_sessions.append((node, epoch))
        await self.events.on_close(node, epoch)

    async def on_link_lost(self, nodes: Collection[str]) -> None:
        await self.events.on_link_lost(nodes)

    async def on_link_closed(self, sessions: Mapping[str, int], *, is_lost: bool) -> None:
        self.closed_sessions += sessions.items()
        await self.events.on_link_closed(sessions, is_lost=is_lost)

    async def on_link_restored(self) -> None:
        await self.events.on_link_restored()

    def of(self, node: str) -> list[FromAgent]:
        return [message for name, message in self.messages if name == node]


class LinkCarrier(Protocol):
    """The carrier between the two ends, and the coordinator's end of it."""

    links: GrpcLinks | MqttLinks

    async def start(self, region: RegionalCoordinator, events: LinkEvents) -> None: ...
    async def stop(self) -> None:
        """The coordinator disconnects."""
        ...

    async def kill(self) -> None:
        """The carrier is gone at once while both ends live."""
        ...

    async def revive(self) -> None: ...
    def link(self, files: CredentialFiles, log: RecordingLog) -> CoordinatorLink: ...
    async def send_wire(self, session: LinkSession, message: link_pb2.FromAgent) -> None:
        """Send a message unchecked in an open session, even one that no agent would send."""
        ...


class GrpcCarrier:
    def __init__(self, folder: Path, authority: Authority, meter: RecordedMeter) -> None:
        self._files = authority.issue(Role.COORDINATOR, "coordinator")
        self._meter = meter
        self._server: grpc.aio.Server | None = None
        self._region: RegionalCoordinator | None = None
        self._port = 0
        self.links = GrpcLinks(meter)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self, region: RegionalCoordinator, events: LinkEvents) -> None:
        self._region = region
        self.links.bind(events)
        await self.revive()

    async def revive(self) -> None:
        assert self._region is not None
        certificate, key, ca = self._files.read()
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        guard = Authorisation(REGION, CLOCK, self._meter, AuditTrail(self._region.events, self._meter))
        self._server = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
        link_pb2_grpc.add_AgentLinkServicer_to_server(self.links, self._server)
        self._port = self._server.add_secure_port(self.address, credentials)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def kill(self) -> None:
        await self.stop()

    def link(self, files: CredentialFiles, log: RecordingLog) -> GrpcLink:
        return GrpcLink(files, self.address, CLOCK, log)

    async def send_wire(self, session: LinkSession, message: link_pb2.FromAgent) -> None:
        assert isinstance(session, GrpcSession)
        await session._call.write(message.SerializeToString())


class MqttCarrier:
    def __init__(self, folder: Path, authority: Authority, meter: RecordedMeter) -> None:
        self.broker = MosquittoBroker(folder / "broker", REGION, broker_identity(authority), nodes=(NODE, OTHER))
        self.files = authority.issue(Role.COORDINATOR, "coordinator")
        roots = [x509.load_pem_x509_certificate(authority.certificate.read_bytes())]
        self._running: asyncio.Task[None] | None = None
        self.revoked: dict[str, Refusal] = {}
        self.links = MqttLinks(
            REGION,
            self.broker.address,
            identity_files(folder / "coordinator", self.files),
            identify=lambda found: check_certificate(
                found, roots, region=REGION, roles=frozenset(Role), wall=CLOCK.wall()
            ),
            check_serial=lambda serial: self.revoked.get(serial),
            models_address=lambda: MODELS,
            clock=CLOCK,
            ids=SystemIds(),
            meter=meter,
            heartbeat_s=BEAT_S,
        )

    async def start(self, region: RegionalCoordinator, events: LinkEvents) -> None:
        self.links.bind(events)
        self.broker.start()
        await self.serve()

    async def serve(self) -> None:
        self._running = asyncio.create_task(self.links.run())
        await until(lambda: self.links.is_online, 5.0, "the coordinator is at the broker")

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def kill(self) -> None:
        self.broker.kill()

    async def revive(self) -> None:
        self.broker.start()

    def link(self, files: CredentialFiles, log: RecordingLog) -> MqttLink:
        return MqttLink(files, self.broker.address, CLOCK, log)

    async def send_wire(self, session: LinkSession, message: link_pb2.FromAgent) -> None:
        assert isinstance(session, MqttSession)
        machine = session._machine
        assert machine._sealer is not None
        sealed = machine._sealer.seal(Channel.STATUS, message.SerializeToString())
        await session._publish(machine._publication(Channel.STATUS, sealed))


CARRIERS: Final[dict[str, type[GrpcCarrier] | type[MqttCarrier]]] = {"grpc": GrpcCarrier, "mqtt": MqttCarrier}


@dataclass
class LinkHarness:
    """One region's coordinator and any number of agents' links to it."""

    # For stores and certificates.
    folder: Path
    # The region's CA.
    authority: Authority
    # gRPC or MQTT, both sides.
    carrier: GrpcCarrier | MqttCarrier
    # The real coordinator, in this process.
    region: RegionalCoordinator
    # Records what the carrier hands to the coordinator.
    events: RecordingListener
    # Records what the carrier measures.
    meter: RecordedMeter
    # Every session opened by `connect`.
    sessions: list[LinkSession] = field(default_factory=list)
    # Log of the agents' links.
    heard: RecordingLog = field(default_factory=RecordingLog)
    # Hellos made so far.
    nonces: int = 0

    @classmethod
    async def open(cls, folder: Path, carrier: str) -> "LinkHarness":
        authority = Authority(folder / "ca", REGION, CLOCK.wall())
        meter = RecordedMeter()
        found = CARRIERS[carrier](folder, authority, meter)
        store = await SqliteStore.open(folder / "store", reserve_bytes=0)
        models = KnownModels()
        region = RegionalCoordinator(store, found.links, models, models, CLOCK, SystemIds(), RegionConfig(REGION))
        await region.start()
        events = RecordingListener(region.fleet)
        await found.start(region, events)
        return cls(folder, authority, found, region, events, meter)

    async def close(self) -> None:
        for session in self.sessions:
            await session.close()
        await self.carrier.stop()
        if isinstance(self.carrier, MqttCarrier):
            self.carrier.broker.kill()

    def files(self, name: str = NODE, role: Role = Role.AGENT, *, valid_s: float = 3600.0) -> CredentialFiles:
        issued = self.authority.issue(role, name, valid_s=valid_s)
        return identity_files(self.folder / issued.certificate.stem, issued)

    def hello(self, name: str = NODE, holds: Version | None = None) -> Hello:
        self.nonces += 1
        return Hello(node(name), f"nonce-{self.nonces}", holds, 1, CLOCK.wall())

    async def connect(
        self, name: str = NODE, files: CredentialFiles | None = None, holds: Version | None = None
    ) -> LinkSession:
        link = self.carrier.link(files or self.files(name), self.heard)
        session = await link.connect(self.hello(name, holds))
        self.sessions.append(session)
        return session

    def is_connected(self, name: str = NODE) -> bool:
        state = self.region.fleet.fleet.nodes.get(name)
        return state is not None and state.connected


def identity_files(folder: Path, issued: Issued) -> CredentialFiles:
    folder.mkdir()
    for name, path in (("cert.pem", issued.certificate), ("key.pem", issued.key), ("ca.pem", issued.authority)):
        (folder / name).write_bytes(path.read_bytes())
    return CredentialFiles(folder)


def node(name: str) -> Node:
    cpu = Device(
        "cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "ort 1", "CPUExecutionProvider", Bytes(2**34), parallelism=4
    )
    return Node(
        name, REGION, Role.AGENT, {}, "0", "linux", "x86_64", Bytes(2**34), Bytes(2**34), (cpu,),
        "a:1", "a:4", "boot-1",
    )  # fmt: skip


def status(
    session: LinkSession, sequence: int, *, name: str = NODE, full: bool = True, free_bytes: int = 2**33
) -> Status:
    reading = Reading("cpu0", Bytes(free_bytes), 0.1, 50.0, Watts(10.0), 1.0, CLOCK.wall())
    return Status(
        name, session.welcome.epoch, sequence, full, None, (), (), (reading,), (), CLOCK.wall(), True
    )  # fmt: skip


def desired_set(session: LinkSession, generation: int, *, name: str = NODE) -> DesiredSet:
    version = Version(session.welcome.history, session.welcome.term, generation)
    return DesiredSet(name, version, (), (), (), (), Seconds(1.0))


async def receive(session: LinkSession, deadline_s: float = 5.0) -> ToAgent:
    async with asyncio.timeout(deadline_s):
        return await session.receive()


async def ending(session: LinkSession, deadline_s: float = 10.0) -> Refusal:
    """Why the session ended, once it has."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                await session.receive()
    except ShoalError as error:
        return error.refusal

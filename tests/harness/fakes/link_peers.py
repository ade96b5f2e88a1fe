"""The agents' ends of links without agents: sessions of the real link code, for nodes that are only values.

A node says hello with its own certificate, sends the receipt of its one device, reports every assignment as ready at
once, and sends a status every heartbeat. Nothing runs: this tests what coordinators do, and how fast.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.fakes.log import RecordingLog
from shoal.agent.clock import SystemClock
from shoal.agent.core.link_session import reconnect_after
from shoal.agent.identity.keys import load_key
from shoal.agent.identity.signer import TOPIC
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink
from shoal.agent.ports import LinkSession
from shoal.types.assignment import DesiredSet, Observed, Phase, Status
from shoal.types.codes import ShoalError
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.link import Hello, ProbeNow, Receipts
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.wire import nouns, signing

MEMORY = Bytes(2**36)
CPU = Device(
    "cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "onnxruntime 1", "CPUExecutionProvider", MEMORY, parallelism=64
)  # fmt: skip


@dataclass
class LinkPeer:
    """The agent's end of a link without an agent: it reports every assignment as ready."""

    # Its certificate, key and CA.
    folder: Path
    # Region in its hello.
    region: str
    # Node name.
    name: str
    # host:port of its coordinator's link.
    address: str
    # A gateway has no device.
    role: Role = Role.AGENT
    # FLOP/s that its device's receipt states.
    flops: float = 1e11
    # Last desired set received; None before the first.
    desired: DesiredSet | None = None
    # Sessions that were accepted.
    welcome_count: int = 0
    # What its next status reports, from `desired`.
    _observed: tuple[Observed, ...] = ()

    async def live(self) -> None:
        """Keep a session open until cancelled."""
        clock, attempt = SystemClock(), 0
        link = GrpcLink(CredentialFiles(self.folder), self.address, clock, RecordingLog())
        while True:
            try:
                session = await link.connect(self._hello(clock.wall()))
                attempt = 0
                self.welcome_count += 1
                await self._report(session, clock)
            except ShoalError:
                attempt += 1
            await clock.sleep(reconnect_after(self.name, attempt))

    async def _report(self, session: LinkSession, clock: SystemClock) -> None:
        """Send statuses until the session ends."""
        news, sequence = asyncio.Event(), 0
        reading = asyncio.create_task(self._listen(session, news, clock))
        try:
            await session.send(self._status(session, sequence, clock.wall()))
            if self.role is Role.AGENT:
                await session.send(self._receipts(clock.wall()))
            while not reading.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), session.welcome.heartbeat_s)
                news.clear()
                sequence += 1
                await session.send(self._status(session, sequence, clock.wall()))
        finally:
            reading.cancel()
            await session.close()

    async def _listen(self, session: LinkSession, news: asyncio.Event, clock: SystemClock) -> None:
        with contextlib.suppress(ShoalError):
            while True:
                match await session.receive():
                    case DesiredSet() as told:
                        self.desired = told
                        self._observed = tuple(
                            Observed(
                                each.id, each.workload, each.model, each.device, Phase.READY, clock.wall(), None, "",
                                None, None, 0, 0, None, (),
                            )
                            for each in told.assignments
                            if not each.draining
                        )  # fmt: skip
                        news.set()
                    case ProbeNow():
                        await session.send(self._receipts(clock.wall()))
                    case _:
                        pass
        news.set()

    def _hello(self, wall: Wall) -> Hello:
        devices = (CPU,) if self.role is Role.AGENT else ()
        node = Node(
            self.name, self.region, self.role, {}, "0", "linux", "x86_64", MEMORY, MEMORY, devices,
            "127.0.0.1:1", "127.0.0.1:4", f"boot-{self.name}",
        )  # fmt: skip
        return Hello(node, f"nonce-{self.name}-{wall}", self.desired.version if self.desired else None, 1, wall)

    def _status(self, session: LinkSession, sequence: int, wall: Wall) -> Status:
        readings = tuple[Reading, ...]()
        if self.role is Role.AGENT:
            readings = (Reading(CPU.name, MEMORY, 0.1, 40.0, Watts(10.0), 100.0 + sequence, wall),)
        version = self.desired.version if self.desired else None
        return Status(
            self.name, session.welcome.epoch, sequence, True, version, self._observed, (), readings, (), wall, True
        )  # fmt: skip

    def _receipts(self, wall: Wall) -> Receipts:
        rates = Rates(
            {"fp32": self.flops}, {"fp32": self.flops}, 1e10, 1e10, Seconds(1e-5), Seconds(1e-6), 1e9, Watts(5.0),
            Watts(20.0), EnergySource.ESTIMATED,
        )  # fmt: skip
        receipt = Receipt(
            self.name, CPU.name, CPU.provider, CPU.driver_version, CPU.runtime_version, ("fp32",), (), rates, MEMORY,
            0.1, wall, Seconds(1.0), False, "probe",
        )  # fmt: skip
        key = load_key(self.folder / "key.pem")
        signature = signing.sign(key, self.region, self.name, TOPIC, nouns.encode(receipt))
        return Receipts((nouns.make_signed_receipt(receipt, signature),))


@dataclass
class LinkPeers:
    """Many peers on one thread, for the duration of `live`."""

    peers: Sequence[LinkPeer]
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def are_connected(self) -> bool:
        """Whether each peer was welcomed and has received a desired set."""
        return all(end.welcome_count and end.desired is not None for end in self.peers)

    @contextlib.contextmanager
    def live(self) -> Iterator["LinkPeers"]:
        thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._all()), name="ends")
        thread.start()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop)
            thread.join()
            self._loop.close()

    async def _all(self) -> None:
        self._tasks = [asyncio.create_task(end.live()) for end in self.peers]
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

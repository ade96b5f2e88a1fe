"""A region over a real store with a clock that the test moves, and agents that are only values."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.runner import Compute, inline
from shoal.coordinator.core.migration.model import Migration
from shoal.coordinator.ports import Meter, Proofs, Signals, SpanExporter
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.assignment import DesiredSet, Observed, Phase, Status, Version
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, DeviceKind, EnergySource, Node, Reading, Role
from shoal.types.link import Hello, Receipts, ToAgent, Welcome
from shoal.types.migration import Against, PackRef, Verdict, Verification
from shoal.types.profile import ModelProfile, OperatorCost, TensorSpec
from shoal.types.receipt import Rates, Receipt
from shoal.types.units import Bytes, Elapsed, Seconds, Wall, Watts
from shoal.wire import nouns

DIGEST = "sha256:" + "a" * 64
DOCUMENTS = [
    (
        "w.yaml",
        """apiVersion: shoal/v1
kind: Policy
metadata: {name: fast}
spec: {optimize: {latency: 1.0}}
---
apiVersion: shoal/v1
kind: Workload
metadata: {name: reader}
spec: {model: {source: ocr}, policy: fast}
""",
    )
]


class SteppedClock:
    def __init__(self) -> None:
        self.elapsed = 1000.0
        self.date = 1_800_000_000.0

    def now(self) -> Elapsed:
        return Elapsed(self.elapsed)

    def wall(self) -> Wall:
        return Wall(self.date)

    async def sleep(self, seconds: Seconds) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.elapsed += seconds
        self.date += seconds


class CountingIds:
    def __init__(self) -> None:
        self.count = 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}-{self.count}"

    def secret(self) -> str:
        self.count += 1
        return f"{self.count:027d}"


@dataclass
class RecordedLinks:
    """ports.AgentLinks that keeps what was sent."""

    messages: list[tuple[str, ToAgent]] = field(default_factory=list)
    ended_sessions: list[tuple[str, Refusal]] = field(default_factory=list)

    async def send(self, node: str, message: ToAgent) -> None:
        self.messages.append((node, message))

    async def end(self, node: str, refusal: Refusal, *, fatal: bool) -> None:
        self.ended_sessions.append((node, refusal))

    def desired_sets(self, node: str) -> list[DesiredSet]:
        return [message for name, message in self.messages if name == node and isinstance(message, DesiredSet)]


class KnownModels:
    """ports.Blobs and ports.Inspector for bytes whose profile is known."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    async def digests(self) -> tuple[str, ...]:
        return tuple(self.kept)

    async def stat(self, digest: str) -> Bytes | None:
        return Bytes(1000) if digest in self.kept else None

    async def read(self, digest: str, offset: int) -> AsyncIterator[bytes]:
        yield b"x" * (1000 - offset)

    def path(self, digest: str) -> str:
        return digest

    async def write(self, chunks: AsyncIterator[bytes], *, size: Bytes, digest: str) -> str:
        async for _ in chunks:
            pass
        self.kept.add(digest)
        return digest

    async def delete(self, digest: str, is_unrecorded: Callable[[], Awaitable[bool]]) -> None:
        if await is_unrecorded():
            self.kept.discard(digest)

    async def inspect(
        self,
        path: str,
        digest: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        is_background: bool = False,
    ) -> ModelProfile:
        spec = (TensorSpec("x", "FP32", (1, 3, 48, 48)),)
        cost = (OperatorCost("Conv", 10, 1e8, 1e6),)
        counted = dict(shapes or {"x": (1, 3, 48, 48)})
        return ModelProfile(
            digest, Bytes(1000), 8, 13, {"": 13}, "test", "fp32", spec, spec, counted, cost, Bytes(900), Bytes(2000),
            True, {},
        )  # fmt: skip

    async def inspect_pack(self, path: str, digest: str, model: ModelProfile) -> PackRef:
        return PackRef(digest, Bytes(1000), 16, answers=True)


@dataclass
class RegionFixture:
    """One region without agents."""

    # The coordinator under test.
    region: RegionalCoordinator
    # Its real store.
    store: SqliteStore
    # Records what it sends to agents.
    links: RecordedLinks
    # Moved by the test.
    clock: SteppedClock
    # Its model cache and inspector.
    models: KnownModels
    # Deterministic ids.
    ids: CountingIds

    @classmethod
    async def open(
        cls,
        folder: Path,
        earlier: "RegionFixture | None" = None,
        *,
        signals: Signals | None = None,
        name: str = "eu",
        clock: SteppedClock | None = None,
        proofs: Proofs | None = None,
        meter: Meter | None = None,
        traces: SpanExporter | None = None,
        compute: Compute = inline,
        decide: Compute = inline,
        thread_time: Callable[[], float] = lambda: 0.0,
    ) -> "RegionFixture":
        """earlier: the same machine before a restart; its clock, models and ids continue. signals: feeds that it can
        read.

        clock: shared with another region. traces: receives the spans. compute: where looks at the queue of moves run.
        thread_time: by which these are paced. decide: where steps decide.
        """
        store = await SqliteStore.open(folder, reserve_bytes=0)
        sent = RecordedLinks()
        clock, models, ids = (
            (earlier.clock, earlier.models, earlier.ids)
            if earlier
            else (clock or SteppedClock(), KnownModels(), CountingIds())
        )
        region = RegionalCoordinator(
            *(store, sent, models, models, clock, ids, RegionConfig(name)),
            signals=signals,
            proofs=proofs,
            meter=meter,
            exporter=traces,
            compute=compute,
            decide=decide,
            thread_time=thread_time,
        )
        await region.start()
        return cls(region, store, sent, clock, models, ids)

    async def push(self, name: str = "ocr") -> None:
        await self.region.models.push(name, Bytes(1000), DIGEST, _bytes(), actor="test")

    async def step(self) -> None:
        await self.region.fleet.tick()
        await self.region.workloads.step()


async def _bytes() -> AsyncIterator[bytes]:
    yield b"x" * 1000


@dataclass
class FakeAgent:
    """A node that sends hello, readings and receipts, and applies its desired set at once."""

    # The region that it belongs to.
    world: RegionFixture
    # Node name.
    name: str
    # Boot id in its hello.
    boot: str = "boot-1"
    # Of its session; 0 before the first welcome.
    epoch: int = 0
    # Number of its last status in the session.
    sequence: int = 0
    # Of the desired set that it holds; None: none.
    version: Version | None = None
    # What its next status reports.
    observed: tuple[Observed, ...] = ()
    # Serial of the certificate that its status reports; empty: none.
    serial: str = ""
    # CA roots that its status reports.
    roots: tuple[str, ...] = ()
    # A gateway has no device.
    role: Role = Role.AGENT
    # True: its verdicts fail.
    answers_wrong: bool = False
    # Proof of the desired set that it holds, for its hello.
    proof: bytes = b""
    # True: its device is emulated.
    is_emulated: bool = False
    # As its hello declares them.
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> Node:
        cpu = Device(
            "cpu0", DeviceKind.CPU, "v", "m", "linux", "1", "ort 1", "CPUExecutionProvider", Bytes(2**34),
            parallelism=4, emulated=self.is_emulated,
        )  # fmt: skip
        devices = (cpu,) if self.role is Role.AGENT else ()
        return Node(
            self.name, self.world.region.config.name, self.role, self.labels, "0", "linux", "x86_64", Bytes(2**34),
            Bytes(2**34), devices,
            f"{self.name}:1", f"{self.name}:4", self.boot,
        )  # fmt: skip

    async def connect(self) -> Welcome | Refusal:
        hello = Hello(self.node, "nonce", self.version, 1, self.world.clock.wall(), self.proof)
        answer = await self.world.region.fleet.on_hello(self.name, self.role, hello)
        if isinstance(answer, Welcome):
            self.epoch, self.sequence = answer.epoch, 0
            await self.report()
            if self.node.devices:
                assert await self.send_receipt() is None
        return answer

    async def send_receipt(self) -> Refusal | None:
        """Send the receipt of its one device."""
        rates = Rates(
            {"fp32": 1e10}, {"fp32": 1e10}, 1e10, 1e10, Seconds(1e-5), Seconds(1e-6), 1e9, Watts(5.0), Watts(20.0),
            EnergySource.ESTIMATED,
        )  # fmt: skip
        receipt = Receipt(
            self.name, "cpu0", "CPUExecutionProvider", "1", "ort 1", ("fp32",), (), rates, Bytes(2**33), 0.1,
            self.world.clock.wall(), Seconds(1.0), False, "probe",
        )  # fmt: skip
        signed = nouns.make_signed_receipt(receipt, b"signature")
        return await self.world.region.fleet.on_message(self.name, self.epoch, Receipts((signed,)))

    async def report(self, *, epoch: int | None = None, free_bytes: int = 2**33) -> Refusal | None:
        self.sequence += 1
        readings = tuple(
            Reading(each.name, Bytes(free_bytes), 0.1, 50.0, Watts(10.0), 1.0, self.world.clock.wall())
            for each in self.node.devices
        )
        status = Status(
            self.name, epoch or self.epoch, self.sequence, True, self.version, self.observed, (), readings, (),
            self.world.clock.wall(), True, serial=self.serial, roots=self.roots,
        )  # fmt: skip
        answer = self.world.region.fleet.on_status(self.name, epoch or self.epoch, status)
        return answer if isinstance(answer, Refusal) else None

    async def apply_desired(self) -> None:
        """Report everything in the newest desired set as ready at once."""
        newest = self.world.links.desired_sets(self.name)[-1]
        self.version, self.proof = newest.version, newest.proof
        self.observed = tuple(
            Observed(
                each.id, each.workload, each.model, each.device, Phase.READY, self.world.clock.wall(), None, "", None,
                None, 0, 0, None, (), verdict=self._verdict(each.verification),
            )
            for each in newest.assignments
            if not each.draining
        )  # fmt: skip
        await self.report()

    def _verdict(self, asked: Verification | None) -> Verdict | None:
        """A new replica answers like the old one, unless `answers_wrong`."""
        if asked is None or asked.against is Against.NONE:
            return None
        code = Code.VERIFY_FAILED if self.answers_wrong else None
        return Verdict(asked.migration, not self.answers_wrong, code, "", asked.against, asked.inputs, asked.samples)


async def two_agents(world: RegionFixture, *, emulated: bool = False) -> tuple[FakeAgent, FakeAgent]:
    """Apply `DOCUMENTS`: the agent that runs the one workload, and one that does not."""
    await world.push()
    agents = [FakeAgent(world, name, is_emulated=emulated) for name in ("edge-1", "edge-2")]
    for agent in agents:
        await agent.connect()
    applied = await world.region.documents.apply(DOCUMENTS, {}, "", "test")
    assert not applied.plan_result.problems
    await world.step()
    await run_heartbeat(world, *agents)
    (runs,) = [agent for agent in agents if world.region.workloads.desired[agent.name].assignments]
    (other,) = [agent for agent in agents if agent is not runs]
    return runs, other


async def run_heartbeat(world: RegionFixture, *agents: FakeAgent, seconds: float = 0.5) -> None:
    """Each agent applies its newest desired set, time passes, the region steps."""
    for agent in agents:
        await agent.apply_desired()
    world.clock.advance(seconds)
    for _ in range(3):
        await world.step()


async def run_until_over(world: RegionFixture, migration: Migration, *agents: FakeAgent, most: int = 120) -> Migration:
    """The migration once it is over, with the agents' heartbeats meanwhile."""
    found = migration
    for _ in range(most):
        found = world.region.moves.get(migration.id)
        if found.is_over:
            return found
        await run_heartbeat(world, *agents)
    raise AssertionError(f"still {found.stage}: {found.stages}")

"""How many agents one coordinator process serves on one core, and how they reconnect: `shoal bench links`.

A real coordinator, alone on one core, and sessions of the agents' own link code on the other cores: each says hello
with a certificate of its own and reports once per heartbeat. For each fleet size it measures the coordinator's share of
its core, messages a second, and resident memory above the empty coordinator's. Then it kills and restarts the
coordinator, and all agents reconnect at once (a reconnect storm). No node may be reported suspect or lost meanwhile.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import structlog

from shoal.agent.clock import SystemClock
from shoal.agent.core.link_session import reconnect_after
from shoal.agent.link.credentials import CredentialFiles
from shoal.agent.link.grpc import GrpcLink
from shoal.agent.link.mqtt import MqttLink
from shoal.agent.ports import CoordinatorLink, LinkSession
from shoal.client import Context, RegionClient
from shoal.coordinator import codec
from shoal.coordinator.broker import rights
from shoal.coordinator.controllers.identity.certificates import key_of, with_presented_certificate
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.ports import Transaction
from shoal.coordinator.store.sqlite import SqliteStore
from shoal.types.assignment import DesiredSet, Status, Version
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Device, DeviceKind, Node, Reading, Role
from shoal.types.identity import Identity
from shoal.types.link import Hello
from shoal.types.units import Bytes, Seconds, Wall, Watts
from shoal.wire.certificates import identity_of_pem

REGION = "bench"
HEARTBEAT_S = 1.0
VALID_S = Seconds(6 * 3600.0)
SILENT = ("NODE_SUSPECT", "NODE_LOST", "MASS_SILENCE")
AWAY = "away"
"""A file that exists while the coordinator is down."""


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Results for one fleet size."""

    # "grpc" or "mqtt".
    link: str
    # Number of agents.
    agents: int
    # Seconds until all agents are connected at first.
    connected_s: float
    # The coordinator's share of its core.
    core: float
    # Messages a second from all agents.
    messages_a_second: float
    # Resident bytes of the coordinator above the empty coordinator's.
    memory: int
    # `memory` for each 1,000 agents, in bytes.
    memory_per_1000: int
    # The coordinator's slowest answer to an operator meanwhile, of many, in milliseconds.
    late_ms: float
    # Seconds from the restarted coordinator's being ready to the last agent's welcome.
    herd_s: float
    # Events that report nodes suspect or lost.
    silent: int
    # Longest time between two heartbeats of a session, in seconds, as the agents' side sent them. The agents share the
    # remaining cores; from three heartbeats on, `silent` nodes are their fault.
    gap_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[1000, 2500, 5000])
    parser.add_argument("--link", choices=("grpc", "mqtt"), default="grpc", help="mqtt: over this machine's Mosquitto")
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure each size for")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _raise_limit()
    if options.drive:
        asyncio.run(_drive(options.drive, options.link, options.address, options.agents[0]))
        return
    found = []
    for agents in options.agents:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            found.append(measure(Path(folder), options.link, agents, options.seconds))
        if not options.json:
            _print_figures(found[-1])
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=1))


def _print_figures(held: FleetFigures) -> None:
    mib = held.memory_per_1000 / 2**20
    print(
        f"{held.link} {held.agents:>6} agents: {held.core:5.0%} of a core, {held.messages_a_second:6.0f} messages/s, "
        f"{mib:6.1f} MiB a 1,000 agents, an operator waits {held.late_ms:.0f} ms at worst, "
        f"connected in {held.connected_s:.1f} s, all back {held.herd_s:.1f} s after a restart, "
        f"{held.silent} called silent, {held.gap_s:.1f} s between two beats at worst",
        flush=True,
    )


class BenchCoordinator:
    """A coordinator on core 0 that keeps its address after a restart. mqtt: address of the broker that agents use; ''
    without one."""

    def __init__(self, data: Path, mqtt: str = "") -> None:
        self.data = data
        self._mqtt = ("--mqtt", mqtt, "--models", "127.0.0.1:0") if mqtt else ()
        self._log = data.with_suffix(".log")
        self._addresses = {"link": "127.0.0.1:0", "enrol": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        self.process: psutil.Popen

    def start(self) -> None:
        flags = [part for name, address in self._addresses.items() for part in (f"--{name}", address)]
        program = str(Path(sys.executable).with_name("shoal-coordinator"))
        with self._log.open("a") as log:
            self.process = psutil.Popen(
                [program, "run", "--region", REGION, "--data-dir", str(self.data), *flags, *self._mqtt],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.process.cpu_affinity([0])
        ready = json.loads(self.process.stdout.readline() or "{}")
        if not ready:
            raise SystemExit(f"the coordinator did not start: {self._log.read_text()[-2000:]}")
        self._addresses = {name: ready[name] for name in self._addresses}

    @property
    def address(self) -> str:
        return self._addresses["link"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def region(self) -> RegionClient:
        return RegionClient(Context("bench", REGION, self.address, str(self.data / "operator")))


class BenchBroker:
    """Mosquitto on the agents' cores, set up by `broker-config`, with all agents admitted."""

    def __init__(self, data: Path, folder: Path) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{found.getsockname()[1]}"
        program = [str(Path(sys.executable).with_name("shoal-coordinator")), "broker-config", "--region", REGION]
        where = ["--data-dir", str(data), "--out", str(folder), "--listen", self.address]
        subprocess.run([*program, *where], check=True, stdout=subprocess.DEVNULL)
        self._folder = folder
        self.process: psutil.Popen

    def start(self, nodes: Sequence[str]) -> None:
        (self._folder / "rights.json").write_text(json.dumps(rights.document(REGION, nodes)))
        with (self._folder / "log").open("w") as log:
            self.process = psutil.Popen([str(self._folder / "start")], stdout=log, stderr=log)
        self.process.cpu_affinity(sorted(set(range(os.cpu_count() or 1)) - {0}) or [0])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(folder: Path, link: str, agents: int, seconds: float) -> FleetFigures:
    with contextlib.ExitStack() as stack:
        data, members = folder / "coordinator", folder / "members"
        broker = BenchBroker(data, folder / "broker") if link == "mqtt" else None
        if broker is not None:
            asyncio.run(_store_identities(data, _enrol(data, members, agents)))
            broker.start(sorted(path.name for path in members.iterdir()))
            stack.callback(broker.end)
        coordinator = BenchCoordinator(data, broker.address if broker is not None else "")
        coordinator.start()
        stack.callback(coordinator.end)
        empty = coordinator.process.memory_info().rss
        if broker is None:
            _enrol(data, members, agents)
        address = broker.address if broker is not None else coordinator.address
        with _drivers(members, link, address, agents) as drivers:
            began = time.monotonic()
            drivers.wait_for(agents, deadline_s=120 + agents / 20)
            connected_s = time.monotonic() - began
            _pause(5.0)
            cpu, sent, at = _cpu(coordinator.process), drivers.messages_sent(), time.monotonic()
            late = _latest_answer(coordinator, seconds)
            took = time.monotonic() - at
            core = (_cpu(coordinator.process) - cpu) / took
            messages = (drivers.messages_sent() - sent) / took
            memory = coordinator.process.memory_info().rss - empty
            silent, last = _silent(coordinator, 0)
            with _away(members):
                coordinator.end()
                coordinator.start()
            back = time.monotonic()
            drivers.wait_for(agents, deadline_s=120 + agents / 20, after=back)
            herd_s = drivers.last_welcome() - back
            _pause(5.0)
            silent += _silent(coordinator, last)[0]
            gap_s = drivers.gap_s()
        return FleetFigures(
            link,
            agents,
            connected_s,
            core,
            messages,
            memory,
            int(memory * 1000 / agents),
            1000 * late,
            herd_s,
            silent,
            gap_s,
        )


@contextlib.contextmanager
def _away(members: Path) -> Iterator[None]:
    """Tells the drivers that the coordinator is down. In a real fleet each agent finds that out with a processor of its
    own; thousands on one core cannot, and the coordinator has no part in it."""
    flag = members.with_name(AWAY)
    flag.touch()
    try:
        yield
    finally:
        flag.unlink()


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def _latest_answer(coordinator: BenchCoordinator, seconds: float) -> float:
    """Seconds of the slowest of many small calls, made for `seconds`."""
    worst, end = 0.0, time.monotonic() + seconds
    with coordinator.region() as region:
        while time.monotonic() < end:
            asked = time.monotonic()
            region.who_am_i()
            worst = max(worst, time.monotonic() - asked)
            time.sleep(0.1)
    return worst


def _silent(coordinator: BenchCoordinator, after: int) -> tuple[int, int]:
    """Number of events after `after` that report nodes suspect or lost, and the last event's number."""
    with coordinator.region() as region:
        events = list(region.events(after, limit=10_000))
    return sum(event.code in SILENT for event in events), events[-1].sequence


def _enrol(data: Path, members: Path, agents: int) -> list[Identity]:
    """A certificate for each agent, from the region's own CA."""
    identities = []
    wall = SystemClock().wall()
    authority = FileAuthority.open(data / "ca", REGION, wall=wall, may_create=False)
    for number in range(agents):
        name = f"agent-{number:05d}"
        enrolled = authority.enrol_self(Role.AGENT, name, lifetime_s=VALID_S, wall=wall)
        (members / name).mkdir(parents=True)  # not Enrolled.write, whose crash-safe writing flushes six times
        for file, pem in (("cert", enrolled.certificate_pem), ("key", enrolled.key_pem), ("ca", enrolled.ca_pem)):
            (members / name / f"{file}.pem").write_bytes(pem)
        identities.append(identity_of_pem(enrolled.certificate_pem))
    return identities


async def _store_identities(data: Path, identities: Sequence[Identity]) -> None:
    """Records the nodes before the coordinator starts, because it expels unknown ones from the broker."""
    store = await SqliteStore.open(data / "store")
    known = {
        key_of(each.role, each.name): with_presented_certificate(None, each, SystemClock().wall())
        for each in identities
    }
    await store.commit(Transaction({key: codec.dump(record) for key, record in known.items()}))
    await store.close()


class Drivers:
    """The agents' processes and their latest reports, one JSON file each."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], files: Sequence[Path]) -> None:
        self._processes = processes
        self._files = files

    def _read_reports(self) -> list[dict[str, float]]:
        for process in self._processes:
            if process.poll() is not None:
                raise SystemExit("a driver of the benchmark ended")
        return [json.loads(path.read_text()) for path in self._files if path.exists()]

    def messages_sent(self) -> float:
        return sum(each["sent"] for each in self._read_reports())

    def gap_s(self) -> float:
        return max(each["gap_s"] for each in self._read_reports())

    def last_welcome(self) -> float:
        return max(each["welcomed_at"] for each in self._read_reports())

    def wait_for(self, agents: int, *, deadline_s: float, after: float = 0.0) -> None:
        """Waits until that many agents are connected, all welcomed later than `after`."""
        end = time.monotonic() + deadline_s
        while True:
            said = self._read_reports()
            connected = sum(each["connected"] for each in said)
            if connected >= agents and min((each["oldest_welcome"] for each in said), default=0.0) >= after:
                return
            if time.monotonic() > end:
                raise SystemExit(f"only {connected:.0f} of {agents} agents were connected after {deadline_s:.0f} s")
            time.sleep(0.2)


@contextlib.contextmanager
def _drivers(members: Path, link: str, address: str, agents: int) -> Iterator[Drivers]:
    """One process on each core except the coordinator's, each with its share of the agents."""
    cores = sorted(set(range(os.cpu_count() or 1)) - {0}) or [0]
    shares = [agents // len(cores) + (index < agents % len(cores)) for index in range(len(cores))]
    processes, files, first = [], [], 0
    for core, share in zip(cores, shares, strict=True):
        folder = members.with_name(f"driver-{core}")
        folder.mkdir()
        for name in sorted(path.name for path in members.iterdir())[first : first + share]:
            (folder / name).symlink_to(members / name)
        first += share
        command = [sys.executable, __file__, "--drive", str(folder), "--link", link, "--address", address]
        command += ["--agents", str(share)]
        process = subprocess.Popen(command, text=True)
        psutil.Process(process.pid).cpu_affinity([core])
        processes.append(process)
        files.append(folder.with_suffix(".json"))
    try:
        yield Drivers(processes, files)
    finally:
        for process in processes:
            process.kill()
            process.wait()


# In a driver's process


@dataclass(slots=True)
class DriverCounts:
    """Counters of one driver's agents."""

    # Status messages sent.
    sent: int = 0
    # Connections that failed or were lost.
    failed: int = 0
    # Longest time between two heartbeats of a session, in seconds.
    gap_s: float = 0.0


async def _drive(folder: Path, link: str, address: str, agents: int) -> None:
    count, welcomed = DriverCounts(), dict[str, float]()
    names = sorted(path.name for path in folder.iterdir())
    tasks = [
        asyncio.create_task(_agent(folder / name, link, address, index * HEARTBEAT_S / agents, count, welcomed))
        for index, name in enumerate(names)
    ]
    out = folder.with_suffix(".json")
    while True:
        said: dict[str, Any] = {
            "connected": len(welcomed),
            "sent": count.sent,
            "failed": count.failed,
            "gap_s": count.gap_s,
            "welcomed_at": max(welcomed.values(), default=0.0),
            "oldest_welcome": min(welcomed.values(), default=0.0),
        }
        draft = out.with_suffix(".new")
        draft.write_text(json.dumps(said))
        draft.replace(out)
        ended = [task for task in tasks if task.done()]
        for task in ended:
            task.result()
        await asyncio.sleep(0.2)


async def _agent(
    folder: Path, carrier: str, address: str, offset_s: float, count: DriverCounts, welcomed: dict[str, float]
) -> None:
    """One agent's sessions, forever: opened and kept as the supervisor does, with a small report at each heartbeat."""
    clock, name, held, attempt, away = SystemClock(), folder.name, AgentState(), 0, folder.parent.with_name(AWAY)
    link: CoordinatorLink = (GrpcLink if carrier == "grpc" else MqttLink)(
        CredentialFiles(folder), address, clock, structlog.testing.ReturnLogger()
    )
    await asyncio.sleep(offset_s)
    while True:
        try:
            if away.exists():
                raise refuse(Code.COORDINATOR_UNREACHABLE, "nobody listens", "a coordinator")
            session = await link.connect(_hello(name, held, clock.wall()))
        except ShoalError:
            count.failed += 1
            await asyncio.sleep(reconnect_after(name, attempt))
            attempt += 1
            continue
        attempt = 0
        beaten = welcomed[name] = time.monotonic()
        reader = asyncio.create_task(_read(session, held))
        try:
            sequence = 0
            while not reader.done():
                sequence += 1
                await session.send(_status(name, session.welcome.epoch, sequence, held, clock.wall()))
                count.sent += 1
                before, beaten = beaten, time.monotonic()
                count.gap_s = max(count.gap_s, beaten - before)
                await asyncio.wait([reader], timeout=session.welcome.heartbeat_s)
        except ShoalError:
            count.failed += 1
        finally:
            welcomed.pop(name, None)
            reader.cancel()
            await session.close()
        await asyncio.sleep(reconnect_after(name, 0))


@dataclass(slots=True)
class AgentState:
    """What an agent keeps between sessions."""

    # Version of the desired set that the agent took last; None before the first. It survives a reconnect, as a real
    # agent's does.
    version: Version | None = None


async def _read(session: LinkSession, held: AgentState) -> None:
    with contextlib.suppress(ShoalError):
        while True:
            message = await session.receive()
            if isinstance(message, DesiredSet):
                held.version = message.version


def _hello(name: str, held: AgentState, wall: Wall) -> Hello:
    cpu = Device(
        "cpu0", DeviceKind.CPU, "bench", "bench", "bench", "1", "onnxruntime 1", "CPUExecutionProvider", Bytes(2**34)
    )
    node = Node(
        name, REGION, Role.AGENT, {"site": "bench"}, "0", "linux", "x86_64", Bytes(2**34), Bytes(2**34), (cpu,),
        "127.0.0.1:1", "127.0.0.1:4", "boot",
    )  # fmt: skip
    return Hello(node, f"nonce-{name}-{wall}", held.version, 1, wall)


def _status(name: str, epoch: int, sequence: int, held: AgentState, wall: Wall) -> Status:
    reading = Reading("cpu0", Bytes(2**33), 0.1, 40.0, Watts(10.0), 100.0 + sequence, wall)
    return Status(name, epoch, sequence, sequence % 8 == 1, held.version, (), (), (reading,), (), wall, True)


def _raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()

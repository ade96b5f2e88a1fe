"""`shoal-agent run`: one supervisor with its adapters, until SIGTERM."""

import asyncio
import json
import secrets
import signal
import sys
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path

from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.clock import Floor, SystemClock
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.identity import enrolment, host
from shoal.agent.identity.signer import KeySigner
from shoal.agent.journal.files import FileJournal
from shoal.agent.journal.slots import Slots
from shoal.agent.link.credentials import Files
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.agent.main.drivers import installed
from shoal.agent.main.options import Address, Config
from shoal.agent.ports import DriverOptions, Log
from shoal.agent.supervisor import Settings, Supervisor
from shoal.agent.telemetry import log as logs
from shoal.agent.telemetry import metrics
from shoal.agent.worker.pool import PoolOptions, ProcessWorkers
from shoal.types.codes import Code, refuse
from shoal.types.device import Node, Role
from shoal.types.units import Elapsed, Seconds, Wall
from shoal.wire.identity import Identity
from shoal.wire.scrape import Guard

FRONT_COMMAND = (sys.executable, "-P", "-m", "shoal.agent.main", "front")
FLOOR_EVERY_S = Seconds(60.0)
READY_POLL_S = Seconds(0.05)


def run(config: Config) -> int:
    """Raises ShoalError(UNAUTHENTICATED | ROLE_DENIED | CONFLICT | FIELD_INVALID)."""
    member = enrolment.load(config.state_dir)
    files = Files(config.identity)
    identity = files.identity()
    if identity.role is not config.role:
        raise refuse(
            Code.ROLE_DENIED,
            f"a certificate of role {identity.role}",
            f"role {config.role}",
            "join with a token for it",
        )
    logs.configure("supervisor")
    with enrolment.alone(config.state_dir):
        asyncio.run(_serve(config, member, files, identity))
    return 0


async def _serve(config: Config, member: enrolment.Member, files: Files, identity: Identity) -> None:
    log = logs.StructuredLog(node=identity.name, region=identity.region)
    coordinator = config.coordinator or member.coordinator
    floor = _FloorFile(config.state_dir / "journal", log)
    clock = SystemClock(floor.load())
    journal = FileJournal(config.state_dir / "journal", log)
    front = FrontProcess(_front_config(config, files, identity), FRONT_COMMAND, clock)
    cache = config.state_dir / "cache"
    workers = ProcessWorkers(
        config.state_dir / "run",
        cache,
        clock,
        device=lambda name: supervisor.device(name),
        pace=lambda name: supervisor.pace(name),
        options=PoolOptions(spare=config.role is Role.AGENT),
    )
    listening = await front.start()
    guard = Guard(identity.region, files.certificate, files.key, files.ca, clock.wall)
    metrics_port = metrics.serve(str(config.metrics), lambda: supervisor.snapshot, guard)
    models = GrpcModels(files, coordinator)
    options = DriverOptions(emulate=config.emulate, time_scale=config.time_scale)
    node = _node(config, member, identity, listening, metrics_port)
    supervisor = Supervisor(
        settings=Settings(),
        node=node,
        drivers=() if config.role is Role.GATEWAY else installed(clock, options, cpu=config.cpu),
        link=GrpcLink(files, coordinator, clock, log),
        workers=workers,
        front=front,
        journal=journal,
        cache=DirectoryCache(cache, models.fetch, log, quota=config.cache_quota),
        signer=KeySigner(files.key.read_bytes(), region=identity.region, node=identity.name),
        clock=clock,
        nonce=lambda: secrets.token_hex(16),
        log=log,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    beside = [
        asyncio.create_task(
            _announce(node, f"{listening.host}:{listening.metrics_port}", supervisor, clock), name="announce"
        ),
        asyncio.create_task(_keep_floor(floor, clock), name="floor"),
    ]
    try:
        await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        floor.save(clock.floor())


def _front_config(config: Config, files: Files, identity: Identity) -> FrontConfig:
    return FrontConfig(
        node=identity.name,
        region=identity.region,
        host=config.grpc.host,
        grpc_port=config.grpc.port,
        token_port=config.token.port,
        rest_port=config.rest.port,
        metrics_port=config.front_metrics.port,
        certificate=str(files.certificate),
        key=str(files.key),
        authority=str(files.ca),
        run_dir=str(config.state_dir / "run"),
    )


def _node(config: Config, member: enrolment.Member, identity: Identity, front: FrontConfig, metrics_port: int) -> Node:
    outside = config.advertise or host.advertised(front.host)
    system, architecture = host.system()
    return Node(
        name=identity.name,
        region=identity.region,
        role=identity.role,
        labels={**member.labels, **config.labels},
        agent_version=version("shoal-agent"),
        os=system,
        arch=architecture,
        memory_bytes=host.memory(),
        memory_limit_bytes=host.memory_limit(),
        devices=(),
        grpc_address=str(Address(outside, front.grpc_port)),
        rest_address=str(Address(outside, front.rest_port)),
        token_address=str(Address(outside, front.token_port)),
        metrics_address=str(Address(outside, metrics_port)),
        boot_id=host.boot_id(),
    )


async def _announce(node: Node, front_metrics: str, supervisor: Supervisor, clock: SystemClock) -> None:
    """One line on stdout once requests are taken, for whoever started this program."""
    while not supervisor.snapshot.front.ready:
        await clock.sleep(READY_POLL_S)
    line = {
        "event": "listening",
        "node": node.name,
        "region": node.region,
        "role": node.role,
        "grpc": node.grpc_address,
        "rest": node.rest_address,
        "token": node.token_address,
        "metrics": node.metrics_address,
        "front_metrics": front_metrics,
    }
    print(json.dumps(line), flush=True)


class _FloorFile:
    """The clock's floor on disk."""

    def __init__(self, folder: Path, log: Log) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._log = log
        self._slots = Slots(folder, "clock", lambda aside: log("state_corrupt", error=True, found=aside.name))

    def load(self) -> Floor | None:
        content = self._slots.load()
        if content is None:
            return None
        elapsed, wall = json.loads(content)
        return Floor(Elapsed(elapsed), Wall(wall))

    def save(self, floor: Floor) -> None:
        try:
            self._slots.save(json.dumps(astuple(floor)).encode())
        except OSError as error:
            self._log("floor_not_saved", error=True, reason=str(error))


async def _keep_floor(floor: _FloorFile, clock: SystemClock) -> None:
    while True:
        await asyncio.to_thread(floor.save, clock.floor())
        await clock.sleep(FLOOR_EVERY_S)

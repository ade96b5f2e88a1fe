"""`shoal-agent run`: one supervisor with its adapters, until SIGTERM."""

import asyncio
import json
import secrets
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from shoal.agent import courtesy
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import Publishers, load_keys
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.identity import enrolment, host
from shoal.agent.identity.membership import FileMembership
from shoal.agent.identity.signer import KeySigner
from shoal.agent.journal.files import FileJournal
from shoal.agent.link.choice import ChosenLink, ChosenModels, Models
from shoal.agent.link.credentials import Files, check_coordinator
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.agent.link.https import HttpsModels
from shoal.agent.link.mqtt import MqttLink
from shoal.agent.main.drivers import installed
from shoal.agent.main.options import Address, Config
from shoal.agent.main.stopping import Stop
from shoal.agent.main.timekeeper import Timekeeper
from shoal.agent.ports import Clock, DriverOptions, Log
from shoal.agent.supervisor import Settings, Supervisor
from shoal.agent.telemetry import metrics
from shoal.agent.telemetry.log import FOLDER, KeptLogs, StructuredLog
from shoal.agent.worker import confinement
from shoal.agent.worker.pool import PoolOptions, ProcessWorkers
from shoal.types.codes import Code, refuse
from shoal.types.device import Node, Role
from shoal.types.units import Seconds
from shoal.wire import garbage, logs
from shoal.wire.identity import Identity
from shoal.wire.otlp import collector_of
from shoal.wire.private import no_dumps
from shoal.wire.scrape import Guard

FRONT_COMMAND = (sys.executable, "-P", "-m", "shoal.agent.main", "front")
READY_POLL_S = Seconds(0.05)


def run(config: Config, stop: Stop) -> int:
    """Raises ShoalError(UNAUTHENTICATED | ROLE_DENIED | CONFLICT | FIELD_INVALID), and what joining raises."""
    courtesy.go_behind()
    unconfined = confinement.lacking() if config.role is Role.AGENT else ()
    if config.token_file is not None and not enrolment.is_member(config.state_dir):
        with stop.at_once():
            _join(config, config.token_file)
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
    if config.otlp:
        collector_of(config.otlp)  # else the front would say so, which nobody reads
    logs.configure(process="supervisor", keep=config.state_dir / FOLDER / "supervisor.log")
    no_dumps()
    garbage.set_apart()
    with enrolment.alone(config.state_dir):
        asyncio.run(_serve(config, member, files, identity, unconfined, stop))
    return 0


def _join(config: Config, token_file: Path) -> None:
    """Raises ShoalError(FIELD_INVALID), and what joining raises."""
    if not config.enrol:
        remedy = "say where the coordinator redeems tokens"
        raise refuse(Code.FIELD_INVALID, "--token-file without --enrol", "--enrol HOST:PORT", remedy)
    try:
        token = token_file.read_text().strip()
    except (OSError, ValueError) as cause:
        found, remedy = f"--token-file {token_file}: {cause}", "put one there: shoal token create"
        raise refuse(Code.FIELD_INVALID, found, "a file with a join token", remedy) from cause
    wall = SystemClock().wall()
    enrolment.join(config.state_dir, config.enrol, token, name=config.name, labels={}, wall=wall)


async def _serve(
    config: Config,
    member: enrolment.Member,
    files: Files,
    identity: Identity,
    unconfined: tuple[str, ...],
    stop: Stop,
) -> None:
    log = StructuredLog(node=identity.name, region=identity.region)
    timekeeper = Timekeeper(config.state_dir / "journal", identity.not_before, log)
    clock = timekeeper.clock
    journal = FileJournal(config.state_dir / "journal", log)
    command = (*FRONT_COMMAND, "--journal", str(config.state_dir / "journal"))
    front = FrontProcess(_front_config(config, files, identity), command, clock)
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
    own_keys = load_keys(config.publisher_keys) if config.publisher_keys is not None else ()
    publishers = Publishers(config.state_dir / "publishers.json", own_keys, log)
    link, models = _links(config, member, files, identity, clock, log)
    membership = FileMembership(
        config.identity,
        config.enrol or member.enrol,
        clock,
        log,
        renewed=link.renewed,
        learned=lambda wall: timekeeper.confirm("enrolment", wall),
    )
    options = DriverOptions(config.emulate, config.time_scale, config.wake_scale, config.emulate_condition)
    node = replace(_node(config, member, identity, listening, metrics_port), unconfined=unconfined)
    supervisor = Supervisor(
        settings=Settings(),
        node=node,
        drivers=() if config.role is Role.GATEWAY else installed(clock, options, cpu=config.cpu),
        link=link,
        workers=workers,
        front=front,
        journal=journal,
        cache=DirectoryCache(cache, models.fetch, publishers, log, quota=config.cache_quota),
        recordings=models,
        signer=KeySigner(files.key, region=identity.region, node=identity.name),
        clock=clock,
        nonce=lambda: secrets.token_hex(16),
        log=log,
        sightings=timekeeper,
        membership=membership,
        logs=KeptLogs(config.state_dir),
        spans=front,
    )
    stop.hand_over(supervisor.request_stop)
    beside = [
        asyncio.create_task(
            _announce(node, f"{listening.host}:{listening.metrics_port}", supervisor, clock), name="announce"
        ),
        asyncio.create_task(membership.run(), name="membership"),
        asyncio.create_task(timekeeper.keep(node.name, supervisor.tell), name="time"),
    ]
    try:
        await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        timekeeper.save()


def _links(
    config: Config, member: enrolment.Member, files: Files, identity: Identity, clock: Clock, log: Log
) -> tuple[GrpcLink | MqttLink | ChosenLink, Models]:
    """The link, and where models come from. Raises ShoalError(FIELD_INVALID)."""
    coordinator, broker = config.coordinator or member.coordinator, config.mqtt or member.mqtt
    grpc = GrpcLink(files, coordinator, clock, log)
    grpc_models = GrpcModels(files, lambda: grpc.address)
    if config.link == "grpc" or (config.link == "auto" and not broker):
        return grpc, grpc_models
    if not broker:
        raise refuse(Code.FIELD_INVALID, "--link mqtt without a broker", "--mqtt HOST:PORT", "say where the broker is")
    mqtt = MqttLink(files, broker, clock, log)
    mqtt_models = HttpsModels(files, lambda: mqtt.models_address, clock)
    if config.link == "mqtt":
        return mqtt, mqtt_models

    async def looks() -> bool:
        return await check_coordinator(files, grpc.address, clock.wall()) is None

    chosen = ChosenLink(identity.name, grpc, mqtt, looks, clock, log)
    return chosen, ChosenModels(chosen, grpc_models, mqtt_models)


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
        trace_ratio=config.trace_ratio,
        otlp=config.otlp,
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

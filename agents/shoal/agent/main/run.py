"""`shoal-agent run`: one supervisor with its adapters, until SIGTERM."""

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import structlog

from shoal.agent import scheduling_priority
from shoal.agent.cache.directory import DirectoryCache
from shoal.agent.cache.publishers import SignatureVerifier, load_keys
from shoal.agent.clock import SystemClock
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.process import FrontProcess
from shoal.agent.devices.host import Host
from shoal.agent.devices.installation import CPU_DRIVER, LIMIT_S, Installation
from shoal.agent.devices.process import DriverProcess
from shoal.agent.identity import enrolment, host
from shoal.agent.identity.forward_key import public_key_of
from shoal.agent.identity.membership import FileMembership
from shoal.agent.identity.orders import JoinOrder
from shoal.agent.identity.programs import run_order
from shoal.agent.identity.publisher_signatures import verify_in_program
from shoal.agent.identity.signer import KeySigner
from shoal.agent.journal.files import FileJournal
from shoal.agent.link.credentials import CredentialFiles, check_coordinator
from shoal.agent.link.failover import BrokerLink, CarrierLink, FailoverLink, FailoverModels, ModelTransport
from shoal.agent.link.grpc import GrpcLink, GrpcModels
from shoal.agent.main.options import AgentConfig, driver_options
from shoal.agent.main.stop_signals import StopSignals
from shoal.agent.main.timekeeper import Timekeeper
from shoal.agent.ports import AgentClock, Log
from shoal.agent.preparation.preparer import ProgramPreparer
from shoal.agent.programs import StartedProgram
from shoal.agent.supervisor import Supervisor, SupervisorPorts, SupervisorSettings
from shoal.agent.telemetry import metrics
from shoal.agent.telemetry.log import FOLDER, LogFileReader
from shoal.agent.timeouts import within
from shoal.agent.worker import confinement
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.host import gc_freeze, logs
from shoal.host.memory import limit_bytes, machine_bytes
from shoal.host.otlp import collector_of
from shoal.host.private_files import disable_core_dumps
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Node, Role
from shoal.types.identity import Identity
from shoal.types.units import Bytes, Seconds
from shoal.wire.metrics_access import RegionMetricsAccess

FRONT_COMMAND = (sys.executable, "-P", "-m", "shoal.agent.main", "front")
BOOT_S = Seconds(10.0)
"""The longest that a node waits at its start for its drivers. One that hangs must not keep the others' devices off."""
FIRST_S = Seconds(0.5)
"""The longest that the processor's driver is alone: it takes 0.2 s on two cores beside a front that starts."""
READY_POLL_S = Seconds(0.05)
FORWARD_KEY = "forward.key"
"""File in the identity's folder: the private key with which this node's front signs forwarded requests."""


def run(config: AgentConfig, stop: StopSignals, installation: StartedProgram[Installation]) -> int:
    """`installation` is being found meanwhile.

    Raises ShoalError(UNAUTHENTICATED | ROLE_DENIED | CONFLICT | FIELD_INVALID), and what joining raises."""
    scheduling_priority.lower_own_priority()
    unconfined = confinement.unsupported_restrictions() if config.role is Role.AGENT else ()
    if (config.token or config.token_file is not None) and not enrolment.is_member(config.state_dir):
        with stop.default_handlers():
            _join(config)
    member = enrolment.load(config.state_dir)
    files = CredentialFiles(config.identity)
    identity = files.identity()
    if identity.role is not config.role:
        raise refuse(
            Code.ROLE_DENIED,
            f"a certificate of role {identity.role}",
            f"role {config.role}",
            "join with a token for it",
        )
    if config.otlp:
        collector_of(config.otlp)  # a bad address must fail here: nobody would see the front's error
    logs.configure(process="supervisor", log_file=config.state_dir / FOLDER / "supervisor.log")
    disable_core_dumps()
    gc_freeze.freeze()
    with enrolment.lock_state_dir(config.state_dir):
        asyncio.run(_serve(config, member, files, identity, unconfined, stop, installation))
    return 0


def _join(config: AgentConfig) -> None:
    """Raises ShoalError(FIELD_INVALID), and what joining raises."""
    if not config.enrol:
        remedy = "say where the coordinator redeems tokens"
        raise refuse(Code.FIELD_INVALID, "a join token without --enrol", "--enrol HOST:PORT", remedy)
    token = config.token if config.token_file is None else _read_token(config.token_file)
    run_order(JoinOrder(str(config.state_dir), config.enrol, token, config.name, SystemClock().wall()))


def _read_token(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as cause:
        found, remedy = f"--token-file {file}: {cause}", "put one there: shoal token create"
        raise refuse(Code.FIELD_INVALID, found, "a file with a join token", remedy) from cause


async def _serve(
    config: AgentConfig,
    member: enrolment.NodeEnrolment,
    files: CredentialFiles,
    identity: Identity,
    unconfined: tuple[str, ...],
    stop: StopSignals,
    installation: StartedProgram[Installation],
) -> None:
    log: Log = structlog.get_logger().bind(node=identity.name, region=identity.region)
    timekeeper = Timekeeper(config.state_dir / "journal", identity.not_before, log)
    clock = timekeeper.clock
    journal = FileJournal(config.state_dir / "journal", log)
    command = (*FRONT_COMMAND, "--journal", str(config.state_dir / "journal"))
    forward_key = public_key_of(config.identity / FORWARD_KEY)
    front = FrontProcess(_front_config(config, files, identity), command, clock)
    cache = config.state_dir / "cache"
    workers = ProcessWorkers(
        config.state_dir / "run",
        cache,
        clock,
        device=lambda name: supervisor.device(name),
        access=lambda name: supervisor.access(name),
        files=lambda: supervisor.device_files,
        free_bytes=Host().free_bytes,
        options=PoolOptions(keep_spare=config.role is Role.AGENT),
    )
    options = driver_options(config)
    listening = await front.start()
    installed = await asyncio.to_thread(installation.wait, LIMIT_S)
    factories = {} if config.role is Role.GATEWAY else installed.drivers
    drivers = [
        DriverProcess(name, factory, options, clock, lambda: supervisor.on_devices_found())
        for name, factory in factories.items()
    ]
    guard = RegionMetricsAccess(identity.region, files.certificate, files.key, files.ca, clock.wall)
    metrics_port = metrics.serve(config.metrics, lambda: supervisor.snapshot, guard)
    own_keys = load_keys(config.publisher_keys) if config.publisher_keys is not None else ()
    publishers = SignatureVerifier(config.state_dir / "publishers.json", own_keys, log, verify=verify_in_program)
    link, models = _links(config, member, files, identity, clock, log)
    membership = FileMembership(
        config.identity,
        config.enrol or member.enrol,
        clock,
        log,
        on_renewed=link.on_certificate_renewed,
        on_coordinator_time=lambda wall: timekeeper.confirm("enrolment", wall),
    )
    node = replace(
        _node(config, member, identity, listening, metrics_port, forward_key, installed.version), unconfined=unconfined
    )
    held = DirectoryCache(cache, models.fetch, publishers, log, quota=config.cache_quota)
    ports = SupervisorPorts(
        drivers=drivers,
        link=link,
        workers=workers,
        front=front,
        journal=journal,
        cache=held,
        recordings=models,
        signer=KeySigner(files.key, region=identity.region, node=identity.name),
        clock=clock,
        nonce=lambda: secrets.token_hex(16),
        log=log,
        contact=timekeeper,
        membership=membership,
        logs=LogFileReader(config.state_dir),
        spans=front,
        preparer=ProgramPreparer(
            config.state_dir / "prepared",
            held,
            clock,
            log,
            device=lambda name: supervisor.device(name),
            access=lambda name: supervisor.access(name),
        ),
        wait_devices=lambda: asyncio.shield(started),
    )
    supervisor = Supervisor(SupervisorSettings(), node, ports)
    stop.hand_over(supervisor.request_stop)
    driving = asyncio.create_task(_drive(drivers), name="drive")
    started = asyncio.create_task(_wait_drivers(drivers), name="drivers")
    beside = [
        driving,
        started,
        asyncio.create_task(
            _announce(node, str(HostPort(listening.host, listening.metrics_port or 0)), supervisor, clock),
            name="announce",
        ),
        asyncio.create_task(membership.run(), name="membership"),
        asyncio.create_task(timekeeper.run(node.name, supervisor.report_event), name="time"),
    ]
    try:
        desired = await journal.load()
        await _wait_devices({each.device for each in desired.assignments} if desired else set(), drivers, started)
        await supervisor.run()
    except ExceptionGroup as failed:
        if isinstance(refused := failed.exceptions[0], ShoalError):  # a driver's, of its options
            raise refused from failed
        raise
    finally:
        for task in beside:
            task.cancel()
        timekeeper.save()


async def _drive(drivers: Sequence[DriverProcess]) -> None:
    """Run the drivers until cancelled. The processor's is not held up by the start of the others: every node has one,
    and after a restart it is what most nodes go on with."""
    running: list[asyncio.Task[None]] = []
    try:
        for each in sorted(drivers, key=lambda each: each.name != CPU_DRIVER):
            running.append(asyncio.create_task(each.run(), name=f"driver {each.name}"))
            if each.name == CPU_DRIVER:
                with suppress(TimeoutError, ShoalError):  # what it refused `_wait_drivers` tells
                    await within(FIRST_S, each.wait_started())
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        for task in running:
            task.cancel()


async def _wait_drivers(drivers: Sequence[DriverProcess]) -> None:
    """Until all have found their devices, or failed; at most BOOT_S: the devices of others are told of when they are
    found. Raises ShoalError(FIELD_INVALID) where one refuses its options."""
    if not drivers:
        return
    starting = [asyncio.create_task(each.wait_started()) for each in drivers]
    done, late = await asyncio.wait(starting, timeout=BOOT_S)
    for task in late:
        task.cancel()
    for task in done:
        task.result()


async def _wait_devices(names: Set[str], drivers: Sequence[DriverProcess], started: asyncio.Task[None]) -> None:
    """Until these devices are found, which the node needs to go on with what it held, or all drivers have `started`. A
    driver of devices that serve nothing yet must not keep the others waiting. Raises as `_wait_drivers`."""
    while not (names and names <= {device.name for each in drivers for device in each.discover()}):
        done, _ = await asyncio.wait((started,), timeout=READY_POLL_S)
        if done:
            started.result()
            return


def _links(
    config: AgentConfig,
    member: enrolment.NodeEnrolment,
    files: CredentialFiles,
    identity: Identity,
    clock: AgentClock,
    log: Log,
) -> tuple[CarrierLink, ModelTransport]:
    """The link, and the transport of models. Raises ShoalError(FIELD_INVALID)."""
    coordinator, broker = config.coordinator or member.coordinator, config.mqtt or member.mqtt
    grpc = GrpcLink(files, coordinator, clock, log)
    grpc_models = GrpcModels(files, lambda: grpc.address)
    if config.link == "grpc" or (config.link == "auto" and not broker):
        return grpc, grpc_models
    if not broker:
        raise refuse(Code.FIELD_INVALID, "--link mqtt without a broker", "--mqtt HOST:PORT", "say where the broker is")

    @cache
    def open_broker() -> tuple[BrokerLink, ModelTransport]:
        # With the first use of a broker: what it keeps is signed, so this brings the cryptography library beside the
        # client of MQTT, 12 MB that a node does without while gRPC holds.
        from shoal.agent.link.https import HttpsModels
        from shoal.agent.link.mqtt import MqttLink

        mqtt = MqttLink(files, broker, clock, log)
        return mqtt, HttpsModels(files, lambda: mqtt.models_address, clock)

    if config.link == "mqtt":
        return open_broker()

    async def is_grpc_reachable() -> bool:
        return await check_coordinator(files, grpc.address, clock.wall()) is None

    chosen = FailoverLink(identity.name, grpc, lambda: open_broker()[0], is_grpc_reachable, clock, log)
    return chosen, FailoverModels(chosen, grpc_models, lambda: open_broker()[1])


def _front_config(config: AgentConfig, files: CredentialFiles, identity: Identity) -> FrontConfig:
    return FrontConfig(
        node=identity.name,
        region=identity.region,
        host=config.listen.host,
        port=config.listen.port,
        metrics_port=config.front_metrics.port,
        certificate=str(files.certificate),
        key=str(files.key),
        authority=str(files.ca),
        run_dir=str(config.state_dir / "run"),
        trace_ratio=config.trace_ratio,
        otlp=config.otlp,
        health_host=config.health.host if config.health is not None else "",
        health_port=config.health.port if config.health is not None else None,
        forward_key=str(config.identity / FORWARD_KEY),
        memory_bytes=config.front_memory,
        shared_memory=config.shared_memory,
    )


def _node(
    config: AgentConfig,
    member: enrolment.NodeEnrolment,
    identity: Identity,
    front: FrontConfig,
    metrics_port: int,
    forward_key: str,
    agent_version: str,
) -> Node:
    outside = config.advertise or host.advertise_host(front.host)
    system, architecture = host.os_and_architecture()
    return Node(
        name=identity.name,
        region=identity.region,
        role=identity.role,
        labels={**member.labels, **config.labels},
        agent_version=agent_version,
        os=system,
        arch=architecture,
        memory_bytes=Bytes(machine_bytes()),
        memory_limit_bytes=Bytes(limit_bytes()),
        devices=(),
        data_address=str(HostPort(outside, front.port)),
        metrics_address=str(HostPort(outside, metrics_port)),
        boot_id=host.boot_id(),
        forward_key=forward_key,
    )


async def _announce(node: Node, front_metrics: str, supervisor: Supervisor, clock: SystemClock) -> None:
    """Print one line to stdout once requests are accepted, for the process that started this program."""
    while not supervisor.snapshot.front.ready:
        await clock.sleep(READY_POLL_S)
    line = {
        "event": "listening",
        "node": node.name,
        "region": node.region,
        "role": node.role,
        "data": node.data_address,
        "metrics": node.metrics_address,
        "front_metrics": front_metrics,
    }
    print(json.dumps(line), flush=True)

"""A region: joins its controllers and adapters into one process."""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import structlog
from cryptography import x509

from shoal.coordinator.api.artifacts import ArtifactsService
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.backup import Models
from shoal.coordinator.api.enrol import ElsewhereEnrolment, EnrolmentService
from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.api.views import agreements
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.coordinator.broker import config as mosquitto
from shoal.coordinator.broker.control import BrokerControl
from shoal.coordinator.broker.renewal import BrokerFolder
from shoal.coordinator.clock import SystemClock
from shoal.coordinator.controllers.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.following import Following
from shoal.coordinator.controllers.members import Members
from shoal.coordinator.controllers.region import Region, RegionConfig
from shoal.coordinator.controllers.renewal import Renewal
from shoal.coordinator.controllers.truth import KEY as REGION_KEY
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.proofs import SignedProofs
from shoal.coordinator.identity.server import ServerIdentity, first_operator
from shoal.coordinator.link.fan import Fan
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.link.mqtt import MqttLinks
from shoal.coordinator.main.backups import Schedule, backup_gauges, backups_of, schedule_of
from shoal.coordinator.main.options import Address, Config, address_of
from shoal.coordinator.main.process import Process, first_of, serve, stop_signals
from shoal.coordinator.main.serving import (
    STOP_S,
    back_up,
    check_whole,
    dialled,
    keep_running,
    listen,
    refresh,
    serve_models,
)
from shoal.coordinator.main.trading import Trading
from shoal.coordinator.peers.siblings import Siblings
from shoal.coordinator.ports import Election, OpenStore, StaleRevision
from shoal.coordinator.signals.sources import open_sources
from shoal.coordinator.telemetry.metrics import Gauges
from shoal.coordinator.telemetry.traces import CollectorTraces
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Bytes, Elapsed, Seconds
from shoal.v1 import artifacts_pb2_grpc, enrolment_pb2_grpc, link_pb2_grpc, operator_pb2_grpc
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import NODES, Identity, check_name, identity_of_certificate
from shoal.wire.limits import LINK_BYTES, enrol_options, server_options

MODEL_BYTES: Final = Bytes(16 * 2**30)
FIRST_LOOK_S: Final = 0.3
"""For an election that is free, before its seat is taken for another's."""

log: Final = structlog.get_logger("shoal.coordinator")


def _broker_identity(authority: FileAuthority, clock: SystemClock) -> Callable[[tuple[str, ...]], Enrolled]:
    return lambda hosts: authority.enrol_self(
        Role.BROKER, mosquitto.NAME, hosts=hosts, lifetime_s=mosquitto.LIFETIME_S, wall=clock.wall()
    )


def write_broker(options: argparse.Namespace) -> Path:
    """The program that starts the broker, in the folder that was asked for. Raises ShoalError."""
    region, data, out = check_name(options.region, "region"), Path(options.data_dir), Path(options.out)
    listens = address_of(options.listen)
    user = options.user or mosquitto.current_user()
    plugin = options.plugin or mosquitto.installed_plugin()
    broker = mosquitto.BrokerConfig(region, listens.host, listens.port, user, plugin)
    clock = SystemClock()
    # A region that was never started may make its CA here: its broker can then be there first.
    authority = FileAuthority.open(data / "ca", region, wall=clock.wall(), may_create=not (data / "store").exists())
    hosts = tuple(dict.fromkeys((*options.host, *dialled(listens))))
    identity = _broker_identity(authority, clock)(hosts)
    try:
        mosquitto.write(out, broker, identity)
    except OSError as cause:
        raise refuse(
            Code.FIELD_INVALID, f"{out}: {cause.strerror}", "a folder that can be written", "choose another --out"
        ) from cause
    return out.resolve() / "start"


async def run(config: Config) -> None:
    """Until SIGTERM or SIGINT; leads when it is elected, and follows until then."""
    await serve(config, "region", stand, stop_signals())


async def stand(config: Config, process: Process, store: OpenStore, stopping: asyncio.Event) -> None:
    """One term at most: follows until elected, leads until another one does."""
    election = store.election(json.dumps({"link": process.link_address, "enrol": process.enrol_address}).encode())
    elected = asyncio.ensure_future(election.win())
    try:
        await first_of(elected, stopping.wait(), asyncio.sleep(FIRST_LOOK_S))
        while not (elected.done() or stopping.is_set() or store.outdated.is_set()):
            try:
                await _follow(config, process, store, election, elected, stopping)
            except ShoalError as error:
                log.debug("does not follow yet", refusal=str(error))
                await first_of(elected, stopping.wait(), asyncio.sleep(FIRST_LOOK_S))
        if elected.done() and not stopping.is_set():
            elected.result()  # an election that failed makes nobody a leader
            await _lead(config, process, store, election, stopping)
    except StaleRevision:
        log.warning("another one was elected meanwhile")
    except ShoalError as error:
        if not election.shared:
            raise
        log.error("could not lead", refusal=str(error))
        await asyncio.sleep(FIRST_LOOK_S)
    finally:
        elected.cancel()
        await election.resign()


async def _lead(
    config: Config, process: Process, store: OpenStore, election: Election, stopping: asyncio.Event
) -> None:
    """Raises StaleRevision when another one was elected before this one could begin its term."""
    clock, ids, meter = process.clock, process.ids, process.meter
    await check_whole(store)
    if store.recovery is not None:
        log.critical("store restored from a copy", refusal=str(store.recovery))
    known = await store.read(REGION_KEY) is not None
    authority = FileAuthority.open(config.shared_dir / "ca", config.region, wall=clock.wall(), may_create=not known)
    identity = ServerIdentity(authority, config.data_dir / "server", _hosts(config), clock)
    grpc_links, mqtt_links = GrpcLinks(meter), None
    if config.mqtt is not None:
        mqtt_links = MqttLinks(
            config.region,
            str(config.mqtt),
            identity,
            identify=lambda certificate: _identify(authority, certificate),
            revoked=lambda serial: members.check(serial),
            models_address=lambda: str(Address(config.advertise, models_port)),
            clock=clock,
            ids=ids,
            meter=meter,
        )
    links = (grpc_links, mqtt_links) if mqtt_links else (grpc_links,)
    blobs = DirectoryBlobs(config.shared_dir / "models", MODEL_BYTES)
    traces = CollectorTraces(config.otlp)
    region = Region(
        store,
        Fan(*links),
        blobs,
        ChildInspector(),
        clock,
        ids,
        RegionConfig(config.region, seed=config.seed),
        meter=meter,
        restored=store.recovery,
        signals=open_sources(config.signals_dir, config.signal_hosts, clock),
        proofs=SignedProofs(config.region, authority, identity.enrolled),
        traces=traces,
    )
    await region.start(elected=election.shared)
    log.info("leads", term=region.truth.term)
    for each in links:
        each.bind(region.fleet)
    lifetimes = _lifetimes(config)
    mqtt = str(config.mqtt) if config.mqtt else ""
    folder_of_broker = None
    if config.broker_dir is not None:
        folder_of_broker = BrokerFolder(config.broker_dir, _broker_identity(authority, clock))
        folder_of_broker.refresh(authority.ca_pem, clock.wall())
    keep = folder_of_broker.keep if folder_of_broker is not None else None
    broker = BrokerControl(config.region, mqtt, identity, clock, ids, meter, keep=keep) if mqtt else None
    enrolment = Enrolment(
        config.region, store, authority, region.events, clock, ids, meter, broker=broker, lifetimes=lifetimes
    )
    operator_dir = config.data_dir / "operator"
    first_operator(authority, operator_dir, clock.wall())

    def own() -> None:
        identity.refresh()
        if mqtt_links is not None:
            mqtt_links.refresh()
            model_server.refresh()

    def operators_own() -> None:
        first_operator(authority, operator_dir, clock.wall())

    def brokers_own() -> None:
        if folder_of_broker is not None:
            folder_of_broker.refresh(authority.ca_pem, clock.wall())

    def turned() -> None:
        own()
        operators_own()
        brokers_own()

    members = Members(
        region,
        store,
        authority,
        clock,
        broker=broker,
        ended=lambda serials: guard.end(serials),
        turned=turned,
        lifetimes=lifetimes,
    )
    await members.start()
    if broker is not None:
        for node in await enrolment.nodes():
            await broker.admit(node)
    renewal = Renewal(
        config.region, store, authority, region.events, clock, ids, meter, members.forbids, lifetimes=lifetimes
    )
    audit = AuditTrail(region.events, meter)
    guard = Authorisation(config.region, clock, meter, audit, members.check)
    model_server = ModelServer(region, identity, guard.judge, audit, meter)
    api = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
    link_pb2_grpc.add_AgentLinkServicer_to_server(grpc_links, api)
    artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
    trading = Trading(
        region,
        store,
        blobs,
        config.peers,
        config.advertise,
        authority=authority,
        identity=identity,
        audit=audit,
        clock=clock,
        meter=meter,
    )
    await trading.start()
    named = Models(blobs, lambda: (*region.workloads.catalog.models, *region.workloads.catalog.packs))
    backups = backups_of(config, "region", store, clock, named)
    schedule = schedule_of(config, backups, clock, meter)
    operators = OperatorService(
        region, enrolment, members, store, clock, audit, process, process, trading=trading, backups=backups
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    listen(api, process.link, identity.credentials(client_certificates=True))
    enrol_server = grpc.aio.server(options=enrol_options())
    service = EnrolmentService(config.region, enrolment, renewal, lambda: process.links, lambda: process.enrols, mqtt)
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrol_server)
    listen(enrol_server, process.enrol, identity.credentials(client_certificates=False))
    process.revoked = members.check
    process.gauges = lambda: _gauges(region, links, schedule, traces, clock.now())

    await api.start()
    await enrol_server.start()
    models_port = await serve_models(model_server, config.models) if mqtt_links else 0
    reached = {"mqtt": mqtt, "models": str(Address(config.advertise, models_port))} if mqtt_links else {}
    process.say(identity, **reached, ca_sha256=authority.fingerprint, operator_dir=str(operator_dir.resolve()))
    tasks = [
        asyncio.create_task(keep_running(region.run)),
        asyncio.create_task(keep_running(region.events.run)),
        asyncio.create_task(back_up(store, config.backup_every_s)),
        asyncio.create_task(keep_running(members.run)),
        asyncio.create_task(keep_running(region.signals.run)),
        asyncio.create_task(keep_running(trading.run)),
        asyncio.create_task(refresh(own, operators_own, brokers_own)),
        asyncio.create_task(keep_running(traces.run)),
    ]
    if schedule is not None:
        tasks.append(asyncio.create_task(keep_running(schedule.run)))
    if broker is not None:
        tasks.append(asyncio.create_task(broker.run()))
    if mqtt_links is not None:
        tasks.append(asyncio.create_task(mqtt_links.run()))
    others = [each for each in process.links.split(",") if each != process.link_address]
    siblings = Siblings(config.region, others, lambda: authority.roots, lambda: identity.enrolled, clock)
    replaced = siblings.replaced(region.truth.term)
    await first_of(stopping.wait(), region.deposed.wait(), election.lost(), store.outdated.wait(), replaced)
    log.info("stopping" if stopping.is_set() else "leads no more")
    region.stop()
    # Who was replaced lets go of everybody at once: they are expected elsewhere.
    grace_s = STOP_S if stopping.is_set() else None
    await asyncio.gather(api.stop(grace_s), enrol_server.stop(grace_s), trading.stop(grace_s), siblings.close())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await model_server.stop()
    with suppress(ShoalError):
        await store.backup()


async def _follow(
    config: Config,
    process: Process,
    store: OpenStore,
    election: Election,
    elected: asyncio.Future[None],
    stopping: asyncio.Event,
) -> None:
    """Answers what the store alone can tell, until elected, and says of all else where the leader is."""
    clock, meter = process.clock, process.meter
    if await store.read(REGION_KEY) is None:
        raise refuse(Code.STORE_UNAVAILABLE, "a region that nobody has led yet", "its first leader", "")
    authority = FileAuthority.open(config.shared_dir / "ca", config.region, wall=clock.wall(), may_create=False)
    identity = ServerIdentity(authority, config.data_dir / "server", _hosts(config), clock)
    links = GrpcLinks(meter)
    region = Region(
        store,
        links,
        DirectoryBlobs(config.data_dir / "following", MODEL_BYTES),
        ChildInspector(),
        clock,
        process.ids,
        RegionConfig(config.region, seed=config.seed),
        meter=meter,
    )
    following = Following(region, store, election, clock)
    await following.read()
    first_operator(authority, config.data_dir / "operator", clock.wall())
    enrolment = Enrolment(config.region, store, authority, region.events, clock, process.ids, meter)
    members = Members(
        region, store, authority, clock, ended=lambda serials: guard.end(serials), turned=identity.refresh
    )
    await members.start()
    audit = AuditTrail(region.events, meter)
    guard = Authorisation(config.region, clock, meter, audit, members.check, elsewhere=following.elsewhere)
    api = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
    link_pb2_grpc.add_AgentLinkServicer_to_server(links, api)
    artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
    operators = OperatorService(region, enrolment, members, store, clock, audit, process, process, following=following)
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    listen(api, process.link, identity.credentials(client_certificates=True))
    enrol_server = grpc.aio.server(options=enrol_options())
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(ElsewhereEnrolment(following.elsewhere), enrol_server)
    listen(enrol_server, process.enrol, identity.credentials(client_certificates=False))
    process.revoked, process.gauges = members.check, dict
    await api.start()
    await enrol_server.start()
    log.info("follows", leader=following.leader)
    process.say(identity, ca_sha256=authority.fingerprint, operator_dir=str((config.data_dir / "operator").resolve()))
    watching = asyncio.create_task(following.run(members.start))
    try:
        await first_of(elected, stopping.wait(), watching, store.outdated.wait())
    finally:
        watching.cancel()
        await asyncio.gather(api.stop(None), enrol_server.stop(None), watching, return_exceptions=True)


def _hosts(config: Config) -> tuple[str, ...]:
    return tuple(dict.fromkeys((config.advertise, *dialled(config.link, config.enrol, config.models, config.peers))))


def _lifetimes(config: Config) -> Mapping[Role, Seconds]:
    return {**LIFETIME_S, **dict.fromkeys(NODES, Seconds(config.node_lifetime_s))}


def _identify(authority: FileAuthority, certificate: x509.Certificate) -> Identity:
    """Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID)."""
    authority.recognise(certificate)
    return identity_of_certificate(certificate)


def _gauges(
    region: Region,
    links: Sequence[GrpcLinks | MqttLinks],
    schedule: Schedule | None,
    traces: CollectorTraces,
    now: Elapsed,
) -> Gauges:
    nodes: dict[tuple[tuple[str, str], ...], float] = {}
    for state in region.fleet.fleet.nodes.values():
        label = (("liveness", str(state.liveness)),)
        nodes[label] = nodes.get(label, 0.0) + 1
    signals = region.signals.now()
    trades = region.trades.trades if region.trades is not None else {}
    deals = region.bids.states.values() if region.bids is not None else ()
    return {
        "sessions": {(): float(sum(link.connected for link in links))},
        "nodes": nodes,
        "workloads": {(): float(len(region.workloads.intents))},
        "waits": _numbered(("code", wait.code) for wait in region.workloads.waits),
        "placements": _numbered(
            ("tenant", each.workload.tenant, "workload", each.workload.name)
            for desired in region.workloads.desired.values()
            for each in desired.assignments
            if not each.draining
        ),
        "latency_bound_seconds": {
            (("tenant", each.key.tenant), ("workload", each.key.name)): float(each.require.latency_p95_s)
            for each in region.workloads.intents
            if each.require.latency_p95_s is not None
        },
        "agreements": _numbered(
            ("side", each.side, "counterpart", each.counterpart, "state", each.state)
            for each in agreements(trades, deals, now)
        ),
        "migrations": _numbered(("stage", each.stage) for each in region.workloads.migrations.live),
        **backup_gauges(schedule),
        "spans": traces.counts(),
        "store_writable": {(): float(region.unwritable is None)},
        "signal": {(("signal", name),): signal.value for name, signal in signals.items()},
        "signal_stale": {(("signal", name),): float(signal.stale) for name, signal in signals.items()},
    }


def _numbered(said: Iterable[tuple[str, ...]]) -> Mapping[tuple[tuple[str, str], ...], float]:
    """How many there are of each; (label, value, label, value, ..)."""
    return {
        tuple((each[index], str(each[index + 1])) for index in range(0, len(each), 2)): float(number)
        for each, number in Counter(said).items()
    }

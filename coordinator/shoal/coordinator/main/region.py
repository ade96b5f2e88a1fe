"""A region: wires its controllers and adapters into one process."""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from shoal.coordinator import metrics
from shoal.coordinator.api.artifacts import ArtifactsService
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.backup import BackupModels
from shoal.coordinator.api.compute_pool import ComputePool
from shoal.coordinator.api.dashboard.dashboard import Dashboard
from shoal.coordinator.api.enrol import EnrolmentService, FollowerEnrolmentService
from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.api.views import agreements
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.coordinator.broker import config as mosquitto
from shoal.coordinator.broker.control import BrokerControl
from shoal.coordinator.broker.renewal import BrokerFolder
from shoal.coordinator.clock import CoordinatorClock
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.identity.renewal import CertificateRenewal
from shoal.coordinator.controllers.log.fencing import KEY as REGION_KEY
from shoal.coordinator.controllers.region.follower import Follower
from shoal.coordinator.controllers.region.region import RegionalCoordinator, RegionConfig
from shoal.coordinator.controllers.region.trust import TrustController
from shoal.coordinator.core.migration.queue import QUEUED
from shoal.coordinator.core.signals.model import SignalName
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.proofs import SignedProofs
from shoal.coordinator.identity.server import ServerIdentity
from shoal.coordinator.link.composite import CompositeLinks
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.link.mqtt import MqttLinks
from shoal.coordinator.main.backups import BackupSchedule, backup_readings, backups_of, schedule_of
from shoal.coordinator.main.federation_peering import FederationPeering
from shoal.coordinator.main.operators import FirstOperator
from shoal.coordinator.main.options import CoordinatorConfig
from shoal.coordinator.main.process import CoordinatorProcess, cancel_all, serve, stop_signals, wait_for_any
from shoal.coordinator.main.serving import (
    STOP_S,
    back_up,
    check_restore_complete,
    dialable_hosts,
    keep_running,
    listen,
    refresh_certificates,
    serve_models,
    server_for_members,
    server_for_strangers,
)
from shoal.coordinator.main.watchdog import StepLimit
from shoal.coordinator.peers.siblings import Siblings
from shoal.coordinator.ports import Election, OpenStore, StaleRevision
from shoal.coordinator.signals.sources import open_sources
from shoal.coordinator.telemetry.traces import CollectorSpanExporter
from shoal.types.address import HostPort
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import NODES, Identity, check_name
from shoal.types.metric import LabelValues, MetricReadings
from shoal.types.units import Bytes, Seconds
from shoal.v1 import artifacts_pb2_grpc, enrolment_pb2_grpc, link_pb2_grpc, operator_pb2_grpc
from shoal.wire.certificates import identity_of_certificate
from shoal.wire.limits import MODEL_BYTES
from shoal.wire.member_files import Enrolled

FIRST_ELECTION_S: Final = 0.3
"""Seconds to win a free election before this coordinator serves as a follower."""

SIGNALS: Final = {SignalName.PRICE: metrics.PRICE, SignalName.CARBON: metrics.CARBON}
"""The metric of each signal's value. Each has a unit of its own."""

log: Final = structlog.get_logger("shoal.coordinator")


def _broker_identity(authority: FileAuthority, clock: CoordinatorClock) -> Callable[[tuple[str, ...]], Enrolled]:
    return lambda hosts: authority.enrol_self(
        Role.BROKER, mosquitto.NAME, hosts=hosts, lifetime_s=mosquitto.LIFETIME_S, wall=clock.wall()
    )


def write_broker(options: argparse.Namespace) -> Path:
    """Writes the broker's folder and returns the program in it that starts the broker. Raises ShoalError."""
    region, data, out = check_name(options.region, "region"), Path(options.data_dir), Path(options.out)
    listens = HostPort.parse(options.listen, "--listen")
    user = options.user or mosquitto.current_user()
    plugin = options.plugin or mosquitto.find_plugin()
    broker = mosquitto.BrokerConfig(region, listens.host, listens.port, user, plugin)
    clock = CoordinatorClock()
    # A region that was never started may make its CA here, so that its broker can run first.
    authority = FileAuthority.open(data / "ca", region, wall=clock.wall(), may_create=not (data / "store").exists())
    hosts = tuple(dict.fromkeys((*options.host, *dialable_hosts(listens))))
    identity = _broker_identity(authority, clock)(hosts)
    try:
        mosquitto.write(out, broker, identity)
    except OSError as cause:
        raise refuse(
            Code.FIELD_INVALID, f"{out}: {cause.strerror}", "a folder that can be written", "choose another --out"
        ) from cause
    return out.resolve() / "start"


async def run(config: CoordinatorConfig) -> None:
    """Runs until SIGTERM or SIGINT; leads while elected, else follows."""
    await serve(config, "region", serve_store, stop_signals())


async def serve_store(
    config: CoordinatorConfig, process: CoordinatorProcess, store: OpenStore, stopping: asyncio.Event
) -> None:
    """Serves for at most one term: follows until elected, then leads until another coordinator does."""
    election = store.election(json.dumps({"link": process.link_address, "enrol": process.enrol_address}).encode())
    elected = asyncio.ensure_future(election.campaign())
    try:
        await wait_for_any(elected, stopping.wait(), asyncio.sleep(FIRST_ELECTION_S))
        while not (elected.done() or stopping.is_set() or store.stale.is_set()):
            try:
                await _follow(config, process, store, election, elected, stopping)
            except ShoalError as error:
                log.debug("follower_start_failed", code=error.code, error=str(error))
                await wait_for_any(elected, stopping.wait(), asyncio.sleep(FIRST_ELECTION_S))
        if elected.done() and not stopping.is_set():
            elected.result()  # raises the election's failure
            await _lead(config, process, store, election, stopping)
    except StaleRevision:
        log.warning("election_lost")
    except ShoalError as error:
        if not election.is_shared:
            raise
        log.error("leadership_failed", code=error.code, error=str(error))
        await asyncio.sleep(FIRST_ELECTION_S)
    finally:
        elected.cancel()
        await election.resign()


async def _lead(
    config: CoordinatorConfig,
    process: CoordinatorProcess,
    store: OpenStore,
    election: Election,
    stopping: asyncio.Event,
) -> None:
    """Raises StaleRevision if another coordinator was elected before this one could begin its term."""
    clock, ids, meter = process.clock, process.ids, process.meter
    await check_restore_complete(store)
    if store.recovery is not None:
        log.error("restored_store_detected", code=store.recovery.code, error=str(store.recovery))
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
            check_serial=lambda serial: members.check(serial),
            models_address=lambda: str(HostPort(config.advertise, models_port)),
            clock=clock,
            ids=ids,
            meter=meter,
        )
    links = (grpc_links, mqtt_links) if mqtt_links else (grpc_links,)
    blobs = DirectoryBlobs(config.shared_dir / "models", Bytes(MODEL_BYTES))
    traces = CollectorSpanExporter(config.otlp)
    pool, steps = ComputePool(), ComputePool(threads=1)
    region = RegionalCoordinator(
        store,
        CompositeLinks(*links),
        blobs,
        ChildInspector(),
        clock,
        ids,
        RegionConfig(config.region, seed=config.seed),
        meter=meter,
        restore_reason=store.recovery,
        signals=open_sources(config.signals_dir, config.signal_hosts, clock),
        compute=partial(pool.run, "the queue of moves"),
        decide=StepLimit(partial(steps.run, "the region's step", limited=False)),
        thread_time=time.thread_time,
        proofs=SignedProofs(config.region, authority, identity.current),
        exporter=traces,
    )
    await region.start(elected=election.is_shared)
    log.info("leadership_acquired", term=region.fence.term)
    for each in links:
        each.bind(region.fleet)
    lifetimes = _lifetimes(config)
    mqtt = str(config.mqtt) if config.mqtt else ""
    folder_of_broker = None
    if config.broker_dir is not None:
        folder_of_broker = BrokerFolder(config.broker_dir, _broker_identity(authority, clock))
        folder_of_broker.refresh(authority.ca_pem, clock.wall())
    keep = folder_of_broker.save_rights if folder_of_broker is not None else None
    broker = BrokerControl(config.region, mqtt, identity, clock, ids, meter, on_sync=keep) if mqtt else None
    enrolment = Enrolment(region.context, authority, broker=broker, lifetimes=lifetimes)
    operator_dir = config.data_dir / "operator"
    operator = FirstOperator(authority, operator_dir, store, clock)
    await operator.ensure()

    def refresh_own() -> None:
        identity.refresh()
        if mqtt_links is not None:
            mqtt_links.refresh()
            model_server.refresh()

    def refresh_broker() -> None:
        if folder_of_broker is not None:
            folder_of_broker.refresh(authority.ca_pem, clock.wall())

    def on_rotation() -> None:
        refresh_own()
        refresh_broker()

    members = TrustController(
        region,
        store,
        authority,
        clock,
        broker=broker,
        on_serials_revoked=lambda serials: guard.end_calls(serials),
        on_rotation=on_rotation,
        is_listed=lambda: trading.is_listed(),
        lifetimes=lifetimes,
    )
    await members.start()
    if broker is not None:
        for node in await enrolment.nodes():
            await broker.admit(node)
    renewal = CertificateRenewal(region.context, authority, members.forbids, lifetimes=lifetimes)
    audit = AuditTrail(region.events, meter)
    guard = Authorisation(config.region, clock, meter, audit, members.check)
    model_server = ModelServer(region, identity, guard.check_caller, audit, meter)
    api = server_for_members(guard)
    link_pb2_grpc.add_AgentLinkServicer_to_server(grpc_links, api)
    artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
    trading = FederationPeering(
        region,
        blobs,
        config.peers,
        config.advertise,
        authority=authority,
        identity=identity,
        audit=audit,
        compute=partial(pool.run, "bids"),
    )
    await trading.start()
    named = BackupModels(blobs, lambda: (*region.workloads.catalog.models, *region.workloads.catalog.packs))
    backups = backups_of(config, "region", store, clock, named)
    schedule = schedule_of(config, backups, clock, meter)
    dashboard = Dashboard(
        region,
        guard,
        audit,
        ids,
        identity,
        advertise=config.advertise,
        hosts=(*_hosts(config), *config.dashboard_hosts),
        federation=trading,
    )
    operators = OperatorService(
        region, enrolment, members, audit, process, federation=trading, backups=backups, dashboard=dashboard
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    listen(api, process.link, identity.credentials(client_certificates=True), "--link")
    enrol_server = server_for_strangers()
    service = EnrolmentService(
        config.region, enrolment, renewal, lambda: process.link_addresses, lambda: process.enrol_addresses, mqtt
    )
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrol_server)
    listen(enrol_server, process.enrol, identity.credentials(client_certificates=False), "--enrol")
    process.check_serial = members.check
    process.readings = lambda: _readings(region, links, schedule, traces)

    await api.start()
    await enrol_server.start()
    models_port = await serve_models(model_server, config.models) if mqtt_links else 0
    reached = {"mqtt": mqtt, "models": str(HostPort(config.advertise, models_port))} if mqtt_links else {}
    if config.dashboard is not None:
        await dashboard.start(config.dashboard, operators)
        reached["dashboard"] = dashboard.address
    process.announce(identity, **reached, ca_sha256=authority.fingerprint, operator_dir=str(operator_dir.resolve()))
    tasks = [
        asyncio.create_task(keep_running(region.run)),
        asyncio.create_task(keep_running(region.events.run)),
        asyncio.create_task(back_up(store, config.backup_every_s)),
        asyncio.create_task(keep_running(region.models.profiles.run)),
        asyncio.create_task(keep_running(region.models.unrecorded.run)),
        asyncio.create_task(keep_running(members.run)),
        asyncio.create_task(keep_running(operator.run)),
        asyncio.create_task(keep_running(region.signals.run)),
        asyncio.create_task(keep_running(trading.run)),
        asyncio.create_task(refresh_certificates(refresh_own, refresh_broker)),
        asyncio.create_task(keep_running(traces.run)),
        asyncio.create_task(keep_running(dashboard.run)),
        asyncio.create_task(keep_running(region.timeline.run)),
    ]
    if schedule is not None:
        tasks.append(asyncio.create_task(keep_running(schedule.run)))
    if broker is not None:
        tasks.append(asyncio.create_task(broker.run()))
    if mqtt_links is not None:
        tasks.append(asyncio.create_task(mqtt_links.run()))
    others = [each for each in process.link_addresses.split(",") if each != process.link_address]
    siblings = Siblings(config.region, others, lambda: authority.roots, lambda: identity.current, clock)
    replaced = siblings.wait_for_later_term(region.fence.term)
    await wait_for_any(
        stopping.wait(), region.leadership_loss.wait(), election.wait_lost(), store.stale.wait(), replaced
    )
    if stopping.is_set():
        log.info("process_stopping")
    else:
        log.info("leadership_lost")
    region.stop()
    # A replaced leader drops everybody at once, because they are expected elsewhere.
    grace_s = STOP_S if stopping.is_set() else None
    await asyncio.gather(api.stop(grace_s), enrol_server.stop(grace_s), trading.stop(grace_s), siblings.close())
    await cancel_all(tasks)
    await dashboard.stop()
    await model_server.stop()
    with suppress(ShoalError):
        await store.backup()


async def _follow(
    config: CoordinatorConfig,
    process: CoordinatorProcess,
    store: OpenStore,
    election: Election,
    elected: asyncio.Future[None],
    stopping: asyncio.Event,
) -> None:
    """Until elected, answers what the store alone can tell, and redirects every other call to the leader."""
    clock, meter = process.clock, process.meter
    if await store.read(REGION_KEY) is None:
        raise refuse(Code.STORE_UNAVAILABLE, "a region that nobody has led yet", "its first leader", "")
    authority = FileAuthority.open(config.shared_dir / "ca", config.region, wall=clock.wall(), may_create=False)
    identity = ServerIdentity(authority, config.data_dir / "server", _hosts(config), clock)
    links = GrpcLinks(meter)
    region = RegionalCoordinator(
        store,
        links,
        DirectoryBlobs(config.data_dir / "following", Bytes(MODEL_BYTES)),
        ChildInspector(),
        clock,
        process.ids,
        RegionConfig(config.region, seed=config.seed),
        meter=meter,
    )
    following = Follower(region, store, election, clock)
    await following.read()
    operator = FirstOperator(authority, config.data_dir / "operator", store, clock)
    await operator.ensure()
    enrolment = Enrolment(region.context, authority)
    members = TrustController(
        region,
        store,
        authority,
        clock,
        on_serials_revoked=lambda serials: guard.end_calls(serials),
        on_rotation=identity.refresh,
    )
    await members.start()
    audit = AuditTrail(region.events, meter)
    guard = Authorisation(config.region, clock, meter, audit, members.check, redirect=following.redirect)
    api = server_for_members(guard)
    link_pb2_grpc.add_AgentLinkServicer_to_server(links, api)
    artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
    operators = OperatorService(region, enrolment, members, audit, process, follower=following)
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    listen(api, process.link, identity.credentials(client_certificates=True), "--link")
    enrol_server = server_for_strangers()
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(FollowerEnrolmentService(following.redirect), enrol_server)
    listen(enrol_server, process.enrol, identity.credentials(client_certificates=False), "--enrol")
    process.check_serial, process.readings = members.check, dict
    await api.start()
    await enrol_server.start()
    log.info("follower_started", leader=following.leader)
    process.announce(
        identity, ca_sha256=authority.fingerprint, operator_dir=str((config.data_dir / "operator").resolve())
    )
    watching = asyncio.create_task(following.run(members.start))
    keeping = asyncio.create_task(keep_running(operator.run))
    try:
        await wait_for_any(elected, stopping.wait(), watching, store.stale.wait())
    finally:
        watching.cancel()
        keeping.cancel()
        await asyncio.gather(api.stop(None), enrol_server.stop(None), watching, keeping, return_exceptions=True)


def _hosts(config: CoordinatorConfig) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys((config.advertise, *dialable_hosts(config.link, config.enrol, config.models, config.peers)))
    )


def _lifetimes(config: CoordinatorConfig) -> Mapping[Role, Seconds]:
    return {**LIFETIME_S, **dict.fromkeys(NODES, Seconds(config.node_lifetime_s))}


def _identify(authority: FileAuthority, certificate: x509.Certificate) -> Identity:
    """The identity in a certificate of this region. Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID)."""
    authority.find_issuer(certificate)
    return identity_of_certificate(certificate)


def _readings(
    region: RegionalCoordinator,
    links: Sequence[GrpcLinks | MqttLinks],
    schedule: BackupSchedule | None,
    traces: CollectorSpanExporter,
) -> MetricReadings:
    """In the thread of who scrapes."""
    signals, fleet, workloads = region.signals.current(), region.fleet.fleet_seen_elsewhere(), region.workloads
    trades = region.origin.trades if region.origin is not None else {}
    bids = region.delegate.states.values() if region.delegate is not None else ()
    return {
        metrics.SESSIONS: {(): float(sum(link.session_count for link in links))},
        metrics.NODES: _number_of((str(state.liveness),) for state in fleet.nodes.values()),
        metrics.WORKLOADS: {(): float(len(workloads.intents))},
        metrics.WAITS: _number_of((wait.code,) for wait in workloads.waits),
        metrics.PLACEMENTS: _number_of(
            (each.workload.tenant, each.workload.name, _true_or_false(bool(fleet.stand_in(node, each.device))))
            for node, desired in workloads.desired.items()
            for each in desired.assignments
            if not each.draining
        ),
        metrics.LATENCY_BOUND: {
            (each.key.tenant, each.key.name): float(each.require.latency_p95_s)
            for each in workloads.intents
            if each.require.latency_p95_s is not None
        },
        metrics.AGREEMENTS: _number_of(
            (each.side, each.counterpart, each.state, _true_or_false(bool(each.offer.stand_in)))
            for each in agreements(trades, bids, region.clock.now())
        ),
        metrics.MIGRATIONS: _number_of(
            (
                *(
                    (each.stage, _true_or_false(any(place.stand_in for place in (each.source, each.target) if place)))
                    for each in workloads.migrations.live
                ),
                *((QUEUED, _true_or_false(bool(each.source.stand_in))) for each in workloads.queue.waiting),
            )
        ),
        **backup_readings(schedule),
        metrics.SPANS: traces.counts(),
        metrics.STORE_WRITABLE: {(): float(region.write_refusal is None)},
        **{SIGNALS[name]: {(): signal.value} for name, signal in signals.items()},
        metrics.SIGNAL_STALE: {(name,): float(signal.stale) for name, signal in signals.items()},
    }


def _true_or_false(value: bool) -> str:
    return str(value).lower()


def _number_of(series: Iterable[LabelValues]) -> Mapping[LabelValues, float]:
    """How many there are of each."""
    return {each: float(number) for each, number in Counter(series).items()}

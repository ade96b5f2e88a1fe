"""A federation: its controller and adapters in one process. Any number of replicas share one store."""

import asyncio
from contextlib import suppress
from typing import Final

import structlog

from shoal.coordinator import metrics
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.enrol import EnrolmentService
from shoal.coordinator.api.federation import FederationService, JoiningService
from shoal.coordinator.api.federation_operator import FederationOperatorService
from shoal.coordinator.controllers.federation.rotation import FederationRotation
from shoal.coordinator.controllers.federation.service import FederationController
from shoal.coordinator.controllers.identity.enrolment import LIFETIME_S, REGION, Enrolment
from shoal.coordinator.controllers.identity.renewal import CertificateRenewal
from shoal.coordinator.controllers.identity.revocation import RevocationKind, Revocations, RevokedItem
from shoal.coordinator.controllers.log.context import ControllerContext
from shoal.coordinator.controllers.log.events import EventLog
from shoal.coordinator.controllers.region.region import RegionConfig
from shoal.coordinator.elections import while_elected
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import NAME, ServerIdentity
from shoal.coordinator.main.backups import BackupSchedule, backup_readings, backups_of, schedule_of
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
    server_for_members,
    server_for_strangers,
)
from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.peers.federation import FEDERATION, GrpcCandidates
from shoal.coordinator.ports import Clock, Election, OpenStore, Transaction
from shoal.coordinator.telemetry.traces import CollectorSpanExporter
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import Identity
from shoal.types.metric import MetricReadings
from shoal.v1 import enrolment_pb2_grpc, federation_pb2_grpc, operator_pb2_grpc
from shoal.wire.identity import dns_of
from shoal.wire.trust import bundle_of_authorities

NAME_KEY: Final = "name"
"""Key of the record that names the store's owner."""
OPERATOR_LIFETIMES: Final = {role: LIFETIME_S[role] for role in (Role.OPERATOR, Role.VIEWER)}

log: Final = structlog.get_logger("shoal.coordinator")


async def run(config: CoordinatorConfig) -> None:
    """Runs until SIGTERM or SIGINT."""
    await serve(config, "federation", serve_store, stop_signals())


async def serve_store(
    config: CoordinatorConfig, process: CoordinatorProcess, store: OpenStore, stopping: asyncio.Event
) -> None:
    """Serves until it is stopped, or the store must be read again."""
    name, clock, ids, meter = config.region, process.clock, process.ids, process.meter
    await check_restore_complete(store)
    if store.recovery is not None:
        log.error("restored_store_detected", code=store.recovery.code, error=str(store.recovery))
    election = store.election(b"")
    authority = await _open_authority(config, store, election, clock)
    # Operators' tools expect a coordinator's name, whatever its role.
    hosts = (config.advertise, *dialable_hosts(config.link, config.enrol), dns_of(name, Role.COORDINATOR, NAME))
    identity = ServerIdentity(
        authority,
        config.data_dir / "server",
        tuple(dict.fromkeys(hosts)),
        clock,
        role=Role.FEDERATION,
        name=FEDERATION,
    )
    defaults = RegionConfig(name)
    events = EventLog(
        store, clock, kept=defaults.events_kept, audit_kept=defaults.audit_kept, shared=election.is_shared
    )
    await events.start()
    channels, traces = Channels(lambda: identity.current), CollectorSpanExporter(config.otlp)
    controller = FederationController(
        name,
        store,
        events,
        clock,
        meter,
        GrpcCandidates(channels, lambda region: controller.roots_of(region), clock),
        exporter=traces,
    )
    await controller.start()
    context = ControllerContext(name, store, events, clock, ids, meter)
    enrolment = Enrolment(context, authority, lifetimes=OPERATOR_LIFETIMES, words=(REGION,))

    def forbids(identity: Identity) -> Refusal | None:
        return revocations.check(identity.serial)

    async def on_ended(ended: tuple[RevokedItem, ...], reason: str, actor: str) -> None:
        for each in ended:
            if each.kind is RevocationKind.REGION:
                await controller.expel(each.name, actor)

    revocations = Revocations(
        name, store, events, clock, on_serials_revoked=lambda serials: guard.end_calls(serials), on_revocation=on_ended
    )
    renewal = CertificateRenewal(context, authority, forbids, lifetimes=OPERATOR_LIFETIMES)
    operator_dir = config.data_dir / "operator"
    operator = FirstOperator(authority, operator_dir, store, clock)
    await operator.ensure()

    def roots_of(region: str) -> tuple[str, ...]:
        return authority.roots if region == name else controller.roots_of(region)

    def link_addresses() -> str:
        return process.link_addresses

    def enrol_addresses() -> str:
        return process.enrol_addresses

    audit = AuditTrail(events, meter)
    guard = Authorisation(name, clock, meter, audit, revocations.check, roots_of=roots_of)
    await revocations.start()
    rotation = FederationRotation(
        context,
        authority,
        election,
        advertisements=controller.advertisements,
        roles=OPERATOR_LIFETIMES,
        on_stage=identity.refresh,
    )
    api = server_for_members(guard)
    federation_pb2_grpc.add_FederationServicer_to_server(FederationService(name, controller, clock, authority), api)
    backups = backups_of(config, "federation", store, clock)
    schedule = schedule_of(config, backups, clock, meter)
    # A federation refuses methods that it does not have.
    operators = FederationOperatorService(  # type: ignore[abstract]
        name, controller, enrolment, revocations, rotation, events, audit, backups, process
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    others = identity.credentials(client_certificates=True, others=lambda: bundle_of_authorities(controller.roots))
    listen(api, process.link, others, "--link")
    strangers = server_for_strangers()
    joining = JoiningService(name, controller, enrolment, clock, link_addresses, authority)
    federation_pb2_grpc.add_JoiningServicer_to_server(joining, strangers)
    people = EnrolmentService(name, enrolment, renewal, link_addresses, enrol_addresses)
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(people, strangers)
    listen(strangers, process.enrol, identity.credentials(client_certificates=False), "--enrol")
    process.readings = lambda: _readings(controller, events, schedule, traces)

    await api.start()
    await strangers.start()
    process.announce(identity, ca_sha256=authority.fingerprint, operator_dir=str(operator_dir.resolve()))
    tasks = [
        asyncio.create_task(keep_running(controller.run)),
        asyncio.create_task(keep_running(events.run)),
        asyncio.create_task(back_up(store, config.backup_every_s)),
        asyncio.create_task(refresh_certificates(identity.refresh)),
        asyncio.create_task(keep_running(traces.run)),
        asyncio.create_task(keep_running(operator.run)),
        asyncio.create_task(keep_running(revocations.run)),
        asyncio.create_task(keep_running(rotation.run)),
    ]
    if schedule is not None:
        tasks.append(asyncio.create_task(keep_running(schedule.run)))
    try:
        await wait_for_any(stopping.wait(), store.stale.wait())
    finally:
        if stopping.is_set():
            log.info("process_stopping")
        else:
            log.info("store_stale")
        grace_s = STOP_S if stopping.is_set() else None
        await asyncio.gather(api.stop(grace_s), strangers.stop(grace_s))
        await cancel_all(tasks)
        await channels.close()
    with suppress(ShoalError):
        await store.backup()


async def _open_authority(
    config: CoordinatorConfig, store: OpenStore, election: Election, clock: Clock
) -> FileAuthority:
    """If several replicas start for the first time, exactly one makes the CA. Raises ShoalError(REGION_MISMATCH |
    ..)."""
    if await store.read(NAME_KEY) is not None:
        return await _load_authority(config, store, clock)
    try:
        await election.campaign()
        async with while_elected(election):
            return await _load_authority(config, store, clock)
    finally:
        await election.resign()


async def _load_authority(config: CoordinatorConfig, store: OpenStore, clock: Clock) -> FileAuthority:
    """Makes the CA where the store names no owner. Raises ShoalError(REGION_MISMATCH | STATE_CORRUPT | STORE_*)."""
    name, known = config.region, await store.read(NAME_KEY)
    if known is not None and known.value != name.encode():
        found = f"the store of federation {known.value.decode()}"
        raise refuse(Code.REGION_MISMATCH, found, f"one of {name}", "start it with its own --region")
    folder, wall = config.shared_dir / "ca", clock.wall()
    # In a thread, because the election must be kept while a slow disk writes.
    authority = await asyncio.to_thread(FileAuthority.open, folder, name, wall=wall, may_create=known is None)
    if known is None:
        await store.commit(Transaction({NAME_KEY: name.encode()}))
    return authority


def _readings(
    controller: FederationController, events: EventLog, schedule: BackupSchedule | None, traces: CollectorSpanExporter
) -> MetricReadings:
    members = controller.directory().members
    heard = sum(1 for member in members if member.advertisement is not None)
    return {
        metrics.REGIONS: {
            metrics.REGIONS.series(state="advertising"): float(heard),
            metrics.REGIONS.series(state="silent"): float(len(members) - heard),
        },
        **backup_readings(schedule),
        metrics.SPANS: traces.counts(),
        metrics.STORE_WRITABLE: {(): float(events.refusal is None)},
    }

"""A federation: its controller and its adapters in one process. Any number of these on one store."""

import asyncio
from contextlib import suppress
from typing import Final

import grpc.aio
import structlog

from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.enrol import EnrolmentService
from shoal.coordinator.api.federated import FederationOperatorService
from shoal.coordinator.api.federation import FederationService, JoiningService
from shoal.coordinator.controllers.enrolment import LIFETIME_S, REGION, Enrolment
from shoal.coordinator.controllers.events import EventLog
from shoal.coordinator.controllers.federation import FederationController
from shoal.coordinator.controllers.region import RegionConfig
from shoal.coordinator.controllers.renewal import Renewal
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import NAME, ServerIdentity, first_operator
from shoal.coordinator.main.backups import Schedule, backup_gauges, backups_of, schedule_of
from shoal.coordinator.main.options import Config
from shoal.coordinator.main.process import Process, first_of, serve, stop_signals
from shoal.coordinator.main.serving import STOP_S, back_up, check_whole, dialled, keep_running, listen, refresh
from shoal.coordinator.peers.channels import Channels
from shoal.coordinator.peers.federation import FEDERATION, GrpcCandidates
from shoal.coordinator.ports import Clock, Election, OpenStore, Transaction
from shoal.coordinator.telemetry.metrics import Gauges
from shoal.coordinator.telemetry.traces import CollectorTraces
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.v1 import enrolment_pb2_grpc, federation_pb2_grpc, operator_pb2_grpc
from shoal.wire.identity import dns_of
from shoal.wire.limits import LINK_BYTES, enrol_options, server_options

NAMED: Final = "name"
"""Where the store says whose it is."""
PEOPLE: Final = {role: LIFETIME_S[role] for role in (Role.OPERATOR, Role.VIEWER)}

log: Final = structlog.get_logger("shoal.coordinator")


async def run(config: Config) -> None:
    """Until SIGTERM or SIGINT."""
    await serve(config, "federation", stand, stop_signals())


async def stand(config: Config, process: Process, store: OpenStore, stopping: asyncio.Event) -> None:
    """Until it is told to stop, or the store must be read again."""
    name, clock, ids, meter = config.region, process.clock, process.ids, process.meter
    await check_whole(store)
    if store.recovery is not None:
        log.critical("store restored from a copy", refusal=str(store.recovery))
    election = store.election(b"")
    authority = await _authority(config, store, election, clock)
    # Operators' tools ask for a coordinator, whatever it coordinates.
    hosts = (config.advertise, *dialled(config.link, config.enrol), dns_of(name, Role.COORDINATOR, NAME))
    identity = ServerIdentity(
        authority,
        config.data_dir / "server",
        tuple(dict.fromkeys(hosts)),
        clock,
        role=Role.FEDERATION,
        name=FEDERATION,
    )
    defaults = RegionConfig(name)
    events = EventLog(store, clock, kept=defaults.events_kept, audit_kept=defaults.audit_kept, shared=election.shared)
    await events.start()
    channels, traces = Channels(lambda: identity.enrolled), CollectorTraces(config.otlp)
    controller = FederationController(
        name,
        store,
        events,
        clock,
        meter,
        GrpcCandidates(channels, lambda region: controller.roots_of(region), clock),
        traces=traces,
    )
    await controller.start()
    enrolment = Enrolment(name, store, authority, events, clock, ids, meter, lifetimes=PEOPLE, words=(REGION,))
    renewal = Renewal(name, store, authority, events, clock, ids, meter, lambda identity: None, lifetimes=PEOPLE)
    operator_dir = config.data_dir / "operator"
    first_operator(authority, operator_dir, clock.wall())

    def roots_of(region: str) -> tuple[str, ...]:
        return authority.roots if region == name else controller.roots_of(region)

    def links() -> str:
        return process.links

    def enrols() -> str:
        return process.enrols

    audit = AuditTrail(events, meter)
    guard = Authorisation(name, clock, meter, audit, roots_of=roots_of)
    api = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
    federation_pb2_grpc.add_FederationServicer_to_server(FederationService(name, controller, clock), api)
    backups = backups_of(config, "federation", store, clock)
    schedule = schedule_of(config, backups, clock, meter)
    operators = FederationOperatorService(  # type: ignore[abstract]  # what a federation has not, it says so
        name, controller, enrolment, events, audit, links, enrols, backups, process
    )
    operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
    others = identity.credentials(client_certificates=True, others=lambda: "".join(controller.roots))
    listen(api, process.link, others)
    strangers = grpc.aio.server(options=enrol_options())
    joining = JoiningService(name, controller, enrolment, clock, links, lambda: authority.roots)
    federation_pb2_grpc.add_JoiningServicer_to_server(joining, strangers)
    people = EnrolmentService(name, enrolment, renewal, links, enrols)
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(people, strangers)
    listen(strangers, process.enrol, identity.credentials(client_certificates=False))
    process.gauges = lambda: _gauges(controller, events, schedule, traces)

    def operators_own() -> None:
        first_operator(authority, operator_dir, clock.wall())

    await api.start()
    await strangers.start()
    process.say(identity, ca_sha256=authority.fingerprint, operator_dir=str(operator_dir.resolve()))
    tasks = [
        asyncio.create_task(keep_running(controller.run)),
        asyncio.create_task(keep_running(events.run)),
        asyncio.create_task(back_up(store, config.backup_every_s)),
        asyncio.create_task(refresh(identity.refresh, operators_own)),
        asyncio.create_task(keep_running(traces.run)),
    ]
    if schedule is not None:
        tasks.append(asyncio.create_task(keep_running(schedule.run)))
    try:
        await first_of(stopping.wait(), store.outdated.wait())
    finally:
        log.info("stopping" if stopping.is_set() else "reads its store again")
        grace_s = STOP_S if stopping.is_set() else None
        await asyncio.gather(api.stop(grace_s), strangers.stop(grace_s))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channels.close()
    with suppress(ShoalError):
        await store.backup()


async def _authority(config: Config, store: OpenStore, election: Election, clock: Clock) -> FileAuthority:
    """Of several replicas that start for the first time, one makes the CA. Raises ShoalError(REGION_MISMATCH | ..)."""
    name = config.region.encode()
    if (known := await store.read(NAMED)) is None:
        await election.win()
        known = await store.read(NAMED)
    if known is not None and known.value != name:
        found = f"the store of federation {known.value.decode()}"
        raise refuse(Code.REGION_MISMATCH, found, f"one of {config.region}", "start it with its own --region")
    folder = config.shared_dir / "ca"
    authority = FileAuthority.open(folder, config.region, wall=clock.wall(), may_create=known is None)
    if known is None:
        await store.commit(Transaction({NAMED: name}))
    await election.resign()
    return authority


def _gauges(
    controller: FederationController, events: EventLog, schedule: Schedule | None, traces: CollectorTraces
) -> Gauges:
    members = controller.directory().members
    heard = sum(1 for member in members if member.advertisement is not None)
    regions = {"advertising": heard, "silent": len(members) - heard}
    return {
        "regions": {(("state", state),): float(number) for state, number in regions.items()},
        **backup_gauges(schedule),
        "spans": traces.counts(),
        "store_writable": {(): float(events.refusal is None)},
    }

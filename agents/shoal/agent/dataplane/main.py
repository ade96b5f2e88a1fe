"""The front process: transports, data plane and control socket.

It outlives its supervisor: it serves the last configuration until nobody has been connected to the control socket for
`orphan_after_s`. `shoal.agent.main` starts it with a clock; nothing here reads one.
"""

import asyncio
import fcntl
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import structlog

from shoal.agent.core.sequences import SessionLimits
from shoal.agent.dataplane import control, metering, tracing
from shoal.agent.dataplane.caller_auth import CallerAuth
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.data_port import DataPort
from shoal.agent.dataplane.forward_auth import ForwardAuth
from shoal.agent.dataplane.front import DataPlane
from shoal.agent.dataplane.front_settings import FrontSettings
from shoal.agent.dataplane.grpc_methods import Method
from shoal.agent.dataplane.health import HealthPort
from shoal.agent.dataplane.memory import COPIES, KEPT_BYTES, MessageMemory, budget_bytes, session_budget_bytes
from shoal.agent.dataplane.session_handover import HandoverReceiver
from shoal.agent.dataplane.sessions import FrontSessions
from shoal.agent.dataplane.shared_memory import SharedMemory
from shoal.agent.dataplane.shared_regions import SharedRegions
from shoal.agent.dataplane.tracing import Tracer
from shoal.agent.dataplane.transport import TlsFiles
from shoal.agent.dataplane.trust import Authorities, load_library
from shoal.agent.dataplane.upstream import SESSIONS_SERVICE, WITNESS_SERVICE, PeerClients, WorkerClients
from shoal.agent.dataplane.verification_source import VerificationSourceService
from shoal.agent.dataplane.verify import ReplicaVerifier
from shoal.agent.frames import FrameMessage, FrameServer, Handler, start_time
from shoal.agent.ports import AgentClock
from shoal.host import file_descriptors, gc_freeze, metrics_page
from shoal.host import memory as machine
from shoal.host.compiled import is_compiled
from shoal.host.event_wait import wait_or_timeout
from shoal.host.otlp import Exporter
from shoal.host.private_files import disable_core_dumps, write_private
from shoal.types.assignment import PeerTrust
from shoal.types.link import SpansAsked
from shoal.types.metric import MetricReadings
from shoal.types.units import Bytes, Seconds, Wall
from shoal.wire import nouns
from shoal.wire.metrics_access import RegionMetricsAccess

EXIT_ALREADY_RUNNING: Final = 75
"""Another front holds this agent's run directory."""
EXIT_PORT: Final = 76
"""A port is in use by another process."""
YOUNG_OBJECTS: Final = 10_000
"""As of `gc_freeze.search_after`. With one request under way on each of 1,000 connections, cyclic garbage collection
took 24 us of CPU a request with Python's 700, and 9 with this (two runs each on a busy machine, with handshakes)."""

_log = structlog.get_logger(__name__)


def run(config_path: Path, nonce: str, clock: AgentClock, dates_at: Callable[[], Wall]) -> int:
    """Serve until stopped or orphaned; return the exit status.

    `config_path` is a FrontConfig as JSON. `dates_at` gives the time at which certificates and tokens must be valid.
    """
    config = FrontConfig.load(config_path.read_text())
    file_descriptors.raise_limit()
    disable_core_dumps()
    machine.keep_freed(KEPT_BYTES)
    with (Path(config.run_dir) / control.LOCK).open("w") as lock:
        if not _try_lock(lock):
            _log.warning("front_already_running", folder=config.run_dir)
            return EXIT_ALREADY_RUNNING
        gc_freeze.freeze()
        gc_freeze.search_after(YOUNG_OBJECTS)
        try:
            asyncio.run(_serve(config, nonce, clock, dates_at))
        except OSError as error:
            _log.error("front_listen_failed", error=str(error))
            return EXIT_PORT
    return 0


async def _serve(config: FrontConfig, nonce: str, clock: AgentClock, dates_at: Callable[[], Wall]) -> None:
    """Raises OSError."""
    tls = TlsFiles(Path(config.certificate), Path(config.key), Path(config.authority))
    authorities = Authorities(config.region, tls)
    private = Path(config.forward_key).read_bytes() if config.forward_key else b""
    forwards = ForwardAuth(config.region, config.node, private, dates_at)
    workers, peers = WorkerClients(), PeerClients(config.region, tls, authorities, forwards)
    limit = machine.limit_bytes()
    limit = min(limit, config.memory_bytes) if config.memory_bytes else limit
    memory = MessageMemory(budget_bytes(limit))
    waiting = min(config.limits.total_bytes, memory.budget // COPIES)
    limits = replace(config.limits, total_bytes=waiting)
    settings = FrontSettings(config.region, config.node, config.timeout_s, limits=limits)
    witnesses = VerificationSourceService(config.region, workers, dates_at, forwards)
    kept = SessionLimits().within(Bytes(session_budget_bytes(limit, memory.budget)))
    sessions = FrontSessions(config.region, config.node, clock, workers, peers, dates_at, kept, forwards)
    memory.session_bytes = lambda: sessions.held_bytes
    exporter = Exporter.from_endpoint(config.otlp)
    tracer = Tracer(config.region, config.node, clock, config.trace_ratio, exporter.offer)
    callers = CallerAuth(config.region, config.node, dates_at, forwards)
    shared_memory = SharedMemory(SharedRegions(config.shared_memory), memory)
    plane = DataPlane(
        *(settings, clock, workers, peers, callers, sessions, witnesses.captures, tracer, shared_memory),
        request_wake=lambda assignment: server.push(control.WAKE, header={"assignment": assignment}),
        on_ask=lambda: server.push(control.ASKED),
    )
    beside = {WITNESS_SERVICE: _verification_methods(witnesses), SESSIONS_SERVICE: _session_methods(sessions.receiver)}
    health = None
    if config.health_port is not None:
        health = HealthPort(plane.live, lambda: plane.is_ready, config.health_host, config.health_port)
    port = DataPort(plane, config.host, config.port, tls, authorities, beside, memory)
    stages = _Lifecycle()
    server = FrameServer(
        config.socket_path(),
        nonce,
        _handlers(
            plane, witnesses, ReplicaVerifier(peers, witnesses.captures, clock), authorities, sessions, stages, tracer
        ),
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stages.stopped.set)
    for number in (signal.SIGINT, signal.SIGHUP):  # from the terminal, or when it closes: the supervisor decides
        loop.add_signal_handler(number, lambda: None)

    def beside_requests() -> MetricReadings:
        return {**sessions.readings(), **port.admission.readings(), **tracing.readings(tracer, exporter)}

    _serve_metrics(config, plane, clock, beside_requests)
    exporting = asyncio.create_task(exporter.run())
    watching = asyncio.create_task(memory.watch())
    await server.start()
    _write_record(config, nonce)
    over = asyncio.create_task(_wait_until_over(stages.stopped, server, config.orphan_after_s))
    configured = asyncio.create_task(stages.configured.wait())
    try:
        await asyncio.wait((over, configured), return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            # Not earlier: a front without routes would answer MODEL_NOT_FOUND for every workload.
            await port.start()
            if health is not None:
                await health.start()
            stages.listening.set()
            _log.info("front_listening", port=config.port, compiled=is_compiled())
            await over
        plane.drain()
        await port.stop(Seconds(config.drain_s))  # until then the health port says that this front drains
    finally:
        over.cancel()
        configured.cancel()
        exporting.cancel()
        watching.cancel()
        await asyncio.gather(exporting, return_exceptions=True)
        await server.close()
        sessions.close()
        await workers.close()
        await peers.close()
        config.record_path().unlink(missing_ok=True)


class _Lifecycle:
    """Events in the life of a front."""

    def __init__(self) -> None:
        self.configured = asyncio.Event()
        self.listening = asyncio.Event()
        self.stopped = asyncio.Event()


def _verification_methods(witnesses: VerificationSourceService) -> dict[str, Method]:
    return {
        "Captured": Method(witnesses.admit, witnesses.read_captures),
        "Answer": Method(witnesses.admit, witnesses.answer),
    }


def _session_methods(receiver: HandoverReceiver) -> dict[str, Method]:
    return {
        "Offer": Method(receiver.admit, receiver.on_offer),
        "Commit": Method(receiver.admit, receiver.on_commit, small=True),
    }


def _handlers(
    plane: DataPlane,
    witnesses: VerificationSourceService,
    verifier: ReplicaVerifier,
    authorities: Authorities,
    sessions: FrontSessions,
    stages: _Lifecycle,
    tracer: Tracer,
) -> dict[str, Handler]:
    one_at_a_time = asyncio.Lock()  # in the order in which they came

    async def configure(message: FrameMessage) -> FrameMessage:
        said = control.unpack(message.payload)
        async with one_at_a_time:
            failure = await configure_authorities(said.peers)
            apply(said if failure is None else replace(said, peers=()))
        stages.configured.set()
        await stages.listening.wait()
        if failure is not None:
            raise failure  # the supervisor tries again
        return FrameMessage("configured")

    async def configure_authorities(peers: tuple[PeerTrust, ...]) -> Exception | None:
        """What kept other regions from being told: then none of them is believed, and all else still counts."""
        try:
            if peers:
                await asyncio.to_thread(load_library)  # requests go on meanwhile
            authorities.configure(peers)
        except Exception as error:
            _log.error("peers_refused", error=repr(error.__cause__ or error))
            authorities.configure(())
            return error
        return None

    def apply(said: control.ServingConfig) -> None:
        witnesses.configure(said.verification_sources, said.revoked_serials)
        plane.configure(
            said.routes,
            said.credentials,
            said.workers,
            said.revoked_serials,
            said.peers,
            said.stateful_replicas,
            said.forwarding,
            said.tenants,
            unloaded=said.unloaded,
            routes_on_demand=said.routes_on_demand,
        )

    async def stats(_: FrameMessage) -> FrameMessage:
        now = plane.stats()
        return FrameMessage(
            "stats", {}, control.pack_stats(replace(now, ready=now.ready and stages.listening.is_set()))
        )

    async def spans(message: FrameMessage) -> FrameMessage:
        return FrameMessage("spans", {}, nouns.encode(tracer.find_spans(nouns.decode(SpansAsked, message.payload))))

    async def lease(message: FrameMessage) -> FrameMessage:
        sessions.lease(*control.unpack_lease(message.payload))
        return FrameMessage("leased")

    async def verify(message: FrameMessage) -> FrameMessage:
        order = control.unpack_order(message.payload)
        verdict = await verifier.verify(order.worker, order.verification, order.pack)
        return FrameMessage("verdict", {}, nouns.encode(verdict))

    async def record(message: FrameMessage) -> FrameMessage:
        order = control.unpack_order(message.payload)
        return control.pack_recording(await verifier.record(order.worker, order.verification, order.pack))

    async def drain(_: FrameMessage) -> FrameMessage:
        plane.drain()
        return FrameMessage("draining")

    async def stop(_: FrameMessage) -> FrameMessage:
        stages.stopped.set()
        return FrameMessage("stopping")

    return {
        "configure": configure,
        "lease": lease,
        "verify": verify,
        "record": record,
        "stats": stats,
        "spans": spans,
        "drain": drain,
        "stop": stop,
    }


async def _wait_until_over(stopped: asyncio.Event, server: FrameServer, orphan_after_s: float) -> None:
    loop = asyncio.get_running_loop()
    while not stopped.is_set():
        alone = server.empty_since
        if alone is not None and loop.time() - alone >= orphan_after_s:
            _log.warning("front_orphaned", duration_s=orphan_after_s)
            return
        await wait_or_timeout(stopped, min(1.0, orphan_after_s / 4))


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_record(config: FrontConfig, nonce: str) -> None:
    """Write the record for the next supervisor and for operators who look for the pid.

    It is private because of the nonce, and replaced atomically.
    """
    pid = os.getpid()
    record = {
        "pid": pid,
        "start_time": start_time(pid),
        "nonce": nonce,
        "config": json.loads(config.dump()),
    }
    write_private(config.record_path(), json.dumps(record).encode(), durable=False)


def _serve_metrics(
    config: FrontConfig,
    plane: DataPlane,
    clock: AgentClock,
    beside_requests: Callable[[], MetricReadings],
) -> None:
    if config.metrics_port is None:
        return

    def read() -> MetricReadings:
        requests = metering.readings(plane.meter, plane.in_flight, plane.ejected_count)
        return {**requests, **plane.tenant_readings(), **beside_requests()}

    def make() -> metrics_page.WsgiApp:
        from shoal.agent.dataplane.page import make_page

        return make_page(read)

    files = Path(config.certificate), Path(config.key), Path(config.authority)
    guard = RegionMetricsAccess(config.region, *files, clock.wall, plane.check_revoked)
    metrics_page.serve(metrics_page.late_page(make), config.host, config.metrics_port, guard)

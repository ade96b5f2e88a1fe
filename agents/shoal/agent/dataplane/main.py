"""The front process: transports, the data plane and the control socket, joined.

It outlives its supervisor: what was configured last is served on, until nobody has been connected to the control socket
for `orphan_after_s`. `shoal.agent.main` starts it with a clock; nothing here reads one.
"""

import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from shoal.agent.dataplane import control
from shoal.agent.dataplane.control import FrontConfig
from shoal.agent.dataplane.forward import SESSIONS, WITNESS, Peers, Workers
from shoal.agent.dataplane.front import DataPlane, Settings
from shoal.agent.dataplane.grpc import GrpcTransport, Method
from shoal.agent.dataplane.metering import FrontCollector
from shoal.agent.dataplane.rest import RestTransport
from shoal.agent.dataplane.sessions import SessionCollector, Sessions
from shoal.agent.dataplane.tracing import TraceCollector, Tracer
from shoal.agent.dataplane.transport import TlsFiles, Transport
from shoal.agent.dataplane.trust import Authorities
from shoal.agent.dataplane.verify import Verifier
from shoal.agent.dataplane.witness import Witnesses
from shoal.agent.frames import FrameServer, Handler, Message, start_time
from shoal.agent.ports import Clock
from shoal.types.link import SpansAsked
from shoal.types.units import Seconds, Wall
from shoal.wire import descriptors, garbage, nouns, scrape
from shoal.wire.otlp import Exporter
from shoal.wire.private import no_dumps, write_private

EXIT_TWIN: Final = 75
"""Another front holds this agent's run folder."""
EXIT_PORT: Final = 76
"""A port is taken by somebody else."""

_log = structlog.get_logger(__name__)


def run(config_path: Path, nonce: str, clock: Clock, dates_at: Callable[[], Wall]) -> int:
    """Serves until stopped or orphaned; returns the exit status. config_path: a FrontConfig as JSON. dates_at: the
    moment at which certificates and tokens must be valid."""
    config = FrontConfig.load(config_path.read_text())
    descriptors.raise_limit()
    no_dumps()
    with (Path(config.run_dir) / control.LOCK).open("w") as lock:
        if not _alone(lock):
            _log.warning("front_is_running_already", run_dir=config.run_dir)
            return EXIT_TWIN
        garbage.set_apart()
        try:
            asyncio.run(_serve(config, nonce, clock, dates_at))
        except OSError as error:
            _log.error("front_cannot_listen", reason=str(error))
            return EXIT_PORT
    return 0


async def _serve(config: FrontConfig, nonce: str, clock: Clock, dates_at: Callable[[], Wall]) -> None:
    """Raises OSError."""
    tls = TlsFiles(Path(config.certificate), Path(config.key), Path(config.authority))
    authorities = Authorities(config.region, tls)
    workers, peers = Workers(), Peers(config.region, tls, authorities)
    settings = Settings(config.region, config.node, config.timeout_s, limits=config.limits)
    witnesses = Witnesses(config.region, workers, dates_at)
    sessions = Sessions(config.region, config.node, clock, workers, peers, dates_at)
    exporter = Exporter.to(config.otlp)
    tracer = Tracer(config.region, config.node, clock, config.trace_ratio, exporter.offer)
    plane = DataPlane(settings, clock, workers, peers, dates_at, witnesses.captures, sessions, tracer)
    beside = {WITNESS: _answered_by(witnesses), SESSIONS: _handed_to(sessions)}
    transports: tuple[Transport, ...] = (
        GrpcTransport(plane, config.host, config.grpc_port, tls, authorities, beside),
        GrpcTransport(plane, config.host, config.token_port, tls),
        RestTransport(plane, config.host, config.rest_port, tls),
    )
    stages = _Stages()
    server = FrameServer(
        config.socket(),
        nonce,
        _handlers(plane, witnesses, Verifier(peers, witnesses.captures, clock), authorities, sessions, stages, tracer),
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stages.stopped.set)
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal or its end: the supervisor decides
        loop.add_signal_handler(number, lambda: None)
    _serve_metrics(config, plane, sessions, clock, TraceCollector(tracer, exporter))
    exporting = asyncio.create_task(exporter.run())
    await server.start()
    _write_record(config, nonce)
    over = asyncio.create_task(_until_over(stages.stopped, server, config.orphan_after_s))
    configured = asyncio.create_task(stages.configured.wait())
    try:
        await asyncio.wait((over, configured), return_when=asyncio.FIRST_COMPLETED)
        if not over.done():
            # not before: a front that knows no routes yet would say of every workload that there is none
            for transport in transports:
                await transport.start()
            stages.listening.set()
            _log.info("front_listens", grpc=config.grpc_port, token=config.token_port, rest=config.rest_port)
            await over
        plane.drain()
        await asyncio.gather(*(transport.leave(Seconds(config.drain_s)) for transport in transports))
    finally:
        over.cancel()
        configured.cancel()
        exporting.cancel()
        await asyncio.gather(exporting, return_exceptions=True)
        await server.close()
        sessions.close()
        await workers.close()
        await peers.close()
        config.record().unlink(missing_ok=True)
    sys.stderr.flush()
    os._exit(0)  # before the transports are collected: their end is not an orderly one (`GrpcTransport.leave`)


class _Stages:
    """What has come so far."""

    def __init__(self) -> None:
        self.configured = asyncio.Event()
        self.listening = asyncio.Event()
        self.stopped = asyncio.Event()


def _answered_by(witnesses: Witnesses) -> dict[str, Method]:
    return {
        "Captured": Method(witnesses.admit, witnesses.captured),
        "Answer": Method(witnesses.admit, witnesses.answer),
    }


def _handed_to(sessions: Sessions) -> dict[str, Method]:
    return {"Offer": Method(sessions.admit, sessions.offered), "Commit": Method(sessions.admit, sessions.committed)}


def _handlers(
    plane: DataPlane,
    witnesses: Witnesses,
    verifier: Verifier,
    authorities: Authorities,
    sessions: Sessions,
    stages: _Stages,
    tracer: Tracer,
) -> dict[str, Handler]:
    async def configure(message: Message) -> Message:
        said = control.unpack(message.payload)
        authorities.configure(said.peers)
        witnesses.configure(said.witnesses, said.revoked)
        plane.configure(said.routes, said.credentials, said.workers, said.revoked, said.peers, said.keepers)
        stages.configured.set()
        await stages.listening.wait()
        return Message("configured")

    async def stats(_: Message) -> Message:
        now = plane.stats()
        return Message("stats", {}, control.pack_stats(replace(now, ready=now.ready and stages.listening.is_set())))

    async def spans(message: Message) -> Message:
        return Message("spans", {}, nouns.encode(tracer.found(nouns.decode(SpansAsked, message.payload))))

    async def lease(message: Message) -> Message:
        sessions.lease(control.unpack_lease(message.payload))
        return Message("leased")

    async def verify(message: Message) -> Message:
        order = control.unpack_order(message.payload)
        verdict = await verifier.verify(order.worker, order.asked, order.pack)
        return Message("verdict", {}, nouns.encode(verdict))

    async def record(message: Message) -> Message:
        order = control.unpack_order(message.payload)
        return control.pack_recorded(await verifier.record(order.worker, order.asked, order.pack))

    async def drain(_: Message) -> Message:
        plane.drain()
        return Message("draining")

    async def stop(_: Message) -> Message:
        stages.stopped.set()
        return Message("stopping")

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


async def _until_over(stopped: asyncio.Event, server: FrameServer, orphan_after_s: float) -> None:
    loop = asyncio.get_running_loop()
    while not stopped.is_set():
        alone = server.empty_since
        if alone is not None and loop.time() - alone >= orphan_after_s:
            _log.warning("front_is_orphaned", seconds=orphan_after_s)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), min(1.0, orphan_after_s / 4))


def _alone(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_record(config: FrontConfig, nonce: str) -> None:
    """For a next supervisor, and for people who look for the pid. Secret, for the nonce's sake; replaced as a whole."""
    pid = os.getpid()
    record = {
        "pid": pid,
        "start_time": start_time(pid),
        "nonce": nonce,
        "config": json.loads(config.dump()),
    }
    write_private(config.record(), json.dumps(record).encode(), durable=False)


def _serve_metrics(
    config: FrontConfig, plane: DataPlane, sessions: Sessions, clock: Clock, traces: TraceCollector
) -> None:
    if config.metrics_port is None:
        return
    registry = CollectorRegistry()
    registry.register(FrontCollector(plane.meter, lambda: plane.in_flight, lambda: plane.ejected))
    registry.register(SessionCollector(sessions))
    registry.register(traces)
    files = Path(config.certificate), Path(config.key), Path(config.authority)
    guard = scrape.Guard(config.region, *files, clock.wall, plane.revoked)
    scrape.serve(make_wsgi_app(registry), config.host, config.metrics_port, guard)

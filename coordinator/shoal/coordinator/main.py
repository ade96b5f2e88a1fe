"""`shoal-coordinator run --role region`: joins the region's controllers and adapters into one process."""

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import structlog

from shoal.coordinator.api.artifacts import ArtifactsService
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import Authorisation
from shoal.coordinator.api.enrol import EnrolmentService
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.coordinator.clock import SystemClock, SystemIds
from shoal.coordinator.controllers.enrolment import Enrolment
from shoal.coordinator.controllers.region import Region, RegionConfig
from shoal.coordinator.controllers.truth import KEY as REGION_KEY
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity, first_operator
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.telemetry import logs
from shoal.coordinator.telemetry.metrics import Gauges, PrometheusMeter
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Bytes
from shoal.v1 import artifacts_pb2_grpc, enrolment_pb2_grpc, link_pb2_grpc, operator_pb2_grpc
from shoal.wire.identity import check_name
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES, server_options
from shoal.wire.scrape import Guard

MODEL_BYTES: Final = Bytes(16 * 2**30)
STOP_S: Final = 2.0
"""Calls that run when a stop is asked for may end within this time."""

ROLES: Final = ("region", "federation")
LEVELS: Final = ("debug", "info", "warning", "error")

log: Final = structlog.get_logger("shoal.coordinator")


@dataclass(frozen=True, slots=True)
class Address:
    """port 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Config:
    """Flags, else SHOAL_* variables, else defaults. advertise: the host that agents and operators dial."""

    region: str
    data_dir: Path
    link: Address
    enrol: Address
    metrics: Address
    advertise: str
    store: str
    backup_every_s: float
    seed: int
    log_level: str


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(os.environ).parse_args(arguments)
    try:
        if options.role == "federation":
            raise refuse(
                Code.NOT_SUPPORTED_YET,
                "--role federation",
                "--role region",
                "it comes with the release that federates regions",
            )
        config = _config(options)
        os.umask(0o077)
        logs.configure(config.log_level)
        asyncio.run(_run(config))
    except ShoalError as error:
        print(error.refusal, file=sys.stderr)
        raise SystemExit(1) from None


async def _run(config: Config) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    clock, ids, meter = SystemClock(), SystemIds(), PrometheusMeter()
    _private(config.data_dir)
    store = await _store(config.store).open(config.data_dir / "store")
    try:
        if store.recovery is not None:
            log.critical("store restored from a copy", refusal=str(store.recovery))
        known = await store.read(REGION_KEY) is not None
        authority = FileAuthority.open(config.data_dir / "ca", config.region, wall=clock.wall(), may_create=not known)
        links = GrpcLinks(config.region, meter)
        region = Region(
            store,
            links,
            DirectoryBlobs(config.data_dir / "models", MODEL_BYTES),
            ChildInspector(),
            clock,
            ids,
            RegionConfig(config.region, seed=config.seed),
            meter=meter,
            restored=store.recovery,
        )
        await region.start()
        links.bind(region.fleet)
        enrolment = Enrolment(config.region, store, authority, region.events, clock, ids, meter)
        hosts = tuple(dict.fromkeys((config.advertise, *_dialled(config.link, config.enrol))))
        identity = ServerIdentity(authority, config.data_dir / "server", hosts, clock)
        operator_dir = config.data_dir / "operator"
        first_operator(authority, operator_dir, clock.wall())

        audit = AuditTrail(region.events, meter)
        guard = Authorisation(config.region, clock, meter, audit)
        api = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
        link_pb2_grpc.add_AgentLinkServicer_to_server(links, api)
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
        operator_pb2_grpc.add_OperatorServicer_to_server(OperatorService(region, enrolment, store, clock, audit), api)
        link = _listen(api, config.link, identity.credentials(client_certificates=True))
        enrol_server = grpc.aio.server(options=server_options(ENROL_BYTES))
        service = EnrolmentService(config.region, enrolment, lambda: str(Address(config.advertise, link.port)))
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrol_server)
        enrol = _listen(enrol_server, config.enrol, identity.credentials(client_certificates=False))
        meter.observe(lambda: _gauges(region, links))
        folder = identity.folder
        scraped = Guard(config.region, folder / "cert.pem", folder / "key.pem", folder / "ca.pem", clock.wall)
        metrics = _serve_metrics(meter, config.metrics, scraped)

        await api.start()
        await enrol_server.start()
        print(
            json.dumps(
                {
                    "event": "ready",
                    "role": "region",
                    "region": config.region,
                    "pid": os.getpid(),
                    "link": str(Address(config.advertise, link.port)),
                    "enrol": str(Address(config.advertise, enrol.port)),
                    "metrics": str(metrics),
                    "ca_sha256": authority.fingerprint,
                    "operator_dir": str(operator_dir.resolve()),
                }
            ),
            flush=True,
        )
        tasks = [
            asyncio.create_task(_keep_running(region)),
            asyncio.create_task(_back_up(store, config.backup_every_s)),
        ]
        await stopping.wait()
        log.info("stopping")
        region.stop()
        await asyncio.gather(api.stop(STOP_S), enrol_server.stop(STOP_S))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ShoalError):
            await store.backup()
    finally:
        await store.close()


async def _keep_running(region: Region) -> None:
    """An unforeseen error in a step must not take the API away, by which it can be mended."""
    while True:
        try:
            await region.run()
            return
        except Exception:
            log.exception("a step failed unforeseen; it is tried again")
            await asyncio.sleep(1.0)


async def _back_up(store: Any, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            log.debug("store copied", copy=(await store.backup()).name)
        except ShoalError as error:
            log.error("store not copied", refusal=str(error))


def _gauges(region: Region, links: GrpcLinks) -> Gauges:
    nodes: dict[tuple[tuple[str, str], ...], float] = {}
    for state in region.fleet.fleet.nodes.values():
        label = (("liveness", str(state.liveness)),)
        nodes[label] = nodes.get(label, 0.0) + 1
    return {
        "sessions": {(): float(links.connected)},
        "nodes": nodes,
        "workloads": {(): float(len(region.workloads.intents))},
        "waits": {(): float(len(region.workloads.waits))},
        "store_writable": {(): float(region.store_refusal is None)},
    }


def _listen(server: Any, address: Address, credentials: grpc.ServerCredentials) -> Address:
    try:
        port = server.add_secure_port(str(address), credentials)
    except RuntimeError as cause:
        raise _cannot_listen(address) from cause
    if port == 0:
        raise _cannot_listen(address)
    return Address(address.host, port)


def _serve_metrics(meter: PrometheusMeter, address: Address, scraped: Guard) -> Address:
    try:
        port = meter.serve(address.host, address.port, scraped)
    except OSError as cause:
        raise _cannot_listen(address) from cause
    return Address(address.host, port)


def _cannot_listen(address: Address) -> ShoalError:
    return refuse(
        Code.FIELD_INVALID, f"cannot listen at {address}", "an address of this machine that is free", "choose another"
    )


def _dialled(*addresses: Address) -> tuple[str, ...]:
    return tuple(address.host for address in addresses if not _is_any(address.host))


def _is_any(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")


def _private(folder: Path) -> None:
    """Raises ShoalError(STORE_UNAVAILABLE)."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as cause:
        raise refuse(
            Code.STORE_UNAVAILABLE, f"{folder}: {cause.strerror}", "a directory of its own", "choose another --data-dir"
        ) from cause


def _store(name: str) -> Any:
    found = {entry.name: entry for entry in entry_points(group="shoal.stores")}
    if name not in found:
        raise refuse(Code.FIELD_INVALID, f"store {name!r}", f"one of {', '.join(sorted(found))}", "install its package")
    return found[name].load()


def _config(options: argparse.Namespace) -> Config:
    """Raises ShoalError(NAME_INVALID | FIELD_INVALID)."""
    link = _address(options.link)
    return Config(
        region=check_name(options.region, "region"),
        data_dir=Path(options.data_dir),
        link=link,
        enrol=_address(options.enrol),
        metrics=_address(options.metrics),
        advertise=options.advertise or ("127.0.0.1" if _is_any(link.host) else link.host),
        store=options.store,
        backup_every_s=options.backup_every,
        seed=options.seed,
        log_level=options.log_level,
    )


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise refuse(Code.FIELD_INVALID, f"address {text!r:.80}", "HOST:PORT", "for example 127.0.0.1:7443, or port 0")
    return Address(host.strip("[]"), int(port))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a positive number")
    return seconds


def _one_of(*allowed: str) -> Callable[[str], str]:
    """Also of what a variable says, which argparse's own choices would not judge."""

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not one of {', '.join(allowed)}")
        return text

    return check


def _options(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    def default(name: str, otherwise: str) -> str:
        return environment.get(f"SHOAL_{name}", otherwise)

    parser = argparse.ArgumentParser(prog="shoal-coordinator", description=__doc__)
    run = parser.add_subparsers(dest="verb", required=True).add_parser("run", help="run a coordinator")
    run.add_argument(
        "--role",
        type=_one_of(*ROLES),
        default=default("ROLE", "region"),
        metavar="|".join(ROLES),
        help="what it serves",
    )
    run.add_argument("--region", default=default("REGION", "local"), help="the region's name")
    run.add_argument(
        "--data-dir", default=default("DATA_DIR", "./shoal-data"), help="store, CA, models, operator's files"
    )
    run.add_argument("--link", default=default("LINK", "127.0.0.1:7443"), help="agents and operators, mTLS")
    run.add_argument("--enrol", default=default("ENROL", "127.0.0.1:7444"), help="join tokens, server TLS only")
    run.add_argument("--metrics", default=default("METRICS", "127.0.0.1:7445"), help="Prometheus, mTLS")
    run.add_argument("--advertise", default=default("ADVERTISE", ""), help="the host that others dial")
    run.add_argument("--store", default=default("STORE", "sqlite"))
    run.add_argument(
        "--backup-every",
        type=_seconds,
        default=default("BACKUP_EVERY", "60"),
        help="seconds between copies of the store",
    )
    run.add_argument("--seed", type=int, default=default("SEED", "0"), help="of choices that placement leaves open")
    run.add_argument(
        "--log-level", type=_one_of(*LEVELS), default=default("LOG_LEVEL", "info"), metavar="|".join(LEVELS)
    )
    return parser

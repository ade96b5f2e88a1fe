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
from cryptography import x509

from shoal.coordinator.api.artifacts import ArtifactsService
from shoal.coordinator.api.audit import AuditTrail
from shoal.coordinator.api.authorise import FETCH, Authorisation
from shoal.coordinator.api.enrol import EnrolmentService
from shoal.coordinator.api.models import ModelServer
from shoal.coordinator.api.operator import OperatorService
from shoal.coordinator.blobs.directory import DirectoryBlobs
from shoal.coordinator.blobs.inspect import ChildInspector
from shoal.coordinator.broker import config as mosquitto
from shoal.coordinator.broker.control import BrokerControl
from shoal.coordinator.broker.renewal import BrokerFolder
from shoal.coordinator.clock import SystemClock, SystemIds
from shoal.coordinator.controllers.enrolment import LIFETIME_S, Enrolment
from shoal.coordinator.controllers.members import Members
from shoal.coordinator.controllers.region import Region, RegionConfig
from shoal.coordinator.controllers.renewal import Renewal
from shoal.coordinator.controllers.truth import KEY as REGION_KEY
from shoal.coordinator.identity.authority import FileAuthority
from shoal.coordinator.identity.server import ServerIdentity, first_operator
from shoal.coordinator.link.fan import Fan
from shoal.coordinator.link.grpc import GrpcLinks
from shoal.coordinator.link.mqtt import MqttLinks
from shoal.coordinator.telemetry.metrics import Gauges, PrometheusMeter
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.units import Bytes, Seconds
from shoal.v1 import artifacts_pb2_grpc, enrolment_pb2_grpc, link_pb2_grpc, operator_pb2_grpc
from shoal.wire import descriptors, logs
from shoal.wire.enrol import Enrolled
from shoal.wire.identity import NODES, Identity, check_name, identity_of_certificate
from shoal.wire.limits import LINK_BYTES, enrol_options, server_options
from shoal.wire.private import no_dumps
from shoal.wire.scrape import Guard

MODEL_BYTES: Final = Bytes(16 * 2**30)
STOP_S: Final = 2.0
"""Calls that run when a stop is asked for may end within this time."""
REFRESH_S: Final = 3600.0

ROLES: Final = ("region", "federation")

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
    """Flags, else SHOAL_* variables, else defaults. mqtt: the broker, None without one. broker_dir: what it starts
    from, where that is on this machine.

    models: where agents that come by the broker fetch models. advertise: the host that agents and operators dial."""

    region: str
    data_dir: Path
    link: Address
    enrol: Address
    metrics: Address
    mqtt: Address | None
    broker_dir: Path | None
    models: Address
    advertise: str
    store: str
    backup_every_s: float
    node_lifetime_s: float
    seed: int
    log_level: str


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(os.environ).parse_args(arguments)
    try:
        if options.verb == "broker-config":
            os.umask(0o077)
            print(json.dumps({"event": "written", "start": str(_write_broker(options))}))
            return
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
        descriptors.raise_limit()
        no_dumps()
        asyncio.run(_run(config))
    except ShoalError as error:
        print(error.refusal, file=sys.stderr)
        raise SystemExit(1) from None


def _broker_identity(authority: FileAuthority, clock: SystemClock) -> Callable[[tuple[str, ...]], Enrolled]:
    return lambda hosts: authority.enrol_self(
        Role.BROKER, mosquitto.NAME, hosts=hosts, lifetime_s=mosquitto.LIFETIME_S, wall=clock.wall()
    )


def _write_broker(options: argparse.Namespace) -> Path:
    """The program that starts the broker, in the folder that was asked for. Raises ShoalError."""
    region, data, out = check_name(options.region, "region"), Path(options.data_dir), Path(options.out)
    listen = _address(options.listen)
    user = options.user or mosquitto.current_user()
    plugin = options.plugin or mosquitto.installed_plugin()
    broker = mosquitto.BrokerConfig(region, listen.host, listen.port, user, plugin)
    clock = SystemClock()
    # A region that was never started may make its CA here: its broker can then be there first.
    authority = FileAuthority.open(data / "ca", region, wall=clock.wall(), may_create=not (data / "store").exists())
    hosts = tuple(dict.fromkeys((*options.host, *_dialled(listen))))
    identity = _broker_identity(authority, clock)(hosts)
    try:
        mosquitto.write(out, broker, identity)
    except OSError as cause:
        raise refuse(
            Code.FIELD_INVALID, f"{out}: {cause.strerror}", "a folder that can be written", "choose another --out"
        ) from cause
    return out.resolve() / "start"


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
        hosts = tuple(dict.fromkeys((config.advertise, *_dialled(config.link, config.enrol, config.models))))
        identity = ServerIdentity(authority, config.data_dir / "server", hosts, clock)
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
        region = Region(
            store,
            Fan(*links),
            DirectoryBlobs(config.data_dir / "models", MODEL_BYTES),
            ChildInspector(),
            clock,
            ids,
            RegionConfig(config.region, seed=config.seed),
            meter=meter,
            restored=store.recovery,
        )
        await region.start()
        for each in links:
            each.bind(region.fleet)
        lifetimes = {**LIFETIME_S, **dict.fromkeys(NODES, Seconds(config.node_lifetime_s))}
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

        def turned() -> None:
            identity.refresh()
            first_operator(authority, operator_dir, clock.wall())
            if folder_of_broker is not None:
                folder_of_broker.refresh(authority.ca_pem, clock.wall())
            if mqtt_links is not None:
                mqtt_links.refresh()
                model_server.refresh()

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
        model_server = ModelServer(region, identity, lambda caller: guard.judge(FETCH, caller), meter)
        api = grpc.aio.server(interceptors=[guard], options=server_options(LINK_BYTES))
        link_pb2_grpc.add_AgentLinkServicer_to_server(grpc_links, api)
        artifacts_pb2_grpc.add_ArtifactsServicer_to_server(ArtifactsService(region, audit), api)
        operators = OperatorService(
            region, enrolment, members, store, clock, audit, lambda: str(Address(config.advertise, enrol.port))
        )
        operator_pb2_grpc.add_OperatorServicer_to_server(operators, api)
        link = _listen(api, config.link, identity.credentials(client_certificates=True))
        enrol_server = grpc.aio.server(options=enrol_options())
        service = EnrolmentService(
            config.region,
            enrolment,
            renewal,
            lambda: str(Address(config.advertise, link.port)),
            lambda: str(Address(config.advertise, enrol.port)),
            mqtt,
        )
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(service, enrol_server)
        enrol = _listen(enrol_server, config.enrol, identity.credentials(client_certificates=False))
        meter.observe(lambda: _gauges(region, links))
        folder = identity.folder
        scraped = Guard(
            config.region, folder / "cert.pem", folder / "key.pem", folder / "ca.pem", clock.wall, members.check
        )
        metrics = _serve_metrics(meter, config.metrics, scraped)

        await api.start()
        await enrol_server.start()
        models_port = await _serve_models(model_server, config.models) if mqtt_links else 0
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
                    **({"mqtt": mqtt, "models": str(Address(config.advertise, models_port))} if mqtt_links else {}),
                    "ca_sha256": authority.fingerprint,
                    "operator_dir": str(operator_dir.resolve()),
                }
            ),
            flush=True,
        )
        tasks = [
            asyncio.create_task(_keep_running(region)),
            asyncio.create_task(_back_up(store, config.backup_every_s)),
            asyncio.create_task(members.run()),
            asyncio.create_task(_refresh(turned)),
        ]
        if broker is not None:
            tasks.append(asyncio.create_task(broker.run()))
        if mqtt_links is not None:
            tasks.append(asyncio.create_task(mqtt_links.run()))
        await stopping.wait()
        log.info("stopping")
        region.stop()
        await asyncio.gather(api.stop(STOP_S), enrol_server.stop(STOP_S))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await model_server.stop()
        with suppress(ShoalError):
            await store.backup()
    finally:
        await store.close()


def _identify(authority: FileAuthority, certificate: x509.Certificate) -> Identity:
    """Raises ShoalError(CERT_UNTRUSTED | CERT_NAME_INVALID)."""
    authority.recognise(certificate)
    return identity_of_certificate(certificate)


async def _keep_running(region: Region) -> None:
    """An unforeseen error in a step must not take the API away, by which it can be mended."""
    while True:
        try:
            await region.run()
            return
        except Exception:
            log.exception("a step failed unforeseen; it is tried again")
            await asyncio.sleep(1.0)


async def _refresh(due: Callable[[], None]) -> None:
    """The certificates that this machine makes for itself, before their time is over."""
    while True:
        await asyncio.sleep(REFRESH_S)
        due()


async def _back_up(store: Any, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            log.debug("store copied", copy=(await store.backup()).name)
        except ShoalError as error:
            log.error("store not copied", refusal=str(error))


def _gauges(region: Region, links: Sequence[GrpcLinks | MqttLinks]) -> Gauges:
    nodes: dict[tuple[tuple[str, str], ...], float] = {}
    for state in region.fleet.fleet.nodes.values():
        label = (("liveness", str(state.liveness)),)
        nodes[label] = nodes.get(label, 0.0) + 1
    return {
        "sessions": {(): float(sum(link.connected for link in links))},
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


async def _serve_models(server: ModelServer, address: Address) -> int:
    try:
        return await server.start(address.host, address.port)
    except OSError as cause:
        raise _cannot_listen(address) from cause


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
        mqtt=_address(options.mqtt) if options.mqtt else None,
        broker_dir=Path(options.broker_dir) if options.broker_dir else None,
        models=_address(options.models),
        advertise=options.advertise or ("127.0.0.1" if _is_any(link.host) else link.host),
        store=options.store,
        backup_every_s=options.backup_every,
        node_lifetime_s=options.node_lifetime,
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
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run a coordinator")
    run.add_argument(
        "--role",
        type=_one_of(*ROLES),
        default=default("ROLE", "region"),
        metavar="|".join(ROLES),
        help="what it serves",
    )
    broker = verbs.add_parser(
        "broker-config",
        help="make the folder from which Mosquitto carries this region's agent links",
        description="Makes a folder with Mosquitto's configuration, certificate and rights; its `start` is what runs"
        " the broker, on this machine or wherever the folder is copied. Run it again for a new certificate.",
    )
    for verb in (run, broker):
        verb.add_argument("--region", default=default("REGION", "local"), help="the region's name")
        verb.add_argument(
            "--data-dir", default=default("DATA_DIR", "./shoal-data"), help="store, CA, models, operator's files"
        )
    broker.add_argument("--out", default=default("BROKER_DIR", "./shoal-broker"), help="the folder that is made")
    broker.add_argument("--listen", default=default("MQTT_LISTEN", "127.0.0.1:8883"), help="where the broker listens")
    broker.add_argument("--host", action="append", default=[], help="a name or address that agents dial; repeatable")
    broker.add_argument("--user", default="", help="whom it runs as when root starts it. [default: who makes it]")
    broker.add_argument("--plugin", default="", help="mosquitto_dynamic_security.so, as the broker's machine has it")
    run.add_argument("--link", default=default("LINK", "127.0.0.1:7443"), help="agents and operators, mTLS")
    run.add_argument("--enrol", default=default("ENROL", "127.0.0.1:7444"), help="join tokens, server TLS only")
    run.add_argument("--metrics", default=default("METRICS", "127.0.0.1:7445"), help="Prometheus, mTLS")
    run.add_argument(
        "--mqtt", default=default("MQTT", ""), help="HOST:PORT of the region's broker, from `broker-config`"
    )
    run.add_argument(
        "--broker-dir",
        default=default("BROKER_DIR", ""),
        help="that broker's folder, where it is on this machine: its certificate is renewed and follows the CA",
    )
    run.add_argument(
        "--models", default=default("MODELS", "127.0.0.1:7446"), help="models for agents that come by --mqtt, HTTPS"
    )
    run.add_argument("--advertise", default=default("ADVERTISE", ""), help="the host that others dial")
    run.add_argument("--store", default=default("STORE", "sqlite"))
    run.add_argument(
        "--backup-every",
        type=_seconds,
        default=default("BACKUP_EVERY", "60"),
        help="seconds between copies of the store",
    )
    run.add_argument(
        "--node-lifetime",
        type=_seconds,
        default=default("NODE_LIFETIME", "86400"),
        help="seconds that a node's certificate is good for; it renews at two thirds",
    )
    run.add_argument("--seed", type=int, default=default("SEED", "0"), help="of choices that placement leaves open")
    run.add_argument(
        "--log-level", type=_one_of(*logs.LEVELS), default=default("LOG_LEVEL", "info"), metavar="|".join(logs.LEVELS)
    )
    return parser

"""Command-line options of a coordinator, with SHOAL_* variables as defaults."""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from shoal.coordinator.ports import StoreKind, StoreOptions, StoreSetting
from shoal.host import logs, otlp
from shoal.host.arguments import ArgumentParser
from shoal.types.address import HostPort, parse_host
from shoal.types.codes import Code, refuse
from shoal.types.identity import check_name

ROLES: Final = ("region", "federation")
OFF: Final = "off"
_RUN: Final = ("shoal-coordinator run --region eu --data-dir /var/lib/shoal", "a region")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Settings of `shoal-coordinator run`: flags, else SHOAL_* variables, else defaults."""

    # Name of the region, or of the federation.
    region: str
    # Folder of the store, and of the operator's first certificate.
    data_dir: Path
    # Where agents and operators connect, mTLS.
    link: HostPort
    # Where nodes join and renew, with server TLS only.
    enrol: HostPort
    # Where Prometheus scrapes, mTLS.
    metrics: HostPort
    # Where browsers open the dashboard, HTTPS; None: there is none.
    dashboard: HostPort | None
    # Further names that the dashboard is opened by, such as a proxy's.
    dashboard_hosts: tuple[str, ...]
    # Address of the region's MQTT broker; None without a broker.
    mqtt: HostPort | None
    # Folder that the broker starts from, if it is on this machine: its certificate is renewed there. Else None.
    broker_dir: Path | None
    # Where agents on the MQTT link fetch models, HTTPS.
    models: HostPort
    # Folder of the price and carbon feeds that are files.
    signals_dir: Path
    # Hosts that a feed's URL may name although they are inside this network.
    signal_hosts: tuple[str, ...]
    # Where other regions of a federation connect, mTLS; nobody listens before the region has joined one.
    peers: HostPort
    # Host that agents, operators and peers dial.
    advertise: str
    # Link addresses of all coordinators of the region, separated by commas; empty: this coordinator's only.
    links: str
    # Enrolment addresses of all coordinators of the region, separated by commas; empty: this coordinator's only.
    enrols: str
    # Folder of CA and models, which all coordinators of the region see; `data_dir` unless given.
    shared_dir: Path
    # Entry point name of the kind of store, such as "sqlite".
    store: str
    # Where the store is, and its settings.
    store_options: StoreOptions
    # Seconds between copies of the store.
    backup_every_s: float
    # Folder that backups are kept in; None: no backups.
    archive_dir: Path | None
    # Seconds between backups.
    archive_every_s: float
    # Number of backups to keep; the oldest are deleted.
    archive_keep: int
    # File of the secret that seals the CA's keys in backups; None: backups contain no keys.
    backup_key_file: Path | None
    # Lifetime of a node's certificate, in seconds; nodes renew at two thirds.
    node_lifetime_s: float
    # Seed of the choices that placement leaves open.
    seed: int
    # One of `logs.LEVELS`.
    log_level: str
    # URL of the OpenTelemetry collector that receives spans; empty: none.
    otlp: str = ""


def config_of(options: argparse.Namespace) -> CoordinatorConfig:
    """Raises ShoalError(NAME_INVALID | FIELD_INVALID)."""
    if options.otlp:
        otlp.collector_of(options.otlp)
    link, region, data_dir = (
        HostPort.parse(options.link, "--link"),
        check_name(options.region, "region"),
        Path(options.data_dir),
    )
    return CoordinatorConfig(
        region=region,
        data_dir=data_dir,
        link=link,
        enrol=HostPort.parse(options.enrol, "--enrol"),
        metrics=HostPort.parse(options.metrics, "--metrics"),
        dashboard=HostPort.parse(options.dashboard, "--dashboard") if options.dashboard != OFF else None,
        dashboard_hosts=tuple(parse_host(each, "--dashboard-host") for each in _listed(options.dashboard_host)),
        mqtt=HostPort.parse(options.mqtt, "--mqtt") if options.mqtt else None,
        broker_dir=Path(options.broker_dir) if options.broker_dir else None,
        models=HostPort.parse(options.models, "--models"),
        signals_dir=Path(options.signals_dir or Path(options.data_dir) / "signals"),
        signal_hosts=tuple(_listed(options.signal_host)),
        peers=HostPort.parse(options.peers, "--peers"),
        advertise=_advertised_host(options.advertise, link),
        links=_addresses(options.links, "--links"),
        enrols=_addresses(options.enrols, "--enrols"),
        shared_dir=Path(options.shared_dir or data_dir),
        store=options.store,
        store_options=store_options_of(options),
        backup_every_s=options.backup_every,
        archive_dir=Path(options.archive_dir) if options.archive_dir else None,
        archive_every_s=options.archive_every,
        archive_keep=options.archive_keep,
        backup_key_file=Path(options.backup_key_file) if options.backup_key_file else None,
        node_lifetime_s=options.node_lifetime,
        seed=options.seed,
        log_level=options.log_level,
        otlp=options.otlp,
    )


def store_kinds() -> dict[str, StoreKind]:
    """The installed kinds of stores, by name."""
    return {entry.name: entry.load() for entry in entry_points(group="shoal.stores")}


def store_options_of(options: argparse.Namespace) -> StoreOptions:
    """Raises ShoalError(FIELD_INVALID)."""
    settings = store_settings_of(options, options.store)
    return StoreOptions(Path(options.data_dir) / "store", f"{options.role}/{options.region}", settings)


def store_settings_of(options: argparse.Namespace, store: str) -> dict[str, str]:
    """The values of the settings that the store declares. Raises ShoalError(FIELD_INVALID)."""
    kinds = store_kinds()
    if store not in kinds:
        raise refuse(
            Code.FIELD_INVALID, f"store {store!r:.80}", f"one of {', '.join(sorted(kinds))}", "install its package"
        )
    return {each.name: getattr(options, _setting_name(store, each)) for each in kinds[store].SETTINGS}


def _setting_name(store: str, setting: StoreSetting) -> str:
    return f"{store}_{setting.name}".replace("-", "_")


def scopes_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The scopes of `etcd-users`, without duplicates. Raises ShoalError(FIELD_MISSING | FIELD_INVALID |
    NAME_INVALID)."""
    scopes = tuple(dict.fromkeys(each.strip() for text in options.scope for each in text.split(",") if each.strip()))
    if not scopes:
        raise refuse(Code.FIELD_MISSING, "no --scope", "ROLE/NAME", "for example --scope region/eu")
    for scope in scopes:
        role, _, name = scope.partition("/")
        if role not in ROLES:
            wanted = " or ".join(f"{each}/NAME" for each in ROLES)
            raise refuse(Code.FIELD_INVALID, f"--scope {scope!r:.80}", wanted, "for example --scope region/eu")
        check_name(name, role)
    return scopes


def _listed(texts: Sequence[str]) -> Iterator[str]:
    """The parts of comma-separated texts."""
    return (part.strip() for text in texts for part in text.split(",") if part.strip())


def _addresses(text: str, what: str) -> str:
    return ",".join(str(HostPort.parse(each.strip(), what)) for each in text.split(",") if each)


def _advertised_host(text: str, link: HostPort) -> str:
    if text:
        return parse_host(text, "--advertise")
    return "127.0.0.1" if link.is_any else link.host


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a positive number")
    return seconds


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of at least 1")
    return int(text)


def _one_of(*allowed: str) -> Callable[[str], str]:
    """An argument type that also checks values from SHOAL_* variables, which argparse's own `choices` would not."""

    def check(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not one of {', '.join(allowed)}")
        return text

    return check


def parser_of(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    def default(name: str, otherwise: str) -> str:
        return environment.get(f"SHOAL_{name}", otherwise)

    parser = ArgumentParser(
        prog="shoal-coordinator",
        description="A region's control plane, or the federation of several",
        examples=(
            _RUN,
            ("shoal-coordinator operator --data-dir /var/lib/shoal", "a new first operator"),
        ),
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="run a coordinator", examples=(_RUN,))
    broker = verbs.add_parser(
        "broker-config",
        help="make the folder from which Mosquitto carries this region's agent links",
        description="Makes a folder with Mosquitto's configuration, certificate and rights; its `start` is what runs"
        " the broker, on this machine or wherever the folder is copied. Run it again for a new certificate.",
        examples=(("shoal-coordinator broker-config --region eu --data-dir /var/lib/shoal", ""),),
    )
    restore = verbs.add_parser(
        "restore",
        help="put a backup, or a copy of the store, in its place, while the coordinator is stopped",
        description="Puts a backup (`shoal backup`, --archive-dir) into either store, or a copy of the SQLite file in"
        " its place, once it was read and found whole, with a history of its own: agents go on with what they run."
        " With SQLite, what the store was is kept beside it.",
        examples=(("shoal-coordinator restore --data-dir /var/lib/shoal --from eu.tar", ""),),
    )
    restore.add_argument(
        "--from",
        dest="copy",
        required=True,
        metavar="FILE",
        help="a backup, or one of DATA_DIR/store/backups/",
    )
    restore.add_argument(
        "--replace", action="store_true", help="although there is a store, or another CA, which then goes"
    )
    operator = verbs.add_parser(
        "operator",
        help="have the coordinator on this machine certify its first operator again, after it was revoked",
        description="Asks the coordinator that runs on --data-dir, or its next start, for a new certificate of the"
        " first operator, and waits ten seconds at most until its files are in DATA_DIR/operator (written; asked: no"
        " coordinator runs there, or its store does not take it yet, as its log says). Only who can write there can"
        " ask.",
        examples=(("shoal-coordinator operator --data-dir /var/lib/shoal", ""),),
    )
    users = verbs.add_parser(
        "etcd-users",
        help="let each region and federation read and write its own part of an etcd, and nothing else there",
        description="Makes a user and a role of etcd for each --scope, with the right to its prefix alone, then enables"
        " etcd's authentication: who has no user is refused from then on. A region's coordinators come with a"
        " certificate whose common name is the user's: region-NAME, federation-NAME. The certificate that this command"
        " is given is that of `root`. What is right already stays: run it again to add a region.",
        examples=(("shoal-coordinator etcd-users --scope region/eu --scope federation/fed", ""),),
    )
    users.add_argument(
        "--scope",
        action="append",
        default=[environment["SHOAL_ETCD_SCOPES"]] if environment.get("SHOAL_ETCD_SCOPES") else [],
        metavar="ROLE/NAME",
        help="region/NAME or federation/NAME, as in --role and --region of its coordinators; repeatable",
    )
    for verb in (run, broker, restore, operator):
        verb.add_argument("--region", default=default("REGION", "local"), help="the region's name, or the federation's")
        verb.add_argument(
            "--data-dir", default=default("DATA_DIR", "./shoal-data"), help="store, CA, models, operator's files"
        )
    for verb in (run, restore):
        verb.add_argument(
            "--role",
            type=_one_of(*ROLES),
            default=default("ROLE", "region"),
            metavar="|".join(ROLES),
            help="what it serves",
        )
        verb.add_argument(
            "--shared-dir",
            default=default("SHARED_DIR", ""),
            help="CA and models, a folder that all coordinators of the region see. [default: --data-dir]",
        )
        verb.add_argument(
            "--store",
            default=default("STORE", "sqlite"),
            help="sqlite: in --data-dir; etcd: v3, for several coordinators; or another that is installed",
        )
        verb.add_argument(
            "--backup-key-file",
            default=default("BACKUP_KEY_FILE", ""),
            metavar="FILE",
            help="a secret of 16 bytes or more that the CA's keys are sealed with in backups. [default: they are left"
            " out]",
        )
    for store, kind in sorted(store_kinds().items()):
        for setting in kind.SETTINGS:
            name = _setting_name(store, setting)
            for verb in (run, restore, users) if store == "etcd" else (run, restore):
                verb.add_argument(
                    f"--{name.replace('_', '-')}",
                    default=default(name.upper(), setting.default),
                    metavar=setting.metavar or None,
                    help=setting.help,
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
        "--dashboard",
        default=default("DASHBOARD", "127.0.0.1:7448"),
        metavar="HOST:PORT|off",
        help="where browsers open the region's dashboard, HTTPS: `shoal dashboard`",
    )
    run.add_argument(
        "--dashboard-host",
        action="append",
        default=[environment["SHOAL_DASHBOARD_HOSTS"]] if environment.get("SHOAL_DASHBOARD_HOSTS") else [],
        metavar="HOST",
        help="a further name that browsers open it by, such as a proxy's; repeatable",
    )
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
    run.add_argument(
        "--signals-dir",
        default=default("SIGNALS_DIR", ""),
        help="folder of the files that a Region may name as source of price or carbon. [default: DATA_DIR/signals]",
    )
    run.add_argument(
        "--signal-host",
        action="append",
        default=[environment["SHOAL_SIGNAL_HOSTS"]] if environment.get("SHOAL_SIGNAL_HOSTS") else [],
        help="a host that a source's URL may name although it is inside this network, and plain http then; repeatable",
    )
    run.add_argument(
        "--peers",
        default=default("PEERS", "127.0.0.1:7447"),
        help="other regions of a federation, mTLS; nobody listens there before the region has joined one",
    )
    run.add_argument("--advertise", default=default("ADVERTISE", ""), help="the host that others dial")
    run.add_argument(
        "--links",
        default=default("LINKS", ""),
        metavar="HOST:PORT,..",
        help="where all coordinators of the region listen for agents and operators, who are told on joining",
    )
    run.add_argument(
        "--enrols", default=default("ENROLS", ""), metavar="HOST:PORT,..", help="and for who joins or renews"
    )
    run.add_argument(
        "--backup-every",
        type=_seconds,
        default=default("BACKUP_EVERY", "60"),
        help="seconds between copies of the store",
    )
    run.add_argument(
        "--archive-dir",
        default=default("ARCHIVE_DIR", ""),
        metavar="DIR",
        help="keep backups there, of either store, each read back when it is made; another disk than --data-dir's",
    )
    run.add_argument(
        "--archive-every",
        type=_seconds,
        default=default("ARCHIVE_EVERY", "3600"),
        help="seconds between these backups",
    )
    run.add_argument(
        "--archive-keep",
        type=_at_least_one,
        default=default("ARCHIVE_KEEP", "48"),
        help="how many of these backups are kept: the newest",
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
    run.add_argument(
        "--otlp",
        default=default("OTLP", otlp.endpoint_of(environment)),
        metavar="http(s)://HOST:PORT",
        help="OpenTelemetry collector that the spans of migrations and negotiations are sent to, over gRPC. [default:"
        " OTEL_EXPORTER_OTLP_ENDPOINT's]",
    )
    return parser

"""The command line of `shoal-agent` and its SHOAL_* variables, parsed into one frozen AgentConfig."""

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.agent.core.shared_memory import SharedMemoryGrant, check_grants
from shoal.agent.driver_port import DriverOptions
from shoal.host import otlp
from shoal.host.arguments import ArgumentParser
from shoal.types.address import HostPort, parse_host
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.device import Role
from shoal.types.identity import check_name
from shoal.types.units import SIZE, Bytes, parse_quantity, show_bytes

ROLES = {"node": Role.AGENT, "gateway": Role.GATEWAY}
LINKS = ("auto", "grpc", "mqtt")
_RUN = ("SHOAL_TOKEN=.. shoal-agent run --enrol eu.example.org:7444", "join, then serve")
MIN_FRONT_MEMORY = Bytes(256 * 2**20)
"""Below this, one request of the largest size would not fit (`dataplane.memory`)."""


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Configuration of `shoal-agent run`."""

    # Node or gateway. A gateway runs no model.
    role: Role
    # Folder of this node's identity, journal, cache and run files.
    state_dir: Path
    # host:port of the coordinator's link; several with commas. Empty: the address from enrolment.
    coordinator: str
    # host:port where certificates are renewed. Empty: the address from enrolment.
    enrol: str
    # One of LINKS.
    link: str
    # host:port of the region's MQTT broker. Empty: the address from enrolment, which may be empty too.
    mqtt: str
    # The data port: listens for requests over gRPC and REST.
    listen: HostPort
    # Listens for Prometheus scrapes of the supervisor, over mTLS.
    metrics: HostPort
    # Listens for Prometheus scrapes of the front, over mTLS.
    front_metrics: HostPort
    # Host that peers dial. Empty: the host listened on, or this machine's name.
    advertise: str
    # Labels of the node by key.
    labels: Mapping[str, str]
    # Emulated devices, each `PROFILE` or `PROFILE=SIZE`.
    emulate: tuple[str, ...]
    # Vendors' simulators of devices that this agent offers.
    simulate: tuple[str, ...]
    # False: do not offer the CPU as a device.
    cpu: bool
    # Factor on the answer times of emulated devices; above 0.
    time_scale: float
    # Factor on the wake-up times of emulated devices; above 0.
    wake_scale: float
    # Maximum bytes of models on disk.
    cache_quota: Bytes
    # Folder of this device's own publisher keys. None: the region's keys suffice.
    publisher_keys: Path | None = None
    # JSON file with the current state of emulated devices. None: all are healthy.
    emulate_condition: Path | None = None
    # File with a join token, for a machine that has not joined yet. None: it has joined.
    token_file: Path | None = None
    # A join token itself, in place of a file. Empty: none.
    token: str = ""
    # Name to join as. Empty: the token's, or else the host name.
    name: str = ""
    # URL of the OpenTelemetry collector for spans. Empty: none.
    otlp: str = ""
    # Share of the requests entering here that are traced, 0 to 1.
    trace_ratio: float = 0.0
    # Listens for health probes over plain HTTP. None: `listen` alone answers them.
    health: HostPort | None = None
    # Memory limit of the front process in bytes. 0: the limit of the machine and its cgroups.
    front_memory: Bytes = Bytes(0)
    # Which tenants may register system shared memory at the front.
    shared_memory: tuple[SharedMemoryGrant, ...] = ()

    def __post_init__(self) -> None:
        hosts = {self.listen.host, self.front_metrics.host}
        if len(hosts) != 1:
            raise refuse(
                Code.FIELD_INVALID,
                " and ".join(sorted(hosts)),
                "one host for --listen and --front-metrics",
                "listen on one address, or on 0.0.0.0",
            )

    @property
    def identity(self) -> Path:
        return self.state_dir / "identity"


def driver_options(config: AgentConfig) -> DriverOptions:
    """What the drivers are told."""
    return DriverOptions(
        config.emulate, config.time_scale, config.wake_scale, config.emulate_condition, config.simulate
    )


def parser() -> argparse.ArgumentParser:
    """Every option can also be set as SHOAL_NAME. The command line takes precedence."""
    top = ArgumentParser(
        prog="shoal-agent",
        description="Shoal on a device: serve models, tell what it can.",
        examples=(_RUN, ("shoal-agent doctor", "why it does not work")),
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="join | run | doctor | record | clock")

    join = commands.add_parser(
        "join",
        help="enrol this machine with a one-time token",
        examples=(("SHOAL_TOKEN=.. shoal-agent join --coordinator eu.example.org:7444", ""),),
    )
    _option(
        join,
        "--coordinator",
        type=_addresses,
        help="HOST:PORT of the coordinator's enrolment port; several with commas",
        required=True,
    )
    _option(
        join, "--token", help="from `shoal token create`; better as SHOAL_TOKEN, which others cannot see", required=True
    )
    run = commands.add_parser(
        "run",
        help="serve until SIGTERM",
        examples=(_RUN, ("shoal-agent run --role gateway --listen 0.0.0.0:8001", "a region's entry")),
    )
    _option(run, "--role", type=_role, default="node", metavar="node|gateway", help="a gateway runs no model")
    _option(
        run,
        "--coordinator",
        type=_addresses,
        default="",
        help="HOST:PORT of the coordinator's link; several with commas; default: as told on join",
    )
    _option(
        run,
        "--link",
        type=_link,
        default="auto",
        metavar="|".join(LINKS),
        help="how to reach the coordinator; auto: gRPC, and MQTT where that does not hold and a broker is known",
    )
    _option(
        run,
        "--mqtt",
        type=_addresses,
        default="",
        help="HOST:PORT of the region's MQTT broker; default: as told on join",
    )
    _option(
        run,
        "--enrol",
        type=_addresses,
        default="",
        help="HOST:PORT where certificates are renewed; default: as told on join",
    )
    _option(
        run,
        "--token-file",
        type=_path,
        metavar="FILE",
        help="a join token for a machine that is no member yet: it joins at --enrol, then serves",
    )
    _option(run, "--token", default="", help="that token itself; better as SHOAL_TOKEN, which others cannot see")
    _option(
        run,
        "--listen",
        type=_address,
        default="127.0.0.1:8001",
        metavar="HOST:PORT",
        help="the data port: requests over gRPC and REST, with a client certificate or a bearer token",
    )
    _option(run, "--metrics", type=_address, default="127.0.0.1:9464", help="HOST:PORT for Prometheus, mTLS")
    _option(
        run,
        "--front-metrics",
        type=_address,
        default="127.0.0.1:9465",
        help="HOST:PORT for Prometheus of the front process (latencies, refusals by code), mTLS",
    )
    _option(
        run,
        "--health",
        type=_address_or_none,
        default="",
        metavar="HOST:PORT",
        help="/v2/health/live and /v2/health/ready over plain HTTP, for probes; default: on --listen alone",
    )
    _option(
        run,
        "--advertise",
        type=_host,
        default="",
        help="host that peers dial; default: the one listened on, or this host's name",
    )
    _option(
        run,
        "--emulate",
        default="",
        metavar="PROFILE[=SIZE][,..]",
        help="emulated devices by the name of their profile; SIZE: of memory, if not the profile's",
    )
    _option(
        run,
        "--simulate",
        default="",
        metavar="SIMULATOR[,..]",
        help="devices by the simulator of their vendor: htp (Qualcomm's NPU; needs the extra `qnn`, on x86-64)",
    )
    _option(
        run,
        "--emulate-condition",
        type=_path,
        metavar="FILE",
        help="JSON that says how emulated devices are now: temperature_c, throttled, answers",
    )
    run.add_argument(
        "--no-cpu",
        action="store_true",
        default=os.environ.get("SHOAL_NO_CPU", "0") not in ("", "0", "false"),
        help="leave out the CPU",
    )
    _option(run, "--time-scale", type=_scale, default="1", help="emulated devices answer so many times slower")
    _option(run, "--wake-scale", type=_scale, default="1", help="emulated devices that slept take so many times longer")
    _option(run, "--cache-quota", type=_size, default="4GiB", help="for model bytes on disk")
    _option(
        run,
        "--front-memory",
        type=_front_memory,
        default="",
        metavar="SIZE",
        help="memory limit of the front process, half of which its requests and answers share; default: the "
        "container's, else the machine's",
    )
    _option(
        run,
        "--shared-memory",
        type=_grants,
        default="",
        metavar="TENANT=PREFIX[,..]",
        help="let a tenant pass tensors in system shared memory of this machine: files in /dev/shm whose names begin "
        "with PREFIX; default: nobody",
    )
    _option(
        run,
        "--publisher-keys",
        type=_path,
        metavar="DIR",
        help="public keys, NAME.pem each: load no model that none of them signed, whatever the region asks",
    )

    _option(
        run,
        "--otlp",
        default=otlp.endpoint_of(),
        metavar="http(s)://HOST:PORT",
        help="OpenTelemetry collector that spans are sent to (OTLP over gRPC); default: OTEL_EXPORTER_OTLP_ENDPOINT's",
    )
    _option(
        run,
        "--trace-ratio",
        type=_ratio,
        default=None,
        help=f"share of requests that is traced, 0 to 1; default: {otlp.DEFAULT_RATIO:g} with --otlp, else 0",
    )
    for each in (join, run):
        _option(each, "--name", default="", help="of a node that joins; default: the token's, else its host name")
        each.add_argument(
            "--label",
            action="append",
            default=[],
            type=_label,
            metavar="K=V",
            help="counts as self.K, or as K where the join token allows it; repeatable",
        )
    doctor = commands.add_parser(
        "doctor",
        help="check this node, each failure with what fixes it",
        examples=(("shoal-agent doctor --state-dir /var/lib/shoal-agent", ""),),
    )
    _option(doctor, "--coordinator", default="", help="HOST:PORT of the coordinator's link; default: as told on join")
    clock = commands.add_parser(
        "clock",
        help="what time this node believes it is",
        examples=(("shoal-agent clock --confirm", "the machine's clock is right"),),
    )
    clock.add_argument("--confirm", action="store_true", help="say that this machine's clock is right, after a jump")
    recording = commands.add_parser(
        "record",
        help="write what a driver asks of this machine and is answered, for tests on other machines",
        examples=(("shoal-agent record amd --out amd.json", ""),),
    )
    recording.add_argument("driver", help="name of an installed driver: amd, ascend, nvidia")
    recording.add_argument("--out", type=Path, required=True, help="JSON file; look through it before you give it away")
    for each in (join, run, doctor, clock):
        _option(
            each,
            "--state-dir",
            type=_path,
            default=str(default_state_dir()),
            help="identity, journal and cache of this node",
        )
    return top


def default_state_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The default of --state-dir: below XDG_STATE_HOME, or below ~/.local/state if that is unset or not absolute."""
    given = Path(environment.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".local" / "state") / "shoal" / "agent"


def _option(parser: argparse.ArgumentParser, flag: str, **settings: object) -> None:
    variable = "SHOAL_" + flag.removeprefix("--").replace("-", "_").upper()
    given = os.environ.get(variable)
    if given is not None:
        settings |= {"default": given, "required": False}
    parser.add_argument(flag, **settings)  # type: ignore[arg-type]


def _link(text: str) -> str:
    """Also checks SHOAL_LINK, which argparse's own `choices` would not."""
    if text not in LINKS:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not one of {', '.join(LINKS)}")
    return text


def _role(text: str) -> Role:
    """Also checks SHOAL_ROLE, which argparse's own `choices` would not."""
    if text not in ROLES:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not one of {', '.join(ROLES)}")
    return ROLES[text]


def _scale(text: str) -> float:
    scale = float(text)
    if not 0.0 < scale < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a positive number")
    return scale


def _ratio(text: str) -> float:
    ratio = float(text)
    if not 0.0 <= ratio <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not between 0 and 1")
    return ratio


def _address(text: str) -> HostPort:
    try:
        return HostPort.parse(text)
    except ShoalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _addresses(text: str) -> str:
    """One or several, separated by commas; may be empty."""
    return ",".join(str(_address(each.strip())) for each in text.split(",") if each)


def _host(text: str) -> str:
    try:
        return parse_host(text) if text else ""
    except ShoalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _address_or_none(text: str) -> HostPort | None:
    return _address(text) if text else None


def _size(text: str) -> Bytes:
    try:
        return Bytes(int(parse_quantity(text, SIZE)))
    except ShoalError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _front_memory(text: str) -> Bytes:
    """0 for an empty text."""
    size = _size(text) if text else Bytes(0)
    if text and size < MIN_FRONT_MEMORY:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is less than {show_bytes(MIN_FRONT_MEMORY)}")
    return size


def _grants(text: str) -> tuple[SharedMemoryGrant, ...]:
    found = []
    for each in filter(None, text.split(",")):
        tenant, equals, prefix = each.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{each!r:.80} is not TENANT=PREFIX")
        try:
            found.append(SharedMemoryGrant(check_name(tenant, "tenant"), prefix))
        except ShoalError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    if (refusal := check_grants(found)) is not None:
        raise argparse.ArgumentTypeError(str(refusal))
    return tuple(found)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not KEY=VALUE")
    return key, value


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def make_config(parsed: argparse.Namespace) -> AgentConfig:
    return AgentConfig(
        role=parsed.role,
        state_dir=parsed.state_dir,
        coordinator=parsed.coordinator,
        enrol=parsed.enrol,
        link=parsed.link,
        mqtt=parsed.mqtt,
        listen=parsed.listen,
        metrics=parsed.metrics,
        front_metrics=parsed.front_metrics,
        advertise=parsed.advertise,
        labels=dict(parsed.label),
        emulate=tuple(name for name in parsed.emulate.split(",") if name),
        simulate=tuple(name for name in parsed.simulate.split(",") if name),
        cpu=not parsed.no_cpu,
        time_scale=parsed.time_scale,
        wake_scale=parsed.wake_scale,
        cache_quota=parsed.cache_quota,
        publisher_keys=parsed.publisher_keys,
        emulate_condition=parsed.emulate_condition,
        token_file=parsed.token_file,
        token=parsed.token,
        name=parsed.name,
        otlp=parsed.otlp,
        trace_ratio=otlp.ratio_of(parsed.trace_ratio, parsed.otlp),
        health=parsed.health,
        front_memory=parsed.front_memory,
        shared_memory=parsed.shared_memory,
    )

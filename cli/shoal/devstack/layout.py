"""The members of a local federation and where their files are; values only."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from shoal.types.address import HostPort
from shoal.types.codes import Code, refuse
from shoal.types.identity import check_name

REGION: Final = "home"
FEDERATION: Final = "federation"
"""The federation's name, and the role of its members."""
ETCD: Final = "etcd"
"""Role of the store's members, which belong to no region."""
ETCD_MEMBERS: Final = 3

FLEET: Final = (
    ("plain-cpu", ""),
    ("edge-npu", "qualcomm-ai100-dm2"),
    ("cloud-gpu", "nvidia-l4"),
    ("small-cpu", "rk3588s"),
)
"""The first agents of a region and the profile that each emulates; '' means this machine's own CPU. Further agents are
plain CPUs."""

SMALL_PROFILE: Final = "rk3588s"
"""What an agent of a group emulates unless the group says otherwise: of the profiles the one that asks least of this
machine."""

GROUP_LABEL: Final = "group"
"""Node label of the agents of a group, as `shoal token create --group` sets it."""

MAX_AGENTS: Final = 64
"""Of one region on one machine."""

PRICES: Final = {
    "plain-cpu": 0.08,
    "edge-npu": 0.05,
    "cloud-gpu": 0.80,
    "small-cpu": 0.01,
}
"""USD/h in the first region, declared by node label `price` as an operator would; examples, not measurements. The
second region asks half, the third a third, so that delegation pays."""


SITES: Final = {"cloud-gpu": "cloud", "small-cpu": "pole"}
"""Node label `site`, for selectors."""

PROFILE_PRICES: Final = {profile: PRICES[name] for name, profile in FLEET}
"""USD/h of an agent of a group, by the profile that it emulates."""


TRADE_DOCUMENT: Final = """apiVersion: shoal/v1
kind: Region
metadata: {{name: {region}}}
spec: {{trade: [{{with: "*", hold_share: 80%}}]}}
"""
"""The first document of every region: it works for all the others, which are few and share its devices."""


def count_of(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True, slots=True)
class StackMember:
    """One program of the stack."""

    # Also its identity's name, except for coordinators.
    name: str
    # agent, gateway, coordinator, broker, federation or etcd.
    role: str
    # Device profile that an agent emulates; empty: this machine's own CPU.
    emulate: str
    # Node labels of an agent; empty for other roles.
    labels: Mapping[str, str]
    # host:port by use (grpc, rest, token, metrics, ..).
    addresses: Mapping[str, str]
    # Its region; the federation's name for federation members, empty for etcd.
    region: str = REGION
    # Vendors' simulators that an agent offers as devices beside its own, as `shoal-agent run --simulate` takes them.
    simulate: str = ""


@dataclass(frozen=True, slots=True)
class StackLayout:
    """A local federation, as `dev up` was asked for it."""

    # The first region, where documents are applied by default.
    region: str
    # In the order in which they start.
    members: tuple[StackMember, ...]
    # How many times slower emulated devices answer than the real ones; 1: as fast.
    time_scale: float
    # Carrier of the agents' links: grpc or mqtt.
    link: str = "grpc"
    # Emulated devices take their profile's wake time multiplied by this.
    wake_scale: float = 1.0
    # True: members reach each other through the relays of link_shaping.py, which can cut and slow them. Benchmarks
    # measure without.
    relayed: bool = True

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.region for member in self.members if member.role == "coordinator"))

    def for_region(self, region: str) -> "StackLayout":
        """The same layout with one region's members only."""
        return replace(self, region=region, members=tuple(one for one in self.members if one.region == region))

    @property
    def federation(self) -> tuple[StackMember, ...]:
        return tuple(member for member in self.members if member.role == FEDERATION)

    @property
    def kinds(self) -> Mapping[str, StackMember]:
        """Profile, '' for this machine's own CPU -> the first agent that emulates it."""
        found = dict[str, StackMember]()
        for member in self.agents:
            found.setdefault(member.emulate, member)
        return found

    @property
    def etcd(self) -> tuple[StackMember, ...]:
        return tuple(member for member in self.members if member.role == ETCD)

    @property
    def coordinators(self) -> tuple[StackMember, ...]:
        return tuple(member for member in self.members if member.role == "coordinator")

    @property
    def coordinator(self) -> StackMember:
        """The only coordinator, or the first."""
        return self.coordinators[0]

    def dial_address(self, address: str) -> str:
        """host:port by which other members reach what listens on `address`."""
        return relay_address(address) if self.relayed else address

    def coordinator_addresses(self, use: str) -> str:
        """Addresses of all coordinators for this use, separated by commas."""
        return ",".join(member.addresses[use] for member in self.coordinators)

    def replicas(self, member: StackMember) -> tuple[StackMember, ...]:
        """All members that share this member's role and state, itself included."""
        return tuple(one for one in self.members if (one.role, one.region) == (member.role, member.region))

    @property
    def gateways(self) -> tuple[StackMember, ...]:
        return tuple(member for member in self.members if member.role == "gateway")

    @property
    def broker(self) -> StackMember | None:
        return next((member for member in self.members if member.role == "broker"), None)

    @property
    def agents(self) -> tuple[StackMember, ...]:
        return tuple(member for member in self.members if member.role == "agent")


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """SHOAL_DEV_DIR, else the user's state folder."""
    if found := environment.get("SHOAL_DEV_DIR"):
        return Path(found)
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "shoal" / "dev"


def installed_simulators() -> str:
    """Vendors' simulators that run here, as `shoal-agent run --simulate` takes them."""
    is_there = platform.machine() == "x86_64" and find_spec("onnxruntime_qnn") is not None
    return "htp" if is_there else ""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """Emulated agents of one kind, NAME-1 .. NAME-COUNT, each in a site of its own."""

    # Begins their names, and is their node label `group`.
    name: str
    # How many there are; their numbers have leading zeros, so that names sort.
    count: int
    # Device profile that each emulates.
    profile: str = SMALL_PROFILE

    @classmethod
    def parse(cls, text: str) -> "AgentGroup":
        """`NAME=COUNT` or `NAME=COUNT:PROFILE`. Raises ShoalError(FIELD_INVALID | NAME_INVALID)."""
        name, equals, rest = text.partition("=")
        number, _, profile = rest.partition(":")
        if not equals or not (number.isascii() and number.isdecimal()) or len(number) > len(str(MAX_AGENTS)):
            wanted = f"NAME=COUNT or NAME=COUNT:PROFILE, of 1 to {MAX_AGENTS} agents"
            raise refuse(Code.FIELD_INVALID, f"fleet {text!r:.80}", wanted, "pass --fleet shop=40")
        return cls(check_name(name, "fleet"), int(number), profile or SMALL_PROFILE)

    def members(self, region: str) -> Iterator["StackMember"]:
        """The group's agents, without addresses."""
        for number in range(1, self.count + 1):
            name = f"{self.name}-{number:0{len(str(self.count))}d}"
            price = PROFILE_PRICES.get(self.profile, PRICES["plain-cpu"])
            labels = {"price": f"{price:.4g} USD/h", "site": name, GROUP_LABEL: self.name}
            yield StackMember(name, "agent", self.profile, labels, {}, region)

    def __str__(self) -> str:
        return f"{self.count} agents {self.name}-.. that emulate {self.profile}"


def fleet_of(count: int) -> tuple[tuple[str, str], ...]:
    """(name, profile) of the first `count` agents."""
    if not 1 <= count <= MAX_AGENTS:
        raise refuse(Code.FIELD_INVALID, f"{count} agents", f"1 to {MAX_AGENTS} on one machine", "pass --agents N")
    more = tuple((f"plain-cpu-{index}", "") for index in range(2, count - len(FLEET) + 2))
    return (*FLEET, *more)[:count]


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `dev up` is asked for."""

    # Name of the first region; the others append `-2`, `-3`, ..
    region: str = REGION
    # Agents in each region.
    agents: int = 4
    # Carrier of the agents' links: grpc or mqtt.
    link: str = "grpc"
    # 1 to 8.
    regions: int = 1
    # Replicas of the federation service that the regions join; 0: no federation.
    federation: int = 0
    # sqlite or etcd.
    store: str = "sqlite"
    # Agents in each region but the first; None: as many as `agents`.
    neighbours: int | None = None
    # Coordinators of the first region; the others have one each.
    coordinators: int = 1
    # (name, profile) of each region's agents; empty: the first `agents` of `FLEET`.
    fleet: tuple[tuple[str, str], ...] = ()
    # Emulated devices take their profile's wake time multiplied by this.
    wake_scale: float = 1.0
    # As in `StackLayout`.
    relayed: bool = True
    # As in `StackMember`, of the first agent of each region.
    simulate: str = ""
    # Further agents of the first region.
    groups: tuple[AgentGroup, ...] = ()

    @classmethod
    def from_stack(cls, stack: StackLayout) -> "StackOptions":
        groups = _groups_of(stack.agents)
        agents, *others = (len(stack.for_region(region).agents) for region in stack.regions)
        agents -= sum(group.count for group in groups)
        neighbours = others[0] if others and others[0] != agents else None
        store = ETCD if stack.etcd else "sqlite"
        return cls(
            stack.region,
            agents,
            stack.link,
            len(stack.regions),
            len(stack.federation),
            store,
            neighbours,
            len(stack.for_region(stack.region).coordinators),
            relayed=stack.relayed,
            simulate=stack.agents[0].simulate if stack.agents else "",
            groups=groups,
        )

    def __str__(self) -> str:
        regions = f", {self.regions} regions" if self.regions > 1 else ""
        federation = f", {count_of(self.federation, 'federation replica')}" if self.federation else ""
        store = ", state in etcd" if self.store == ETCD else ""
        neighbours = "" if self.neighbours is None else f", {count_of(self.neighbours, 'agent')} in each other"
        coordinators = f", {self.coordinators} coordinators" if self.coordinators > 1 else ""
        relays = "" if self.relayed else ", without relays"
        simulated = f", simulating {self.simulate}" if self.simulate else ""
        groups = "".join(f", {group}" for group in self.groups)
        more = f"{groups}{coordinators}{regions}{neighbours}{federation}{store}{relays}{simulated}"
        return f"region {self.region} with {count_of(self.agents, 'agent')} on {self.link} links{more}"


def compose(asked: StackOptions, ports: Mapping[str, int]) -> StackLayout:
    """ports: a free port for each of `port_names`. Raises ShoalError(FIELD_INVALID)."""
    members = tuple(
        replace(
            member,
            addresses={use: f"{MEMBER_HOST}:{ports[f'{member.name}.{use}']}" for use in _port_uses(member.role, asked)},
        )
        for member in _members(asked)
    )
    return StackLayout(asked.region, members, 1.0, asked.link, asked.wake_scale, asked.relayed)


def port_names(asked: StackOptions) -> tuple[str, ...]:
    """Raises ShoalError(FIELD_INVALID)."""
    return tuple(f"{member.name}.{use}" for member in _members(asked) for use in _port_uses(member.role, asked))


def _members(asked: StackOptions) -> tuple[StackMember, ...]:
    """All members without addresses, in the order in which they start. Names of the first region have no prefix."""
    if not 1 <= asked.regions <= 8:
        raise refuse(Code.FIELD_INVALID, f"{asked.regions} regions", "1 to 8 on one machine", "pass --regions N")
    most = 5 if asked.store == ETCD else 1
    replicas = (
        ("coordinators", asked.coordinators, 1, "--coordinators"),
        ("federation replicas", asked.federation, 0, "--federation-replicas"),
    )
    for what, count, least, flag in replicas:
        if not least <= count <= most:
            raise refuse(
                Code.FIELD_INVALID,
                f"{count} {what} on {asked.store}",
                f"{least} to {most}",
                "pass --store etcd: replicas share a store" if most == 1 else f"pass {flag} N",
            )
    members = [
        StackMember(f"{ETCD}-{number}", ETCD, "", {}, {}, "")
        for number in range(1, ETCD_MEMBERS + 1)
        if asked.store == ETCD
    ]
    members += [
        StackMember(f"{FEDERATION}-{number}", FEDERATION, "", {}, {}, FEDERATION)
        for number in range(1, asked.federation + 1)
    ]
    for number in range(1, asked.regions + 1):
        region = asked.region if number == 1 else f"{asked.region}-{number}"
        before = "" if number == 1 else f"{region}-"
        coordinators = asked.coordinators if number == 1 else 1
        members += [
            StackMember(f"{before}{name}", role, "", {}, {}, region)
            for name, role in _non_agent_members(asked.link, coordinators)
        ]
        count = asked.agents if number == 1 or asked.neighbours is None else asked.neighbours
        for index, (name, profile) in enumerate(asked.fleet or fleet_of(count)):
            price = PRICES.get(name, PRICES["plain-cpu"]) / number
            labels = {"price": f"{price:.4g} USD/h", "site": SITES.get(name, "hall")}
            simulate = asked.simulate if index == 0 else ""
            members.append(StackMember(before + name, "agent", profile, labels, {}, region, simulate))
        if number == 1:
            members += _group_members(asked.groups, region, MAX_AGENTS - count)
    for name, uses in Counter(member.name for member in members).items():
        if uses > 1:
            raise refuse(Code.FIELD_INVALID, f"{uses} parts called {name}", "names of their own", "rename the fleet")
    return tuple(members)


def _group_members(groups: Sequence[AgentGroup], region: str, room: int) -> Iterator[StackMember]:
    """room: how many more agents there may be. Each group has a name of its own, by which `_groups_of` finds it."""
    for name, uses in Counter(group.name for group in groups).items():
        if uses > 1:
            raise refuse(Code.FIELD_INVALID, f"{uses} fleets called {name}", "names of their own", "rename one fleet")
    total = sum(group.count for group in groups)
    if total > room or not all(group.count for group in groups):
        asked = ", ".join(f"{group.count} of {group.name}" for group in groups)
        found, wanted = f"a fleet of {asked}", f"1 to {room} more agents on this machine"
        raise refuse(Code.FIELD_INVALID, found, wanted, "ask for other numbers: --fleet NAME=COUNT")
    for group in groups:
        yield from group.members(region)


def _groups_of(agents: Sequence[StackMember]) -> tuple[AgentGroup, ...]:
    counts = Counter((member.labels[GROUP_LABEL], member.emulate) for member in agents if GROUP_LABEL in member.labels)
    return tuple(AgentGroup(name, count, profile) for (name, profile), count in counts.items())


_USES: Final = {
    ETCD: ("client", "peer"),
    FEDERATION: ("link", "enrol", "metrics"),
    "broker": ("mqtt",),
    "coordinator": ("link", "enrol", "metrics", "dashboard"),
    "gateway": ("data", "metrics", "front-metrics"),
    "agent": ("data", "metrics", "front-metrics"),
}


def _port_uses(role: str, asked: StackOptions) -> tuple[str, ...]:
    """Models travel on the link's own port over gRPC. Only members of a federation have a port for peers."""
    if role != "coordinator":
        return _USES[role]
    models = ("models",) if asked.link == "mqtt" else ()
    return (*_USES[role], *models, *(("peers",) if asked.federation else ()))


def _non_agent_members(link: str, coordinators: int) -> tuple[tuple[str, str], ...]:
    """(name, role) of a region's members except agents, in the order in which they start. A member that is alone in its
    role is named after it."""
    names = [f"coordinator-{number}" for number in range(1, coordinators + 1)] if coordinators > 1 else ["coordinator"]
    return (
        *((("broker", "broker"),) if link == "mqtt" else ()),
        *((name, "coordinator") for name in names),
        ("gateway", "gateway"),
    )


MEMBER_HOST: Final = "127.0.0.1"
RELAY_HOST: Final = "127.0.0.2"


def relay_address(address: str) -> str:
    """Where the relay of `address` listens; see link_shaping.py."""
    member = HostPort.parse(address)
    return str(HostPort(RELAY_HOST, member.port)) if member.host == MEMBER_HOST else address


def ca_folder(folder: Path, replicas: Sequence[StackMember]) -> Path:
    """Folder of the CA of replicas that share their state: the folder of the only one, or a shared one."""
    one = replicas[0]
    return folder / (one.name if len(replicas) == 1 else f"{one.region}-shared")


FILE: Final = "stack.json"
"""Of a stack's layout, in its folder."""


def save(folder: Path, stack: StackLayout) -> None:
    """Raises OSError, on a full disk for one, and then leaves what was there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = folder / f".{FILE}.new"
    try:
        beside.write_text(json.dumps(asdict(stack), indent=1))
        beside.replace(folder / FILE)
    except OSError as cause:
        beside.unlink(missing_ok=True)
        raise OSError(cause.errno, cause.strerror, str(folder / FILE)) from cause


def load(folder: Path) -> StackLayout:
    """Raises ShoalError(NOT_FOUND) if no stack was ever started there."""
    try:
        data: dict[str, Any] = json.loads((folder / FILE).read_text())
    except FileNotFoundError as cause:
        raise refuse(Code.NOT_FOUND, f"no local federation in {folder}", "one that runs", "shoal dev up") from cause
    members = tuple(StackMember(**{"region": data["region"], **member}) for member in data["members"])
    return StackLayout(
        data["region"],
        members,
        data["time_scale"],
        data.get("link", "grpc"),
        data.get("wake_scale", 1.0),
        data.get("relayed", True),
    )

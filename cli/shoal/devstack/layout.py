"""What a local federation consists of and where its files lie; values only."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from shoal.types.codes import Code, refuse

REGION: Final = "home"
FEDERATION: Final = "federation"
"""The federation's name, and its members' role."""
ETCD: Final = "etcd"
"""Role of the store's members, which belong to no region."""
ETCD_MEMBERS: Final = 3

FLEET: Final = (
    ("plain-cpu", ""),
    ("edge-npu", "qualcomm-ai100-dm2"),
    ("cloud-gpu", "nvidia-l4"),
    ("small-cpu", "rk3588s"),
)
"""The first agents of a local region and the profile that each emulates; '' is this machine's own CPU, not emulated.
Further agents are plain CPUs."""

PRICES: Final = {
    "plain-cpu": 0.08,
    "edge-npu": 0.05,
    "cloud-gpu": 0.80,
    "small-cpu": 0.01,
}
"""USD/h in the first region, declared by node label `price`, as an operator would; examples, not measurements. The
second region asks half of it, the third a third, so that there is something to trade for."""


SITES: Final = {"cloud-gpu": "cloud", "small-cpu": "pole"}
"""Node label `site`, for selectors."""


TRADING: Final = """apiVersion: shoal/v1
kind: Region
metadata: {{name: {region}}}
spec: {{trade: [{{with: "*", hold_share: 80%}}]}}
"""
"""What a region of a local federation begins with: it works for all the others, who are few and share its devices."""


@dataclass(frozen=True, slots=True)
class Member:
    """One program of the stack. name: also its identity's, but for a coordinator's. region: whose it is, or the
    federation's name. emulate: a profile, or ''. addresses: host:port by use (grpc, rest, token, ..)."""

    name: str
    role: str
    emulate: str
    labels: Mapping[str, str]
    addresses: Mapping[str, str]
    region: str = REGION


@dataclass(frozen=True, slots=True)
class Stack:
    """A local federation as `dev up` was asked for it. region: the first, where things are applied by default. link:
    grpc or mqtt. wake_scale: emulated devices that slept wake in so many times their profile's time."""

    region: str
    members: tuple[Member, ...]
    time_scale: float
    link: str = "grpc"
    wake_scale: float = 1.0

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(member.region for member in self.members if member.role == "coordinator"))

    def of(self, region: str) -> "Stack":
        """One region of it, alone."""
        return replace(self, region=region, members=tuple(one for one in self.members if one.region == region))

    @property
    def federation(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == FEDERATION)

    @property
    def etcd(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == ETCD)

    @property
    def coordinators(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "coordinator")

    @property
    def coordinator(self) -> Member:
        """The only one, or the first."""
        return self.coordinators[0]

    def at(self, use: str) -> str:
        """Where all coordinators listen for this, with commas."""
        return ",".join(member.addresses[use] for member in self.coordinators)

    def replicas(self, member: Member) -> tuple[Member, ...]:
        """All that do the same on the same state, this one among them."""
        return tuple(one for one in self.members if (one.role, one.region) == (member.role, member.region))

    @property
    def gateways(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "gateway")

    @property
    def broker(self) -> Member | None:
        return next((member for member in self.members if member.role == "broker"), None)

    @property
    def agents(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.role == "agent")


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """SHOAL_DEV_DIR, else the user's state folder."""
    if found := environment.get("SHOAL_DEV_DIR"):
        return Path(found)
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "shoal" / "dev"


def fleet_of(count: int) -> tuple[tuple[str, str], ...]:
    """(name, profile) of the first `count` agents."""
    if not 1 <= count <= 64:
        raise refuse(Code.FIELD_INVALID, f"{count} agents", "1 to 64 on one machine", "pass --agents N")
    more = tuple((f"plain-cpu-{index}", "") for index in range(2, count - len(FLEET) + 2))
    return (*FLEET, *more)[:count]


@dataclass(frozen=True, slots=True)
class Asked:
    """What `dev up` is asked for. agents: of each region. federation: replicas of the service that the regions join;
    0 for none. neighbours: agents of each region but the first, if not as many. coordinators: of the first region.
    fleet: (name, profile) of the agents of each region, where they are not the first of `FLEET`. slower: so many times
    as much as this machine needs, emulated devices are slowed down, where it has more to do than what they run."""

    region: str = REGION
    agents: int = 4
    link: str = "grpc"
    regions: int = 1
    federation: int = 0
    store: str = "sqlite"
    neighbours: int | None = None
    coordinators: int = 1
    fleet: tuple[tuple[str, str], ...] = ()
    wake_scale: float = 1.0
    slower: float = 1.0

    @classmethod
    def of(cls, stack: Stack) -> "Asked":
        agents, *others = (len(stack.of(region).agents) for region in stack.regions)
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
            len(stack.of(stack.region).coordinators),
        )

    def __str__(self) -> str:
        regions = f", {self.regions} regions" if self.regions > 1 else ""
        federation = f", {self.federation} federation replicas" if self.federation else ""
        store = ", state in etcd" if self.store == ETCD else ""
        neighbours = "" if self.neighbours is None else f", {self.neighbours} agents in each other"
        coordinators = f", {self.coordinators} coordinators" if self.coordinators > 1 else ""
        more = f"{coordinators}{regions}{neighbours}{federation}{store}"
        return f"region {self.region} with {self.agents} agents on {self.link} links{more}"


def compose(asked: Asked, ports: Mapping[str, int]) -> Stack:
    """ports: a free port for each of `needed_ports`. Raises ShoalError(FIELD_INVALID)."""
    members = tuple(
        replace(member, addresses={use: f"{HERE}:{ports[f'{member.name}.{use}']}" for use in _uses(member.role, asked)})
        for member in _members(asked)
    )
    return Stack(asked.region, members, 1.0, asked.link, asked.wake_scale)


def needed_ports(asked: Asked) -> tuple[str, ...]:
    """Raises ShoalError(FIELD_INVALID)."""
    return tuple(f"{member.name}.{use}" for member in _members(asked) for use in _uses(member.role, asked))


def _members(asked: Asked) -> tuple[Member, ...]:
    """Without addresses, in the order in which they start. Those of the first region do not bear its name."""
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
        Member(f"{ETCD}-{number}", ETCD, "", {}, {}, "") for number in range(1, ETCD_MEMBERS + 1) if asked.store == ETCD
    ]
    members += [
        Member(f"{FEDERATION}-{number}", FEDERATION, "", {}, {}, FEDERATION)
        for number in range(1, asked.federation + 1)
    ]
    for number in range(1, asked.regions + 1):
        region = asked.region if number == 1 else f"{asked.region}-{number}"
        before = "" if number == 1 else f"{region}-"
        coordinators = asked.coordinators if number == 1 else 1
        members += [
            Member(f"{before}{name}", role, "", {}, {}, region) for name, role in _leading(asked.link, coordinators)
        ]
        count = asked.agents if number == 1 or asked.neighbours is None else asked.neighbours
        for name, profile in asked.fleet or fleet_of(count):
            price = PRICES.get(name, PRICES["plain-cpu"]) / number
            labels = {"price": f"{price:.4g} USD/h", "site": SITES.get(name, "hall")}
            members.append(Member(before + name, "agent", profile, labels, {}, region))
    return tuple(members)


_USES: Final = {
    ETCD: ("client", "peer"),
    FEDERATION: ("link", "enrol", "metrics"),
    "broker": ("mqtt",),
    "coordinator": ("link", "enrol", "metrics"),
    "gateway": ("grpc", "rest", "token", "metrics", "front-metrics"),
    "agent": ("grpc", "rest", "token", "metrics", "front-metrics"),
}


def _uses(role: str, asked: Asked) -> tuple[str, ...]:
    """Over gRPC models come on the link's own port. Peers call only who is in a federation."""
    if role != "coordinator":
        return _USES[role]
    models = ("models",) if asked.link == "mqtt" else ()
    return (*_USES[role], *models, *(("peers",) if asked.federation else ()))


def _leading(link: str, coordinators: int) -> tuple[tuple[str, str], ...]:
    """Name and role of a region's members but its agents, in the order in which they start. Who is the only one of its
    role is called by it."""
    names = [f"coordinator-{number}" for number in range(1, coordinators + 1)] if coordinators > 1 else ["coordinator"]
    return (
        *((("broker", "broker"),) if link == "mqtt" else ()),
        *((name, "coordinator") for name in names),
        ("gateway", "gateway"),
    )


HERE: Final = "127.0.0.1"
ROAD: Final = "127.0.0.2"


def road(address: str) -> str:
    """host:port by which other members reach what listens on `address`; see roads.py."""
    host, _, port = address.rpartition(":")
    return f"{ROAD}:{port}" if host == HERE else address


def shared(folder: Path, replicas: Sequence[Member]) -> Path:
    """Where the CA of these lies, who are on one state: the folder of the only one, or one of their own."""
    one = replicas[0]
    return folder / (one.name if len(replicas) == 1 else f"{one.region}-shared")


def save(folder: Path, stack: Stack) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "stack.json").write_text(json.dumps(asdict(stack), indent=1))


def load(folder: Path) -> Stack:
    """Raises ShoalError(NOT_FOUND) when no stack was ever started there."""
    try:
        data: dict[str, Any] = json.loads((folder / "stack.json").read_text())
    except FileNotFoundError as cause:
        raise refuse(Code.NOT_FOUND, f"no local federation in {folder}", "one that runs", "shoal dev up") from cause
    members = tuple(Member(**{"region": data["region"], **member}) for member in data["members"])
    return Stack(data["region"], members, data["time_scale"], data.get("link", "grpc"), data.get("wake_scale", 1.0))

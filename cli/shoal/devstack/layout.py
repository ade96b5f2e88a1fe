"""What a local federation consists of and where its files lie; values only."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from shoal.types.codes import Code, refuse

REGION: Final = "home"
TENANT: Final = "default"

FLEET: Final = (
    ("plain-cpu", ""),
    ("edge-npu", "qualcomm-ai100-dm2"),
    ("cloud-gpu", "nvidia-l4"),
    ("small-cpu", "rk3588s"),
)
"""The first agents of a local region and the profile that each emulates; '' is this machine's own CPU, not emulated.
Further agents are plain CPUs."""

PRICES: Final = {
    "plain-cpu": "0.08 USD/h",
    "edge-npu": "0.05 USD/h",
    "cloud-gpu": "0.80 USD/h",
    "small-cpu": "0.01 USD/h",
}
"""Declared by node label `price`, as an operator would; examples, not measurements."""


SITES: Final = {"cloud-gpu": "cloud", "small-cpu": "pole"}
"""Node label `site`, for selectors."""


@dataclass(frozen=True, slots=True)
class Member:
    """One program of the stack. emulate: a profile, or ''. addresses: host:port by use (grpc, rest, token, ..)."""

    name: str
    role: str
    emulate: str
    labels: Mapping[str, str]
    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stack:
    """A local region as `dev up` was asked for it. link: grpc or mqtt."""

    region: str
    members: tuple[Member, ...]
    time_scale: float
    link: str = "grpc"

    @property
    def coordinator(self) -> Member:
        return next(member for member in self.members if member.role == "coordinator")

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


def compose(region: str, count: int, ports: Mapping[str, int], link: str = "grpc") -> Stack:
    """The stack for `count` agents; ports: a free port for each of `needed_ports`."""

    def member(name: str, role: str, emulate: str = "", labels: Mapping[str, str] | None = None) -> Member:
        addresses = {use: f"{HERE}:{ports[f'{name}.{use}']}" for use in _uses(role, link)}
        return Member(name, role, emulate, labels or {}, addresses)

    members = [member(role, role) for role in _leading(link)]
    for name, profile in fleet_of(count):
        members.append(
            member(
                name,
                "agent",
                profile,
                {"price": PRICES.get(name, PRICES["plain-cpu"]), "site": SITES.get(name, "hall")},
            )
        )
    return Stack(region, tuple(members), 1.0, link)


_USES: Final = {
    "broker": ("mqtt",),
    "coordinator": ("link", "enrol", "metrics"),
    "gateway": ("grpc", "rest", "token", "metrics", "front-metrics"),
    "agent": ("grpc", "rest", "token", "metrics", "front-metrics"),
}


def _uses(role: str, link: str) -> tuple[str, ...]:
    """Over gRPC models come on the link's own port."""
    more = ("models",) if role == "coordinator" and link == "mqtt" else ()
    return (*_USES[role], *more)


def _leading(link: str) -> tuple[str, ...]:
    """Members of which there is one, called by their role, in the order in which they start."""
    return (*(("broker",) if link == "mqtt" else ()), "coordinator", "gateway")


def needed_ports(count: int, link: str = "grpc") -> tuple[str, ...]:
    names = [*((role, role) for role in _leading(link)), *((name, "agent") for name, _ in fleet_of(count))]
    return tuple(f"{name}.{use}" for name, role in names for use in _uses(role, link))


HERE: Final = "127.0.0.1"
ROAD: Final = "127.0.0.2"


def road(address: str) -> str:
    """host:port by which other members reach what listens on `address`; see roads.py."""
    host, _, port = address.rpartition(":")
    return f"{ROAD}:{port}" if host == HERE else address


def save(folder: Path, stack: Stack) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "stack.json").write_text(json.dumps(asdict(stack), indent=1))


def load(folder: Path) -> Stack:
    """Raises ShoalError(NOT_FOUND) when no stack was ever started there."""
    try:
        data: dict[str, Any] = json.loads((folder / "stack.json").read_text())
    except FileNotFoundError as cause:
        raise refuse(Code.NOT_FOUND, f"no local federation in {folder}", "one that runs", "shoal dev up") from cause
    members = tuple(Member(**member) for member in data["members"])
    return Stack(data["region"], members, data["time_scale"], data.get("link", "grpc"))

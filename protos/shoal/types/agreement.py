"""What two regions say to each other from an award on, until their agreement ends.

The origin holds the lease and the delegate grants it: the origin counts it from the moment it asked, the delegate from
its answer plus an allowance. Only an answer that echoes the nonce of the newest renewal extends it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey

GUESTS: Final = "guests"
"""Tenant of what a region runs for others: the workload is called as its agreement. No document may name it."""


def home_side(agreement: str) -> str:
    """What a gateway counts requests under that it sent to its own region's replicas while the agreement's were beside
    them in the route: the same workload, seen from the same place."""
    return f"{agreement}/home"


@dataclass(frozen=True, slots=True)
class GatewayRef:
    """A gateway that may meet those of the other region. address: where its mTLS data port is dialled."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Award:
    """agreement: its name, chosen by the origin once for this solicitation and bid: sent twice, it is the same award.
    gateways: of the origin, which may call."""

    agreement: str
    solicitation: str
    bid: str
    origin: str
    workload: WorkloadKey
    term_s: Seconds
    gateways: tuple[GatewayRef, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The delegate's answer to an award; to the same award always the same but for what is left of the lease."""

    agreement: str
    bid: str
    region: str
    lease_s: Seconds
    gateways: tuple[GatewayRef, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """A bid that was not chosen, or an award that the origin does not stand by: its outcome never came."""

    solicitation: str
    bid: str
    origin: str


class Service(StrEnum):
    """How far the delegate is with a workload. starting: it does not serve yet; stopping: notice was given."""

    STARTING = "starting"
    READY = "ready"
    SHORT = "short"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """Since the agreement began, as the sender counted. latency_p95_s: of the newest requests, 0 without any. From the
    origin: at its gateway, the way included; from the delegate: at its own."""

    requests: int
    errors: int
    latency_p95_s: Seconds
    joules: Joules
    energy_source: EnergySource
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """sequence: grows; a lower one changes nothing. nonce: fresh. gateways: of the origin, as they are now.

    ledger_head: digest of the sender's newest ledger entry, for the other to keep. revoked: serials (decimal) of the
    sender's gateways' certificates that the other shall refuse though their time is not over."""

    agreement: str
    sequence: int
    nonce: str
    report: ServiceReport
    gateways: tuple[GatewayRef, ...]
    ledger_head: str
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Renewed:
    """nonce: of the renewal that this answers. revoked: as in `Renewal`, of the delegate's gateways."""

    agreement: str
    nonce: str
    lease_s: Seconds
    service: Service
    report: ServiceReport
    gateways: tuple[GatewayRef, ...]
    ledger_head: str
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """by: the region that ends it, in good order. ends_s: from when this was sent; it serves until then, or until the
    other has said that it does not need it any more (`ends_s` 0)."""

    agreement: str
    by: str
    code: Code
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a counterpart's agreement brought against what its bid had promised: what its reputation is made of.

    Latencies as the origin measured them, less the way. breached: it ended without notice, or short of its service."""

    region: str
    agreement: str
    promised_p95_s: Seconds
    delivered_p95_s: Seconds
    requests: int
    breached: bool


@dataclass(frozen=True, slots=True)
class ReportContent:
    """What a region tells its federation: new records of others, and new entries of its ledger, in order, to keep."""

    delivered: tuple[Delivered, ...]
    entries: tuple[LedgerEntry, ...]

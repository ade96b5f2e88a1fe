"""Messages between two regions from the award until the end of their agreement.

The delegate grants the lease and the origin holds it. The origin counts it from when it asked; the delegate counts from
its answer, plus an allowance. Only an answer that echoes the nonce of the newest renewal extends the lease.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.chain import LedgerEntry
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds
from shoal.types.workload import WorkloadKey

GUEST_TENANT: Final = "guests"
"""Tenant of the workloads that a region runs for others; each workload is named after its agreement. Documents may not
name this tenant."""


def local_traffic_key(agreement: str) -> str:
    """Key under which a gateway counts requests that it sent to its own region's replicas while the route also listed
    those of the agreement. So both are measured for the same workload from the same place."""
    return f"{agreement}/home"


@dataclass(frozen=True, slots=True)
class GatewayRef:
    """A gateway that may exchange requests with gateways of the other region."""

    name: str
    # Address of its mTLS data port.
    address: str


@dataclass(frozen=True, slots=True)
class Award:
    """The origin's acceptance of a bid."""

    # Name of the agreement. The origin chooses it once for this solicitation and bid, so a repeated award is the same
    # award.
    agreement: str
    # Id of the solicitation.
    solicitation: str
    # Id of the accepted bid.
    bid: str
    # Region that awards.
    origin: str
    # Workload to run.
    workload: WorkloadKey
    # How long the origin means to keep it, by its policy; the length of the lease is the delegate's to say.
    term_s: Seconds
    # Gateways of the origin that may call the delegate.
    gateways: tuple[GatewayRef, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The delegate's answer to an award. A repeated award gets what is left of the lease, and the gateways of then."""

    # Name of the agreement, as awarded.
    agreement: str
    # Id of the accepted bid.
    bid: str
    # The delegate.
    region: str
    # What is left of the lease.
    lease_s: Seconds
    # Gateways of the delegate that the origin may call.
    gateways: tuple[GatewayRef, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Tells a bidder that its bid was not chosen, or that the origin withdraws an award whose answer never came."""

    solicitation: str
    bid: str
    origin: str


class ServiceState(StrEnum):
    """How far the delegate's service of a workload is."""

    # It does not serve yet.
    STARTING = "starting"
    READY = "ready"
    SHORT = "short"
    # Notice was given.
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """Totals since the agreement began, as the sender counted them."""

    # Requests under the agreement, without those that failed through a fault of their client.
    requests: int
    # Of `requests`: not answered, or not before their deadline. The latter count because a region that hangs refuses
    # nothing.
    errors: int
    # 95th percentile of the newest requests; 0 without any. The origin measures at its gateway, so its figure includes
    # the round trip between the regions; the delegate measures at its own gateway.
    latency_p95_s: Seconds
    # Energy of all answered requests.
    joules: Joules
    # Where `joules` comes from.
    energy_source: EnergySource
    # The offer's price times the hours served so far, in USD.
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The origin's request to extend the lease."""

    # Name of the agreement.
    agreement: str
    # Grows with each renewal; one with a lower number changes nothing.
    sequence: int
    # Fresh for each renewal; the answer must echo it.
    nonce: str
    # Service as the origin measured it.
    report: ServiceReport
    # The origin's current gateways.
    gateways: tuple[GatewayRef, ...]
    # Digest of the sender's newest ledger entry. The receiver keeps it, so that a cut ledger shows.
    ledger_head: str
    # Serial numbers (decimal) of certificates of the sender's gateways that the receiver must refuse although they have
    # not expired.
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Renewed:
    """The delegate's answer to a renewal."""

    # Name of the agreement.
    agreement: str
    # Nonce of the renewal that this answers.
    nonce: str
    # New length of the lease.
    lease_s: Seconds
    # How far the delegate's service is.
    service: ServiceState
    # Service as the delegate measured it.
    report: ServiceReport
    # The delegate's current gateways.
    gateways: tuple[GatewayRef, ...]
    # As Renewal.ledger_head.
    ledger_head: str
    # As Renewal.revoked, for the delegate's gateways.
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Notice:
    """Announces the orderly end of an agreement."""

    agreement: str
    # Region that ends the agreement.
    by: str
    # Why it ends.
    code: Code
    # Service continues this long from when the notice was sent, or until the other region says that it no longer needs
    # it (`ends_s` 0).
    ends_s: Seconds


@dataclass(frozen=True, slots=True)
class Delivered:
    """What a counterpart's agreement delivered against what its bid promised. Reputation is computed from these
    records."""

    # The counterpart.
    region: str
    # Name of the agreement.
    agreement: str
    # Latency that the bid promised.
    promised_p95_s: Seconds
    # Latency that the origin measured, less the round trip between the regions.
    delivered_p95_s: Seconds
    # Requests that the figures are based on.
    requests: int
    # True: it ended without notice, or delivered less service than agreed.
    breached: bool


@dataclass(frozen=True, slots=True)
class ReportContent:
    """What a region reports to its federation for safekeeping: new records about others, and new ledger entries, in
    order."""

    delivered: tuple[Delivered, ...]
    entries: tuple[LedgerEntry, ...]
    # History of the store that the entries are from; empty: not told, because the region is of an older version. A
    # region whose store was restored goes on under another one, and so does another region of the same name.
    history: str = ""

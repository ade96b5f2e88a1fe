"""What a region offers to others, and what one asks of the others. Classes of capacity and terms, never nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.types.codes import Refusal
from shoal.types.device import EnergySource
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour
from shoal.types.workload import Limits, Requirements, Weights, WorkloadKey


@dataclass(frozen=True, slots=True)
class CapacityClass:
    """All free devices of one kind in a region, summed. cost: of one such device. cost, joules_per_tflop, carbon: NaN
    where unknown. confidence: share of the devices whose receipt is measured and fresh, 0 to 1."""

    device_class: str
    runtime: str
    precisions: tuple[str, ...]
    devices: int
    free_bytes: Bytes
    cost_usd_per_h: UsdPerHour
    joules_per_tflop: float
    carbon_g_per_kwh: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Advertisement:
    """What a region has to offer now; counts for `lease_s` from when it came. sequence: a lower one is old.

    rtt_s: by region, round trips between the coordinators as this one measured them. heads: by counterpart, the last
    digest of their ledger that this region was shown (`types.chain`); ledger_head: of its own. directory: the version
    that this region has, 0 without any.
    """

    region: str
    sequence: int
    classes: tuple[CapacityClass, ...]
    residency: str
    lease_s: Seconds
    rtt_s: Mapping[str, float] = field(default_factory=dict)
    ledger_head: str = ""
    heads: Mapping[str, str] = field(default_factory=dict)
    directory: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A region as the directory lists it. address: of its coordinator's port for peers. roots: its CAs (PEM).

    advertisement: the newest; None where none counts. trust: delivered against promised, 1 as promised, less below.
    standing: of what others held for it, how much came to something: 1 all, less below.
    """

    region: str
    address: str
    roots: tuple[str, ...]
    residency: str
    advertisement: Advertisement | None = None
    trust: float = 1.0
    standing: float = 1.0


@dataclass(frozen=True, slots=True)
class Directory:
    """Who may trade, as the federation last told. A coordinator keeps it: it can trade on without the federation.

    version: another one says that something else is in it; never 0."""

    federation: str
    version: int
    members: tuple[Member, ...]


def member_of(directory: Directory | None, region: str) -> Member | None:
    """directory: None where none is known."""
    members = directory.members if directory is not None else ()
    return next((member for member in members if member.region == region), None)


def roots_of(directory: Directory | None, region: str) -> tuple[str, ...]:
    """The CAs (PEM) of a region; none of one that is not listed."""
    member = member_of(directory, region)
    return member.roots if member is not None else ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests a second from one origin that another region shall have room for at any time, and at their peak."""

    origin: str
    rate: PerSecond
    peak: PerSecond


@dataclass(frozen=True, slots=True)
class Solicitation:
    """What a region asks of others for one workload: what its policy asks, and nothing about its tenants but a name.

    id: the trade's, never reused. round: 1 as the policy says, 2 after a counter-offer, with what `relax` gives.
    models: profiles of all variants that will do. answer_s: an answer after this comes too late. indicative: for a
    plan, holds nothing. to: patterns of regions. Latency is asked for as the origin's clients see it: each bidder is
    told the way to it (`way_s`, seconds there and back, by region) and counts it.
    """

    id: str
    round: int
    origin: str
    workload: WorkloadKey
    models: tuple[ModelProfile, ...]
    require: Requirements
    limits: Limits
    weights: Weights
    traffic: tuple[Demand, ...]
    max_batch: int
    term_s: Seconds
    answer_s: Seconds
    indicative: bool
    to: tuple[str, ...] = ("*",)
    way_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Offer:
    """id: the bid's, by the bidder. latency_p95_s: at the delegate's gateway, the way between regions not counted.

    cost: what the origin pays. cost, joules (per inference), carbon: NaN where unknown. load_s: until it can serve.
    cached: the model's bytes are there. hold_s: capacity is held so long from when this was sent; 0: nothing is held.
    changes: empty where all is as asked; else what would have to give, as one would type it: then this is a
    counter-offer and holds nothing.
    """

    id: str
    solicitation: str
    round: int
    origin: str
    region: str
    model: str
    precision: str
    replicas: int
    latency_p95_s: Seconds
    cost: UsdPerHour
    joules: Joules
    energy_source: EnergySource
    carbon: GramsPerHour
    load_s: Seconds
    cached: bool
    emulated: bool
    residency: str
    hold_s: Seconds
    changes: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return bool(self.changes)


@dataclass(frozen=True, slots=True)
class Decline:
    """Why a region offers nothing."""

    solicitation: str
    round: int
    region: str
    refusal: Refusal


Answer = Offer | Decline

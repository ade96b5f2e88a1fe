"""What a region offers to others and asks of them: classes of capacity and terms, never nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.types.codes import Refusal
from shoal.types.device import EnergySource
from shoal.types.profile import ModelProfile
from shoal.types.units import Bytes, GramsPerHour, Joules, PerSecond, Seconds, UsdPerHour, Wall
from shoal.types.workload import Limits, Requirements, Weights, WorkloadKey


@dataclass(frozen=True, slots=True)
class CapacityClass:
    """All free devices of one kind in a region, summed."""

    # Kind and model of the devices, and whether they are emulated.
    device_class: str
    # Runtime that the devices run models with.
    runtime: str
    # Precisions that any of them was measured at.
    precisions: tuple[str, ...]
    # Number of free devices.
    devices: int
    # Free memory of all of them together.
    free_bytes: Bytes
    # Mean price of one such device; NaN where unknown.
    cost_usd_per_h: UsdPerHour
    # Mean energy of 10^12 FLOPs; NaN where unknown.
    joules_per_tflop: float
    # Carbon intensity of the region's electricity; NaN where unknown.
    carbon_g_per_kwh: float
    # Share of the devices whose receipt is from a probe and fresh, 0 to 1.
    confidence: float


@dataclass(frozen=True, slots=True)
class Advertisement:
    """What a region has to offer now. It is valid for `lease_s` from its arrival."""

    # Region that advertises.
    region: str
    # Grows with each advertisement; one with a lower number is stale.
    sequence: int
    # Free capacity by kind of device.
    classes: tuple[CapacityClass, ...]
    # Where the region keeps data, as `residency` in policies names it; empty where it declares none.
    residency: str
    # How long the advertisement is valid, from its arrival.
    lease_s: Seconds
    # Round trips between coordinators in seconds, by region, as this region measured them.
    rtt_s: Mapping[str, float] = field(default_factory=dict)
    # Digest of the newest entry of this region's own ledger (`types.chain`).
    ledger_head: str = ""
    # By counterpart: the last ledger digest that this region received from it.
    heads: Mapping[str, str] = field(default_factory=dict)
    # Version of the directory that this region holds; 0 without any.
    directory: int = 0
    # Fingerprints of the federation's CAs that this region trusts; empty: of a version that does not follow them.
    trusted_roots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """A region as the directory lists it."""

    # Name of the region.
    region: str
    # Address of its coordinator's port for peers.
    address: str
    # Its CAs (PEM).
    roots: tuple[str, ...]
    # Where the region keeps data, as `residency` in policies names it; empty where it declares none.
    residency: str
    # Its newest advertisement; None where none is valid.
    advertisement: Advertisement | None = None
    # Delivered service against promised service: 1 as promised, lower where it fell short.
    trust: float = 1.0
    # 1: the capacity that others held for its solicitations led to awards, or none was held. Lower where it was held in
    # vain.
    standing: float = 1.0


@dataclass(frozen=True, slots=True)
class Directory:
    """The regions that may trade, as the federation last sent them. A coordinator stores it, so that it can trade while
    the federation is unreachable."""

    # Name of the federation.
    federation: str
    # Differs whenever the content differs; never 0.
    version: int
    # All regions that may trade.
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class FederationRoots:
    """The federation's own CAs, as it tells its members."""

    # Certificates (PEM) of the CAs, the issuing one first.
    pems: tuple[str, ...]
    # When they last changed, by the federation's clock; grows with each change.
    since: Wall


def member_of(directory: Directory | None, region: str) -> Member | None:
    """The region's entry; None where it is not listed or no directory is known."""
    members = directory.members if directory is not None else ()
    return next((member for member in members if member.region == region), None)


def roots_of(directory: Directory | None, region: str) -> tuple[str, ...]:
    """The CAs (PEM) of a region; empty where it is not listed."""
    member = member_of(directory, region)
    return member.roots if member is not None else ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Request rates from one origin that another region must have capacity for: usual, and at peak."""

    # Name under which the front where requests enter counts them.
    origin: str
    # Usual requests per second.
    rate: PerSecond
    # Requests per second at peak.
    peak: PerSecond


@dataclass(frozen=True, slots=True)
class Solicitation:
    """A region's request to others to run one workload: what its policy requires, and of its tenants nothing but a
    name."""

    # Id of the negotiation, never reused.
    id: str
    # 1: terms as the policy states them. 2: after a counter-offer, with what `relax` allows.
    round: int
    # Region that asks.
    origin: str
    # Workload to run.
    workload: WorkloadKey
    # Profiles of all acceptable variants of the model.
    models: tuple[ModelProfile, ...]
    # What a candidate must meet. The latency bound holds as the origin's clients see it.
    require: Requirements
    # Limits on cost, energy and carbon.
    limits: Limits
    # Objective that offers are compared under.
    weights: Weights
    # Expected requests by origin.
    traffic: tuple[Demand, ...]
    # Largest batch that the workload's document allows.
    max_batch: int
    # Length of one term of the agreement; it renews.
    term_s: Seconds
    # An answer later than this is ignored.
    answer_s: Seconds
    # True: asked for a plan, so the offer holds no capacity.
    indicative: bool
    # Patterns of the names of regions that may run it.
    to: tuple[str, ...] = ("*",)
    # Round-trip time to each bidder in seconds, by region. A bidder adds its own when it checks the latency bound.
    way_s: Mapping[str, float] = field(default_factory=dict)
    # Longest time that a request waits for others of its batch.
    batch_delay_s: Seconds = Seconds(0.0)
    # Whether requests of unequal lengths may be filled up with zeros to share a batch.
    batch_padding: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """A region's answer to a solicitation: a bid, or a counter-offer where `changes` is not empty."""

    # Id of the bid, chosen by the bidder.
    id: str
    # Id of the solicitation that it answers.
    solicitation: str
    # Round of the solicitation that it answers.
    round: int
    # Region that asked.
    origin: str
    # Region that offers.
    region: str
    # Digest of the variant that it would run.
    model: str
    # Precision that it would run at.
    precision: str
    # Number of replicas that it would run.
    replicas: int
    # Predicted at the delegate's gateway, without the round trip between the regions; the slowest replica's.
    latency_p95_s: Seconds
    # What the origin pays for all replicas; NaN where unknown.
    cost: UsdPerHour
    # Energy of one inference; NaN where unknown.
    joules: Joules
    # Where `joules` comes from.
    energy_source: EnergySource
    # Carbon emissions of all replicas; NaN where unknown.
    carbon: GramsPerHour
    # How long until all replicas can serve.
    load_s: Seconds
    # True: the region already has the model's bytes.
    cached: bool
    # What would stand in for a real device: `emulated` or `simulated`; empty: nothing.
    stand_in: str
    # Where the region keeps data, as `residency` in policies names it; the region's name where it declares none.
    residency: str
    # How long capacity is held, from when the offer was sent; 0: nothing is held.
    hold_s: Seconds
    # Empty where everything is as requested. Otherwise what would have to change, as one would type it: the offer is
    # then a counter-offer and holds nothing.
    changes: tuple[str, ...] = ()

    @property
    def is_counter(self) -> bool:
        return bool(self.changes)


@dataclass(frozen=True, slots=True)
class Decline:
    """Why a region makes no offer."""

    # Id of the solicitation.
    solicitation: str
    # Round of the solicitation.
    round: int
    # Region that declines.
    region: str
    refusal: Refusal


Answer = Offer | Decline

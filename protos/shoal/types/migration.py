"""A live move of a replica: what its new place must show before it takes requests, and what it showed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.codes import Code
from shoal.types.units import Bytes, Seconds

DRAIN_S: Final = Seconds(30.0)
"""What a replica that goes has to finish in, where nothing says otherwise; and the most that a node allows it."""


class Against(StrEnum):
    """What a new replica's answers are compared with."""

    SOURCE = "source"
    """The replica that it takes over from, given the same inputs."""
    REFERENCE = "reference"
    """What the model answered when it was first ready anywhere."""
    NONE = "none"


class Recording(StrEnum):
    """Of a model without a reference: who makes one."""

    AWAITED = "awaited"
    """Another replica; this one waits, and is then judged by it."""
    HERE = "here"
    """This replica: what it answers is the reference from then on."""


class InputsFrom(StrEnum):
    CAPTURED = "captured"
    """Requests that the source has had, kept in memory with the workload's consent."""
    SAMPLES = "samples"
    """The workload's own, pushed with its model."""
    GENERATED = "generated"
    """Made from the model's signature, within the ranges that its graph allows."""


class Metric(StrEnum):
    """Each over one output of one input. MAX_ABS: the largest absolute difference. MAX_REL: that, relative to the
    larger magnitude. COSINE: of both, flattened. TOP_K: share of the expected k largest along the last axis found."""

    MAX_ABS = "max_abs"
    MAX_REL = "max_rel"
    COSINE = "cosine"
    TOP_K = "top_k"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """output: its name; empty: every output that no other tolerance names. bound: the most for MAX_ABS and MAX_REL, the
    least for COSINE and TOP_K. k: of TOP_K."""

    output: str
    metric: Metric
    bound: float
    k: int = 5


DAY_MINUTES: Final = 24 * 60
LEAST_SAMPLES: Final = 8
"""Fewer show nothing."""


@dataclass(frozen=True, slots=True)
class PackRef:
    """A workload's own inputs to verify with, by digest. count: of samples. answers: whether it says, for each, what
    the model is to answer: then it is a reference."""

    digest: str
    size_bytes: Bytes
    count: int
    answers: bool


@dataclass(frozen=True, slots=True)
class Window:
    """Hours of the week, by the clock on a wall in `zone` (a name of the tz database).

    days: on which it opens, Monday is 0. opens, closes: minutes since midnight, `closes` up to DAY_MINUTES; where it is
    not after `opens` it closes on the day after."""

    days: tuple[int, ...]
    opens: int
    closes: int
    zone: str


@dataclass(frozen=True, slots=True)
class MigrationRule:
    """How a replica that serves gives its place to another.

    against, inputs, samples, tolerances: what the new one must show; without tolerances those of its precision count.
    steps: shares of the old one's requests that the new one takes, one after the other, the last of them 1; hold_s:
    each is held so long. guard_errors: the share of its requests that the new one may fail in a step; guard_p95: how
    many times as slow it may be as the old one is, or as it was expected to be where that is slower. drain_s: what the
    old one has to finish in. max_concurrent: replicas of the workload that move at once. unasked: moves that nobody
    asked for may begin. gain: they, and documents that changed, move a replica only to where its objective is better by
    this share, unless something forces it away. cooldown_s: a move that was given up is not tried again before, and
    none that nobody asked for begins sooner after another. windows: when such may begin; none: at any time. advisory:
    answers that differ are told, and the move goes on. pack: the workload's samples; None where it has none.
    allow_gap_s: how long nobody may serve where a device cannot hold both; 0: it waits.
    """

    against: Against = Against.SOURCE
    inputs: InputsFrom = InputsFrom.GENERATED
    samples: int = 8
    tolerances: tuple[Tolerance, ...] = ()
    steps: tuple[float, ...] = (0.25, 1.0)
    hold_s: Seconds = Seconds(2.0)
    guard_errors: float = 0.01
    guard_p95: float = 3.0
    drain_s: Seconds = DRAIN_S
    max_concurrent: int = 1
    gain: float = 0.1
    cooldown_s: Seconds = Seconds(300.0)
    windows: tuple[Window, ...] = ()
    advisory: bool = False
    pack: PackRef | None = None
    unasked: bool = False
    allow_gap_s: Seconds = Seconds(0.0)


def has_answers(rule: MigrationRule) -> bool:
    """Whether the workload's own samples say what is to be answered."""
    return rule.pack is not None and rule.pack.answers


@dataclass(frozen=True, slots=True)
class Verification:
    """What a replica must show, once it is warm, before it is READY. source, source_node, source_address: the replica
    it is compared with, and the front that serves that; empty unless against SOURCE. pack: digest of the artifact with
    the workload's samples or the reference's inputs and outputs; empty where neither is asked for. samples: inputs to
    compare. within_s: until then it has passed or failed. advisory: as MigrationRule has it. agreement: what it is
    compared with answers in another region, under this agreement; then source_node is a gateway of this region that
    leads there. beside: it serves on meanwhile, and its answers are what the other's are judged by. recording: there is
    no reference yet; then `pack` has no more than inputs to record one with."""

    migration: str
    against: Against
    inputs: InputsFrom
    samples: int
    tolerances: tuple[Tolerance, ...]
    within_s: Seconds
    source: str = ""
    source_node: str = ""
    source_address: str = ""
    pack: str = ""
    pack_bytes: Bytes = Bytes(0)
    advisory: bool = False
    agreement: str = ""
    beside: bool = False
    recording: Recording | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Who may ask a replica for its answers, and for the inputs that it has captured: the agent of `node`, for this
    migration. Any other is refused, whoever it is."""

    migration: str
    node: str


@dataclass(frozen=True, slots=True)
class Handover:
    """Where the sessions of a replica go now, one after the other at a step boundary: to another replica of its
    workload, at the front of its node."""

    migration: str
    assignment: str
    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Giver:
    """Who may hand sessions to a replica: the agent of `node`, for this migration. Any other is refused."""

    migration: str
    node: str


@dataclass(frozen=True, slots=True)
class Drift:
    """The worst that one output showed over all inputs."""

    output: str
    metric: Metric
    bound: float
    worst: float
    passed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a verification. inputs: what was really used; samples: how many. code, reason: why it did not pass;
    None where it did. inputs_sha256: over the inputs in their order, as proof of what was compared (no input leaves its
    node by this). pack: digest of the reference. recorded: nothing was compared; the reference was made of its answers.
    """

    migration: str
    passed: bool
    code: Code | None
    reason: str
    against: Against
    inputs: InputsFrom
    samples: int
    drifts: tuple[Drift, ...] = ()
    inputs_sha256: str = ""
    pack: str = ""
    recorded: bool = False


def admits(verdict: Verdict, *, advisory: bool) -> bool:
    """Whether a replica that showed this may take requests: it passed, or was compared and differs where that is only
    to be told."""
    return verdict.passed or (advisory and verdict.code is Code.VERIFY_FAILED and verdict.samples > 0)

"""Live migration of a replica: what its replacement must show before it takes requests, and what it showed."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shoal.types.codes import Code
from shoal.types.units import Bytes, Seconds

DRAIN_S: Final = Seconds(30.0)
"""How long a replica that ends has to finish its requests, where nothing sets another time; also the most that a node
allows."""
PACK_BYTES: Final = 64 * 2**20
"""Largest pack of samples: the file, and separately all its arrays together."""
UPGRADE_REMEDY: Final = (
    "if they differ on purpose: `migration: {verify: {on_fail: continue}}`, or `against: reference` or `none`, in its "
    "policy; if not: `shoal rollback`"
)
"""What an operator can do when a new model's answers differ from those of the serving one. `plan` and the refusal of
the migration show the same text."""


class Against(StrEnum):
    """What a new replica's answers are compared with."""

    # The replica that it takes over from, given the same inputs.
    SOURCE = "source"
    # What the model answered when it was first ready anywhere.
    REFERENCE = "reference"
    NONE = "none"


class Recording(StrEnum):
    """For a model without a reference: which replica records one."""

    # Another replica records it. This one waits, and is then compared with it.
    AWAITED = "awaited"
    # This replica records it: its answers are the reference from then on.
    HERE = "here"


class InputsFrom(StrEnum):
    # Requests that the source has received, kept in memory with the workload's consent.
    CAPTURED = "captured"
    # The workload's own samples, pushed with its model.
    SAMPLES = "samples"
    # Generated from the model's signature, within the ranges that its graph allows.
    GENERATED = "generated"


class Metric(StrEnum):
    """Each metric compares one output of one input with what is expected."""

    # The largest absolute difference.
    MAX_ABS = "max_abs"
    # The largest absolute difference, relative to the larger magnitude.
    MAX_REL = "max_rel"
    # Cosine similarity of both, flattened.
    COSINE = "cosine"
    # Share of the expected k largest elements along the last axis that are found.
    TOP_K = "top_k"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bound on one metric of one output."""

    # Name of the output; empty: every output that no other tolerance names.
    output: str
    metric: Metric
    # The most for MAX_ABS and MAX_REL, the least for COSINE and TOP_K.
    bound: float
    # The k of TOP_K; the other metrics ignore it.
    k: int = 5


DAY_MINUTES: Final = 24 * 60
LEAST_SAMPLES: Final = 8
"""Fewer samples are no evidence."""


@dataclass(frozen=True, slots=True)
class PackRef:
    """A workload's own inputs for verification, by digest."""

    digest: str
    size_bytes: Bytes
    # Number of samples.
    count: int
    # True: the pack states the expected answer of each sample, so it is a reference.
    answers: bool


@dataclass(frozen=True, slots=True)
class MigrationWindow:
    """Hours of the week, in local time of `zone`."""

    # Days on which it opens; Monday is 0.
    days: tuple[int, ...]
    # Minutes since midnight.
    opens: int
    # Minutes since midnight, up to DAY_MINUTES. If not after `opens`, it closes on the day after.
    closes: int
    # A name of the tz database.
    zone: str


@dataclass(frozen=True, slots=True)
class MigrationRule:
    """How a serving replica is replaced by another."""

    # What the new replica's answers are compared with.
    against: Against = Against.SOURCE
    # Where the inputs of the comparison come from.
    inputs: InputsFrom = InputsFrom.GENERATED
    # Number of inputs to compare.
    samples: int = 8
    # Bounds that its answers must meet; empty: the defaults of its precision.
    tolerances: tuple[Tolerance, ...] = ()
    # Shares of the old replica's requests that the new one takes, one step after the other; the last is 1.
    steps: tuple[float, ...] = (0.25, 1.0)
    # How long each step is held.
    hold_s: Seconds = Seconds(2.0)
    # Share of its requests that the new replica may fail in a step, 0 to 1.
    guard_errors: float = 0.01
    # How many times as slow (p95) the new replica may be as the old one, or as predicted for the new one where that is
    # slower.
    guard_p95: float = 3.0
    # How long the old replica has to finish its requests.
    drain_s: Seconds = DRAIN_S
    # How many replicas of the workload may migrate at once.
    max_concurrent: int = 1
    # Automatic migrations, and changed documents, move a replica only to where its objective improves by this share (0
    # to 1), unless something forces it away. Nor does one that comes back take over from what replaced it for less.
    gain: float = 0.1
    # A migration that was given up is not tried again before this time has passed. An automatic migration does not
    # begin sooner than this after another.
    cooldown_s: Seconds = Seconds(300.0)
    # When automatic migrations may begin; empty: at any time.
    windows: tuple[MigrationWindow, ...] = ()
    # True: differing answers are reported, and the migration continues.
    advisory: bool = False
    # The workload's samples; None where it has none.
    pack: PackRef | None = None
    # True: automatic migrations, which neither an operator nor a document requests, may begin.
    automatic: bool = False
    # How long no replica may serve where a device cannot hold both; 0: the migration waits.
    allow_gap_s: Seconds = Seconds(0.0)


def has_answers(rule: MigrationRule) -> bool:
    """Whether the workload's own samples state the expected answers."""
    return rule.pack is not None and rule.pack.answers


@dataclass(frozen=True, slots=True)
class Verification:
    """What a replica must show, once it is warmed up, before it is READY."""

    # Name of the migration.
    migration: str
    # What its answers are compared with.
    against: Against
    # Where the inputs come from.
    inputs: InputsFrom
    # Number of inputs to compare.
    samples: int
    # Bounds that its answers must meet.
    tolerances: tuple[Tolerance, ...]
    # It must pass within this time; otherwise it has failed.
    within_s: Seconds
    # Assignment of the replica that it is compared with; empty unless against SOURCE.
    source: str = ""
    # Node that serves `source`; empty unless against SOURCE.
    source_node: str = ""
    # Address of the front that serves `source`; empty unless against SOURCE.
    source_address: str = ""
    # Digest of the artifact with the workload's samples, or with the reference's inputs and outputs; empty where
    # neither is needed.
    pack: str = ""
    # Size of the artifact that `pack` names.
    pack_bytes: Bytes = Bytes(0)
    # As MigrationRule.advisory.
    advisory: bool = False
    # Set where `source` is in another region, under this agreement. `source_node` is then a gateway of this region that
    # leads there.
    agreement: str = ""
    # True: it keeps serving meanwhile, and its answers are what the other replica's are compared with.
    beside: bool = False
    # Set where no reference exists yet; `pack` then holds at most the inputs to record one with.
    recording: Recording | None = None


@dataclass(frozen=True, slots=True)
class Verifier:
    """Agent that may ask a replica for its answers and its captured inputs: that of `node`, for this migration. Anyone
    else is refused."""

    migration: str
    node: str


@dataclass(frozen=True, slots=True)
class Handover:
    """Where a replica's sessions go now, one after the other at a step boundary: to another replica of the workload, at
    the front of its node."""

    migration: str
    # Replica that takes the sessions.
    assignment: str
    # Node of that replica.
    node: str
    # Address of that node's front.
    address: str


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Agent that may hand sessions to a replica: that of `node`, for this migration. Anyone else is refused."""

    migration: str
    node: str


@dataclass(frozen=True, slots=True)
class Drift:
    """The worst value that one output showed over all inputs."""

    # Name of the output.
    output: str
    # Metric that the values below are of.
    metric: Metric
    # The tolerance's bound: the most for MAX_ABS and MAX_REL, the least for COSINE and TOP_K.
    bound: float
    # The worst value over all inputs.
    worst: float
    # True: `worst` is within `bound`.
    passed: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a verification."""

    # Name of the migration.
    migration: str
    # True: the replica may take requests.
    passed: bool
    # Why it did not pass; None where it did.
    code: Code | None
    # `code` in words; empty where it passed.
    reason: str
    # What the answers were compared with.
    against: Against
    # Where the inputs that were used came from.
    inputs: InputsFrom
    # Number of inputs that were compared.
    samples: int
    # Worst value of each output and metric.
    drifts: tuple[Drift, ...] = ()
    # Digest over the inputs in order, as proof of what was compared. No input leaves its node by it.
    inputs_sha256: str = ""
    # Digest of the reference; empty where there was none.
    pack: str = ""
    # True: nothing was compared; the reference was recorded from its answers.
    recorded: bool = False


def admits(verdict: Verdict, *, advisory: bool) -> bool:
    """Whether a replica with this verdict may take requests. It passed, or the rule is advisory and the answers were
    compared and differ."""
    return verdict.passed or (advisory and verdict.code is Code.VERIFY_FAILED and verdict.samples > 0)

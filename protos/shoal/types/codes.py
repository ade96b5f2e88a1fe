"""Stable codes, and the one form of a refusal.

A code is never renamed or reused, because people script against it and dashboards count it. The same code appears in
the CLI, the API, metrics and the audit log. A refusal is a value (returned, listed, shown); `ShoalError` carries one
when the environment or this program failed.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

_CODE: Final = re.compile("[A-Z][A-Z0-9_]{2,60}")
_PARTS: Final = re.compile(
    "(?:found: (?P<found>.+?))?(?:(?:^|; )wanted: (?P<asked>.+?))?(?:(?:^|; )try: (?P<remedy>.+?))?", re.DOTALL
)
"""What `Refusal.words` writes. The first of several possible ends of a part counts."""


class Code(StrEnum):
    """Every reason that Shoal can give, grouped by who gives it. The text after `=` is the contract."""

    # documents
    YAML_INVALID = "YAML_INVALID"
    YAML_TOO_LARGE = "YAML_TOO_LARGE"
    YAML_TOO_DEEP = "YAML_TOO_DEEP"
    YAML_ALIAS_LIMIT = "YAML_ALIAS_LIMIT"
    YAML_TAG_DENIED = "YAML_TAG_DENIED"
    YAML_DUPLICATE_KEY = "YAML_DUPLICATE_KEY"
    KIND_UNKNOWN = "KIND_UNKNOWN"
    API_VERSION_UNKNOWN = "API_VERSION_UNKNOWN"
    FIELD_UNKNOWN = "FIELD_UNKNOWN"
    FIELD_MISSING = "FIELD_MISSING"
    FIELD_INVALID = "FIELD_INVALID"
    FIELD_WITHOUT_EFFECT = "FIELD_WITHOUT_EFFECT"
    NOT_SUPPORTED_YET = "NOT_SUPPORTED_YET"
    NAME_INVALID = "NAME_INVALID"
    NAME_DUPLICATE = "NAME_DUPLICATE"
    UNIT_MISSING = "UNIT_MISSING"
    UNIT_WRONG = "UNIT_WRONG"
    QUANTITY_INVALID = "QUANTITY_INVALID"
    EXPRESSION_INVALID = "EXPRESSION_INVALID"
    POLICY_COST = "POLICY_COST"
    POLICY_UNREACHABLE = "POLICY_UNREACHABLE"
    POLICY_UNKNOWN = "POLICY_UNKNOWN"
    TENANT_UNKNOWN = "TENANT_UNKNOWN"
    CONSENT_MISSING = "CONSENT_MISSING"
    # a command line that cannot be read
    USAGE = "USAGE"
    # placement: why a candidate is out
    MEMORY_SHORT = "MEMORY_SHORT"
    UTILISATION_SHORT = "UTILISATION_SHORT"
    OP_UNSUPPORTED = "OP_UNSUPPORTED"
    IR_UNSUPPORTED = "IR_UNSUPPORTED"
    OPSET_UNSUPPORTED = "OPSET_UNSUPPORTED"
    # the device takes only models whose shapes are all fixed
    SHAPES_OPEN = "SHAPES_OPEN"
    # a model is to be prepared, and its samples or the node's packages for that are missing, or it gains nothing
    PREPARE_UNAVAILABLE = "PREPARE_UNAVAILABLE"
    PRECISION_DENIED = "PRECISION_DENIED"
    SLO_UNREACHABLE = "SLO_UNREACHABLE"
    SELECTOR_MISMATCH = "SELECTOR_MISMATCH"
    RESIDENCY = "RESIDENCY"
    COST_OVER = "COST_OVER"
    ENERGY_OVER = "ENERGY_OVER"
    CARBON_OVER = "CARBON_OVER"
    POWER_OVER = "POWER_OVER"
    CAPABILITY_STALE = "CAPABILITY_STALE"
    CAPABILITY_UNMEASURED = "CAPABILITY_UNMEASURED"
    SPREAD_CONFLICT = "SPREAD_CONFLICT"
    # a rule of the policy goes by a node label, which the node does not have
    LABEL_MISSING = "LABEL_MISSING"
    NODE_CORDONED = "NODE_CORDONED"
    NODE_SUSPECT = "NODE_SUSPECT"
    NODE_LOST = "NODE_LOST"
    NODE_QUARANTINED = "NODE_QUARANTINED"
    NODE_NOT_READY = "NODE_NOT_READY"
    DEVICE_LOST = "DEVICE_LOST"
    DEVICE_UNREACHABLE = "DEVICE_UNREACHABLE"
    POISONED = "POISONED"
    SIGNATURE_REQUIRED = "SIGNATURE_REQUIRED"
    REPLICAS_SHORT = "REPLICAS_SHORT"
    STANDBY_SHORT = "STANDBY_SHORT"
    NO_CANDIDATE = "NO_CANDIDATE"
    QUOTA = "QUOTA"
    OUTRANKED = "OUTRANKED"
    PREEMPTED = "PREEMPTED"
    PLAN_STALE = "PLAN_STALE"
    WORKLOAD_UNKNOWN = "WORKLOAD_UNKNOWN"
    NODE_UNKNOWN = "NODE_UNKNOWN"
    NOT_FOUND = "NOT_FOUND"
    IN_USE = "IN_USE"
    CONFLICT = "CONFLICT"
    # models
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    MODEL_INVALID = "MODEL_INVALID"
    MODEL_PATH = "MODEL_PATH"
    MODEL_ARCHIVE = "MODEL_ARCHIVE"
    MODEL_DIGEST = "MODEL_DIGEST"
    MODEL_TOO_LARGE = "MODEL_TOO_LARGE"
    CUSTOM_OP_DENIED = "CUSTOM_OP_DENIED"
    SOURCE_DENIED = "SOURCE_DENIED"
    SOURCE_UNREACHABLE = "SOURCE_UNREACHABLE"
    SIGNATURE_EXPIRED = "SIGNATURE_EXPIRED"
    MODEL_ROLLBACK = "MODEL_ROLLBACK"
    PUBLISHER_UNKNOWN = "PUBLISHER_UNKNOWN"
    # signals: price and carbon
    SIGNAL_INVALID = "SIGNAL_INVALID"
    SIGNAL_STALE = "SIGNAL_STALE"
    # running on a device
    DISK_FULL = "DISK_FULL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    FETCH_FAILED = "FETCH_FAILED"
    # the model cannot be made in the precision that was asked for, within the tolerance
    PREPARE_FAILED = "PREPARE_FAILED"
    # the device computes in another precision, and its answers are further from the processor's than the tolerance
    DRIFT_OVER = "DRIFT_OVER"
    LOAD_FAILED = "LOAD_FAILED"
    LOAD_TIMEOUT = "LOAD_TIMEOUT"
    WARMUP_FAILED = "WARMUP_FAILED"
    WORKER_CRASHED = "WORKER_CRASHED"
    WORKER_KILLED = "WORKER_KILLED"
    WORKER_STUCK = "WORKER_STUCK"
    FRONT_STUCK = "FRONT_STUCK"
    COORDINATOR_STUCK = "COORDINATOR_STUCK"
    PACE_MISSED = "PACE_MISSED"
    RUNTIME_FAILED = "RUNTIME_FAILED"
    NOT_CONFINED = "NOT_CONFINED"
    # a request
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    TOO_LARGE = "TOO_LARGE"
    FIELD_TOO_MANY = "FIELD_TOO_MANY"
    TOO_SLOW = "TOO_SLOW"
    OVERLOADED = "OVERLOADED"
    # the tenant's own limits, which its quota sets
    TENANT_RATE = "TENANT_RATE"
    TENANT_CONCURRENCY = "TENANT_CONCURRENCY"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    MODEL_NOT_READY = "MODEL_NOT_READY"
    # no request came for as long as the policy says: the replica is unloaded, and the next request loads it again
    SCALED_TO_ZERO = "SCALED_TO_ZERO"
    REPLICA_UNREACHABLE = "REPLICA_UNREACHABLE"
    REQUEST_CRASHED_WORKER = "REQUEST_CRASHED_WORKER"
    # shared memory that this tenant may not use here, or that does not hold what the request says
    SHM_DENIED = "SHM_DENIED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    # identity
    UNAUTHENTICATED = "UNAUTHENTICATED"
    ROLE_DENIED = "ROLE_DENIED"
    TENANT_DENIED = "TENANT_DENIED"
    FORWARD_DENIED = "FORWARD_DENIED"
    CERT_EXPIRED = "CERT_EXPIRED"
    CERT_NOT_YET_VALID = "CERT_NOT_YET_VALID"
    CERT_UNTRUSTED = "CERT_UNTRUSTED"
    CERT_NAME_INVALID = "CERT_NAME_INVALID"
    CERT_REVOKED = "CERT_REVOKED"
    RENEW_DENIED = "RENEW_DENIED"
    LAST_OPERATOR = "LAST_OPERATOR"
    CSR_DENIED = "CSR_DENIED"
    TOKEN_INVALID = "TOKEN_INVALID"
    TOKEN_USED = "TOKEN_USED"
    TOKEN_EXPIRED = "TOKEN_EXPIRED"
    TLS_REQUIRED = "TLS_REQUIRED"
    NODE_MISMATCH = "NODE_MISMATCH"
    REGION_MISMATCH = "REGION_MISMATCH"
    SIGNATURE_INVALID = "SIGNATURE_INVALID"
    DUPLICATE_IDENTITY = "DUPLICATE_IDENTITY"
    # links and stores
    EPOCH_STALE = "EPOCH_STALE"
    TERM_STALE = "TERM_STALE"
    GENERATION_STALE = "GENERATION_STALE"
    MESSAGE_INVALID = "MESSAGE_INVALID"
    MESSAGE_REPLAYED = "MESSAGE_REPLAYED"
    TOPIC_DENIED = "TOPIC_DENIED"
    TELEMETRY_ABSURD = "TELEMETRY_ABSURD"
    RECEIPT_ABSURD = "RECEIPT_ABSURD"
    CLOCK_SKEW = "CLOCK_SKEW"
    MASS_SILENCE = "MASS_SILENCE"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    STORE_FULL = "STORE_FULL"
    STORE_CORRUPT = "STORE_CORRUPT"
    STORE_DENIED = "STORE_DENIED"
    STATE_CORRUPT = "STATE_CORRUPT"
    COORDINATOR_UNREACHABLE = "COORDINATOR_UNREACHABLE"
    NOT_LEADER = "NOT_LEADER"
    CONTEXT_UNKNOWN = "CONTEXT_UNKNOWN"
    CODE_UNKNOWN = "CODE_UNKNOWN"
    # regions that trade
    FEDERATION_UNREACHABLE = "FEDERATION_UNREACHABLE"
    PEER_UNREACHABLE = "PEER_UNREACHABLE"
    REGION_UNKNOWN = "REGION_UNKNOWN"
    TRADE_DENIED = "TRADE_DENIED"
    ADVERT_INVALID = "ADVERT_INVALID"
    REPLAYED = "REPLAYED"
    BID_UNKNOWN = "BID_UNKNOWN"
    NO_BID = "NO_BID"
    HOLD_SHARE = "HOLD_SHARE"
    HOLD_EXPIRED = "HOLD_EXPIRED"
    HOLD_RELEASED = "HOLD_RELEASED"
    AGREEMENT_UNKNOWN = "AGREEMENT_UNKNOWN"
    AGREEMENT_ENDED = "AGREEMENT_ENDED"
    BREACHED = "BREACHED"
    BETTER_ELSEWHERE = "BETTER_ELSEWHERE"
    LEDGER_BROKEN = "LEDGER_BROKEN"
    DELEGATED = "DELEGATED"
    # migrations
    VERIFY_FAILED = "VERIFY_FAILED"
    VERIFY_IMPOSSIBLE = "VERIFY_IMPOSSIBLE"
    NO_ROOM_FOR_BOTH = "NO_ROOM_FOR_BOTH"
    MOVE_BLOCKED = "MOVE_BLOCKED"
    MOVE_HELD = "MOVE_HELD"
    GUARD_TRIPPED = "GUARD_TRIPPED"
    MOVE_TIMEOUT = "MOVE_TIMEOUT"
    MOVE_CANCELLED = "MOVE_CANCELLED"
    # as many moves wait as may wait at a time
    QUEUE_FULL = "QUEUE_FULL"
    MIGRATION_UNKNOWN = "MIGRATION_UNKNOWN"
    SESSION_LOST = "SESSION_LOST"
    SESSION_MOVED = "SESSION_MOVED"
    SESSION_STEP = "SESSION_STEP"
    SESSION_INVALID = "SESSION_INVALID"
    LEASE_ENDED = "LEASE_ENDED"
    HANDOVER_FAILED = "HANDOVER_FAILED"
    # waits, not failures: why something is not done yet
    WAITING_FOR_LINK = "WAITING_FOR_LINK"
    WAITING_FOR_FETCH = "WAITING_FOR_FETCH"
    WAITING_FOR_PREPARE = "WAITING_FOR_PREPARE"
    WAITING_FOR_LOAD = "WAITING_FOR_LOAD"
    WAITING_FOR_WARMUP = "WAITING_FOR_WARMUP"
    WAITING_FOR_WAKE = "WAITING_FOR_WAKE"
    WAITING_FOR_VERIFY = "WAITING_FOR_VERIFY"
    WAITING_FOR_SHIFT = "WAITING_FOR_SHIFT"
    WAITING_FOR_DRAIN = "WAITING_FOR_DRAIN"
    WAITING_FOR_REPLACEMENT = "WAITING_FOR_REPLACEMENT"
    WAITING_FOR_TURN = "WAITING_FOR_TURN"
    BACKING_OFF = "BACKING_OFF"
    INTERNAL = "INTERNAL"

    @classmethod
    def _missing_(cls, value: object) -> "Code | None":
        """Maps a code of a newer version to CODE_UNKNOWN, so that a message that carries it is not lost."""
        return cls.CODE_UNKNOWN if isinstance(value, str) and _CODE.fullmatch(value) else None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not: a stable code, what was found, what was required, and how to fix it."""

    code: Code
    # What was found; empty: nothing to add to the code.
    found: str = ""
    # What would have been accepted.
    asked: str = ""
    # What to do about it, often a command.
    remedy: str = ""

    def __str__(self) -> str:
        """`found: ..; wanted: ..; try: .. (CODE)`, without the parts that are empty."""
        return " ".join(part for part in (self.words if self._parts() else "", f"({self.code})") if part)

    @property
    def words(self) -> str:
        """Everything but the code, for where the code stands next to it; the code if there is nothing else."""
        return "; ".join(self._parts()) or str(self.code)

    @classmethod
    def parse(cls, text: str, code: Code) -> "Refusal":
        """The refusal of this code whose text or `words` this is. Any other text is what was found."""
        words = "" if text in (code, f"({code})") else text.removesuffix(f" ({code})")
        matched = _PARTS.fullmatch(words)
        parts = matched.groupdict(default="") if matched is not None else {"found": words}
        return cls(code, **parts)

    def _parts(self) -> list[str]:
        named = (("found", self.found), ("wanted", self.asked), ("try", self.remedy))
        return [f"{name}: {text}" for name, text in named if text]


PERMANENT_LOAD_FAILURES: Final = frozenset(
    {
        Code.IR_UNSUPPORTED,
        Code.OPSET_UNSUPPORTED,
        Code.OP_UNSUPPORTED,
        Code.SHAPES_OPEN,
        Code.MODEL_INVALID,
        Code.PREPARE_FAILED,
        Code.DRIFT_OVER,
    }
)
"""Reasons why a model does not run on a runtime, now or later: only another model, another runtime or what the workload
asks of it (shapes, samples, tolerances) helps."""

UNREADABLE_DEVICE: Final = frozenset({Code.DEVICE_LOST, Code.DEVICE_UNREACHABLE})
"""Codes of a load on a device that cannot be read, or was not measured since it could not."""

_UNANSWERED: Final = frozenset(
    {Code.REPLICA_UNREACHABLE, Code.WORKER_CRASHED, Code.REQUEST_CRASHED_WORKER, Code.DEADLINE_EXCEEDED, Code.INTERNAL}
)
"""Codes that leave open whether a replica did the work."""


def is_lost(code: Code, *, own_limit: bool) -> bool:
    """Whether a request that was sent and ended with `code` counts as lost: it got no answer. A refusal is an answer.

    own_limit: the client had set its deadline, so a deadline that passed is the client's own end of the request.
    """
    return code in _UNANSWERED and not (own_limit and code is Code.DEADLINE_EXCEEDED)


class ShoalError(Exception):
    """A refusal raised by an adapter, `from` its cause."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal

    @property
    def code(self) -> Code:
        return self.refusal.code


def refuse(code: Code, found: str = "", asked: str = "", remedy: str = "") -> ShoalError:
    """The error that carries this refusal: `raise refuse(Code.X, ...)`."""
    return ShoalError(Refusal(code, found, asked, remedy))

"""Every metric of a coordinator: of a region's, of a federation's, and which of them each exports."""

from typing import Final

from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.budget import HoldReason
from shoal.coordinator.core.migration.model import Cause, MigrationStage
from shoal.coordinator.core.migration.queue import QUEUED
from shoal.coordinator.core.negotiation.model import LeavingStage
from shoal.coordinator.core.signals.model import SignalName
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.metric import (
    TRUE_OR_FALSE,
    UNKNOWN,
    CounterMetric,
    DeclaredMetric,
    GaugeMetric,
    HistogramMetric,
    MetricLabel,
    code_label,
    process_metrics,
)

PROGRAM: Final = "shoal_coordinator"

_STORE_CODES: Final = (Code.STORE_UNAVAILABLE, Code.STORE_FULL)
_COUNTERPART: Final = MetricLabel("counterpart", others="a region of the federation, with its first count")
_INDICATIVE: Final = MetricLabel("indicative", TRUE_OR_FALSE)
_EMULATED: Final = MetricLabel("emulated", TRUE_OR_FALSE)
_SIGNAL: Final = MetricLabel("signal", tuple(SignalName))
_TENANT: Final = MetricLabel("tenant", others="a tenant of the region, with its first workload")
_WORKLOAD: Final = MetricLabel("workload", others="a workload of the region, while it exists")

# -- the store, its log and its backups -------------------------------------------------------------------------------

STORE_SECONDS: Final = HistogramMetric(
    f"{PROGRAM}_store_seconds",
    "Time that an operation of the store took for its caller, also of those that failed.",
    (MetricLabel("operation", ("read", "scan", "commit", "copy", "snapshot")),),
    "seconds",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
STORE_WRITABLE: Final = GaugeMetric(
    f"{PROGRAM}_store_writable",
    "1 while the store takes writes, 0 while it does not; NaN of a follower, which writes nothing.",
    initial=UNKNOWN,
)
EVENTS_DROPPED: Final = CounterMetric(
    f"{PROGRAM}_events_dropped_total",
    "Entries that are missing in the event log: the store did not take them, or a node sent too many.",
    (code_label(*_STORE_CODES, Code.OVERLOADED),),
)
AUDIT_DROPPED: Final = CounterMetric(
    f"{PROGRAM}_audit_dropped_total",
    "Entries that are missing in the audit log, because the store did not take them.",
    (code_label(*_STORE_CODES),),
)
BACKUP_MADE: Final = GaugeMetric(
    f"{PROGRAM}_backup_made_timestamp_seconds",
    "Unix time of the newest scheduled backup: 0 before the first, NaN without a schedule.",
    unit="seconds",
    initial=UNKNOWN,
)
BACKUPS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_backups_failed_total",
    "Scheduled backups that could not be made.",
    (code_label(*_STORE_CODES, Code.DISK_FULL),),
)
SPANS: Final = CounterMetric(
    f"{PROGRAM}_spans_total",
    "Spans of migrations and negotiations, by whether the trace collector got them.",
    (MetricLabel("outcome", ("exported", "dropped")),),
)

# -- callers and identities -------------------------------------------------------------------------------------------

CALLS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_calls_refused_total",
    "Calls of the API that were refused.",
    (MetricLabel("method", others="a method of the API, with its first refusal"), code_label()),
)
TOKENS_CREATED: Final = CounterMetric(
    f"{PROGRAM}_tokens_created_total",
    "Join tokens and bearer tokens that were created; region: for one that joins the federation.",
    (MetricLabel("role", (*Role, "bearer", "region")),),
)
ENROLMENTS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_enrolments_refused_total",
    "Join tokens that were not redeemed.",
    (MetricLabel("code", (Code.TOKEN_INVALID, Code.TOKEN_USED, Code.TOKEN_EXPIRED, Code.CSR_DENIED, Code.OVERLOADED)),),
)
RENEWALS: Final = CounterMetric(
    f"{PROGRAM}_renewals_total",
    "Certificates that were renewed; late: after the old one had ended.",
    (MetricLabel("role", tuple(Role)), MetricLabel("late", TRUE_OR_FALSE)),
)
RENEWALS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_renewals_refused_total",
    "Certificates that were not renewed.",
    (MetricLabel("code", (Code.RENEW_DENIED, Code.CSR_DENIED)),),
)

# -- agents and their links -------------------------------------------------------------------------------------------

SESSIONS: Final = GaugeMetric(f"{PROGRAM}_sessions", "Agents and gateways that are connected.")
NODES: Final = GaugeMetric(f"{PROGRAM}_nodes", "Nodes by liveness.", (MetricLabel("liveness", tuple(Liveness)),))
SESSIONS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_sessions_refused_total",
    "Sessions of agents that were refused.",
    (code_label(Code.NODE_MISMATCH, Code.DUPLICATE_IDENTITY),),
)
MESSAGES_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_messages_refused_total",
    "Messages of agents that were refused as a whole or in part.",
    (code_label(Code.MESSAGE_INVALID, Code.SIGNATURE_INVALID, Code.TELEMETRY_ABSURD, Code.RECEIPT_ABSURD),),
)
MESSAGES_DROPPED: Final = CounterMetric(
    f"{PROGRAM}_messages_dropped_total",
    "MQTT messages that were dropped unread. lanes: too many nodes at once; flood: too many of one node.",
    (MetricLabel("reason", ("lanes", "flood")),),
)
BROKER_CONNECTIONS_LOST: Final = CounterMetric(
    f"{PROGRAM}_broker_connections_lost_total", "Lost or failed connections to the broker that this region controls."
)
PROOFS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_proofs_refused_total", "Proofs of a newer desired set that this region had not signed."
)
CLAIM_WRITES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_claim_writes_failed_total", "Claims of lost nodes that could not be invalidated in the store."
)

# -- workloads and migrations -----------------------------------------------------------------------------------------

WORKLOADS: Final = GaugeMetric(f"{PROGRAM}_workloads", "Workloads of the region.")
WAITS: Final = GaugeMetric(
    f"{PROGRAM}_waits",
    "Replicas that wait, by the reason.",
    (MetricLabel("code", others="the code of a wait, while a replica waits for it"),),
)
PLACEMENTS: Final = GaugeMetric(
    f"{PROGRAM}_placements", "Replicas on nodes of the region that do not drain.", (_TENANT, _WORKLOAD, _EMULATED)
)
LATENCY_BOUND: Final = GaugeMetric(
    f"{PROGRAM}_latency_bound_seconds",
    "Bound of the p95 in the policy of a workload, where there is one.",
    (_TENANT, _WORKLOAD),
    "seconds",
)
COST: Final = CounterMetric(
    f"{PROGRAM}_cost_usd_total",
    "Cost as metered: devices by the hour, shared evenly by their replicas. With a counterpart: what that region bid.",
    (
        _TENANT,
        _WORKLOAD,
        MetricLabel("counterpart", others="the region that runs the workload; empty if it is this one"),
    ),
    "usd",
)
DECISIONS: Final = CounterMetric(
    f"{PROGRAM}_decisions_total",
    "Workloads that steps of the region decided about. In a region at rest there are none.",
)
DECISIONS_AUDITED: Final = CounterMetric(
    f"{PROGRAM}_decisions_audited_total",
    "Workloads that steps of the region decided about again although nothing had changed.",
)
DECISIONS_REFUTED: Final = CounterMetric(
    f"{PROGRAM}_decisions_refuted_total",
    "Of those, workloads that came out otherwise, and nodes of which arrays said what is not so: a defect.",
)
STEPS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_steps_failed_total",
    "Steps of the region or of its membership that could not be stored, or ended in an unforeseen error.",
)
MIGRATIONS: Final = GaugeMetric(
    f"{PROGRAM}_migrations",
    "Migrations under way, and moves that wait in the queue.",
    (
        MetricLabel(
            "stage",
            (QUEUED, *(each for each in MigrationStage if each not in (MigrationStage.DONE, MigrationStage.ABORTED))),
        ),
        _EMULATED,
    ),
)
MIGRATIONS_ENDED: Final = CounterMetric(
    f"{PROGRAM}_migrations_ended_total",
    "Migrations that ended; a move that waited and never began is none. code: why it was aborted; empty if it was not.",
    (
        MetricLabel("stage", (MigrationStage.DONE, MigrationStage.ABORTED)),
        MetricLabel("cause", tuple(Cause)),
        MetricLabel("code", ("",), "the code of an abort, with the first one"),
    ),
    known=tuple((MigrationStage.DONE, cause, "") for cause in Cause),
)
MIGRATIONS_HELD: Final = CounterMetric(
    f"{PROGRAM}_migrations_held_total",
    "Migrations that were proposed and did not start, by the new obstacle.",
    (MetricLabel("cause", tuple(Cause)), MetricLabel("by", tuple(HoldReason))),
)
TRACE_EXPORTS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_trace_exports_failed_total", "Traces of migrations and negotiations that could not be read to be sent."
)

# -- signals ----------------------------------------------------------------------------------------------------------

PRICE: Final = GaugeMetric(
    f"{PROGRAM}_price_usd_per_hour",
    "Price of an hour of a node that has none of its own; NaN if it is unknown.",
    unit="usd_per_hour",
    initial=UNKNOWN,
)
CARBON: Final = GaugeMetric(
    f"{PROGRAM}_carbon_grams_per_kilowatt_hour",
    "Carbon intensity of the region's power, as CO2; NaN if it is unknown.",
    unit="grams_per_kilowatt_hour",
    initial=UNKNOWN,
)
SIGNAL_STALE: Final = GaugeMetric(
    f"{PROGRAM}_signal_stale", "1 if the last value of the signal is too old to count.", (_SIGNAL,)
)
SIGNALS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_signals_refused_total",
    "Failed reads of a signal's source.",
    (_SIGNAL, code_label(Code.SIGNAL_INVALID, Code.SOURCE_UNREACHABLE, Code.SOURCE_DENIED)),
)
SIGNAL_WRITES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_signal_writes_failed_total",
    "Changes of a signal that could not be stored; the next poll tries again.",
    (_SIGNAL,),
)

# -- trade with other regions -----------------------------------------------------------------------------------------

AGREEMENTS: Final = GaugeMetric(
    f"{PROGRAM}_agreements",
    "Agreements by state. side origin: the counterpart works for this region; delegate: this region for it.",
    (
        MetricLabel("side", ("origin", "delegate")),
        MetricLabel("counterpart", others="a region of the federation, while there is an agreement with it"),
        MetricLabel("state", ("awarding", "withdrawing", "active", *LeavingStage, "granted", "stopping")),
        _EMULATED,
    ),
)
EARNED: Final = CounterMetric(
    f"{PROGRAM}_earned_usd_total",
    "Revenue of running other regions' workloads, at the prices that were bid.",
    (_COUNTERPART,),
    "usd",
)
BIDS: Final = CounterMetric(
    f"{PROGRAM}_bids_total",
    "Answers to solicitations. code: why it was declined; empty if it was not.",
    (
        MetricLabel("answer", ("offer", "counter", "decline")),
        MetricLabel("code", ("",), "the code of a decline, with the first one"),
        _INDICATIVE,
    ),
    known=tuple((answer, "", indicative) for answer in ("offer", "counter") for indicative in TRUE_OR_FALSE),
)
BID_WRITES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_bid_writes_failed_total", "Changes of a hold or an agreement that the delegate could not store."
)
HOLDS_UNCLAIMED: Final = CounterMetric(
    f"{PROGRAM}_holds_unclaimed_total", "Holds that expired without an award.", (_COUNTERPART,)
)
SOLICITATIONS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_solicitations_refused_total", "Solicitations beyond the rate limit of a region.", (_COUNTERPART,)
)
SOLICITATIONS_DIRECT: Final = CounterMetric(
    f"{PROGRAM}_solicitations_direct_total", "Solicitations that went past the federation, which did not answer."
)
ANSWERS_INVALID: Final = CounterMetric(
    f"{PROGRAM}_answers_invalid_total", "Answers that do not fit their solicitation or their signer."
)
ANSWERS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_answers_refused_total",
    "Answers whose signature or form was refused.",
    (code_label(Code.MESSAGE_INVALID, Code.SIGNATURE_INVALID),),
)
TRADE_WRITES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_trade_writes_failed_total", "Changes of a trade or of the reputation that the origin could not store."
)
REPORTS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_reports_failed_total", "Reports that the federation did not take; they are sent again."
)
GUEST_MODEL_FETCHES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_guest_model_fetches_failed_total",
    "Failed attempts to fetch the model of another region.",
    (code_label(Code.PEER_UNREACHABLE),),
)
ADVERTISEMENTS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_advertisements_failed_total",
    "Advertisements that the federation did not take.",
    (code_label(Code.FEDERATION_UNREACHABLE),),
)
MEASUREMENTS_FAILED: Final = CounterMetric(
    f"{PROGRAM}_measurements_failed_total",
    "Failed measurements of the round trip to another region.",
    (code_label(Code.PEER_UNREACHABLE),),
)

# -- the federation ---------------------------------------------------------------------------------------------------

REGIONS: Final = GaugeMetric(
    f"{PROGRAM}_regions",
    "Regions of the federation, by whether they advertise.",
    (MetricLabel("state", ("advertising", "silent")),),
)
SOLICITATIONS: Final = CounterMetric(
    f"{PROGRAM}_solicitations_total", "Solicitations that were passed on.", (_INDICATIVE,)
)
BIDS_MISSING: Final = CounterMetric(
    f"{PROGRAM}_bids_missing_total",
    "Regions that did not answer a solicitation.",
    (code_label(Code.DEADLINE_EXCEEDED, Code.PEER_UNREACHABLE),),
)
ADVERTISEMENTS_REFUSED: Final = CounterMetric(
    f"{PROGRAM}_advertisements_refused_total",
    "Advertisements that were refused.",
    (code_label(Code.ADVERT_INVALID, Code.REPLAYED),),
)
LEDGERS_BROKEN: Final = CounterMetric(
    f"{PROGRAM}_ledgers_broken_total", "Ledger entries that do not follow from those before them.", (_COUNTERPART,)
)
WATCHES_FAILED: Final = CounterMetric(
    f"{PROGRAM}_watches_failed_total", "Failed watches of the store by a replica of the federation."
)

# -- who exports what -------------------------------------------------------------------------------------------------

_BOTH: Final[tuple[DeclaredMetric, ...]] = (
    STORE_SECONDS,
    STORE_WRITABLE,
    EVENTS_DROPPED,
    AUDIT_DROPPED,
    BACKUP_MADE,
    BACKUPS_FAILED,
    SPANS,
    CALLS_REFUSED,
    TOKENS_CREATED,
    ENROLMENTS_REFUSED,
    RENEWALS,
    RENEWALS_REFUSED,
    SOLICITATIONS_REFUSED,
)
REGION: Final[tuple[DeclaredMetric, ...]] = (
    *_BOTH,
    SESSIONS,
    NODES,
    SESSIONS_REFUSED,
    MESSAGES_REFUSED,
    MESSAGES_DROPPED,
    BROKER_CONNECTIONS_LOST,
    PROOFS_REFUSED,
    CLAIM_WRITES_FAILED,
    WORKLOADS,
    WAITS,
    PLACEMENTS,
    LATENCY_BOUND,
    COST,
    DECISIONS,
    DECISIONS_AUDITED,
    DECISIONS_REFUTED,
    STEPS_FAILED,
    MIGRATIONS,
    MIGRATIONS_ENDED,
    MIGRATIONS_HELD,
    TRACE_EXPORTS_FAILED,
    PRICE,
    CARBON,
    SIGNAL_STALE,
    SIGNALS_REFUSED,
    SIGNAL_WRITES_FAILED,
    AGREEMENTS,
    EARNED,
    BIDS,
    BID_WRITES_FAILED,
    HOLDS_UNCLAIMED,
    SOLICITATIONS_DIRECT,
    ANSWERS_INVALID,
    ANSWERS_REFUSED,
    TRADE_WRITES_FAILED,
    REPORTS_FAILED,
    GUEST_MODEL_FETCHES_FAILED,
    ADVERTISEMENTS_FAILED,
    MEASUREMENTS_FAILED,
)
"""What a region's coordinator exports, and its followers."""
FEDERATION: Final[tuple[DeclaredMetric, ...]] = (
    *_BOTH,
    REGIONS,
    SOLICITATIONS,
    BIDS_MISSING,
    ADVERTISEMENTS_REFUSED,
    LEDGERS_BROKEN,
    WATCHES_FAILED,
)
"""What a federation exports."""
PROCESS: Final = process_metrics(PROGRAM)

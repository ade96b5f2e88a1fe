"""Every metric of an agent: on the page of its supervisor and on the page of its front. Workers have no page.

A gateway has both pages, with no series of replicas and devices.
"""

from enum import StrEnum
from typing import Final

from shoal.agent.core.cross_region_traffic import P95_WINDOW
from shoal.agent.ports import BATCHES
from shoal.types.assignment import Phase
from shoal.types.codes import Code
from shoal.types.device import EnergySource
from shoal.types.metric import (
    TRUE_OR_FALSE,
    CounterMetric,
    DeclaredMetric,
    GaugeMetric,
    HistogramMetric,
    MetricLabel,
    code_label,
    process_metrics,
)

PROGRAM: Final = "shoal_agent"
ENDED: Final = ("answered", "refused", "lost")
"""How a request ends."""
LIMITED: Final = ("admitted", "over_rate", "over_concurrency")
"""What a tenant's limits do with a request."""
CROSSED: Final = ("answered", "refused", "late", "error")
"""How a request between two regions ends."""
QUANTILES: Final = ("0.5", "0.95")


class HeldLimit(StrEnum):
    """What a caller, its tenant or all callers may hold only so much of at a front."""

    CALLS = "calls"
    STREAMS = "streams"
    ANSWERS = "answers"
    MESSAGES = "messages"
    WATCHES = "watches"
    READINESS = "readiness"
    ANONYMOUS = "anonymous"


class SessionEvent(StrEnum):
    """What happens to a session or to one of its steps."""

    BEGUN = "begun"
    ENDED = "ended"
    LOST = "lost"
    RUN = "run"
    REPLAYED = "replayed"
    """A step ran once more, because its worker was lost."""
    ANSWERED_AGAIN = "answered_again"
    """A step came again and got its first answer."""
    GIVEN = "given"
    """Handed over to another replica."""
    NOT_GIVEN = "not_given"
    TAKEN = "taken"


_ASSIGNMENT: Final = MetricLabel("assignment", others="a replica of the node, while it exists")
_DEVICE: Final = MetricLabel("device", others="a device of the node")
_EMULATED: Final = MetricLabel("emulated", (*TRUE_OR_FALSE, ""))
"""Empty: the device is gone."""
_TENANT: Final = MetricLabel("tenant", others="a tenant of the region, with its first request or replica")
_WORKLOAD: Final = MetricLabel("workload", others="a workload of the tenant, with its first request or replica")
_ORIGIN: Final = MetricLabel("origin", others="the front, or the region, that requests come from, with the first one")
_AGREEMENT: Final = MetricLabel("agreement", others="an agreement, with its first request and while it lasts")
_COUNTERPART: Final = MetricLabel("counterpart", others="the other region of the agreement")
_REPLICA: Final = (_ASSIGNMENT, _TENANT, _WORKLOAD, _DEVICE, _EMULATED)
_ENTRY: Final = (_TENANT, _WORKLOAD, _ORIGIN)
_OF_DEVICE: Final = (_DEVICE, _EMULATED)

# -- the supervisor's page: the node ----------------------------------------------------------------------------------

LINKED: Final = GaugeMetric(f"{PROGRAM}_linked", "1 while a session with the coordinator is open.")
SESSION_EPOCH: Final = GaugeMetric(f"{PROGRAM}_session_epoch", "Epoch of the open session; 0 without one.")
DESIRED_GENERATION: Final = GaugeMetric(
    f"{PROGRAM}_desired_generation", "Generation of the desired set that is persisted."
)
FRONT_READY: Final = GaugeMetric(f"{PROGRAM}_front_ready", "1 while the front takes requests.")

# -- the supervisor's page: replicas ----------------------------------------------------------------------------------

ASSIGNMENTS: Final = GaugeMetric(f"{PROGRAM}_assignments", "Replicas by phase.", (MetricLabel("phase", tuple(Phase)),))
ASSIGNMENT_RESTARTS: Final = CounterMetric(
    f"{PROGRAM}_assignment_restarts_total", "Times that a replica was loaded again.", _REPLICA
)
IN_FLIGHT: Final = GaugeMetric(f"{PROGRAM}_in_flight", "Requests that wait or run in the worker.", _REPLICA)
REQUESTS: Final = CounterMetric(
    f"{PROGRAM}_requests_total", "Requests that a worker of the node served.", (*_REPLICA, _ORIGIN)
)
REQUEST_ERRORS: Final = CounterMetric(
    f"{PROGRAM}_request_errors_total",
    "Requests that a worker of the node answered with an error.",
    (*_REPLICA, _ORIGIN),
)
PACE_MISSED: Final = CounterMetric(
    f"{PROGRAM}_pace_missed_total",
    "Requests that took longer than the pace of an emulated device.",
    (*_REPLICA, _ORIGIN),
)
REQUEST_ENERGY: Final = CounterMetric(
    f"{PROGRAM}_request_energy_joules_total",
    "Energy of the requests that a worker served, by where the figure comes from.",
    (*_REPLICA, _ORIGIN, MetricLabel("source", tuple(EnergySource))),
    "joules",
)
LATENCY: Final = GaugeMetric(
    f"{PROGRAM}_latency_seconds",
    "Quantiles of the time from a request's arrival at the worker to its answer.",
    (*_REPLICA, _ORIGIN, MetricLabel("quantile", QUANTILES)),
    "seconds",
)
BATCH_SIZE: Final = HistogramMetric(
    f"{PROGRAM}_batch_size",
    "Inputs of an answered run, of one request or of a batch of several: the length of the first axis, where the model "
    "leaves that open.",
    _REPLICA,
    buckets=BATCHES,
)

# -- the supervisor's page: devices -----------------------------------------------------------------------------------

DEVICE_FREE: Final = GaugeMetric(
    f"{PROGRAM}_device_free_bytes", "Free memory; NaN where the device does not tell.", _OF_DEVICE, "bytes"
)
DEVICE_UTILISATION: Final = GaugeMetric(
    f"{PROGRAM}_device_utilisation_ratio",
    "Busy share, 0 to 1; NaN where the device does not tell.",
    _OF_DEVICE,
    "ratio",
)
DEVICE_TEMPERATURE: Final = GaugeMetric(
    f"{PROGRAM}_device_temperature_celsius", "Temperature; NaN where the device does not tell.", _OF_DEVICE, "celsius"
)
DEVICE_POWER: Final = GaugeMetric(
    f"{PROGRAM}_device_power_watts", "Power drawn; NaN where the device does not tell.", _OF_DEVICE, "watts"
)
DEVICE_THROTTLED: Final = GaugeMetric(
    f"{PROGRAM}_device_throttled", "1 while the device slows itself down for heat or power.", _OF_DEVICE
)
DEVICE_ENERGY: Final = CounterMetric(
    f"{PROGRAM}_device_energy_joules_total",
    "Energy that the device has counted; no series where it does not tell.",
    _OF_DEVICE,
    "joules",
)

# -- the supervisor's page: requests that entered here, as its front reports them -------------------------------------

INGRESS_REQUESTS: Final = CounterMetric(
    f"{PROGRAM}_ingress_requests_total",
    "Requests that entered the region here, by how they ended, as the front last reported.",
    (*_ENTRY, MetricLabel("outcome", ENDED)),
)
INGRESS_RETRIED: Final = CounterMetric(
    f"{PROGRAM}_ingress_requests_retried_total",
    "Requests that took more than one attempt, however they ended, as the front last reported.",
    _ENTRY,
)

# -- the front's page -------------------------------------------------------------------------------------------------

FRONT_REQUESTS: Final = CounterMetric(
    "shoal_front_requests_total",
    "Requests that entered the region here, by how they ended.",
    (*_ENTRY, MetricLabel("outcome", ENDED)),
)
FRONT_RETRIED: Final = CounterMetric(
    "shoal_front_requests_retried_total", "Requests that took more than one attempt, however they ended.", _ENTRY
)
FRONT_REFUSALS: Final = CounterMetric(
    "shoal_front_refusals_total",
    "Refusals of any call, also of those that entered elsewhere.",
    (
        code_label(
            Code.INVALID_ARGUMENT,
            Code.TOO_LARGE,
            Code.TOO_SLOW,
            Code.OVERLOADED,
            Code.TENANT_RATE,
            Code.TENANT_CONCURRENCY,
            Code.DEADLINE_EXCEEDED,
            Code.CANCELLED,
            Code.MODEL_NOT_FOUND,
            Code.MODEL_NOT_READY,
            Code.REPLICA_UNREACHABLE,
            Code.REQUEST_CRASHED_WORKER,
            Code.UNAUTHENTICATED,
            Code.TENANT_DENIED,
            Code.FORWARD_DENIED,
        ),
    ),
)
FRONT_LIMIT_REFUSALS: Final = CounterMetric(
    "shoal_front_limit_refusals_total",
    "Calls refused or ended because a caller, its tenant or all callers held as much as they may: open calls, streams, "
    "answers not read, messages on their way in, watches of health, calls for readiness, calls without credentials.",
    (MetricLabel("limit", tuple(HeldLimit)),),
)
FRONT_SECONDS: Final[HistogramMetric] = HistogramMetric(
    "shoal_front_request_seconds",
    "Time from a request's arrival to its answer.",
    (_TENANT, _WORKLOAD),
    "seconds",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
FRONT_IN_FLIGHT: Final = GaugeMetric("shoal_front_in_flight", "Requests inside the front.")
FRONT_WAITING: Final = GaugeMetric(
    "shoal_front_waiting", "Requests inside the front that wait for their turn between tenants."
)
FRONT_TENANT_REQUESTS: Final = CounterMetric(
    "shoal_front_tenant_requests_total",
    "Requests of tenants with a quota of rate or concurrency, where they enter the region, by what the limits did.",
    (_TENANT, MetricLabel("outcome", LIMITED)),
)
FRONT_TENANT_INSIDE: Final = GaugeMetric(
    "shoal_front_tenant_in_flight", "Requests of tenants with such a quota inside the front.", (_TENANT,)
)
FRONT_EJECTED: Final = GaugeMetric("shoal_front_ejected", "Replicas that get no requests now, because they failed.")
FRONT_AGREEMENT_REQUESTS: Final = CounterMetric(
    "shoal_front_agreement_requests_total",
    "Requests that left for another region or came from it, by how they ended. error: a fault of the serving side.",
    (_AGREEMENT, _COUNTERPART, MetricLabel("outcome", CROSSED)),
)
FRONT_AGREEMENT_P95: Final = GaugeMetric(
    "shoal_front_agreement_p95_seconds",
    f"p95 of the newest {P95_WINDOW} answered requests of an agreement.",
    (_AGREEMENT, _COUNTERPART),
    "seconds",
)
FRONT_SESSIONS: Final = GaugeMetric("shoal_front_sessions", "Sessions whose state is here.", (_ASSIGNMENT,))
FRONT_SESSION_EVENTS: Final = CounterMetric(
    "shoal_front_session_events_total",
    "What happened to sessions and their steps.",
    (MetricLabel("event", tuple(SessionEvent)),),
)
FRONT_TRACES: Final = CounterMetric(
    "shoal_front_traces_total",
    "Requests that were to be traced. left_out: there were too many in that second.",
    (MetricLabel("outcome", ("traced", "left_out")),),
)
FRONT_SPANS: Final = CounterMetric(
    "shoal_front_spans_total",
    "Spans of requests, by whether the trace collector got them.",
    (MetricLabel("outcome", ("exported", "dropped")),),
)

# -- who exports what -------------------------------------------------------------------------------------------------

SUPERVISOR: Final[tuple[DeclaredMetric, ...]] = (
    LINKED,
    SESSION_EPOCH,
    DESIRED_GENERATION,
    FRONT_READY,
    ASSIGNMENTS,
    ASSIGNMENT_RESTARTS,
    IN_FLIGHT,
    REQUESTS,
    REQUEST_ERRORS,
    PACE_MISSED,
    REQUEST_ENERGY,
    LATENCY,
    BATCH_SIZE,
    DEVICE_FREE,
    DEVICE_UTILISATION,
    DEVICE_TEMPERATURE,
    DEVICE_POWER,
    DEVICE_THROTTLED,
    DEVICE_ENERGY,
    INGRESS_REQUESTS,
    INGRESS_RETRIED,
)
FRONT: Final[tuple[DeclaredMetric, ...]] = (
    FRONT_REQUESTS,
    FRONT_RETRIED,
    FRONT_REFUSALS,
    FRONT_LIMIT_REFUSALS,
    FRONT_SECONDS,
    FRONT_IN_FLIGHT,
    FRONT_WAITING,
    FRONT_TENANT_REQUESTS,
    FRONT_TENANT_INSIDE,
    FRONT_EJECTED,
    FRONT_AGREEMENT_REQUESTS,
    FRONT_AGREEMENT_P95,
    FRONT_SESSIONS,
    FRONT_SESSION_EVENTS,
    FRONT_TRACES,
    FRONT_SPANS,
)
PROCESS: Final = process_metrics(PROGRAM)

"""Prometheus metrics of one agent, made from the supervisor's last snapshot and served over mTLS."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.agent.ports import BATCHES
from shoal.agent.supervisor import NodeSnapshot
from shoal.host import metrics_page
from shoal.types.address import HostPort
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, refuse

LABELS: Final = ("assignment", "tenant", "workload", "device", "emulated")
"""Labels of every series of an assignment."""


class AgentCollector(Collector):
    """`shoal_agent_*`. Collected in the server's thread; safe because a snapshot is frozen and replaced as a whole."""

    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield _gauge("linked", "1 while a session with the coordinator is open", float(now.is_linked))
        yield _gauge("session_epoch", "epoch of the open session, 0 without one", now.epoch)
        generation = now.version.generation if now.version else 0
        yield _gauge("desired_generation", "generation of the desired set that is persisted", generation)
        yield _gauge("front_ready", "1 while the data plane listens", float(now.front.ready))
        yield from _assignments(now)
        yield from _devices(now)
        yield from _request_metrics(now)
        yield _batches(now)
        ingress = CounterMetricFamily(
            "shoal_agent_ingress_requests",
            "requests that entered the region here, by how they ended",
            labels=("tenant", "workload", "origin", "outcome"),
        )
        for each in now.front.ingress:
            key = (each.workload.tenant, each.workload.name, each.origin)
            for outcome in ("answered", "retried", "refused", "lost"):
                ingress.add_metric((*key, outcome), getattr(each, outcome))
        yield ingress


def serve(address: HostPort, snapshot: Callable[[], NodeSnapshot], guard: metrics_page.MetricsAccess) -> int:
    """Serve in a separate thread until the process ends. Returns the bound port. Raises ShoalError(CONFLICT)."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(snapshot))
    ProcessCollector(namespace="shoal_agent", registry=registry)
    PlatformCollector(registry=registry)
    try:
        return metrics_page.serve(make_wsgi_app(registry), address.host, address.port, guard)
    except OSError as cause:
        raise refuse(
            Code.CONFLICT, f"{address}: {cause.strerror}", "a free port", "choose another --metrics"
        ) from cause


def _assignments(now: NodeSnapshot) -> Iterator[Metric]:
    observed, emulated = now.observations, _emulation_labels(now)
    phases = GaugeMetricFamily("shoal_agent_assignments", "assignments by phase", labels=("phase",))
    for phase in Phase:
        phases.add_metric((phase,), sum(each.phase is phase for each in observed))
    yield phases
    labels = LABELS
    restarts = CounterMetricFamily("shoal_agent_assignment_restarts", "reloads of an assignment", labels=labels)
    flight = GaugeMetricFamily("shoal_agent_in_flight", "requests in flight to an assignment", labels=labels)
    for each in observed:
        restarts.add_metric(_labels(each, emulated), each.restarts)
        flight.add_metric(_labels(each, emulated), each.in_flight)
    yield restarts
    yield flight


def _devices(now: NodeSnapshot) -> Iterator[Metric]:
    labels = ("device", "emulated")
    emulated = _emulation_labels(now)
    for name, help_text, field in (
        ("free_bytes", "free memory", "free_bytes"),
        ("utilisation_ratio", "busy share, 0 to 1", "utilisation"),
        ("temperature_celsius", "temperature", "temperature_c"),
        ("power_watts", "power drawn", "power_w"),
        ("energy_joules", "joules counted by the device", "energy_j"),
    ):
        family = GaugeMetricFamily(
            f"shoal_agent_device_{name}", f"{help_text}; NaN where the device does not tell", labels=labels
        )
        for reading in now.readings:
            family.add_metric((reading.device, emulated.get(reading.device, "")), getattr(reading, field))
        yield family


def _request_metrics(now: NodeSnapshot) -> Iterator[Metric]:
    labels = (*LABELS, "origin")
    requests = CounterMetricFamily("shoal_agent_requests", "requests served by local workers", labels=labels)
    errors = CounterMetricFamily("shoal_agent_request_errors", "of these, answered with an error", labels=labels)
    missed = CounterMetricFamily("shoal_agent_pace_missed", "of these, later than an emulated pace", labels=labels)
    joules = CounterMetricFamily("shoal_agent_joules", "energy of these requests", labels=(*labels, "source"))
    latency = GaugeMetricFamily("shoal_agent_latency_seconds", "at the worker", labels=(*labels, "quantile"))
    emulated = _emulation_labels(now)
    for each in now.observations:
        for served in each.served:
            key = (*_labels(each, emulated), served.origin)
            requests.add_metric(key, served.requests)
            errors.add_metric(key, served.errors)
            missed.add_metric(key, served.pace_missed)
            if not math.isnan(served.joules):  # one NaN would make every sum over the series NaN
                joules.add_metric((*key, served.energy_source), served.joules)
            latency.add_metric((*key, "0.5"), served.latency_p50_s)
            latency.add_metric((*key, "0.95"), served.latency_p95_s)
    yield from (requests, errors, missed, joules, latency)


def _batches(now: NodeSnapshot) -> Metric:
    family = HistogramMetricFamily(
        "shoal_agent_batch_size",
        "inputs that an answered request brought: the length of its first axis, where the model leaves that open",
        labels=LABELS,
    )
    bounds, emulated = (*map(str, BATCHES), "+Inf"), _emulation_labels(now)
    for each in now.observations:
        batches = now.batches.get(each.assignment)
        # a worker runs untrusted models, so its counts may be malformed
        if batches is not None and len(batches.counts) == len(bounds):
            counts = map(float, itertools.accumulate(batches.counts))
            family.add_metric(_labels(each, emulated), list(zip(bounds, counts, strict=True)), batches.inputs)
    return family


def _labels(each: Observed, emulated: Mapping[str, str]) -> tuple[str, ...]:
    device = each.device
    return each.assignment, each.workload.tenant, each.workload.name, device, emulated.get(device, "")


def _emulation_labels(now: NodeSnapshot) -> Mapping[str, str]:
    """`true` or `false` by device."""
    return {device.name: str(device.emulated).lower() for device in now.devices}


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"shoal_agent_{name}", help_text, value=value)

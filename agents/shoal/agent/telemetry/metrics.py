"""Prometheus metrics of one agent, made from the supervisor's last snapshot and served with mTLS."""

import itertools
import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.agent.ports import BATCHES
from shoal.agent.supervisor import Snapshot
from shoal.types.assignment import Observed, Phase
from shoal.types.codes import Code, refuse
from shoal.wire import scrape


class AgentCollector(Collector):
    """`shoal_agent_*`. Collected in the server's thread: a snapshot is frozen and swapped whole."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield _gauge("linked", "1 while a session with the coordinator is open", float(now.linked))
        yield _gauge("session_epoch", "epoch of the open session, 0 without one", now.epoch)
        generation = now.version.generation if now.version else 0
        yield _gauge("desired_generation", "generation of the desired set that is persisted", generation)
        yield _gauge("front_ready", "1 while the data plane listens", float(now.front.ready))
        yield from _assignments(now.observed)
        yield from _devices(now)
        yield from _service(now.observed)
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


def serve(address: str, snapshot: Callable[[], Snapshot], guard: scrape.Guard) -> int:
    """Serves in a thread of its own until the process ends; returns the bound port. Raises ShoalError(CONFLICT)."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(snapshot))
    ProcessCollector(namespace="shoal_agent", registry=registry)
    PlatformCollector(registry=registry)
    host, _, port = address.rpartition(":")
    try:
        return scrape.serve(make_wsgi_app(registry), host, int(port), guard)
    except OSError as cause:
        raise refuse(
            Code.CONFLICT, f"{address}: {cause.strerror}", "a free port", "choose another --metrics"
        ) from cause


def _assignments(observed: tuple[Observed, ...]) -> Iterator[Metric]:
    phases = GaugeMetricFamily("shoal_agent_assignments", "assignments by phase", labels=("phase",))
    for phase in Phase:
        phases.add_metric((phase,), sum(each.phase is phase for each in observed))
    yield phases
    labels = ("assignment", "tenant", "workload", "device")
    restarts = CounterMetricFamily("shoal_agent_assignment_restarts", "reloads of an assignment", labels=labels)
    flight = GaugeMetricFamily("shoal_agent_in_flight", "requests in flight to an assignment", labels=labels)
    for each in observed:
        restarts.add_metric(_labels(each), each.restarts)
        flight.add_metric(_labels(each), each.in_flight)
    yield restarts
    yield flight


def _devices(now: Snapshot) -> Iterator[Metric]:
    labels = ("device", "emulated")
    emulated = {device.name: str(device.emulated).lower() for device in now.devices}
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


def _service(observed: tuple[Observed, ...]) -> Iterator[Metric]:
    labels = ("assignment", "tenant", "workload", "device", "origin")
    requests = CounterMetricFamily("shoal_agent_requests", "requests served by local workers", labels=labels)
    errors = CounterMetricFamily("shoal_agent_request_errors", "of these, answered with an error", labels=labels)
    missed = CounterMetricFamily("shoal_agent_pace_missed", "of these, later than an emulated pace", labels=labels)
    joules = CounterMetricFamily("shoal_agent_joules", "energy of these requests", labels=(*labels, "source"))
    latency = GaugeMetricFamily("shoal_agent_latency_seconds", "at the worker", labels=(*labels, "quantile"))
    for each in observed:
        for served in each.served:
            key = (*_labels(each), served.origin)
            requests.add_metric(key, served.requests)
            errors.add_metric(key, served.errors)
            missed.add_metric(key, served.pace_missed)
            if not math.isnan(served.joules):  # or no sum would know any
                joules.add_metric((*key, served.energy_source), served.joules)
            latency.add_metric((*key, "0.5"), served.latency_p50_s)
            latency.add_metric((*key, "0.95"), served.latency_p95_s)
    yield from (requests, errors, missed, joules, latency)


def _batches(now: Snapshot) -> Metric:
    family = HistogramMetricFamily(
        "shoal_agent_batch_size",
        "inputs that an answered request brought: the length of its first axis, where the model leaves that open",
        labels=("assignment", "tenant", "workload", "device"),
    )
    bounds = (*map(str, BATCHES), "+Inf")
    for each in now.observed:
        batches = now.batches.get(each.assignment)
        if batches is not None and len(batches.counts) == len(bounds):  # a worker runs strangers' models
            counts = map(float, itertools.accumulate(batches.counts))
            family.add_metric(_labels(each), list(zip(bounds, counts, strict=True)), batches.inputs)
    return family


def _labels(each: Observed) -> tuple[str, str, str, str]:
    return each.assignment, each.workload.tenant, each.workload.name, each.device


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"shoal_agent_{name}", help_text, value=value)

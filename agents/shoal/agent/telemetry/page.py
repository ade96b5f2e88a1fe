"""Prometheus metrics of one agent, made from the supervisor's last snapshot."""

import math
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import ProcessCollector, make_wsgi_app

from shoal.agent import metrics
from shoal.agent.ports import BATCHES
from shoal.agent.supervisor import NodeSnapshot
from shoal.host.metrics import page_of
from shoal.host.metrics_page import WsgiApp
from shoal.types.assignment import Observed, Phase, Served
from shoal.types.metric import Distribution, LabelValues, MetricReadings


def make_page(snapshot: Callable[[], NodeSnapshot]) -> WsgiApp:
    """The page of what `snapshot` returns at each scrape."""
    registry = page_of(metrics.SUPERVISOR, lambda: readings(snapshot()))
    ProcessCollector(namespace=metrics.PROGRAM, registry=registry)
    return make_wsgi_app(registry)


def readings(now: NodeSnapshot) -> MetricReadings:
    """Runs in the server's thread; safe because a snapshot is frozen and replaced as a whole."""
    ingress = {(each.workload.tenant, each.workload.name, each.origin): each for each in now.front.ingress}
    return {
        metrics.LINKED: {(): float(now.is_linked)},
        metrics.SESSION_EPOCH: {(): now.epoch},
        metrics.DESIRED_GENERATION: {(): now.version.generation if now.version else 0},
        metrics.FRONT_READY: {(): float(now.front.ready)},
        **_replicas(now),
        **_devices(now),
        metrics.INGRESS_REQUESTS: {
            (*entry, outcome): getattr(each, outcome) for entry, each in ingress.items() for outcome in metrics.ENDED
        },
        metrics.INGRESS_RETRIED: {entry: each.retried for entry, each in ingress.items()},
    }


def _replicas(now: NodeSnapshot) -> MetricReadings:
    replicas = {_series(each, _emulation_labels(now)): each for each in now.observations}
    served = dict(_by_origin(replicas))
    return {
        metrics.ASSIGNMENTS: {(phase,): sum(each.phase is phase for each in now.observations) for phase in Phase},
        metrics.ASSIGNMENT_RESTARTS: {series: each.restarts for series, each in replicas.items()},
        metrics.IN_FLIGHT: {series: each.in_flight for series, each in replicas.items()},
        metrics.REQUESTS: {series: each.requests for series, each in served.items()},
        metrics.REQUEST_ERRORS: {series: each.errors for series, each in served.items()},
        metrics.PACE_MISSED: {series: each.pace_missed for series, each in served.items()},
        metrics.REQUEST_ENERGY: {
            (*series, each.energy_source): each.joules
            for series, each in served.items()
            if not math.isnan(each.joules)  # one NaN would make every sum over the series NaN
        },
        metrics.LATENCY: {
            (*series, quantile): value
            for series, each in served.items()
            for quantile, value in zip(metrics.QUANTILES, (each.latency_p50_s, each.latency_p95_s), strict=True)
        },
        metrics.BATCH_SIZE: {
            series: Distribution(batches.counts, batches.inputs)
            for series, each in replicas.items()
            # a worker runs untrusted models, so its counts may be malformed
            if (batches := now.batches.get(each.assignment)) is not None and len(batches.counts) == len(BATCHES) + 1
        },
    }


def _by_origin(replicas: Mapping[LabelValues, Observed]) -> Iterator[tuple[LabelValues, Served]]:
    for series, each in replicas.items():
        for served in each.served:
            yield (*series, served.origin), served


def _devices(now: NodeSnapshot) -> MetricReadings:
    emulated = _emulation_labels(now)
    devices = {(each.device, emulated.get(each.device, "")): each for each in now.readings}
    return {
        metrics.DEVICE_FREE: {series: each.free_bytes for series, each in devices.items()},
        metrics.DEVICE_UTILISATION: {series: each.utilisation for series, each in devices.items()},
        metrics.DEVICE_TEMPERATURE: {series: each.temperature_c for series, each in devices.items()},
        metrics.DEVICE_POWER: {series: each.power_w for series, each in devices.items()},
        metrics.DEVICE_THROTTLED: {series: float(each.throttled) for series, each in devices.items()},
        metrics.DEVICE_ENERGY: {
            series: each.energy_j for series, each in devices.items() if not math.isnan(each.energy_j)
        },
    }


def _series(each: Observed, emulated: Mapping[str, str]) -> LabelValues:
    device = each.device
    return each.assignment, each.workload.tenant, each.workload.name, device, emulated.get(device, "")


def _emulation_labels(now: NodeSnapshot) -> Mapping[str, str]:
    """`true` or `false` by device."""
    return {device.name: str(device.emulated).lower() for device in now.devices}

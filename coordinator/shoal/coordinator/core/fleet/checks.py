"""Checks whether what a node reports is possible. An absurd value is dropped; the node keeps serving."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.coordinator.core.fleet.state import CLOCK_ALLOWANCE_S
from shoal.types.assignment import AgreementCounts, Ingress, Observed, Served, Status, Subscriptions
from shoal.types.codes import Code, Refusal
from shoal.types.device import Device, Node, Reading
from shoal.types.identity import NAME_PATTERN
from shoal.types.latency import BUCKETS, Counts
from shoal.types.readings import MOST_WATTS, absurd_figure, check_figures
from shoal.types.receipt import MAX_SPREAD, Receipt
from shoal.types.tenant import TenantUse
from shoal.types.units import Bytes, Wall, show_bytes, show_seconds
from shoal.types.workload import WorkloadKey

LATEST_TIME = Wall(2.0**33)
"""The year 2242. No clock that was ever set shows more, and none shows less than 1970, which a device without a clock
reports."""
MOST_FLOPS = 1e17
"""FLOP/s of one device. Above any that is sold, with a margin (an H200 gives 4e15 at fp8, sparse)."""
MOST_BYTES = 1e14
"""Bytes/s, chosen in the same way (HBM3e: 5e12)."""
MOST_SECONDS = 1e5
"""For launch and node overheads and served latencies."""
MOST_COUNT = 2**53
NONE_JUDGED: Mapping[str, Observed] = {}


def check_receipt(receipt: Receipt, node: Node, wall: Wall) -> Refusal | None:
    """None where the receipt can be true of one of the node's devices; else RECEIPT_ABSURD or NODE_MISMATCH.

    wall: current time by whichever clock is ahead, ours or the node's.
    """
    if receipt.node != node.name:
        return Refusal(
            Code.NODE_MISMATCH, f"a receipt of {receipt.node}", f"one of {node.name}", "a node reports itself only"
        )
    device = next((device for device in node.devices if device.name == receipt.device), None)
    if device is None:
        return _receipt_absurd(receipt, "no such device", "a device of the node's hello")
    if receipt.provider != device.provider:
        return _receipt_absurd(receipt, f"provider {receipt.provider}", f"{device.provider}, as in the node's hello")
    if receipt.measured_at > wall + CLOCK_ALLOWANCE_S:
        ahead = show_seconds(receipt.measured_at - wall)
        return _receipt_absurd(receipt, f"measured {ahead} ahead of now", f"at most {show_seconds(CLOCK_ALLOWANCE_S)}")
    if not 0 < receipt.memory_bytes <= _physical_memory(device, node):
        return _receipt_absurd(
            receipt, f"memory {show_bytes(receipt.memory_bytes)}", f"0 to {show_bytes(_physical_memory(device, node))}"
        )
    for told, held, limit in (
        ("provider_bytes", receipt.provider_bytes, float(_physical_memory(device, node))),
        ("provider_host_bytes", receipt.provider_host_bytes, MOST_BYTES),
    ):
        if not 0 <= held <= limit:
            return _receipt_absurd(receipt, f"{told} {held}", f"0 to {show_bytes(limit)}")
    if not 0 <= receipt.spread <= MAX_SPREAD:
        return _receipt_absurd(receipt, f"spread {receipt.spread:g}", f"0 to {MAX_SPREAD:g}")
    for name, value, most in _rates(receipt):
        if math.isinf(value) or value > most or (value <= 0 and name not in RATES_MAY_BE_ZERO):
            return _receipt_absurd(receipt, f"{name} {value:g}", f"above 0, at most {most:g}, or NaN when not measured")
        if value < 0:
            return _receipt_absurd(receipt, f"{name} {value:g}", "not negative")
    return None


RATES_MAY_BE_ZERO = frozenset({"launch_s", "node_s", "idle_w", "probe_s"})


@dataclass(frozen=True, slots=True)
class CheckedStatus:
    """A status without the parts that cannot be true."""

    # Valid readings by device name.
    readings: Mapping[str, Reading]
    # Valid reports of replicas by assignment id.
    observed: Mapping[str, Observed]
    # Valid counts of cross-region requests by agreement id.
    agreement_counts: Mapping[str, AgreementCounts]
    # Valid counts of requests that entered the region at the node.
    ingress: tuple[Ingress, ...]
    # Valid counts of limited tenants at the node's front.
    tenants: tuple[TenantUse, ...]
    # What the node subscribes to, as far as workloads may have such names; None: unchanged.
    subscriptions: Subscriptions | None
    # Ids of assignments whose figures are left out.
    refused_assignments: frozenset[str]
    # (workload, origin) of the ingress counts that are left out.
    refused_ingress: frozenset[tuple[WorkloadKey, str]]
    # Why anything was left out or absurd (TELEMETRY_ABSURD); empty: the whole status is valid.
    refusals: tuple[Refusal, ...]


def check_status(status: Status, node: Node, judged: Mapping[str, Observed] = NONE_JUDGED) -> CheckedStatus:
    """Splits a status into what can be true and what cannot. Its timestamps are compared with each other only, because
    a wrong clock is not an absurd report (`NodeState.skew_s`).

    judged: reports of replicas that were found valid before, by assignment id; one that is repeated is not judged
    again, and is the same object in the answer.
    """
    refusals: list[Refusal] = []
    if not is_plausible_time(status.taken_at):
        refusals.append(absurd_figure("status", "taken_at", status.taken_at, f"0 to {LATEST_TIME:g}"))
    readings: dict[str, Reading] = {}
    observed: dict[str, Observed] = {}
    agreement_counts: dict[str, AgreementCounts] = {}
    entered: list[Ingress] = []
    uses: list[TenantUse] = []
    refused: set[str] = set()
    refused_ingress: set[tuple[WorkloadKey, str]] = set()
    for reading in status.readings:
        if (refusal := check_reading(reading, node, status.taken_at)) is None:
            readings[reading.device] = reading
        else:
            refusals.append(refusal)
    for each in status.observed:
        before = judged.get(each.assignment)
        if before is not None and before == each:
            observed[each.assignment] = before
        elif (refusal := check_replica_metrics(each)) is None:
            observed[each.assignment] = each
        else:
            refused.add(each.assignment)
            refusals.append(refusal)
    for ingress in status.ingress:
        counts = (
            *(ingress.requests, ingress.answered, ingress.retried, ingress.refused, ingress.lost),
            ingress.client_faults,
        )
        if all(0 <= count <= MOST_COUNT for count in counts):
            entered.append(ingress)
        else:
            refused_ingress.add((ingress.workload, ingress.origin))
            refusals.append(absurd_figure(f"ingress of {ingress.workload}", "count", max(counts, key=abs), "0 to 2^53"))
    for use in status.tenants:
        figures = (use.admitted, use.over_rate, use.over_concurrency, use.inside)
        if all(0 <= count <= MOST_COUNT for count in figures):
            uses.append(use)
        else:
            refusals.append(absurd_figure(f"use of tenant {use.tenant}", "count", max(figures, key=abs), "0 to 2^53"))
    subscriptions = status.subscriptions
    if subscriptions is not None:
        named = Subscriptions(tuple(key for key in subscriptions.workloads if _may_be_named(key)))
        if odd := len(subscriptions.workloads) - len(named.workloads):
            refusals.append(absurd_figure("subscriptions", "impossible names", odd, "0"))
        subscriptions = named
    for traffic in status.agreement_counts:
        if (refusal := check_agreement_counts(traffic)) is None:
            agreement_counts[traffic.agreement] = traffic
        else:
            refusals.append(refusal)
    return CheckedStatus(
        readings,
        observed,
        agreement_counts,
        tuple(entered),
        tuple(uses),
        subscriptions,
        frozenset(refused),
        frozenset(refused_ingress),
        tuple(refusals),
    )


def _may_be_named(key: WorkloadKey) -> bool:
    return all(NAME_PATTERN.fullmatch(name) is not None for name in key)


def check_agreement_counts(traffic: AgreementCounts) -> Refusal | None:
    """TELEMETRY_ABSURD where a gateway's counts of an agreement cannot be true."""
    where = f"agreement_counts of {traffic.agreement}"
    counts = (traffic.requests, traffic.errors, traffic.refused, traffic.late, traffic.latency_p95_s)
    if not all(0 <= count <= MOST_COUNT for count in counts):
        return absurd_figure(where, "count", max(counts, key=abs), "0 to 2^53")
    return _check_latencies(where, traffic.latencies, traffic.requests)


def is_plausible_time(wall: Wall) -> bool:
    """Whether a clock, right or wrong, can show this time."""
    return 0.0 <= wall <= LATEST_TIME


def check_reading(reading: Reading, node: Node, wall: Wall) -> Refusal | None:
    """TELEMETRY_ABSURD where a reading cannot be true. NaN means `not reported` and is accepted except for free_bytes.

    wall: what the node's own clock showed when the status was sent.
    """
    device = next((device for device in node.devices if device.name == reading.device), None)
    if device is None:
        return absurd_figure(reading.device, "device", math.nan, "a device of the node's hello")
    ahead_s = reading.taken_at - wall
    if not ahead_s <= CLOCK_ALLOWANCE_S:
        return absurd_figure(reading.device, "taken_at", ahead_s, f"at most {CLOCK_ALLOWANCE_S:g} s ahead")
    most = max(_physical_memory(device, node), device.memory_bytes)
    return check_figures(reading, most)


METRICS_MAY_BE_NAN = frozenset({"joules", "served joules", "served latency_p50_s", "served latency_p95_s"})
"""Metrics without a value while a replica has answered nothing, because its clients decide that."""


def check_replica_metrics(observed: Observed) -> Refusal | None:
    """TELEMETRY_ABSURD where an assignment's figures, or its times, cannot be true."""
    for name, at in (("since", observed.since), ("retry_at", observed.retry_at), ("gives_up_at", observed.gives_up_at)):
        if at is not None and not is_plausible_time(at):
            return absurd_figure(observed.assignment, name, at, f"0 to {LATEST_TIME:g}")
    for name, value, most in _replica_metrics(observed):
        if math.isnan(value) and name in METRICS_MAY_BE_NAN:
            continue
        if not 0 <= value <= most:
            return absurd_figure(observed.assignment, name, value, f"0 to {most:g}")
    return _check_latencies(observed.assignment, observed.latencies, sum(each.requests for each in observed.served))


def _check_latencies(where: str, latencies: Counts, requests: int) -> Refusal | None:
    """TELEMETRY_ABSURD where a latency histogram has impossible counts, too many buckets, or more entries than
    requests."""
    if min(latencies, default=0) < 0 or max(latencies, default=0) > MOST_COUNT:
        return absurd_figure(where, "count", max(latencies, key=abs), "0 to 2^53")
    if len(latencies) > BUCKETS:
        return absurd_figure(where, "buckets of latency", len(latencies), f"at most {BUCKETS}")
    if sum(latencies) > requests:
        return absurd_figure(where, "latencies", sum(latencies), f"of {requests} requests")
    return None


def _replica_metrics(observed: Observed) -> Iterator[tuple[str, float, float]]:
    """(name, value, upper bound) of every figure that a node reports about an assignment."""
    yield "in_flight", observed.in_flight, MOST_COUNT
    yield "restarts", observed.restarts, MOST_COUNT
    measured = observed.measured
    if measured is not None:
        yield "load_s", measured.load_s, MOST_SECONDS
        yield "load_cpu_s", measured.load_cpu_s, MOST_SECONDS
        yield "memory_bytes", measured.memory_bytes, 2.0**50
        yield "latency_p50_s", measured.latency_p50_s, MOST_SECONDS
        yield "latency_p95_s", measured.latency_p95_s, MOST_SECONDS
        yield "joules", measured.joules, 1e9
        yield "samples", measured.samples, MOST_COUNT
    for served in observed.served:
        yield from _service_metrics(served)


def _service_metrics(served: Served) -> Iterator[tuple[str, float, float]]:
    yield "requests", served.requests, MOST_COUNT
    yield "errors", served.errors, MOST_COUNT
    yield "refused", served.refused, MOST_COUNT
    yield "late", served.late, MOST_COUNT
    if served.requests > 0:
        yield "served latency_p50_s", served.latency_p50_s, MOST_SECONDS
        yield "served latency_p95_s", served.latency_p95_s, MOST_SECONDS
    yield "served joules", served.joules, 1e15


def _rates(receipt: Receipt) -> Iterator[tuple[str, float, float]]:
    """(name, value, upper bound) of every measured rate. Rates that were not measured (NaN) are left out."""
    rates = receipt.rates
    named: list[tuple[str, float, float]] = [
        *((f"matmul_flops[{key}]", value, MOST_FLOPS) for key, value in rates.matmul_flops.items()),
        *((f"conv_flops[{key}]", value, MOST_FLOPS) for key, value in rates.conv_flops.items()),
        ("elementwise_bytes", rates.elementwise_bytes, MOST_BYTES),
        ("copy_bytes", rates.copy_bytes, MOST_BYTES),
        ("launch_s", rates.launch_s, MOST_SECONDS),
        ("node_s", rates.node_s, MOST_SECONDS),
        ("load_bytes", rates.load_bytes, MOST_BYTES),
        ("idle_w", rates.idle_w, MOST_WATTS),
        ("active_w", rates.active_w, MOST_WATTS),
        ("probe_s", receipt.probe_s, MOST_SECONDS),
    ]
    return ((name, value, most) for name, value, most in named if not math.isnan(value))


def _physical_memory(device: Device, node: Node) -> Bytes:
    """The most memory that the device can have; for a CPU, the memory of its machine."""
    return Bytes(max(device.memory_bytes, node.memory_bytes) if device.kind == "cpu" else device.memory_bytes)


def _receipt_absurd(receipt: Receipt, found: str, asked: str) -> Refusal:
    remedy = "probe the device again"
    return Refusal(Code.RECEIPT_ABSURD, f"{receipt.node}/{receipt.device}: {found}", asked, remedy)

"""Who serves workloads right now, computed from two looks at its replicas' counts. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.v1 import operator_pb2


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """What one replica has served since it became ready, as its node reported it last."""

    # `node/device`, with what stands in for the device.
    place: str
    # Requests answered.
    requests: int
    # What they took; modelled where the device is not real.
    joules: float
    # p95 at the worker in seconds; NaN before the first request.
    latency_p95_s: float


@dataclass(frozen=True, slots=True)
class ServingLook:
    """One look at all replicas of some workloads."""

    # Seconds on this machine's monotonic clock.
    at: float
    # By assignment id.
    replicas: Mapping[str, ServedCounts]


@dataclass(frozen=True, slots=True)
class ServingShare:
    """What the replicas of one place served between two looks."""

    # As in ServedCounts.
    place: str
    # Of the requests that all of them answered, 0 to 1.
    share: float
    # Requests answered a second.
    rate: float
    # The highest of its replicas, as in ServedCounts.
    latency_p95_s: float
    # Joules of an inference; NaN: none was served, or the device does not tell.
    joules: float


def look_of(rows: Iterable[operator_pb2.PlacementView], workloads: Collection[str], at: float) -> ServingLook:
    """rows: of any workloads; those of `workloads` that run count."""
    found = {row.assignment.id: _counts(row) for row in rows if row.assignment.workload.name in workloads}
    return ServingLook(at, found)


def shares_of(before: ServingLook, now: ServingLook) -> tuple[ServingShare, ...]:
    """A row for each place where a replica is now, in their order."""
    took = now.at - before.at
    grown = {name: _grown(before.replicas.get(name), counts) for name, counts in now.replicas.items()}
    total = sum(requests for requests, _ in grown.values())
    shares = []
    for place in sorted({counts.place for counts in now.replicas.values()}):
        there = [name for name, counts in now.replicas.items() if counts.place == place]
        requests, joules = (sum(grown[name][part] for name in there) for part in (0, 1))
        known = [p95 for name in there if math.isfinite(p95 := now.replicas[name].latency_p95_s)]
        shares.append(
            ServingShare(
                place,
                requests / total if total else 0.0,
                requests / took if took > 0 else 0.0,
                max(known, default=math.nan),
                joules / requests if requests and joules else math.nan,
            )
        )
    return tuple(shares)


def _grown(before: ServedCounts | None, now: ServedCounts) -> tuple[int, float]:
    """Requests and joules since; a worker that was started again counts from 0."""
    if before is None or now.requests < before.requests:
        return now.requests, now.joules
    return now.requests - before.requests, now.joules - before.joules


def _counts(row: operator_pb2.PlacementView) -> ServedCounts:
    served = row.observed.served
    mark = f" ({row.stand_in})" if row.stand_in else ""
    return ServedCounts(
        f"{row.node}/{row.assignment.device}{mark}",
        sum(one.requests for one in served),
        sum(one.joules for one in served if math.isfinite(one.joules)),
        max((one.latency_p95_s for one in served if one.requests), default=math.nan),
    )

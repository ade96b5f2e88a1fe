"""Values that the agent's tests start from."""

from dataclasses import replace
from typing import Any

from shoal.types.assignment import Assignment, DesiredSet, Measured, Version
from shoal.types.device import EnergySource, Reading
from shoal.types.route import Route
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall, Watts
from shoal.types.workload import PartitionRule, WorkloadKey

DIGEST = "sha256:" + "ab" * 32


def at(seconds: float) -> Elapsed:
    return Elapsed(seconds)


def assignment(name: str = "a-1", **changes: Any) -> Assignment:
    base = Assignment(
        id=name,
        workload=WorkloadKey("default", "ocr"),
        revision=1,
        model=DIGEST,
        model_bytes=Bytes(1000),
        device="cpu0",
        provider="CPUExecutionProvider",
        precision="fp32",
        draining=False,
        shared_worker=False,
        memory_bytes=Bytes(10_000),
        max_batch=1,
        partition=PartitionRule(),
    )
    return replace(base, **changes)


def measured() -> Measured:
    return Measured(
        load_s=Seconds(0.1),
        memory_bytes=Bytes(2000),
        latency_p50_s=Seconds(0.01),
        latency_p95_s=Seconds(0.02),
        joules=Joules(0.1),
        energy_source=EnergySource.ESTIMATED,
        samples=8,
    )


def reading(free: int, device: str = "cpu0") -> Reading:
    nan = float("nan")
    return Reading(device, Bytes(free), 0.0, nan, Watts(nan), nan, Wall(0.0))


def desired(
    generation: int,
    *assignments: Assignment,
    node: str = "edge-1",
    history: str = "h-1",
    term: int = 1,
    routes: tuple[Route, ...] = (),
    pins: tuple[str, ...] = (),
) -> DesiredSet:
    return DesiredSet(
        node=node,
        version=Version(history, term, generation),
        assignments=assignments,
        routes=routes,
        pins=pins,
        credentials=(),
        heartbeat_s=Seconds(1.0),
    )

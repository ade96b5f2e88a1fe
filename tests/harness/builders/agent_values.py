"""Values that the agent's tests start from."""

from dataclasses import replace
from typing import Any

from shoal.types.assignment import Assignment, DesiredSet, Measured, Version
from shoal.types.codes import Code
from shoal.types.device import Device, DeviceKind, EnergySource, Reading
from shoal.types.migration import Against, InputsFrom, Metric, Tolerance, Verdict, Verification
from shoal.types.receipt import Rates, Receipt, SignedReceipt
from shoal.types.route import Route
from shoal.types.units import Bytes, Elapsed, Joules, Seconds, Wall, Watts
from shoal.types.workload import PartitionRule, WorkloadKey

DIGEST = "sha256:" + "ab" * 32
CPU = Device("cpu0", DeviceKind.CPU, "x", "m", "cpu", "1", "1.31", "CPUExecutionProvider", Bytes(1))
GPU = replace(CPU, name="gpu0", provider="CUDAExecutionProvider", driver_version="550")


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
        partition=PartitionRule(),
    )
    return replace(base, **changes)


def verification(migration: str = "m-1", **changes: Any) -> Verification:
    base = Verification(
        migration=migration,
        against=Against.SOURCE,
        inputs=InputsFrom.GENERATED,
        samples=8,
        tolerances=(Tolerance("", Metric.MAX_REL, 1e-3), Tolerance("", Metric.COSINE, 0.9999)),
        within_s=Seconds(30.0),
        source="a-0",
        source_node="edge-0",
        source_address="127.0.0.1:1",
    )
    return replace(base, **changes)


def verdict(migration: str = "m-1", *, passed: bool = True) -> Verdict:
    code, reason = (None, "") if passed else (Code.VERIFY_FAILED, "y: max_rel 0.5, at most 0.001")
    return Verdict(migration, passed, code, reason, Against.SOURCE, InputsFrom.GENERATED, 8)


def measurement() -> Measured:
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


def desired_set(
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


def receipt(device: Device, measured_at: float = 0.0) -> SignedReceipt:
    rates = Rates({}, {}, 1.0, 1.0, Seconds(1), Seconds(1), 1.0, Watts(1), Watts(1), EnergySource.ESTIMATED)
    made = Receipt(
        node="edge-1",
        device=device.name,
        provider=device.provider,
        driver_version=device.driver_version,
        runtime_version=device.runtime_version,
        precisions=("fp32",),
        operators=(),
        rates=rates,
        memory_bytes=Bytes(1),
        spread=0.1,
        measured_at=Wall(measured_at),
        probe_s=Seconds(5.0),
        emulated=device.emulated,
        source="probe",
    )
    return SignedReceipt(made, b"content", b"signature")

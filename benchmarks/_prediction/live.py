"""Predictions of this machine's devices against what its workers measure, model families held out.

The probe, the profile, the load with its warm-up, the residuals and the prediction are Shoal's own: real worker
processes of an agent's pool, and the coordinator's functions. Nothing is timed here.
"""

import asyncio
import hashlib
import math
import pickle
import pkgutil
import platform
import random
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from _prediction.live_models import LiveModel

from shoal.agent.clock import SystemClock
from shoal.agent.devices.cpu import CpuDriver
from shoal.agent.devices.installed import present_drivers
from shoal.agent.devices.plugins.driver import PluginDriver
from shoal.agent.driver_port import DeviceDriver, DriverOptions
from shoal.agent.ports import WorkerExited, WorkerFailed, WorkerReady
from shoal.agent.worker.pool import ProcessWorkers
from shoal.agent.worker.pool_options import PoolOptions
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.prediction.demand import ModelDemand, at_shapes, block_channels, demand_of, work_of
from shoal.coordinator.core.prediction.load_law import load_needs
from shoal.coordinator.core.prediction.model import Interval, Prediction
from shoal.coordinator.core.prediction.predict import predict
from shoal.coordinator.core.prediction.region_residuals import RegionResiduals
from shoal.coordinator.core.prediction.residuals import (
    DeviceClass,
    Residual,
    class_of_device,
    residual_of,
    with_repeat,
)
from shoal.coordinator.core.prediction.roofline import service_parts
from shoal.types.assignment import Assignment, Measured
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, DeviceKind
from shoal.types.profile import ModelProfile
from shoal.types.receipt import Receipt
from shoal.types.units import Bytes, Seconds
from shoal.types.workload import PartitionRule, WorkloadKey

Recorded = TypeVar("Recorded", Receipt, Measured)
_RULE = PartitionRule(Seconds(1.0), Seconds(10.0), None, False)
_SIDES_WITHIN = 0.15
_PROBES = 5


@dataclass(frozen=True, slots=True)
class LiveCase:
    """What is measured, and predicted."""

    # What runs.
    model: LiveModel
    # Where it runs.
    device: Device
    # Requests that run as one.
    batch: int
    # Intra-op threads of one run.
    threads: int
    # At the shapes of this batch.
    profile: ModelProfile

    @property
    def name(self) -> str:
        return f"{self.model.name} b{self.batch} {self.device.name} t{self.threads}"


@dataclass(frozen=True, slots=True)
class LiveErrors:
    """One case."""

    # What was measured.
    case: LiveCase
    # Median of the latest rounds.
    measured: Measured
    # Predicted from the first round's warm-up of this very case: tier a.
    known: Prediction
    # Predicted from the receipt and the other families' warm-ups: tier b.
    calibrated: Prediction
    # Processor time of the load, from the other families' loads; None where they tell none.
    load_cpu_s: Interval | None

    @property
    def later_s(self) -> float:
        return self.measured.latency_p50_s


class LiveMeasured(NamedTuple):
    """What one run of the benchmark measured."""

    # By (device, threads).
    receipts: Mapping[tuple[str, int], Receipt]
    # By name of the case: its warm-ups, one a round.
    cases: Mapping[str, tuple[LiveCase, list[Measured]]]


def again(raw: Path) -> LiveMeasured:
    """What an earlier run has written, with profiles as they are computed now."""
    receipts, cases = pickle.loads(raw.read_bytes())
    return LiveMeasured(
        {key: _with_defaults(receipt) for key, receipt in receipts.items()},
        {
            name: (replace(case, profile=_profile(case.model, case.batch)), [_with_defaults(each) for each in seen])
            for name, (case, seen) in cases.items()
        },
    )


def fastest_alone(measured: LiveMeasured) -> LiveMeasured:
    """Of each case the fastest warm-up of its first rounds, and the fastest of as many later ones: on a machine that is
    never idle, the nearest to one that is."""
    cases = {name: (case, _fastest_of_halves(seen)) for name, (case, seen) in measured.cases.items()}
    return LiveMeasured(measured.receipts, cases)


def _fastest_of_halves(seen: Sequence[Measured]) -> list[Measured]:
    """Of an odd number the last half is the longer one. A single warm-up is left alone."""
    middle = len(seen) // 2
    return [min(half, key=lambda each: each.latency_p50_s) for half in (seen[:middle], seen[middle:]) if half]


def _with_defaults(recorded: Recorded) -> Recorded:
    """What an older version has pickled, with the fields that it did not know."""
    known = {each.name: getattr(recorded, each.name) for each in fields(recorded) if hasattr(recorded, each.name)}
    return type(recorded)(**known)


async def measure_all(
    models: Sequence[LiveModel], cases: "CaseChoice", rounds: int, seed: int, budget_s: float = math.inf
) -> LiveMeasured:
    """Receipts by (device, threads), and the warm-ups of every case, one a round. Cases are in another order in every
    round, so that what else the machine does is no case's own.

    No warm-up is begun more than `budget_s` seconds after the first. Cases with fewer than two, and less than `rounds`,
    are left out, since nothing could judge them.
    """
    rng, receipts = random.Random(seed), dict[tuple[str, int], Receipt]()
    measured = dict[str, tuple[LiveCase, list[Measured]]]()
    with tempfile.TemporaryDirectory(prefix="shoal-live-") as scratch:
        clock = SystemClock()
        drivers = _devices(clock, cases.simulate, cases.devices)
        async with _pools(Path(scratch), clock, drivers, cases.threads) as pools:
            for device, _ in drivers:
                for threads in cases.threads:
                    receipts[device.name, threads] = await _probe(pools[threads], device)
            chosen = list(cases.of(models, [device for device, _ in drivers]))
            ends = clock.now() + budget_s
            for number in range(rounds):
                rng.shuffle(chosen)
                for case in chosen:
                    if clock.now() >= ends:
                        break
                    found = await _load(pools[case.threads], Path(scratch), case, number)
                    if isinstance(found, Refusal):
                        print(f"# left out: {case.name}: {found.found:.120}", flush=True)
                    else:
                        measured.setdefault(case.name, (case, []))[1].append(found)
    kept = {name: (case, seen) for name, (case, seen) in measured.items() if len(seen) >= min(rounds, 2)}
    return LiveMeasured(receipts, kept)


@dataclass(frozen=True, slots=True)
class CaseChoice:
    """Which cases there are."""

    # Numbers of intra-op threads.
    threads: tuple[int, ...] = (1, 2)
    # Batches; models that take none have batch 1.
    batches: tuple[int, ...] = (1, 4)
    # One model in so many is measured at more than one thread or request.
    every: int = 2
    # Vendors' simulators to take instead of the processor. Their latencies are published ones: memory and load count.
    simulate: tuple[str, ...] = ()
    # Devices of this machine to take instead of the processor, by name.
    devices: tuple[str, ...] = ()

    def of(self, models: Sequence[LiveModel], devices: Iterable[Device]) -> Iterator[LiveCase]:
        for device in devices:
            for number, model in enumerate(models):
                for threads in self.threads:
                    for batch in self.batches:
                        extra = (batch > 1) + (threads > 1)
                        if extra > 1 or (batch > 1 and not model.batched) or (extra and number % self.every):
                            continue
                        yield LiveCase(model, device, batch, threads, _profile(model, batch))


def live_errors(
    receipts: Mapping[tuple[str, int], Receipt], measured: Mapping[str, tuple[LiveCase, Sequence[Measured]]]
) -> list[LiveErrors]:
    """Every case predicted from its own first warm-up, and from those of all other families. What a second one differs
    by, other families tell."""
    residuals = {name: _residual(case, receipts, seen) for name, (case, seen) in measured.items()}
    found = []
    for case, seen in measured.values():
        receipt, profile = receipts[case.device.name, case.threads], case.profile
        others = RegionResiduals(
            residual
            for name, residual in residuals.items()
            if residual is not None and measured[name][0].model.family != case.model.family
        )
        demand = _demand(case)
        parts = service_parts(demand, receipt.rates, profile.precision)
        mix = tuple(part / math.fsum(parts) for part in parts)
        correction = others.correction(case.name, _class_of(case), mix)
        repeats = others.repeats.get(_class_of(case))
        known = predict(case.device, receipt, profile, profile.precision, measured=seen[0], repeats=repeats)
        load = others.load(_class_of(case), load_needs(profile), receipt.provider_bytes)
        calibrated = predict(
            case.device, receipt, profile, profile.precision, demand=demand, correction=correction, load=load
        )
        assert isinstance(known, Prediction)
        assert isinstance(calibrated, Prediction)
        found.append(LiveErrors(case, _middle(seen[1:] or seen), known, calibrated, load.work_s if load else None))
    return found


def summary(errors: Sequence[LiveErrors]) -> dict[str, float]:
    """The object of the last line. Shares are of 1, errors are percent, `memory_worst_under` percent below what was
    measured; `committed_worst_under` likewise of the upper end, which placement commits. Memory and load are those of
    tier b. `load_within_30` is by the clock, `load_cpu_within_30` by processor
    time, of which other programs take none."""
    known = [_off(each.known.latency_p50_s, each.later_s) for each in errors]
    calibrated = [_off(each.calibrated.latency_p50_s, each.later_s) for each in errors]
    tail = [_off(each.calibrated.latency_p95_s, each.measured.latency_p95_s) for each in errors]
    memory = [_off(each.calibrated.memory_bytes, each.measured.memory_bytes) for each in errors]
    committed = [each.calibrated.memory_bytes.high / each.measured.memory_bytes - 1 for each in errors]
    load = [_off(each.calibrated.load_s, each.measured.load_s) for each in errors]
    work = [
        _off(each.load_cpu_s, each.measured.load_cpu_s)
        for each in errors
        if each.load_cpu_s is not None and each.measured.load_cpu_s > 0
    ]
    return {
        "a_mape": _percent(np.abs(known)),
        "b_mape": _percent(np.abs(calibrated)),
        "b_within_15": _share(np.abs(calibrated) <= _SIDES_WITHIN),
        "coverage_a": _share(_inside(each.known.latency_p50_s, each.later_s) for each in errors),
        "coverage_b": _share(_inside(each.calibrated.latency_p50_s, each.later_s) for each in errors),
        "width_a": round(median(_width(each.known.latency_p50_s) for each in errors), 3),
        "width_b": round(median(_width(each.calibrated.latency_p50_s) for each in errors), 3),
        "p95_mape": _percent(np.abs(tail)),
        "coverage_p95": _share(_inside(each.calibrated.latency_p95_s, each.measured.latency_p95_s) for each in errors),
        "memory_within_10": _share(np.abs(memory) <= 0.1),
        "memory_worst_under": round(100 * max(0.0, -min(memory)), 2),
        "committed_worst_under": round(100 * max(0.0, -min(committed)), 2),
        "load_within_30": _share(np.abs(load) <= 0.3),
        "coverage_load": _share(_inside(each.calibrated.load_s, each.measured.load_s) for each in errors),
        "load_cpu_within_30": _share(np.abs(work) <= 0.3) if work else 0.0,
        "cases": len(errors),
        "architectures": len({each.case.model.name for each in errors}),
    }


def _residual(case: LiveCase, receipts: Mapping[tuple[str, int], Receipt], seen: Sequence[Measured]) -> Residual | None:
    first = seen[0]
    receipt, demand = receipts[case.device.name, case.threads], _demand(case)
    found = residual_of(
        *(case.name, case.device, receipt.rates, case.profile.precision, demand, first, load_needs(case.profile)),
        provider_bytes=receipt.provider_bytes,
    )
    if found is None:
        return None
    found = replace(found, device_class=_class_of(case))
    return found if len(seen) < 2 else with_repeat(found, found, seen[1], first)


def _demand(case: LiveCase) -> ModelDemand:
    """On this machine."""
    return demand_of(case.profile, block_channels(case.device, platform.machine(), case.profile.precision))


def _class_of(case: LiveCase) -> DeviceClass:
    """Another number of threads is another device: its receipt is of that number."""
    found = class_of_device(case.device)
    return found._replace(product=f"{found.product}, {case.threads} threads")


def _middle(seen: Sequence[Measured]) -> Measured:
    """The medians."""
    return Measured(
        load_s=Seconds(median(each.load_s for each in seen)),
        memory_bytes=Bytes(int(median(each.memory_bytes for each in seen))),
        latency_p50_s=Seconds(median(each.latency_p50_s for each in seen)),
        latency_p95_s=Seconds(median(each.latency_p95_s for each in seen)),
        joules=seen[0].joules,
        energy_source=seen[0].energy_source,
        samples=sum(each.samples for each in seen),
        load_cpu_s=Seconds(median(each.load_cpu_s for each in seen)),
    )


def _off(predicted: Interval, measured: float) -> float:
    return predicted.mid / measured - 1


def _inside(predicted: Interval, measured: float) -> bool:
    return predicted.low <= measured <= predicted.high


def _width(predicted: Interval) -> float:
    """Without end where a single run is known."""
    return predicted.high / predicted.low if predicted.low > 0 else math.inf


def _percent(values: Iterable[float]) -> float:
    return round(100 * float(np.mean(list(values))), 2)


def _share(values: Iterable[object]) -> float:
    return round(float(np.mean([bool(each) for each in values])), 3)


def _profile(model: LiveModel, batch: int) -> ModelProfile:
    """As of a model that is pushed with `--shape` for each input, and then runs in batches. A model of whose axes two
    have one name and other lengths is pushed without."""
    found = profile_of(model.content, _digest(model), shapes=model.shapes)
    if not isinstance(found, ModelProfile):
        found = profile_of(model.content, _digest(model))
    assert isinstance(found, ModelProfile), found
    return at_shapes(found, model.at_batch(batch))


def _digest(model: LiveModel) -> str:
    return f"sha256:{hashlib.sha256(model.content).hexdigest()}"


# the devices and workers of this machine


def _devices(
    clock: SystemClock, simulate: tuple[str, ...], names: tuple[str, ...]
) -> list[tuple[Device, DeviceDriver]]:
    """The processor, by ONNX Runtime's own provider and by each plugin that runs on it; or simulators alone; or the
    devices of these names alone."""
    if names:
        return _named_devices(clock, names)
    if simulate:
        simulators = PluginDriver(clock, DriverOptions(simulate=simulate))
        return [(each, simulators) for each in simulators.discover() if each.simulated]
    drivers: list[DeviceDriver] = [CpuDriver(clock, DriverOptions()), PluginDriver(clock, DriverOptions())]
    found = list[tuple[Device, DeviceDriver]]()
    for driver in drivers:
        try:
            found += [(each, driver) for each in driver.discover() if each.kind is DeviceKind.CPU]
        except ShoalError as error:
            print(f"# left out: the plugins' devices: {error}", flush=True)
    return found


def _named_devices(clock: SystemClock, names: tuple[str, ...]) -> list[tuple[Device, DeviceDriver]]:
    options = DriverOptions()
    factories = present_drivers(options, cpu=True).values()
    drivers: list[DeviceDriver] = [pkgutil.resolve_name(factory)(clock, options) for factory in factories]
    found = [(each, driver) for driver in drivers for each in driver.discover() if each.name in names]
    if missing := set(names) - {device.name for device, _ in found}:
        raise SystemExit(f"found: no device {', '.join(sorted(missing))}; try: shoal-agent doctor, which lists them")
    return found


@asynccontextmanager
async def _pools(
    folder: Path, clock: SystemClock, drivers: Sequence[tuple[Device, DeviceDriver]], threads: Iterable[int]
) -> AsyncIterator[dict[int, ProcessWorkers]]:
    """An agent's pool of workers for each number of threads."""
    (folder / "models").mkdir()
    devices = {device.name: device for device, _ in drivers}
    access = {device.name: driver.access(device.name) for device, driver in drivers}
    files = tuple(sorted({file for each in access.values() for file in each.files}))
    pools = {
        each: ProcessWorkers(
            folder / f"run{each}",
            folder / "models",
            clock,
            devices.get,
            access.__getitem__,
            PoolOptions(keep_spare=False, threads=each),
            files=lambda: files,
        )
        for each in threads
    }
    try:
        yield pools
    finally:
        await asyncio.gather(*(pool.close(keep=False) for pool in pools.values()))


async def _probe(pool: ProcessWorkers, device: Device) -> Receipt:
    """The device's receipt. On a busy machine a probe may miss its deadline: an agent tries again, and so does this."""
    for left in reversed(range(_PROBES)):
        try:
            return await pool.probe(device)
        except ShoalError as error:
            if error.code is not Code.DEADLINE_EXCEEDED or not left:
                raise
            print(f"# probed again: {device.name}: {error.refusal.found:.120}", flush=True)
    raise AssertionError("unreachable")


async def _load(pool: ProcessWorkers, folder: Path, case: LiveCase, number: int) -> Measured | Refusal:
    """Loads and warms up the model in a worker of its own, which is then ended."""
    path = folder / "models" / case.profile.digest.removeprefix("sha256:")
    if not path.exists():
        path.write_bytes(case.model.content)
    assignment = Assignment(
        id=f"{case.name} {number}",
        workload=WorkloadKey("bench", case.model.name),
        revision=1,
        model=case.profile.digest,
        model_bytes=case.profile.size_bytes,
        device=case.device.name,
        provider=case.device.provider,
        precision=case.profile.precision,
        draining=False,
        shared_worker=False,
        memory_bytes=Bytes(0),
        partition=_RULE,
        work=work_of(case.profile),
        shapes=case.model.at_batch(case.batch) if case.device.provider != "CPUExecutionProvider" else {},
    )
    await pool.start(assignment, str(path))
    found: Measured | Refusal | None = None
    async for event in pool.events():
        if event.assignment != assignment.id:
            continue
        if isinstance(event, WorkerReady):
            found = event.measured
        elif isinstance(event, WorkerFailed | WorkerExited):
            found = event.refusal
        if found is not None:
            break
    await pool.stop(assignment.id)
    assert found is not None
    return found

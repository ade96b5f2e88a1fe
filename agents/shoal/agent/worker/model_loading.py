"""Opens, warms up and measures the model of a load order.

On an emulated device all reported times (Measured) are device time: the time waited here, divided by the profile's
`time_scale`.
"""

import os
import time
from collections.abc import Mapping
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import onnxruntime as ort
import structlog

from shoal.agent.worker import isolation
from shoal.agent.worker.energy import ConstantPower, Energy, energy_of
from shoal.agent.worker.engine import Engine, input_candidates, open_engine, read_and_verify, warm_up
from shoal.agent.worker.load_comparison import compare_with_processor
from shoal.agent.worker.memory import MemoryGrowth
from shoal.agent.worker.messages import LoadOrder, LoadResult
from shoal.agent.worker.pace import ModelPace, element_count, model_pace
from shoal.agent.worker.probe import read_graph
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.artifacts.samples import SamplePack, read_pack
from shoal.host.memory import return_at_once
from shoal.types.assignment import Measured
from shoal.types.codes import Refusal, ShoalError
from shoal.types.device import EnergySource
from shoal.types.units import Joules, Seconds

_log = structlog.get_logger(__name__)

_WARM_RUNS: Final = 5
_WARM_BUDGET_S: Final = 1.0


class LoadTime(NamedTuple):
    """What opening a model took."""

    # By the clock.
    seconds: float
    # Of a processor, where one thread does all of it; 0 elsewhere: a device, or a plugin's threads, worked too.
    cpu_s: float


def open_smallest_graph(order: LoadOrder) -> Engine | None:
    """None where the provider does not take it."""
    os.environ.update(order.access.environment)
    try:
        return open_engine(read_graph("launch"), Provider(order.provider, order.access), {"x": (1,)})
    except ShoalError as error:
        _log.warning("provider_not_opened", provider=order.provider, code=error.code, error=str(error))
        return None


def open_model(order: LoadOrder) -> tuple[Engine, LoadTime]:
    """Load at low priority, because other models may serve in this process. With more than one thread, load at normal
    priority: threads that the runtime starts would keep the low priority for ever."""

    def work() -> tuple[Engine, LoadTime]:
        clock, cpu = time.perf_counter(), time.thread_time()
        with return_at_once():
            engine = open_it()
        cpu_s = time.thread_time() - cpu if order.provider == CPU_PROVIDER else 0.0
        return engine, LoadTime(time.perf_counter() - clock, cpu_s)

    def open_it() -> Engine:
        # Later sessions of this process are for the same device; the pool ensures that.
        os.environ.update(order.access.environment)
        provider = Provider(order.provider, order.access, order.precision, order.threads)
        made = order.prepared
        data = read_and_verify(made.path, made.digest) if made else read_and_verify(order.path, order.digest)
        if made is not None and made.compiled:
            return open_engine(data, provider, compiled=made.operators)
        return open_engine(data, provider, order.shapes, partial=order.partial, node_flops=order.work.node_flops)

    return isolation.run_at_low_priority(work) if order.threads == 1 else work()


def measure(
    order: LoadOrder, engine: Engine, options: ort.RunOptions, load_time: LoadTime, memory: MemoryGrowth
) -> LoadResult:
    """Warm up and time some runs. On an emulated device: device time alone, since the region learns from it what such
    devices take, there and elsewhere. Where this machine takes longer, what is served and `pace_missed` tell."""
    pace = pace_of(order)
    energy = energy_of_order(order, pace)
    is_simulated = order.access.pace is not None and order.access.pace.simulated
    samples = _read_samples(order, engine)
    given = () if samples is None else ((lambda: samples.sample(0)[0]),)
    candidates = chain(given, input_candidates(engine, order.work))
    warmth = warm_up(
        engine,
        candidates,
        runs=0 if is_simulated else _WARM_RUNS,  # a run may take seconds, from which nothing is learnt
        budget_s=0.0 if is_simulated else _WARM_BUDGET_S,
        options=options,
        optional=order.warm_up_optional,
    )
    if warmth.skip_reason is not None:
        return _result_without_warm_up(order, engine, energy.source, load_time, memory, warmth.skip_reason)
    held = memory.bytes()
    compared = compare_with_processor(order, engine, warmth, samples, options)
    feeds, times = warmth.feeds, warmth.times
    busy_s = warmth.own_times
    if pace is not None:
        device_s = pace.seconds(scale_of(order, {name: feed.shape for name, feed in feeds.items()}))
        busy_s = (device_s,) * len(times)
    p50, p95 = (Seconds(float(value)) for value in np.quantile(busy_s, (0.5, 0.95)))
    joules = energy.joules({"": sum(busy_s)})[""] / len(busy_s)
    measured = Measured(
        load_s=Seconds(load_time.seconds),
        memory_bytes=held,
        latency_p50_s=p50,
        latency_p95_s=p95,
        joules=Joules(joules),
        energy_source=energy.source,
        samples=len(times),
        prepare_s=order.prepared.prepare_s if order.prepared else Seconds(0.0),
        load_cpu_s=Seconds(load_time.cpu_s),
    )
    operators = tuple(sorted(engine.operators))
    run_s = Seconds(float(np.quantile(times, 0.95)))
    note = _note(order, engine, pace.note if pace else "", compared)
    return LoadResult(measured, engine.inputs, engine.outputs, note, operators, run_s)


def _note(order: LoadOrder, engine: Engine, *more: str) -> str:
    """What people are to know of a loaded model."""
    return "; ".join(filter(None, (*more, order.prepared.note if order.prepared else "", engine.note)))


def _read_samples(order: LoadOrder, engine: Engine) -> SamplePack | None:
    """The given samples, if they can be read."""
    if not order.samples:
        return None
    try:
        return read_pack(read_and_verify(order.samples, order.samples_digest), engine.inputs, engine.outputs)
    except ShoalError as error:
        _log.warning("samples_unreadable", assignment=order.assignment, code=error.code, error=str(error))
        return None


def _result_without_warm_up(
    order: LoadOrder, engine: Engine, source: EnergySource, load_time: LoadTime, memory: MemoryGrowth, why: Refusal
) -> LoadResult:
    """The result of a load without a run. `samples` is 0, so that its zeros replace no prediction."""
    measured = Measured(
        load_s=Seconds(load_time.seconds),
        memory_bytes=memory.bytes(),
        latency_p50_s=Seconds(0.0),
        latency_p95_s=Seconds(0.0),
        joules=Joules(0.0),
        energy_source=source,
        samples=0,
        load_cpu_s=Seconds(load_time.cpu_s),
    )
    uncompared = "" if order.comparison is None else "not compared with the processor"
    note = _note(order, engine, f"serves without a warm-up: {why.found}", uncompared)
    return LoadResult(measured, engine.inputs, engine.outputs, note, tuple(sorted(engine.operators)))


def energy_of_order(order: LoadOrder, pace: ModelPace | None) -> Energy:
    if pace is None:
        return energy_of(order.access, order.threads)
    return ConstantPower(pace.watts, EnergySource.PROFILE)


def pace_of(order: LoadOrder) -> ModelPace | None:
    """How the model runs on its device, if that is emulated. Raises ShoalError(LOAD_FAILED)."""
    if order.access.pace is None:
        return None
    return model_pace(order.access.pace, order.work, order.weights, order.arithmetic or order.precision)


def scale_of(order: LoadOrder, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Elements of these inputs for each one of the reference shapes."""
    reference = element_count(order.work.shapes)
    return element_count(shapes) / reference if reference else 1.0


def terminate(options: ort.RunOptions) -> None:
    options.terminate = True

"""The capability probe: measures one device through the runtime in at most ten seconds.

`agents/generate_probe.py` writes the graphs. The work grows until one run takes some milliseconds, so that launch
overhead does not hide the rate. Rates are those of the fastest run with one request in flight, because what else the
machine does makes a run slower and never faster. Runs have as many threads as those of models will have.
"""

import os
import time
from importlib import resources
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from shoal.agent.worker.energy import energy_of, idle_watts
from shoal.agent.worker.engine import open_engine, run_clock
from shoal.agent.worker.memory import measure_provider_memory
from shoal.agent.worker.messages import ProbeOrder, ProbeResult, ProviderMemory
from shoal.agent.worker.providers import Provider
from shoal.host.memory import return_at_once
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.receipt import Rates
from shoal.types.units import Seconds, Watts
from shoal.wire.varint import varint

_WIDTH: Final = 768
_CHANNELS: Final = 64
_SIDE: Final = 56
_MATMUL_FLOPS: Final = 2.0 * _WIDTH**2
_CONV_FLOPS: Final = 2.0 * _CHANNELS**2 * 9 * _SIDE**2
_BLOCK: Final = 4096
"""Floats in one unit of the two memory graphs."""
_CHAIN: Final = 65
_LOAD_ELEMENTS: Final = 2**22
_DTYPES: Final = {"fp32": np.float32, "fp16": np.float16, "int8": np.uint8, "fp64": np.float64}
_MIN_RUN_S: Final = 4e-3
_MAX_STRETCH: Final = 4096
_MIN_RUNS: Final = 5
_MAX_RUNS: Final = 50
_MAX_SHORT_RUNS: Final = 5000
"""Of graphs that take microseconds: together they take longer than another program's turn on the core."""
_MOST_STRETCHED: Final = 2.0
"""On a busy machine a series may take so many times its own time, since the caller waits for the probe."""
_SERIES_COUNT: Final = 14


def probe(order: ProbeOrder) -> ProbeResult:
    """Raises ShoalError(RUNTIME_FAILED) if the provider cannot run even the simplest graphs."""
    began = time.perf_counter()
    os.environ.update(order.access.environment)
    idle_w = idle_watts(order.access, order.cores)
    energy = energy_of(order.access, 1)
    busy_from = time.perf_counter()
    bench = _Bench(order, series_s=0.6 * order.budget_s / _SERIES_COUNT)
    try:
        # Before anything else has opened a session here.
        own = bench.provider_memory()
        matmul, conv = {}, {}
        for precision in _DTYPES:
            product, layer = f"matmul_{precision}", f"conv_{precision}"
            if precision == "fp32" or bench.can_run(product, (1, _WIDTH), precision):
                matmul[precision] = bench.rate(product, (1, _WIDTH), _MATMUL_FLOPS, precision)
            if precision == "fp32" or bench.can_run(layer, (1, _CHANNELS, _SIDE, _SIDE), precision):
                conv[precision] = bench.rate(layer, (1, _CHANNELS, _SIDE, _SIDE), _CONV_FLOPS, precision)
        elementwise = bench.rate("elementwise", (_BLOCK,), 2 * 4.0 * _BLOCK)
        copy = bench.rate("copy", (_BLOCK,), 4 * 4.0 * _BLOCK)
        launch = min(bench.times("launch", (1,)))
        chain = min(bench.times("chain", (1,)))
        load = bench.load_rate()
    except Exception as error:
        raise _probe_error(order, error) from error
    busy_s = time.perf_counter() - busy_from
    rates = Rates(
        matmul_flops=matmul,
        conv_flops=conv,
        elementwise_bytes=elementwise,
        copy_bytes=copy,
        launch_s=Seconds(launch),
        node_s=Seconds(max(0.0, chain - launch) / (_CHAIN - 1)),
        load_bytes=load,
        idle_w=Watts(idle_w),
        active_w=Watts(energy.joules({"": busy_s})[""] / busy_s),
        energy_source=energy.source,
    )
    probe_s = time.perf_counter() - began
    operators = tuple(sorted(bench.operators))
    return ProbeResult(rates, tuple(matmul), operators, bench.spread, probe_s, provider_memory=own)


def probe_memory(order: ProbeOrder) -> ProviderMemory:
    """What the provider takes for itself, and nothing else of the device. In a process that has opened no session.

    Raises ShoalError(RUNTIME_FAILED)."""
    os.environ.update(order.access.environment)
    try:
        return _Bench(order, series_s=0.0).provider_memory()
    except Exception as error:
        raise _probe_error(order, error) from error


def _probe_error(order: ProbeOrder, error: Exception) -> ShoalError:
    found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return refuse(Code.RUNTIME_FAILED, found, f"the probe's graphs on {order.provider}", "check the driver")


class _Bench:
    """Times graphs on one provider, with their tensors on its device. `spread` is the widest of the fp32 rates;
    `operators` are those that the provider took."""

    def __init__(self, order: ProbeOrder, series_s: float) -> None:
        self.spread = 0.0
        self.operators: set[str] = set()
        self._order = order
        self._series_s = series_s
        self._clock = run_clock(order.provider, order.threads)
        # The input of the current binding. A binding does not keep its memory alive (on a CPU, numpy's), so this does.
        self._input_value: Any = None

    def provider_memory(self) -> ProviderMemory:
        return measure_provider_memory(self._order.access, self._open_smallest)

    def _open_smallest(self) -> list[ort.InferenceSession]:
        """One run each of a matrix product and a convolution of less than 3 MB: for these a provider brings libraries
        of its own, which it opens when they are first needed."""
        found = []
        for graph, shape in (("matmul_fp32", (1, _WIDTH)), ("conv_fp32", (1, _CHANNELS, _SIDE, _SIDE))):
            with return_at_once():
                found.append(self._open(graph, shape))
            self._run_once(found[-1], shape, "fp32")
        return found

    def can_run(self, graph: str, shape: tuple[int, ...], precision: str) -> bool:
        """Whether the provider can run this graph."""
        try:
            self._run_once(self._open(graph, shape, precision), shape, precision)
        except Exception:
            return False
        return True

    def rate(self, graph: str, unit: tuple[int, ...], cost: float, precision: str = "fp32") -> float:
        """FLOPs or bytes per second, if a run over `unit` costs `cost`. The first axis is scaled up."""
        n = 1
        while True:
            shape = (n * unit[0], *unit[1:])
            session = self._open(graph, shape, precision)
            once = self._run_once(session, shape, precision)
            if once >= _MIN_RUN_S or n >= _MAX_STRETCH:
                break
            n = min(_MAX_STRETCH, n * max(2, min(16, round(_MIN_RUN_S / max(once, 1e-6)))))
        times = self._time_series(session, shape, precision)
        if precision == "fp32":
            self.spread = max(self.spread, relative_half_width(times))
        return cost * n / min(times)

    def times(self, graph: str, shape: tuple[int, ...]) -> list[float]:
        return self._time_series(self._open(graph, shape), shape, "fp32", _MAX_SHORT_RUNS)

    def load_rate(self) -> float:
        """Bytes per second at which a model becomes ready: one large constant, opened and run once."""
        model = with_weights(read_graph("load"), _LOAD_ELEMENTS)
        times = []
        for _ in range(3):
            start = self._clock()
            session = self._session(model, (1,), "fp32")
            session.run(None, {"x": np.zeros(1, np.float32)})
            times.append(self._clock() - start)
        return len(model) / min(times)

    def _open(self, graph: str, shape: tuple[int, ...], precision: str = "fp32") -> ort.InferenceSession:
        return self._session(read_graph(graph), shape, precision)

    def _session(self, model: bytes, shape: tuple[int, ...], precision: str) -> ort.InferenceSession:
        """Raises ShoalError(OP_UNSUPPORTED) where the provider leaves a node to another: that is not its rate."""
        order = self._order
        shapes = {"x": shape} if order.fixed_shapes else {}
        engine = open_engine(model, Provider(order.provider, order.access, precision, order.threads), shapes)
        self.operators |= engine.operators
        return engine.session

    def _run_once(self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str) -> float:
        binding = self._bind(session, shape, precision)
        self._time_run(session, binding)
        return self._time_run(session, binding)

    def _time_series(
        self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str, most: int = _MAX_RUNS
    ) -> list[float]:
        binding = self._bind(session, shape, precision)
        self._time_run(session, binding)
        times: list[float] = []
        until = time.perf_counter() + _MOST_STRETCHED * self._series_s
        while len(times) < _MIN_RUNS or (
            len(times) < most and sum(times) < self._series_s and time.perf_counter() < until
        ):
            times.append(self._time_run(session, binding))
        return times

    def _bind(self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str) -> Any:
        memory = self._order.access.memory
        binding = session.io_binding()
        array = np.ones(shape, dtype=_DTYPES[precision])
        self._input_value = ort.OrtValue.ortvalue_from_numpy(array, memory, 0)
        binding.bind_ortvalue_input("x", self._input_value)
        binding.bind_output("y", memory)
        return binding

    def _time_run(self, session: ort.InferenceSession, binding: Any) -> float:
        start = self._clock()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return self._clock() - start


def relative_half_width(times: list[float]) -> float:
    """Half of the distance between the 10th and 90th percentile, relative to the median."""
    low, median, high = np.quantile(times, (0.1, 0.5, 0.9))
    return float((high - low) / 2 / median)


def with_weights(model: bytes, count: int) -> bytes:
    """`model` with an initializer `w` of `count` floats: concatenated messages merge (protobuf encoding)."""
    raw = np.ones(count, np.float32).tobytes()
    tensor = b"\x08" + varint(count) + b"\x10\x01" + b"\x42\x01w" + b"\x4a" + varint(len(raw)) + raw
    graph = b"\x2a" + varint(len(tensor)) + tensor
    return model + b"\x3a" + varint(len(graph)) + graph


def read_graph(name: str) -> bytes:
    return (resources.files("shoal.agent.worker") / "graphs" / f"{name}.onnx").read_bytes()

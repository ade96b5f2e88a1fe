"""The capability probe: what one device does through the runtime, measured in at most ten seconds.

Graphs are written by `agents/generate_probe.py`. Work is made larger until one run takes some milliseconds, so that
launching does not hide the rate; rates are those of the median run with one request in flight.
"""

import time
from importlib import resources
from statistics import median
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from shoal.agent.worker.energy import energy_of, idle_watts
from shoal.agent.worker.engine import session_options, show_only, with_options
from shoal.agent.worker.messages import Probed, ProbeOrder
from shoal.types.codes import Code, refuse
from shoal.types.receipt import Rates
from shoal.types.units import Seconds, Watts

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
_ENOUGH_S: Final = 4e-3
_LARGEST: Final = 4096
_FEWEST_RUNS: Final = 5
_MOST_RUNS: Final = 50
_SERIES: Final = 14


def probe(order: ProbeOrder) -> Probed:
    """Raises ShoalError(RUNTIME_FAILED) when the provider cannot even run the plainest graphs."""
    began = time.perf_counter()
    show_only(order.visible)
    idle_w = idle_watts(order.meters, order.cores)
    energy = energy_of(order.meters, 1)
    busy_from = time.perf_counter()
    bench = _Bench(order.provider, series_s=0.6 * order.budget_s / _SERIES)
    try:
        matmul, conv = {}, {}
        for precision in _DTYPES:
            product, layer = f"matmul_{precision}", f"conv_{precision}"
            if precision == "fp32" or bench.runs(product, (1, _WIDTH), precision):
                matmul[precision] = bench.rate(product, (1, _WIDTH), _MATMUL_FLOPS, precision)
            if precision == "fp32" or bench.runs(layer, (1, _CHANNELS, _SIDE, _SIDE), precision):
                conv[precision] = bench.rate(layer, (1, _CHANNELS, _SIDE, _SIDE), _CONV_FLOPS, precision)
        elementwise = bench.rate("elementwise", (_BLOCK,), 2 * 4.0 * _BLOCK)
        copy = bench.rate("copy", (_BLOCK,), 4 * 4.0 * _BLOCK)
        launch = median(bench.times("launch", (1,)))
        chain = median(bench.times("chain", (1,)))
        load = bench.load_rate()
    except Exception as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise refuse(
            Code.RUNTIME_FAILED, found, f"the probe's graphs on {order.provider}", "check the driver"
        ) from error
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
    return Probed(rates, tuple(matmul), (), bench.spread, probe_s)


class _Bench:
    """Times graphs on one provider, their tensors on its device. `spread`: the widest of the fp32 rates."""

    def __init__(self, provider: str, series_s: float) -> None:
        self.spread = 0.0
        self._provider = provider
        self._device = "cuda" if provider.startswith(("CUDA", "Tensorrt")) else "cpu"
        self._series_s = series_s
        self._bound: Any = None
        """What the binding in use reads: on a processor that is numpy's memory, and a binding does not hold it."""

    def runs(self, graph: str, shape: tuple[int, ...], precision: str) -> bool:
        """Whether the provider runs this graph at all."""
        try:
            self._once(self._open(graph), shape, precision)
        except Exception:
            return False
        return True

    def rate(self, graph: str, unit: tuple[int, ...], cost: float, precision: str = "fp32") -> float:
        """FLOPs or bytes a second, where a run over `unit` costs `cost`; its first axis is stretched."""
        session = self._open(graph)
        n = 1
        while (once := self._once(session, (n * unit[0], *unit[1:]), precision)) < _ENOUGH_S and n < _LARGEST:
            n = min(_LARGEST, n * max(2, min(16, round(_ENOUGH_S / max(once, 1e-6)))))
        times = self._series(session, (n * unit[0], *unit[1:]), precision)
        if precision == "fp32":
            self.spread = max(self.spread, half_width(times))
        return cost * n / median(times)

    def times(self, graph: str, shape: tuple[int, ...]) -> list[float]:
        return self._series(self._open(graph), shape, "fp32")

    def load_rate(self) -> float:
        """Bytes of a model made ready a second: one large constant, opened and run once."""
        model = with_weights(read_graph("load"), _LOAD_ELEMENTS)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            session = ort.InferenceSession(model, session_options(1), providers=[with_options(self._provider, 1)])
            session.run(None, {"x": np.zeros(1, np.float32)})
            times.append(time.perf_counter() - start)
        return len(model) / median(times)

    def _open(self, graph: str) -> ort.InferenceSession:
        providers = [with_options(self._provider, 1)]
        return ort.InferenceSession(read_graph(graph), session_options(1), providers=providers)

    def _once(self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str) -> float:
        binding = self._bind(session, shape, precision)
        self._timed(session, binding)
        return self._timed(session, binding)

    def _series(self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str) -> list[float]:
        binding = self._bind(session, shape, precision)
        self._timed(session, binding)
        times: list[float] = []
        while len(times) < _FEWEST_RUNS or (len(times) < _MOST_RUNS and sum(times) < self._series_s):
            times.append(self._timed(session, binding))
        return times

    def _bind(self, session: ort.InferenceSession, shape: tuple[int, ...], precision: str) -> Any:
        binding = session.io_binding()
        array = np.ones(shape, dtype=_DTYPES[precision])
        self._bound = ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)
        binding.bind_ortvalue_input("x", self._bound)
        binding.bind_output("y", self._device)
        return binding

    @staticmethod
    def _timed(session: ort.InferenceSession, binding: Any) -> float:
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        return time.perf_counter() - start


def half_width(times: list[float]) -> float:
    """Half of what lies between the 10th and 90th percentile, relative to the median."""
    low, high = np.quantile(times, (0.1, 0.9))
    return float(high - low) / 2 / median(times)


def with_weights(model: bytes, count: int) -> bytes:
    """`model` with an initializer `w` of `count` floats: messages that are concatenated merge (protobuf encoding)."""
    raw = np.ones(count, np.float32).tobytes()
    tensor = b"\x08" + _varint(count) + b"\x10\x01" + b"\x42\x01w" + b"\x4a" + _varint(len(raw)) + raw
    graph = b"\x2a" + _varint(len(tensor)) + tensor
    return model + b"\x3a" + _varint(len(graph)) + graph


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_graph(name: str) -> bytes:
    return (resources.files("shoal.agent.worker") / "graphs" / f"{name}.onnx").read_bytes()

"""Makes an int8 model of one in fp32: weights in 8 bits, activations in 8 or 16, by the ranges that samples show.

The result is ONNX with QuantizeLinear and DequantizeLinear around each operator (QDQ), which every provider of ONNX
Runtime takes. The rules of which operators and types are those of ONNX Runtime for Qualcomm's NPUs
(`onnxruntime.quantization.execution_providers.qnn`), the strictest that there are; other providers take the same.
What is cheapest to run is tried first, and the first whose answers are near enough to the pushed model's is taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from shoal.agent.core.verification import worst_drifts
from shoal.agent.worker.compare import compare
from shoal.agent.worker.engine import Engine, open_engine, run_options, session_options
from shoal.agent.worker.failures import brief_error, memory_refusal
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.agent.worker.shapes import fix_shapes
from shoal.agent.worker.tensors import Array
from shoal.artifacts.samples import SamplePack, read_pack
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import Drift, Tolerance

_TRIED: Final = (
    ("activations in 8 bits", QuantType.QUInt8, QuantType.QInt8),
    ("activations in 8 bits, weights unsigned", QuantType.QUInt8, QuantType.QUInt8),
    ("activations in 16 bits", QuantType.QUInt16, QuantType.QInt8),
    ("activations in 16 bits, weights unsigned", QuantType.QUInt16, QuantType.QUInt8),
)
"""(in words, activations, weights), the cheapest first. Signed weights are symmetric and cost an NPU nothing more;
unsigned ones have a zero point and fit those that lie to one side. PP-OCR's angle classifier over a page, activations
in 16 bits: cosine at worst 0.939 with signed weights, 0.987 with unsigned ones."""
_MOST_SAMPLES: Final = 64
"""Ranges of a few dozen samples are what ONNX Runtime's and Qualcomm's own examples calibrate with; each one more costs
two runs of the pushed model in fp32."""
_HELD_OUT: Final = 4
_PER_CHANNEL_OPSET: Final = 13
"""The first opset whose DequantizeLinear takes a scale for each channel (ONNX, docs/Changelog.md)."""

_Feeds = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """One sample and the pushed model's answer to it."""

    feeds: _Feeds
    answer: Mapping[str, Array]


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """All samples but every `_HELD_OUT`th, so that the answers are judged on some by which no range was set, too."""

    def __init__(self, samples: Sequence[_Sampled]) -> None:
        self._rest = iter([each for index, each in enumerate(samples, 1) if index % _HELD_OUT])

    def get_next(self) -> Any:
        """The next sample, by input name; None after the last."""
        following = next(self._rest, None)
        return following.feeds if following is not None else None


def quantise(
    model: bytes,
    samples: bytes,
    tolerances: Sequence[Tolerance],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    made: Path,
) -> str:
    """Write the int8 model to `made`, and return for people what it is. `folder` takes files of the work.

    Raises ShoalError(PREPARE_FAILED) where it cannot be quantised, or not within the tolerances; MODEL_INVALID for
    samples that are not the model's; and what `open_engine` raises of the pushed model.
    """
    fixed = fix_shapes(model, shapes)
    pushed = open_engine(fixed, Provider(CPU_PROVIDER))
    pack = read_pack(samples, pushed.inputs, pushed.outputs)
    sampled = [_Sampled(feeds, _answer(pushed, feeds)) for feeds in _feeds(pack)]
    simplified = folder / "simplified.onnx"
    _simplify(fixed, simplified)
    short: tuple[Drift, ...] = ()
    for kind, activations, weights in _TRIED:
        _quantise(simplified, made, activations, weights, sampled)
        engine = open_engine(made.read_bytes(), Provider(CPU_PROVIDER))
        compared = [compare(each.answer, _answer(engine, each.feeds), tolerances) for each in sampled]
        if fault := next((each.fault for each in compared if each.fault), ""):
            raise _failed(f"in int8, {fault}")
        drifts = worst_drifts(compared)
        if all(drift.passed for drift in drifts):
            judged = f"{len(sampled)} samples, {len(sampled) // _HELD_OUT} of them held out"
            return f"int8, {kind}: {_show(drifts)} over {judged}"
        short = tuple(drift for drift in drifts if not drift.passed)
    raise _failed(f"over {len(sampled)} samples, {_show(short)}")


def _feeds(pack: SamplePack) -> Iterator[_Feeds]:
    for index in range(min(pack.count, _MOST_SAMPLES)):
        yield pack.sample(index)[0]


def _answer(engine: Engine, feeds: _Feeds) -> Mapping[str, Array]:
    return engine.run(feeds, [spec.name for spec in engine.outputs], run_options())


def _simplify(model: bytes, to: Path) -> None:
    """Fold constants and batch normalisation into what is before them, so that ranges are those of what is computed;
    and name every shape."""
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(to)
    ort.InferenceSession(model, options, providers=[CPU_PROVIDER])
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(str(to))), str(to))


def _quantise(model: Path, made: Path, activations: QuantType, weights: QuantType, sampled: Sequence[_Sampled]) -> None:
    try:
        config: Any = get_qnn_qdq_config(
            str(model), _Reader(sampled), activation_type=activations, weight_type=weights, per_channel=True
        )
        opset = next((each.version for each in onnx.load(str(model)).opset_import if each.domain in ("", "ai.onnx")), 0)
        if opset < _PER_CHANNEL_OPSET:  # the runtime's own operators take it at any opset
            config.extra_options["UseQDQContribOps"] = True
        quantize(str(model), str(made), config)
    except Exception as error:  # the quantiser documents none of what it raises
        if (short := memory_refusal(error)) is not None:
            raise ShoalError(short) from error
        raise _failed(f"the quantiser says: {brief_error(error)}") from error


def _show(drifts: Sequence[Drift]) -> str:
    return ", ".join(f"{drift.output} {drift.metric} {drift.worst:.3g} (bound {drift.bound:g})" for drift in drifts[:4])


def _failed(found: str) -> ShoalError:
    return refuse(
        Code.PREPARE_FAILED, found[:500], "an int8 model whose answers are within the tolerance",
        "samples that show what is served; another `tolerance`; or a variant that was trained for int8",
    )  # fmt: skip

"""Makes an int8 model of one in fp32: weights in 8 bits, activations in 8 or 16, by the ranges that samples show.

The result is ONNX with QuantizeLinear and DequantizeLinear around each operator (QDQ), which every provider of ONNX
Runtime takes. The rules of which operators and types are those of ONNX Runtime for Qualcomm's NPUs
(`onnxruntime.quantization.execution_providers.qnn`), the strictest that there are; other providers take the same.
What is cheapest to run is tried first, and the first whose answers are near enough to the pushed model's is taken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from shoal.agent.preparation.answers import (
    Sampled,
    answers_to_samples,
    compare_answers,
    conversion_failed,
    open_on_processor,
    prepare_failed,
    show_drifts,
    simplify,
)
from shoal.agent.worker.shapes import fix_shapes
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
_HELD_OUT: Final = 4
_PER_CHANNEL_OPSET: Final = 13
"""The first opset whose DequantizeLinear takes a scale for each channel (ONNX, docs/Changelog.md)."""


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    """All samples but every `_HELD_OUT`th, so that the answers are judged on some by which no range was set, too."""

    def __init__(self, samples: Sequence[Sampled]) -> None:
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
    sampled = answers_to_samples(open_on_processor(fixed), samples)
    simplified = folder / "simplified.onnx"
    simplify(fixed, simplified)
    short: tuple[Drift, ...] = ()
    for kind, activations, weights in _TRIED:
        _quantise(simplified, made, activations, weights, sampled)
        drifts, fault = compare_answers(open_on_processor(made.read_bytes()), sampled, tolerances)
        if fault:
            raise prepare_failed("int8", fault)
        if all(drift.passed for drift in drifts):
            judged = f"{len(sampled)} samples, {len(sampled) // _HELD_OUT} of them held out"
            return f"int8, {kind}: {show_drifts(drifts)} over {judged}"
        short = tuple(drift for drift in drifts if not drift.passed)
    raise prepare_failed("int8", f"over {len(sampled)} samples, {show_drifts(short)}")


def _quantise(model: Path, made: Path, activations: QuantType, weights: QuantType, sampled: Sequence[Sampled]) -> None:
    try:
        config: Any = get_qnn_qdq_config(
            str(model), _Reader(sampled), activation_type=activations, weight_type=weights, per_channel=True
        )
        opset = next((each.version for each in onnx.load(str(model)).opset_import if each.domain in ("", "ai.onnx")), 0)
        if opset < _PER_CHANNEL_OPSET:  # the runtime's own operators take it at any opset
            config.extra_options["UseQDQContribOps"] = True
        quantize(str(model), str(made), config)
    except Exception as error:
        raise conversion_failed("int8", error) from error

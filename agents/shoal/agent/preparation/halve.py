"""Makes an fp16 model of one in fp32: weights and arithmetic in 16 bits, inputs and outputs as they were.

The conversion is ONNX Runtime's (`onnxruntime.transformers.float16`), with its list of operators that stay in fp32. It
needs no samples. Constants beyond fp16 become its largest number, which is right for masks and bounds; whether it is
right for the model, its answers tell.

It is judged by how it would answer on a device that computes in fp16 (`rounding`), and as it is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from shoal.agent.preparation.answers import (
    Sampled,
    answers_to_generated,
    answers_to_samples,
    compare_answers,
    conversion_failed,
    open_on_processor,
    prepare_failed,
    show_drifts,
    simplify,
)
from shoal.agent.preparation.rounding import LARGEST, first_beyond, round_inputs, round_outputs
from shoal.agent.worker.engine import Engine
from shoal.agent.worker.shapes import fix_shapes
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError
from shoal.types.migration import Drift, Tolerance


def halve(
    model: bytes,
    samples: bytes,
    work: Work,
    tolerances: Sequence[Tolerance],
    shapes: Mapping[str, tuple[int, ...]],
    folder: Path,
    made: Path,
) -> str:
    """Write the fp16 model to `made`, and return for people what it is. `folder` takes files of the work. Without
    samples it is judged on generated inputs, by the `work` of the model.

    Raises ShoalError(PREPARE_FAILED) where it cannot be made, not within the tolerances, or not within the range of
    fp16; MODEL_INVALID for samples that are not the model's; and what `open_engine` raises of the pushed model.
    """
    fixed = fix_shapes(model, shapes)
    pushed = open_on_processor(fixed)
    sampled = answers_to_samples(pushed, samples) if samples else answers_to_generated(pushed, work)
    judged_on = f"{len(sampled)} {'samples' if samples else 'generated inputs'}"
    if not sampled:
        raise prepare_failed("fp16", "the model takes none of the inputs that were generated")
    path = folder / "simplified.onnx"
    simplify(fixed, path)
    simplified = onnx.load(str(path))
    halved = _convert(onnx.load(str(path)), [spec.name for spec in (*pushed.inputs, *pushed.outputs)])
    made.write_bytes(halved.SerializeToString(deterministic=True))
    rounded = open_on_processor(round_outputs(simplified, halved).SerializeToString())
    rounded_inputs = [Sampled(round_inputs(each.feeds), each.answer) for each in sampled]
    worst: tuple[Drift, ...] = ()
    for engine, inputs in ((rounded, rounded_inputs), (_open_made(made), sampled)):
        drifts, fault = compare_answers(engine, inputs, tolerances)
        over = tuple(each for each in drifts if not each.passed)
        if fault or over:
            found = fault or show_drifts(over)
            beyond = first_beyond(simplified, [each.feeds for each in sampled])
            raise prepare_failed("fp16", f"over {judged_on}, {found}{beyond and '; '}{beyond}")
        worst = worst or drifts
    clamped = _count_clamped(simplified, halved)
    cut = f"; {clamped} constants cut to {LARGEST:g}" if clamped else ""
    return f"fp16: {show_drifts(worst)} over {judged_on}{cut}"


def _convert(model: ModelProto, as_they_were: Sequence[str]) -> ModelProto:
    """as_they_were: names of inputs and outputs."""
    try:
        halved: ModelProto = convert_float_to_float16(
            model,
            keep_io_types=list(as_they_were),  # pyright: ignore
            disable_shape_infer=True,
            max_finite_val=LARGEST,
        )
    except Exception as error:
        raise conversion_failed("fp16", error) from error
    return halved


def _open_made(made: Path) -> Engine:
    """Raises ShoalError(PREPARE_FAILED | OUT_OF_MEMORY): it may mix types where an operator takes one."""
    try:
        return open_on_processor(made.read_bytes())
    except ShoalError as error:
        if error.code is Code.OUT_OF_MEMORY:
            raise
        raise prepare_failed("fp16", f"not made: {error.refusal.found}") from error


def _count_clamped(simplified: ModelProto, halved: ModelProto) -> int:
    """How many elements of weights are cut to what fp16 has."""
    halves = {each.name for each in halved.graph.initializer if each.data_type == TensorProto.FLOAT16}
    arrays = (numpy_helper.to_array(each) for each in simplified.graph.initializer if each.name in halves)
    return sum(int(np.count_nonzero(np.isfinite(each) & (np.abs(each) > LARGEST))) for each in arrays)

"""What a pushed model answers, and how far the answers of a model that was made of it are off."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort

from shoal.agent.core.verification import worst_drifts
from shoal.agent.worker.compare import compare
from shoal.agent.worker.engine import Engine, open_engine, run_options, session_options
from shoal.agent.worker.failures import brief_error, memory_refusal
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.tensors import Array
from shoal.artifacts.samples import read_pack
from shoal.types.assignment import Work
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.migration import Drift, Tolerance
from shoal.types.units import show_number

_MOST_SAMPLES: Final = 64
"""Ranges of a few dozen samples are what ONNX Runtime's and Qualcomm's own examples calibrate with; each one more costs
two runs of the pushed model in fp32."""
_GENERATED: Final = 8
"""Inputs where there are no samples: as many as a move compares (`Verification.samples`)."""
_TRIED_PER_GENERATED: Final = 4
"""Inputs that are generated for each one that counts, because the model may refuse one."""

Feeds = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One input and the pushed model's answer to it."""

    feeds: Feeds
    answer: Mapping[str, Array]


def open_on_processor(model: bytes) -> Engine:
    """Raises ShoalError as `open_engine` does."""
    return open_engine(model, Provider(CPU_PROVIDER))


def answers_to_samples(pushed: Engine, samples: bytes) -> list[Sampled]:
    """Raises ShoalError(MODEL_INVALID) for samples that are not the model's."""
    pack = read_pack(samples, pushed.inputs, pushed.outputs)
    inputs = [pack.sample(index)[0] for index in range(min(pack.count, _MOST_SAMPLES))]
    return [Sampled(feeds, answer_of(pushed, feeds)) for feeds in inputs]


def answers_to_generated(pushed: Engine, work: Work) -> list[Sampled]:
    """Of the inputs that a comparison would generate, those that the model answers. work: the model's."""
    found: list[Sampled] = []
    for index in range(_TRIED_PER_GENERATED * _GENERATED):
        if len(found) == _GENERATED:
            break
        feeds = sample_input(pushed.inputs, work, 0, index)
        try:
            found.append(Sampled(feeds, answer_of(pushed, feeds)))
        except ShoalError as error:
            if error.code not in (Code.INVALID_ARGUMENT, Code.RUNTIME_FAILED):
                raise
    return found


def answer_of(engine: Engine, feeds: Feeds, outputs: Sequence[str] = ()) -> Mapping[str, Array]:
    """outputs: their names; empty: all."""
    return engine.run(feeds, outputs or [spec.name for spec in engine.outputs], run_options())


def compare_answers(
    made: Engine, sampled: Sequence[Sampled], tolerances: Sequence[Tolerance]
) -> tuple[tuple[Drift, ...], str]:
    """The worst of each output and metric, and a difference that no tolerance allows; empty for none."""
    compared = [compare(each.answer, answer_of(made, each.feeds), tolerances) for each in sampled]
    return worst_drifts(compared), next((each.fault for each in compared if each.fault), "")


def simplify(model: bytes, to: Path) -> None:
    """Fold constants and batch normalisation into what is before them, so that what is converted is what is computed;
    and name every type and shape."""
    options = session_options(1)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(to)
    ort.InferenceSession(model, options, providers=[CPU_PROVIDER])
    onnx.save(onnx.shape_inference.infer_shapes(onnx.load(str(to))), str(to))


def show_drifts(drifts: Sequence[Drift]) -> str:
    return ", ".join(
        f"{drift.output} {drift.metric} {show_number(drift.worst)} (bound {show_number(drift.bound, 6)})"
        for drift in drifts[:4]
    )


def conversion_failed(precision: str, error: Exception) -> ShoalError:
    """What converts models raised `error`, and documents none of what it raises."""
    short = memory_refusal(error)
    return ShoalError(short) if short is not None else prepare_failed(precision, f"not made: {brief_error(error)}")


def prepare_failed(precision: str, found: str) -> ShoalError:
    return refuse(
        Code.PREPARE_FAILED, found[:500], f"a model in {precision} whose answers are within the tolerance",
        "samples that show what is served; another `tolerance`; or a variant that was made for that precision",
    )  # fmt: skip

"""Compares the answers of a model that was just loaded with those of the processor's provider, where its device
computes in another precision than the model's.

A move compares the new replica with the old one. The first replica of a model has nobody to be compared with, so its
own node opens the model once more, on the processor, for as long as this takes.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Final

import onnxruntime as ort
import structlog

from shoal.agent.core.verification import InputComparison, drift_refusal, show_drifts
from shoal.agent.worker.compare import compare
from shoal.agent.worker.engine import Engine, WarmupResult, open_engine, read_and_verify
from shoal.agent.worker.messages import LoadOrder
from shoal.agent.worker.providers import CPU_PROVIDER, Provider
from shoal.agent.worker.sample_inputs import sample_input
from shoal.agent.worker.tensors import Array
from shoal.artifacts.samples import SamplePack
from shoal.host.memory import trim
from shoal.types.assignment import Comparison
from shoal.types.codes import Code, ShoalError, refuse

_log = structlog.get_logger(__name__)

_SHARE_OF_WARM_UP: Final = 0.5
"""Of the time that the warm-up may take: no further input is compared after it. A simulator of a chip takes seconds for
one run."""
_TRIED_PER_INPUT: Final = 4
"""Inputs that are tried for each one that counts, because the model may refuse a generated one."""
_NO_ANSWER: Final = (Code.INVALID_ARGUMENT, Code.RUNTIME_FAILED)
"""What a model says to an input that it does not take."""


def compare_with_processor(
    order: LoadOrder, engine: Engine, warm_up: WarmupResult, samples: SamplePack | None, options: ort.RunOptions
) -> str:
    """How far the engine's answers are from the processor's, for people; empty where the order asks for no comparison.

    The first input is the warm-up's, which the engine has answered. The others are the samples, or generated where
    there are none. `options` ends a run whose time is up.

    Raises ShoalError(DRIFT_OVER | WARMUP_FAILED | OUT_OF_MEMORY | MODEL_DIGEST | LOAD_FAILED).
    """
    asked = order.comparison
    if asked is None:
        return ""
    pushed = read_and_verify(order.path, order.digest)
    try:
        reference = open_engine(pushed, Provider(CPU_PROVIDER, threads=order.threads), order.shapes)
    except ShoalError as error:
        if error.code is Code.OUT_OF_MEMORY:
            raise
        _log.warning("load_not_compared", assignment=order.assignment, code=error.code, error=str(error))
        return f"not compared, the processor does not run it: {error.refusal.found}"
    try:
        found = _compare(order, asked, engine, reference, warm_up, samples, options)
    finally:
        del reference, pushed
        trim()
    if not found and options.terminate:
        remedy = "a smaller model, or a device that computes in its precision"
        raise refuse(Code.WARMUP_FAILED, "no answer in time", "an answer to compare with the processor's", remedy)
    if not found:
        return "not compared, the processor answers none of the inputs"
    kind = "generated inputs" if samples is None else "samples"
    wanted = asked.samples if samples is None else min(asked.samples, samples.count)
    count = f"{len(found)}" if len(found) == wanted else f"{len(found)} of {wanted}"
    what = f"{count} {kind} on {order.provider}, which computes {order.precision} in {order.arithmetic}"
    refusal = drift_refusal(found, what)
    if refusal is None:
        return show_drifts(found, what)
    if not asked.advisory:
        raise ShoalError(refusal)
    return f"advisory: {refusal.found}"


def _compare(
    order: LoadOrder,
    asked: Comparison,
    engine: Engine,
    reference: Engine,
    warm_up: WarmupResult,
    samples: SamplePack | None,
    options: ort.RunOptions,
) -> list[InputComparison]:
    """One for each input that both answered."""
    names = [spec.name for spec in reference.outputs]
    ends = time.perf_counter() + _SHARE_OF_WARM_UP * order.warm_up_s
    found: list[InputComparison] = []
    for feeds in islice(_inputs(order, engine, warm_up, samples), _TRIED_PER_INPUT * asked.samples):
        if len(found) == asked.samples or options.terminate or (found and time.perf_counter() > ends):
            break
        try:
            # The processor first: it refuses indices that a device's own code may not check.
            expected = reference.run(feeds, names, options)
            got = warm_up.answers if feeds is warm_up.feeds else engine.run(feeds, names, options)
        except ShoalError as error:
            if error.code not in _NO_ANSWER:
                raise
            continue
        found.append(compare(expected, got, asked.tolerances))
    return found


def _inputs(
    order: LoadOrder, engine: Engine, warm_up: WarmupResult, samples: SamplePack | None
) -> Iterator[dict[str, Array]]:
    """The warm-up's first."""
    yield warm_up.feeds
    if samples is not None:
        yield from (samples.sample(index)[0] for index in range(1, samples.count))
        return
    index = 0
    while True:
        yield sample_input(engine.inputs, order.work, 0, index)
        index += 1

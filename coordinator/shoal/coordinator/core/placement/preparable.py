"""Whether a node can make a model in another precision for a device, and whether that is worth its while.

Of the precisions that are left, the objective chooses. int8 moves the fewest bytes and mostly computes fastest, so it
is made where there are samples and its answers are near enough. fp16 is what remains where not: a failed preparation
excludes its precision (`Inputs.unloadable`).
"""

from typing import Final

from shoal.coordinator.core.placement.accuracy import PUSHED
from shoal.coordinator.core.placement.relax import RequiredRelaxation, manual_remedy
from shoal.coordinator.core.prediction.demand import ModelDemand
from shoal.coordinator.core.prediction.roofline import arithmetic_seconds
from shoal.types.codes import Code, Refusal
from shoal.types.receipt import Receipt
from shoal.types.workload import NEEDS_SAMPLES, ModelRef, Requirements

_RATE_ERROR: Final = 0.15
"""Of a measured rate, at least: by so much a busy processor may be off (`test_probe_noise.py`). On one that has
no arithmetic of fp16 its rate was up to 12 % above that of fp32."""


def prepare_refusal(
    model: ModelRef, require: Requirements, receipt: Receipt | None, demand: ModelDemand, where: str, *, samples: bool
) -> tuple[Refusal, RequiredRelaxation] | None:
    """Why the model is not made in its precision for a device, and what would change that; None where it may be.

    receipt: the device's. demand: of the model. where: node and device, for people. samples: whether it has any.
    """
    wanted = f"{model.precision} of {model.source}"
    if model.precision in NEEDS_SAMPLES and not samples:
        refusal = Refusal(Code.PREPARE_UNAVAILABLE, "the model has no samples", f"samples, to make {wanted}")
        return refusal, manual_remedy(f"spec.model.samples, or shoal model push {model.source} --samples FILE")
    runtime = receipt.runtime if receipt is not None else None
    if receipt is None or runtime is None or not runtime.prepares:  # an older agent would load it as it was pushed
        refusal = Refusal(Code.PREPARE_UNAVAILABLE, f"{where} cannot prepare models", wanted)
        return refusal, manual_remedy("install the agent's extra `prepare` there")
    if model.precision not in runtime.prepares:
        refusal = Refusal(Code.PREPARE_UNAVAILABLE, f"{where} prepares {', '.join(runtime.prepares)}", wanted)
        return refusal, manual_remedy("update the agent; or allow fp32, if the device computes that so by itself")
    if model.precision == "fp16" and not _is_faster(receipt, require, demand, model.precision):
        found = f"{where} computes {model.precision} no faster than {PUSHED}"
        refusal = Refusal(Code.PREPARE_UNAVAILABLE, found, f"a gain by {wanted}")
        return refusal, manual_remedy(f"run it in {PUSHED} there")
    return None


def _is_faster(receipt: Receipt, require: Requirements, demand: ModelDemand, precision: str) -> bool:
    """Whether the device computes the model faster in that precision by its measured rates, beyond the error of both.
    True where the pushed model cannot run there, or may not."""
    if any(known and PUSHED not in known for known in (receipt.precisions, require.precisions)):
        return True
    error = max(receipt.spread, _RATE_ERROR)
    pushed, made = (arithmetic_seconds(demand, receipt.rates, each) for each in (PUSHED, precision))
    return made * (1 + error) < pushed * (1 - error)

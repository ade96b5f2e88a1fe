"""Derive the verdict on a replica from the comparison of each input's answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.types.codes import Code, Refusal
from shoal.types.migration import Against, Drift, InputsFrom, Metric, Verdict, Verification
from shoal.types.units import show_number


@dataclass(frozen=True, slots=True)
class InputComparison:
    """The answers to one input, compared."""

    # One for each output and metric, always in the same order.
    drifts: tuple[Drift, ...]
    # A difference that no tolerance allows; empty for none.
    fault: str
    # Number of values that could be compared.
    elements: int


def is_upper_bound(metric: Metric) -> bool:
    """Whether a tolerance's bound is an upper limit; else it is a lower one."""
    return metric in (Metric.MAX_ABS, Metric.MAX_REL)


def is_within(metric: Metric, found: float, bound: float) -> bool:
    """Whether `found` meets the bound. NaN never does."""
    return found <= bound if is_upper_bound(metric) else found >= bound


def verdict_of(
    asked: Verification, inputs_from: InputsFrom, comparisons: Sequence[InputComparison], inputs_sha256: str
) -> Verdict:
    """The verdict on all comparisons, which are in the order of their inputs.

    `inputs_from` says where the inputs came from. The reason names the first fault, then drifts beyond their bounds.
    """
    drifts = worst_drifts(comparisons)
    if differences := _differences(comparisons, drifts):
        code, reason = Code.VERIFY_FAILED, differences
    elif sum(each.elements for each in comparisons) == 0:
        code, reason = Code.VERIFY_IMPOSSIBLE, "no answer had a value to compare"
    elif len(comparisons) < asked.samples:
        code, reason = Code.VERIFY_IMPOSSIBLE, f"{len(comparisons)} inputs of {asked.samples} were answered"
    else:
        code, reason = None, ""
    return Verdict(
        migration=asked.migration,
        passed=code is None,
        code=code,
        reason=reason,
        against=asked.against,
        inputs=inputs_from,
        samples=len(comparisons),
        drifts=drifts,
        inputs_sha256=inputs_sha256,
        pack=asked.pack if asked.against is Against.REFERENCE else "",
    )


def drift_refusal(comparisons: Sequence[InputComparison], what: str) -> Refusal | None:
    """Why a model that was just loaded must not serve there, by the comparison of its answers with the processor's;
    None: nothing is wrong. what: the inputs and the device's provider and arithmetic, for people."""
    differences = _differences(comparisons, worst_drifts(comparisons))
    if not differences:
        return None
    return Refusal(
        Code.DRIFT_OVER,
        f"{differences}, over {what}",
        "answers as near to the processor's as the tolerance says",
        "a device that computes in the model's precision; another `tolerance` (require.precision); or a variant that "
        "was made for this precision",
    )


def show_drifts(comparisons: Sequence[InputComparison], what: str) -> str:
    """For people: how far answers are from the processor's; empty where no metric applied. what: as in
    `drift_refusal`."""
    drifts = ", ".join(
        f"{each.output} {each.metric} {show_number(each.worst)}" for each in worst_drifts(comparisons)[:4]
    )
    return f"{drifts} from the processor's, over {what}" if drifts else ""


def recording_verdict(
    asked: Verification, inputs_from: InputsFrom, samples: int, inputs_sha256: str, pack: str, why: str = ""
) -> Verdict:  # fmt: skip
    """The verdict on a recording. `pack` is the digest of the reference made of the replica's answers.

    Where `pack` is empty there is no reference, and `why` says so.
    """
    code = None if pack else Code.VERIFY_IMPOSSIBLE
    return Verdict(
        asked.migration,
        code is None,
        code,
        why,
        asked.against,
        inputs_from,
        samples,
        (),
        inputs_sha256,
        pack,
        recorded=True,
    )


def _differences(comparisons: Sequence[InputComparison], drifts: Sequence[Drift]) -> str:
    """The first difference that no tolerance allows, and the first drifts that are over their bounds; empty: none."""
    faults = [f"input {number}: {each.fault}" for number, each in enumerate(comparisons, 1) if each.fault]
    over = [
        f"{drift.output}: {drift.metric} {show_number(drift.worst, 4)}, "
        f"at {'most' if is_upper_bound(drift.metric) else 'least'} {drift.bound:g}"  # as policies write it: 1e-07
        for drift in drifts
        if not drift.passed
    ]
    return "; ".join((*faults[:1], *over[:3]))


def worst_drifts(comparisons: Sequence[InputComparison]) -> tuple[Drift, ...]:
    """The worst drift of each output and metric, in the order of their first appearance."""
    worst: dict[tuple[str, Metric], Drift] = {}
    for drift in (drift for each in comparisons for drift in each.drifts):
        key = drift.output, drift.metric
        held = worst.setdefault(key, drift)
        further = drift.worst > held.worst if is_upper_bound(drift.metric) else drift.worst < held.worst
        if further:
            worst[key] = replace(drift, passed=drift.passed and held.passed)
        else:
            worst[key] = replace(held, passed=drift.passed and held.passed)
    return tuple(worst.values())

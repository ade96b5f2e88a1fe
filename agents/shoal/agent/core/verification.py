"""Derive the verdict on a replica from the comparison of each input's answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.types.codes import Code
from shoal.types.migration import Against, Drift, InputsFrom, Metric, Verdict, Verification


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
    faults = [f"input {number}: {each.fault}" for number, each in enumerate(comparisons, 1) if each.fault]
    over = [
        f"{drift.output}: {drift.metric} {drift.worst:.4g}, at {'most' if is_upper_bound(drift.metric) else 'least'} "
        f"{drift.bound:.4g}"
        for drift in drifts
        if not drift.passed
    ]
    if faults or over:
        code, reason = Code.VERIFY_FAILED, "; ".join((*faults[:1], *over[:3]))
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

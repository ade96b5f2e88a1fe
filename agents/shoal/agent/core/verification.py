"""From what each input showed to a verdict on a replica."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.types.codes import Code
from shoal.types.migration import Against, Drift, InputsFrom, Metric, Verdict, Verification


@dataclass(frozen=True, slots=True)
class Compared:
    """The answers to one input. drifts: by output and metric, always in the same order. fault: what no tolerance
    excuses, "" for none. elements: values that could be compared."""

    drifts: tuple[Drift, ...]
    fault: str
    elements: int


def at_most(metric: Metric) -> bool:
    """Whether a tolerance's bound is the most that is allowed; else it is the least."""
    return metric in (Metric.MAX_ABS, Metric.MAX_REL)


def within(metric: Metric, found: float, bound: float) -> bool:
    """NaN is within nothing."""
    return found <= bound if at_most(metric) else found >= bound


def judge(asked: Verification, used: InputsFrom, compared: Sequence[Compared], inputs_sha256: str) -> Verdict:
    """used: where the inputs came from. compared: of each input in its order; the first fault or drift that counts is
    the reason."""
    drifts = _worst(compared)
    faults = [f"input {number}: {each.fault}" for number, each in enumerate(compared, 1) if each.fault]
    over = [
        f"{drift.output}: {drift.metric} {drift.worst:.4g}, at {'most' if at_most(drift.metric) else 'least'} "
        f"{drift.bound:.4g}"
        for drift in drifts
        if not drift.passed
    ]
    if faults or over:
        code, reason = Code.VERIFY_FAILED, "; ".join((*faults[:1], *over[:3]))
    elif sum(each.elements for each in compared) == 0:
        code, reason = Code.VERIFY_IMPOSSIBLE, "no answer had a value to compare"
    elif len(compared) < asked.samples:
        code, reason = Code.VERIFY_IMPOSSIBLE, f"{len(compared)} inputs of {asked.samples} were answered"
    else:
        code, reason = None, ""
    return Verdict(
        migration=asked.migration,
        passed=code is None,
        code=code,
        reason=reason,
        against=asked.against,
        inputs=used,
        samples=len(compared),
        drifts=drifts,
        inputs_sha256=inputs_sha256,
        pack=asked.pack if asked.against is Against.REFERENCE else "",
    )


def recorded(
    asked: Verification, used: InputsFrom, samples: int, inputs_sha256: str, pack: str, why: str = ""
) -> Verdict:  # fmt: skip
    """pack: digest of the reference that was made of its answers; empty: there is none, and why."""
    code = None if pack else Code.VERIFY_IMPOSSIBLE
    return Verdict(
        asked.migration, code is None, code, why, asked.against, used, samples, (), inputs_sha256, pack, recorded=True
    )


def _worst(compared: Sequence[Compared]) -> tuple[Drift, ...]:
    """One for each output and metric, in the order in which they first come."""
    worst: dict[tuple[str, Metric], Drift] = {}
    for drift in (drift for each in compared for drift in each.drifts):
        key = drift.output, drift.metric
        held = worst.setdefault(key, drift)
        further = drift.worst > held.worst if at_most(drift.metric) else drift.worst < held.worst
        if further:
            worst[key] = replace(drift, passed=drift.passed and held.passed)
        else:
            worst[key] = replace(held, passed=drift.passed and held.passed)
    return tuple(worst.values())

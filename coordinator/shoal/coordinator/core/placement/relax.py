"""Relaxations: the changes of a document that would place a workload, as values and as text to type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from shoal.coordinator.core.placement.domains import show_spread
from shoal.types.units import (
    CARBON,
    COST,
    DURATION,
    ENERGY,
    POWER,
    Dimension,
    Seconds,
    parse_unbounded,
    show_quantity,
)
from shoal.types.workload import Limits, Relaxation, Requirements

MANUAL_SIZE = 1000.0
"""Size of a remedy that no document can express: free memory, an operator, a node's return."""
CATEGORY_SIZE = 1.0
"""Size of a yes-or-no change (another precision, device or spread). It equals 100 % more of a quantity."""


LIMIT_DIMENSIONS: Final[Mapping[str, Dimension]] = {
    "cost": COST,
    "energy": ENERGY,
    "carbon": CARBON,
    "node_power": POWER,
}
"""Name of each limit, as in Limits and RequiredRelaxation -> its dimension."""


@dataclass(frozen=True, slots=True)
class RequiredRelaxation:
    """The least that a document must allow for one candidate. None or empty: no change. A bound of inf means that the
    bound has to be removed."""

    # Bound on the p95 latency in seconds.
    latency_p95_s: float | None = None
    # Bound in USD/h over all replicas.
    cost: float | None = None
    # Bound in J per inference.
    energy: float | None = None
    # Bound in gCO2/h over all replicas.
    carbon: float | None = None
    # Bound on the power of the whole node, in W.
    node_power: float | None = None
    # A CEL term that admits the candidate.
    where: str = ""
    # A precision to allow.
    precision: str = ""
    # Name of a publisher's key to accept.
    signed_by: str = ""
    # The spread rule to use instead.
    spread: str | None = None
    # The number of replicas to ask for instead.
    replicas: int | None = None
    # True where the requirement of measured capabilities has to be removed.
    unmeasured: bool = False
    # Maximum age of the device's measurement, in seconds.
    within_s: float | None = None
    # What to do where no document helps.
    advice: tuple[str, ...] = ()
    # How far this is from what was asked; 1: one bound doubled.
    size: float = 0.0

    @property
    def is_in_document(self) -> bool:
        return not self.advice


def manual_remedy(advice: str) -> RequiredRelaxation:
    return RequiredRelaxation(advice=(advice,), size=MANUAL_SIZE)


def distinct(relaxations: tuple[RequiredRelaxation, ...]) -> tuple[RequiredRelaxation, ...]:
    """The same relaxations without repetitions, in order of first appearance."""
    return tuple(dict.fromkeys(relaxations))


def total_size(relaxations: tuple[RequiredRelaxation, ...]) -> float:
    return math.fsum(give.size for give in distinct(relaxations))


def apply_relaxations(relaxations: tuple[RequiredRelaxation, ...], require: Requirements, limits: Limits) -> Relaxation:
    """`require` and `limits` after all relaxations, and the change as typed."""
    for give in distinct(relaxations):
        require = _relax_requirements(give, require)
        limits = _relax_limits(give, limits)
    return Relaxation(", ".join(_policy_lines(relaxations, require, limits)), require, limits)


def render_change(relaxations: tuple[RequiredRelaxation, ...], require: Requirements, limits: Limits) -> str:
    """The change as one would type it, followed by what has to be done outside the documents."""
    advice = dict.fromkeys(text for give in relaxations for text in give.advice)
    change = apply_relaxations(relaxations, require, limits).change
    return "; ".join(part for part in (change, *advice) if part)


def round_up(value: float, dimension: Dimension, asked: float = 0.0) -> float:
    """The next quantity of two significant digits that is not smaller. Its unit is that of `asked`, else the largest
    unit that is not above the value."""
    if not math.isfinite(value) or value <= 0:
        return value
    unit, factor = max(
        ((unit, factor) for unit, factor in dimension.factors.items() if factor <= value),
        key=lambda pair: pair[1],
        default=min(dimension.factors.items(), key=lambda pair: pair[1]),
    )
    if math.isfinite(asked) and asked > 0:
        text = show_quantity(asked, dimension)
        unit = max((each for each in dimension.factors if text.endswith(each)), key=len)
        factor = dimension.factors[unit]
    number = value / factor
    step = 10.0 ** (math.floor(math.log10(number)) - 1)
    rounded = value
    for more in range(3):
        rounded = parse_unbounded(f"{(math.ceil(number / step) + more) * step:.12g}{unit}", dimension)
        if rounded >= value:
            break
    return max(rounded, value)


def _relax_requirements(relaxation: RequiredRelaxation, require: Requirements) -> Requirements:
    """Applies a relaxation to the requirements. A bound is only ever raised, and only where one is set."""
    if relaxation.latency_p95_s is not None and require.latency_p95_s is not None:
        require = replace(
            require,
            latency_p95_s=None
            if math.isinf(relaxation.latency_p95_s)
            else Seconds(max(require.latency_p95_s, relaxation.latency_p95_s)),
        )
    if relaxation.where and relaxation.where not in require.where:
        require = replace(require, where=f"({require.where}) || ({relaxation.where})")
    if relaxation.precision and relaxation.precision not in require.precisions:
        require = replace(require, precisions=(*require.precisions, relaxation.precision))
    if relaxation.signed_by and relaxation.signed_by not in require.signed_by:
        require = replace(require, signed_by=(*require.signed_by, relaxation.signed_by))
    if relaxation.spread is not None:
        require = replace(require, spread=relaxation.spread)
    if relaxation.replicas is not None:
        require = replace(require, replicas=relaxation.replicas)
    if relaxation.unmeasured:
        require = replace(require, measured_only=False)
    if relaxation.within_s is not None and require.measured_within_s is not None:
        require = replace(require, measured_within_s=Seconds(max(require.measured_within_s, relaxation.within_s)))
    return require


def _relax_limits(relaxation: RequiredRelaxation, limits: Limits) -> Limits:
    """Applies a relaxation to the limits. A limit is only ever raised, and only where one is set."""
    changes = {
        name: None if math.isinf(value) else max(before, value)
        for name in LIMIT_DIMENSIONS
        if (value := getattr(relaxation, name)) is not None and (before := getattr(limits, name)) is not None
    }
    return replace(limits, **changes) if changes else limits


def _policy_lines(relaxations: tuple[RequiredRelaxation, ...], require: Requirements, limits: Limits) -> list[str]:
    """Lines of a policy, with the resulting values of `require` and `limits`."""
    lines = list[str]()

    def is_relaxed(name: str) -> bool:
        return any(getattr(give, name) not in (None, "", False) for give in relaxations)

    if is_relaxed("latency_p95_s"):
        bound = require.latency_p95_s
        lines.append("remove latency" if bound is None else f"latency: {{p95: {show_quantity(bound, DURATION)}}}")
    if is_relaxed("where"):
        lines.append(f"where: {require.where}")
    if is_relaxed("precision"):
        lines.append(f"precision: {{allow: [{', '.join(require.precisions)}]}}")
    if is_relaxed("signed_by"):
        lines.append(f"trust: {{signed_model: {{keys: [{', '.join(require.signed_by)}]}}}}")
    availability = [f"replicas: {require.replicas}"] if is_relaxed("replicas") else []
    availability += [f"spread: {show_spread(require.spread)}"] if is_relaxed("spread") else []
    if availability:
        lines.append(f"availability: {{{', '.join(availability)}}}")
    if is_relaxed("unmeasured"):
        lines.append("remove trust.capability")
    if is_relaxed("within_s") and require.measured_within_s is not None:
        lines.append(f"trust: {{within: {show_quantity(require.measured_within_s, DURATION)}}}")
    for name, dimension in LIMIT_DIMENSIONS.items():
        if is_relaxed(name):
            value = getattr(limits, name)
            text = f"limits: {{{name}: {show_quantity(value, dimension)}}}" if value is not None else ""
            lines.append(text or f"remove limits.{name}")
    return lines

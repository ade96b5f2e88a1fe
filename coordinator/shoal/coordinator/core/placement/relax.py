"""What would have to give: changes of a document as values and as one would type them."""

import math
from dataclasses import dataclass, replace

from shoal.types.units import (
    CARBON,
    COST,
    DURATION,
    ENERGY,
    POWER,
    Dimension,
    Seconds,
    parse_quantity,
    show_quantity,
)
from shoal.types.workload import Limits, Relaxation, Requirements, Spread

PHYSICAL = 1000.0
"""Distance of what no document can give: free memory, an operator, a node's return."""
CATEGORY = 1.0
"""Distance of a change that is a yes or no (another precision, device, spread), against 100 % more of a quantity."""


@dataclass(frozen=True, slots=True)
class Give:
    """The least that a document must allow. None, empty: nothing. Quantities as bounds; inf: the bound must go.

    where: a CEL term that admits the candidate. distance: how far this is from what was asked; 1 = one bound doubled.
    advice: what to do where no document helps.
    """

    latency_p95_s: float | None = None
    cost: float | None = None
    energy: float | None = None
    carbon: float | None = None
    node_power: float | None = None
    where: str = ""
    residency: str = ""
    precision: str = ""
    signed_by: str = ""
    spread: Spread | None = None
    replicas: int | None = None
    unmeasured: bool = False
    within_s: float | None = None
    advice: tuple[str, ...] = ()
    distance: float = 0.0

    @property
    def in_document(self) -> bool:
        return not self.advice


def physical(advice: str) -> Give:
    return Give(advice=(advice,), distance=PHYSICAL)


def merged(gives: tuple[Give, ...]) -> tuple[Give, ...]:
    """The same gives without repetitions, first come first."""
    return tuple(dict.fromkeys(gives))


def distance(gives: tuple[Give, ...]) -> float:
    return math.fsum(give.distance for give in merged(gives))


def relaxation(gives: tuple[Give, ...], require: Requirements, limits: Limits) -> Relaxation:
    """`require` and `limits` after all gives, and the change as typed."""
    for give in merged(gives):
        require = _require(give, require)
        limits = _limits(give, limits)
    return Relaxation(", ".join(_typed(gives, require, limits)), require, limits)


def typed(gives: tuple[Give, ...], require: Requirements, limits: Limits) -> str:
    """The change as one would type it, with what has to be done besides."""
    advice = dict.fromkeys(text for give in gives for text in give.advice)
    change = relaxation(gives, require, limits).change
    return "; ".join(part for part in (change, *advice) if part)


def rounded_up(value: float, dimension: Dimension) -> float:
    """The next quantity of two figures that is not smaller, in the unit that people would type."""
    if not math.isfinite(value) or value <= 0:
        return value
    unit, factor = max(
        ((unit, factor) for unit, factor in dimension.factors.items() if factor <= value),
        key=lambda pair: pair[1],
        default=min(dimension.factors.items(), key=lambda pair: pair[1]),
    )
    number = value / factor
    step = 10.0 ** (math.floor(math.log10(number)) - 1)
    rounded = value
    for more in range(3):
        rounded = parse_quantity(f"{(math.ceil(number / step) + more) * step:.12g}{unit}", dimension)
        if rounded >= value:
            break
    return max(rounded, value)


def _require(give: Give, require: Requirements) -> Requirements:
    if give.latency_p95_s is not None and require.latency_p95_s is not None:
        require = replace(
            require,
            latency_p95_s=None
            if math.isinf(give.latency_p95_s)
            else Seconds(max(require.latency_p95_s, give.latency_p95_s)),
        )
    if give.where and give.where not in require.where:
        require = replace(require, where=f"({require.where}) || ({give.where})")
    if give.residency and give.residency not in require.residency:
        require = replace(require, residency=(*require.residency, give.residency))
    if give.precision and give.precision not in require.precisions:
        require = replace(require, precisions=(*require.precisions, give.precision))
    if give.signed_by and give.signed_by not in require.signed_by:
        require = replace(require, signed_by=(*require.signed_by, give.signed_by))
    if give.spread is not None:
        require = replace(require, spread=give.spread)
    if give.replicas is not None:
        require = replace(require, replicas=give.replicas)
    if give.unmeasured:
        require = replace(require, measured_only=False)
    if give.within_s is not None and require.measured_within_s is not None:
        require = replace(require, measured_within_s=Seconds(max(require.measured_within_s, give.within_s)))
    return require


def _limits(give: Give, limits: Limits) -> Limits:
    changes = {
        name: None if math.isinf(value) else max(before, value)
        for name in ("cost", "energy", "carbon", "node_power")
        if (value := getattr(give, name)) is not None and (before := getattr(limits, name)) is not None
    }
    return replace(limits, **changes) if changes else limits


def _typed(gives: tuple[Give, ...], require: Requirements, limits: Limits) -> list[str]:
    """Lines of a policy, with the values that `require` and `limits` have come to."""
    lines = list[str]()

    def asked(name: str) -> bool:
        return any(getattr(give, name) not in (None, "", False) for give in gives)

    if asked("latency_p95_s"):
        bound = require.latency_p95_s
        lines.append("remove latency" if bound is None else f"latency: {{p95: {show_quantity(bound, DURATION)}}}")
    if asked("where"):
        lines.append(f"where: {require.where}")
    if asked("residency"):
        lines.append(f"residency: [{', '.join(require.residency)}]")
    if asked("precision"):
        lines.append(f"precision: {{allow: [{', '.join(require.precisions)}]}}")
    if asked("signed_by"):
        lines.append(f"trust: {{signed_model: {{keys: [{', '.join(require.signed_by)}]}}}}")
    availability = [f"replicas: {require.replicas}"] if asked("replicas") else []
    availability += [f"spread: {require.spread}"] if asked("spread") else []
    if availability:
        lines.append(f"availability: {{{', '.join(availability)}}}")
    if asked("unmeasured"):
        lines.append("remove trust.capability")
    if asked("within_s") and require.measured_within_s is not None:
        lines.append(f"trust: {{within: {show_quantity(require.measured_within_s, DURATION)}}}")
    for name, dimension in (("cost", COST), ("energy", ENERGY), ("carbon", CARBON), ("node_power", POWER)):
        if asked(name):
            value = getattr(limits, name)
            text = f"limits: {{{name}: {show_quantity(value, dimension)}}}" if value is not None else ""
            lines.append(text or f"remove limits.{name}")
    return lines

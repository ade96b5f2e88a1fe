"""What of a listing is wanted: label selectors, and the order of its rows. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shoal.types.codes import Code, refuse
from shoal.types.units import DURATION, SIZE

_TERM: Final = re.compile(r"\s*(!?)([A-Za-z0-9._/-]+)\s*(?:(==|=|!=)\s*([^,]*?)\s*)?")


_NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?) ?([A-Za-z]*)(?![\w.-])")
_FACTORS: Final = {
    **{unit: factor for each in (DURATION, SIZE) for unit, factor in each.factors.items()},
    "uJ": 1e-6,
    "mJ": 1e-3,
    "J": 1.0,
    "kJ": 1e3,
    "mW": 1e-3,
    "W": 1.0,
    "kW": 1e3,
    "FLOP": 1.0,
    "MFLOP": 1e6,
    "GFLOP": 1e9,
    "TFLOP": 1e12,
    "USD": 1.0,
}
"""Units that cells have -> SI."""


@dataclass(frozen=True, slots=True)
class LabelTerm:
    """One condition on labels."""

    # Label.
    name: str
    # Its value; None: any.
    value: str | None
    # The condition is that it does not hold.
    negated: bool

    def matches(self, labels: Mapping[str, str]) -> bool:
        holds = self.name in labels if self.value is None else labels.get(self.name) == self.value
        return holds != self.negated


def parse_selector(text: str) -> tuple[LabelTerm, ...]:
    """`site=shop,rack!=2,gpu,!old`: all of these have to hold. Raises ShoalError(USAGE)."""
    terms = []
    for each in filter(str.strip, text.split(",")):
        found = _TERM.fullmatch(each)
        if found is None or (found[1] and found[3]):
            raise refuse(
                Code.USAGE,
                f"the selector {each.strip()!r:.80}",
                "NAME=VALUE, NAME!=VALUE, NAME or !NAME",
                "-l site=shop",
            )
        terms.append(LabelTerm(found[2], found[4] if found[3] else None, bool(found[1]) or found[3] == "!="))
    return tuple(terms)


def sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, each in order; what is unknown last. A text that begins with a number counts as one, in its
    unit: 900ms is less than 2s."""
    if value is None or value in ("", "-"):
        return (2, 0.0, "")
    if isinstance(value, bool | int | float):
        return (0, float(value), "")
    text = str(value)
    number = _NUMBER.match(text)
    if number is None or (number[2] and number[2] not in _FACTORS):
        return (1, 0.0, text)
    return (0, float(number[1]) * _FACTORS.get(number[2], 1.0), text)


def field_of(data: Any, path: str) -> Any:
    """The value at `a.b.0.c` in data of JSON; None: it is not there."""
    for part in path.strip(".").split("."):
        if isinstance(data, Mapping):
            data = data.get(part)
        elif isinstance(data, list) and part.isdecimal() and int(part) < len(data):
            data = data[int(part)]
        else:
            return None
    return data

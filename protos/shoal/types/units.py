"""Quantities: SI inside, units where people read and type.

Only this module converts `20ms`, `4GiB` or `0.40 USD/h` to numbers and back. All other code holds SI floats or ints
under the NewTypes below.
"""

import math
import re
from dataclasses import dataclass
from typing import Final, NewType

from shoal.types.codes import Code, Refusal, ShoalError

Seconds = NewType("Seconds", float)
Bytes = NewType("Bytes", int)
Joules = NewType("Joules", float)
Watts = NewType("Watts", float)
UsdPerHour = NewType("UsdPerHour", float)
GramsPerHour = NewType("GramsPerHour", float)
GramsPerKwh = NewType("GramsPerKwh", float)
PerSecond = NewType("PerSecond", float)

Elapsed = NewType("Elapsed", float)
"""Seconds on a monotonic clock over a persisted floor, for leases, holds and deadlines. Never shown to people."""
Wall = NewType("Wall", float)
"""Seconds since 1970 UTC, for people, calendars and signed times. Compare only with an allowance."""
UNKNOWN_TIME: Final = Wall(0.0)
"""A time that nobody wrote down. People see it as `-`."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One kind of quantity."""

    # Name for people.
    name: str
    # Factor of each unit to SI.
    factors: dict[str, float]
    # A valid value, shown in errors.
    example: str
    # Greatest value that people may give, in SI. It is far above every real one, so that whatever is computed from it
    # (sums, dates, 64-bit integers of messages, digits on a screen) still holds it.
    most: float = 1e12


DURATION: Final = Dimension(
    "duration",
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0},
    "20ms",
    most=3650 * 86400.0,
)
SIZE: Final = Dimension(
    "size",
    {
        "B": 1,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
    },
    "4GiB",
    most=2.0**60,
)
POWER: Final = Dimension("power", {"mW": 1e-3, "W": 1.0, "kW": 1e3}, "15W")
ENERGY: Final = Dimension("energy per inference", {"mJ/inference": 1e-3, "J/inference": 1.0}, "2.0 J/inference")
COST: Final = Dimension("cost", {"USD/h": 1.0, "USD/d": 1 / 24}, "1.50 USD/h", most=1e6)
CARBON: Final = Dimension("carbon", {"gCO2/h": 1.0, "kgCO2/h": 1e3}, "40 gCO2/h")
INTENSITY: Final = Dimension("carbon intensity", {"gCO2/kWh": 1.0}, "350 gCO2/kWh")
RATE: Final = Dimension("rate", {"/s": 1.0, "/m": 1 / 60, "/h": 1 / 3600}, "120/s", most=1e9)
SHARE: Final = Dimension("share", {"%": 0.01}, "15%")
RATIO: Final = Dimension("ratio", {"x": 1.0}, "1.2x")

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%/0-9]+)?")


def parse_quantity(text: str, dimension: Dimension) -> float:
    """`text` as a number in SI, from 0 to `dimension.most`. Raises ShoalError(UNIT_MISSING | UNIT_WRONG |
    QUANTITY_INVALID)."""
    value = parse_unbounded(text, dimension)
    if value > dimension.most:
        most = show_quantity(dimension.most, dimension)
        raise ShoalError(Refusal(Code.QUANTITY_INVALID, f"{text!r:.80}", f"at most {most}", "lower it"))
    return value


def parse_unbounded(text: str, dimension: Dimension) -> float:
    """As `parse_quantity`, of any size that a float has: for what was stored before, or computed."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ShoalError(
            Refusal(
                Code.QUANTITY_INVALID,
                f"{text!r:.80}",
                f"a {dimension.name}",
                f"write it like {dimension.example}",
            )
        )
    number, unit = match.groups()
    if unit is None:
        raise ShoalError(
            Refusal(
                Code.UNIT_MISSING,
                f"{text!r:.80} without a unit",
                f"a {dimension.name} in {', '.join(dimension.factors)}",
                f"write it like {dimension.example}",
            )
        )
    factor = dimension.factors.get(unit)
    if factor is None:
        raise ShoalError(
            Refusal(
                Code.UNIT_WRONG,
                f"{unit!r:.40} is not a unit of {dimension.name}",
                f"one of {', '.join(dimension.factors)}",
                f"write it like {dimension.example}",
            )
        )
    value = float(number) * factor
    if not math.isfinite(value):
        raise ShoalError(
            Refusal(Code.QUANTITY_INVALID, f"{text!r:.80}", f"a finite {dimension.name}", "use a smaller number")
        )
    return value


def show_number(value: float, digits: int = 3) -> str:
    """So many significant digits, and no exponent below 10^15: 1023 rather than 1.02e+03. What is less than a
    millionth has fewer digits, and 0 is what is less than a billionth."""
    if 1e15 <= abs(value) < math.inf:
        return f"{value:.{digits}g}"
    if not abs(value) < 10**digits - 0.5:
        return f"{value:.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{round(value, 9) + 0.0:.9f}".rstrip("0").rstrip(".")


def show_seconds(value: float) -> str:
    """A duration for people: three significant digits, in a readable unit."""
    for factor, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "m"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor * (2 if factor >= 60 else 1):
            return f"{show_number(value / factor)}{unit}"
    return "0s" if value == 0 else f"{show_number(value / 1e-9)}ns"


def show_bytes(value: float) -> str:
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return f"{show_number(value / factor)}{unit}"
    return f"{value:.0f}B"


def show_bytes_per_second(value: float) -> str:
    """In powers of 1000, as makers of links count."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if abs(value) >= factor:
            return f"{show_number(value / factor)}{unit}"
    return f"{show_number(value)}B/s"


def show_flops_per_second(value: float) -> str:
    for factor, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if abs(value) >= factor:
            return f"{show_number(value / factor)} {unit}"
    return f"{show_number(value)} FLOP/s"


def show_joules(value: float) -> str:
    if math.isnan(value):
        return "unknown"
    for factor, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if abs(value) >= factor:
            return f"{show_number(value / factor)}{unit}"
    return "0J" if value == 0 else f"{show_number(value / 1e-6)}uJ"


def show_watts(value: float) -> str:
    return f"{show_number(value)}W"


def show_usd_per_hour(value: float) -> str:
    return f"{show_number(value, 4)} USD/h"


def show_carbon(value: float) -> str:
    return f"{show_number(value)} gCO2/h"


def show_gain(gain: float) -> str:
    """Improvement of an objective as text. gain is the share by which it became smaller: 0.2 gives `20% better`, -0.3
    gives `30% worse`, -19 gives `20 times worse`."""
    if gain >= 0:
        return f"{gain:.0%} better" if round(gain, 2) else "no better"
    if gain > -1:
        return f"{-gain:.0%} worse"
    times = 1 - gain
    return f"{times:.3g} times worse" if times < 999.5 else f"{times:,.0f} times worse"


def show_quantity(value: float, dimension: Dimension) -> str:
    """`value` (SI, from parse_quantity) as text that parses back to exactly the same number. It is in the SI unit where
    that is short, otherwise in the unit that needs the fewest digits. A duration is in a unit that it has at least one
    of, as people write them: 240ms, though 0.004m has fewer digits."""
    is_duration = dimension is DURATION
    least = 1.0 if is_duration else 0.1
    space = " " if " " in dimension.example else ""
    exact: dict[tuple[bool, bool, int, bool, int], str] = {}
    for unit, factor in dimension.factors.items():
        number = f"{value / factor:.15g}"
        text = f"{number}{space}{unit}"
        if "e" in number or parse_unbounded(text, dimension) != value:
            continue
        plain = factor == 1 and (value == 0 or least <= value < 1000) and len(number) <= 6
        digits = len(number.replace(".", "").strip("0"))
        is_part = value < factor
        exact[not plain, is_part and is_duration, digits, is_part, len(number)] = text
    if exact:
        return exact[min(exact)]
    unit, factor = min(dimension.factors.items(), key=lambda item: abs(item[1] - 1.0))
    return f"{value / factor!r}{space}{unit}"

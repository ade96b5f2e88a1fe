"""A feed's text to readings. The formats are told in docs/guides/signals.md."""

import csv
import io
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from shoal.coordinator.core.signals.model import MOST, Reading, SignalName
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall, parse_quantity, show_quantity

AT = "at"
VALUE = "value"


def readings(name: SignalName, text: str, taken_at: Wall) -> tuple[Reading, ...]:
    """In order of time, one for each time (the last of the text); at least one.

    One value with its unit; CSV with a header `at` and `value` (then each with its unit) or the unit itself; JSON, an
    object or a list of objects with the same names. taken_at: of a value that comes without a time.
    Raises ShoalError(SIGNAL_INVALID): one mistake, and none of the text counts.
    """
    text = text.removeprefix("\ufeff").strip()
    try:
        found = {reading.at: reading for reading in _read(name, text, taken_at)}
    except (ValueError, RecursionError, csv.Error) as cause:
        raise invalid(f"{type(cause).__name__}: {cause!s:.120}", name) from cause
    except ShoalError as cause:
        raise invalid(cause.refusal.found, name) from cause
    if not found:
        raise invalid("no value", name)
    return tuple(found[at] for at in sorted(found))


def checked(name: SignalName, value: float) -> float:
    """A value in SI that can be. Raises ShoalError(SIGNAL_INVALID)."""
    if not (math.isfinite(value) and 0 <= value <= MOST[name]):
        most = show_quantity(MOST[name], name.dimension)
        raise refuse(Code.SIGNAL_INVALID, f"a {name} of {value:g}", f"0 to {most}", "correct the value or its unit")
    return value


def invalid(found: str, name: SignalName) -> ShoalError:
    example = name.dimension.example
    return refuse(
        Code.SIGNAL_INVALID,
        found,
        f"{example!r}, or CSV or JSON with `at` and `value`",
        "write it as docs/guides/signals.md says, and under another name first: then rename it",
    )


def _read(name: SignalName, text: str, taken_at: Wall) -> Iterator[Reading]:
    if text[:1] in ("{", "["):
        data = json.loads(text)
        for entry in data if isinstance(data, list) else [data]:
            if not isinstance(entry, dict):
                raise ValueError(f"{entry!r:.40} where an object belongs")
            yield _row(name, entry, taken_at)
    elif "\n" in text or "," in text:
        for row in csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True):
            if None in row:
                raise ValueError(f"a row with more cells than the header has: {row[None]!r:.60}")
            yield _row(name, row, None)
    else:
        yield Reading(checked(name, parse_quantity(text, name.dimension)), taken_at)


def _row(name: SignalName, row: dict[str, Any], taken_at: Wall | None) -> Reading:
    """A row of a table: when, and the value under `value` with its unit, or the number under its unit."""
    columns = [column for column in (VALUE, *name.dimension.factors) if row.get(column) is not None]
    if len(columns) != 1:
        wanted = f"{VALUE} or one of {', '.join(name.dimension.factors)}"
        raise ValueError(f"columns {', '.join(map(str, row)):.80} where {AT} and {wanted} belong")
    (column,) = columns
    text = f"{row[column]}" if column == VALUE else f"{row[column]} {column}"
    return Reading(checked(name, parse_quantity(text, name.dimension)), _time(row.get(AT), taken_at))


def _time(text: object, otherwise: Wall | None) -> Wall:
    if text is None and otherwise is not None:
        return otherwise
    if not isinstance(text, str):
        raise ValueError(f"no time under `{AT}`")
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        raise ValueError(f"{text:.40} without a time zone: write 2026-11-21T18:00:00Z")
    return Wall(moment.timestamp())

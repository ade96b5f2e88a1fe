"""Parses the text of a feed into readings. docs/guides/signals.md describes the formats."""

import csv
import io
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from shoal.coordinator.core.signals.model import MAX_VALUES, SignalName, SignalReading
from shoal.types.codes import Code, ShoalError, refuse
from shoal.types.units import Wall, parse_unbounded, show_quantity

TIME_COLUMN = "at"
VALUE_COLUMN = "value"


def parse_readings(name: SignalName, text: str, taken_at: Wall) -> tuple[SignalReading, ...]:
    """Readings in order of time, at least one. Of several with the same time, the last in the text counts.

    The text is one value with its unit, or CSV with a header, or JSON: an object or a list of objects. Columns and keys
    are `at`, and `value` (with its unit) or the unit itself. taken_at: time of a value that comes without one. Raises
    ShoalError(SIGNAL_INVALID): after one mistake nothing of the text counts.
    """
    text = text.removeprefix("\ufeff").strip()
    try:
        found = {reading.at: reading for reading in _parse(name, text, taken_at)}
    except (ValueError, RecursionError, csv.Error) as cause:
        raise invalid_feed(f"{type(cause).__name__}: {cause!s:.120}", name) from cause
    except ShoalError as cause:
        raise invalid_feed(cause.refusal.found, name) from cause
    if not found:
        raise invalid_feed("no value", name)
    return tuple(found[at] for at in sorted(found))


def check_value(name: SignalName, value: float) -> float:
    """The value in SI, if it is plausible. Raises ShoalError(SIGNAL_INVALID)."""
    if not (math.isfinite(value) and 0 <= value <= MAX_VALUES[name]):
        most = show_quantity(MAX_VALUES[name], name.dimension)
        raise refuse(Code.SIGNAL_INVALID, f"a {name} of {value:g}", f"0 to {most}", "correct the value or its unit")
    return value


def invalid_feed(found: str, name: SignalName) -> ShoalError:
    example = name.dimension.example
    return refuse(
        Code.SIGNAL_INVALID,
        found,
        f"{example!r}, or CSV or JSON with `at` and `value`",
        "write it as docs/guides/signals.md says, and under another name first: then rename it",
    )


def _parse(name: SignalName, text: str, taken_at: Wall) -> Iterator[SignalReading]:
    if text[:1] in ("{", "["):
        data = json.loads(text)
        for entry in data if isinstance(data, list) else [data]:
            if not isinstance(entry, dict):
                raise ValueError(f"{entry!r:.40} where an object belongs")
            yield _parse_row(name, entry, taken_at)
    elif "\n" in text or "," in text:
        for row in csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True):
            if None in row:
                raise ValueError(f"a row with more cells than the header has: {row[None]!r:.60}")
            yield _parse_row(name, row, None)
    else:
        yield SignalReading(check_value(name, parse_unbounded(text, name.dimension)), taken_at)


def _parse_row(name: SignalName, row: dict[str, Any], taken_at: Wall | None) -> SignalReading:
    """One row: its time, and either `value` with its unit or a number under the name of its unit."""
    columns = [column for column in (VALUE_COLUMN, *name.dimension.factors) if row.get(column) is not None]
    if len(columns) != 1:
        wanted = f"{VALUE_COLUMN} or one of {', '.join(name.dimension.factors)}"
        raise ValueError(f"columns {', '.join(map(str, row)):.80} where {TIME_COLUMN} and {wanted} belong")
    (column,) = columns
    text = f"{row[column]}" if column == VALUE_COLUMN else f"{row[column]} {column}"
    return SignalReading(
        check_value(name, parse_unbounded(text, name.dimension)), _parse_time(row.get(TIME_COLUMN), taken_at)
    )


def _parse_time(text: object, otherwise: Wall | None) -> Wall:
    """Seconds since 1970 of an ISO 8601 time with a time zone; `otherwise` where the row has no time."""
    if text is None and otherwise is not None:
        return otherwise
    if not isinstance(text, str):
        raise ValueError(f"no time under `{TIME_COLUMN}`")
    moment = datetime.fromisoformat(text.strip())
    if moment.tzinfo is None:
        raise ValueError(f"{text:.40} without a time zone: write 2026-11-21T18:00:00Z")
    return Wall(moment.timestamp())

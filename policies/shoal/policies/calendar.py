"""Times that people mean by the clock on their wall: days of the week, times of day, zones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Final
from zoneinfo import ZoneInfo, available_timezones

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from shoal.policies.quantities import refused
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import DAY_MINUTES

WEEK: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAILY: Final = "daily"
_DAYS: Final = re.compile(r"[a-z]{3}(-[a-z]{3})?( *, *[a-z]{3}(-[a-z]{3})?)*")
_TIME: Final = re.compile(r"([01][0-9]|2[0-4]):([0-5][0-9])")


def days_of(text: str) -> tuple[int, ...]:
    """`mon-fri`, `sat,sun`, `fri-mon` or `daily`: days of the week in their order, Monday is 0.

    Raises ShoalError(FIELD_INVALID)."""
    if text == DAILY:
        return tuple(range(7))
    found = set[int]()
    for part in text.replace(" ", "").split(",") if _DAYS.fullmatch(text) else ("",):
        first, _, last = part.partition("-")
        if first not in WEEK or (last or first) not in WEEK:
            wrong = next((name for name in (first, last) if name and name not in WEEK), text)
            raise refuse(
                Code.FIELD_INVALID, f"{wrong!r:.80}", f"days of the week: {' '.join(WEEK)}, or {DAILY}",
                "write them like mon-fri or sat,sun",
            )  # fmt: skip
        begins = WEEK.index(first)
        found |= {(begins + step) % 7 for step in range((WEEK.index(last or first) - begins) % 7 + 1)}
    return tuple(sorted(found))


def minutes_of(text: str) -> int:
    """`20:00` as minutes since midnight; `24:00` is the midnight at the end of the day. Raises ShoalError."""
    match = _TIME.fullmatch(text)
    minutes = 60 * int(match[1]) + int(match[2]) if match else DAY_MINUTES + 1
    if minutes > DAY_MINUTES:
        raise refuse(Code.FIELD_INVALID, f"{text!r:.80}", "a time of day from 00:00 to 24:00", 'write it like "20:00"')
    return minutes


def zone_of(text: str) -> ZoneInfo:
    """`Europe/Paris`: a zone of the tz database, so that summer time is known. Raises ShoalError(FIELD_INVALID)."""
    try:
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:  # unknown; no name at all; a folder of zones
        likely = get_close_matches(text, available_timezones(), n=1)
        remedy = f"did you mean {likely[0]}" if likely else "name a city, like Europe/Paris, or UTC"
        raise refuse(Code.FIELD_INVALID, f"{text!r:.80}", "a zone of the tz database", remedy) from error


@dataclass(frozen=True, slots=True)
class _Text:
    """Text that `reads` can read, kept as typed."""

    reads: Callable[[str], object]
    asked: str
    example: str

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise refused(Refusal(Code.FIELD_INVALID, f"{value!r:.80}", self.asked, f'write it like "{self.example}"'))
        try:
            self.reads(value)
        except ShoalError as error:
            raise refused(error.refusal) from error
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "examples": [self.example]}


Days = Annotated[str, _Text(days_of, "days of the week", "mon-fri")]
TimeOfDay = Annotated[str, _Text(minutes_of, "a time of day", "20:00")]
Zone = Annotated[str, _Text(zone_of, "a zone of the tz database", "Europe/Paris")]

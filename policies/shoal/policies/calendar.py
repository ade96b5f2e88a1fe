"""Local calendar times: days of the week, times of day, time zones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Final
from zoneinfo import ZoneInfo, available_timezones

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from shoal.policies.quantities import to_pydantic_error
from shoal.types.codes import Code, Refusal, ShoalError, refuse
from shoal.types.migration import DAY_MINUTES

WEEK: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAILY: Final = "daily"
_DAYS: Final = re.compile(r"[a-z]{3}(-[a-z]{3})?( *, *[a-z]{3}(-[a-z]{3})?)*")
_TIME: Final = re.compile(r"([01][0-9]|2[0-4]):([0-5][0-9])")


def parse_days(text: str) -> tuple[int, ...]:
    """`mon-fri`, `sat,sun`, `fri-mon` or `daily` as ascending days of the week; Monday is 0.

    Raises ShoalError(FIELD_INVALID).
    """
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


def parse_minutes(text: str) -> int:
    """`20:00` as minutes since midnight; `24:00` is the end of the day. Raises ShoalError(FIELD_INVALID)."""
    match = _TIME.fullmatch(text)
    minutes = 60 * int(match[1]) + int(match[2]) if match else DAY_MINUTES + 1
    if minutes > DAY_MINUTES:
        raise refuse(Code.FIELD_INVALID, f"{text!r:.80}", "a time of day from 00:00 to 24:00", 'write it like "20:00"')
    return minutes


def parse_zone(text: str) -> ZoneInfo:
    """`Europe/Paris` as a zone of the tz database, which knows summer time. Raises ShoalError(FIELD_INVALID)."""
    try:
        return ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:  # unknown; no name at all; a folder of zones
        likely = get_close_matches(text, available_timezones(), n=1)
        remedy = f"did you mean {likely[0]}" if likely else "name a city, like Europe/Paris, or UTC"
        raise refuse(Code.FIELD_INVALID, f"{text!r:.80}", "a zone of the tz database", remedy) from error


@dataclass(frozen=True, slots=True)
class _CalendarText:
    """A text field that `parse` must accept. It is kept as typed."""

    # Raises ShoalError for text that it does not accept.
    parse: Callable[[str], object]
    # What is expected, shown in refusals.
    asked: str
    # A valid value, shown in refusals and the schema.
    example: str

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise to_pydantic_error(
                Refusal(Code.FIELD_INVALID, f"{value!r:.80}", self.asked, f'write it like "{self.example}"')
            )
        try:
            self.parse(value)
        except ShoalError as error:
            raise to_pydantic_error(error.refusal) from error
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "examples": [self.example], "x-value": self.asked}


Days = Annotated[str, _CalendarText(parse_days, "days of the week", "mon-fri")]
TimeOfDay = Annotated[str, _CalendarText(parse_minutes, "time of day", "20:00")]
Zone = Annotated[str, _CalendarText(parse_zone, "zone of the tz database", "Europe/Paris")]

"""Annotated types of the kinds: quantities with units, names, expressions. Each refuses with its own code."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shoal.policies.cel import TIMELY, VARIABLES, Expression, ExpressionError
from shoal.types import units
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.signature import parse_key
from shoal.types.units import (
    Bytes,
    Dimension,
    GramsPerHour,
    GramsPerKwh,
    Joules,
    PerSecond,
    Seconds,
    UsdPerHour,
    Wall,
    Watts,
)


def refused(refusal: Refusal, **place: int) -> PydanticCustomError:
    """A refusal on its way through pydantic, which collects it with its location."""
    return PydanticCustomError(
        str(refusal.code),  # pyright: ignore[reportArgumentType] -- an enum's value is as literal as a string gets
        "{found}",
        {"found": refusal.found, "asked": refusal.asked, "remedy": refusal.remedy, **place},
    )


@dataclass(frozen=True, eq=False)
class Unit:
    """Text with a unit, kept as SI; shown as the shortest text that reads back the same."""

    dimension: Dimension
    whole: bool = False

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            example = self.dimension.example
            raise refused(
                Refusal(Code.QUANTITY_INVALID, _kind(value), f"a {self.dimension.name}", f"write it like {example}")
            )
        try:
            number = units.parse_quantity(str(value), self.dimension)
        except ShoalError as error:
            raise refused(error.refusal) from error
        return int(number) if self.whole else number

    def show(self, value: float) -> str:
        return units.show_quantity(value, self.dimension)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self.show, return_schema=core_schema.str_schema())
        return core_schema.no_info_plain_validator_function(self.read, serialization=shown)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        words = "|".join(re.escape(unit) for unit in self.dimension.factors)
        return {
            "type": "string",
            "pattern": rf"^\s*[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*({words})\s*$",
            "examples": [self.dimension.example],
        }


Duration = Annotated[Seconds, Unit(units.DURATION)]
Size = Annotated[Bytes, Unit(units.SIZE, whole=True)]
Power = Annotated[Watts, Unit(units.POWER)]
Energy = Annotated[Joules, Unit(units.ENERGY)]
Cost = Annotated[UsdPerHour, Unit(units.COST)]
Carbon = Annotated[GramsPerHour, Unit(units.CARBON)]
Intensity = Annotated[GramsPerKwh, Unit(units.INTENSITY)]
Rate = Annotated[PerSecond, Unit(units.RATE)]
Share = Annotated[float, Unit(units.SHARE)]
Ratio = Annotated[float, Unit(units.RATIO)]

NAME_PATTERN: Final = re.compile(r"[a-z0-9-]{1,63}")


@dataclass(frozen=True, slots=True)
class _Text:
    """A string with a rule of its own."""

    pattern: re.Pattern[str]
    code: Code
    asked: str
    remedy: str

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise refused(Refusal(self.code, _kind(value), self.asked, "quote it"))
        if not self.pattern.fullmatch(value):
            raise refused(Refusal(self.code, f"{value!r:.80}", self.asked, self.remedy))
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{self.pattern.pattern}$"}


Name = Annotated[
    str,
    _Text(
        NAME_PATTERN,
        Code.NAME_INVALID,
        "1 to 63 of a-z, 0-9 and -",
        "use lower case letters, digits and hyphens",
    ),
]
Pattern = Annotated[
    str,
    _Text(
        re.compile(r"[a-z0-9*-]{1,63}"),
        Code.NAME_INVALID,
        "a name, with * for any part of it",
        'write it like "eu-*"',
    ),
]
Line = Annotated[
    str,
    _Text(
        re.compile(r"[^\x00-\x1f\x7f]{1,1024}"),
        Code.FIELD_INVALID,
        "1 to 1024 characters on one line",
        "shorten it, or leave the field out",
    ),
]


class _KeyText:
    """A public key, kept as the base64 of its DER on one line."""

    @staticmethod
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise refused(Refusal(Code.FIELD_INVALID, _kind(value), "a public key", "shoal model key FILE.pem"))
        try:
            return parse_key(value)
        except ShoalError as error:
            raise refused(error.refusal) from error

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "description": "PEM of a public key, or its base64 on one line"}


KeyText = Annotated[str, _KeyText()]


class _Day:
    """A calendar day (UTC), kept as the moment at which it is over."""

    pattern: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

    @classmethod
    def read(cls, value: object) -> Wall:
        try:
            if not isinstance(value, str) or not cls.pattern.fullmatch(value):
                raise ValueError(value)
            begins = datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC)
        except ValueError as error:
            raise refused(Refusal(Code.FIELD_INVALID, _kind(value), "a day", "write it like 2027-12-31")) from error
        return Wall((begins + timedelta(days=1)).timestamp())

    @staticmethod
    def show(value: float) -> str:
        return (datetime.fromtimestamp(value, UTC) - timedelta(days=1)).strftime("%Y-%m-%d")

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self.show, return_schema=core_schema.str_schema())
        return core_schema.no_info_plain_validator_function(self.read, serialization=shown)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "format": "date", "examples": ["2027-12-31"]}


Day = Annotated[Wall, _Day()]


class _Selector:
    """CEL text, compiled where it is read, so that a mistake is placed within it. may_read: names of variables."""

    def __init__(self, may_read: frozenset[str] = frozenset(VARIABLES)) -> None:
        self._may_read = may_read

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise refused(
                Refusal(Code.EXPRESSION_INVALID, _kind(value), "a CEL expression", 'device.kind == "gpu", for example')
            )
        try:
            reads = Expression.compile(value).reads
        except ExpressionError as error:
            raise refused(error.refusal, line=error.line, column=error.column) from error
        if beyond := sorted(reads - self._may_read):
            allowed = ", ".join(sorted(self._may_read))
            raise refused(
                Refusal(Code.EXPRESSION_INVALID, f"{beyond[0]}: no candidate is looked at", allowed, "leave it out")
            )
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        example = 'hour(now, "Europe/Paris") >= 22' if self._may_read == TIMELY else 'device.kind in ["npu", "gpu"]'
        return {"type": "string", "examples": [example]}


Selector = Annotated[str, _Selector()]
Condition = Annotated[str, _Selector(TIMELY)]


def _kind(value: Any) -> str:
    """What a wrong value is, for people."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case tuple() | list():
            return "a list"
        case _:
            return f"{value!r:.80}"


def shown(part: BaseModel, field: str) -> str:
    """A quantity of `part` as people write it."""
    return str(part.model_dump(mode="json", include={field}, by_alias=False)[field])

"""Annotated types of the kinds' fields: quantities with units, names, expressions. Each has its own refusal code."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from pydantic_core.core_schema import ValidationInfo

from shoal.policies.cel import CONTEXT_VARIABLES, VARIABLES, Expression, ExpressionError
from shoal.types import units
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.identity import NAME_PATTERN, NAME_RULE
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


def to_pydantic_error(refusal: Refusal, **place: int) -> PydanticCustomError:
    """Wraps a refusal as a pydantic error, so that pydantic collects it with its location."""
    return PydanticCustomError(
        str(refusal.code),  # pyright: ignore[reportArgumentType] -- an enum's value is as literal as a string gets
        "{found}",
        {"found": refusal.found, "asked": refusal.asked, "remedy": refusal.remedy, **place},
    )


STORED: Final = "stored"
"""Pydantic's context for a document that the region accepted once. A quantity of it that is out of bounds by now counts
as the nearest one within: a region must not fail for what an older version let in."""


@dataclass(frozen=True, eq=False)
class Unit:
    """A text field with a unit. The value is in SI; it is shown as the shortest text that parses back to the same
    value."""

    # Units that the text may have.
    dimension: Dimension
    # True: the value is truncated to an int.
    whole: bool = False
    # Least value that is accepted, in SI.
    least: float = 0.0

    def read(self, value: object, info: ValidationInfo) -> float:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            example = self.dimension.example
            raise to_pydantic_error(
                Refusal(Code.QUANTITY_INVALID, _describe(value), f"a {self.dimension.name}", f"write it like {example}")
            )
        try:
            is_stored = info.context is STORED
            parse = units.parse_unbounded if is_stored else units.parse_quantity
            number = min(parse(str(value), self.dimension), self.dimension.most)
        except ShoalError as error:
            raise to_pydantic_error(error.refusal) from error
        if number < self.least:
            if not is_stored:
                asked = f"at least {self.show(self.least)}"
                raise to_pydantic_error(Refusal(Code.QUANTITY_INVALID, _describe(value), asked, "raise it"))
            number = self.least
        return int(number) if self.whole else number

    def show(self, value: float) -> str:
        return units.show_quantity(value, self.dimension)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self.show, return_schema=core_schema.str_schema())
        return core_schema.with_info_plain_validator_function(self.read, serialization=shown)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        words = "|".join(re.escape(unit) for unit in self.dimension.factors)
        return {
            "type": "string",
            "pattern": rf"^\s*[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?\s*({words})\s*$",
            "examples": [self.dimension.example],
            "x-value": self.dimension.name,
            "x-units": list(self.dimension.factors),
            **({"x-least": self.show(self.least)} if self.least else {}),
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


@dataclass(frozen=True, slots=True)
class _PatternText:
    """A text field that must match a pattern."""

    # The whole text must match.
    pattern: re.Pattern[str]
    # Code of the refusal.
    code: Code
    # What is expected, shown in the refusal.
    asked: str
    # What to do, shown in the refusal.
    remedy: str
    # What the text is, for the schema.
    value: str

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            remedy = "write one text here" if isinstance(value, dict | list) else "quote it"
            raise to_pydantic_error(Refusal(self.code, _describe(value), self.asked, remedy))
        if not self.pattern.fullmatch(value):
            raise to_pydantic_error(Refusal(self.code, f"{value!r:.80}", self.asked, self.remedy))
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^{self.pattern.pattern}$", "x-value": self.value}


Name = Annotated[
    str,
    _PatternText(
        NAME_PATTERN,
        Code.NAME_INVALID,
        NAME_RULE,
        "use lower case letters, digits, and hyphens between them",
        "name",
    ),
]
Pattern = Annotated[
    str,
    _PatternText(
        re.compile(r"[a-z0-9*](?:[a-z0-9*-]{0,61}[a-z0-9*])?"),
        Code.NAME_INVALID,
        "a name, with * for any part of it",
        'write it like "eu-*"',
        "name pattern",
    ),
]
LabelName = Annotated[
    str,
    _PatternText(
        re.compile(r"(?!(?:none|device|node)$)[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"),
        Code.FIELD_INVALID,
        "the name of a node label: letters, digits and ._/-, up to 63; none, device and node are words",
        "name a label such as site; for devices or nodes write the word alone (spread: node)",
        "label name",
    ),
]
Line = Annotated[
    str,
    _PatternText(
        re.compile(r"[^\x00-\x1f\x7f]{1,1024}"),
        Code.FIELD_INVALID,
        "1 to 1024 characters on one line",
        "shorten it, or leave the field out",
        "text",
    ),
]


class _KeyText:
    """A public key. The value is the base64 of its DER on one line."""

    @staticmethod
    def read(value: object) -> str:
        if not isinstance(value, str):
            raise to_pydantic_error(
                Refusal(Code.FIELD_INVALID, _describe(value), "a public key", "shoal model key FILE.pem")
            )
        try:
            return parse_key(value)
        except ShoalError as error:
            raise to_pydantic_error(error.refusal) from error

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "x-value": "public key"}


KeyText = Annotated[str, _KeyText()]


class _Day:
    """A calendar day (UTC). The value is the end of that day."""

    pattern: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")

    @classmethod
    def read(cls, value: object) -> Wall:
        try:
            if not isinstance(value, str) or not cls.pattern.fullmatch(value):
                raise ValueError(value)
            ends = datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC) + timedelta(days=1)
        except (ValueError, OverflowError) as error:
            raise to_pydantic_error(
                Refusal(Code.FIELD_INVALID, _describe(value), "a day", "write it like 2027-12-31")
            ) from error
        return Wall(ends.timestamp())

    @staticmethod
    def show(value: float) -> str:
        return (datetime.fromtimestamp(value, UTC) - timedelta(days=1)).strftime("%Y-%m-%d")

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shown = core_schema.plain_serializer_function_ser_schema(self.show, return_schema=core_schema.str_schema())
        return core_schema.no_info_plain_validator_function(self.read, serialization=shown)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "format": "date", "examples": ["2027-12-31"], "x-value": "day"}


Day = Annotated[Wall, _Day()]


class _Selector:
    """CEL text. It is compiled when it is read, so that an error has its position in the text."""

    def __init__(self, may_read: frozenset[str] = frozenset(VARIABLES)) -> None:
        self._may_read = may_read

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise to_pydantic_error(
                Refusal(
                    Code.EXPRESSION_INVALID, _describe(value), "a CEL expression", 'device.kind == "gpu", for example'
                )
            )
        try:
            reads = Expression.compile(value).variables
        except ExpressionError as error:
            raise to_pydantic_error(error.refusal, line=error.line, column=error.column) from error
        if beyond := sorted(reads - self._may_read):
            allowed = ", ".join(sorted(self._may_read))
            raise to_pydantic_error(
                Refusal(Code.EXPRESSION_INVALID, f"{beyond[0]}: no candidate is looked at", allowed, "leave it out")
            )
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read, serialization=core_schema.to_string_ser_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        example = (
            'hour(now, "Europe/Paris") >= 22'
            if self._may_read == CONTEXT_VARIABLES
            else 'device.kind in ["npu", "gpu"]'
        )
        return {"type": "string", "examples": [example], "x-value": "CEL expression"}


Selector = Annotated[str, _Selector()]
Condition = Annotated[str, _Selector(CONTEXT_VARIABLES)]


def _describe(value: Any) -> str:
    """A wrong value in words."""
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


def format_field(part: BaseModel, field: str) -> str:
    """The field of `part` as people write it."""
    return str(part.model_dump(mode="json", include={field}, by_alias=False)[field])

"""Parameters in the address of a request. Pure."""

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

from shoal.types.codes import Code, ShoalError, refuse

PARAMETERS_MOST: Final = 8
VALUE_MOST: Final = 256
"""Characters of one parameter."""

Parameters = Mapping[str, str]


def parameters_of(query: str, takes: tuple[str, ...]) -> dict[str, str]:
    """The parameters of a request. Raises ShoalError(INVALID_ARGUMENT)."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS_MOST, errors="strict")
    except (ValueError, UnicodeError) as cause:
        raise invalid_parameter("parameters that cannot be read", _wanted(takes)) from cause
    found = dict(pairs)
    for name, value in pairs:
        if name not in takes or len(value) > VALUE_MOST or not value.isprintable():
            raise invalid_parameter(f"parameter {name!r:.40}", _wanted(takes))
    return found


def is_set(given: Parameters, name: str) -> bool:
    """Whether this one, which is 0 or 1, is 1; left out or empty, it is 0. Raises ShoalError(INVALID_ARGUMENT)."""
    value = given.get(name, "")
    if value not in ("", "0", "1"):
        raise invalid_parameter(f"{name} {value!r:.40}", "0 or 1")
    return value == "1"


def _wanted(takes: tuple[str, ...]) -> str:
    return f"{', '.join(takes) or 'none'}, of at most {VALUE_MOST} printable characters"


def invalid_parameter(found: str, wanted: str) -> ShoalError:
    return refuse(Code.INVALID_ARGUMENT, found, wanted, "see docs/guides/dashboard.md")

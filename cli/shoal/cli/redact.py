"""Removes secrets from a support bundle, by the form of the text and by the names of keys."""

import re
from collections.abc import Mapping
from typing import Final

REDACTED: Final = "REDACTED"
_NAMES: Final = r"[\w-]*(?:token|secret|password|passwd|authorization|api[_-]?key|apikey|credential|cookie|nonce)[\w-]*"
_VALUE: Final = rf"(?!{REDACTED})[^\s,;\"'\\}}\]&]{{6,}}"
_RULES: Final = (
    # A PEM block that is a key, also where its line breaks are written as \n.
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    (re.compile(r"\bshoal-join\.[\w-]+\.[\w-]+(?:\.[\w-]+)?"), REDACTED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"), rf"\1 {REDACTED}"),
    (re.compile(r"(\w[\w+.-]*://)[^/\s@\"']+@"), rf"\1{REDACTED}@"),
    # JSON web tokens.
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), REDACTED),
    # name: value, name=value, "name": "value", also inside a JSON string, and in a URL's query.
    (re.compile(rf"(?i)(\b{_NAMES}\\?[\"']?\s*[:=]\s*\\?[\"']?){_VALUE}"), rf"\1{REDACTED}"),
)


def redact(text: str) -> str:
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def redact_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Redact a coordinator's flags: a flag's name also marks its value as secret. File names stay."""
    return {
        name: REDACTED if re.fullmatch(_NAMES, name, re.IGNORECASE) else redact(said) for name, said in flags.items()
    }

"""What must not leave a region in a support bundle, taken out of text by what secrets look like and are called."""

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


def redacted(text: str) -> str:
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def redacted_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Of a coordinator: a value is judged by its flag's name too. Names of files stay."""
    return {
        name: REDACTED if re.fullmatch(_NAMES, name, re.IGNORECASE) else redacted(said) for name, said in flags.items()
    }

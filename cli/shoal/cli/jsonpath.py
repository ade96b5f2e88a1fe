"""Kubectl's JSONPath, as much of it as listings need: texts, fields, indexes, `[*]` and `range`. Pure."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from shoal.types.codes import Code, refuse

_PART: Final = re.compile(r"\{([^{}]*)\}|([^{}]+)")
_STEP: Final = re.compile(r"\.?([A-Za-z_][\w-]*)|\[(\*|-?\d+)\]|\['([^']*)'\]")
_ESCAPES: Final = {r"\n": "\n", r"\t": "\t"}
MAX_CHARS: Final = 2000
"""Of an expression: every part of it is looked at for every row."""


def evaluate(expression: str, data: Any) -> str:
    """What the expression says of the data, values of a list separated by spaces. Raises ShoalError(USAGE).

    `{.items[*].node.name}`, or `{range .items[*]}{.node.name}{"\\t"}{.liveness}{"\\n"}{end}`.
    """
    text = expression if "{" in expression else f"{{{expression}}}"
    parts = list(_parse(text))
    said = list[str]()
    _render(parts, 0, data, data, said)
    return "".join(said)


def _parse(text: str) -> Iterator[tuple[str, str]]:
    """(`text`, `path`, `range` or `end`; what it says)"""
    if len(text) > MAX_CHARS or _PART.sub("", text):
        raise _wrong(text)
    depth = 0
    for found in _PART.finditer(text):
        inside, outside = found[1], found[2]
        if inside is None:
            yield "text", outside
            continue
        word = inside.strip()
        if word.startswith('"') and word.endswith('"') and len(word) > 1:
            yield "text", re.sub(r"\\[nt]", lambda each: _ESCAPES[each[0]], word[1:-1])
        elif word.startswith("range "):
            depth += 1
            yield "range", word.removeprefix("range ").strip()
        elif word == "end":
            depth -= 1
            yield "end", ""
        else:
            yield "path", word
        if depth < 0:
            raise _wrong(text)
    if depth:
        raise _wrong(text)


def _render(parts: Sequence[tuple[str, str]], at: int, here: Any, root: Any, said: list[str]) -> int:
    """Render from part `at` on, up to the end of the range that it is in; return where that is."""
    while at < len(parts):
        kind, text = parts[at]
        if kind == "end":
            return at
        if kind == "text":
            said.append(text)
        elif kind == "path":
            said.append(" ".join(_show(value) for value in _values(text, here, root)))
        else:
            end = _end_of(parts, at)
            for value in _values(text, here, root):
                _render(parts[:end], at + 1, value, root, said)
            at = end
        at += 1
    return at


def _end_of(parts: Sequence[tuple[str, str]], at: int) -> int:
    depth = 0
    for index in range(at, len(parts)):
        depth += {"range": 1, "end": -1}.get(parts[index][0], 0)
        if not depth:
            return index
    raise AssertionError("the parser has counted them")


def _values(path: str, here: Any, root: Any) -> list[Any]:
    rest, found = path, [here]
    if rest.startswith("$"):
        rest, found = rest[1:], [root]
    rest = "" if rest == "." else rest.removeprefix("@")
    while rest:
        step = _STEP.match(rest)
        if step is None:
            raise _wrong(path)
        found = [value for each in found for value in _take(each, step[1] or step[3], step[2])]
        rest = rest[step.end() :]
    return found


def _take(value: Any, name: str | None, index: str | None) -> list[Any]:
    if name is not None:
        return [value[name]] if isinstance(value, dict) and name in value else []
    if index == "*":
        return list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
    if isinstance(value, list) and index is not None and -len(value) <= int(index) < len(value):
        return [value[int(index)]]
    return []


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _wrong(text: str) -> Exception:
    return refuse(Code.USAGE, f"the path {text!r:.80}", "texts and paths in braces", "-o jsonpath='{.items[*].name}'")

"""The log calls of all processes: `make lint` checks them, `make docs` writes `docs/reference/log-events.md` from them.

A call is `log.LEVEL("event_name", field=value)`. The name is a literal: a noun, then a past participle or a state. Its
meaning stands in `shoal.host.log_events`, one for each name, none without a call. With the argument `page` this prints
the page instead.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from style.words import PARTS, ROOT, WORDS, Finding, is_participle

from shoal.host.log_events import MEANINGS

LOGGERS: Final = frozenset(("log", "_log"))
LEVELS: Final = ("debug", "info", "warning", "error")
OTHER_METHODS: Final = frozenset(("critical", "err", "failure", "fatal", "log", "msg", "warn"))
EVENT: Final = re.compile(r"[a-z0-9]+(_[a-z0-9]+)+")
STATES: Final = frozenset(
    (
        "corrupt",
        "down",
        "full",
        "incomplete",
        "invalid",
        "listening",
        "overdue",
        "ready",
        "running",
        "stale",
        "stopping",
        "unreadable",
    )
)
FIELDS: Final[Mapping[str, str]] = {
    "cause": "error",
    "failure": "error",
    "found": "error",
    "msg": "message",
    "refusal": "error",
    "seconds": "duration_s",
    "why": "reason",
}
"""Field names that are another one's synonyms."""

HEAD: Final = """# Log events

What the processes write to their logs (`shoal logs`): one JSON line an event, with `event` as named here, `level`,
`timestamp`, `process` where an agent has several, and the fields below. Every event of an agent's supervisor names its
`node` and `region`. Not to be confused with what `shoal events` shows: those are entries of the region's event log,
named by codes.

Levels: `debug`; `info`: the state changed; `warning`: the process goes on, and somebody should look; `error`:
something is not done. `error` as a field is a text, and ends with its code where it has one. `exception` is a
traceback.

`make docs` writes this table from the log calls and from `protos/shoal/host/log_events.py`.

| event | level | logged by | fields | meaning |
| --- | --- | --- | --- | --- |"""


@dataclass(frozen=True, slots=True)
class LogCall:
    # Path of the module, from the root of the tree.
    path: str
    line: int
    # Empty if the call names none by a literal.
    event: str
    # debug, info, warning or error.
    level: str
    # In the order of the call; `**` for fields that are known only when it runs.
    fields: tuple[str, ...]
    # Positional arguments after the event.
    extra: int


def logger_of(function: ast.expr) -> str:
    """The method that is called on a logger; empty if it is no logger."""
    if not isinstance(function, ast.Attribute):
        return ""
    owner = function.value
    name = ast.unparse(owner).rsplit(".", 1)[-1] if isinstance(owner, ast.Name | ast.Attribute) else ""
    made_here = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "structlog.get_logger"
    return function.attr if name in LOGGERS or made_here else ""


def log_calls(path: str, tree: ast.AST) -> Iterator[LogCall]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        method = logger_of(node.func)
        if method not in (*LEVELS, "exception"):
            continue
        first = node.args[0] if node.args else None
        event = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
        names = [each.arg or "**" for each in node.keywords]
        has_traceback = method == "exception" or "exc_info" in names
        fields = (*(each for each in names if each != "exc_info"), *(["exception"] if has_traceback else []))
        level = "error" if method == "exception" else method
        yield LogCall(path, node.lineno, event, level, fields, max(0, len(node.args) - 1))


def is_event_name(event: str) -> bool:
    """A noun, then a past participle or a state: `store_copied`, `front_down`, `file_unreadable`."""
    last = event.rsplit("_", 1)[-1]
    return EVENT.fullmatch(event) is not None and (is_participle(last) or last in STATES)


def check_call(call: LogCall, meanings: Mapping[str, str]) -> Iterator[Finding]:
    if not call.event:
        yield Finding(call.path, call.line, "event without a name", "a literal such as 'store_copied' comes first")
        return
    if call.extra:
        yield Finding(call.path, call.line, "positional text", f"{call.event}: give it as a field")
    if not is_event_name(call.event):
        yield Finding(call.path, call.line, "event name", f"{call.event!r}: a noun, then a past participle or a state")
    elif call.event not in meanings:
        yield Finding(call.path, call.line, "event without a meaning", f"{call.event}: add it to shoal.host.log_events")
    for word in call.event.split("_"):
        if word in WORDS:
            yield Finding(call.path, call.line, "private word", f"{call.event}: {word} is {WORDS[word]}")
    for field in call.fields:
        if field in FIELDS:
            yield Finding(call.path, call.line, "field name", f"{call.event}: {field} is {FIELDS[field]}")


def check_module(path: str, tree: ast.AST, meanings: Mapping[str, str]) -> Iterator[Finding]:
    for call in log_calls(path, tree):
        yield from check_call(call, meanings)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="_log" | "log") | ast.Attribute(attr="_log")):
                yield Finding(path, node.lineno, "call without a level", f"log.LEVEL(..), one of {', '.join(LEVELS)}")
            case ast.Call(func=ast.Attribute() as function) if logger_of(function) in OTHER_METHODS:
                yield Finding(path, node.lineno, "unknown level", f"{function.attr}: one of {', '.join(LEVELS)}")
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.Call() as value):
                name = ast.unparse(target).rsplit(".", 1)[-1]
                if ast.unparse(value).startswith("structlog.get_logger(") and name not in LOGGERS:
                    yield Finding(path, node.lineno, "logger's name", f"{name}: log or _log")
            case ast.Import(names=names) if path != "protos/shoal/host/logs.py":
                if any(each.name.split(".")[0] == "logging" for each in names):
                    yield Finding(path, node.lineno, "another logger", "structlog.get_logger() instead of logging")
            case ast.ImportFrom(module="logging"):
                yield Finding(path, node.lineno, "another logger", "structlog.get_logger() instead of logging")
            case _:
                pass


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for part in PARTS:
        for file in sorted((root / part).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if "_pb2" not in path and "/build/" not in path:
                yield path, ast.parse(file.read_text())


def unused_meanings(calls: Sequence[LogCall], meanings: Mapping[str, str]) -> list[str]:
    return sorted(set(meanings) - {call.event for call in calls})


def page(calls: Sequence[LogCall], meanings: Mapping[str, str]) -> str:
    by_event: dict[str, list[LogCall]] = defaultdict(list)
    for call in calls:
        by_event[call.event].append(call)
    rows = []
    for event, found in sorted(by_event.items()):
        levels = [each for each in LEVELS if any(call.level == each for call in found)]
        modules = dict.fromkeys(f"`{call.path.split('/shoal/')[1].removesuffix('.py')}`" for call in found)
        fields = dict.fromkeys(f"`{field}`" for call in found for field in call.fields)
        cells = (f"`{event}`", ", ".join(levels), ", ".join(modules), ", ".join(fields), meanings.get(event, ""))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([HEAD, *rows]) + "\n"


def main() -> int:
    parsed = list(trees(ROOT))
    calls = [call for path, tree in parsed for call in log_calls(path, tree)]
    if sys.argv[1:] == ["page"]:
        print(page(calls, MEANINGS), end="")
        return 0
    if sys.argv[1:]:
        sys.exit(f"found: {' '.join(sys.argv[1:])}; wanted: page, or nothing to check")
    left = [str(finding) for path, tree in parsed for finding in check_module(path, tree, MEANINGS)]
    left += [f"shoal.host.log_events: no call logs {event}" for event in unused_meanings(calls, MEANINGS)]
    print("\n".join(left), end="\n" if left else "")
    levels = Counter(call.level for call in calls)
    counted = ", ".join(f"{levels[level]} {level}" for level in LEVELS)
    print(f"{len(calls)} log calls of {len({call.event for call in calls})} events ({counted})", end="; ")
    print(f"{len(left)} findings" if left else "nothing found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

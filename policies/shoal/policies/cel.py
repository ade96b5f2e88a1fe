"""Expressions over a candidate, in CEL. Only this module uses the CEL library.

`VARIABLES` declares every name once with its type; an expression is checked against it when it is compiled. Its cost is
bounded before it runs: length, nesting, one level of macros over collections of at most `MAX_ITEMS`, nothing that grows
inside a macro, constant patterns only (RE2, linear time). An accepted expression takes less than `BUDGET_S`.

A label that a node does not carry makes `node.labels.x` an error, as everywhere in CEL; test `has(node.labels.x)`
first.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from cel_expr_python import cel

from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.device import Device, Node
from shoal.types.profile import ModelProfile

BUDGET_S: Final = 0.1
MAX_LENGTH: Final = 2048
MAX_ITEMS: Final = 256
MAX_TEXT: Final = 1024
MAX_PATTERN: Final = 128
MAX_REPEAT: Final = 32
MAX_ZONE: Final = 64
"""Characters of a time zone's name, of which the longest has half as many."""
MAX_FOUND: Final = 512
"""Characters of what a refusal says was found. A region keeps one refusal for each device that differs."""
MAX_WORK: Final = 200_000
"""Limit of token evaluations: about 0.1 us each, so at most a fifth of the budget on a slow machine's core."""


class Variable(NamedTuple):
    """One name that expressions may read."""

    # In CEL's notation.
    type: str
    # Text for the reference.
    meaning: str


VARIABLES: Final[Mapping[str, Variable]] = {
    "node.name": Variable("string", "the node's name"),
    "node.region": Variable("string", "the region it enrolled in"),
    "node.labels": Variable("map<string,string>", "its labels, as its join token or an operator gave them"),
    "node.os": Variable("string", "operating system, `linux`"),
    "node.arch": Variable("string", "machine, `x86_64` or `aarch64`"),
    "node.memory_bytes": Variable("int", "memory of the machine"),
    "device.name": Variable("string", "unique on its node: `cpu0`, `gpu0`"),
    "device.kind": Variable("string", "`cpu`, `gpu` or `npu`"),
    "device.vendor": Variable("string", "who made it"),
    "device.model": Variable("string", "its product name"),
    "device.provider": Variable("string", "ONNX Runtime's execution provider"),
    "device.memory_bytes": Variable("int", "memory of the device"),
    "device.emulated": Variable("bool", "true where the device is emulated on the CPU"),
    "device.numa": Variable("int", "the NUMA node that it is attached to; -1 where unknown, or none in particular"),
    "device.link_bytes_per_s": Variable(
        "double", "the most that its link to the host carries one way; no number where unknown, or it has none"
    ),
    "device.attributes": Variable("map<string,string>", "facts that its driver tells: isa, cores, pci, .."),
    "model.precision": Variable("string", "of most weight bytes: `fp32`, `int8`, .."),
    "model.size_bytes": Variable("int", "the file's size"),
    "model.flops": Variable("double", "of one inference at batch 1"),
    "model.operators": Variable("list<string>", "operator types in the graph"),
    "region.name": Variable("string", "this region"),
    "region.residency": Variable("string", "`spec.location.residency` of the Region, empty where unknown"),
    "region.carbon": Variable("double", "gCO2/kWh as the region's signal says now; no number where it is unknown"),
    "now": Variable("timestamp", 'time of the plan, UTC; `hour(now, "Europe/Paris")` by the clock on the wall there'),
}
CARBON_VARIABLE: Final = "region.carbon"
"""The only variable that may have no value: NaN until a signal or an operator sets it."""
CONTEXT_VARIABLES: Final = frozenset({"region.name", "region.residency", CARBON_VARIABLE, "now"})
"""What expressions without a candidate may read: those of `schedule` and `traffic`."""


class ExpressionError(ShoalError):
    """A refusal with its position in the expression's own text, from 1."""

    def __init__(self, refusal: Refusal, line: int = 1, column: int = 1) -> None:
        super().__init__(refusal)
        self.line = line
        self.column = column


def node_fields(node: Node) -> dict[str, Any]:
    """`node` as expressions see it: `Expression.evaluate(node=node_fields(node), ..)`."""
    return {
        "name": node.name,
        "region": node.region,
        "labels": dict(node.labels),
        "os": node.os,
        "arch": node.arch,
        "memory_bytes": int(node.memory_bytes),
    }


def device_fields(device: Device) -> dict[str, Any]:
    return {
        "name": device.name,
        "kind": str(device.kind),
        "vendor": device.vendor,
        "model": device.model,
        "provider": device.provider,
        "memory_bytes": int(device.memory_bytes),
        "emulated": device.emulated,
        "numa": -1 if device.numa is None else device.numa,
        "link_bytes_per_s": device.host_bytes_per_s,
        "attributes": dict(device.attributes),
    }


def model_fields(profile: ModelProfile) -> dict[str, Any]:
    return {
        "precision": profile.precision,
        "size_bytes": int(profile.size_bytes),
        "flops": float(profile.flops),
        "operators": list(profile.operators),
    }


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked boolean expression."""

    text: str
    # Variables that it may read.
    variables: frozenset[str]
    # Of those that are maps, the entries that it may read; one that is missing here: any.
    entries: Mapping[str, frozenset[str]]
    _program: Any

    @classmethod
    def compile(cls, text: str) -> "Expression":
        """Raises ExpressionError(EXPRESSION_INVALID | POLICY_COST) with the position. Equal texts compile once."""
        return _compile(text)

    def evaluate(self, **values: Any) -> bool:
        """The result for `node={"name": .., "labels": {..}}`, `device=..`, `model=..`, `region=..`, `now=datetime`.

        Only values that the expression reads are needed. Raises ShoalError(EXPRESSION_INVALID) where it has no result
        for these values (such as a missing label), and ShoalError(POLICY_COST) where a value is too large.
        """
        data = dict(self._input_values(values))
        try:
            result = self._program.eval(data=data)
        except RuntimeError as error:
            raise ShoalError(_cost_refusal("evaluation stopped: " + _reason(str(error)), "fewer steps")) from error
        if result.type() == cel.Type.BOOL:
            return bool(result.value())
        reason = _reason(str(result.value()))
        raise ShoalError(
            Refusal(
                Code.EXPRESSION_INVALID,
                f"{reason} in {self.text!r:.120}",
                "an answer for every candidate",
                "ask has(..) before reading a label or attribute that may be absent",
            )
        )

    def reads_of(self, **values: Any) -> str:
        """What it reads of these values, in order. For all of which that is the same, it comes to the same."""
        read = list[object]()
        for name in sorted(self.variables):
            part, _, field = name.partition(".")
            value = values[part][field] if field else values[part]
            entries = self.entries.get(name)
            read.append(value if entries is None or _is_too_large(name, value) else _entries_of(value, entries))
        return repr(read)

    def refusal(self, **values: Any) -> Refusal | None:
        """None where the candidate matches; otherwise SELECTOR_MISMATCH (or POLICY_COST), with what was found."""
        try:
            if self.evaluate(**values):
                return None
        except ShoalError as error:
            if error.code == Code.POLICY_COST:
                return error.refusal
            return self._mismatch(error.refusal.found, error.refusal.remedy)
        given = tuple(self._input_values(values))
        found = ", ".join(_describe_values(self.entries, given))
        remedy = "label a node so that it matches, or widen `where`"
        if any(name == CARBON_VARIABLE and _is_unknown(value) for name, value in given):
            remedy = "`shoal region set carbon VALUE`, or `spec.carbon` of the Region"
        return self._mismatch(found, remedy)

    def _mismatch(self, found: str, remedy: str) -> Refusal:
        """One is kept for each candidate of which it reads something else."""
        shown = found if len(found) <= MAX_FOUND else f"{found[: MAX_FOUND - 2]}.."
        return Refusal(Code.SELECTOR_MISMATCH, shown, self.text, remedy)

    def _input_values(self, values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
        """`node={"name": x}` as `node.name: x`, after a check of each value's size."""
        for name in sorted(self.variables):
            part, _, field = name.partition(".")
            if part in values and (not field or field in values[part]):
                value = values[part][field] if field else values[part]
                _check_size(name, value)
                yield name, value

    @property
    def constant(self) -> bool | None:
        """The result where no candidate can change it (false where it always fails), otherwise None."""
        try:
            return self.evaluate()
        except ShoalError as error:
            return None if "No value with name" in error.refusal.found else False


@lru_cache(maxsize=1024)
def _compile(text: str) -> Expression:
    _check_cost(text)
    try:
        program = _environment().compile(text)
    except RuntimeError as error:
        raise _invalid(str(error)) from error
    if program.return_type() != cel.Type.BOOL:
        raise ExpressionError(
            Refusal(
                Code.EXPRESSION_INVALID,
                f"an expression of type {program.return_type().name().lower()}",
                "true or false",
                'compare it with something: device.kind == "gpu"',
            )
        )
    reads = _variables_read(text)
    return Expression(text, reads, _entries_read(text, reads), program)


@cache
def _environment() -> Any:
    asked = [cel.Type.TIMESTAMP, cel.Type.STRING]
    hour = cel.FunctionDecl("hour", [cel.Overload("hour_in_zone", cel.Type.INT, asked, impl=_hour)])
    variables = {name: cel.Type(variable.type) for name, variable in VARIABLES.items()}
    return cel.NewEnv(variables=variables, functions=[hour])


def _hour(moment: datetime, zone: str) -> int:
    """Hour of the day, 0 to 23, in local time of that zone."""
    found = _zone(zone)
    if found is None:
        raise ValueError(f"no zone {zone!r:.80} of the tz database")
    return moment.astimezone(found).hour


@lru_cache(maxsize=4 * MAX_ITEMS)
def _zone(name: str) -> ZoneInfo | None:
    """None: there is none of that name, which is remembered too, because it takes a search in the file system. Raises
    OSError where that fails, as without a free file descriptor."""
    try:
        return ZoneInfo(name) if len(name) <= MAX_ZONE else None
    except (KeyError, ValueError, IsADirectoryError, PermissionError):  # unknown; no name at all; a folder of zones
        return None


def _entries_of(value: Mapping[str, object], entries: Iterable[str]) -> object:
    return [(name, value[name]) for name in sorted(entries) if name in value]


def _is_too_large(name: str, value: object) -> bool:
    try:
        _check_size(name, value)
    except ShoalError:
        return True
    return False


def _variables_read(text: str) -> frozenset[str]:
    """Those that the text may read."""
    # CEL reads `(node).name` as `node.name`.
    words = [token.text if token.kind != "string" else "" for token in _tokens_of(text) if token.text not in {"(", ")"}]
    chains = {*zip(words, words[1:], words[2:], strict=False)}
    parts = {name: name.partition(".") for name in VARIABLES}
    return frozenset(name for name, each in parts.items() if each in chains or (not each[1] and name in words))


def _entries_read(text: str, variables: Iterable[str]) -> Mapping[str, frozenset[str]]:
    """Of each variable that is a map, the entries that the text may read, where each use of it names one."""
    tokens = _tokens_of(text)
    words = ["" if token.kind == "string" else token.text for token in tokens]
    found = dict[str, frozenset[str]]()
    for variable in variables:
        part, _, field = variable.partition(".")
        if not VARIABLES[variable].type.startswith("map"):
            continue
        uses = [at for at, word in enumerate(words) if word == field and words[max(0, at - 1) : at] == ["."]]
        named = [_entry_named(tokens, at + 1) for at in uses if words[max(0, at - 2) : at] == [part, "."]]
        names = {name for name in named if name is not None}
        # Where the word means something else, too, it may be a way to the map that is not seen here.
        if None not in named and len(named) == words.count(field):
            found[variable] = frozenset(names)
    return found


def _entry_named(tokens: "Sequence[_Token]", at: int) -> str | None:
    """The entry that is named from this token on, as in `.site` or `["site"]`; None: something else follows."""
    following = [each.text for each in tokens[at : at + 3]]
    if following[:1] == ["."] and len(following) > 1 and following[2:] != ["("]:
        return following[1] if tokens[at + 1].kind == "word" else None
    if len(following) < 3 or (following[0], following[2]) != ("[", "]") or tokens[at + 1].kind != "string":
        return None
    text = following[1]
    is_plain = text[0] in "\"'" and text[:3] not in ('"""', "'''") and "\\" not in text
    return text[1:-1] if is_plain else None


def _check_size(name: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ShoalError(_cost_refusal(f"{name} of {len(value)} characters", f"at most {MAX_TEXT}"))
        return
    if isinstance(value, Mapping):
        for key in value:
            _check_size(name, key)
        value = list(value.values())
    if isinstance(value, list | tuple):
        if len(value) > MAX_ITEMS:
            raise ShoalError(_cost_refusal(f"{name} with {len(value)} entries", f"at most {MAX_ITEMS}"))
        for item in value:
            _check_size(name, item)


def _describe_values(entries: Mapping[str, frozenset[str]], values: Iterable[tuple[str, object]]) -> Iterator[str]:
    """These values in words, of a map the entries that are read of it. Nothing else is named, because what is read
    alone tells candidates apart."""
    for name, value in values:
        if isinstance(value, Mapping) and name in entries:
            for key in sorted(entries[name]):
                yield f"{name}.{key} = {value[key]!r:.80}" if key in value else f"{name}.{key} absent"
        else:
            yield f"{name} is unknown" if _is_unknown(value) else f"{name} = {value!r:.80}"


def _is_unknown(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<string>(?P<prefix>[rRbB]{0,2})(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}
        |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*|`[A-Za-z0-9_.\-/\ ]+`)
    |(?P<number>0x[0-9a-fA-F]+[uU]?|[0-9]*\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+|[uU])?)
    |(?P<mark>.)""",
    re.VERBOSE | re.DOTALL,
)
"""As CEL's grammar has them: a token that took more than CEL does would hide what follows it, as in `1in.node.labels`
or "node.labels.`a//b`"."""
_MACROS = frozenset({"all", "exists", "exists_one", "existsOne", "map", "filter"})
_COLLECTIONS = frozenset(name.rpartition(".")[2] for name, (kind, _) in VARIABLES.items() if "<" in kind)
_PATTERN_COST = 8


class _Token(NamedTuple):
    # Of a word that is quoted, what is between the quotes.
    text: str
    # Name of its group in `_TOKEN`.
    kind: str
    start: int


def _tokens_of(text: str) -> list[_Token]:
    """All but what separates them."""
    return [
        _Token(match[0].strip("`") if match["word"] else match[0], match.lastgroup or "mark", match.start())
        for match in _TOKEN.finditer(text)
        if match.lastgroup != "space"
    ]


def _check_cost(text: str) -> None:
    """Refuses what could run long, judged by the expression's tokens alone. Simple, and much stricter than
    necessary."""
    if len(text) > MAX_LENGTH:
        raise ExpressionError(_cost_refusal(f"{len(text)} characters", f"at most {MAX_LENGTH}"))
    tokens = _tokens_of(text)
    macros: list[int] = []
    depth = maps = work = 0
    items = max(MAX_ITEMS, sum(token.text == "," for token in tokens))
    for index, token in enumerate(tokens):
        after = tokens[index + 1].text if index + 1 < len(tokens) else ""
        called = token.kind == "word" and after == "("
        if token.text in {"(", "[", "{"}:
            depth += 1
        elif token.text in {")", "]", "}"}:
            depth -= 1
            if macros and depth < macros[-1]:
                macros.pop()
        elif called and token.text in _MACROS:
            if macros:
                raise _cost_error(text, token, f"{token.text}() inside a macro", "macros one after another, not nested")
            maps += token.text == "map"
            if maps > 1:
                raise _cost_error(text, token, "map() twice", "map() at most once")
            macros.append(depth + 1)
        elif called and token.text == "matches":
            _check_pattern_cost(text, tokens, index)
        elif token.text == "+" and macros:
            raise _cost_error(text, token, "+ inside a macro", "sums outside of macros, where nothing can grow")
        whole = token.kind == "word" and token.text in _COLLECTIONS and after not in {"[", "."}
        weight = items if whole else 1
        work += (weight if token.text != "matches" else _PATTERN_COST) * (items if macros else 1)
        if work > MAX_WORK:
            raise _cost_error(
                text, token, f"more than {MAX_WORK} steps by here", "a shorter expression inside the macro"
            )


def _check_pattern_cost(text: str, tokens: list[_Token], index: int) -> None:
    """A pattern must be one short string literal with small counted repetitions."""
    token, argument = tokens[index], tokens[index + 2 : index + 4]
    method = index > 0 and tokens[index - 1].text == "."
    if not method or [item.kind for item in argument] != ["string", "mark"] or argument[1].text != ")":
        raise _cost_error(text, token, "a pattern that is computed", 'one plain string: text.matches("pattern")')
    pattern = argument[0].text
    if len(pattern) > MAX_PATTERN:
        raise _cost_error(text, argument[0], f"a pattern of {len(pattern)} characters", f"at most {MAX_PATTERN}")
    counts = [int(number) for group in re.findall(r"\{([0-9, ]*)\}", pattern) for number in re.findall("[0-9]+", group)]
    total = 1
    for count in counts:
        total *= max(count, 1)
    if total > MAX_REPEAT:
        raise _cost_error(
            text, argument[0], f"repetitions that multiply to {total}", f"at most {MAX_REPEAT} in one pattern"
        )


def _cost_refusal(found: str, asked: str) -> Refusal:
    return Refusal(
        Code.POLICY_COST,
        found,
        f"{asked}, so that an expression ends in {BUDGET_S:g} s",
        "write a simpler selector, or label the nodes and compare the label",
    )


def _cost_error(text: str, token: _Token, found: str, asked: str) -> ExpressionError:
    line = text.count("\n", 0, token.start) + 1
    return ExpressionError(_cost_refusal(found, asked), line, token.start - text.rfind("\n", 0, token.start))


_LIBRARY_ERROR = re.compile(r"ERROR: <input>:(\d+):(\d+): (.*)")
_UNDECLARED = re.compile(r"undeclared reference to '([^']+)'")


def _invalid(message: str) -> ExpressionError:
    """The library's message as a refusal: its first error with its position, and the nearest name where a name is
    unknown."""
    if "recursion limit" in message or "recursion depth" in message:
        return ExpressionError(_cost_refusal("brackets or operators nested too deep", "at most 32 levels"))
    match = _LIBRARY_ERROR.search(message)
    if match is None:
        return ExpressionError(Refusal(Code.EXPRESSION_INVALID, _reason(message), "a CEL expression", _SEE_REFERENCE))
    line, column, what = int(match[1]), int(match[2]), match[3].replace(" (in container '')", "")
    remedy = _SEE_REFERENCE
    if name := _UNDECLARED.search(what):
        column = max(1, column - name[1].rfind(".")) if "." in name[1] else column
        close = get_close_matches(".".join(name[1].split(".")[:2]), VARIABLES, n=1, cutoff=0.5)
        remedy = f"did you mean {close[0]}?" if close else f"names are {', '.join(VARIABLES)}"
    elif what.startswith("Syntax error: mismatched input '<EOF>'"):
        what = "an expression that ends too early"
    elif "= '" in what:
        remedy = "compare with == or in"
    elif "no matching overload" in what:
        remedy = 'compare like with like: int 5, double 5.0, string "5"; convert with int(), double(), string()'
    return ExpressionError(Refusal(Code.EXPRESSION_INVALID, what, "a CEL expression", remedy), line, column)


_SEE_REFERENCE = "see docs/reference/policy.md for names and types"


def _reason(message: str) -> str:
    return re.sub(r"^(?:[A-Z_]+: )?(?:ERROR: <input>:\d+:\d+: )?| \[[A-Z_]+\]$", "", message.split("\n")[0])

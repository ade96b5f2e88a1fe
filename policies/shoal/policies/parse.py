"""Parses YAML text into nodes with line and column. Opens no file.

Hostile input is refused while libyaml's events arrive, before any tree is walked: size, depth, aliases, tags, duplicate
keys. Plain scalars follow YAML 1.2's core schema, so that `20:00`, `on` and `no` stay strings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from shoal.types.codes import Code, Refusal

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64
MAX_ALIASES: Final = 64
MAX_DOCUMENTS: Final = 256
MAX_NODES: Final = 10_000
"""Limit of the nodes of one text. Nodes behind an alias count each time."""
MAX_PROBLEMS: Final = 20
_FIRST_KEY: Final = "apiVersion"
"""With which documents begin: where it comes again, `---` is missing."""

Plain = str | int | float | bool | None | tuple["Plain", ...] | dict[str, "Plain"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in one document, at the offending key or value."""

    # Name that the document's text was given.
    document: str
    # From 1.
    line: int
    # From 1.
    column: int
    refusal: Refusal

    def __str__(self) -> str:
        return f"{self.document}:{self.line}:{self.column}: {self.refusal}"


@dataclass(frozen=True, slots=True)
class Position:
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class ScalarNode:
    """A scalar value and its position."""

    value: str | int | float | bool | None
    at: Position
    # Start of the value's own text, without quotes; None where it is not in the file as such (folded or escaped text).
    text_at: Position | None
    # Nodes that the value consists of; always 1.
    node_count: int = 1

    def document_position(self, line: int, column: int) -> Position:
        """Converts line:column (from 1) within this scalar's own text to a position in the document."""
        if self.text_at is None:
            return self.at
        indent = self.text_at.column if line == 1 or self.text_at.line != self.at.line else 1
        return Position(self.text_at.line + line - 1, indent + column - 1)


@dataclass(frozen=True, slots=True)
class SequenceNode:
    items: tuple["YamlNode", ...]
    at: Position
    node_count: int


@dataclass(frozen=True, slots=True)
class MappingNode:
    """A mapping and its position."""

    entries: dict[str, "YamlNode"]
    # Position of each key.
    key_positions: dict[str, Position]
    at: Position
    # The mapping, its keys and all nodes of its values.
    node_count: int


YamlNode = ScalarNode | SequenceNode | MappingNode


@dataclass(frozen=True, slots=True)
class ParsedText:
    """The documents of one text, or its problems."""

    # Empty where there is a problem.
    roots: tuple[YamlNode, ...]
    problems: tuple[Problem, ...]


def parse(name: str, text: str | bytes) -> ParsedText:
    """Parses the documents in `text`, without empty ones. `name` identifies the text in problems: a file's path."""
    composer = _Composer()
    roots: tuple[YamlNode, ...] = ()
    try:
        roots = tuple(composer.documents(_decode(text)))
    except _ParseError as stop:
        composer.problems.append((stop.at, stop.refusal))
    problems = tuple(Problem(name, at.line, at.column, why) for at, why in composer.problems)
    return ParsedText(() if problems else roots, problems)


def plain(node: YamlNode) -> Plain:
    """The node as dict, tuple and scalars."""
    match node:
        case ScalarNode():
            return node.value
        case SequenceNode():
            return tuple(plain(item) for item in node.items)
        case MappingNode():
            return {key: plain(value) for key, value in node.entries.items()}


class _ParseError(Exception):
    def __init__(self, at: Position, code: Code, found: str, asked: str, remedy: str) -> None:
        super().__init__(code)
        self.at = at
        self.refusal = Refusal(code, found, asked, remedy)


BINARY_BYTES: Final = 8192
"""A NUL among so many first bytes tells that a file that is too large is no text; git looks at 8,000."""
BINARY_LEAST = 3
"""So many control characters among them tell the same of a smaller one. Fewer are a slip, whose place is told."""
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _decode(text: str | bytes) -> str:
    """The text as str. Checks size, encoding and characters, and refuses at the position of the first fault."""
    if len(text) > MAX_BYTES or (isinstance(text, str) and _utf8_length(text) > MAX_BYTES):
        if isinstance(text, bytes) and b"\0" in text[:BINARY_BYTES]:
            raise _binary_file()
        line = 1 + (text.count("\n", 0, MAX_BYTES) if isinstance(text, str) else text.count(b"\n", 0, MAX_BYTES))
        raise _ParseError(
            Position(line, 1),
            Code.YAML_TOO_LARGE,
            f"{len(text)} characters",
            f"at most {MAX_BYTES} bytes in a file",
            "split it into several files",
        )
    if isinstance(text, bytes):
        if len(_BINARY.findall(text[:BINARY_BYTES])) >= BINARY_LEAST:
            raise _binary_file()
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            at, bad_byte = _position_after(text[: error.start].decode()), f"byte 0x{text[error.start]:02x}"
            raise _ParseError(at, Code.YAML_INVALID, bad_byte, "UTF-8", "save the file as UTF-8") from error
        return _decode(decoded)
    text = text.removeprefix("\ufeff")
    if bad := _UNPRINTABLE.search(text):
        raise _ParseError(
            _position_after(text[: bad.start()]),
            Code.YAML_INVALID,
            f"character U+{ord(bad.group()):04X}",
            "printable text",
            "remove it, or write it as an escape in a double-quoted string",
        )
    return text


def _binary_file() -> "_ParseError":
    return _ParseError(
        Position(1, 1), Code.YAML_INVALID, "a binary file", "YAML as UTF-8",
        "name a file of documents; a model goes by `shoal model push`",
    )  # fmt: skip


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _position_after(text: str) -> Position:
    return Position(text.count("\n") + 1, len(text) - text.rfind("\n"))


def _position(mark: Any) -> Position:
    return Position(mark.line + 1, mark.column + 1)


def _has_tab(text: str, position: Position) -> bool:
    """Whether a tab stands there, which YAML does not take for indentation."""
    lines = text.split("\n", position.line)
    return position.line <= len(lines) and lines[position.line - 1][position.column - 1 :].startswith("\t")


class _Composer:
    """Composes nodes from events, and checks every limit as the events arrive."""

    def __init__(self) -> None:
        self.problems: list[tuple[Position, Refusal]] = []
        self._nodes = 0
        self._aliases = 0

    def documents(self, text: str) -> Iterator[YamlNode]:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._text = text
        self._events = yaml.parse(text, Loader=loader)
        try:
            yield from self._stream()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            position = _position(mark) if mark else Position(1, 1)
            if _has_tab(text, position):
                raise _ParseError(
                    position, Code.YAML_INVALID, "a tab", "spaces for indentation", "replace each tab by spaces"
                ) from error
            raise _ParseError(
                position,
                Code.YAML_INVALID,
                " ".join(part for part in (error.context, error.problem) if part),
                "YAML 1.2",
                "check indentation, colons and quotes here and on the line above",
            ) from error
        except yaml.YAMLError as error:
            raise _ParseError(
                Position(1, 1), Code.YAML_INVALID, str(error)[:200], "YAML 1.2", "save it as UTF-8"
            ) from error

    def _stream(self) -> Iterator[YamlNode]:
        count = 0
        for event in self._events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            count += 1
            if count > MAX_DOCUMENTS:
                raise _ParseError(
                    _position(event.start_mark),
                    Code.YAML_TOO_LARGE,
                    f"more than {MAX_DOCUMENTS} documents",
                    f"at most {MAX_DOCUMENTS} in a file",
                    "split it into several files",
                )
            self._anchors: dict[str, YamlNode] = {}
            self._open_anchors: set[str] = set()
            root = self._node(next(self._events), 1)
            if not (isinstance(root, ScalarNode) and root.value is None):
                yield root

    def _node(self, event: Any, depth: int) -> YamlNode:
        at = _position(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._resolve_alias(str(event.anchor), at)
        if event.tag is not None:
            raise _ParseError(
                at,
                Code.YAML_TAG_DENIED,
                f"tag {event.tag!r:.80}",
                "plain YAML without tags",
                "remove the tag; quote a value that must stay a string",
            )
        if depth > MAX_DEPTH:
            raise _ParseError(
                at, Code.YAML_TOO_DEEP, f"level {depth}", f"at most {MAX_DEPTH} levels", "flatten the document"
            )
        self._count(1, at, Code.YAML_TOO_LARGE, "split it into several files")
        if isinstance(event, yaml.ScalarEvent):
            if "\0" in event.value:
                raise _ParseError(at, Code.YAML_INVALID, "an escaped NUL", "printable text", "remove \\0")
            value = _resolve(event.value) if event.implicit[0] else event.value
            node: YamlNode = ScalarNode(value, at, self._text_position(event, at))
        else:
            if event.anchor:
                self._open_anchors.add(event.anchor)
            node = self._sequence(at, depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(at, depth)
            self._open_anchors.discard(event.anchor)
        if event.anchor:
            self._anchors[event.anchor] = node
        return node

    def _count(self, nodes: int, at: Position, code: Code, remedy: str) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise _ParseError(at, code, f"more than {MAX_NODES} values", f"at most {MAX_NODES} in a file", remedy)

    def _resolve_alias(self, anchor: str, at: Position) -> YamlNode:
        self._aliases += 1
        if anchor in self._open_anchors:
            raise _ParseError(
                at,
                Code.YAML_ALIAS_LIMIT,
                f"*{anchor:.40} inside the value that it names",
                "values that end",
                "write the value out instead of the alias",
            )
        if anchor not in self._anchors:
            raise _ParseError(
                at,
                Code.YAML_INVALID,
                f"*{anchor:.40} names nothing",
                "an anchor earlier in the document",
                "write &NAME",
            )
        if self._aliases > MAX_ALIASES:
            raise _ParseError(
                at,
                Code.YAML_ALIAS_LIMIT,
                f"more than {MAX_ALIASES} aliases",
                f"at most {MAX_ALIASES} in a file",
                "write the values out",
            )
        node = self._anchors[anchor]
        self._count(node.node_count, at, Code.YAML_ALIAS_LIMIT, "write the values out")
        return node

    def _sequence(self, at: Position, depth: int) -> SequenceNode:
        items = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        return SequenceNode(tuple(items), at, 1 + sum(item.node_count for item in items))

    def _mapping(self, at: Position, depth: int) -> MappingNode:
        entries: dict[str, YamlNode] = {}
        keys: dict[str, Position] = {}
        is_next_document = False
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key_at = _position(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                found = "an alias" if isinstance(event, yaml.AliasEvent) else "a list or mapping"
                raise _ParseError(key_at, Code.YAML_INVALID, f"{found} as key", "a word as key", "write the key out")
            self._node(event, depth + 1)
            key = event.value
            value = self._node(next(self._events), depth + 1)
            if key in entries:
                if not is_next_document:  # else one problem says it for all its keys
                    is_next_document = depth == 1 and key == _FIRST_KEY
                    self._on_duplicate_key(key, key_at, keys[key], is_next_document=is_next_document)
                continue
            entries[key], keys[key] = value, key_at
        return MappingNode(entries, keys, at, 1 + len(entries) + sum(value.node_count for value in entries.values()))

    def _on_duplicate_key(self, key: str, at: Position, first: Position, *, is_next_document: bool) -> None:
        missing = "put --- on a line of its own before it: it parts documents"
        why = Refusal(
            Code.YAML_DUPLICATE_KEY,
            f"{key!r:.60} again",
            f"each key once; the first is at line {first.line}, column {first.column}",
            missing if is_next_document else "remove one of the two",
        )
        self.problems.append((at, why))
        if len(self.problems) >= MAX_PROBLEMS:
            stop = self.problems.pop()
            raise _ParseError(stop[0], why.code, why.found, why.asked, why.remedy)

    def _text_position(self, event: Any, at: Position) -> Position | None:
        """Where the scalar's own text starts; None unless the file contains it unchanged."""
        start, end = event.start_mark.index, event.end_mark.index
        if event.style == "|":
            line = self._text.find("\n", start) + 1
            first = next((row for row in self._text[line:end].split("\n") if row.strip()), "")
            if self._text.startswith(first, line):
                return Position(at.line + 1, len(first) - len(first.lstrip(" ")) + 1)
            return None
        quote = 1 if event.style in {'"', "'"} else 0
        if self._text[start + quote : end - quote] == event.value and "\n" not in event.value:
            return Position(at.line, at.column + quote)
        return None


_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBER = re.compile(
    r"(?P<int>[-+]?[0-9]{1,18})|0o(?P<oct>[0-7]{1,20})|0x(?P<hex>[0-9a-fA-F]{1,15})"
    r"|(?P<float>[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)|(?P<inf>[-+]?)\.(?:inf|Inf|INF)"
    r"|(?P<nan>\.(?:nan|NaN|NAN))"
)


def _resolve(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar by YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema)."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    match = _NUMBER.fullmatch(text)
    if match is None:
        return text
    if match["int"]:
        return int(match["int"])
    if match["oct"]:
        return int(match["oct"], 8)
    if match["hex"]:
        return int(match["hex"], 16)
    if match["float"]:
        return float(match["float"])
    return float("nan") if match["nan"] else float(f"{match['inf']}inf")


def node_at(root: YamlNode, path: tuple[int | str, ...]) -> YamlNode | None:
    """The node at `path` (keys and list indices); None if it does not exist."""
    node: YamlNode | None = root
    for step in path:
        match node:
            case MappingNode() if isinstance(step, str):
                node = node.entries.get(step)
            case SequenceNode() if isinstance(step, int) and step < len(node.items):
                node = node.items[step]
            case _:
                return None
    return node


def position_of(root: YamlNode, path: tuple[int | str, ...]) -> Position:
    """Where the value at `path` starts. If it is missing: the key of the nearest mapping that should contain it."""
    for length in range(len(path), -1, -1):
        node = node_at(root, path[:length])
        if node is not None:
            return node.at if length == len(path) else key_position(root, path[:length])
    return root.at


def key_position(root: YamlNode, path: tuple[int | str, ...]) -> Position:
    """Where the key of the value at `path` starts. A list's entry has no key, so its own start."""
    parent = node_at(root, path[:-1]) if path else None
    if isinstance(parent, MappingNode) and isinstance(path[-1], str) and path[-1] in parent.key_positions:
        return parent.key_positions[path[-1]]
    node = node_at(root, path)
    return node.at if node is not None else root.at

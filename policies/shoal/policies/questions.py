"""Questions of a template: comments that begin with `ask`, each behind the value that an answer replaces.

    p95: 100ms  # ask p95: How soon must 95 % of the answers be there?
    policy: my-policy  # as name
    # where: device.kind == "npu"  # ask where: On which devices? Empty: on any

`as` repeats another question's answer. A field that is commented out is optional: an empty answer leaves it so. Lines
keep their numbers, so that a problem at a line belongs to its question.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from shoal.policies.parse import MappingNode, parse, plain

_LINE: Final = re.compile(
    r"(?P<before>\s*(?:- )?)(?P<off># )?(?P<field>\w+: |(?<=- ))(?P<value>\S.*?)\s+"
    r"# (?P<how>ask|as) (?P<key>\w+)(?:: (?P<prompt>.+))?"
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a template."""

    # What `--set` calls it.
    key: str
    # For people.
    prompt: str
    # The template's own value, as it is typed in YAML; of an optional field an example.
    default: str
    # Whether the field may be left out.
    is_optional: bool


def questions(text: str) -> tuple[Question, ...]:
    """The questions of a template, in its order."""
    return tuple(
        Question(found["key"], found["prompt"] or found["key"], found["value"], found["off"] is not None)
        for _, found in _marked_lines(text)
        if found["how"] == "ask"
    )


def lines_of(text: str, key: str) -> frozenset[int]:
    """Numbers, from 1, of the lines that the answer to a question stands in."""
    return frozenset(number for number, found in _marked_lines(text) if found["key"] == key)


def fill_in(text: str, answers: Mapping[str, str]) -> str:
    """The template with these answers, by key, and its own values for the rest.

    Keys and prompts of what was not answered stay as comments. An empty answer counts as none.
    """
    lines = text.split("\n")
    for number, found in _marked_lines(text):
        given = answers.get(found["key"], "").strip()
        if given:
            lines[number - 1] = f"{found['before']}{found['field']}{_value(given)}"
        else:
            comment = f"  # {found['key']}: {found['prompt']}" if found["prompt"] else ""
            lines[number - 1] = f"{found['before']}{found['off'] or ''}{found['field']}{found['value']}{comment}"
    return "\n".join(lines)


def _marked_lines(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if (found := _LINE.fullmatch(line)) is not None:
            yield number, found


def _value(answer: str) -> str:
    """An answer as a YAML value: as it is typed where that means the same, else in quotes."""
    one_line = " ".join(answer.split())
    (root, *others) = parse("answer", f"answer: {one_line}\n").roots or (None,)
    if isinstance(root, MappingNode) and not others and list(root.entries) == ["answer"]:
        found = plain(root.entries["answer"])
        if found is not None and found == (one_line if isinstance(found, str) else found):
            return one_line
    return "'" + one_line.replace("'", "''") + "'"

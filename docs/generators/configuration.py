"""The page of the options and variables of agents and coordinators, from their parsers."""

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from generators.markdown import GENERATED, code, page, table
from shoal.agent.main.options import parser as agent_parser
from shoal.coordinator.main.options import parser_of as coordinator_parser

_HEAD = f"""# Configuration

{GENERATED}

Agents and coordinators have no configuration file: each takes options, or variables of the
environment for those that have one beside them. The command line comes first. `shoal` itself:
[command line](command-line.md).
"""


_HOME: Final = "/home/somebody"


def configuration() -> str:
    return page(_lines())


@dataclass(frozen=True, slots=True)
class Option:
    """An option or an argument of a program."""

    # `--link`, or the name of an argument in capitals.
    name: str
    # What its value is; empty for a flag.
    value: str
    # Empty: none.
    default: str
    is_required: bool
    # Variable of the environment that stands for it; empty: none.
    variable: str
    meaning: str


class _Marks(dict[str, str]):
    """An environment in which every variable of ours is set, to a text by which it is found again."""

    def get(self, name: str, default: Any = None) -> Any:
        return f"${name}" if name.startswith("SHOAL_") else super().get(name, default)

    def __getitem__(self, name: str) -> str:
        return f"${name}" if name.startswith("SHOAL_") else super().__getitem__(name)


def programs() -> Iterator[tuple[str, tuple[Option, ...]]]:
    """(`shoal-agent run`, its options) of every verb that people call. Nothing of this machine is a default in them."""
    plain = {"HOME": _HOME}
    for parse in (agent_parser, lambda: coordinator_parser(os.environ)):
        with patch.dict(os.environ, plain, clear=True):
            top = parse()
            with patch.object(os, "environ", _Marks(plain)):
                marked = parse()
        for action, marks in zip(_verbs(top), _verbs(marked), strict=True):
            listed = {each.dest for each in action._choices_actions}
            for verb, parser in action.choices.items():
                pairs = zip(parser._actions, marks.choices[verb]._actions, strict=True)
                if verb in listed:
                    yield f"{top.prog} {verb}", tuple(_option(*each) for each in pairs if each[0].dest != "help")


def _verbs(top: argparse.ArgumentParser) -> "Iterator[argparse._SubParsersAction[argparse.ArgumentParser]]":
    return (each for each in top._actions if isinstance(each, argparse._SubParsersAction))


def _option(action: argparse.Action, marked: argparse.Action) -> Option:
    name = ", ".join(action.option_strings) or action.dest.upper()
    is_flag = action.nargs == 0
    mark = re.search(r"\$(SHOAL_\w+)", str(marked.default))
    implied = "SHOAL_" + action.dest.upper() if is_flag and marked.default != action.default else ""
    default = "" if is_flag or action.default in (None, "", []) else str(action.default).replace(_HOME, "~")
    return Option(
        name,
        "" if is_flag or not action.option_strings else str(action.metavar or action.dest.upper()),
        default,
        bool(action.required),
        mark[1] if mark else implied,
        (action.help or "").replace("%%", "%"),
    )


def _lines() -> Iterator[str]:
    yield _HEAD
    program = ""
    for path, options in programs():
        if path.split()[0] != program:
            program = path.split()[0]
            yield f"## {program}"
            yield ""
        yield f"### {path}"
        yield ""
        rows = [
            (
                code(each.name),
                code(each.value),
                "required" if each.is_required else code(each.default),
                code(each.variable),
                each.meaning,
            )
            for each in options
        ]
        yield from table(("option", "value", "default", "variable", "meaning"), rows)

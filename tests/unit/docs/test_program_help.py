"""The help of agents and coordinators: in 80 columns, each verb with an example that can be typed."""

import argparse
import shlex
from collections.abc import Iterator

import pytest

from shoal.agent.main import options as agent
from shoal.coordinator.main import options as coordinator


def every_parser(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@pytest.mark.parametrize("program", ["shoal-agent", "shoal-coordinator"])
def test_help_fits_a_terminal_and_its_examples_can_be_typed(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("SHOAL_TOKEN", "of the examples that take one")
    top = agent.parser() if program == "shoal-agent" else coordinator.parser_of({})
    parsers = list(every_parser(top))
    assert len(parsers) == 6
    for parser in parsers:
        shown = parser.format_help()
        assert max(map(len, shown.splitlines())) <= 80, shown
        _, _, examples = shown.partition("\nExamples:\n")
        commands = [line.strip() for line in examples.splitlines() if not line.lstrip().startswith("#")]
        assert commands, parser.prog
        for line in commands:
            words = shlex.split(line.split("  ")[0])
            at = words.index(program)
            assert all("=" in word for word in words[:at]), line
            top.parse_args(words[at + 1 :])
            assert parser is top or words[at + 1] == parser.prog.split()[-1], line

"""Every command line that README and docs show is one that the program takes; Python and JSON can be read. YAML:
`test_documents.py`. What a block shows is typed in a region in `tests/integration/test_pages.py`."""

import ast
import json
from pathlib import Path
from typing import Final

import pytest

from harness.documentation import PAGES, ROOT, commands, refusal_of, snippets
from shoal.types.code_help import CODE_HELP

SHELL: Final = ("sh", "bash", "console")
OTHERS: Final = frozenset(("python", "json", "yaml", "text", "mermaid", "proto"))
CURRENT: Final = [page for page in PAGES if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_is_taken(page: Path) -> None:
    refused = {
        f"{snippet.place} {' '.join(command)}": refusal
        for snippet in snippets(page)
        if snippet.language in (*SHELL, "span")
        for command in list(commands(snippet.text))[: 1 if snippet.language == "span" else None]
        if (refusal := refusal_of(command, whole=snippet.language != "span"))
    }
    assert refused == {}


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_says_what_it_is_and_can_be_read(page: Path) -> None:
    for snippet in snippets(page):
        if snippet.language == "python":
            compile(snippet.text, snippet.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif snippet.language == "json":
            json.loads(snippet.text)
        else:
            assert snippet.language in (*SHELL, *OTHERS, "span"), snippet.place
    assert page.read_text().count("\n```") % 2 == 0


def test_the_command_of_every_cure_is_taken() -> None:
    cures = [text for each in CODE_HELP.values() for text in (each.cause, each.cure)]
    named = [span for text in cures for span in text.split("`")[1::2] if span.startswith(("shoal ", "shoal-"))]
    assert len(named) > 20
    refused = {span: refusal for span in named if (refusal := refusal_of(tuple(span.split()), whole=False))}
    assert refused == {}


def test_there_are_commands_to_look_at() -> None:
    found = [command for page in CURRENT for each in snippets(page) for command in commands(each.text)]
    assert sum(command[0] == "shoal" for command in found) > 200


@pytest.mark.parametrize(
    ("line", "whole", "is_refused"),
    [
        ("shoal get nodes -o wide", True, False),
        ("shoal get nodes --wide", True, True),
        ("shoal fetch nodes", True, True),
        ("shoal get", True, True),
        ("shoal get", False, False),
        ("shoal migrate reader --to edge-npu --watch", True, False),
        ("shoal migrate reader --towards edge-npu", False, True),
        ("shoal federation join --federation 10.0.0.1:7444", True, False),
        ("shoal-agent run --listen 0.0.0.0:8001", True, False),
        ("shoal-agent run --data 0.0.0.0:8001", True, True),
        ("shoal-coordinator run --region eu", True, False),
        ("shoal-coordinator serve", True, True),
        ("make demo LINK=mqtt", True, False),
        ("make coffee", True, True),
        ("deploy/install.sh --enrol HOST:7444", True, False),
        ("deploy/uninstall.sh", True, True),
        ("curl https://example", True, False),
    ],
)
def test_what_is_refused(line: str, whole: bool, is_refused: bool) -> None:
    assert bool(refusal_of(tuple(line.split()), whole=whole)) is is_refused


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1 shoal get nodes | head -3  # first", [("shoal", "get", "nodes"), ("head", "-3")]),
        ("export G=$(shoal context client c)", [("export", "G="), ("shoal", "context", "client", "c")]),
        ("sudo a/b --x \\\n  y > file && make c", [("a/b", "--x", "y"), ("make", "c")]),
    ],
)
def test_commands_of_a_text(text: str, found: list[tuple[str, ...]]) -> None:
    assert list(commands(text)) == found

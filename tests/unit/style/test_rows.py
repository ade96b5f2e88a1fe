"""Test files that are named after a row of the fault or attack table say what the row means."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
FILE = re.compile(r"test_([af]\d+)_")


def row_of(path: Path) -> str:
    found = FILE.match(path.name)
    return found[1].upper() if found else ""


def test_a_file_of_a_row_begins_with_its_meaning() -> None:
    named = {path: row for path in sorted(TESTS.rglob("test_*.py")) if (row := row_of(path))}
    assert len(named) > 60
    docs = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in named}
    assert [str(path) for path, row in named.items() if not docs[path].startswith(f"{row}: ")] == []

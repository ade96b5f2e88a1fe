"""Imports between tests: part of `make lint`.

A test imports helpers from the harness or from a module of its own folder, never from a test module or a `conftest`:
pytest loads those by itself, so that an import would load them twice. Scripts that a test runs as a child process
stand in strings; their imports count too. Prints what it found, one a line; exit status 1 when there is any.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from style.words import ROOT, Finding

FOLDERS: Final = ("unit", "contract", "simulation", "integration", "compose", "fuzz")


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported, also by a script in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{each.name}".lstrip(".")) for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            yield from ((node.lineno, name) for _, name in imported_names(parse(node.value)))


def parse(text: str) -> ast.AST:
    """An empty module if it is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def is_loaded_by_pytest(name: str) -> bool:
    return any(part == "conftest" or part.startswith("test_") for part in name.split("."))


def check_module(path: str, tree: ast.AST) -> Iterator[Finding]:
    folder = ".".join(PurePosixPath(path).relative_to("tests").parts[:-1])
    for line, name in imported_names(tree):
        if is_loaded_by_pytest(name):
            yield Finding(path, line, "import of a test module", name)
        elif name.split(".")[0] in FOLDERS and not name.startswith(f"{folder}."):
            yield Finding(path, line, "import from another folder", name)


def main() -> int:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [
        each for file in files for each in check_module(file.relative_to(ROOT).as_posix(), ast.parse(file.read_text()))
    ]
    for each in found:
        print(each)
    print(f"{len(files)} modules of tests; {len(found) or 'no'} imports that pytest or another folder owns")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""What `[tool.shoal.compiled]` lists: what it means to list a module, and that `make test-compiled` tests it."""

import ast
import os
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.host.compiled import TRANSPORT, is_compiled

ROOT = Path(__file__).parents[3]
LISTED = {
    distribution: tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["tool"]["shoal"]["compiled"][
        "modules"
    ]
    for distribution in ("protos", "agents")
}
MODULES = [module for modules in LISTED.values() for module in modules]


@pytest.mark.parametrize("module", MODULES)
def test_all_that_are_listed_are_compiled_or_none_is(module: str) -> None:
    """`make test-compiled` says which of both is wanted."""
    assert find_spec(module) is not None
    assert is_compiled(module) is ("SHOAL_COMPILED" in os.environ)


def test_what_the_front_says_of_itself_is_of_a_module_that_is_listed() -> None:
    assert TRANSPORT in LISTED["protos"]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_awaited_while_an_error_is_handled(module: str) -> None:
    """A compiled coroutine that waits there leaves the error to whatever runs meanwhile, as the context of its errors;
    one whose wait is cancelled leaves it there for good."""
    distribution = next(name for name, modules in LISTED.items() if module in modules)
    handling = list[ast.stmt]()
    for block in ast.walk(ast.parse((ROOT / distribution / f"{module.replace('.', '/')}.py").read_text())):
        match block:
            case ast.ExceptHandler(body=statements) | ast.Try(finalbody=statements):
                handling += statements
    inside = [each for statement in handling for each in ast.walk(statement)]
    waits = [each.lineno for each in inside if isinstance(each, ast.Await | ast.AsyncWith | ast.AsyncFor)]
    assert waits == []


@pytest.mark.parametrize("distribution", LISTED)
def test_the_list_is_sorted_and_each_is_there(distribution: str) -> None:
    listed = LISTED[distribution]
    assert listed == sorted(set(listed))
    for module in listed:
        assert (ROOT / distribution / f"{module.replace('.', '/')}.py").is_file()

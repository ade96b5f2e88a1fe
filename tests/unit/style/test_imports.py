"""`tests/style/imports.py`: which imports between tests it refuses, and which it lets pass."""

import ast

import pytest
from style import imports

PATH = "tests/unit/agent/test_a.py"
FOLDER = "unit.agent"


def checks(text: str) -> list[str]:
    return [each.check for each in imports.check_module(PATH, ast.parse(text))]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("test_b", "from unit.agent.{} import KEY"),
        ("test_b", "from unit.agent import builders, {}"),
        ("test_b", "import unit.agent.{}"),
        ("conftest", "from unit.agent.{} import KEY"),
        ("conftest", "from . import {}"),
        ("test_b", "def f() -> None:\n    from unit.agent.{} import KEY"),
        ("test_b", 'SCRIPT = """\nimport sys\nfrom unit.agent.{} import KEY\n"""'),
    ],
)
def test_an_import_of_what_pytest_loads_is_refused(module: str, text: str) -> None:
    assert checks(text.format(module)) == ["import of a test module"]


@pytest.mark.parametrize("module", ["integration.mqtt.region", "unit.coordinator.builders", "unit.builders"])
def test_an_import_from_another_folder_is_refused(module: str) -> None:
    assert checks(f"from {module} import NAME") == ["import from another folder"]


@pytest.mark.parametrize(
    "text",
    [
        f"from {FOLDER}.builders import KEY",
        "from harness.builders.agent_values import receipt",
        "import pytest_asyncio",
        "from shoal.agent.core import receipt",
        'TEXT = "import nothing that is not needed"',
    ],
)
def test_other_imports_pass(text: str) -> None:
    assert checks(text) == []

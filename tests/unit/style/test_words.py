"""`make words`: what it refuses, and what it lets pass."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words", Path(__file__).parents[2] / "style" / "words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["shown", "held", "ended_by", "joined_at", "configured"])
def test_a_bare_participle_is_refused(words: ModuleType, name: str) -> None:
    (found,) = words.check_names("agents/a.py", ast.parse(f"def {name}() -> None: ..."))
    assert (found.check, found.text) == ("bare participle", name)


@pytest.mark.parametrize(
    "name", ["is_held", "on_hello", "with_node", "expected_latency", "read", "feed", "_shown", "speed"]
)
def test_other_forms_pass(words: ModuleType, name: str) -> None:
    assert not list(words.check_names("agents/a.py", ast.parse(f"def {name}() -> None: ...")))


@pytest.mark.parametrize(
    ("path", "text"),
    [("agents/roads.py", ""), ("agents/a.py", "class RoadKeeper: ..."), ("agents/a.py", "def _go_home(): ...")],
)
def test_a_private_word_is_refused_in_modules_classes_and_functions(words: ModuleType, path: str, text: str) -> None:
    (found,) = words.check_names(path, ast.parse(text))
    assert found.check == "private word"


def test_in_flight_is_the_field_s_word(words: ModuleType) -> None:
    assert not list(words.check_names("agents/a.py", ast.parse("class InFlightRequest: ...\ndef in_flight(): ...")))


def test_a_public_class_has_one_definition_in_a_part(words: ModuleType) -> None:
    trees = {
        path: ast.parse("class Limits: ...\nclass _Own: ...") for path in ("agents/a.py", "agents/b.py", "cli/c.py")
    }
    (found,) = words.check_classes(trees)
    assert (found.path, found.text) == ("agents/b.py", "Limits, also in agents/a.py")


def test_fields_have_a_comment_above_from_five_on(words: ModuleType) -> None:
    four = "@dataclass(frozen=True)\nclass A:\n" + "".join(f"    {name}: int\n" for name in "abcd")
    five = four + "    # Seconds since the last one.\n    e: int\n"
    assert not list(words.check_fields("a.py", ast.parse(four), four.split("\n")))
    found = list(words.check_fields("a.py", ast.parse(five), five.split("\n")))
    assert [each.text for each in found] == ["A.a", "A.b", "A.c", "A.d"]


def test_prose_has_short_lines_and_sentences_but_tables_and_code(words: ModuleType) -> None:
    long = " ".join(["word"] * 41) + "."
    page = f"# Title\n\n| {'cell ' * 60} |\n\n```sh\n{'x' * 119}\n```\n\nA short one. " + long.replace(" ", "\n")
    assert [each.check for each in words.check_prose("a.md", page)] == ["long sentence"]
    assert [each.check for each in words.check_prose("a.md", "y" * 121)] == ["long line"]
    assert not list(words.check_prose("a.md", "One. " * 20))

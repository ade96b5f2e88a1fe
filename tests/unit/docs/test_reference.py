"""The reference is what `make docs` writes, and lists everything that the code has: each list is counted here in
another way than the page is made."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from generators.__main__ import DOCS, PAGES
from generators.exit_codes import EXIT_CODES
from generators.grpc import PAGES as PROTOS
from generators.rest import MEANINGS, paths
from shoal.cli.main import shoal
from shoal.coordinator.core.fleet.state import Liveness
from shoal.coordinator.core.migration.model import MigrationStage
from shoal.policies.fields import leaf_fields
from shoal.policies.kinds import KINDS
from shoal.types.code_help import CODE_GROUPS, CODE_HELP
from shoal.types.codes import Code
from shoal.types.event_help import EVENT_GROUPS, EVENT_HELP

ROOT: Final = Path(__file__).parents[3]


def read(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_make_docs_writes(name: str) -> None:
    assert read(name) == PAGES[name](), "make docs"


# -- reason codes ------------------------------------------------------------------------------------------------------


def test_every_code_has_one_cause_and_one_cure() -> None:
    assert list(CODE_HELP) == list(Code)
    assert sum(len(group) for group in CODE_GROUPS.values()) == len(Code)


@pytest.mark.parametrize("code", Code)
def test_a_cause_and_a_cure_are_sentences(code: Code) -> None:
    for text in (CODE_HELP[code].cause, CODE_HELP[code].cure):
        assert text.endswith((".", ".`"))
        assert text[0].isupper() or text[0] == "`" or text.startswith("etcd")
        assert text.count("`") % 2 == 0


def test_the_page_lists_every_code() -> None:
    assert re.findall(r"^\| <a id=\"[a-z0-9_]+\"></a>`(\w+)` \|", read("reference/codes.md"), re.MULTILINE) == list(
        Code
    )


# -- command line ------------------------------------------------------------------------------------------------------


def commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(f"{path} {name}", inner)


VERBS: Final = [each for each in commands("shoal", shoal) if each[0] != "shoal" and not each[1].hidden]


@pytest.mark.parametrize(("path", "command"), VERBS, ids=[path for path, _ in VERBS])
def test_the_page_has_every_verb_with_every_option(path: str, command: click.Command) -> None:
    parts = re.split(r"^#+ (shoal [a-z -]+)$", read("reference/command-line.md"), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            assert all(f"`{name}`" in found[path] for name in option.opts), option
    assert path in found


def test_there_are_verbs() -> None:
    assert len(VERBS) > 40


def test_every_status_that_a_command_ends_with_is_explained() -> None:
    found: set[int] = set()
    for file in (ROOT / "cli/shoal/cli").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "click.exceptions.Exit"):
                found |= {
                    each.value
                    for argument in node.args
                    for each in ast.walk(argument)
                    if isinstance(each, ast.Constant) and type(each.value) is int
                }
    assert {1, 255} <= found
    assert found <= EXIT_CODES.keys()


# -- options of the programs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["agents/shoal/agent", "coordinator/shoal/coordinator"])
def test_the_page_has_every_option_of_the_programs(part: str) -> None:
    page = read("reference/configuration.md")
    tree = ast.parse((ROOT / part / "main/options.py").read_text())
    flags = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in ("_option", "add_argument")
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.startswith("--")
    } - {"--config", "--journal"}  # of `front`, which the supervisor calls
    assert len(flags) > 15
    assert {flag for flag in flags if f"`{flag}`" not in page} == set()


def test_the_variable_of_an_option_is_the_one_that_the_program_reads() -> None:
    page = read("reference/configuration.md")
    assert re.search(r"\| `--scope` .*`SHOAL_ETCD_SCOPES`", page)
    assert re.search(r"\| `--no-cpu` .*`SHOAL_NO_CPU`", page)
    assert re.search(r"\| `--store` .*`sqlite` \| `SHOAL_STORE`", page)
    assert "/root" not in page


# -- policy language ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_every_field_with_meaning_and_example(kind: str) -> None:
    text = read("reference/policy.md")
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = (each for each in part if each.startswith(f"{kind}\n"))
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.split("\n") if line.startswith("| `")]
    assert [row[0].strip() for row in rows] == [f"`{'.'.join(path)}`" for path, _ in leaf_fields(KINDS[kind])]
    for row in rows:
        field, meaning, value = (each.strip() for each in row)
        assert re.match(r".+?[.*](<br>\[|$)", meaning), field
        assert re.match(r".+<br>example `.+`$", value), field


# -- events ------------------------------------------------------------------------------------------------------------


def event_names() -> set[str]:
    """Names in capitals in the coordinator's controllers and core that are no code; single words count where an event
    is made."""
    found: set[str] = set()
    for room in ("controllers", "core"):
        for file in (ROOT / "coordinator/shoal/coordinator" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                match node:
                    case ast.Constant(value=str(name)) if re.fullmatch("[A-Z]{2,}(_[A-Z]+)+", name):
                        found.add(name)
                    case ast.Call(args=[ast.Constant(value=str(name)), *_]) if name.isupper():
                        if ast.unparse(node.func).endswith(("Event", "_record_event")):
                            found.add(name)
                    case _:
                        pass
    return found - Code.__members__.keys()


def transitions(*makers: str, first: bool = False) -> set[str]:
    """The words that these calls give to transitions of trades, bids and agreements, which are events too; of the first
    argument alone, or of all."""
    files = [
        *(ROOT / "coordinator/shoal/coordinator/core/negotiation").glob("*.py"),
        *(ROOT / "coordinator/shoal/coordinator/controllers/federation").glob("*.py"),
    ]
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return {
        each.value
        for call in calls
        if ast.unparse(call.func).rsplit(".", 1)[-1] in makers
        for argument in (call.args[:1] if first else call.args)
        for each in ast.walk(argument)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value
    }


def test_every_event_of_a_region_has_a_meaning() -> None:
    named = event_names()
    named |= {f"MIGRATION_{stage.upper()}" for stage in MigrationStage}
    named |= {f"NODE_{each.upper().replace('-', '_')}" for each in Liveness}
    named |= {f"AGREEMENT_{each.upper()}" for each in transitions("LedgerTransition", "_end")}
    named |= {each.upper() for each in transitions("TradeNote", first=True) | {"bid", "countered"}}
    assert len(named) > 60
    assert named - EVENT_HELP.keys() - Code.__members__.keys() == set()
    assert EVENT_HELP.keys() - named - Code.__members__.keys() == set()


def test_the_page_lists_every_event() -> None:
    assert sum(len(group) for group in EVENT_GROUPS.values()) == len(EVENT_HELP)
    assert re.findall(r"^\| `(\w+)` \|", read("reference/events.md"), re.MULTILINE) == list(EVENT_HELP)


# -- wire --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROTOS)
def test_the_page_has_every_method_and_field_of_its_protos(name: str) -> None:
    text = read(f"reference/grpc/{name}.md")
    entries = 0
    for file in PROTOS[name][1]:
        descriptor = importlib.import_module(f"shoal.{file.replace('/', '.')}_pb2").DESCRIPTOR
        for service in descriptor.services_by_name.values():
            assert f"### service {service.name}\n" in text
            for method in service.methods:
                assert re.search(rf"^\| `{method.name}\(", text, re.MULTILINE), method.full_name
                entries += 1
        for message in descriptor.message_types_by_name.values():
            assert f"### message {message.name}\n" in text
            section = text.partition(f"### message {message.name}\n")[2].partition("\n### ")[0]
            for field in message.fields:
                assert re.search(rf"\b{field.name} = {field.number}\b", section), field.full_name
                entries += 1
    assert entries


def test_every_proto_is_on_a_page() -> None:
    files = {path.relative_to(ROOT / "protos/shoal").as_posix() for path in (ROOT / "protos/shoal").rglob("*.proto")}
    assert files - {f"{file}.proto" for _, listed in PROTOS.values() for file in listed} == {"etcd/etcd.proto"}


def test_every_path_over_rest_has_a_meaning() -> None:
    found = set(paths())
    assert len(found) > 15
    assert found <= MEANINGS.keys()
    assert all(f"`{each}`" in read("reference/rest.md") for each in MEANINGS)

"""What README and guides tell people to type: documents that `shoal validate` takes, no package of a stranger's."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from harness.documentation import PAGES, ROOT, snippets
from shoal.policies import Problem, load

_DOCUMENT: Final = re.compile(r"^(apiVersion|kind):", re.MULTILINE)
_OURS: Final = re.compile(r"^apiVersion: *[\"']?shoal/", re.MULTILINE)
_LINK: Final = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([\w-]*))?\)")
_PAGE: Final = re.compile(r"\bdocs/(?:guides|reference|decisions)/[\w-]+\.md")
AROUND: Final = {"Policy": {}, "Workload": {"model": {"source": "reader"}}, "Region": {}}
"""Kinds that a part of a document may be of, and what such a document cannot do without."""


def blocks() -> Iterator[tuple[str, str]]:
    """(place, text) of every YAML block."""
    for page in PAGES:
        yield from ((each.place, each.text) for each in snippets(page) if each.language in ("yaml", "yml"))


WHOLE: Final = [pytest.param(text, id=place) for place, text in blocks() if _DOCUMENT.search(text)]
PARTS: Final = [pytest.param(text, id=place) for place, text in blocks() if not _DOCUMENT.search(text)]


@pytest.mark.parametrize("text", WHOLE)
def test_every_document_of_the_docs_is_valid(text: str) -> None:
    if _OURS.search(text) or "shoal" in text or not re.search(r"^apiVersion:", text, re.MULTILINE):
        assert problem_lines(load([("block", text)]).problems) == []
    else:
        assert list(yaml.safe_load_all(text)), "of another system"


@pytest.mark.parametrize("text", PARTS)
def test_every_part_of_a_document_is_valid_in_one(text: str) -> None:
    for part in yaml.safe_load_all(text):
        spec = part.get("spec", part)
        tried = {
            kind: problem_lines(load([("block", _document(kind, {**around, **spec}))]).problems)
            for kind, around in AROUND.items()
        }
        assert [] in tried.values(), tried


def test_all_examples_are_valid_together() -> None:
    files = [*sorted((ROOT / "policies/examples").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
    assert len(files) > 15
    assert problem_lines(load([(file.name, file.read_text()) for file in files]).problems) == []


def test_every_example_has_a_page() -> None:
    examples = {path.stem for path in (ROOT / "policies/examples").glob("*.yaml")}
    assert {path.stem for path in (ROOT / "docs/how-to").glob("*.md")} == {*examples, "README"}
    assert all(f'"policies/examples/{each}.yaml"' in (ROOT / f"docs/how-to/{each}.md").read_text() for each in examples)


def test_every_page_that_is_named_is_there() -> None:
    """By pages, and by what the programs print."""
    named: set[Path] = set()
    for page in PAGES:
        named |= {(page.parent / link).resolve() for link, _ in _LINK.findall(page.read_text()) if link}
    for part in ("agents", "coordinator", "cli", "protos", "policies", "deploy"):
        for source in (ROOT / part).rglob("*.py"):
            named |= {ROOT / found for found in _PAGE.findall(source.read_text())}
    assert len(named) > 20
    assert {str(page) for page in named if not page.exists()} == set()


def test_every_heading_that_is_named_is_there() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {link}#{anchor}"
        for page in PAGES
        for link, anchor in _LINK.findall(page.read_text())
        if anchor and anchor not in _anchors(((page.parent / link) if link else page).resolve())
    ]
    assert missing == []


@cache
def _anchors(page: Path) -> frozenset[str]:
    """By the rule that GitHub and the site share: lower case, hyphens for spaces, without punctuation."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = [
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", each.lower().replace("`", ""))).strip("-") for each in headings
    ]
    return frozenset((*slugs, *re.findall(r'<a id="([\w-]+)">', text)))


def test_there_are_blocks_to_look_at() -> None:
    assert len(WHOLE) >= 7
    assert len(PARTS) >= 6


def problem_lines(problems: tuple[Problem, ...]) -> list[str]:
    return [f"{one.line}:{one.column} {one.refusal}" for one in problems]


def _document(kind: str, spec: dict[str, object]) -> str:
    return yaml.safe_dump({"apiVersion": "shoal/v1", "kind": kind, "metadata": {"name": "tried"}, "spec": spec})


# -- where packages come from ------------------------------------------------------------------------------------------

_INSTALLS: Final = re.compile(
    r"\b(?:pip3?|pipx|uv|poetry|conda)(?: pip| tool)? (?:install|download|wheel|add|run)\b(?P<rest>[^\n`]*)"
)
_NAMED: Final = re.compile(r"(?:^|[\s'\"=])shoal(?:-[a-z]+)*(?:\[[a-z,]+\])?(?=$|[\s'\"=<>~,;)])")
_ASKED_FOR: Final = re.compile(r"""(?:\b(?:version|version_of|distribution)\(|package_name=)["'](shoal[\w-]*)["']""")
"""What a program asks of a distribution that is installed."""
SOURCES: Final = ("cli", "agents", "coordinator", "policies", "protos", "benchmarks")


def pages() -> Iterator[Path]:
    yield from PAGES
    yield ROOT / "Makefile"
    for folder in ("deploy", "examples"):
        yield from (file for file in sorted((ROOT / folder).rglob("*")) if file.is_file())
    for folder in SOURCES:
        yield from sorted((ROOT / folder).rglob("*.py"))


def public_installs(text: str) -> list[str]:
    """Lines that have a package index asked for a package of our name: without `--no-index`, and not a path."""
    return [
        found[0].strip()
        for found in _INSTALLS.finditer(text)
        if "--no-index" not in found["rest"] and _NAMED.search(found["rest"])
    ]


def test_nobody_is_told_to_install_a_stranger_s_package() -> None:
    """The names are not ours in public indexes: only wheels and sources made here."""
    told = {
        str(page.relative_to(ROOT)): found
        for page in pages()
        if (found := public_installs(page.read_text(errors="replace")))
    }
    assert told == {}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("pip install 'shoal-orchestrator-agent[cpu]'", True),
        ("pip install shoal-orchestrator-coordinator", True),
        ("try: pip install shoal", True),
        ("pip install -c constraints.txt ./protos './agents[cpu]'", False),
        ("pip install --no-index --find-links wheels shoal-orchestrator-agent", False),
        ("pip install ./shoal_orchestrator_agent-0.1.0-py3-none-any.whl", False),
        ("pip install 'tritonclient[grpc]'", False),
    ],
)
def test_what_counts_as_such_an_instruction(line: str, is_found: bool) -> None:
    assert bool(public_installs(line)) is is_found


def distributions() -> dict[str, dict[str, Any]]:
    """The `[project]` of every part, by its folder."""
    return {
        file.parent.name: tomllib.loads(file.read_text())["project"] for file in sorted(ROOT.glob("*/pyproject.toml"))
    }


def test_the_table_of_distributions_is_what_the_parts_declare() -> None:
    def join_names(names: Iterable[str]) -> str:
        return ", ".join(f"`{each}`" for each in sorted(names))

    table = (ROOT / "docs/guides/operating.md").read_text()
    rows = {tuple(cell.strip() for cell in row.strip("|\n").split("|")) for row in table.splitlines() if "`" in row}
    parts = distributions()
    assert set(parts) == {"agents", "cli", "coordinator", "policies", "protos", "simulator"}
    for folder, part in parts.items():
        extras, programs = part.get("optional-dependencies", {}), part.get("scripts", {})
        assert (f"`{part['name']}`", f"`{folder}`", join_names(extras), join_names(programs)) in rows


def test_every_distribution_that_is_named_is_one_of_ours() -> None:
    """Also in what parts depend on: an index asked for a former name would give somebody else's package."""
    parts = [*distributions().values(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]]
    extras = {part["name"]: set(part.get("optional-dependencies", {})) for part in parts}
    assert all(re.fullmatch(r"shoal-orchestrator(-[a-z]+)?", name) for name in extras)
    for part in parts:
        options = part.get("optional-dependencies", {}).values()
        for asked in (*part["dependencies"], *(each for option in options for each in option)):
            name, _, wanted = asked.partition(" @ ")[0].rstrip("]").partition("[")
            if name.startswith("shoal"):
                assert set(wanted.split(",")) - {""} <= extras[name], asked
    for page in (*pages(), *sorted((ROOT / "tests/harness").rglob("*.py"))):
        for found in _ASKED_FOR.findall(page.read_text(errors="replace")):
            assert found in extras, f"{page.relative_to(ROOT)} asks for {found}"
    named = re.compile(r"shoal[-_]orchestrator(?:[-_](?!\*)[a-z]+)*")
    for page in (*pages(), *sorted((ROOT / "tests/harness").rglob("*.py"))):
        for found in named.findall(page.read_text(errors="replace")):
            assert found.replace("_", "-") in extras, f"{page.relative_to(ROOT)} names {found}"


def test_the_licence_is_left_to_the_owner() -> None:
    for part in distributions().values():
        assert not {"license", "license-files", "classifiers"} & set(part)
    assert "**Licence.** It is the owner's to choose" in (ROOT / "README.md").read_text()


def test_every_test_that_a_page_names_is_there() -> None:
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        for named in re.findall(r"[\w/]*\btest_\w+\.py", page.read_text()):
            assert any(f"/{test}".endswith(f"/{named}") for test in tests), f"{page.relative_to(ROOT)} names {named}"


@pytest.mark.parametrize("page", ["docs/ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_path_of_the_map_and_of_the_recipes_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:agents|cli|coordinator|policies|protos|simulator|tests)/[\w./]+)`", text)
    assert len(paths) > 20
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []
    inner = re.findall(r"`((?:core|controllers)/[\w./]+\.py)`", text)
    parts = (ROOT / "agents/shoal/agent", ROOT / "coordinator/shoal/coordinator")
    assert [path for path in inner if "NAME" not in path and not any((part / path).exists() for part in parts)] == []


def test_the_navigation_of_the_site_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ *- (?:.*: )?([\w./-]+\.md)$", nav, re.MULTILINE)
    of_the_root = ["contributing.md", "changelog.md", "security.md"]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*of_the_root, *(page for page in pages if not page.startswith("decisions/"))])

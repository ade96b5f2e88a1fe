"""Nothing is accepted that nothing acts on: table, models, page, schema and the consumers' own source agree."""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.policies import load
from shoal.policies.check import CONSUMERS, ActiveField, PlannedField
from shoal.policies.fields import leaf_fields
from shoal.policies.kinds import KINDS
from shoal.policies.reference import reference
from shoal.policies.schema import schema
from shoal.policies.templates import KINDS as TEMPLATES
from shoal.policies.templates import template

ROOT = Path(__file__).parents[3]
LIVE = [
    (f"{kind}.{field}", entry)
    for kind, fields in CONSUMERS.items()
    for field, entry in fields.items()
    if isinstance(entry, ActiveField)
]


@pytest.mark.parametrize("kind", KINDS)
def test_table_equals_models(kind: str) -> None:
    fields = [".".join(path) for path, _ in leaf_fields(KINDS[kind])]
    assert sorted(fields) == sorted(CONSUMERS[kind])
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize(("field", "live"), LIVE, ids=[field for field, _ in LIVE])
def test_the_consumer_reads_the_field(field: str, live: ActiveField) -> None:
    words = _words(live.consumer)
    assert words, f"{live.consumer} is not there"
    if live.read_as:
        assert live.read_as in words, f"{live.consumer} does not read {live.read_as}, so {field} must be refused"
    else:
        assert live.consumer.startswith("shoal.policies") or live.note
    never = [code for code in live.codes if code.name not in _words("shoal.coordinator") | _words("shoal.policies")]
    assert not never, f"nothing gives {never}"


@cache
def _words(module: str) -> frozenset[str]:
    """Names that a module, or any module of a package, uses in its code: no comment or docstring counts."""
    spec = find_spec(module)
    assert spec is not None, f"{module} is not there"
    assert spec.origin is not None
    origin = Path(spec.origin)
    files = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
    return frozenset(found)


def test_the_page_is_as_generated() -> None:
    page = (ROOT / "docs" / "reference" / "policy.md").read_text()
    assert page == reference() + "\n", "python -m shoal.policies.reference > docs/reference/policy.md"


def test_the_page_names_every_field_and_tells_which_are_refused() -> None:
    rows = [line for line in reference().split("\n") if line.startswith("| `")]
    for fields in CONSUMERS.values():
        for field, entry in fields.items():
            row = next(line for line in rows if line.startswith(f"| `{field}` |"))
            assert ("NOT_SUPPORTED_YET" in row) == isinstance(entry, PlannedField) or field in {"kind", "apiVersion"}


def test_schema_knows_the_fields_and_takes_no_null() -> None:
    body = schema()
    assert {entry["$ref"].rpartition("/")[2] for entry in body["anyOf"]} == set(KINDS)
    for kind in KINDS:
        definition = body["$defs"][kind]
        assert definition["additionalProperties"] is False
        assert {"apiVersion", "kind", "metadata"} <= set(definition["required"])
    latency = body["$defs"]["Latency"]["properties"]
    assert set(latency) == {"p95", "from"}
    pattern = latency["p95"]["pattern"]
    assert re.search(pattern, "60ms")
    assert not re.search(pattern, "60")
    assert "null" not in repr(body)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_templates_are_valid(kind: str) -> None:
    loaded = load([(kind, template(kind))])
    assert [str(problem) for problem in loaded.problems] == []
    assert [document.kind.lower() for document in loaded.documents] == [kind]


def test_what_a_template_leaves_commented_out_is_valid_too() -> None:
    """Every `# field: value` line of the policy template, taken in, still validates."""
    fields = "where|residency|precision|availability|trust|limits|relax|  -|federation|partition|priority"
    text = re.sub(rf"^(\s*)# ({fields})", r"\1\2", template("policy"), flags=re.MULTILINE)
    loaded = load([("policy.yaml", text)])
    assert [str(problem) for problem in loaded.problems] == []
    assert "availability" in text
    (document,) = loaded.documents
    assert {"relax", "federation", "partition", "limits", "priority"} <= document.value.spec.model_fields_set

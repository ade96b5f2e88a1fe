"""Nothing is accepted that nothing acts on: table, models, schema and the consumers' own source agree."""

import ast
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter

from shoal.policies import load
from shoal.policies.check import CONSUMERS, ActiveField
from shoal.policies.fields import document_fields, every_model, leaf_fields
from shoal.policies.kinds import KINDS
from shoal.policies.schema import schema, schema_fields
from shoal.policies.templates import KINDS as TEMPLATES
from shoal.policies.templates import template

ROOT = Path(__file__).parents[3]


MODELS = tuple(dict.fromkeys(model for kind in KINDS.values() for model in every_model(kind)))
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
        assert live.consumer.startswith("shoal.policies") or field == "Policy.spec.partition.on_reconnect"
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_has_every_field_with_a_meaning_and_an_example(kind: str) -> None:
    fields = list(schema_fields(schema(), kind))
    assert [field.path for field in fields] == [".".join(path) for path, _ in leaf_fields(KINDS[kind])]
    for field in fields:
        assert field.value["description"].endswith("."), field.path
        assert field.value["examples"], field.path


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_property_of_the_schema_has_a_description_and_an_example(model: type[BaseModel]) -> None:
    for name, value in schema()["$defs"][model.__name__]["properties"].items():
        assert value["description"].endswith("."), name
        assert value["examples"], name
        assert not [each for each in value["examples"] if each in ({}, [], [{}])], name


@pytest.mark.parametrize("kind", KINDS)
def test_examples_of_blocks_stand_in_a_document(kind: str) -> None:
    """Set where they belong, beside what the document must have, they pass every check, also those across fields."""
    leasts: dict[str, dict[str, Any]] = {
        "Workload": {"model": {"source": "./models/ocr.onnx"}},
        "Policy": {"require": {"latency": {"p95": "60ms"}}},  # which a step may relax
    }
    least = leasts.get(kind, {})
    named = {"apiVersion": "shoal/v1", "kind": kind, "metadata": {"name": "some"}}
    definitions = schema()["$defs"]
    blocks = definitions[f"{kind}Spec"]["properties"]
    documents = {"spec": named | {"spec": definitions[kind]["properties"]["spec"]["examples"][0]}}
    for name, value in blocks.items():
        documents[name] = named | {"spec": least | {name: value["examples"][0]}}
    for inner, model in {"require": "Require", "migration": "MigrationSpec"}.items() if kind == "Policy" else ():
        for name, value in definitions[model]["properties"].items():
            if isinstance(value["examples"][0], dict):
                documents[f"{inner}.{name}"] = named | {"spec": {inner: {name: value["examples"][0]}}}
    for path, document in documents.items():
        entry = CONSUMERS[kind].get(f"spec.{path}")
        if _is_cut_key(document) or not (entry is None or isinstance(entry, ActiveField)):
            continue  # a field that nothing acts on yet is refused whatever it says
        assert [str(problem) for problem in load([(path, json.dumps(document))]).problems] == [], path


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_example_is_a_value_that_the_field_takes(model: type[BaseModel]) -> None:
    for name, value in schema()["$defs"][model.__name__]["properties"].items():
        info = next(info for field, info in document_fields(model) if field == name)
        reader = TypeAdapter[Any](Annotated[info.annotation, "as the field has it", *info.metadata])  # type: ignore[arg-type]
        for example in value.get("examples", ()):
            if not _is_cut_key(example):
                reader.validate_json(json.dumps(example))


def _is_cut_key(example: object) -> bool:
    """Whether a key's example is in it: only a beginning, so that nobody trusts a key that is not theirs."""
    return "AQcDQgAE..." in repr(example)


def test_a_quantity_has_its_default_as_people_type_it() -> None:
    defaults = {field.path: field.value.get("default") for field in schema_fields(schema(), "Policy")}
    assert defaults["spec.partition.heartbeat"] == "1s"
    assert defaults["spec.federation.term"] == "30m"
    assert defaults["spec.limits.cost"] is None
    assert {field.path: field.value.get("default") for field in schema_fields(schema(), "Region")}[
        "spec.trade.hold_share"
    ] == "20%"


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

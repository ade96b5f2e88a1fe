"""Generates the JSON Schema of the kinds for editors: `python -m shoal.policies.schema > shoal.json`.

Every property has a `description` and `examples`; that of a mapping is made of its fields' own. Three keywords are
ours: `x-value` says what a text is, `x-units` lists the units of a quantity, and `x-least` is the least quantity that
is accepted. The policy reference is made from it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import NullableSchema, WithDefaultSchema

from shoal.policies.fields import document_fields, every_model
from shoal.policies.kinds import KINDS, Kind
from shoal.policies.quantities import Unit

SCHEMA_ID = "shoal/v1"


class _DocumentSchema(GenerateJsonSchema):
    """The schema of documents as people type them. A field is given or left out, never null. Only words and numbers
    have defaults."""

    def nullable_schema(self, schema: NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: WithDefaultSchema) -> JsonSchemaValue:
        body = super().default_schema(schema)
        default = body.get("default")
        if (
            default is None
            or isinstance(default, dict)
            or (body.get("type") == "string" and not isinstance(default, str))
        ):
            body.pop("default", None)
        return body


def schema() -> dict[str, Any]:
    """One schema for any Shoal document; each kind is also under `$defs`."""
    document: TypeAdapter[Kind] = TypeAdapter(Kind)
    body = document.json_schema(by_alias=True, schema_generator=_DocumentSchema)
    # The models have defaults for these two, so that code need not repeat them; a document must state them.
    for kind in KINDS:
        body["$defs"][kind]["required"] = ["apiVersion", "kind", *body["$defs"][kind]["required"]]
    for top in KINDS.values():
        for model in every_model(top):
            _show_quantities(model, body["$defs"][model.__name__]["properties"])
    definitions = body["$defs"]
    for definition in definitions.values():
        for name, value in definition["properties"].items():
            definition["properties"][name] = {**value, "examples": _examples(definitions, value)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA_ID, **body}


def _show_quantities(model: type[BaseModel], properties: dict[str, Any]) -> None:
    """Quantities have a default as people type it, which is their example too, unless another one is given."""
    for name, info in document_fields(model):
        unit = next((each for each in info.metadata if isinstance(each, Unit)), None)
        if unit is not None and isinstance(info.default, float | int):
            shown = unit.show(info.default)
            properties[name] |= {"default": shown, "examples": info.examples or [shown]}


def _examples(definitions: Mapping[str, Any], value: Mapping[str, Any]) -> list[Any]:
    """The examples that a field states or, without any, the one that follows from its type."""
    if value.get("examples"):
        return list(value["examples"])
    if value.get("default") not in (None, [], {}):
        return [value["default"]]
    if "const" in value:
        return [value["const"]]
    if "enum" in value:
        return [value["enum"][0]]
    mapping = next(inner_mappings(definitions, value), None)
    if mapping is None:
        return []
    shown = _shown_mapping(definitions, mapping)
    return [[shown] if value.get("type") == "array" else shown]


def _shown_mapping(definitions: Mapping[str, Any], mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as short as it may stand in a document: the fields that it must have, else its first, as in their
    own examples. Each further field has an example at its own place."""
    properties = mapping["properties"]
    names = mapping.get("required") or list(properties)[:1]
    return {name: _examples(definitions, properties[name])[0] for name in names}


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A field that holds a value itself, as the schema has it."""

    # As in `CONSUMERS`: its names from the document's root, joined by dots; a list adds nothing.
    path: str
    # Its schema: `description`, `examples`, and the forms that it takes.
    value: Mapping[str, Any]
    # Whether the mapping that it is in must have it.
    is_required: bool


def schema_fields(body: Mapping[str, Any], kind: str) -> Iterator[SchemaField]:
    """The fields of a kind in the order of the schema. A field with a short form and a mapping form is yielded once
    itself, and once for each field of the mapping."""
    yield from _fields_of(body["$defs"], body["$defs"][kind], "")


def _fields_of(definitions: Mapping[str, Any], mapping: Mapping[str, Any], under: str) -> Iterator[SchemaField]:
    for name, value in mapping["properties"].items():
        path = f"{under}.{name}" if under else name
        inner = list(inner_mappings(definitions, value))
        if not inner or any(not list(inner_mappings(definitions, form)) for form in forms_of(value)):
            yield SchemaField(path, value, name in mapping.get("required", ()))
        for each in inner:
            yield from _fields_of(definitions, each, path)


def forms_of(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives that a value may have; the value itself if there are none."""
    return list(value.get("anyOf") or value.get("oneOf") or [value])


def inner_mappings(definitions: Mapping[str, Any], value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Mappings with named fields that a value is, or is a list or a mapping of."""
    for form in forms_of(value):
        if "$ref" in form:
            target = definitions[form["$ref"].rpartition("/")[2]]
            yield from [target] if "properties" in target else inner_mappings(definitions, target)
        elif form is not value:
            yield from inner_mappings(definitions, form)
        for inside in (
            form.get("items"),
            form.get("additionalProperties"),
            *form.get("patternProperties", {}).values(),
        ):
            if isinstance(inside, dict):
                yield from inner_mappings(definitions, inside)


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))

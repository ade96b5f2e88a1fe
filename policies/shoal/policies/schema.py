"""Generates the JSON Schema of the kinds for editors: `python -m shoal.policies.schema > shoal.json`."""

import json
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import NullableSchema, WithDefaultSchema

from shoal.policies.kinds import KINDS, Kind

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
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": SCHEMA_ID, **body}


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))

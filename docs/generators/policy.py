"""The page of the policy language, from the JSON Schema of its kinds."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from generators.markdown import GENERATED, code, page, table
from shoal.policies.cel import MAX_ITEMS, MAX_LENGTH, MAX_PATTERN, MAX_REPEAT, MAX_TEXT, VARIABLES
from shoal.policies.check import CONSUMERS, ActiveField
from shoal.policies.kinds import KINDS
from shoal.policies.parse import MAX_ALIASES, MAX_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_NODES
from shoal.policies.schema import SchemaField, forms_of, inner_mappings, schema, schema_fields
from shoal.types.codes import Code

_HEAD = f"""# Policy reference

{GENERATED}

Documents are YAML 1.2 (`apiVersion: shoal/v1`), several in a file where `---` separates them.
`shoal validate FILES` lists every problem with file, line, column and what to do. No field is
ignored: one that nothing acts on is refused with `NOT_SUPPORTED_YET`.

`shoal policy new --wizard` asks, and writes a policy; `shoal policy new KIND` prints a commented
template. `shoal policy schema > shoal.json` writes the JSON Schema that this page is made from. An
editor with it completes and explains every field ([how](../how-to/README.md#in-an-editor)):

```yaml
# yaml-language-server: $schema=shoal.json
apiVersion: shoal/v1
kind: Policy
metadata: {{name: frugal}}
spec:
  optimize: {{energy: 0.7, latency: 0.3}}
```

Quantities carry their unit: `60ms`, `16GiB`, `1.50 USD/h`, `2.0 J/inference`, `120/s`. A duration is
at most 3,650 days, a size 2^60 bytes, a rate 10^9/s, a cost 10^6 USD/h, and anything else 10^12.

A workload that names no policy gets one replica on any device, lowest latency, priority 100 and the
default partition rule.

**Price.** A node's price is its label `price`, for example
`shoal token create --label "price=0.40 USD/h"`. Without it the current `spec.price` of the Region
counts. `limits.cost` and `optimize.cost` read nothing else.

**Distance.** A node's label `rtt`, for example `shoal token create --label rtt=20ms`, is the time
from where requests enter the region to the node and back. It counts in a latency `from: origin`.
Without it the node is where requests enter.

**Signals.** A Region's price and carbon intensity are constants, or come from a file or a URL and
may become stale. A value that an operator sets comes first ([guide](../guides/signals.md)).
`limits.carbon` and `optimize.carbon` read joules x rate x intensity.

**Delegation.** A policy's `federation` says when another region may run the workload, by what
margin it must be better, which regions, and for how long at a time. A Region's `trade` says for
whom it works: the first entry that fits counts.

**Residency.** A Region's `spec.location.residency` says where the region is. `require.residency`
lists where inputs and weights may be.

**Preempting.** `preempt: lower` lets a workload that lacks room move replicas of lower priority to
another place, `always` also end those that have none.

**Relaxing.** The steps of `relax` add up in their order. Each must loosen something that the policy
bounds.
"""


def policy() -> str:
    return page([_HEAD, *_kinds(schema()), *_expressions(), *_limits()])


def _kinds(body: Mapping[str, Any]) -> Iterator[str]:
    for kind in KINDS:
        yield f"## {kind}"
        yield ""
        for section, fields in groupby(schema_fields(body, kind), lambda field: _section(field.path)):
            yield f"### {kind}: {section}"
            yield ""
            rows = [_row(body, kind, field) for field in fields]
            yield from table(("field", "meaning, and codes that it can cause", "value, default and example"), rows)


def _section(path: str) -> str:
    """`spec.require` for what is below it; `head` for what every document begins with."""
    parts = path.split(".")
    return "head" if parts[0] != "spec" else ".".join(parts[:2])


def _row(body: Mapping[str, Any], kind: str, field: SchemaField) -> tuple[str, ...]:
    consumer = CONSUMERS[kind][field.path]
    if isinstance(consumer, ActiveField):
        meaning, refusals = field.value["description"], consumer.codes
    else:
        meaning = f"{field.value['description']} *Not yet: comes with {consumer.comes_with}.*"
        refusals = (Code.NOT_SUPPORTED_YET,)
    codes = " ".join(f"[{code(each)}](codes.md#{each.lower()})" for each in refusals)
    default = _default(field)
    value = (
        value_of(body["$defs"], field.value),
        default if default in ("", "required") else f"default {default}",
        f"example {code(show(field.value['examples'][0]))}",
    )
    return code(field.path), "<br>".join(filter(None, (meaning, codes))), "<br>".join(filter(None, value))


def value_of(definitions: Mapping[str, Any], value: Mapping[str, Any]) -> str:
    """What a field takes, in words, with its units."""
    forms = [form for form in forms_of(value) if not _is_mapping(definitions, form)]
    return " or ".join(dict.fromkeys(_form(definitions, form) for form in forms))


def _is_mapping(definitions: Mapping[str, Any], form: Mapping[str, Any]) -> bool:
    return "$ref" in form and bool(list(inner_mappings(definitions, form)))


def _form(definitions: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    if "anyOf" in form or "oneOf" in form:
        return value_of(definitions, form)
    if "const" in form:
        return code(form["const"])
    if "enum" in form:
        return ", ".join(code(each) for each in form["enum"])
    if "x-units" in form:
        least = f", at least {code(form['x-least'])}" if "x-least" in form else ""
        return f"{form['x-value']}: {', '.join(code(unit) for unit in form['x-units'])}{least}"
    match form.get("type"):
        case "string":
            return str(form.get("x-value", "text"))
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return f"{'whole number' if kind == 'integer' else 'number'}{_range(form)}"
        case "array":
            return f"list of: {value_of(definitions, form['items'])}"
        case "object":
            inside = form.get("additionalProperties") or next(iter(form["patternProperties"].values()))
            return f"mapping of names to: {value_of(definitions, inside)}"
    raise ValueError(form)


def _range(form: Mapping[str, Any]) -> str:
    least, most = form.get("minimum"), form.get("maximum")
    if least is None:
        return ""
    return f", at least {least:g}" if most is None else f", {least:g} to {most:.0f}"


def _default(field: SchemaField) -> str:
    if field.is_required:
        return "required"
    default = field.value.get("default")
    return "" if default in (None, [], {}, "") else code(show(default))


def show(value: object) -> str:
    """A value as people type it in YAML, on one line."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case list():
            return f"[{', '.join(show(each) for each in value)}]"
        case dict():
            return f"{{{', '.join(f'{name}: {show(each)}' for name, each in value.items())}}}"
        case _:
            return json.dumps(value)


def _expressions() -> Iterator[str]:
    yield "## Expressions"
    yield ""
    yield "`require.where` is [CEL](https://cel.dev), checked against these names when the document is read."
    yield "`schedule` and `traffic` may read `now` and `region` alone."
    yield ""
    rows = [(code(name), code(variable.type), variable.meaning) for name, variable in VARIABLES.items()]
    yield from table(("name", "type", "meaning"), rows)
    yield _EXPRESSION_NOTES


_EXPRESSION_NOTES = f"""Numbers compare with their own type: `device.memory_bytes > 4000000000`,
`model.flops > 1e9`. If a node has no label `x`, `node.labels.x` fails and `SELECTOR_MISMATCH`
excludes the node; write `!has(node.labels.x) || node.labels.x != "lab"` where it may be absent. A
label that a node only declares itself is `node.labels["self.x"]`, and no other expression matches
it.

`POLICY_COST` refuses an expression of more than {MAX_LENGTH} characters, a macro (`all`, `exists`,
`exists_one`, `map`, `filter`) inside a macro, `map` twice, and `+` inside a macro. It refuses a
pattern of `matches` that is not one plain string, is longer than {MAX_PATTERN} characters, or whose
counted repetitions multiply to more than {MAX_REPEAT}. When an expression is evaluated it refuses a
list or map of more than {MAX_ITEMS} entries, and a text of more than {MAX_TEXT} characters.
"""


def _limits() -> Iterator[str]:
    yield "## Limits of a file"
    yield ""
    yield f"A file has at most {MAX_BYTES} bytes, {MAX_NODES} values and {MAX_DOCUMENTS} documents (`YAML_TOO_LARGE`)."
    yield f"It has at most {MAX_DEPTH} levels (`YAML_TOO_DEEP`) and {MAX_ALIASES} aliases, none inside the value that"
    yield "it names (`YAML_ALIAS_LIMIT`), no tags (`YAML_TAG_DENIED`) and no key twice (`YAML_DUPLICATE_KEY`)."

"""Reads texts into typed, checked documents, and gives every problem its position. Also converts documents to the form
that is stored and diffed."""

import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.policies.check import Finding, check_fields, check_semantics, check_with_policy
from shoal.policies.fields import names_at
from shoal.policies.kinds import API_VERSION, KINDS, UNION_TAGS, Kind, Policy, Tenant, Workload
from shoal.policies.parse import (
    MappingNode,
    Position,
    Problem,
    ScalarNode,
    YamlNode,
    key_position,
    node_at,
    parse,
    plain,
    position_of,
)
from shoal.policies.quantities import STORED
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.workload import WorkloadKey

DEFAULT_TENANT: Final = "default"
MAX_TOTAL_NODES: Final = 200_000
"""Limit of the values of all texts that are read at once: some thousands of documents."""
MAX_PROBLEMS: Final = 100
"""Limit for each sort of problem in one document: enough to work on, and it bounds the work on hostile text."""
MAX_SHOWN: Final = 100
"""Limit of the problems that a region finds in all texts of one call."""
MAX_SHOWN_LENGTH: Final = 2**19
"""Characters of these, of four bytes at most: a reply of a region has up to 4 MiB (`shoal.wire.limits`)."""
MAX_NAMES: Final = 8
"""Names that a refusal lists of what there is."""


_TOO_MANY_NODES: Final = Refusal(
    Code.YAML_TOO_LARGE,
    f"more than {MAX_TOTAL_NODES} values in all texts",
    f"at most {MAX_TOTAL_NODES} at once",
    "apply fewer documents at a time",
)


_TOO_MANY_PROBLEMS: Final = Refusal(
    Code.YAML_TOO_LARGE,
    "more problems than are listed",
    f"at most {MAX_SHOWN} at once",
    "correct those before this one, then the others are listed",
)


@dataclass(frozen=True, slots=True)
class Document:
    """One well-formed document."""

    # Name that its text was given (a file's path).
    source: str
    value: Kind
    # Its YAML nodes, for positions; of a stored document its text, which is parsed only where a problem needs a
    # position.
    root: YamlNode | str

    @property
    def kind(self) -> str:
        return self.value.kind

    @property
    def name(self) -> str:
        """Unique within its kind: `tenant/name` for a workload, otherwise the name."""
        return name_of(self.value)

    def problem(self, path: tuple[int | str, ...], refusal: Refusal) -> Problem:
        """`refusal` at the value that `path` leads to."""
        at = self.position(path)
        return Problem(self.source, at.line, at.column, refusal)

    def position(self, path: tuple[int | str, ...]) -> Position:
        """Position of the value that `path` leads to; the start of a stored text that is no longer YAML."""
        roots = parse(self.source, self.root).roots if isinstance(self.root, str) else (self.root,)
        return position_of(roots[0], path) if roots else Position(1, 1)


@dataclass(frozen=True, slots=True)
class LoadedDocuments:
    """Result of `load`, in the order of the texts."""

    # Documents without a problem of their own.
    documents: tuple[Document, ...]
    # All problems.
    problems: tuple[Problem, ...]


def load(texts: Sequence[tuple[str, str | bytes]]) -> LoadedDocuments:
    """Parses, types and checks each (name, text). Never raises because of a text's content."""
    documents: list[Document] = []
    problems: list[Problem] = []
    nodes = 0
    for name, text in texts:
        parsed = parse(name, text)
        problems += parsed.problems
        nodes += sum(root.node_count for root in parsed.roots)
        if nodes > MAX_TOTAL_NODES:
            problems.append(Problem(name, 1, 1, _TOO_MANY_NODES))
            break
        for root in parsed.roots:
            value, found = _validate(root)
            if value is not None:
                document = Document(name, value, root)
                documents += [document] if not found else []
            problems += sorted(
                (Problem(name, at.line, at.column, why) for at, why in found), key=lambda one: (one.line, one.column)
            )
    return LoadedDocuments(tuple(documents), (*problems, *_duplicates(documents)))


def cross_check(
    documents: Sequence[Document], known_policies: Collection[str], known_tenants: Collection[str]
) -> tuple[Problem, ...]:
    """Problems between documents: names used twice, and policies and tenants that are neither among them nor known."""
    policies: dict[str, Policy | None] = dict.fromkeys(known_policies)
    policies.update({one.value.metadata.name: one.value for one in documents if isinstance(one.value, Policy)})
    tenants = {DEFAULT_TENANT, *known_tenants}
    tenants.update(one.value.metadata.name for one in documents if isinstance(one.value, Tenant))
    return (
        *_duplicates(documents),
        *(problem for one in documents for problem in reference_problems(one, policies, tenants)),
    )


def reference_problems(
    document: Document, policies: Mapping[str, Policy | None], tenants: Collection[str]
) -> Iterator[Problem]:
    """Problems of one document with those that it refers to. policies: by name; None where only the name is known."""
    if not isinstance(document.value, Workload):
        return
    tenant, name = document.value.metadata.tenant, document.value.spec.policy
    if tenant not in tenants:
        known = sorted(tenants)
        near = nearest_name(tenant, known)
        refusal = Refusal(
            Code.TENANT_UNKNOWN,
            f"tenant {tenant}",
            f"one of {some_names(tenant, known)}",
            f"did you mean {near}? Or apply a Tenant of that name" if near else "apply a Tenant of that name",
        )
        yield document.problem(("metadata", "tenant"), refusal)
    if name is not None and name not in policies:
        refusal = Refusal(
            Code.POLICY_UNKNOWN,
            f"policy {name}",
            f"one of {some_names(name, sorted(policies))}" if policies else "an applied policy; there is none yet",
            "apply the policy with it or before it",
        )
        yield document.problem(("spec", "policy"), refusal)
    policy = policies.get(name) if name is not None else None
    if policy is not None:
        for path, refusal in check_with_policy(document.value, policy):
            yield document.problem(path, refusal)


def bounded_problems(found: Iterable[Problem]) -> Iterator[Problem]:
    """The first of the problems, as many as a reply holds, and one that says so where there are more. Of the others
    none is looked for."""
    length = 0
    for number, problem in enumerate(found):
        length += len(str(problem))
        if number == MAX_SHOWN or length > MAX_SHOWN_LENGTH:
            yield replace(problem, document=f"{problem.document:.256}", refusal=_TOO_MANY_PROBLEMS)
            return
        yield problem


def some_names(word: str, known: Sequence[str]) -> str:
    """Names of `known`, which is in order: all of a few, else those around the place of `word`, and how many more."""
    around = _names_around(word, known, MAX_NAMES)
    more = len(known) - len(around)
    return ", ".join(around) + (f" and {more} more" if more else "")


def nearest_name(word: str, known: Sequence[str]) -> str | None:
    """The name that was probably meant, of those around the place of `word` in `known`, which is in order: names that
    differ at their beginning alone would take a look at each."""
    return next(iter(get_close_matches(word[:64], _names_around(word, known, _COMPARED), 1)), None)


_COMPARED: Final = 256


def _names_around(word: str, known: Sequence[str], count: int) -> Sequence[str]:
    first = max(0, min(bisect_left(known, word) - count // 2, len(known) - count))
    return known[first : first + count]


def name_of(value: Kind) -> str:
    return str(workload_key(value)) if isinstance(value, Workload) else value.metadata.name


def workload_key(workload: Workload) -> WorkloadKey:
    return WorkloadKey(workload.metadata.tenant, workload.metadata.name)


def canonical(value: Kind) -> dict[str, Any]:
    """The document as JSON: fields in the models' order, only those that were given, quantities in their shortest exact
    text. Documents of equal meaning give equal dicts. `read` is the inverse."""
    body = value.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {"apiVersion": value.api_version, "kind": value.kind, **body}


def canonical_text(value: Kind) -> str:
    """The canonical form on one line, for hashing and storing."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def read(stored: Mapping[str, Any]) -> Kind:
    """A document from its canonical form, as this or an older version stored it: a quantity that is out of bounds by
    now counts as the nearest one within. Raises ShoalError with the first refusal."""
    kind = KINDS.get(str(stored.get("kind")))
    if kind is None:
        raise ShoalError(_unknown_kind(stored.get("kind")))
    try:
        return kind.model_validate(_tuples(dict(stored)), context=STORED)
    except ValidationError as error:
        raise ShoalError(_refusal(kind, error.errors(include_url=False)[0])) from error


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value


def _validate(root: YamlNode) -> tuple[Kind | None, list[Finding]]:
    """The document's model (None where it does not fit one), and everything wrong with it."""
    if not isinstance(root, MappingNode):
        asked = "apiVersion, kind, metadata, spec"
        return None, [(root.at, Refusal(Code.YAML_INVALID, "a document that is no mapping", asked, _START))]
    version, kind = root.entries.get("apiVersion"), root.entries.get("kind")
    found: list[Finding] = []
    if not isinstance(version, ScalarNode) or version.value != API_VERSION:
        code = Code.FIELD_MISSING if version is None else Code.API_VERSION_UNKNOWN
        shown = "no apiVersion" if version is None else f"{plain(version)!r:.60}"
        found.append((position_of(root, ("apiVersion",)), Refusal(code, shown, API_VERSION, f"write {_START}")))
    model = KINDS.get(str(kind.value)) if isinstance(kind, ScalarNode) else None
    if model is None:
        return None, [*found, (position_of(root, ("kind",)), _unknown_kind(None if kind is None else plain(kind)))]
    found += islice(check_fields(str(plain(root.entries["kind"])), root), MAX_PROBLEMS)
    value: Kind | None = None
    try:
        value = model.model_validate(plain(root))
    except ValidationError as error:
        for detail in error.errors(include_url=False)[:MAX_PROBLEMS]:
            if detail["input"] is not None and detail["loc"][:1] != ("apiVersion",):
                found.append((_error_position(root, detail), _refusal(model, detail)))
    if value is not None:
        found += islice(check_semantics(value, root), MAX_PROBLEMS)
    return value, found


_START = "apiVersion: shoal/v1 on a line of its own"


def _unknown_kind(kind: object) -> Refusal:
    known = ", ".join(KINDS)
    if kind is None:
        return Refusal(Code.FIELD_MISSING, "no kind", f"one of {known}", "write kind: Policy, for example")
    return Refusal(Code.KIND_UNKNOWN, f"kind {kind!r:.60}", f"one of {known}", _nearest(str(kind), list(KINDS)))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word.lower(), {name.lower(): name for name in known}, n=1, cutoff=0.6)
    exact = next((name for name in known if close and name.lower() == close[0]), None)
    return f"did you mean {exact}?" if exact else f"use one of {', '.join(known)}"


def _error_position(root: YamlNode, detail: ErrorDetails) -> Position:
    path = tuple(step for step in detail["loc"] if isinstance(step, int) or step not in UNION_TAGS)
    if detail["type"] == "extra_forbidden":
        return key_position(root, path)
    node = node_at(root, path)
    context = detail.get("ctx", {})
    if isinstance(node, ScalarNode) and "column" in context:
        return node.document_position(context["line"], context["column"])
    return position_of(root, path)


_CODES = frozenset(Code)


def _refusal(model: Any, detail: ErrorDetails) -> Refusal:
    """Translates one of pydantic's errors into a refusal."""
    kind, context, location = detail["type"], detail.get("ctx", {}), detail["loc"]
    if kind in _CODES:
        return Refusal(Code(kind), context["found"], context["asked"], context["remedy"])
    field = ".".join(str(step) for step in location if isinstance(step, str) and step not in UNION_TAGS)
    if kind == "extra_forbidden":
        names = names_at(model, location[:-1])
        where = field.rpartition(".")[0] or "the document"
        return Refusal(
            Code.FIELD_UNKNOWN,
            f"{str(location[-1])!r:.60} in {where}",
            f"one of {', '.join(names)}",
            _nearest(str(location[-1]), names),
        )
    if kind == "missing":
        return Refusal(Code.FIELD_MISSING, f"no {location[-1]}", field, f"add {location[-1]}: here")
    given = _describe_value(detail["input"])
    if kind == "literal_error":
        words = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
        return Refusal(
            Code.FIELD_INVALID, f"{field}: {given}", f"one of {', '.join(words)}", _nearest(str(detail["input"]), words)
        )
    asked, remedy = _EXPECTED.get(kind, (detail["msg"], "see docs/reference/policy.md"))
    return Refusal(Code.FIELD_INVALID, f"{field}: {given}", asked.format(**context), remedy)


_EXPECTED = {
    "string_type": ("text", "put it in quotes"),
    "int_type": ("a whole number", "write it without quotes and unit"),
    "float_type": ("a number", "write it without quotes and unit"),
    "bool_type": ("true or false", "write true or false without quotes"),
    "tuple_type": ("a list", "write [a, b], or one - entry per line"),
    "dict_type": ("a mapping", "write {name: value}, or one name: value per line"),
    "model_type": ("a mapping", "write {name: value}, or one name: value per line"),
    "model_attributes_type": ("a mapping", "write {name: value}, or one name: value per line"),
    "greater_than_equal": ("at least {ge}", "raise it"),
    "less_than_equal": ("at most {le}", "lower it"),
    "too_long": ("at most {max_length} entries", "shorten it"),
    "finite_number": ("a finite number", "write a plain number"),
}


def _describe_value(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case tuple() | list():
            return "a list"
        case _:
            return f"{value!r:.80}"


def _duplicates(documents: Sequence[Document]) -> Iterator[Problem]:
    first: dict[tuple[str, str], Document] = {}
    for document in documents:
        before = first.setdefault((document.kind, document.name), document)
        if before is not document:
            at = before.position(("metadata", "name"))
            yield document.problem(
                ("metadata", "name"),
                Refusal(
                    Code.NAME_DUPLICATE,
                    f"{document.kind} {document.name} again",
                    f"each name once; the first is at {before.source}:{at.line}:{at.column}",
                    "rename or remove one",
                ),
            )

"""Texts to typed, checked documents, with every problem placed; and documents to the form that is stored and diffed."""

import json
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Mapping as Map
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.policies.check import Found, check_fields, check_pair, check_sense
from shoal.policies.fields import names_at
from shoal.policies.kinds import API_VERSION, KINDS, UNION_TAGS, Kind, Policy, Tenant, Workload
from shoal.policies.parse import Mapping, Node, Position, Problem, Scalar, key_of, parse, place_of, plain, value_at
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.workload import WorkloadKey

DEFAULT_TENANT: Final = "default"
MAX_PROBLEMS: Final = 100
"""Of one sort, in one document: enough to work on, and bounded work for whoever reads hostile text."""


@dataclass(frozen=True, slots=True)
class Document:
    """One well-formed document. text: the name its text was given (a file's path). root: its nodes, for positions."""

    text: str
    value: Kind
    root: Node

    @property
    def kind(self) -> str:
        return self.value.kind

    @property
    def name(self) -> str:
        """Unique within its kind: `tenant/name` of a workload, else the name."""
        return name_of(self.value)

    def problem(self, path: tuple[int | str, ...], refusal: Refusal) -> Problem:
        """`refusal` at the value that `path` leads to."""
        at = place_of(self.root, path)
        return Problem(self.text, at.line, at.column, refusal)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Documents without a problem of their own, in the order they stand; and all problems, in that order too."""

    documents: tuple[Document, ...]
    problems: tuple[Problem, ...]


def load(texts: Sequence[tuple[str, str | bytes]]) -> Loaded:
    """Parse, type and check each (name, text). Never raises for what a text holds."""
    documents: list[Document] = []
    problems: list[Problem] = []
    for name, text in texts:
        parsed = parse(name, text)
        problems += parsed.problems
        for root in parsed.roots:
            value, found = _typed(root)
            if value is not None:
                document = Document(name, value, root)
                documents += [document] if not found else []
            problems += sorted(
                (Problem(name, at.line, at.column, why) for at, why in found), key=lambda one: (one.line, one.column)
            )
    return Loaded(tuple(documents), (*problems, *_duplicates(documents)))


def cross_check(
    documents: Sequence[Document], known_policies: Collection[str], known_tenants: Collection[str]
) -> tuple[Problem, ...]:
    """What shows only among documents: names used twice, policies and tenants that neither stand here nor are known."""
    policies = {one.value.metadata.name: one.value for one in documents if isinstance(one.value, Policy)}
    tenants = {one.value.metadata.name for one in documents if isinstance(one.value, Tenant)}
    return (
        *_duplicates(documents),
        *_links(documents, policies, {*policies, *known_policies}, tenants | {DEFAULT_TENANT, *known_tenants}),
    )


def name_of(value: Kind) -> str:
    return str(key_of_workload(value)) if isinstance(value, Workload) else value.metadata.name


def key_of_workload(workload: Workload) -> WorkloadKey:
    return WorkloadKey(workload.metadata.tenant, workload.metadata.name)


def canonical(value: Kind) -> dict[str, Any]:
    """The document as JSON: fields in the models' order, only those that were given, quantities in their shortest
    exact text. Equal meaning of what was typed gives an equal dict; `read` is its inverse."""
    body = value.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    return {"apiVersion": value.api_version, "kind": value.kind, **body}


def canonical_text(value: Kind) -> str:
    """One line per document, for hashing and storing."""
    return json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def read(stored: Map[str, Any]) -> Kind:
    """A document from its canonical form. Raises ShoalError with the first refusal."""
    kind = KINDS.get(str(stored.get("kind")))
    if kind is None:
        raise ShoalError(_unknown_kind(stored.get("kind")))
    try:
        return kind.model_validate(_tuples(dict(stored)))
    except ValidationError as error:
        raise ShoalError(_refusal(kind, error.errors(include_url=False)[0])) from error


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value


def _typed(root: Node) -> tuple[Kind | None, list[Found]]:
    """The document's model, None where it does not fit one, and everything wrong with it."""
    if not isinstance(root, Mapping):
        asked = "apiVersion, kind, metadata, spec"
        return None, [(root.at, Refusal(Code.YAML_INVALID, "a document that is no mapping", asked, _START))]
    version, kind = root.entries.get("apiVersion"), root.entries.get("kind")
    found: list[Found] = []
    if not isinstance(version, Scalar) or version.value != API_VERSION:
        code = Code.FIELD_MISSING if version is None else Code.API_VERSION_UNKNOWN
        shown = "no apiVersion" if version is None else f"{plain(version)!r:.60}"
        found.append((place_of(root, ("apiVersion",)), Refusal(code, shown, API_VERSION, f"write {_START}")))
    model = KINDS.get(str(kind.value)) if isinstance(kind, Scalar) else None
    if model is None:
        return None, [*found, (place_of(root, ("kind",)), _unknown_kind(None if kind is None else plain(kind)))]
    found += islice(check_fields(str(plain(root.entries["kind"])), root), MAX_PROBLEMS)
    value: Kind | None = None
    try:
        value = model.model_validate(plain(root))
    except ValidationError as error:
        for detail in error.errors(include_url=False)[:MAX_PROBLEMS]:
            if detail["input"] is not None and detail["loc"][:1] != ("apiVersion",):
                found.append((_place(root, detail), _refusal(model, detail)))
    if value is not None:
        found += islice(check_sense(value, root), MAX_PROBLEMS)
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


def _place(root: Node, detail: ErrorDetails) -> Position:
    path = tuple(step for step in detail["loc"] if isinstance(step, int) or step not in UNION_TAGS)
    if detail["type"] == "extra_forbidden":
        return key_of(root, path)
    node = value_at(root, path)
    context = detail.get("ctx", {})
    if isinstance(node, Scalar) and "column" in context:
        return node.place(context["line"], context["column"])
    return place_of(root, path)


_CODES = frozenset(Code)


def _refusal(model: Any, detail: ErrorDetails) -> Refusal:
    """One of pydantic's errors as ours."""
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
    given = _given(detail["input"])
    if kind == "literal_error":
        words = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
        return Refusal(
            Code.FIELD_INVALID, f"{field}: {given}", f"one of {', '.join(words)}", _nearest(str(detail["input"]), words)
        )
    asked, remedy = _ASKED.get(kind, (detail["msg"], "see docs/reference/policy.md"))
    return Refusal(Code.FIELD_INVALID, f"{field}: {given}", asked.format(**context), remedy)


_ASKED = {
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


def _given(value: object) -> str:
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
            at = place_of(before.root, ("metadata", "name"))
            yield document.problem(
                ("metadata", "name"),
                Refusal(
                    Code.NAME_DUPLICATE,
                    f"{document.kind} {document.name} again",
                    f"each name once; the first is at {before.text}:{at.line}:{at.column}",
                    "rename or remove one",
                ),
            )


def _links(
    documents: Sequence[Document], policies: Map[str, Policy], known: Collection[str], tenants: Collection[str]
) -> Iterator[Problem]:
    for document in documents:
        if not isinstance(document.value, Workload):
            continue
        tenant, policy = document.value.metadata.tenant, document.value.spec.policy
        if tenant not in tenants:
            refusal = Refusal(
                Code.TENANT_UNKNOWN,
                f"tenant {tenant}",
                f"one of {', '.join(sorted(tenants))}",
                _nearest(tenant, sorted(tenants)) + " Or apply a Tenant of that name",
            )
            yield document.problem(("metadata", "tenant"), refusal)
        if policy is not None and policy not in known:
            refusal = Refusal(
                Code.POLICY_UNKNOWN,
                f"policy {policy}",
                f"one of {', '.join(sorted(known)) or 'none yet'}",
                "apply the policy with it or before it",
            )
            yield document.problem(("spec", "policy"), refusal)
        if policy is not None and policy in policies:
            for path, refusal in check_pair(document.value, policies[policy]):
                yield document.problem(path, refusal)

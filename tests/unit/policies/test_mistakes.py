"""Each mistake in a document gets its own code, at its own place, with a remedy."""

import re

import pytest

from harness.builders.invalid_documents import MISTAKES, policy, split_at_mark, workload
from shoal.policies import cross_check, load
from shoal.types.codes import Code


@pytest.mark.parametrize(
    ("text", "code", "remedy"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_mistake_has_code_place_and_remedy(text: str, code: Code, remedy: str) -> None:
    content, line, column = split_at_mark(text)
    problems = load([("file.yaml", content)]).problems
    assert [(one.refusal.code, one.line, one.column) for one in problems] == [(code, line, column)], problems
    (problem,) = problems
    assert remedy in problem.refusal.remedy
    assert problem.refusal.found
    assert problem.refusal.asked
    assert re.fullmatch(rf"file\.yaml:{line}:{column}: found: .+ \({code}\)", str(problem), re.DOTALL)


def test_enough_different_mistakes() -> None:
    assert len(MISTAKES) >= 25
    assert len({case[2] for case in MISTAKES}) >= 18


def test_all_problems_of_all_documents_are_collected() -> None:
    first = policy("  limits: {cost: 1.5, energy: 2 W}\n  migration: {allow_gap: 30}\n  priority: high\n", name="A")
    second = workload("  colour: red\n")
    problems = load([("a.yaml", first + "---\n" + second), ("b.yaml", "kind: [\n")]).problems
    assert [(one.document, one.line, one.refusal.code) for one in problems] == [
        ("a.yaml", 3, Code.NAME_INVALID),
        ("a.yaml", 5, Code.UNIT_MISSING),
        ("a.yaml", 5, Code.UNIT_WRONG),
        ("a.yaml", 6, Code.UNIT_MISSING),
        ("a.yaml", 7, Code.FIELD_INVALID),
        ("a.yaml", 14, Code.FIELD_UNKNOWN),
        ("b.yaml", 2, Code.YAML_INVALID),
    ]


def test_a_document_without_problems_is_loaded_beside_one_with() -> None:
    loaded = load([("a.yaml", policy("  priority: high\n")), ("b.yaml", policy("  priority: 1\n", name="q"))])
    assert [one.name for one in loaded.documents] == ["q"]
    assert [one.document for one in loaded.problems] == ["a.yaml"]


def test_documents_are_checked_against_each_other_and_what_is_known() -> None:
    text = workload("  policy: gold\n", "{name: w, tenant: shop}") + "---\n" + workload("  policy: p\n", "{name: v}")
    documents = load([("a.yaml", text + "---\n" + policy("  priority: 1\n"))]).documents
    found = [(one.refusal.code, one.line, one.column) for one in cross_check(documents, (), ())]
    assert found == [(Code.TENANT_UNKNOWN, 3, 29), (Code.POLICY_UNKNOWN, 6, 11)]
    assert cross_check(documents, ["gold"], ["shop"]) == ()


def test_a_variant_that_its_policy_never_allows() -> None:
    text = (
        policy("  require: {precision: {allow: [fp32]}}\n")
        + "---\napiVersion: shoal/v1\nkind: Workload\nmetadata: {name: w}\nspec:\n  policy: p\n"
        + "  model: {source: a, variants: [{source: b, precision: int8}]}\n"
    )
    (problem,) = cross_check(load([("a.yaml", text)]).documents, (), ())
    assert (problem.refusal.code, problem.line, problem.column) == (Code.FIELD_WITHOUT_EFFECT, 12, 56)


def test_sample_inputs_need_samples() -> None:
    from shoal.policies.check import check_with_policy
    from shoal.policies.kinds import Policy, Workload

    head = {"apiVersion": "shoal/v1", "metadata": {"name": "x"}}
    verifying = Policy.model_validate(
        {**head, "kind": "Policy", "spec": {"migration": {"verify": {"inputs": "samples"}}}}
    )
    for samples, codes in (({}, [Code.FIELD_MISSING]), ({"samples": "./a.npz"}, [])):
        one = Workload.model_validate({**head, "kind": "Workload", "spec": {"model": {"source": "a", **samples}}})
        assert [refusal.code for _, refusal in check_with_policy(one, verifying)] == codes


def test_captured_inputs_need_consent() -> None:
    from shoal.policies.check import check_with_policy
    from shoal.policies.kinds import Policy, Workload

    head = {"apiVersion": "shoal/v1", "metadata": {"name": "x"}}
    verifying = Policy.model_validate(
        {**head, "kind": "Policy", "spec": {"migration": {"verify": {"inputs": "captured"}}}}
    )
    for consent, codes in ((False, [Code.CONSENT_MISSING]), (True, [])):
        spec = {"model": {"source": "a"}, "capture": {"consent": consent}}
        one = Workload.model_validate({**head, "kind": "Workload", "spec": spec})
        assert [refusal.code for _, refusal in check_with_policy(one, verifying)] == codes

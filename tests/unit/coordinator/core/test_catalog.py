"""The catalog of documents: stored documents stay parsed, and every answer is as if all of them were parsed again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.builders.coordinator_core import profile
from shoal import policies
from shoal.coordinator import codec
from shoal.coordinator.api.views import tenant_view
from shoal.coordinator.core.catalog import model
from shoal.coordinator.core.catalog.model import Catalog, DocumentKey, ModelRecord, PackRecord, StoredDocument
from shoal.coordinator.core.catalog.propose import DocumentProposal, propose, without_document
from shoal.coordinator.core.fleet.state import Fleet
from shoal.coordinator.core.workloads.liveness_rules import LivenessRules
from shoal.policies import Problem, bounded_problems, cross_check, documents, load, some_names
from shoal.policies import parse as yaml
from shoal.policies.documents import MAX_NAMES, MAX_SHOWN
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.migration import PackRef
from shoal.types.signature import PublisherKey, VerifiedSignature
from shoal.types.units import Bytes, Wall

REGION = "eu"
MODELS = ("ocr", "asr")
WALL = Wall(1.0)


def digest(name: str) -> str:
    return f"sha256:{name}"


def policy(name: str, spec: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {name}}}\nspec: {spec}\n"


def tenant(name: str, replicas: int = 1) -> str:
    return (
        f"apiVersion: shoal/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{quota: {{replicas: {replicas}}}}}\n"
    )


def workload(name: str, of: str = "default", spec: str = "", source: str = "ocr") -> str:
    return (
        f"apiVersion: shoal/v1\nkind: Workload\nmetadata: {{name: {name}, tenant: {of}}}\n"
        f"spec:\n  model: {{source: {source}}}\n{spec}"
    )


def region(price: str) -> str:
    return f"apiVersion: shoal/v1\nkind: Region\nmetadata: {{name: eu}}\nspec: {{price: {price}}}\n"


def no_bundle(bundle: bytes, digest: str, keys: tuple[PublisherKey, ...]) -> tuple[str, VerifiedSignature] | Refusal:
    raise AssertionError("no model here is signed")


def with_models() -> Catalog:
    records = {digest(name): ModelRecord(digest(name), (name,), WALL, "", profile(digest(name))) for name in MODELS}
    return Catalog(models=records)


def proposal(catalog: Catalog, *texts: str) -> DocumentProposal:
    given = [(f"{number}.yaml", text) for number, text in enumerate(texts)]
    return propose(catalog, given, {}, region=REGION, actor="ops", wall=WALL, verify=no_bundle)


def apply(catalog: Catalog, *texts: str) -> Catalog:
    proposed = proposal(catalog, *texts)
    assert not proposed.problems
    return proposed.catalog


def loaded_again(catalog: Catalog) -> Catalog:
    """As a coordinator has it that just read the store."""
    records = {key: codec.load(StoredDocument, codec.dump(each)) for key, each in catalog.documents.items()}
    return replace(catalog, documents=records, earlier=None)


def cross_problems(catalog: Catalog, texts: Sequence[str]) -> tuple[Problem, ...]:
    """Problems between documents, where every stored one is parsed as YAML."""
    loaded = load([(f"{number}.yaml", text) for number, text in enumerate(texts)])
    given = {DocumentKey(one.kind, one.name) for one in loaded.documents}
    stored = [
        (f"stored {key.kind} {key.name}", each.text) for key, each in catalog.documents.items() if key not in given
    ]
    return loaded.problems or cross_check((*loaded.documents, *load(stored).documents), (), ())


def readings(catalog: Catalog) -> tuple[object, ...]:
    """All that placement reads."""
    return (
        catalog.intents,
        catalog.number,
        dict(catalog.quotas),
        catalog.profiles,
        catalog.references,
        catalog.rules(REGION),
        catalog.signatures(REGION, no_bundle),
        [catalog.users_of(digest(name)) for name in MODELS],
        [catalog.digest_of(name) for name in MODELS],
    )


NAMES = st.sampled_from(("a", "b", "c"))
POLICIES = st.sampled_from(
    (
        "{optimize: {latency: 1.0}}",
        "{optimize: {cost: 1.0}, priority: 7}",
        "{migration: {verify: {inputs: captured}}}",
        "{migration: {verify: {inputs: samples}}}",
        "{require: {precision: {allow: [fp32]}}}",
        "{require: {trust: {signed_model: {keys: [nobody]}}}}",
        "{priority: many}",
    )
)
SPECS = st.sampled_from(
    (
        "",
        "  policy: a\n",
        "  policy: b\n",
        "  policy: c\n  capture: {consent: true}\n",
        "  traffic: [{from: eu, rate: 1/s}]\n",
    )
)
TEXTS = st.one_of(
    st.builds(policy, NAMES, POLICIES),
    st.builds(tenant, NAMES, st.integers(1, 3)),
    st.builds(workload, NAMES, st.sampled_from(("default", "a", "b")), SPECS, st.sampled_from((*MODELS, "unknown"))),
    st.builds(region, st.sampled_from(("0.30 USD/h", "0.40 USD/h"))),
)
KEYS = st.builds(DocumentKey, st.sampled_from(("Policy", "Tenant")), NAMES) | st.builds(
    lambda of, name: DocumentKey("Workload", f"{of}/{name}"), st.sampled_from(("default", "a", "b")), NAMES
)
APPLY = st.lists(TEXTS, max_size=4).map(lambda texts: ("apply", texts))
DELETE = KEYS.map(lambda key: ("delete", key))
PUSH = st.sampled_from(MODELS).map(lambda name: ("push", name))
CHANGES: Any = st.lists(st.one_of(APPLY, APPLY, DELETE, PUSH), max_size=12)


def outcome(change: Callable[[], Catalog]) -> Catalog | Refusal:
    try:
        return change()
    except ShoalError as error:
        return error.refusal


@settings(max_examples=150, deadline=None)
@given(CHANGES)
def test_any_sequence_of_changes_equals_parsing_everything_again(changes: list[tuple[str, Any]]) -> None:
    catalog = with_models()
    for what, value in changes:
        fresh = loaded_again(catalog)
        if what == "push":
            pack = PackRef(digest("samples"), Bytes(1 + len(catalog.documents)), 16, answers=True)
            record = PackRecord(digest("samples"), WALL, "", {digest(value): pack})
            catalog = catalog.with_changes(packs={record.digest: record})
            continue
        if what == "delete":
            found = outcome(lambda key=value, of=catalog: without_document(of, key))  # type: ignore[misc]
            assert found == outcome(lambda key=value, of=fresh: without_document(of, key))  # type: ignore[misc]
            catalog = found if isinstance(found, Catalog) else catalog
            continue
        proposed, expected = proposal(catalog, *value), proposal(fresh, *value)
        assert proposed == expected
        cross = cross_problems(catalog, value)
        assert proposed.problems[: len(cross)] == cross
        if not proposed.problems:
            catalog = proposed.catalog
            assert readings(catalog) == readings(expected.catalog) == readings(loaded_again(catalog))


@dataclass
class ParseCounts:
    """What was parsed since the test began."""

    yaml: list[str] = field(default_factory=list)
    stored: int = 0
    resolved: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> ParseCounts:
    found = ParseCounts()
    parse, read, resolve = yaml.parse, policies.read, policies.resolve

    def count_parse(name: str, text: str | bytes) -> Any:
        found.yaml.append(name)
        return parse(name, text)

    def count_read(stored: Any) -> Any:
        found.stored += 1
        return read(stored)

    def count_resolve(*args: Any, **named: Any) -> Any:
        found.resolved += 1
        return resolve(*args, **named)

    monkeypatch.setattr(documents, "parse", count_parse)
    monkeypatch.setattr(model, "read", count_read)
    monkeypatch.setattr(model, "resolve", count_resolve)
    return found


def stored_catalog(count: int) -> Catalog:
    workloads = [workload(f"w-{number}", spec=f"  policy: p-{number % 3}\n") for number in range(count)]
    texts = (*(policy(f"p-{number}", "{priority: 1}") for number in range(3)), *workloads)
    catalog = apply(with_models(), "---\n".join(texts))
    readings(catalog)
    return catalog


def reset(counts: ParseCounts) -> None:
    counts.yaml, counts.stored, counts.resolved = [], 0, 0


@pytest.mark.parametrize("count", [3, 60])
def test_a_plan_parses_only_what_it_is_given(counts: ParseCounts, count: int) -> None:
    catalog = stored_catalog(count)
    reset(counts)
    readings(apply(catalog, workload("w-0", spec="  policy: p-1\n")))
    assert (counts.yaml, counts.stored, counts.resolved) == (["0.yaml"], 1, 1)
    reset(counts)
    readings(apply(catalog))
    readings(catalog.with_changes(guests=()))
    assert (counts.yaml, counts.stored, counts.resolved) == ([], 0, 0)


def test_a_policy_resolves_its_workloads_again(counts: ParseCounts) -> None:
    catalog = stored_catalog(60)
    reset(counts)
    changed = apply(catalog, policy("p-1", "{priority: 9}"))
    assert {intent.priority for intent in changed.intents if intent.policy == "p-1"} == {9}
    assert {intent.priority for intent in changed.intents if intent.policy != "p-1"} == {1}
    assert (counts.yaml, counts.stored, counts.resolved) == (["0.yaml"], 1, 20)


def test_a_pushed_model_resolves_its_workloads_again(counts: ParseCounts) -> None:
    catalog = apply(stored_catalog(6), workload("other", source="asr"))
    readings(catalog)
    reset(counts)
    record = replace(catalog.models[digest("asr")], profile=profile(digest("asr"), precision="int8"))
    changed = catalog.with_changes(models={**catalog.models, record.digest: record})
    assert [intent.models[0].precision for intent in changed.intents if intent.key.name == "other"] == ["int8"]
    assert counts.resolved == 1


def test_positions_in_stored_documents_are_read_only_where_there_is_a_problem(counts: ParseCounts) -> None:
    catalog = stored_catalog(9)
    reset(counts)
    found = proposal(catalog, policy("p-2", "{migration: {verify: {inputs: captured}}}"))
    names = [f"stored Workload default/w-{number}" for number in (2, 5, 8)]
    assert [(each.document, each.refusal.code) for each in found.problems] == [
        (name, Code.CONSENT_MISSING) for name in names
    ]
    text = catalog.documents[DocumentKey("Workload", "default/w-2")].text
    assert (found.problems[0].line, found.problems[0].column) == (1, text.index('"spec"') + 1)
    assert counts.yaml == ["0.yaml", *names]
    assert not proposal(catalog).problems  # the refused policy left nothing behind


@pytest.mark.parametrize("lost", [DocumentKey("Tenant", "a"), DocumentKey("Policy", "a")])
def test_what_a_restored_store_lacks_is_found_at_every_plan(lost: DocumentKey) -> None:
    catalog = apply(with_models(), tenant("a"), policy("a", "{priority: 1}"), workload("w", "a", "  policy: a\n"))
    left = {key: each for key, each in catalog.documents.items() if key != lost}
    broken = loaded_again(catalog.with_changes(documents=left))
    found = proposal(broken, region("0.30 USD/h")).problems
    assert [each.document for each in found] == ["stored Workload a/w"]
    assert found == cross_problems(broken, [region("0.30 USD/h")])


def test_a_stored_pair_that_a_newer_check_refuses_is_found_at_every_plan() -> None:
    catalog = apply(with_models(), policy("a", "{priority: 1}"), workload("w", spec="  policy: a\n"))
    stricter = apply(with_models(), policy("a", "{migration: {verify: {inputs: captured}}}"))
    broken = loaded_again(catalog.with_changes(documents={**catalog.documents, **stricter.documents}))
    found = proposal(broken, region("0.30 USD/h")).problems
    assert [each.refusal.code for each in found] == [Code.CONSENT_MISSING]
    assert found == cross_problems(broken, [region("0.30 USD/h")])


def with_older_text(catalog: Catalog, key: DocumentKey, now: str, before: str) -> Catalog:
    """The catalog as a version left it that let in what this one refuses: `before` in place of `now`."""
    stored = catalog.documents[key]
    assert now in stored.text
    older = replace(stored, text=stored.text.replace(now, before))
    return loaded_again(replace(catalog, documents={**catalog.documents, key: older}, earlier=None))


def test_a_stored_policy_that_is_too_short_for_a_heartbeat_counts_as_the_least() -> None:
    """The shortest of all policies counts for all nodes: a millisecond of one would lose them all."""
    short = "{partition: {heartbeat: 200ms, lost_after: 1s}}"
    catalog = apply(with_models(), policy("p", short), workload("w", spec="  policy: p\n"))
    key = DocumentKey("Policy", "p")
    older = with_older_text(with_older_text(catalog, key, '"200ms"', '"1ms"'), key, '"1s"', '"2ms"')
    assert '"heartbeat":"1ms","lost_after":"2ms"' in older.documents[key].text
    assert LivenessRules().timing(older.intents) == LivenessRules().timing(catalog.intents)
    assert proposal(older, policy("p", "{partition: {heartbeat: 1ms}}")).problems
    assert not proposal(older, policy("q", short)).problems


def test_a_stored_quantity_beyond_all_bounds_counts_as_the_greatest() -> None:
    """It fits the 64 bits of a message, and the dates ahead of a schedule."""
    night = "{migration: {shift: {steps: [50%, 100%], hold: 3650d}}}"
    catalog = apply(with_models(), policy("p", night), workload("w", spec="  policy: p\n"), tenant("t"))
    catalog = apply(catalog, tenant("t").replace("replicas: 1", "memory: 1048576TiB"))
    older = with_older_text(catalog, DocumentKey("Policy", "p"), "3650d", "1e300d")
    older = with_older_text(older, DocumentKey("Tenant", "t"), "1048576TiB", "1e290TiB")
    assert older.intents == catalog.intents
    assert older.quotas == catalog.quotas
    stored, quota = older.documents[DocumentKey("Tenant", "t")], older.quotas["t"]
    assert tenant_view(stored, quota, {}, Fleet({}), None).tenant_quota.memory == 2**60


def test_problems_are_as_many_and_as_long_as_a_reply_holds() -> None:
    """Whoever applies workloads before their policies hears of that, and not of a reply that is too long."""
    names = [f"p-{number:04}" for number in range(2000)]
    stored = {
        DocumentKey("Policy", name): StoredDocument("Policy", name, policy_text(name), 1, WALL, "ops") for name in names
    }
    catalog = replace(with_models(), documents=stored)
    texts = "---\n".join(workload(f"w-{number}", "shop", f"  policy: q-{number}\n") for number in range(150))
    problems = proposal(catalog, texts).problems
    assert len(problems) == MAX_SHOWN + 1
    unknown = next(each for each in problems if each.refusal.code == Code.POLICY_UNKNOWN)
    assert unknown.refusal.asked == f"one of {', '.join(names[-8:])} and 1992 more"
    assert (problems[-1].refusal.code, problems[-1].refusal.asked) == (Code.YAML_TOO_LARGE, "at most 100 at once")
    assert max(len(str(each)) for each in problems) < 500
    unpushed = [f"ocr{number}" for number in range(150)]
    found = proposal(catalog, "---\n".join(workload(f"v-{name}", source=name) for name in unpushed)).problems
    assert len(found) == MAX_SHOWN + 1
    assert "did you mean ocr?" in found[0].refusal.remedy
    near = policy("x", "{priority: 1}") + "---\n" + workload("w", spec="  policy: p-0500a\n")
    (problem,) = proposal(catalog, near).problems
    assert problem.refusal.asked == f"one of {', '.join(names[497:505])} and 1993 more"


def policy_text(name: str) -> str:
    return f'{{"apiVersion":"shoal/v1","kind":"Policy","metadata":{{"name":"{name}"}},"spec":{{"priority":1}}}}'


@given(st.lists(st.text("ab-", min_size=1, max_size=6), unique=True, max_size=40).map(sorted), st.text("ab-"))
def test_of_many_names_a_few_are_shown_and_the_others_counted(names: list[str], word: str) -> None:
    shown, _, more = some_names(word, names).partition(" and ")
    listed = shown.split(", ") if shown else []
    assert len(listed) == min(len(names), MAX_NAMES)
    assert len(listed) + int(more.split()[0] if more else 0) == len(names)
    assert set(listed) <= set(names)
    assert word not in names or word in listed


def test_a_text_of_many_problems_names_them_all_within_the_bound() -> None:
    long = "x" * 300_000
    problem = Problem(long, 1, 1, Refusal(Code.YAML_INVALID, "a", "b", "c"))
    found = list(bounded_problems([problem] * 5))
    assert [each.refusal.code for each in found] == [Code.YAML_INVALID, Code.YAML_TOO_LARGE]
    assert len(found[-1].document) == 256

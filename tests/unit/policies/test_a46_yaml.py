"""A46: YAML crafted to exhaust its reader is refused at file:line:column, before any tree is walked."""

import os
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.report import record
from shoal.policies import Problem, load
from shoal.policies.parse import MAX_ALIASES, MAX_DEPTH, MAX_NODES, parse, plain
from shoal.types.codes import Code

LEVELS = 100_000
HUNDRED_MB = 100_000_000


def alias_bomb(width: int, levels: int = 12) -> str:
    rows = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]\n" for level in range(1, levels)]
    return "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(rows)


BOMBS = [
    ("nine laughs a level", alias_bomb(9), Code.YAML_ALIAS_LIMIT, 5),
    ("four laughs a level", alias_bomb(4), Code.YAML_ALIAS_LIMIT, 6),
    ("many aliases", "a: &a x\nb:\n" + "- *a\n" * 1000, Code.YAML_ALIAS_LIMIT, 3 + MAX_ALIASES),
    ("recursive anchor", "a: 1\nb: &b [*b]\n", Code.YAML_ALIAS_LIMIT, 2),
    ("recursive mapping", "a: &a\n  b:\n    c: *a\n", Code.YAML_ALIAS_LIMIT, 3),
    ("flow lists", "[" * LEVELS, Code.YAML_TOO_DEEP, 1),
    ("closed flow lists", "[" * LEVELS + "]" * LEVELS, Code.YAML_TOO_DEEP, 1),
    ("flow mappings", "{a: " * LEVELS, Code.YAML_TOO_DEEP, 1),
    ("block lists", "- " * LEVELS + "x", Code.YAML_TOO_DEEP, 1),
    ("block mappings", "".join(" " * level + "a:\n" for level in range(1400)), Code.YAML_TOO_DEEP, MAX_DEPTH),
    ("python call", "a: !!python/object/apply:os.system ['true']\n", Code.YAML_TAG_DENIED, 1),
    ("python module", "a:\n  - !!python/module:os x\n", Code.YAML_TAG_DENIED, 2),
    ("any tag", "%TAG ! tag:shoal,2026:\n---\na: !b c\n", Code.YAML_TAG_DENIED, 3),
    ("duplicate key", "a: 1\nb: 2\na: 3\n", Code.YAML_DUPLICATE_KEY, 3),
    ("duplicate keys", "a: 1\n" * 200_000, Code.YAML_DUPLICATE_KEY, 2),
    ("distinct keys", "".join(f"k{number}: 1\n" for number in range(90_000)), Code.YAML_TOO_LARGE, MAX_NODES // 2),
    ("anchors", "".join(f"- &a{number} x\n" for number in range(80_000)), Code.YAML_TOO_LARGE, MAX_NODES),
    ("documents", "--- a\n" * 100_000, Code.YAML_TOO_LARGE, 257),
    ("100 MB in a line", b"a" * HUNDRED_MB, Code.YAML_TOO_LARGE, 1),
    ("100 MB in lines", b"a: b\n" * (HUNDRED_MB // 5), Code.YAML_TOO_LARGE, (1 << 20) // 5 + 1),
    ("100 MB of text", "é\n" * (HUNDRED_MB // 3), Code.YAML_TOO_LARGE, (1 << 20) // 2 + 1),
    ("key as list", "[[1]]: 2\n", Code.YAML_INVALID, 1),
    ("no UTF-8", b"a: b\nc: \xff\n", Code.YAML_INVALID, 2),
    ("no text, large", b"\x08\x00model" * (HUNDRED_MB // 7), Code.YAML_INVALID, 1),
    ("NUL", "a: b\nc: d\0\n", Code.YAML_INVALID, 2),
    ("escaped NUL", 'a: "\\0"\n', Code.YAML_INVALID, 1),
    ("endless quote", 'a: "' + "b" * 900_000, Code.YAML_INVALID, 1),
]


@pytest.mark.parametrize(("text", "code", "line"), [bomb[1:] for bomb in BOMBS], ids=[bomb[0] for bomb in BOMBS])
def test_a46_refused_at_its_place_within_100_ms(text: str | bytes, code: Code, line: int) -> None:
    # CPU time of the best of three runs: this machine's other work is none of the parser's.
    loaded = load([("bomb.yaml", text)])
    took = []
    for _ in range(3):
        start = time.process_time()
        assert load([("bomb.yaml", text)]) == loaded
        took.append(time.process_time() - start)
    assert loaded.documents == ()
    first = loaded.problems[0]
    assert (first.document, first.refusal.code, first.line) == ("bomb.yaml", code, line)
    assert first.column >= 1
    assert first.refusal.remedy
    assert len(loaded.problems) <= 20
    # Hardware threads of one core share it: beside another test worker the same work takes up to twice its CPU time.
    bound_s = 0.2 if "PYTEST_XDIST_WORKER" in os.environ else 0.1
    assert min(took) <= bound_s, f"{min(took) * 1e3:.0f} ms"
    record("A46", "I", len(took), code=code, best_ms=round(min(took) * 1e3, 1))


@pytest.mark.parametrize("text", ["[" * LEVELS, "- " * LEVELS + "x", "a: !!python/name:os.system x\n", alias_bomb(9)])
def test_a46_holds_without_libyaml(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with_c = parse("bomb.yaml", text).problems
    monkeypatch.delattr(yaml, "CSafeLoader")
    without = parse("bomb.yaml", text).problems
    assert [(one.refusal.code, one.line, one.column) for one in with_c] == [
        (one.refusal.code, one.line, one.column) for one in without
    ]


def test_a46_aliases_within_the_limits_are_values() -> None:
    root = parse("a.yaml", "a: &x {b: 1}\nc: *x\n").roots[0]
    assert plain(root) == {"a": {"b": 1}, "c": {"b": 1}}


def have_codes(problems: tuple[Problem, ...]) -> bool:
    return all(one.refusal.code in Code and one.line >= 1 and one.column >= 1 for one in problems)


WORDS = st.sampled_from(
    [
        "apiVersion: shoal/v1\n", "kind: Policy\n", "kind: Workload\n", "kind: Tenant\n", "kind: Region\n",
        "metadata:\n", "spec:\n", "  name: a\n", "  require:\n", "    where: ", "device.kind", " == ", "'gpu'\n", "{",
        "}", "[", "]", ", ", ": ", "- ", "&a ", "*a ", "!!str ", "---\n", "|\n", "\n", "  ", "relax", "latency", "p95",
        "60ms", "null", "1e400",
        "limits: {cost: 1 USD/h}\n", "optimize", "\t", "\"", "'", "#", "%YAML 1.1\n", "\ufeff", "\0", "0x1F", "<<",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=300), st.binary(max_size=300), st.lists(WORDS, max_size=60).map("".join)))
def test_a46_any_text_is_loaded_or_refused_with_codes(text: str | bytes) -> None:
    loaded = load([("any.yaml", text)])
    assert have_codes(loaded.problems)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.sampled_from(["60ms", "1"])
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PARTS = [
    "require",
    "limits",
    "optimize",
    "relax",
    "partition",
    "priority",
    "model",
    "traffic",
    "quota",
    "price",
    "location",
]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["Policy", "Workload", "Tenant", "Region"]),
    st.dictionaries(st.sampled_from(PARTS), VALUES, max_size=4),
    VALUES,
)
def test_a46_any_document_is_loaded_or_refused_with_codes(kind: str, spec: object, metadata: object) -> None:
    document = {"apiVersion": "shoal/v1", "kind": kind, "metadata": metadata, "spec": spec}
    loaded = load([("any.yaml", yaml.safe_dump(document, allow_unicode=True))])
    assert have_codes(loaded.problems)
    assert loaded.problems or loaded.documents


SCALARS = [
    ("20:00", "20:00"), ("on", "on"), ("no", "no"), ("yes", "yes"), ("off", "off"), ("y", "y"), ("true", True),
    ("FALSE", False), ("-.5e-1", -0.05), ("99999999999999999999", 1e20),
    ("null", None), ("~", None), ("12", 12), ("-7", -7), ("0o17", 15), ("0x1f", 31), ("017", 17), ("1_000", "1_000"),
    ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5), ("60ms", "60ms"), ("2026-01-01", "2026-01-01"), ('"12"', "12"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    (root,) = parse("a.yaml", f"from: {text}\n").roots
    found = plain(root)
    assert found == {"from": value}
    assert isinstance(found, dict)
    assert type(found["from"]) is type(value)


def test_a46_a_tab_is_called_a_tab() -> None:
    (problem,) = parse("tab.yaml", "a: b\nc:\n\td: 1\n").problems
    assert (problem.refusal.code, problem.refusal.found) == (Code.YAML_INVALID, "a tab")
    assert (problem.line, problem.column) == (3, 1)


def test_a_second_document_without_a_separator_is_one_problem_that_says_so() -> None:
    """Before: one for each of its four keys, each to be removed."""
    one = "apiVersion: shoal/v1\nkind: Policy\nmetadata: {name: p}\nspec: {}\n"
    (problem,) = load([("two.yaml", one + one.replace("name: p", "name: q"))]).problems
    assert (problem.line, problem.refusal.code) == (5, Code.YAML_DUPLICATE_KEY)
    assert problem.refusal.remedy == "put --- on a line of its own before it: it parts documents"
    (problem,) = load([("twice.yaml", one.replace("spec: {}", "spec: {priority: 1, priority: 2}"))]).problems
    assert problem.refusal.remedy == "remove one of the two"

"""Wrong documents through the real command line and the API: each its own code at its own place; nothing else notices.

The mistakes are those of `unit/policies/test_mistakes`; here they meet a region under load.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.builders.invalid_documents import MISTAKES, split_at_mark
from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, workload
from harness.report import record
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

STEADY = "steady"
LEAST = 25


@pytest.fixture(scope="module")
def steady(stack: DevStack) -> Iterator[DevStack]:
    """A region with one workload that has to go on as it is."""
    stack.apply(documents(policy(STEADY, on_nodes(["plain-cpu"])), workload(STEADY, "relu", STEADY)))
    stack.wait_serving(STEADY)
    yield stack
    stack.delete_workloads(STEADY)


def state(stack: DevStack) -> dict[str, Any]:
    """What a refused document must not change."""
    with stack.api() as api:
        held = {
            kind: [(one.name, one.revision, one.text) for one in api.get(kind).documents]
            for kind in ("policies", "tenants")
        }
        held["regions"] = [(one.name, one.document.revision, one.document.text) for one in api.get("regions").regions]
        held["workloads"] = [
            (view.workload.name, view.revision, view.document) for view in api.get("workloads").workloads
        ]
    # What nodes do meanwhile is their own affair.
    told = [event.sequence for event in stack.events() if not event.code.startswith("NODE_")]
    return {**held, "workers": stack.workers(), "last event": told[-1]}


def one_of_each_code() -> list[tuple[str, str, Code]]:
    """At least 25 different mistakes: the first of every code, then more."""
    first = {code: (name, text, code) for name, text, code, _ in reversed(MISTAKES)}
    rest = [(name, text, code) for name, text, code, _ in MISTAKES if first[code][0] != name]
    return [*first.values(), *rest[: max(0, LEAST - len(first))]]


def test_mistakes_are_told_apart_and_nothing_is_disturbed(steady: DevStack, tmp_path: Path) -> None:
    """One `shoal validate` of them all; 25 by `shoal apply`, each alone; all again as a client that checks nothing."""
    files: dict[str, tuple[Code, int, int]] = {}
    texts: dict[str, str] = {}
    for number, (_, text, code, _) in enumerate(MISTAKES):
        path = str(tmp_path / f"{number:03}.yaml")
        texts[path], line, column = split_at_mark(text)
        files[path] = (code, line, column)
        Path(path).write_text(texts[path])
    chosen = one_of_each_code()
    before = state(steady)
    with InferenceLoad(steady.port("gateway", "data"), steady.client_files, STEADY, clients=2) as load:
        done = steady.shoal("validate", "-o", "json", *files)
        assert done.returncode == 1
        problems = json.loads(done.stdout)["problems"]
        found = {one["document"]: (one["refusal"]["code"], one["line"], one["column"]) for one in problems}
        assert found == files
        assert len(problems) == len(files), "one problem each"
        assert all(one["refusal"]["remedy"] for one in problems if one["refusal"]["code"] != Code.FIELD_INVALID)

        for name, text, code in chosen:
            alone = tmp_path / "alone.yaml"
            content, line, column = split_at_mark(text)
            alone.write_text(content)
            refused = steady.shoal("apply", "-f", str(alone))
            assert (refused.returncode, refused.stdout) == (255, ""), name
            (told,) = refused.stderr.splitlines()
            assert told.startswith(f"{alone}:{line}:{column}: found: "), name
            assert told.endswith(f" ({code})"), name

        with steady.api() as api:
            for path, text in texts.items():
                reply = api.apply([operator_pb2.Document(name=path, text=text)])
                (problem,) = reply.problems
                assert (problem.refusal.code, problem.line, problem.column) == files[path]
                assert reply.revision == 0
        load.wait_for(20)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert state(steady) == before
    codes = {code for _, _, code in chosen}
    assert len(chosen) >= LEAST
    assert len(codes) >= 18
    record(
        "issue 3, point 6", "P", 1, mistakes=len(files), by_command_line=len(chosen), codes=len(codes),
        sent=verdict.sent, lost=verdict.lost_count,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (workload("w", "relu", "nowhere"), Code.POLICY_UNKNOWN),
        (workload("w", "relu", "", "stranger"), Code.TENANT_UNKNOWN),
        (workload("w", "nothing"), Code.MODEL_UNKNOWN),
        (workload("w", "./missing.onnx"), Code.SOURCE_UNREACHABLE),
        (workload("w", "./broken.onnx"), Code.MODEL_INVALID),
    ],
    ids=lambda value: str(value) if isinstance(value, Code) else "",
)
def test_what_only_the_region_can_know(steady: DevStack, tmp_path: Path, text: str, code: Code) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"this is no model")
    path = tmp_path / "asked.yaml"
    path.write_text(text)
    before = state(steady)
    with steady.api() as api:
        models = {(model.name, model.digest) for model in api.models()}
    for verb in ("plan", "apply"):
        refused = steady.shoal(verb, "-f", str(path))
        assert refused.returncode == 255
        assert code in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr
    assert state(steady) == before
    with steady.api() as api:
        assert {(model.name, model.digest) for model in api.models()} == models


def test_a_file_with_one_mistake_changes_nothing_of_the_rest(steady: DevStack, tmp_path: Path) -> None:
    """All or nothing: a good document beside a wrong one is not applied."""
    path = tmp_path / "asked.yaml"
    path.write_text(documents(policy("good", "  priority: 5\n"), workload("w", "relu", "nowhere")))
    before = state(steady)
    refused = steady.shoal("apply", "-f", str(path))
    assert refused.returncode == 255
    (told,) = refused.stderr.splitlines()
    assert told.startswith(f"{path}:12:11: found: ")
    assert told.endswith(f" ({Code.POLICY_UNKNOWN})")
    assert state(steady) == before

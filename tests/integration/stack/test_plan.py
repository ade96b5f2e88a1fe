"""`shoal plan`, `apply --plan` and `explain`, as a person uses them on a region that runs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cluster.stack import DevStack, documents, on_nodes, policy, workload
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

NAME = "planned"


@pytest.fixture
def file(stack: DevStack, tmp_path: Path) -> Iterator[Path]:
    """Where the test writes what it asks for; afterwards the region has nothing of it."""
    yield tmp_path / "asked.yaml"
    stack.delete_workloads(NAME)
    with stack.api() as api:
        if any(document.name == NAME for document in api.get("policies").documents):
            api.delete("policy", NAME)


def documents_for(spec: str) -> str:
    return documents(policy(NAME, spec), workload(NAME, "relu", NAME))


def hash_of(printed: str) -> str:
    (found,) = re.findall(r"^plan ([0-9a-f]{16,})$", printed, re.MULTILINE)
    return str(found)


def table_of(printed: str) -> list[str]:
    """The rows of the workload's candidates."""
    lines = iter(printed.splitlines())
    for line in lines:
        if line.startswith(f"default/{NAME} "):
            break
    assert "DEVICE" in next(lines)
    rows = []
    for line in lines:
        if not re.match(r"(CHOSEN|current)? +\S+/\S+ ", line) or line.startswith("  +"):
            break
        rows.append(line)
    return rows


def test_diff_candidates_reasons_chosen_hash_and_exit_status(stack: DevStack, file: Path) -> None:
    file.write_text(documents_for(on_nodes(["plain-cpu"])))
    first = stack.shoal("plan", "-f", str(file))
    assert first.returncode == 1, first.stderr
    assert f"+ Policy {NAME}\n" in first.stdout
    assert f"+ Workload default/{NAME}\n    spec.model.source: relu\n" in first.stdout
    assert f"default/{NAME}  1 of 1 placed  policy {NAME}\n" in first.stdout
    chosen, excluded = table_of(first.stdout)
    assert chosen.startswith("CHOSEN  plain-cpu/cpu0 ")
    assert "edge-npu/" in excluded
    assert "(emulated)" in excluded
    assert f"{Code.SELECTOR_MISMATCH} node.name = 'edge-npu'" in excluded
    assert "  + plain-cpu/cpu0 fp32" in first.stdout

    again = stack.shoal("plan", "-f", str(file))
    assert hash_of(again.stdout) == hash_of(first.stdout), "the same decisions, the same hash"
    with stack.api() as api:
        assert NAME not in {view.workload.name for view in api.get("workloads").workloads}, "a plan changes nothing"

    applied = stack.shoal("apply", "-f", str(file), "--plan", hash_of(first.stdout), "--wait")
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout.endswith("ready\n")
    assert [row.node for row in stack.wait_serving(NAME)] == ["plain-cpu"]

    after = stack.shoal("plan", "-f", str(file))
    assert (after.returncode, "nothing to do\n" in after.stdout) == (0, True), after.stdout
    assert not re.search(r"^[+~-] ", after.stdout, re.MULTILINE), "no document would change"
    drift = stack.shoal("plan", "-o", "json")
    assert drift.returncode == 0
    assert json.loads(drift.stdout)["documents"] == []

    file.write_text(documents_for("  priority: high\n"))
    wrong = stack.shoal("plan", "-f", str(file))
    assert (wrong.returncode, wrong.stdout) == (255, "")
    assert wrong.stderr.startswith(f"{file}:5:13: found: ")
    assert wrong.stderr.endswith(f" ({Code.FIELD_INVALID})\n")


def test_a_stale_plan_is_refused_and_says_what_differs(stack: DevStack, file: Path) -> None:
    """The hash covers decisions: telemetry does not make it stale, a node that is taken out does."""
    file.write_text(documents_for("  optimize: {latency: 1.0}\n"))
    shown = hash_of(stack.shoal("plan", "-f", str(file)).stdout)
    with stack.api() as api:
        chosen = next(
            candidate.node
            for each in api.plan([_document(file)]).workloads
            for candidate in each.candidates
            if each.workload.name == NAME and candidate.chosen
        )
        api.cordon(chosen, cordoned=True)
        try:
            refused = stack.shoal("apply", "-f", str(file), "--plan", shown)
        finally:
            api.cordon(chosen, cordoned=False)
        assert refused.returncode == 255
        assert refused.stderr.endswith(f" ({Code.PLAN_STALE})\n"), refused.stderr
        assert re.search(rf"^  differs: .*{chosen}", refused.stdout, re.MULTILINE), refused.stdout
        assert NAME not in {view.workload.name for view in api.get("workloads").workloads}, "nothing of it was stored"
    applied = stack.shoal("apply", "-f", str(file), "--plan", shown, "--wait")
    assert applied.returncode == 0, "as it was shown again: " + applied.stderr


UNMET = [
    ("require: {latency: {p95: 1ns}}", Code.SLO_UNREACHABLE),
    ("require: {where: \"node.name == 'nobody'\"}", Code.SELECTOR_MISMATCH),
    ("limits: {cost: 0.0001 USD/h}", Code.COST_OVER),
    ("limits: {energy: 0.000001 mJ/inference}", Code.ENERGY_OVER),
    ("require: {precision: {allow: [int8]}}", Code.PRECISION_DENIED),
    ("require: {availability: {replicas: 3, spread: node}}", Code.REPLICAS_SHORT),
    ("require: {latency: {p95: 1ns}}, limits: {cost: 0.000000001 USD/h}", Code.COST_OVER),
]
"""Of two that exclude as many places, the one that is farther from being met speaks: 50 million times the cost, and
less than a million times the latency."""


@pytest.mark.parametrize(("spec", "code"), UNMET, ids=[f"{code}-{number}" for number, (_, code) in enumerate(UNMET)])
def test_explain_names_the_cause_and_a_change_that_places_it(
    stack: DevStack, file: Path, spec: str, code: Code
) -> None:
    stated = f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {NAME}}}\nspec: {{{spec}}}\n"
    stack.apply(documents(stated, workload(NAME, "relu", NAME)))
    told = stack.shoal("explain", NAME)
    assert told.returncode == 0, told.stderr
    assert re.search(rf"^  not placed: {code} ", told.stdout, re.MULTILINE), told.stdout
    assert f"default/{NAME} is pending" in told.stdout or code is Code.REPLICAS_SHORT
    (nearest,) = re.findall(r"^  would fit: (.+)$", told.stdout, re.MULTILINE)

    changed = _with_change(yaml.safe_load(stated), nearest)
    file.write_text(documents(yaml.safe_dump(changed), workload(NAME, "relu", NAME)))
    applied = stack.shoal("apply", "-f", str(file), "--wait", "--timeout", "60")
    assert applied.returncode == 0, f"{nearest}: {applied.stdout}{applied.stderr}"
    view = stack.workload(NAME)
    assert (view.state, view.ready) == ("ready", view.wanted)
    assert not view.reason.code


def test_a_residency_rule_is_named_and_not_offered_as_what_could_give(stack: DevStack) -> None:
    stated = (
        f"apiVersion: shoal/v1\nkind: Policy\nmetadata: {{name: {NAME}}}\nspec: {{require: {{residency: [moon]}}}}\n"
    )
    stack.apply(documents(stated, workload(NAME, "relu", NAME)))
    told = stack.shoal("explain", NAME)
    assert re.search(rf"^  not placed: {Code.RESIDENCY} ", told.stdout, re.MULTILINE), told.stdout
    assert "run it in a region in moon" in told.stdout
    assert "residency: [" not in told.stdout


def _with_change(document: Any, typed: str) -> Any:
    """The policy with the change as a person would put it in: `limits` beside `require`, all else in it."""
    for line in re.split(r", (?=\w+: \{)", typed):
        for name, value in yaml.safe_load(line).items():
            place = document["spec"] if name == "limits" else document["spec"].setdefault("require", {})
            old = place.get(name)
            place[name] = {**old, **value} if isinstance(old, dict) else value
    return document


def _document(file: Path) -> operator_pb2.Document:
    return operator_pb2.Document(name=str(file), text=file.read_text())

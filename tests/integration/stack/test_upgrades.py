"""Documents that change what runs, by real processes: each change is a live move, verified; and the way back."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from harness.clients.oip import Tensor
from harness.cluster.stack import DevStack, InferenceLoad, documents, policy, workload
from harness.models import engine_cases
from harness.models.synthetic import relu
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

ENDS_S = 180.0
SHAPE = (1, 3, 48, 160)
"""Of a slice of a line of text, a little narrower than most."""


def slice_of(asked: int) -> tuple[Tensor, ...]:
    """Always the same: what differs then is the model."""
    pixels = np.random.default_rng(7).random(SHAPE, dtype=np.float32)
    return (Tensor("x", "FP32", SHAPE, pixels.tobytes()),)


def moves(stack: DevStack, name: str, *, known: frozenset[str] = frozenset()) -> list[operator_pb2.MigrationView]:
    """Those of the workload that are not known, the oldest first."""
    with stack.api() as api:
        listed = api.get("migrations").migrations
    return [one for one in listed if one.workload.name == name and one.id not in known]


def over(stack: DevStack, name: str, known: frozenset[str]) -> operator_pb2.MigrationView:
    """The next move of the workload, once it is over."""

    def view_if_over() -> operator_pb2.MigrationView | None:
        new = moves(stack, name, known=known)
        return new[0] if new and new[0].stage in ("done", "aborted") else None

    found = wait_until(view_if_over, ENDS_S, f"a move of {name} to be over", every_s=0.2)
    assert found is not None
    return found


def known_migrations(stack: DevStack, name: str) -> frozenset[str]:
    return frozenset(one.id for one in moves(stack, name))


def on(node: str, rest: str = "", tolerance: str = "") -> str:
    precision = f"\n    precision: {{{tolerance}}}" if tolerance else ""
    return f"  require:\n    where: \"node.name == '{node}'\"{precision}\n{rest}"


def reader(source: str, variant: str = "") -> str:
    variants = f", variants: [{{source: {variant}, precision: int8}}]" if variant else ""
    return workload("reader", source, "steady").replace(f"source: {source}}}", f"source: {source}{variants}}}")


class Like:
    """Equal to the bytes of an FP32 output that one of these models gives to `slice_of`."""

    def __init__(self, *models: bytes) -> None:
        (asked,) = slice_of(0)
        pixels = np.frombuffer(asked.raw, np.float32).reshape(asked.shape)
        sessions = (onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]) for model in models)
        self._right = [np.ravel(np.asarray(session.run(None, {"x": pixels})[0])) for session in sessions]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, bytes):
            return NotImplemented
        found = np.frombuffer(other, np.float32)
        return any(np.allclose(found, right, atol=1e-4) for right in self._right)

    def __hash__(self) -> int:
        return 0


@pytest.fixture
def steady(stack: DevStack) -> Iterator[DevStack]:
    """With nothing of these tests left afterwards."""
    yield stack
    stack.delete_workloads("reader", "sorter")


def reads(stack: DevStack) -> InferenceLoad:
    return InferenceLoad(
        stack.port("gateway", "data"), stack.client_files, "reader", clients=2, rate=10.0, inputs=slice_of
    )


@pytest.mark.long
def test_a_move_to_int8_is_verified_and_one_that_drifts_too_far_is_refused(steady: DevStack, tmp_path: Path) -> None:
    stack, whole = steady, engine_cases.recogniser().read_bytes()
    small = engine_cases.quantise_weights(whole, tmp_path)
    coarse = engine_cases.quantise_weights(whole, tmp_path, "MatMul", "Conv")
    for name, content in (("whole", whole), ("small", small), ("coarse", coarse)):
        stack.push(content, name)
    like = "tolerance: {metric: cosine, at_least: 0.998}"

    def allow(precision: str) -> str:
        return policy("steady", on("plain-cpu", tolerance=f"allow: [{precision}], {like}"))

    stack.apply(documents(allow("fp32"), reader("whole")))
    stack.wait_serving("reader")
    with reads(stack) as load:
        before = known_migrations(stack, "reader")
        stack.apply(documents(allow("int8"), reader("whole", "small")))
        there = over(stack, "reader", before)
        assert (there.stage, there.verdict.passed) == ("done", True), there
        assert (there.source.precision, there.target.precision) == ("fp32", "int8")
        (drift,) = there.verdict.drifts
        assert 0.998 <= drift.worst < 1
        before = known_migrations(stack, "reader")
        stack.apply(documents(allow("fp32"), reader("whole")))
        assert over(stack, "reader", before).stage == "done"
        (held,) = stack.wait_serving("reader")
        worker = stack.workers()[held.assignment.id]
        before = known_migrations(stack, "reader")
        stack.apply(documents(allow("int8"), reader("whole", "coarse")))
        refused = over(stack, "reader", before)
        assert (refused.stage, refused.reason.code) == ("aborted", Code.VERIFY_FAILED), refused
        (too_far,) = refused.verdict.drifts
        assert too_far.worst < 0.998
        load.wait_for(20)
    assert [row.assignment.id for row in stack.placements("reader") if row.routed] == [held.assignment.id]
    assert stack.workers()[held.assignment.id] == worker, "the source is untouched"
    right = Like(whole, small)
    verdict = load.verdict(lambda asked: right)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    print(f"fp32 -> int8: cosine {drift.worst:.6f}, refused {too_far.worst:.6f}; {verdict}")


@pytest.mark.long
def test_twenty_targets_that_are_wrong_on_purpose_are_refused_as_whole_moves(steady: DevStack, tmp_path: Path) -> None:
    """Each is what changed documents ask for, and pushed as any model is; the reader answers all the while."""
    stack, reasons = steady, list[str]()
    like = "allow: [fp32, int8], tolerance: {metric: max_rel, at_most: 1e-3}"
    stack.apply(policy("steady", on("plain-cpu", tolerance=like)))
    reading, sorting = engine_cases.recogniser().read_bytes(), engine_cases.magika().read_bytes()
    for name, content in (("reader", reading), ("sorter", sorting)):
        stack.push(content, f"right-{name}")
        stack.apply(workload(name, f"right-{name}", "steady"))
    held = {name: stack.wait_serving(name)[0].assignment.id for name in ("reader", "sorter")}
    workers = {name: stack.workers()[assignment] for name, assignment in held.items()}
    with reads(stack) as load:
        for name, wrongs in (
            ("reader", engine_cases.wrong_recognisers(reading, tmp_path)),
            ("sorter", engine_cases.wrong_classifiers(sorting, tmp_path)),
        ):
            for number, (what, content) in enumerate(wrongs):
                before = known_migrations(stack, name)
                stack.push(content, f"wrong-{name}-{number}")
                stack.apply(workload(name, f"wrong-{name}-{number}", "steady"))
                ended = over(stack, name, before)
                assert (ended.stage, ended.reason.code) == ("aborted", Code.VERIFY_FAILED), f"{name}, {what}: {ended}"
                reasons.append(f"{name}, {what}: {ended.verdict.reason}")
            stack.apply(workload(name, f"right-{name}", "steady"))
        load.wait_for(20)
    assert len(reasons) == 20
    for name, assignment in held.items():
        (row,) = stack.wait_serving(name)
        assert row.assignment.id == assignment
        assert stack.workers()[assignment] == workers[name], "the source is untouched"
    right = Like(reading)
    verdict = load.verdict(lambda asked: right)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    print(*reasons, sep="\n")
    print(verdict)


@pytest.mark.long
def test_an_upgrade_and_the_way_back_lose_nothing(steady: DevStack) -> None:
    """By the command line: a new version takes over by a move, and a rollback is one too, with its plan shown first."""
    stack = steady
    for name in ("v1", "v2"):
        made = relu()
        made.producer_name = name
        stack.push(made.SerializeToString(), name)
    quick = "  migration: {shift: {steps: [50%, 100%], hold: 1s}}\n"
    stack.apply(documents(policy("steady", on("plain-cpu", quick)), workload("reader", "v1", "steady")))
    (first,) = stack.wait_serving("reader")
    with InferenceLoad(stack.port("gateway", "data"), stack.client_files, "reader", clients=2) as load:
        before = known_migrations(stack, "reader")
        stack.apply(workload("reader", "v2", "steady"))
        upgraded = over(stack, "reader", before)
        assert (upgraded.stage, upgraded.cause, upgraded.verdict.passed) == ("done", "documents", True), upgraded
        planned = stack.shoal("rollback", "reader", "--dry-run")
        assert planned.returncode == 1, planned.stderr
        assert "~ Workload default/reader" in planned.stdout
        assert [one.id for one in moves(stack, "reader", known=before)] == [upgraded.id], "nothing moved for that"
        done = stack.shoal("rollback", "reader", "--plan", planned.stdout.split()[-1], "--wait")
        assert done.returncode == 0, done.stderr
        assert len(moves(stack, "reader", known=before)) == 2
        load.wait_for(10)
    (row,) = stack.wait_serving("reader")
    assert row.assignment.model == first.assignment.model
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    told = stack.shoal("history", "reader", "-o", "json")
    lines = [(one["revision"], one["repeats"], one["current"]) for one in json.loads(told.stdout) if one["pinned"]]
    assert lines == [(1, 0, False), (2, 0, False), (3, 1, True)]
    assert stack.shoal("rollback", "reader", "--to", "3", "--dry-run").returncode == 0, "nothing to do"
    assert stack.shoal("rollback", "reader", "--to", "9").returncode == 255

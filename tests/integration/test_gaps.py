"""A device that cannot hold both replicas of a move (`migration.allow_gap`), by real processes: the old one goes first,
for so long at most, and comes back where the new one does not pass in time."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from harness.cluster.stack import DevStack, InferenceLoad, documents, on_nodes, policy, region
from harness.models.synthetic import digest_of, relu
from harness.report import record
from harness.wait import wait_until
from shoal.types.codes import Code
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long, pytest.mark.alone]

NODE, PROFILE = "small-npu", "qualcomm-ai100-dm2"
SIZE = "28MiB"
"""Of the device's memory. A replica of these models is given 16 MiB and a little."""
ALLOWED_S = 20.0
ENDS_S = 90.0
INSIST_S = 60.0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """The processor beside it is what emulated devices are scaled by; nothing is placed there."""
    fleet = (("plain-cpu", ""), (NODE, f"{PROFILE}={SIZE}"))
    with region(tmp_path_factory.mktemp("small"), len(fleet), fleet=fleet) as found:
        yield found


def model(operator: str, name: str) -> bytes:
    made = relu()
    made.graph.node[0].op_type = operator
    made.producer_name = name
    return bytes(made.SerializeToString())


def apply_model(stack: DevStack, content: bytes, folder: Path, *, allow_gap: bool = True) -> None:
    """With samples whose outputs are max(x, 0): the answers that every new replica is judged by."""
    x = np.random.default_rng(1).standard_normal((8, 1, 4)).astype(np.float32)
    np.savez(folder / "right.npz", x=x, y=np.maximum(x, 0))
    gap = f", allow_gap: {ALLOWED_S:g}s" if allow_gap else ""
    spec = {"model": {"source": digest_of(content), "samples": "./right.npz"}, "policy": "tight"}
    text = documents(
        policy("tight", f"{on_nodes([NODE])}  migration: {{verify: {{against: reference}}, drain: 5s{gap}}}\n"),
        yaml.safe_dump({"apiVersion": "shoal/v1", "kind": "Workload", "metadata": {"name": "only"}, "spec": spec}),
    )
    path = folder / "tight.yaml"
    path.write_text(text)
    done = stack.shoal("apply", "-f", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def moves(stack: DevStack) -> list[operator_pb2.MigrationView]:
    with stack.api() as api:
        return list(api.get("migrations").migrations)


def over(stack: DevStack, known: set[str]) -> operator_pb2.MigrationView:
    def views_if_over() -> list[operator_pb2.MigrationView]:
        return [one for one in moves(stack) if one.id not in known and one.stage in ("done", "aborted")]

    (found,) = wait_until(views_if_over, ENDS_S, "the move to be over", every_s=0.1)
    return found


def asks(stack: DevStack) -> InferenceLoad:
    fronts = (stack.port(NODE, "data"),)
    return InferenceLoad(
        stack.port("gateway", "data"), stack.client_files, "only", clients=2, other_ports=fronts, retry_for_s=INSIST_S
    )


def test_where_both_do_not_fit_it_waits_then_the_old_one_goes_first_or_comes_back(
    small: DevStack, tmp_path: Path
) -> None:
    stack = small
    versions = {name: model("Relu", name) for name in ("v1", "v2")} | {"wrong": model("Abs", "wrong")}
    for name, content in versions.items():
        stack.push(content, name)
    apply_model(stack, versions["v1"], tmp_path, allow_gap=False)
    (first,) = stack.wait_serving("only")
    worker = stack.workers()[first.assignment.id]

    with asks(stack) as load:
        at = load.now()
        apply_model(stack, versions["v2"], tmp_path, allow_gap=False)
        lacks = wait_until(lambda: str(stack.workload("only").reason), ENDS_S, "what lacks to be said")
        assert Code.MEMORY_SHORT in lacks
        load.wait_for(20)
        assert stack.workers() == {first.assignment.id: worker}
        assert (moves(stack), load.failed_attempts) == ([], []), "without leave nobody is ever in the dark"

        apply_model(stack, versions["v2"], tmp_path)
        there = over(stack, set())
        load.wait_for(20)
        dark_s, asked_again = load.longest_gap_s(at), len(load.failed_attempts)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert (there.stage, there.cause, there.verdict.passed, there.verdict.against) == (
        "done", "documents", True, "reference",
    ), there  # fmt: skip
    stages = [one.stage for one in there.stages]
    assert stages.index("clearing") < stages.index("verifying") < stages.index("draining"), stages
    assert 0 < there.gap_s <= ALLOWED_S
    assert any(f"{there.gap_s:.1f} s" in one.note for one in there.stages), "the gap is told in the story"
    assert any(f"at most {ALLOWED_S:g} s" in one.note for one in there.stages)
    assert dark_s <= ALLOWED_S
    (second,) = stack.wait_serving("only")
    assert second.assignment.model == digest_of(versions["v2"])

    with asks(stack) as load:
        at = load.now()
        apply_model(stack, versions["wrong"], tmp_path)
        refused = over(stack, {there.id})
        (back,) = stack.wait_serving("only")
        load.wait_for(20)
        back_s = load.longest_gap_s(at)
    verdict = load.verdict()
    assert (verdict.lost_count, verdict.violations) == (0, ()), str(verdict)
    assert (refused.stage, refused.reason.code) == ("aborted", Code.VERIFY_FAILED), refused
    assert "returning" in [one.stage for one in refused.stages]
    assert 0 < refused.gap_s <= ALLOWED_S
    assert back_s <= ALLOWED_S
    assert (back.assignment.id, back.assignment.model) == (second.assignment.id, digest_of(versions["v2"]))
    record(
        "gaps", "P", 2, allowed_s=ALLOWED_S, gap_s=round(there.gap_s, 2), dark_s=round(dark_s, 2),
        refused_gap_s=round(refused.gap_s, 2), back_s=round(back_s, 2), asked_again=asked_again, lost=0,
    )  # fmt: skip

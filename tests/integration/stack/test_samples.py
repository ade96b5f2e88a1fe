"""A workload's own samples by real processes: pushed by `shoal apply`, fetched by what is to be verified with them."""

import numpy as np
import pytest
import yaml

from harness.cluster.stack import DevStack, documents, policy
from harness.models.synthetic import digest_of, relu
from harness.wait import wait_until
from shoal.v1 import operator_pb2

pytestmark = [pytest.mark.long]

NODES = ("plain-cpu", "edge-npu")
ENDS_S = 60.0


def apply_with_samples(stack: DevStack, name: str, verify: str, **arrays: np.typing.NDArray[np.float32]) -> None:
    """By the command line: the model is here already, its samples are a file."""
    samples = stack.folder / f"{name}.npz"
    np.savez(samples, **arrays)  # type: ignore[arg-type]
    where = f"  require: {{where: \"node.name in ['{NODES[0]}', '{NODES[1]}']\"}}\n"
    text = documents(
        policy(name, f"{where}  migration: {{verify: {{{verify}}}}}\n"),
        yaml.safe_dump(
            {
                "apiVersion": "shoal/v1",
                "kind": "Workload",
                "metadata": {"name": name},
                "spec": {"model": {"source": digest_of(relu().SerializeToString()), "samples": f"./{name}.npz"},
                         "policy": name},
            }
        ),
    )  # fmt: skip
    path = stack.folder / f"{name}.yaml"
    path.write_text(text)
    done = stack.shoal("apply", "-f", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def migrate_to_other(stack: DevStack, name: str) -> operator_pb2.MigrationView:
    (placed,) = stack.wait_serving(name)
    return stack.migrate(name, NODES[1 - NODES.index(placed.node)])


def test_moves_are_verified_with_the_workloads_own_samples(stack: DevStack) -> None:
    x = np.random.default_rng(1).standard_normal((12, 1, 4)).astype(np.float32)
    apply_with_samples(stack, "sampled", "inputs: samples, samples: 12", x=x)
    done = migrate_to_other(stack, "sampled")
    assert (done.stage, done.verdict.passed) == ("done", True), done
    assert (done.verdict.against, done.verdict.inputs, done.verdict.samples) == ("source", "samples", 12)
    stack.delete_workloads("sampled")


def test_what_does_not_answer_as_the_samples_say_takes_no_request(stack: DevStack) -> None:
    x = np.random.default_rng(2).standard_normal((8, 1, 4)).astype(np.float32)
    apply_with_samples(stack, "referred", "against: reference", x=x, y=np.maximum(x, 0))
    done = migrate_to_other(stack, "referred")
    assert (done.stage, done.verdict.against, done.verdict.inputs) == ("done", "reference", "samples"), done
    stack.delete_workloads("referred")
    last = stack.events()[-1].sequence
    apply_with_samples(stack, "wrong", "against: reference", x=x, y=np.maximum(x, 0) + 1)

    def is_refused() -> bool:
        with stack.api() as api:
            return any(event.code == "VERIFY_FAILED" and event.workload.name == "wrong" for event in api.events(last))

    wait_until(is_refused, ENDS_S, "the verdict to be told")
    assert stack.workload("wrong").state != "ready"
    stack.delete_workloads("wrong")

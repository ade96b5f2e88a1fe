"""Samples that came with `shoal model push --samples` warm up a model that no device has tried yet."""

from pathlib import Path

import numpy as np
from onnx import ModelProto, helper

from harness.cluster.stack import DevStack, documents, policy, workload
from harness.models.synthetic import FLOAT, INT64, digest_of, model, tensor
from harness.wait import wait_until

WAIT_TIMEOUT_S = 60.0
ON_CPU = "  require: {where: \"node.name == 'plain-cpu'\"}\n"


def stubborn(producer: str) -> ModelProto:
    """y is x in a new shape, 64 times what a float input says: nothing in the graph tells which. producer: makes it a
    model of its own."""
    made = model(
        [
            helper.make_node("Mul", ["rate", "scale"], ["scaled"]),
            helper.make_node("Cast", ["scaled"], ["n"], to=INT64),
            helper.make_node("Reshape", ["x", "n"], ["y"]),
        ],
        [tensor("x", [2, 3]), tensor("rate", [3])],
        [tensor("y", None)],
        [helper.make_tensor("scale", FLOAT, [1], [64.0])],
    )
    made.producer_name = producer
    return made


def push_model(stack: DevStack, name: str, folder: Path, *arguments: str) -> str:
    """By the command line; its digest."""
    path = folder / f"{name}.onnx"
    path.write_bytes(stubborn(name).SerializeToString())
    done = stack.shoal("model", "push", str(path), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return digest_of(path.read_bytes())


def test_a_model_that_no_device_tried_warms_up_with_the_samples_pushed_with_it(stack: DevStack, tmp_path: Path) -> None:
    """One of two models that differ in nothing but their producer; the other has none, and does not warm up."""
    samples = tmp_path / "line.npz"
    shapes = np.array([[3, 2, 1], [1, 6, 1]] * 4, np.float32)
    np.savez(samples, x=np.ones((8, 2, 3), np.float32), rate=shapes / 64)
    plain = push_model(stack, "without", tmp_path)
    sampled = push_model(stack, "sampled", tmp_path, "--samples", str(samples))
    last = stack.events()[-1].sequence
    stack.apply(
        documents(
            policy("on-cpu", ON_CPU),
            workload("without", plain, "on-cpu"),
            workload("sampled", sampled, "on-cpu"),
        )
    )
    try:
        (placed,) = stack.wait_serving("sampled")
        assert placed.observed.phase == "ready"
        assert placed.observed.measured.samples > 0, "it was run"
        assert "warm-up" not in placed.observed.reason, "not admitted without one"

        def has_warm_up_failed() -> bool:
            codes = {(event.workload.name, event.code) for event in stack.events(last)}
            assert ("sampled", "WARMUP_FAILED") not in codes
            return ("without", "WARMUP_FAILED") in codes

        wait_until(has_warm_up_failed, WAIT_TIMEOUT_S, "the other one to fail its warm-up")
    finally:
        stack.delete_workloads("sampled", "without")


def test_a_push_says_the_name_that_it_was_given(stack: DevStack, tmp_path: Path) -> None:
    """Also where the model is there under another."""
    digest = push_model(stack, "first", tmp_path, "--shape", "rate=3")
    done = stack.shoal("model", "push", str(tmp_path / "first.onnx"), "--name", "second")
    assert done.stdout.startswith(f"second  {digest}  (was there)"), done.stdout + done.stderr

"""A model in fp32 moves to a device that computes fp16 faster, in fp16 that is made on the way, live."""

from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest

from harness.clients.oip import Tensor
from harness.cluster import devices
from harness.cluster.stack import DevStack, InferenceLoad
from harness.models.architectures import separable
from harness.report import record
from harness.wait import wait_until
from shoal.devstack.layout import StackOptions
from shoal.types.codes import Code

NAME, HERE, THERE = "halved", "plain-cpu", "small-cpu"
SHAPE = (1, 8, 16, 16)
NEAR = 1e-2
"""Answers are below 1, and their weights have 11 bits."""
ENDS_S = 90.0


def pixels(asked: int) -> tuple[Tensor, ...]:
    values = np.random.default_rng(asked).random(SHAPE, dtype=np.float32)
    return (Tensor("x", "FP32", SHAPE, values.tobytes()),)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """This processor, and an emulated one whose figures say that it computes fp16 faster."""
    found = DevStack(tmp_path_factory.mktemp("fp16"))
    try:
        found.up(StackOptions(agents=2, fleet=((HERE, ""), (THERE, "rk3588s"))))
        yield found
    finally:
        found.down()


def test_a_model_without_samples_is_made_in_fp16_on_its_way(stack: DevStack) -> None:
    model = onnx.load_from_string(separable())
    model.producer_name = NAME  # what was measured of it elsewhere in fp32 would be compared with an estimate
    right = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    stack.push(model.SerializeToString(), NAME)
    with stack.api() as api:
        (device,) = (one.device.name for one in api.get("devices").devices if one.node == THERE)
    near_enough, fp16 = f"metric: max_abs, at_most: {NEAR}", "allow: [fp32, fp16], prepare: true"
    shapes = {"x": SHAPE}
    stack.apply(devices.document(NAME, NAME, shapes, f"node.name == '{HERE}'", near_enough))
    (row,) = stack.wait_serving(NAME)
    assert row.assignment.precision == "fp32"
    stack.apply(devices.document(NAME, NAME, shapes, f"node.name in ['{HERE}', '{THERE}']", near_enough, fp16))
    told = stack.shoal("can-move", NAME, "--to", f"{THERE}/{device}")
    assert "with prepare: fp16, never done there" in told.stdout, told.stdout + told.stderr
    with InferenceLoad(
        stack.port("gateway", "data"), stack.client_files, NAME, clients=2, rate=10.0, inputs=pixels
    ) as load:
        moved = devices.move(stack, NAME, f"{THERE}/{device}", ENDS_S)
        assert (moved.stage, moved.verdict.passed, moved.target.precision) == ("done", True, "fp16"), moved
        (row,) = stack.wait_serving(NAME)
        assert (row.node, row.assignment.precision) == (THERE, "fp16")
        assert "fp16: y max_abs" in row.observed.reason
        assert "over 8 generated inputs" in row.observed.reason
        load.wait_for(10)
        back = devices.move(stack, NAME, f"{HERE}/cpu0", ENDS_S)
        assert (back.stage, back.verdict.passed) == ("done", True), back
        load.wait_for(10)

    def near(asked: object) -> devices.Near:
        assert isinstance(asked, int)
        (tensor,) = pixels(asked)
        values = np.frombuffer(tensor.raw, np.float32).reshape(SHAPE)
        return devices.Near(np.asarray(right.run(None, {"x": values})[0]), NEAR)

    verdict = load.verdict(near)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    drift = max(each.worst for each in moved.verdict.drifts)
    assert 0 < drift <= NEAR
    too_near = devices.document(NAME, NAME, shapes, f"node.name == '{THERE}'", "metric: max_abs, at_most: 1e-7", fp16)
    only_fp16 = too_near.replace("allow: [fp32, fp16]", "allow: [fp16]")
    stack.apply(only_fp16)
    wait_until(lambda: Code.PREPARE_FAILED in stack.shoal("explain", NAME).stdout, ENDS_S, "fp16 to be found too far")
    stack.apply(only_fp16.replace("at_most: 1e-7", f"at_most: {NEAR}"))
    wait_until(
        lambda: [(each.node, each.assignment.precision) for each in stack.placements(NAME)] == [(THERE, "fp16")],
        ENDS_S,
        "a wider tolerance to have it made again",
    )
    stack.delete_workloads(NAME)
    record("F52", "P", 1, moves=2, lost=0, answered=load.answer_count(), drift=drift, precision="fp16")

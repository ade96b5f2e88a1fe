"""Providers of several vendors on one machine: models are placed on them or refused with the reason, and move live
from one to another, verified.

Qualcomm's NPU is the vendor's simulator: its answers are the chip's, its times are not.
"""

import platform
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import onnx
import onnxruntime
import pytest

from harness.clients.oip import Tensor
from harness.cluster import devices
from harness.cluster.stack import DevStack, InferenceLoad
from harness.models import engine_cases
from harness.models.architectures import ARCHITECTURES, angles, separable
from harness.report import record
from harness.wait import wait_until
from shoal.devstack import ocr
from shoal.devstack.layout import StackOptions
from shoal.types.codes import Code

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="no plugin is installed for this processor"),
    pytest.mark.alone,
]
NODE, NPU, CPU = "plain-cpu", "htp-sim", "cpu0"
ENDS_S = 120.0
MAGIKA = {"bytes": (1, 2048)}
SOURCE_OF_MAGIKA = f"source: magika, shapes: {{bytes: {list(MAGIKA['bytes'])}}}"
SHAPE = (1, 8, 16, 16)
ON_PROCESSOR = onnxruntime.InferenceSession(separable(), providers=["CPUExecutionProvider"])
NEAR = 2e-2
"""The NPU computes in fp16. Answers here are below 1, and differ by 3e-4."""
EXACT = "metric: max_abs, at_most: 1e-7"
"""No answer in fp16 is. By how much Magika's differ depends on the machine that simulates the NPU: 0.29, or hardly."""
NEAR_IN_INT8 = 8e-2
"""256 steps for a weight. Of the first 4,000 inputs of a load the worst, number 1120, is off by 0.053; the median by
0.004."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevStack]:
    """One node with all providers that are installed here."""
    stack = DevStack(tmp_path_factory.mktemp("providers"))
    try:
        stack.up(StackOptions(agents=1, simulate="htp"))
        yield stack
    finally:
        stack.down()


def document(
    name: str,
    shapes: Mapping[str, tuple[int, ...]] | None,
    device: str,
    tolerance: str = "",
    allow: str = "allow: [fp32]",
) -> str:
    """A workload of the model of that name, on that device."""
    return devices.document(name, name, shapes or {}, device, tolerance, allow)


def outcome_of(stack: DevStack, name: str) -> tuple[str, str]:
    return devices.outcome_of(stack, name, (Code.OP_UNSUPPORTED, Code.SHAPES_OPEN, Code.DRIFT_OVER), ENDS_S)


def test_each_model_is_placed_on_the_npu_or_refused_with_its_operator(machine: DevStack) -> None:
    with machine.api() as api:
        rows = {one.device.name: one for one in api.get("devices").devices}
    assert {CPU, NPU} <= rows.keys()
    npu = rows[NPU].device
    assert (npu.kind, npu.provider, npu.simulated, npu.emulated) == ("npu", "QNNExecutionProvider", True, True)
    assert "simulated" in npu.model

    models = {name: (make(), shapes) for name, (make, shapes) in ARCHITECTURES.items()}
    models["magika"] = engine_cases.magika().read_bytes(), MAGIKA
    models["classifier"] = ocr.files().classifier.read_bytes(), {"x": (1, 3, 48, 192)}
    refusals = {"angles": (Code.OP_UNSUPPORTED, "Acos"), "magika": (Code.DRIFT_OVER, "target_label: max_abs")}
    placed, refused = 0, 0
    for name, (content, shapes) in models.items():
        machine.push(content, name)
        machine.apply(document(name, shapes, f"device.name == '{NPU}'", EXACT if name == "magika" else ""))
    for name in models:
        device, reason = outcome_of(machine, name)
        if name in refusals:
            assert all(each in reason for each in refusals[name]), reason
            refused += 1
        else:
            assert (device, reason) == (NPU, ""), name
            (row,) = machine.placements(name)
            assert "from the processor's, over " in row.observed.reason, row.observed.reason
            placed += 1
    machine.delete_workloads(*models)
    with machine.api() as api:
        receipt = next(one.receipt for one in api.get("devices").devices if one.device.name == NPU)
    assert {"Conv", "Gemm", "LayerNormalization"} <= set(receipt.operators)
    assert "Acos" not in receipt.operators

    machine.apply(document("separable", None, f"device.name == '{NPU}'"))
    assert Code.SHAPES_OPEN in outcome_of(machine, "separable")[1], "its batch axis is open"
    machine.delete_workloads("separable")
    record("F52", "P", 1, placed=placed, refused=refused + 1, device=f"{NPU} (simulated)")


def test_a_model_whose_first_answers_differ_is_placed_elsewhere(machine: DevStack) -> None:
    """The NPU computes it in fp16. That was found by another workload."""
    machine.push(engine_cases.magika().read_bytes(), "magika")
    machine.apply(
        document("kinds", None, "device.kind in ['cpu', 'npu']", EXACT).replace("source: kinds", SOURCE_OF_MAGIKA)
    )
    assert outcome_of(machine, "kinds")[0] == CPU
    for told in (machine.shoal("explain", "kinds"), machine.shoal("can-move", "kinds", "--to", f"{NODE}/{NPU}")):
        assert Code.DRIFT_OVER in told.stdout, told.stdout
        assert "target_label: max_abs" in told.stdout
    machine.delete_workloads("kinds")


def test_a_wider_tolerance_lets_a_model_in(machine: DevStack) -> None:
    name = "judged"
    model = onnx.load_from_string(separable())
    model.producer_name = name
    machine.push(model.SerializeToString(), name)
    here = f"device.name == '{NPU}'"
    machine.apply(document(name, {"x": SHAPE}, here, "metric: max_abs, at_most: 1e-7"))
    device, reason = outcome_of(machine, name)
    assert (device, Code.DRIFT_OVER in reason) == ("", True)
    assert "at most 1e-07" in reason
    machine.apply(document(name, {"x": SHAPE}, here, f"metric: max_abs, at_most: {NEAR}"))
    (row,) = machine.wait_serving(name)
    assert row.assignment.device == NPU
    assert "y max_abs " in row.observed.reason
    assert machine.log_lines(NODE, "compiled_model_rejected") == [], "what was compiled is not at fault"
    machine.delete_workloads(name)


def test_devices_are_measured_again_by_an_operators_word(machine: DevStack) -> None:
    def receipt_times() -> dict[str, float]:
        with machine.api() as api:
            return {row.device.name: row.receipt.measured_at for row in api.get("devices").devices}

    before = receipt_times()
    told = machine.shoal("node", "measure", NODE, CPU)
    assert told.returncode == 0, told.stderr
    assert f"{NODE}/{CPU}" in told.stdout
    after = receipt_times()
    assert (after[CPU] > before[CPU], after[NPU] == before[NPU]) == (True, True)
    refused = machine.shoal("node", "measure", NODE, "gpu7")
    assert "DEVICE_LOST" in refused.stderr


def pixels(asked: int) -> tuple[Tensor, ...]:
    values = np.random.default_rng(asked).random(SHAPE, dtype=np.float32)
    return (Tensor("x", "FP32", SHAPE, values.tobytes()),)


def near(asked: Hashable, at_most: float = NEAR) -> devices.Near:
    """What the processor answers, or near it."""
    assert isinstance(asked, int)
    (tensor,) = pixels(asked)
    values = np.frombuffer(tensor.raw, np.float32).reshape(SHAPE)
    return devices.Near(np.asarray(ON_PROCESSOR.run(None, {"x": values})[0]), at_most)


def test_a_model_moves_live_between_vendors_and_back(machine: DevStack) -> None:
    """From the processor to every other device here and back, under load; and a move whose answers differ by more than
    the policy allows is refused."""
    name = "mover"
    machine.push(separable(), name)
    shapes = {"x": SHAPE}
    with machine.api() as api:
        others = sorted({one.device.name for one in api.get("devices").devices} - {CPU})
    anywhere = "device.kind in ['cpu', 'npu']"
    machine.apply(document(name, shapes, f"device.name == '{CPU}'", f"metric: max_abs, at_most: {NEAR}"))
    machine.wait_serving(name)
    machine.apply(document(name, shapes, anywhere, f"metric: max_abs, at_most: {NEAR}"))
    drifts = dict[str, float]()
    with InferenceLoad(
        machine.port("gateway", "data"), machine.client_files, name, clients=2, rate=10.0, inputs=pixels
    ) as load:
        for device in (*others, CPU):
            moved = devices.move(machine, name, f"{NODE}/{device}", ENDS_S)
            assert (moved.stage, moved.verdict.passed) == ("done", True), moved
            assert moved.target.stand_in == ("simulated" if device == NPU else "")
            (row,) = machine.wait_serving(name)
            assert row.assignment.device == device
            drifts[device] = max(drift.worst for drift in moved.verdict.drifts)
            load.wait_for(10)
        assert 0 < drifts[NPU] <= NEAR, "another arithmetic: other roundings"
        machine.apply(document(name, shapes, anywhere, "metric: max_abs, at_most: 1e-7"))
        refused = devices.move(machine, name, f"{NODE}/{NPU}", ENDS_S)
        assert (refused.stage, refused.verdict.code) == ("aborted", Code.VERIFY_FAILED), refused
        load.wait_for(10)
    verdict = load.verdict(near)
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    (row,) = machine.wait_serving(name)
    assert row.assignment.device == CPU
    machine.delete_workloads(name)
    record("F52", "P", 2, moves=len(drifts), lost=0, refused=1, answered=load.answer_count(), drift=drifts[NPU])


def test_a_model_is_quantised_on_its_way_to_the_npu(machine: DevStack) -> None:
    """An fp32 model with samples moves to the NPU in int8 by itself, live, since that is faster there by the figures
    published of it; and a tolerance that no int8 model meets keeps it from there."""
    name, anywhere = "quantised", "device.kind in ['cpu', 'npu']"
    samples = machine.folder / "pixels.npz"
    np.savez(samples, x=np.random.default_rng(1).random((16, *SHAPE[1:]), dtype=np.float32))
    model = machine.folder / f"{name}.onnx"
    unmeasured = onnx.load_from_string(separable())  # what was measured here in fp32 would be compared with an estimate
    unmeasured.producer_name = name
    model.write_bytes(unmeasured.SerializeToString())
    pushed = machine.shoal("model", "push", str(model), "--name", name, "--samples", str(samples))
    assert pushed.returncode == 0, pushed.stderr
    int8 = "allow: [fp32, int8], prepare: true"
    near_enough = f"metric: max_abs, at_most: {NEAR_IN_INT8}"
    machine.apply(document(name, {"x": SHAPE}, f"device.name == '{CPU}'", near_enough))
    machine.wait_serving(name)
    machine.apply(document(name, {"x": SHAPE}, anywhere, near_enough, int8))
    told = machine.shoal("can-move", name, "--to", f"{NODE}/{NPU}")
    assert "with prepare: int8 of 16 samples, never done there" in told.stdout, told.stdout + told.stderr
    with InferenceLoad(
        machine.port("gateway", "data"), machine.client_files, name, clients=2, rate=10.0, inputs=pixels
    ) as load:
        moved = devices.move(machine, name, f"{NODE}/{NPU}", ENDS_S)
        assert (moved.stage, moved.verdict.passed, moved.target.precision) == ("done", True, "int8"), moved
        (row,) = machine.wait_serving(name)
        assert (row.assignment.device, row.assignment.precision) == (NPU, "int8")
        assert "int8, activations in " in row.observed.reason
        assert row.observed.measured.prepare_s > 0
        load.wait_for(10)
        back = devices.move(machine, name, f"{NODE}/{CPU}", ENDS_S)
        assert (back.stage, back.verdict.passed) == ("done", True), back
        load.wait_for(10)
    verdict = load.verdict(lambda asked: near(asked, NEAR_IN_INT8))
    assert (verdict.lost_count, verdict.violations) == (0, ()), verdict
    drift = max(each.worst for each in moved.verdict.drifts)
    machine.apply(document(name, {"x": SHAPE}, f"device.name == '{NPU}'", "metric: max_abs, at_most: 1e-7", int8))
    wait_until(
        lambda: Code.PREPARE_FAILED in machine.shoal("explain", name).stdout, ENDS_S, "the bound to be found too close"
    )
    machine.delete_workloads(name)
    record("F52", "P", 3, moves=2, lost=0, answered=load.answer_count(), drift=drift, precision="int8")


def test_a_model_is_compiled_for_the_npu_once(machine: DevStack) -> None:
    """The next replica of it there loads what was compiled."""
    name = "compiled"
    model = onnx.load_from_string(separable())
    model.producer_name = name
    machine.push(model.SerializeToString(), name)
    placed = document(name, {"x": SHAPE}, f"device.name == '{NPU}'")
    machine.apply(placed)
    (row,) = machine.wait_serving(name)
    before = [each for each in machine.log_lines(NODE, "model_prepared") if each["compiled"]]
    (made,) = [each for each in before if each["assignment"] == row.assignment.id]
    assert row.observed.measured.load_s < made["duration_s"]
    machine.delete_workloads(name)
    machine.apply(placed)
    (again,) = machine.wait_serving(name)
    assert again.assignment.id != row.assignment.id
    after = [each for each in machine.log_lines(NODE, "model_prepared") if each["compiled"]]
    assert after == before
    machine.delete_workloads(name)

    # What a worker cannot load is loaded as it was pushed.
    (kept,) = machine.folder.rglob(f"*{made['digest'].removeprefix('sha256:')}")
    kept.write_bytes(bytes(kept.stat().st_size))
    machine.apply(placed)
    machine.wait_serving(name)
    rejected = [each["digest"] for each in machine.log_lines(NODE, "compiled_model_rejected")]
    assert rejected == [made["digest"]]
    machine.delete_workloads(name)
    record("F52", "P", 4, compiled_s=made["duration_s"], load_s=round(again.observed.measured.load_s, 3))


def test_an_operator_that_the_npu_lacks_stays_on_the_processor(machine: DevStack) -> None:
    """A model that two devices could take goes to the one that takes all of it, and says why not to the other."""
    machine.push(angles(), "either")
    machine.apply(document("either", {"x": (1, 8)}, "device.kind in ['cpu', 'npu']"))
    assert outcome_of(machine, "either")[0] == CPU
    told = machine.shoal("explain", "either")
    assert "OP_UNSUPPORTED" in told.stdout
    machine.delete_workloads("either")


def test_a_share_beside_the_npu_is_what_the_policy_allows(machine: DevStack) -> None:
    """One of its three operators, all alike in cost, is left to the processor: a third of its FLOPs."""
    machine.push(angles(), "part")
    text = document("part", {"x": (1, 8)}, f"device.name == '{NPU}'")
    machine.apply(text.replace("  require:\n", "  require:\n    partial: 10%\n"))
    device, reason = outcome_of(machine, "part")
    assert device == "", "a third is more than a tenth"
    assert "at most 10.0%" in reason
    machine.apply(text.replace("  require:\n", "  require:\n    partial: 60%\n"))
    (row,) = machine.wait_serving("part")
    assert "partial: " in row.observed.reason
    assert "Acos" in row.observed.reason
    machine.delete_workloads("part")

"""Models of strangers on every provider that is installed here: `shoal bench providers`.

One node with the processor, each device of a plugin provider, and Qualcomm's simulator of its NPU, whose answers are
the chip's and whose times are not. Every model is placed on each device, or refused with its reason. Then each model of
MOVED moves live from the processor over all other devices and back, under load, and every answer is compared with ONNX
Runtime's in this process: as it was pushed, and once more in int8 on the other devices, made of samples on the way. A
move is asked too whose answers differ by more than the policy allows.

The last line is one JSON object: devices real and simulated; models placed and refused, each counted once for each
device; moves done; requests lost; answers wrong.
"""

import json
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime
from _machine import machine_line

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.clients.oip import Tensor
from harness.cluster.devices import Near, Shapes, document, move, next_move, outcome_of
from harness.cluster.stack import DevStack, InferenceLoad
from harness.models import engine_cases
from harness.models.architectures import ARCHITECTURES
from shoal.cli.render.resources import device_name, device_stand_in
from shoal.devstack.layout import StackOptions, installed_simulators
from shoal.types.codes import Code

NODE: Final = "plain-cpu"
PROCESSOR: Final = "cpu0"
ENDS_S: Final = 240.0
"""The simulator takes ten seconds for one run of the recogniser."""
NEAR: Final = 2e-2
"""What the policy of the moves allows (max_abs). All outputs are shares of 1, or below 10."""
NEAR_IN_INT8: Final = 0.1
"""The same where int8 is allowed, which is up to 0.06 off on these inputs: noise, of which a quantised model is least
sure."""
AS_PUSHED: Final = "allow: [fp32]"
INT8: Final = "allow: [int8], prepare: true"
MOVED: Final[Mapping[str, tuple[int, ...]]] = {"separable": (1, 8, 16, 16), "angle-classifier": (1, 3, 48, 192)}
REFUSALS: Final = (
    Code.OP_UNSUPPORTED, Code.SHAPES_OPEN, Code.LOAD_FAILED, Code.PRECISION_DENIED, Code.DRIFT_OVER
)  # fmt: skip


def models() -> dict[str, tuple[bytes, Shapes]]:
    """By name: the model, and the shapes that its workload serves."""
    found: dict[str, tuple[bytes, Shapes]] = {
        "angle-classifier": (
            engine_cases.packaged_model("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx").read_bytes(),
            {"x": (1, 3, 48, 192)},
        ),
        "recogniser": (engine_cases.recogniser().read_bytes(), {"x": (1, 3, 48, 160)}),
        "magika": (engine_cases.magika().read_bytes(), {"bytes": (1, 2048)}),
    }
    return found | {name: (make(), shapes) for name, (make, shapes) in ARCHITECTURES.items()}


def tolerance(at_most: float) -> str:
    return f"metric: max_abs, at_most: {at_most:g}"


def place_all(stack: DevStack, devices: list[str]) -> tuple[int, int]:
    placed = refused = 0
    for device in devices:
        for model, (content, shapes) in models().items():
            name = f"{model}-on-{device}"
            if device == devices[0]:
                stack.push(content, model)
            began = time.monotonic()
            stack.apply(document(name, model, shapes, f"device.name == '{device}'", tolerance(NEAR)))
            _, why = outcome_of(stack, name, REFUSALS, ENDS_S)
            placed, refused = placed + (not why), refused + bool(why)
            print(f"{model:17} {device:14} {why[:110] or f'serves after {time.monotonic() - began:.1f} s'}", flush=True)
            stack.delete_workloads(name)
    return placed, refused


def values_of(asked: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(asked % 2**32).random(shape, dtype=np.float32)


def push_samples(stack: DevStack, model: str, shape: tuple[int, ...]) -> None:
    path = stack.folder / f"{model}.npz"
    np.savez(path, x=np.concatenate([values_of(-1 - each, shape) for each in range(32)]))
    with stack.api() as api:
        api.push_samples(path, model)


def move_all(stack: DevStack, model: str, others: list[str], allow: str, near: float) -> tuple[int, int, int]:
    """(moves done, requests lost, answers wrong)."""
    content, shapes = models()[model]
    (shape,) = shapes.values()
    anywhere = "device.kind in ['cpu', 'npu', 'gpu']"
    stack.apply(document("mover", model, shapes, f"device.name == '{PROCESSOR}'", tolerance(near)))
    stack.wait_serving("mover")
    if allow == AS_PUSHED:
        stack.apply(document("mover", model, shapes, anywhere, tolerance(near)))
    done = 0

    def inputs(asked: int) -> tuple[Tensor, ...]:
        return (Tensor("x", "FP32", shape, values_of(asked, shape).tobytes()),)

    port, files = stack.port("gateway", "data"), stack.client_files
    with InferenceLoad(port, files, "mover", clients=2, rate=10.0, inputs=inputs) as load:
        with stack.api() as api:
            seen = {each.id for each in api.get("migrations").migrations}
        for device in (*others, PROCESSOR):
            if allow == AS_PUSHED:
                moved = move(stack, "mover", f"{NODE}/{device}", ENDS_S)
            else:  # in int8 on the other devices, and back in fp32
                there = AS_PUSHED if device == PROCESSOR else allow
                stack.apply(document("mover", model, shapes, f"device.name == '{device}'", tolerance(near), there))
                moved = next_move(stack, "mover", seen, ENDS_S)
                seen.add(moved.id)
            worst = ", ".join(f"{each.metric} {each.worst:.2e}" for each in moved.verdict.drifts)
            took_s = moved.stages[-1].at - moved.stages[0].at
            runs = f"{moved.target.precision} {moved.stage}"
            print(f"{model:17} to {device:11} {runs}, {worst}, {took_s:.1f} s", flush=True)
            done += moved.stage == "done"
            load.wait_for(4)
        if others and allow == AS_PUSHED:
            stack.apply(document("mover", model, shapes, anywhere, tolerance(1e-9), allow))
            strict = move(stack, "mover", f"{NODE}/{others[-1]}", ENDS_S)
            print(f"{model:17} to {others[-1]:11} {strict.stage}: {strict.verdict.code}", flush=True)
            assert strict.verdict.code == Code.VERIFY_FAILED, strict
        load.wait_for(4)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def answer(asked: Hashable) -> Near:
        assert isinstance(asked, int)
        return Near(np.asarray(session.run(None, {"x": values_of(asked, shape)})[0]), near)

    verdict = load.verdict(answer)
    stack.delete_workloads("mover")
    return done, verdict.lost_count, len(verdict.violations)


def main() -> None:
    print(machine_line())
    with tempfile.TemporaryDirectory() as folder:
        stack = DevStack(Path(folder))
        try:
            stack.up(StackOptions(agents=1, simulate=installed_simulators()))
            with stack.api() as api:
                rows = api.get("devices").devices
            for row in rows:
                print(
                    f"{device_name('', row.device.name, device_stand_in(row.device))[1:]}: {row.device.runtime_version}"
                )
            devices = sorted((row.device.name for row in rows), key=lambda name: (name != PROCESSOR, name))
            simulated = sum(row.device.simulated for row in rows)
            placed, refused = place_all(stack, devices)
            moves = lost = wrong = 0
            for model, shape in MOVED.items():
                push_samples(stack, model, shape)
                for allow, near in ((AS_PUSHED, NEAR), (INT8, NEAR_IN_INT8)):
                    counts = move_all(stack, model, devices[1:], allow, near)
                    moves, lost, wrong = moves + counts[0], lost + counts[1], wrong + counts[2]
        finally:
            stack.down()
    real = len(devices) - simulated
    counts_by_name = {"real": real, "simulated": simulated, "placed": placed, "refused": refused}
    print(json.dumps({**counts_by_name, "moves": moves, "lost": lost, "wrong": wrong}))


if __name__ == "__main__":
    main()

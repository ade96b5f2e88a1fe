"""What a runtime says that it loads, and by which code it refuses what it does not load, whatever it says."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # pyright: ignore

from harness.models.synthetic import FLOAT, digest_of, model, relu, tensor
from shoal.agent.packing import pack, unpack
from shoal.agent.worker.engine import open_engine
from shoal.agent.worker.providers import Provider
from shoal.agent.worker.support import runtime_support
from shoal.coordinator.core.graph import profile_of
from shoal.coordinator.core.placement.loadable import load_refusal
from shoal.types.codes import Code, Refusal, ShoalError
from shoal.types.receipt import RuntimeSupport
from shoal.wire import nouns

SUPPORT = runtime_support()


def loads(made: ModelProto) -> Refusal | None:
    try:
        open_engine(made.SerializeToString(), Provider("CPUExecutionProvider"))
    except ShoalError as error:
        return error.refusal
    return None


def support_refusal(made: ModelProto) -> Refusal | None:
    content = made.SerializeToString()
    profile = profile_of(content, digest_of(content))
    assert not isinstance(profile, Refusal), profile
    return load_refusal(profile, SUPPORT, "this runtime")


def of(version: int = 10, opset: int = 18, operator: str = "Relu", dtype: int = FLOAT) -> ModelProto:
    inputs = [tensor("x", [4], dtype)] + ([tensor("z", [4], dtype)] if operator in ("Add", "Mul") else [])
    node = helper.make_node(operator, [each.name for each in inputs], ["y"])
    made = model([node], inputs, [tensor("y", [4], dtype)], opset=opset)
    made.ir_version = version
    return made


def with_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: known)


def test_a_build_that_ends_the_process_at_its_list_of_kernels_lists_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As onnxruntime-gpu 1.31.1 does where TensorRT's libraries are missing."""

    def crash() -> Sequence[Any]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return ()

    with_gpu_build(monkeypatch)
    monkeypatch.setattr(runtime, "get_all_opkernel_def", crash)
    found = runtime_support()
    assert found.kernels == ()
    assert (found.ir_version, found.opsets) == (SUPPORT.ir_version, SUPPORT.opsets)


def test_a_build_with_other_providers_lists_its_kernels_from_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu_build(monkeypatch)
    own, list_kernels = os.getpid(), runtime.get_all_opkernel_def

    def in_child() -> Sequence[Any]:
        assert os.getpid() != own
        return tuple(list_kernels())

    monkeypatch.setattr(runtime, "get_all_opkernel_def", in_child)
    assert runtime_support() == SUPPORT


def test_the_newest_that_it_says_is_the_newest_that_it_loads() -> None:
    assert loads(of(version=SUPPORT.ir_version)) is None
    refusal = loads(of(version=SUPPORT.ir_version + 1))
    assert refusal is not None
    assert (refusal.code, refusal.found) == (Code.IR_UNSUPPORTED, f"IR version {SUPPORT.ir_version + 1}")
    assert loads(of(opset=SUPPORT.opsets["ai.onnx"])) is None
    refusal = loads(of(opset=SUPPORT.opsets["ai.onnx"] + 1))
    assert refusal is not None
    assert refusal.code is Code.OPSET_UNSUPPORTED
    assert refusal.found == f"opset {SUPPORT.opsets['ai.onnx'] + 1} of ai.onnx"


@pytest.mark.parametrize(
    ("made", "foreseen"),
    [
        (of(version=SUPPORT.ir_version + 1), Code.IR_UNSUPPORTED),
        (of(opset=SUPPORT.opsets["ai.onnx"] + 1), Code.OPSET_UNSUPPORTED),
        (of(opset=6, operator="Add"), Code.OP_UNSUPPORTED),  # no runtime of today has kernels from before opset 7
        (of(operator="Mul", dtype=TensorProto.BFLOAT16), None),  # by its types: learnt
    ],
)
def test_what_does_not_load_has_a_code_that_is_final_and_mostly_foreseen(
    made: ModelProto, foreseen: Code | None
) -> None:
    refusal, expected = loads(made), support_refusal(made)
    assert refusal is not None
    assert refusal.code == (foreseen or Code.OP_UNSUPPORTED)
    assert "/" not in refusal.found, "no paths of its build"
    assert (expected.code if expected else None) == foreseen


def test_operators_that_onnx_defines_by_others_need_no_kernel() -> None:
    made = of(operator="HardSwish")
    assert "HardSwish" not in {kernel.operator for kernel in SUPPORT.kernels}
    assert (loads(made), support_refusal(made)) == (None, None)


def test_it_travels_whole() -> None:
    assert unpack(RuntimeSupport, pack(SUPPORT)) == SUPPORT
    assert len(nouns.to_wire(SUPPORT).SerializeToString()) < 16 * 1024, "a receipt stays small beside its frame"
    assert support_refusal(relu()) is None

"""Whose fault a failed run is, and in which words it is told: with ONNX Runtime itself."""

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from harness.models import engine_cases as models
from harness.models.engine_cases import value
from shoal.agent.worker.engine import Engine, open_engine, run_options
from shoal.agent.worker.failures import brief_error, run_refusal
from shoal.agent.worker.providers import Provider
from shoal.types.codes import Code, ShoalError

Feeds = dict[str, NDArray[np.generic]]
SOURCE = re.compile(r"onnxruntime_src|\.(?:h|cc|cu):\d|::|was false")
"""What a file, function or condition of the runtime's own sources looks like."""


def engine(operator: str, *inputs: str, **attributes: Any) -> Engine:
    """One operator, whose inputs `NAME:TYPE` may have any shape of two axes (one: `NAME:TYPE:1`)."""
    given = [each.split(":") for each in inputs]
    specs = [value(name, kind, ["a", "b"][: int(rank[0]) if rank else 2]) for name, kind, *rank in given]
    output = "INT64" if operator in ("ArgMax", "Cast") else "FP32"
    node = helper.make_node(operator, [name for name, *_ in given], ["y"], **attributes)
    return open_engine(models.model([node], specs, [value("y", output, None)]), Provider("CPUExecutionProvider"))


def floats(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


CASES = [
    (engine("Reshape", "x:FP32", "s:INT64:1"), {"x": floats(3, 4), "s": np.array([2, 2])}),
    (engine("MatMul", "x:FP32", "w:FP32"), {"x": floats(2, 3), "w": floats(4, 5)}),
    (engine("Gemm", "x:FP32", "w:FP32"), {"x": floats(2, 3), "w": floats(4, 5)}),
    (engine("Add", "x:FP32", "w:FP32"), {"x": floats(2, 3), "w": floats(4, 5)}),
    (engine("Concat", "x:FP32", "w:FP32", axis=0), {"x": floats(2, 3), "w": floats(4, 5)}),
    (engine("Squeeze", "x:FP32", "s:INT64:1"), {"x": floats(3, 2), "s": np.array([0])}),
    (engine("Unsqueeze", "x:FP32", "s:INT64:1"), {"x": floats(3, 2), "s": np.array([9])}),
    (engine("Gather", "x:FP32", "s:INT64:1"), {"x": floats(3, 2), "s": np.array([9])}),
    (engine("ArgMax", "x:FP32", axis=0), {"x": floats(0, 3)}),
    (engine("Cast", "x:BYTES:1", to=TensorProto.INT64), {"x": np.array(["abc"], np.object_)}),
    (engine("Pad", "x:FP32", "s:INT64:1"), {"x": floats(3, 2), "s": np.array([-9, 0, 0, 0])}),
]


@pytest.mark.parametrize(("engine", "feeds"), CASES, ids=lambda each: "" if isinstance(each, dict) else None)
def test_what_an_operator_refuses_is_the_clients_and_names_no_source(engine: Engine, feeds: Feeds) -> None:
    with pytest.raises(ShoalError) as refused:
        engine.run(feeds, ["y"], run_options())
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert not SOURCE.search(str(refused.value)), str(refused.value)


def test_the_words_that_remain_say_what_is_wrong() -> None:
    reshape, feeds = CASES[0]
    with pytest.raises(ShoalError) as refused:
        reshape.run(feeds, ["y"], run_options())
    assert refused.value.refusal.found == (
        "Fail: Reshape node: The input tensor cannot be reshaped to the requested shape."
        " Input shape:{3,4}, requested shape:{2,2}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Conv node. Name:'' Status Message:"
        " CUDNN failure 4: CUDNN_STATUS_INTERNAL_ERROR ; GPU=0 ; hostname=h ; file=/onnxruntime_src/x/cudnn_common.cc ;"
        " line=89 ; expr=cudnnFind(shape)",
        "[ONNXRuntimeError] : 1 : FAIL : Exiting due to terminate flag being set to true.",
        "[ONNXRuntimeError] : 11 : EP_FAIL : [OpenVINO-EP]  Output names mismatch between OpenVINO and ONNX",
    ],
)
def test_what_fails_below_the_operators_is_the_replicas(text: str) -> None:
    refusal = run_refusal(RuntimeError(text))
    assert refusal.code is Code.RUNTIME_FAILED
    assert not re.search(r"onnxruntime_src|hostname", refusal.found)


def test_too_little_memory_is_neither() -> None:
    text = "Non-zero status code returned while running Add node. Name:'' Status Message: Failed to allocate memory"
    assert run_refusal(RuntimeError(text)).code is Code.OUT_OF_MEMORY


def test_a_name_with_slashes_stays() -> None:
    text = "Non-zero status code returned while running Add node. Name:'/layer.1/Add' Status Message: a.h:9 f mismatch"
    assert brief_error(RuntimeError(text)) == "RuntimeError: Add node '/layer.1/Add': f mismatch"

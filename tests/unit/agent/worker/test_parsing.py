"""Requests are counted before they are parsed, and parsed only where there is memory for that (issue 17)."""

import resource
import subprocess
import sys

import numpy as np
import pytest
from unit.agent.worker.builders import EMPTY, INPUTS, MIB, OUTPUTS, typed_request

from shoal.agent.worker.parsing import Parser, bytes_to_parse
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError


def parser(room: int | None = None) -> Parser:
    return Parser(INPUTS, OUTPUTS, 64 * MIB, lambda: room)


def test_a_request_of_the_models_signature_is_parsed() -> None:
    request = oip.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[4])
    request.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    assert parser(room=0).parse(request.SerializeToString()) == request
    assert parser().parse(typed_request(2**20)).inputs[0].contents.int64_contents[-1] == 1


@pytest.mark.parametrize(
    "data",
    [EMPTY * 2**20, b"\x2a\x00" * 2**20, b"\x32\x00" * 2**20, b"\x22\x00" * 2**20],
    ids=["raw", "inputs", "outputs", "parameters"],
)
def test_millions_of_empty_fields_are_refused_by_count(data: bytes) -> None:
    with pytest.raises(ShoalError) as refused:
        parser().parse(data)
    assert refused.value.code is Code.FIELD_TOO_MANY


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(ShoalError) as refused:
        parser().parse(b"\xff" * 100)
    assert refused.value.code is Code.INVALID_ARGUMENT


def test_what_there_is_no_memory_for_is_refused_before_it_is_parsed() -> None:
    data = typed_request(2**20)
    needed = bytes_to_parse(data)
    assert needed >= 8 * 2**20
    with pytest.raises(ShoalError) as refused:
        parser(room=needed - 1).parse(data)
    assert refused.value.code is Code.TOO_LARGE
    assert parser(room=needed).parse(data).inputs[0].name == "n"


LIMITED = """
import resource, sys
from unit.agent.worker.builders import EMPTY, MIB, OUTPUTS, INPUTS, typed_request
from shoal.agent.worker import isolation
from shoal.agent.worker.parsing import Parser
from shoal.types.codes import ShoalError
data = {"raw": EMPTY * 6 * MIB, "typed": typed_request(6 * MIB)}[sys.argv[1]]
isolation.limit_memory(isolation.data_bytes(), 64 * MIB)
try:
    Parser(INPUTS, OUTPUTS, 64 * MIB, isolation.headroom_bytes).parse(data)
except ShoalError as error:
    print(error.code)
"""


@pytest.mark.parametrize(("kind", "code"), [("raw", Code.FIELD_TOO_MANY), ("typed", Code.TOO_LARGE)])
def test_under_a_memory_limit_the_parser_does_not_end_the_process(kind: str, code: Code) -> None:
    """Without the checks it ends by SIGSEGV at both."""
    assert resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", LIMITED, kind], capture_output=True, text=True, env=path, check=False)
    assert (found.returncode, found.stdout.strip()) == (0, code), found.stderr[-500:]

"""A55: one request with millions of empty fields. At the front it is counted before it is parsed, and of a large one
only its head is parsed."""

import gzip
import time
import tracemalloc
from typing import cast

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from harness.attacks.repeated_fields import RepeatedField, repeated_fields
from shoal.agent.dataplane import request as reading
from shoal.agent.dataplane import verification_source
from shoal.agent.dataplane.compression import expand, expanded_size
from shoal.agent.dataplane.session_handover import COMMIT_LIMITS, OFFER_LIMITS
from shoal.agent.dataplane.transport import MAX_MESSAGE
from shoal.agent.dataplane.upstream import METADATA_LIMITS
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.v1 import sessions_pb2, witness_pb2
from shoal.wire.field_limits import CountLimits, parse

SIZE = 4 * 2**20
CPU_S = 0.5
FLOOR = 2**20
"""Bytes that a request may cost whatever its size: what `MAX_FIELDS` small objects take, far below one tensor."""
EVERY = list(repeated_fields(oip.ModelInferRequest.DESCRIPTOR))
Make = oip.ModelInferRequest


@pytest.mark.parametrize("each", EVERY, ids=[each.path for each in EVERY])
def test_a55_one_request_of_any_crowded_field_is_within_its_budget(each: RepeatedField) -> None:
    """Typed contents of a large tensor are a request like others: not refused for their count."""
    for spread in (False, True):
        message = each.message(SIZE, spread=spread)
        start = time.process_time()
        code = code_of(message)
        took = time.process_time() - start
        tracemalloc.start()
        code_of(message)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        packed = each.is_packed and "contents" in each.path
        assert code is (Code.INVALID_ARGUMENT if packed else Code.FIELD_TOO_MANY), (each.path, spread, code)
        assert took < CPU_S, (each.path, spread, took)
        assert peak < max(4 * len(message), FLOOR), (each.path, spread, peak)


@pytest.mark.parametrize("each", EVERY, ids=[each.path for each in EVERY])
async def test_a55_a_compressed_request_is_within_the_budget_of_what_it_becomes(each: RepeatedField) -> None:
    message = each.message(SIZE)
    small = gzip.compress(message, 6)
    assert len(small) < len(message) / 50
    start = time.process_time()
    code = code_of(await expand(small, expanded_size(small, MAX_MESSAGE)))
    took = time.process_time() - start
    tracemalloc.start()
    code_of(await expand(small, expanded_size(small, MAX_MESSAGE)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert code is code_of(message), each.path
    assert took < CPU_S, (each.path, took)
    assert peak < max(4 * len(message), FLOOR), (each.path, peak)


def code_of(message: bytes) -> Code | None:
    try:
        reading.parse_request(message)
    except ShoalError as error:
        return error.code
    return None


def large() -> oip.ModelInferRequest:
    made = Make(model_name="m", id="7", raw_input_contents=[bytes(200_000), b"\1" * 100])
    made.parameters["sequence_id"].int64_param = 9
    made.parameters["timeout"].int64_param = 2_000_000
    made.inputs.add(name="x", datatype="UINT8", shape=[200_000])
    made.inputs.add(name="y", datatype="UINT8", shape=[100]).parameters["p"].string_param = "q"
    made.outputs.add(name="z")
    return made


def test_a55_of_a_large_request_the_head_alone_is_parsed() -> None:
    message = large().SerializeToString()
    assert len(message) > reading.INLINE_BYTES
    asked = reading.parse_request(message)
    assert (asked.model, asked.id, asked.session, asked.timeout_s) == ("m", "7", "9", 2.0)
    head, contents = reading._split(message)
    assert oip.ModelInferRequest.FromString(head) == _without_raw(large())
    assert [bytes(each) for each in contents] == [bytes(200_000), b"\1" * 100]


def test_a55_typed_contents_are_cut_out_too() -> None:
    made = Make(model_name="m")
    made.inputs.add(name="x", datatype="FP32", shape=[100_000]).contents.fp32_contents.extend([1.5] * 100_000)
    head, (contents,) = reading._split(made.SerializeToString())
    made.inputs[0].ClearField("contents")
    assert oip.ModelInferRequest.FromString(head) == made
    assert np.frombuffer(contents[-400_000:], "<f4").tolist() == [1.5] * 100_000


def _without_raw(made: oip.ModelInferRequest) -> oip.ModelInferRequest:
    del made.raw_input_contents[:]
    return made


def test_a55_what_is_beside_the_tensors_is_bounded() -> None:
    made = large()
    made.inputs[0].name = "x" * (reading.MAX_HEAD + 1)
    with pytest.raises(ShoalError) as refused:
        reading.parse_request(made.SerializeToString())
    assert refused.value.code is Code.TOO_LARGE


@pytest.mark.parametrize("content", [b"\1" * 100, b"\1" * 200_000], ids=["small", "large"])
def test_a55_a_fingerprint_tells_tensors_apart_and_not_ids(content: bytes) -> None:
    made = large()
    made.raw_input_contents[:] = [content, b"\2" * 100]
    first = reading.fingerprint(made.SerializeToString(), "t/m")
    made.id = "another"
    assert reading.fingerprint(made.SerializeToString(), "t/m") == first
    assert reading.fingerprint(made.SerializeToString(), "t/n") != first
    made.raw_input_contents[:] = [content[:-1], b"\1" + b"\2" * 100]
    assert reading.fingerprint(made.SerializeToString(), "t/m") != first


def test_a55_the_limits_name_fields_that_there_are() -> None:
    named = {f"{kind.full_name}.{field.name}" for kind in _kinds() for field in kind.fields}
    assert reading.LIMITS.by_field.keys() <= named


def _kinds() -> list[Descriptor]:
    request = oip.ModelInferRequest.DESCRIPTOR
    return [request, *request.nested_types, oip.InferTensorContents.DESCRIPTOR]


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        (sessions_pb2.SessionOffer, OFFER_LIMITS),
        (sessions_pb2.SessionCommit, COMMIT_LIMITS),
        (sessions_pb2.SessionOffered, COMMIT_LIMITS),
        (oip.ModelMetadataResponse, METADATA_LIMITS),
        (witness_pb2.CapturedRequest, verification_source.LIMITS),
        (witness_pb2.AnswerRequest, verification_source.LIMITS),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a55_what_another_agent_sends_is_counted_before_it_is_parsed(kind: type[Message], limits: CountLimits) -> None:
    unknown = b"\x9a\x7d\x00" * (SIZE // 3)
    for message in (*(each.message(SIZE) for each in repeated_fields(cast(Descriptor, kind.DESCRIPTOR))), unknown):
        start = time.process_time()
        with pytest.raises(ShoalError) as refused:
            parse(kind, message, limits)
        assert time.process_time() - start < CPU_S
        assert refused.value.code is Code.FIELD_TOO_MANY


def test_a55_a_session_of_as_much_state_as_a_request_may_hold_is_handed_over() -> None:
    tensor = sessions_pb2.StateTensor(input="x", dtype="FP32", shape=[1] * reading.MAX_RANK, content=bytes(4))
    offer = sessions_pb2.SessionOffer(migration="m", state=[tensor] * reading.MAX_TENSORS, asked=b"a", answer=b"b")
    assert parse(sessions_pb2.SessionOffer, offer.SerializeToString(), OFFER_LIMITS) == offer

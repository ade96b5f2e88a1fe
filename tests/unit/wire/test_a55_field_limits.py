"""A55: one request with millions of empty fields. Fields are counted before anything is built from them, whatever
the message."""

import time

import numpy as np
import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from harness.attacks.repeated_fields import methods, repeated_fields
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import Code, ShoalError
from shoal.v1 import (
    artifacts_pb2,
    enrolment_pb2,
    federation_pb2,
    link_pb2,
    operator_pb2,
    sessions_pb2,
    witness_pb2,
)
from shoal.wire import field_limits
from shoal.wire.field_limits import CountLimits, check_counts, parse

LIMITS = CountLimits(fields=65_536, repeated=1024)
SIZE = 4 * 2**20
CPU_S = 0.5
"""What A55 allows one request on any loop."""
MODULES = (
    oip,
    artifacts_pb2,
    enrolment_pb2,
    federation_pb2,
    link_pb2,
    operator_pb2,
    sessions_pb2,
    witness_pb2,
)
REQUESTS = [
    (method, kind)
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
]


@pytest.mark.parametrize(("method", "kind"), REQUESTS, ids=[method for method, _ in REQUESTS])
def test_a55_every_crowded_field_of_every_method_is_refused_by_count(method: str, kind: Descriptor) -> None:
    for each in repeated_fields(kind):
        for spread in (False, True):
            message = each.message(SIZE, spread=spread)
            start = time.process_time()
            refusal = check_counts(kind, message, LIMITS)
            took = time.process_time() - start
            assert refusal is not None, (method, each.path)
            assert refusal.code is Code.FIELD_TOO_MANY, (method, each.path, refusal)
            assert took < CPU_S, (method, each.path, took)


def test_a55_the_exact_count_passes_and_one_more_does_not() -> None:
    request = oip.ModelInferRequest(model_name="relu")
    request.outputs.extend([oip.ModelInferRequest.InferRequestedOutputTensor()] * 3)
    limits = CountLimits(fields=4, repeated=3)
    assert check_counts(request.DESCRIPTOR, request.SerializeToString(), limits) is None
    request.outputs.add()
    refusal = check_counts(request.DESCRIPTOR, request.SerializeToString(), CountLimits(fields=5, repeated=3))
    assert refusal is not None
    assert (refusal.code, refusal.found) == (Code.FIELD_TOO_MANY, "more than 3 of inference.ModelInferRequest.outputs")
    refusal = check_counts(request.DESCRIPTOR, request.SerializeToString(), limits)
    assert refusal is not None
    assert refusal.found == "more than 4 fields in one ModelInferRequest"


@pytest.mark.parametrize("value", [0, 1, 127, 128, 2**31, 2**63 - 1, -1])
def test_a55_packed_integers_are_counted_as_elements_not_bytes(value: int) -> None:
    """A negative one takes ten bytes, a small one one: both are one element."""
    request = oip.ModelInferRequest()
    request.inputs.add().contents.int64_contents.extend([value] * 1024)
    assert check_counts(request.DESCRIPTOR, request.SerializeToString(), LIMITS) is None
    request.inputs[0].contents.int64_contents.append(value)
    refusal = check_counts(request.DESCRIPTOR, request.SerializeToString(), LIMITS)
    assert refusal is not None
    assert refusal.found.endswith("int64_contents")


def test_a55_arrays_in_several_pieces_and_elements_one_by_one_are_counted_together() -> None:
    """Parsers concatenate arrays that come in pieces, packed or not."""
    packed = oip.InferTensorContents(fp32_contents=[1.0] * 512).SerializeToString()
    unpacked = (bytes((6 << 3 | 5,)) + bytes(4)) * 512
    kind = oip.InferTensorContents.DESCRIPTOR
    assert len(oip.InferTensorContents.FromString(packed + unpacked).fp32_contents) == 1024
    assert check_counts(kind, packed + unpacked, LIMITS) is None
    refusal = check_counts(kind, packed + unpacked + unpacked[:5], LIMITS)
    assert refusal is not None
    assert refusal.code is Code.FIELD_TOO_MANY


def test_a55_a_large_tensor_costs_no_more_than_a_small_one() -> None:
    request = oip.ModelInferRequest(raw_input_contents=[bytes(48 * 2**20)])
    request.inputs.add().contents.fp32_contents.extend([0.0] * 2**18)
    message = request.SerializeToString()
    limits = CountLimits(fields=100, repeated=2**20)
    assert check_counts(request.DESCRIPTOR, message, limits) is None
    start = time.process_time()
    for _ in range(1000):
        check_counts(request.DESCRIPTOR, message, limits)
    assert time.process_time() - start < 0.5, "less than half a millisecond each"


def test_a55_unknown_fields_are_counted_and_not_followed() -> None:
    kind = oip.ServerLiveRequest.DESCRIPTOR
    unknown = b"\x9a\x06\x02\x0a\x00"  # field 99, a submessage that nobody declared
    assert check_counts(kind, unknown * 65_536, LIMITS) is None
    refusal = check_counts(kind, unknown * 65_537, LIMITS)
    assert refusal is not None
    assert refusal.code is Code.FIELD_TOO_MANY


NO_MESSAGES = {
    "no length": b"\x0a",
    "short": b"\x0a\x05abc",
    "half a tag": b"\x80",
    "endless tag": b"\x80" * 4_000_000,
    "endless value": b"\x08" + b"\x80" * 4_000_000,
    "endless length": b"\x0a" + b"\xff" * 9,
    "group": b"\x0b\x0c",
    "wire type 7": b"\x0f",
    "field 0": b"\x00\x00",
    "longer than what it is in": b"\x2a\x02\x0a\x05hello",
    "value beyond its submessage": b"\x2a\x01\x08\x01",
}


@pytest.mark.parametrize("message", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a55_what_no_parser_takes_is_refused_at_its_first_bad_byte(message: bytes) -> None:
    start = time.process_time()
    refusal = check_counts(oip.ModelInferRequest.DESCRIPTOR, message, LIMITS)
    assert time.process_time() - start < 0.01
    assert refusal is not None
    assert refusal.code is Code.MESSAGE_INVALID


def test_a55_what_the_parser_takes_the_scanner_takes_and_counts_alike() -> None:
    """Fuzzed: whatever protobuf parses, groups and overlong varints apart, is not called invalid."""
    rng = np.random.default_rng(55)
    base = oip.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"abc", b""])
    base.inputs.add(name="x", datatype="FP32", shape=[1, -1, 300]).parameters["a"].int64_param = 5
    base.outputs.add(name="y").parameters["b"].string_param = "z"
    base.inputs[0].contents.bytes_contents.extend([b"1", b"22"])
    whole = base.SerializeToString()
    taken = 0
    for _ in range(20_000):
        message = bytearray(whole)
        for _ in range(rng.integers(3)):
            message[rng.integers(len(message))] = int(rng.integers(256))
        try:
            parsed = oip.ModelInferRequest.FromString(bytes(message))
        except DecodeError:
            continue
        refusal = check_counts(parsed.DESCRIPTOR, bytes(message), LIMITS)
        if refusal is None:
            taken += 1
        else:
            assert refusal.code is Code.MESSAGE_INVALID
            assert _has_group(bytes(message)) or _long(bytes(message)), bytes(message).hex()
    assert taken > 1000


def _has_group(message: bytes) -> bool:
    return any(byte & 7 == 3 for byte in message)


def _long(message: bytes) -> bool:
    """A varint of more than five bytes in place of a tag or a length."""
    return any(all(byte > 0x7F for byte in message[at : at + 5]) for at in range(len(message) - 5))


def test_a55_a_type_inside_itself_is_followed_to_a_depth() -> None:
    message = b""
    for _ in range(field_limits.MAX_DEPTH + 1):
        inner = struct_pb2.Value(list_value=struct_pb2.ListValue.FromString(message))
        message = struct_pb2.ListValue(values=[inner]).SerializeToString()
    refusal = check_counts(struct_pb2.ListValue.DESCRIPTOR, message, LIMITS)
    assert refusal is not None
    assert "nested deeper than 32" in refusal.found


def test_a55_parse_counts_first() -> None:
    with pytest.raises(ShoalError) as refused:
        parse(oip.ModelInferRequest, b"\x32\x00" * 2000, LIMITS)
    assert refused.value.code is Code.FIELD_TOO_MANY
    with pytest.raises(ShoalError) as refused:
        parse(oip.ModelInferRequest, b"\x0a\x02\xff\xff", LIMITS)
    assert refused.value.code is Code.MESSAGE_INVALID
    assert parse(oip.ModelInferRequest, b"\x0a\x01m", LIMITS).model_name == "m"

"""A55: one request with millions of empty fields. The coordinator refuses it by count, on every method.

The cases are generated from the descriptors: a method that can be crowded and has no limits accepts nothing, and fails
here.
"""

import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from harness.attacks.repeated_fields import RepeatedField, methods, repeated_fields
from harness.report import record
from shoal.coordinator.api.artifacts import MAX_AXES, MAX_SHAPES, _shapes_of
from shoal.coordinator.api.request_limits import RequestLimitInterceptor
from shoal.types.codes import Code, ShoalError
from shoal.types.offer import Solicitation
from shoal.types.receipt import Receipt
from shoal.v1 import (
    artifacts_pb2,
    enrolment_pb2,
    federation_pb2,
    link_pb2,
    mqtt_pb2,
    nouns_pb2,
    operator_pb2,
)
from shoal.wire import nouns, request_limits, seal
from shoal.wire.field_limits import CountLimits, check_counts
from shoal.wire.limits import ENROL_BYTES, LINK_BYTES
from shoal.wire.request_limits import ENVELOPE_CONTENT, RECEIPT, limits_of, make_reader

CPU_S = 0.5
TIMES_ITS_BYTES = 4
STEP = 1024
FOR_STRANGERS = ("/shoal.v1.Enrolment/", "/shoal.v1.Joining/")
MODULES = (link_pb2, artifacts_pb2, operator_pb2, enrolment_pb2, federation_pb2)
METHODS = {
    method: kind
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method, kind in methods(service)
}


def size_at(method: str) -> int:
    """The most that the port of a method takes in one message."""
    return ENROL_BYTES if method.startswith(FOR_STRANGERS) else LINK_BYTES


def parser(kind: Descriptor) -> Callable[[bytes], Message]:
    return cast(Callable[[bytes], Message], GetMessageClass(kind).FromString)


def refusal_cpu_s(read: Callable[[bytes], object], message: bytes) -> float:
    """Seconds of CPU that it takes to refuse it by count."""
    began = time.process_time()
    with pytest.raises(ShoalError) as error:
        read(message)
    took = time.process_time() - began
    assert error.value.code is Code.FIELD_TOO_MANY
    assert took < CPU_S
    return took


def peak(read: Callable[[bytes], object], message: bytes) -> int:
    """Bytes that refusing it takes at most, the message itself included."""
    tracemalloc.start()
    try:
        with pytest.raises(ShoalError):
            read(message)
        return len(message) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", METHODS)
def test_a55_every_crowded_field_of_every_method_is_refused_by_count(method: str) -> None:
    size, read = size_at(method), make_reader(method, parser(METHODS[method]))
    took = [0.0]
    for each in repeated_fields(METHODS[method]):
        took += [refusal_cpu_s(read, each.message(size, spread=spread)) for spread in (False, True)]
    for each in islice(repeated_fields(METHODS[method]), 1):
        message = each.message(size)
        assert peak(read, message) < TIMES_ITS_BYTES * len(message)
    record("A55", "I", len(took), method=method, longest_ms=round(max(took) * 1e3))


def test_a55_unknown_fields_are_counted_on_every_method() -> None:
    unknown = b"\x9a\x7d\x00"  # field 2003, empty, which nobody declared
    for method, kind in METHODS.items():
        refusal_cpu_s(make_reader(method, parser(kind)), unknown * (size_at(method) // 3))


def test_a55_every_method_that_can_be_crowded_has_limits() -> None:
    without = [method for method in METHODS if limits_of(method).fields == 0]
    assert without == [], "give them limits in shoal/wire/request_limits.py"


def test_a55_a_push_may_name_as_many_shapes_as_a_model_has() -> None:
    read = make_reader("/shoal.v1.Artifacts/Push", artifacts_pb2.PushChunk.FromString)

    def chunk(shapes: int) -> bytes:
        head = artifacts_pb2.PushHead(name="reader", size=1, digest="sha256:0")
        for index in range(shapes):
            head.reference_shapes[f"input_{index}"].dims.extend([2**31 - 1] * MAX_AXES)
        return artifacts_pb2.PushChunk(head=head).SerializeToString()

    assert len(read(chunk(MAX_SHAPES)).head.reference_shapes) == MAX_SHAPES
    with pytest.raises(ShoalError) as error:
        read(chunk(8 * MAX_SHAPES))
    assert error.value.code is Code.FIELD_TOO_MANY


@pytest.mark.parametrize(
    "shapes", [{"x": [0]}, {"x": [-2]}, {"x": [2**31]}, {"x": [1] * (MAX_AXES + 1)}, {f"x{n}": [1] for n in range(65)}]
)
def test_a55_lengths_of_a_push_that_no_tensor_has_are_refused(shapes: dict[str, list[int]]) -> None:
    head = artifacts_pb2.PushHead()
    for name, dims in shapes.items():
        head.reference_shapes[name].dims.extend(dims)
    with pytest.raises(ShoalError) as error:
        _shapes_of(head)
    assert error.value.code is Code.INVALID_ARGUMENT


def test_a55_a_method_without_limits_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = "/shoal.v1.Operator/Plan"
    monkeypatch.delitem(cast(dict[str, CountLimits], request_limits._OF_METHODS), plan)
    request = operator_pb2.PlanRequest(documents=[operator_pb2.Document(name="a")])
    with pytest.raises(ShoalError) as error:
        make_reader(plan, operator_pb2.PlanRequest.FromString)(request.SerializeToString())
    assert error.value.code is Code.FIELD_TOO_MANY


@pytest.mark.parametrize(
    "kind", [link_pb2.FromAgent, mqtt_pb2.Opening, mqtt_pb2.Signed, mqtt_pb2.Sealed, mqtt_pb2.Presence]
)
def test_a55_what_comes_by_mqtt_is_counted_as_what_comes_by_grpc(kind: type[Message]) -> None:
    for each in repeated_fields(cast(Descriptor, kind.DESCRIPTOR)):
        refusal_cpu_s(partial(seal.parse, kind), each.message(LINK_BYTES))
    refusal_cpu_s(partial(seal.parse, kind), b"\x9a\x7d\x00" * (LINK_BYTES // 3))


@pytest.mark.parametrize(("kind", "limits"), [(Receipt, RECEIPT), (Solicitation, ENVELOPE_CONTENT)])
def test_a55_what_is_signed_inside_a_message_is_counted_too(kind: type, limits: CountLimits) -> None:
    for each in repeated_fields(nouns.message_class(kind).DESCRIPTOR):
        refusal_cpu_s(partial(nouns.decode, kind, limits=limits), each.message(LINK_BYTES))


def most(each: RepeatedField, kind: Descriptor, limits: CountLimits, *, spread: bool) -> bytes:
    """The largest crowded message of this sort that passes, to the kilobyte."""
    low, high = 0, LINK_BYTES // STEP
    while low < high:
        steps = (low + high + 1) // 2
        if check_counts(kind, each.message(steps * STEP, spread=spread), limits) is None:
            low = steps
        else:
            high = steps - 1
    return each.message(low * STEP, spread=spread)


@pytest.mark.parametrize("each", list(repeated_fields(link_pb2.FromAgent.DESCRIPTOR)), ids=lambda each: each.path)
def test_a55_what_passes_on_a_session_costs_its_loop_little(each: RepeatedField) -> None:
    """Scanned, parsed and read; whether it is a status that makes sense is not asked."""
    method = "/shoal.v1.AgentLink/Session"
    kind = METHODS[method]
    for spread in (False, True):
        message = most(each, kind, limits_of(method), spread=spread)
        read = make_reader(method, link_pb2.FromAgent.FromString)
        began = time.process_time()
        with suppress(ShoalError):
            nouns.from_agent_from_wire(read(message))
        took = time.process_time() - began
        assert took < CPU_S, (len(message), took)


def test_a55_the_most_receipts_of_one_message_cost_its_loop_little() -> None:
    name = next(each for each in repeated_fields(nouns.message_class(Receipt).DESCRIPTOR) if each.path == "operators")
    content = most(name, nouns.message_class(Receipt).DESCRIPTOR, RECEIPT, spread=False)
    signed = nouns_pb2.SignedReceipt(content=content, signature=bytes(64))
    receipts = link_pb2.Receipts(receipts=[signed] * request_limits.MAX_RECEIPTS)
    message = link_pb2.FromAgent(receipts=receipts).SerializeToString()
    read = make_reader("/shoal.v1.AgentLink/Session", link_pb2.FromAgent.FromString)
    began = time.process_time()
    with suppress(ShoalError):
        nouns.from_agent_from_wire(read(message))
    assert time.process_time() - began < CPU_S


async def test_a55_a_port_for_strangers_counts_before_it_parses() -> None:
    """Over its own interceptor: the service is not called."""
    called = []

    async def join(request: Any, context: Any) -> Any:
        called.append(request)
        return federation_pb2.JoinReply()

    handlers = grpc.method_handlers_generic_handler(
        "shoal.v1.Joining",
        {
            "Join": grpc.unary_unary_rpc_method_handler(
                join, federation_pb2.JoinRequest.FromString, federation_pb2.JoinReply.SerializeToString
            )
        },
    )
    server = grpc.aio.server(interceptors=[RequestLimitInterceptor()])
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/shoal.v1.Joining/Join", None, None)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(b"\x22\x00" * 10_000)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert Code.FIELD_TOO_MANY in str(error.value.trailing_metadata())
        assert called == []
        await call(federation_pb2.JoinRequest(roots=["a", "b"]).SerializeToString())
        assert list(called[0].roots) == ["a", "b"]
    await server.stop(None)

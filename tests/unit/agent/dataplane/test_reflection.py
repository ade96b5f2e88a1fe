"""Server reflection: the services of the data ports and their files, and nothing else that this process knows."""

import pytest
from google.protobuf import descriptor_pb2

from shoal.agent.dataplane.reflection import answer
from shoal.inference import reflection_pb2
from shoal.v1 import operator_pb2

Request = reflection_pb2.ServerReflectionRequest


def reply_to(request: Request) -> reflection_pb2.ServerReflectionResponse:
    return answer(request)


def test_what_a_port_serves_is_listed() -> None:
    listed = reply_to(Request(host="h", list_services="*"))
    assert [service.name for service in listed.list_services_response.service] == [
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
    ]
    assert (listed.valid_host, listed.original_request.list_services) == ("h", "*")


@pytest.mark.parametrize(
    "request_",
    [
        Request(file_containing_symbol="inference.GRPCInferenceService"),
        Request(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        Request(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        Request(file_containing_symbol="inference.DataType"),
        Request(file_by_filename="shoal/inference/open_inference.proto"),
    ],
)
def test_a_tool_gets_the_file_that_it_needs(request_: Request) -> None:
    (content,) = reply_to(request_).file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(content)
    assert {"ModelInfer", "ModelConfig"} <= {method.name for method in file.service[0].method}
    assert not file.dependency, "it needs no other"


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(file_containing_symbol="inference"),
        Request(file_containing_symbol="inference.Nothing"),
        Request(file_containing_symbol=operator_pb2.DESCRIPTOR.services_by_name["Operator"].full_name),
        Request(file_by_filename=operator_pb2.DESCRIPTOR.name),
    ],
)
def test_nothing_else_is_told(request_: Request) -> None:
    assert reply_to(request_).error_response.error_code == 5

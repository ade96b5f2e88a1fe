"""Stock gRPC clients at a real front: a channel that compresses all it sends, and one that knows nothing beforehand."""

import hashlib
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from harness.clients.oip import SERVICE, infer_request
from harness.clients.oip import Tensor as Input
from harness.cluster.dataplane_node import DataPlaneNode
from shoal.inference import health_pb2, reflection_pb2
from shoal.inference import open_inference_pb2 as oip
from shoal.types.assignment import Credential
from shoal.types.codes import Code
from shoal.types.device import Role
from shoal.types.units import Wall
from shoal.wire import grpcio_status

REFLECTION = "grpc.reflection.v1.ServerReflection"
VALUES = np.linspace(-2, 2, 4096 * 4, dtype=np.float32).reshape(4096, 4)


def secure(node: DataPlaneNode, *, sure: bool, compression: grpc.Compression | None = None) -> tuple[grpc.Channel, Any]:
    """A blocking channel and what each of its calls says. sure: with a client certificate, else a bearer token."""
    files = node.authority.issue(Role.TENANT, "acme")
    key, certificate = (files.key.read_bytes(), files.certificate.read_bytes()) if sure else (None, None)
    credentials = grpc.ssl_channel_credentials(files.authority.read_bytes(), key, certificate)
    said = () if sure else (("authorization", "Bearer secret"),)
    return grpc.secure_channel(f"localhost:{node.front.config.port}", credentials, compression=compression), {
        "metadata": said
    }


@pytest.fixture
async def serving_node(node: DataPlaneNode) -> DataPlaneNode:
    await node.configure(credentials=(Credential("acme", hashlib.sha256(b"secret").hexdigest(), Wall(4e9)),))
    return node


@pytest.mark.parametrize("sure", [True, False], ids=["certificate", "token"])
async def test_a_channel_that_compresses_all_it_sends_is_answered_as_any(
    serving_node: DataPlaneNode, sure: bool
) -> None:
    """Every method of the inference protocol, and health."""
    channel, said = secure(serving_node, sure=sure, compression=grpc.Compression.Gzip)

    def ask(method: str, request: Any, response: Any, service: str = SERVICE) -> Any:
        call = channel.unary_unary(f"/{service}/{method}", None, response.FromString)
        return call(request.SerializeToString(), timeout=10, **said)

    inputs = (Input("x", "FP32", VALUES.shape, VALUES.tobytes()),)
    wanted = np.maximum(VALUES, 0).tobytes()
    with channel:
        answer = ask("ModelInfer", infer_request("relu", inputs, "r" * 300), oip.ModelInferResponse)
        assert (answer.id, list(answer.raw_output_contents)) == ("r" * 300, [wanted])
        assert ask("ServerLive", oip.ServerLiveRequest(), oip.ServerLiveResponse).live
        assert ask("ServerReady", oip.ServerReadyRequest(), oip.ServerReadyResponse).ready
        assert ask("ModelReady", oip.ModelReadyRequest(name="relu"), oip.ModelReadyResponse).ready
        assert not ask("ModelReady", oip.ModelReadyRequest(name="nothing" * 50), oip.ModelReadyResponse).ready
        metadata = ask("ModelMetadata", oip.ModelMetadataRequest(name="relu"), oip.ModelMetadataResponse)
        assert [each.name for each in metadata.inputs] == ["x"]
        health = ask("Check", health_pb2.HealthCheckRequest(service=SERVICE), health_pb2.HealthCheckResponse, HEALTH)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer", None, oip.ModelStreamInferResponse.FromString)
        requests = [infer_request("relu", inputs, str(number)).SerializeToString() for number in range(3)]
        answers = list(stream(iter(requests), timeout=10, **said))
        assert [each.infer_response.id for each in answers] == ["0", "1", "2"]
        assert all(list(each.infer_response.raw_output_contents) == [wanted] for each in answers)
        with pytest.raises(grpc.RpcError) as refused:
            ask("ModelMetadata", oip.ModelMetadataRequest(name="x" * 2**20), oip.ModelMetadataResponse)
        assert grpcio_status.refusal_of(refused.value).code is Code.TOO_LARGE


HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Explorer:
    """As grpcurl does: it has no stubs, and asks for each file that it needs."""

    def __init__(self, channel: grpc.Channel, said: Any) -> None:
        self._call = channel.stream_stream(
            f"/{REFLECTION}/ServerReflectionInfo", None, reflection_pb2.ServerReflectionResponse.FromString
        )
        self._channel, self._said = channel, said
        self.pool = descriptor_pool.DescriptorPool()

    def ask(self, *requests: reflection_pb2.ServerReflectionRequest) -> Iterator[Any]:
        return iter(self._call(iter([each.SerializeToString() for each in requests]), timeout=10, **self._said))

    def services(self) -> list[str]:
        (listed,) = self.ask(reflection_pb2.ServerReflectionRequest(list_services="*"))
        return [each.name for each in listed.list_services_response.service]

    def learn(self, symbol: str) -> None:
        (found,) = self.ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        for content in found.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(content)
            assert not file.dependency
            self.pool.Add(file)

    def call(self, service: str, method: str, /, **fields: Any) -> Any:
        described = self.pool.FindServiceByName(service).FindMethodByName(method)
        request = GetMessageClass(described.input_type)(**fields)
        response = GetMessageClass(described.output_type)
        unary = self._channel.unary_unary(f"/{service}/{method}", None, response.FromString)
        return unary(request.SerializeToString(), timeout=10, **self._said)


@pytest.mark.parametrize("sure", [True, False], ids=["certificate", "token"])
async def test_a_client_without_stubs_finds_and_calls_each_service(serving_node: DataPlaneNode, sure: bool) -> None:
    channel, said = secure(serving_node, sure=sure)
    with channel:
        explorer = Explorer(channel, said)
        assert set(explorer.services()) == {SERVICE, HEALTH, REFLECTION}
        for service in explorer.services():
            explorer.learn(service)
        assert explorer.call(SERVICE, "ModelMetadata", name="relu").inputs[0].name == "x"
        assert explorer.call(HEALTH, "Check", service=SERVICE).status == 1
        watch = explorer.pool.FindServiceByName(HEALTH).FindMethodByName("Watch")
        assert (watch.client_streaming, watch.server_streaming) == (False, True)


async def test_who_may_not_call_is_not_told_what_is_served(serving_node: DataPlaneNode) -> None:
    channel, _ = secure(serving_node, sure=False)
    for said in ((), (("authorization", "Bearer guess"),)):
        with pytest.raises(grpc.RpcError) as refused:
            Explorer(channel, {"metadata": said}).services()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    channel.close()

"""A service behind a transport, without models."""

import asyncio

from shoal.agent.dataplane.transport import InboundCall
from shoal.inference import open_inference_pb2 as oip
from shoal.types.codes import ShoalError


class EchoingService:
    """A service that lets anybody in, and answers every request with the tensors that it brought."""

    def __init__(self) -> None:
        self.change = asyncio.Event()

    def live(self) -> bool:
        return True

    def authenticate(self, call: InboundCall) -> None:
        pass

    def admit(self, call: InboundCall) -> str:
        return "acme"

    async def pace(self, call: InboundCall, error: ShoalError) -> None:
        pass

    def payer_of(self, call: InboundCall) -> str | None:
        return None

    def tenant_of(self, call: InboundCall) -> str:
        return "acme"

    def server_ready(self, call: InboundCall) -> bool:
        return True

    def server_metadata(self, call: InboundCall) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="shoal")

    def index(self, call: InboundCall, *, ready_only: bool) -> oip.RepositoryIndexResponse:
        return oip.RepositoryIndexResponse()

    async def model_ready(self, call: InboundCall, name: str, version: str) -> bool:
        return True

    def prepare_direct(
        self, call: InboundCall, remaining_s: float | None, memo: dict[str, object], request: bytes
    ) -> None:
        return None

    async def model_metadata(self, call: InboundCall, name: str, version: str) -> oip.ModelMetadataResponse:
        shown = [
            oip.ModelMetadataResponse.TensorMetadata(name="x", datatype="FP32", shape=[-1, 2]),
            oip.ModelMetadataResponse.TensorMetadata(name="s", datatype="BYTES", shape=[-1]),
        ]
        return oip.ModelMetadataResponse(name=name, inputs=shown)

    async def model_config(self, call: InboundCall, name: str, version: str) -> oip.ModelConfigResponse:
        return oip.ModelConfigResponse(config=oip.ModelConfig(name=name))

    async def statistics(self, call: InboundCall, name: str, version: str) -> oip.ModelStatisticsResponse:
        return oip.ModelStatisticsResponse()

    def shared_memory_status(self, call: InboundCall, name: str) -> oip.SystemSharedMemoryStatusResponse:
        return oip.SystemSharedMemoryStatusResponse()

    def register_shared_memory(self, call: InboundCall, asked: oip.SystemSharedMemoryRegisterRequest) -> None:
        pass

    def unregister_shared_memory(self, call: InboundCall, name: str) -> None:
        pass

    async def infer(self, call: InboundCall, request: bytes) -> bytes:
        asked = oip.ModelInferRequest.FromString(request)
        outputs = [
            oip.ModelInferResponse.InferOutputTensor(name=t.name, datatype=t.datatype, shape=t.shape)
            for t in asked.inputs
        ]
        made = oip.ModelInferResponse(outputs=outputs, raw_output_contents=asked.raw_input_contents)
        return made.SerializeToString()

"""Ray Serve pickles messages by the module that their stubs name, which tritonclient does not have under that name."""

# pyright: reportMissingImports=false
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ServerReadyRequest, ServerReadyResponse

__all__ = ["ModelInferRequest", "ModelInferResponse", "ServerReadyRequest", "ServerReadyResponse"]

"""gRPC server reflection: the services of the data ports for clients, for tools such as grpcurl.

Services between agents are not listed.
"""

from typing import Final

from google.protobuf.descriptor import FileDescriptor

from shoal.http2.grpc_messages import GrpcStatus
from shoal.inference import health_pb2, open_inference_pb2, reflection_pb2

SERVICES: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Two names of one protocol."""
METHOD: Final = "ServerReflectionInfo"
_FILES: Final[tuple[FileDescriptor, ...]] = (
    open_inference_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
_SERVED_NAMES: Final = tuple(service.full_name for file in _FILES for service in file.services_by_name.values())


def answer(request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
    """The list of services, a file, or NOT_FOUND in the form of that protocol."""
    response = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
    file: FileDescriptor | None = None
    match request.WhichOneof("message_request"):
        case "list_services":
            for name in _SERVED_NAMES:
                response.list_services_response.service.add(name=name)
            return response
        case "file_by_filename":
            file = next((each for each in _FILES if each.name == request.file_by_filename), None)
        case "file_containing_symbol":
            file = next((each for each in _FILES if _has(each, request.file_containing_symbol)), None)
    if file is None:
        response.error_response.error_code = GrpcStatus.NOT_FOUND
        response.error_response.error_message = "no such file or symbol on this port"
    else:
        response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    return response


def _has(file: FileDescriptor, symbol: str) -> bool:
    """Whether a service, method, message or enumeration of this full name is in the file."""
    first = symbol.removeprefix(f"{file.package}.").partition(".")[0]
    tables = (file.services_by_name, file.message_types_by_name, file.enum_types_by_name)
    return symbol.startswith(f"{file.package}.") and any(first in table for table in tables)

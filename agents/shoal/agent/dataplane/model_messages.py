"""Answers of the Open Inference Protocol about the server and its models, made from values."""

from collections.abc import Mapping

from shoal.agent.dataplane.metering import Totals
from shoal.inference import open_inference_pb2 as oip
from shoal.types.workload import SERVED_VERSION as VERSION
from shoal.types.workload import WorkloadKey


def server_metadata(*, has_shared_memory: bool) -> oip.ServerMetadataResponse:
    """has_shared_memory: whether the caller may use any."""
    extensions = ["binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters"]
    extensions += ["sequence", "statistics", *(["system_shared_memory"] if has_shared_memory else [])]
    return oip.ServerMetadataResponse(name="shoal", version="2", extensions=extensions)


def metadata_as_served(name: str, metadata: oip.ModelMetadataResponse) -> oip.ModelMetadataResponse:
    """The metadata of a replica under the name that its workload is called by; changed in place."""
    metadata.name = name
    metadata.versions[:] = [VERSION]
    metadata.platform = "onnx_onnxv1"
    return metadata


def config_of(name: str, metadata: oip.ModelMetadataResponse) -> oip.ModelConfigResponse:
    """The model's description in Triton's form."""
    config = oip.ModelConfig(
        name=name, platform="onnxruntime_onnx", backend="onnxruntime", default_model_filename="model.onnx"
    )
    for each in metadata.inputs:
        config.input.add(name=each.name, data_type=_data_type(each.datatype), dims=each.shape)
    for each in metadata.outputs:
        config.output.add(name=each.name, data_type=_data_type(each.datatype), dims=each.shape)
    return oip.ModelConfigResponse(config=config)


def statistics_of(totals: Mapping[WorkloadKey, Totals], zero: float) -> oip.ModelStatisticsResponse:
    """In the order of `totals`. Times of the protocol are milliseconds for the last answer, else nanoseconds. `zero`:
    the wall time, in seconds, at which the elapsed clock was 0."""
    found = oip.ModelStatisticsResponse()
    for key, each in totals.items():
        stats = found.model_stats.add(
            name=key.name, version=VERSION, inference_count=each.answered, execution_count=each.answered
        )
        if each.newest_at is not None:
            stats.last_inference = int((zero + each.newest_at) * 1000)
        stats.inference_stats.success.count = each.answered
        stats.inference_stats.success.ns = round(each.seconds * 1e9)
        stats.inference_stats.fail.count = each.failed
    return found


def _data_type(datatype: str) -> oip.DataType.ValueType:
    return oip.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")

"""Messages of the Open Inference Protocol as documents of its REST form."""

from collections.abc import Mapping
from typing import Any

from shoal.agent.dataplane.request import invalid
from shoal.inference import open_inference_pb2 as oip


def model_document(said: oip.ModelMetadataResponse) -> dict[str, Any]:
    def describe(tensors_: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors_]

    return {
        "name": said.name,
        "versions": list(said.versions),
        "platform": said.platform,
        "inputs": describe(said.inputs),
        "outputs": describe(said.outputs),
    }


def config_document(said: oip.ModelConfigResponse) -> dict[str, Any]:
    def describe(tensors_: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "data_type": oip.DataType.Name(t.data_type), "dims": list(t.dims)} for t in tensors_]

    config = said.config
    return {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": describe(config.input),
        "output": describe(config.output),
    }


def statistics_document(said: oip.ModelStatisticsResponse) -> dict[str, Any]:
    rows = []
    for each in said.model_stats:
        stats = each.inference_stats
        shown = {name.name: {"count": value.count, "ns": value.ns} for name, value in stats.ListFields()}
        rows.append(
            {
                "name": each.name,
                "version": each.version,
                "last_inference": each.last_inference,
                "inference_count": each.inference_count,
                "execution_count": each.execution_count,
                "inference_stats": shown,
                "batch_stats": [],
            }
        )
    return {"model_stats": rows}


def regions_document(said: oip.SystemSharedMemoryStatusResponse) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
        for each in said.regions.values()
    ]


def region_of(name: str, document: Mapping[str, Any]) -> oip.SystemSharedMemoryRegisterRequest:
    """Raises ShoalError(INVALID_ARGUMENT)."""
    offset, size = (_unsigned(document, field) for field in ("offset", "byte_size"))
    key = document.get("key")
    if not isinstance(key, str):
        raise invalid(f"key {key!r:.80}", "the region's name for shm_open")
    try:
        return oip.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
    except UnicodeEncodeError as error:
        raise invalid("a key with half a surrogate pair", "Unicode text") from error


def _unsigned(document: Mapping[str, Any], field: str) -> int:
    value = document.get(field, 0)
    if type(value) is not int or not 0 <= value < 2**64:
        raise invalid(f"{field} {value!r:.80}", "a whole number of bytes")
    return value

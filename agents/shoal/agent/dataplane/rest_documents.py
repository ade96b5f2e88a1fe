"""Answers of the Open Inference Protocol as documents of its REST form."""

from typing import Any

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

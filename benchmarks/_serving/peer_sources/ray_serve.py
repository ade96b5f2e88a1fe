"""Ray Serve's gRPC proxy with the Open Inference Protocol: `ray_serve.py SPEC GRPC_PORT HTTP_PORT REPLICAS FOLDER`."""

# pyright: reportMissingImports=false
import json
import signal
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import ray
from ray import serve
from ray.serve.config import HTTPOptions, gRPCOptions

STUBS = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"


class Models:
    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._models: dict[str, Any] = {
            name: (
                onnxruntime.InferenceSession(spec["path"], options, providers=["CPUExecutionProvider"]),
                spec["inputs"],
                spec["outputs"],
            )
            for name, spec in json.loads(Path(path).read_text()).items()
        }

    def ServerReady(self, request: Any) -> Any:
        from tritonclient.grpc import service_pb2

        messages: Any = service_pb2
        return messages.ServerReadyResponse(ready=True)

    def ModelInfer(self, request: Any) -> Any:
        import numpy as np
        from tritonclient.grpc import service_pb2

        messages: Any = service_pb2
        session, inputs, outputs = self._models[request.model_name]
        feeds = {
            name: np.frombuffer(raw, dtype).reshape(shape)
            for (name, dtype, shape), raw in zip(inputs, request.raw_input_contents, strict=True)
        }
        answer = messages.ModelInferResponse(model_name=request.model_name)
        for (name, _, _), value in zip(outputs, session.run(None, feeds), strict=True):
            answer.outputs.add(name=name, datatype="FP32", shape=value.shape)
            answer.raw_output_contents.append(value.tobytes())
        return answer


def main() -> None:
    spec, grpc_port, http_port, replicas, folder = sys.argv[1:]
    ray.init(
        num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=200_000_000,
        log_to_driver=False, _temp_dir=folder,
    )  # fmt: skip
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=int(http_port)),
        grpc_options=gRPCOptions(port=int(grpc_port), grpc_servicer_functions=[STUBS]),
    )
    make = serve.deployment(num_replicas=int(replicas), max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.1})
    serve.run(make(Models).bind(spec), name="oip", route_prefix="/oip")
    signal.sigwait({signal.SIGTERM})
    ray.shutdown()


if __name__ == "__main__":
    main()

"""A model of Triton's Python backend: one ONNX Runtime session. Copied into the repository by `peers.py`."""

# pyright: reportMissingImports=false
import json
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = config["parameters"]["path"]["string_value"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = [each["name"] for each in config["input"]]
        self._outputs = [each["name"] for each in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        feeds = {name: backend.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}
        found = self._session.run(self._outputs, feeds)
        tensors = [
            backend.Tensor(name, np.ascontiguousarray(value)) for name, value in zip(self._outputs, found, strict=True)
        ]
        return backend.InferenceResponse(tensors)

"""LitServe, a route for each model: `litserve_server.py SPEC PORT WORKERS [CERTIFICATE KEY]`.

Its requests are JSON: `{"x": [..]}` is answered with `{"y": [..]}`.
"""

# pyright: reportMissingImports=false
import json
import sys
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import onnxruntime


class OnnxApi(litserve.LitAPI):  # type: ignore[misc,unused-ignore] # untyped where LitServe is not installed
    def __init__(self, name: str, spec: dict[str, Any]) -> None:
        super().__init__(api_path=f"/{name}")
        self._model = spec

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = self._model["path"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def decode_request(self, request: dict[str, Any]) -> Any:
        _, dtype, shape = self._model["inputs"][0]
        return np.array(request["x"], dtype).reshape(shape)

    def predict(self, value: Any) -> Any:
        return self._session.run(None, {self._model["inputs"][0][0]: value})[0]

    def encode_response(self, value: Any) -> dict[str, Any]:
        return {"y": value.ravel().tolist()}


def main() -> None:
    spec, port, workers, *tls = sys.argv[1:]
    apis = [OnnxApi(name, each) for name, each in json.loads(Path(spec).read_text()).items()]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=int(workers), timeout=60)
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), tls, strict=False))
    server.run(
        host="127.0.0.1", port=int(port), generate_client_file=False, log_level="warning", access_log=False, **files
    )


if __name__ == "__main__":
    main()

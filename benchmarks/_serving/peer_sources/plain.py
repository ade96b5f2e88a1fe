"""grpc.aio around one ONNX Runtime session for each model, and nothing else: what a team writes in an afternoon.

`plain.py SPEC PORT THREADS [CERTIFICATE KEY]` serves ModelInfer and ServerReady of the Open Inference Protocol, without
queue, checks, routing or isolation.
"""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import onnxruntime

from shoal.client.tensors import DTYPES
from shoal.inference import open_inference_pb2 as oip
from shoal.inference import open_inference_pb2_grpc as oip_grpc
from shoal.wire.limits import INFER_BYTES

NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


class PlainServer(oip_grpc.GRPCInferenceServiceServicer):
    """sessions: by model. pool: runs them."""

    def __init__(self, sessions: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        self._sessions = sessions
        self._pool = pool

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Any) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=True)

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Any) -> oip.ModelInferResponse:
        session = self._sessions[request.model_name]
        feeds: dict[str, Any] = {
            tensor.name: np.frombuffer(raw, DTYPES[tensor.datatype]).reshape(tensor.shape)
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        found = await asyncio.get_running_loop().run_in_executor(self._pool, session.run, None, feeds)
        names = [output.name for output in session.get_outputs()]
        return oip.ModelInferResponse(
            model_name=request.model_name,
            outputs=[
                oip.ModelInferResponse.InferOutputTensor(name=name, datatype=NAMES[value.dtype], shape=value.shape)
                for name, value in zip(names, found, strict=True)
            ],
            raw_output_contents=[value.tobytes() for value in found],
        )


def _session(path: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


async def serve(spec: Path, port: int, threads: int, tls: list[str]) -> None:
    sessions = {name: _session(each["path"]) for name, each in json.loads(spec.read_text()).items()}
    limits = (("grpc.max_receive_message_length", INFER_BYTES), ("grpc.max_send_message_length", INFER_BYTES))
    server = grpc.aio.server(options=limits)
    plain = PlainServer(sessions, ThreadPoolExecutor(threads))  # type: ignore[abstract]  # these two are all that it has
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(plain, server)
    if tls:
        certificate, key = (Path(each).read_bytes() for each in tls)
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, certificate)]))
    else:
        server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def main() -> None:
    spec, port, threads, *tls = sys.argv[1:]
    asyncio.run(serve(Path(spec), int(port), int(threads), tls))


if __name__ == "__main__":
    main()

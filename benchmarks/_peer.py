"""A plain server to compare with: grpc.aio around one ONNX Runtime session per model, and nothing else.

`python benchmarks/_peer.py SPEC` (JSON: models by name to path, certificate, key, ca, threads) prints its port and
serves Open Inference Protocol's ModelInfer until its stdin closes. No queue, no checks, no routing, no isolation: what
a team writes in an afternoon.
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

from shoal.client.inference import DTYPES
from shoal.inference import open_inference_pb2 as oip
from shoal.inference import open_inference_pb2_grpc as oip_grpc
from shoal.wire.limits import INFER_BYTES

NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}


class PlainServer(oip_grpc.GRPCInferenceServiceServicer):
    """sessions: by model. pool: runs them, with one thread per core."""

    def __init__(self, sessions: dict[str, Any], pool: ThreadPoolExecutor) -> None:
        self._sessions = sessions
        self._pool = pool

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


async def serve(spec: dict[str, Any], credentials: grpc.ServerCredentials) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {
        name: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for name, path in spec["models"].items()
    }
    limits = (("grpc.max_receive_message_length", INFER_BYTES), ("grpc.max_send_message_length", INFER_BYTES))
    server = grpc.aio.server(options=limits)
    oip_grpc.add_GRPCInferenceServiceServicer_to_server(_new_server(sessions, spec["threads"]), server)
    print(server.add_secure_port("127.0.0.1:0", credentials), flush=True)
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


def _new_server(sessions: dict[str, Any], threads: int) -> PlainServer:
    return PlainServer(sessions, ThreadPoolExecutor(threads))  # type: ignore[abstract]  # ModelInfer is all that it has


def main() -> None:
    spec = json.loads(sys.argv[1])
    key, certificate, ca = (Path(spec[name]).read_bytes() for name in ("key", "certificate", "ca"))
    asyncio.run(serve(spec, grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)))


if __name__ == "__main__":
    main()

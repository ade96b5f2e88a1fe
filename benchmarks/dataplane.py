"""The front end and the gateway hop against ONNX Runtime in process: `shoal bench dataplane`.

Starts a local region (one plain CPU agent, one gateway), places real models on it and measures, round after round over
all cases so that what is compared is measured interleaved: the runtime in this process, the agent's own front, and the
gateway; over gRPC and REST, both with TLS. Prints medians and ratios to the runtime in process.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime

from shoal.client import Context, Contexts, Inference, Region
from shoal.client.inference import DTYPES
from shoal.devstack.control import Control, Up
from shoal.devstack.layout import Asked
from shoal.inference import open_inference_pb2 as oip
from shoal.inference import open_inference_pb2_grpc as oip_grpc
from shoal.types.device import Role
from shoal.v1 import operator_pb2
from shoal.wire.identity import dns_of
from shoal.wire.limits import INFER_BYTES, channel_options

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Model:
    """name: as pushed and placed. inputs: what every case sends."""

    name: str
    path: Path
    inputs: dict[str, np.ndarray[Any, Any]]


def models() -> list[Model]:
    """PP-OCR's angle classifier (110 KB in, fast), its recogniser (1 MB out), and magika (integers)."""
    chance = np.random.default_rng(7)
    ocr = _package("rapidocr_onnxruntime") / "models"
    found = [
        Model(
            "cls",
            ocr / "ch_ppocr_mobile_v2.0_cls_infer.onnx",
            {"x": chance.random((1, 3, 48, 192), np.float32)},
        ),
        Model("rec", ocr / "ch_PP-OCRv4_rec_infer.onnx", {"x": chance.random((1, 3, 48, 320), np.float32)}),
    ]
    magika = sorted((_package("magika") / "models").glob("*/model.onnx"))
    if magika:
        found.append(Model("magika", magika[-1], {"bytes": chance.integers(0, 256, (1, 2048), np.int32)}))
    return found


def in_process(model: Model) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, model.inputs)


def over_grpc(context: Context, address: str, server: str, model: Model) -> Call:
    credentials = grpc.ssl_channel_credentials(
        context.ca.read_bytes(), context.key.read_bytes(), context.certificate.read_bytes()
    )
    channel = grpc.secure_channel(address, credentials, channel_options(INFER_BYTES, server_name=server))
    stub = oip_grpc.GRPCInferenceServiceStub(channel)
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    request = oip.ModelInferRequest(
        model_name=model.name,
        inputs=[
            oip.ModelInferRequest.InferInputTensor(name=name, datatype=names[value.dtype], shape=value.shape)
            for name, value in model.inputs.items()
        ],
        raw_input_contents=[value.tobytes() for value in model.inputs.values()],
    )
    return lambda: stub.ModelInfer(request, timeout=30)


def over_rest(context: Context, address: str, model: Model) -> Call:
    client = Inference(replace(context, gateway_rest=address))
    return lambda: client.infer(model.name, model.inputs)


def measure(cases: dict[str, Call], rounds: int, seconds: float) -> dict[str, float]:
    """Median over rounds of each case's median seconds a request, one request in flight."""
    medians: dict[str, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for _ in range(rounds):
        for name, call in cases.items():
            took: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(took) < 3:
                began = time.perf_counter()
                call()
                took.append(time.perf_counter() - began)
            medians[name].append(statistics.median(took))
    return {name: statistics.median(found) for name, found in medians.items()}


def place(up: Up, found: list[Model]) -> None:
    with Region(up.operator) as api:
        for model in found:
            api.push(model.path, model.name)
        text = "---\n".join(
            f"apiVersion: shoal/v1\nkind: Workload\n"
            f"metadata: {{name: {model.name}}}\nspec: {{model: {{source: {model.name}}}}}\n"
            for model in found
        )
        api.apply([operator_pb2.Document(name="bench.yaml", text=text)])
        end = time.monotonic() + 60
        while not all(view.state == "ready" for view in api.get("workloads").workloads):
            if time.monotonic() > end:
                sys.exit("the models were not ready within 60 s")
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="a case a round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            up = control.up(Asked(agents=1), lambda text: print(f"# {text}", file=sys.stderr))
            found = models()
            place(up, found)
            report = {model.name: figures(up, model, arguments.rounds, arguments.seconds) for model in found}
        finally:
            control.down()
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{'model':8} {'case':14} {'p50 ms':>8} {'added ms':>9} {'x in process':>13}")
    for name, rows in report.items():
        base = rows["in process"]
        for case, seconds in rows.items():
            print(f"{name:8} {case:14} {seconds * 1e3:8.2f} {(seconds - base) * 1e3:9.2f} {seconds / base:13.2f}")


def figures(up: Up, model: Model, rounds: int, seconds: float) -> dict[str, float]:
    agent, gateway = up.stack.agents[0], up.stack.gateways[0]
    agent_name = dns_of(up.stack.region, Role.AGENT, agent.name)
    gateway_name = dns_of(up.stack.region, Role.GATEWAY, gateway.name)
    cases = {
        "in process": in_process(model),
        "agent gRPC": over_grpc(up.client, agent.addresses["grpc"], agent_name, model),
        "agent REST": over_rest(up.client, agent.addresses["rest"], model),
        "gateway gRPC": over_grpc(up.client, gateway.addresses["grpc"], gateway_name, model),
        "gateway REST": over_rest(up.client, gateway.addresses["rest"], model),
    }
    return measure(cases, rounds, seconds)


def _package(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"{name} is not installed: make dev")
    return Path(found.origin).parent


if __name__ == "__main__":
    main()

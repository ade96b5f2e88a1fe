"""The agent's front and the gateway hop against ONNX Runtime in process: `shoal bench dataplane`.

Starts a local region (one plain CPU agent, one gateway) without the relays that `shoal dev break` uses, and places real
models on it. Four systems are measured: the runtime in this process, a plain grpc.aio server around the same runtime
(`_peer.py`, TLS with client certificates too), the agent's own front, and the gateway; the latter two over gRPC and
REST. Each round covers all cases, so that compared figures are measured interleaved. Each case runs with one request in
flight and with several: the clients are threads of this process, on the same cores as everything else. Prints p50, p99,
requests a second, and ratios to the runtime in process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
from _machine import machine_line

from shoal.client import Context, Contexts, InferenceClient, RegionClient
from shoal.client.inference import DTYPES
from shoal.devstack.control import Control, RunningStack
from shoal.devstack.layout import StackOptions
from shoal.inference import open_inference_pb2 as oip
from shoal.inference import open_inference_pb2_grpc as oip_grpc
from shoal.types.device import Role
from shoal.v1 import operator_pb2
from shoal.wire.identity import dns_of
from shoal.wire.limits import INFER_BYTES, channel_options

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to measure."""

    # Name under which it is pushed and placed.
    name: str
    path: Path
    # Inputs by name, which every case sends.
    inputs: dict[str, np.ndarray[Any, Any]]


def models() -> list[BenchModel]:
    """PP-OCR's angle classifier (110 KB in, fast), its recogniser (1 MB out), and magika (integers)."""
    chance = np.random.default_rng(7)
    ocr = _package("rapidocr_onnxruntime") / "models"
    found = [
        BenchModel(
            "cls",
            ocr / "ch_ppocr_mobile_v2.0_cls_infer.onnx",
            {"x": chance.random((1, 3, 48, 192), np.float32)},
        ),
        BenchModel("rec", ocr / "ch_PP-OCRv4_rec_infer.onnx", {"x": chance.random((1, 3, 48, 320), np.float32)}),
    ]
    magika = sorted((_package("magika") / "models").glob("*/model.onnx"))
    if magika:
        found.append(BenchModel("magika", magika[-1], {"bytes": chance.integers(0, 256, (1, 2048), np.int32)}))
    return found


def in_process(model: BenchModel) -> Call:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, model.inputs)


def over_grpc(context: Context, address: str, server: str, model: BenchModel) -> Call:
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


def over_rest(context: Context, address: str, model: BenchModel) -> Call:
    client = InferenceClient(replace(context, gateway=address))
    return lambda: client.infer(model.name, model.inputs)


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """One case at one concurrency, over all its rounds."""

    # Requests answered.
    requests: int
    # Median latency in seconds.
    p50_s: float
    # p99 latency in seconds.
    p99_s: float
    # Answers a second.
    per_s: float


def measure(
    cases: dict[str, Callable[[], Call]], rounds: int, seconds: float, at_once: int
) -> dict[str, LatencyFigures]:
    """at_once: requests in flight, each from a caller of its own."""
    callers = {name: [make() for _ in range(at_once)] for name, make in cases.items()}
    latencies: dict[str, list[float]] = {name: [] for name in cases}
    took: dict[str, float] = dict.fromkeys(cases, 0.0)
    with ThreadPoolExecutor(at_once) as pool:
        for each in callers.values():
            list(pool.map(lambda call: call(), each))  # opens connections, fills caches
        for _ in range(rounds):
            for name, each in callers.items():
                began = time.perf_counter()
                for found in pool.map(lambda call, end=began + seconds: _measure_latencies(call, end), each):
                    latencies[name] += found
                took[name] += time.perf_counter() - began
    return {
        name: LatencyFigures(
            len(found), float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99)), len(found) / took[name]
        )
        for name, found in latencies.items()
    }


def _measure_latencies(call: Call, end: float) -> list[float]:
    """Seconds of each request, sequentially, until `end`; at least three requests."""
    found: list[float] = []
    while time.perf_counter() < end or len(found) < 3:
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return found


@contextmanager
def plain_server(up: RunningStack, found: list[BenchModel]) -> Iterator[str]:
    """Runs a plain server with the agent's certificate; yields host:port."""
    identity = up.folder / up.stack.agents[0].name / "identity"
    spec = {
        "models": {model.name: str(model.path) for model in found},
        "threads": os.cpu_count() or 1,
        "key": str(identity / "key.pem"),
        "certificate": str(identity / "cert.pem"),
        "ca": str(identity / "ca.pem"),
    }
    command = [sys.executable, str(Path(__file__).parent / "_peer.py"), json.dumps(spec)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def place(up: RunningStack, found: list[BenchModel]) -> None:
    with RegionClient(up.operator) as api:
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
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16], help="requests in flight")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    print(machine_line(), file=sys.stderr if arguments.json else sys.stdout)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        control = Control(Path(scratch) / "dev", Contexts(Path(scratch) / "home"))
        try:
            up = control.up(StackOptions(agents=1, relayed=False), lambda text: print(f"# {text}", file=sys.stderr))
            found = models()
            place(up, found)
            with plain_server(up, found) as plain:
                report = {
                    model.name: {
                        at_once: measure(cases(up, model, plain), arguments.rounds, arguments.seconds, at_once)
                        for at_once in arguments.at_once
                    }
                    for model in found
                }
        finally:
            control.down()
    if arguments.json:
        print(json.dumps(_plain(report), indent=1))
        return
    head = f"{'model':8} {'at once':>7} {'case':15} {'requests':>8} {'p50 ms':>8} {'p99 ms':>8} {'per s':>8}"
    print(f"{head} {'added ms':>9} {'x in process':>13} {'x per s':>8}")
    for name, by_number in report.items():
        for at_once, rows in by_number.items():
            base = rows["in process"]
            for case, row in rows.items():
                print(
                    f"{name:8} {at_once:7} {case:15} {row.requests:8} {row.p50_s * 1e3:8.2f} {row.p99_s * 1e3:8.2f} "
                    f"{row.per_s:8.0f} {(row.p50_s - base.p50_s) * 1e3:9.2f} {row.p50_s / base.p50_s:13.2f} "
                    f"{row.per_s / base.per_s:8.2f}"
                )


def cases(up: RunningStack, model: BenchModel, plain: str) -> dict[str, Callable[[], Call]]:
    """By case name, a function that makes one caller. plain: address of the plain server."""
    agent, gateway = up.stack.agents[0], up.stack.gateways[0]
    agent_name = dns_of(up.stack.region, Role.AGENT, agent.name)
    gateway_name = dns_of(up.stack.region, Role.GATEWAY, gateway.name)
    session = in_process(model)
    return {
        "in process": lambda: session,
        "plain grpc.aio": lambda: over_grpc(up.client, plain, agent_name, model),
        "agent gRPC": lambda: over_grpc(up.client, agent.addresses["data"], agent_name, model),
        "agent REST": lambda: over_rest(up.client, agent.addresses["data"], model),
        "gateway gRPC": lambda: over_grpc(up.client, gateway.addresses["data"], gateway_name, model),
        "gateway REST": lambda: over_rest(up.client, gateway.addresses["data"], model),
    }


def _plain(report: dict[str, dict[int, dict[str, LatencyFigures]]]) -> Any:
    return {
        name: {number: {case: asdict(row) for case, row in rows.items()} for number, rows in by_number.items()}
        for name, by_number in report.items()
    }


def _package(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        sys.exit(f"{name} is not installed: make dev")
    return Path(found.origin).parent


if __name__ == "__main__":
    main()

"""Requests in batches against one by one, through a front: `shoal bench batching`.

Two models, each served twice by one front and its workers on core 0, with `batching: {max: 32}` and without: `layers`
(twelve matrix products of 4 MiB of weights each, which a run of one row reads as a run of many does), and PP-OCR's
recogniser, whose larger runs fall out of the processor's cache. Batches should pay for the first, and be off by
themselves for the second. h2load (Debian's nghttp2-client, on core 1) keeps 32 requests in flight on one connection;
each round covers all four, so that what is compared is measured interleaved. Prints what each worker decided and why,
requests a second, p50 and p99, and a last line of JSON with `batching_gain`: requests a second with batches over those
without, of `layers`.
Exit status 1 unless the gain is at least GAIN with the p99 within the bound, and the recogniser runs without batches.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from _machine import machine_line
from _serving.models import RECOGNISER, served_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.clients.oip import Tensor, infer_request
from harness.cluster.dataplane_node import DataPlaneNode
from harness.crypto.pki import Authority
from harness.models.engine_cases import layers
from harness.wait import until
from shoal.agent.clock import SystemClock
from shoal.types.assignment import Batching, Credential, Work
from shoal.types.tolerance import default
from shoal.types.units import Seconds, Wall
from shoal.types.workload import WorkloadKey

IN_FLIGHT: Final = 32
SIDE, LAYERS = 1024, 12
BOUND_S: Final = Seconds(0.1)
"""A policy's p95, within which batches must keep and the p99 of the answers is judged."""
GAIN: Final = 1.5
"""A goal, not a measurement."""
RULE: Final = Batching(32, Seconds(0.0), BOUND_S, default("fp32", "fp32"))
MEASURED_S: Final = 60.0
TOKEN: Final = "secret"


async def load(port: int, body: Path, log: Path, seconds: int) -> list[tuple[float, float]]:
    """(start, seconds) of each request. Raises RuntimeError unless every one was answered."""
    fields = ("content-type: application/grpc", "te: trailers", f"authorization: Bearer {TOKEN}")
    process = await asyncio.create_subprocess_exec(
        "taskset", "-c", "1", "h2load", "-t", "1", "-c", "1", "-m", str(IN_FLIGHT), "-D", f"{seconds}s",
        "--warm-up-time=1s", f"--data={body}", f"--log-file={log}",
        *(part for each in fields for part in ("-H", each)),
        f"https://127.0.0.1:{port}/inference.GRPCInferenceService/ModelInfer",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out = (await process.communicate())[0].decode()
    rows = [line.split("\t") for line in log.read_text().splitlines()]
    log.unlink()
    if not rows or " 0 failed, 0 errored" not in out:
        raise RuntimeError(out[-600:])
    return [(int(start) / 1e6, int(took) / 1e6) for start, _, took in rows]


def is_decided(node: DataPlaneNode, case: str) -> bool:
    return "batches" in node.notes[case]


async def bench(rounds: int, seconds: int, folder: Path) -> dict[str, Any]:
    now = SystemClock().wall()
    node = DataPlaneNode("n1", Authority(folder / "ca", "west", now), folder / "n1")
    await node.start()
    try:
        rec = served_model(RECOGNISER, folder)
        (folder / "layers.onnx").write_bytes(layers(LAYERS, SIDE))
        x = np.random.default_rng(1).standard_normal((1, SIDE)).astype(np.float32)
        cases = {
            "layers": (folder / "layers.onnx", "FP32", "x", x),
            "rec": (rec.path, "FP32", "x", rec.inputs["x"]),
        }
        bodies: dict[str, Path] = {}
        for model, (path, datatype, name, value) in cases.items():
            for suffix, rule in (("", None), ("+batching", RULE)):
                case = model + suffix
                work = Work(nodes=1, shapes={name: value.shape})
                await node.load(case, WorkloadKey("acme", case.replace("+", "-")), path, work=work, batching=rule)
                if rule is not None:
                    await until(partial(is_decided, node, case), MEASURED_S, "the curve")
                    print(f"{case}: {node.notes[case]}", flush=True)
                tensor = Tensor(name, datatype, value.shape, value.tobytes())
                body = infer_request(case.replace("+", "-"), (tensor,)).SerializeToString()
                bodies[case] = folder / f"{case}.bin"
                bodies[case].write_bytes(b"\0" + len(body).to_bytes(4, "big") + body)
        token = Credential("acme", hashlib.sha256(TOKEN.encode()).hexdigest(), Wall(now + 9999))
        await node.configure(credentials=(token,))
        found: dict[str, list[list[tuple[float, float]]]] = {case: [] for case in bodies}
        for _ in range(rounds):
            for case, file in bodies.items():
                found[case].append(await load(node.front.config.port, file, folder / "h2load.log", seconds))
    finally:
        await node.stop()
    rates = {
        case: statistics.median(len(each) / (max(a + b for a, b in each) - each[0][0]) for each in all_of)
        for case, all_of in found.items()
    }
    p99_s = {
        case: statistics.median(float(np.quantile([took for _, took in each], 0.99)) for each in all_of)
        for case, all_of in found.items()
    }
    for case, all_of in found.items():
        p50_s = float(np.median([took for each in all_of for _, took in each]))
        print(
            f"{case:<16} {rates[case]:>8,.0f} requests/s  p50 {p50_s * 1e3:>6.1f} ms  p99 {p99_s[case] * 1e3:>6.1f} ms"
        )
    return {
        "batching_gain": round(rates["layers+batching"] / rates["layers"], 2),
        "batching_p99_ms": round(p99_s["layers+batching"] * 1e3, 1),
        "off_where_it_does_not_pay": "no batches" in node.notes["rec+batching"],
        "off_ratio": round(rates["rec+batching"] / rates["rec"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="of a case in a round")
    options = parser.parse_args()
    print(machine_line())
    os.sched_setaffinity(0, {0})
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(bench(options.rounds, options.seconds, Path(folder)))
    print(json.dumps(found))
    is_met = (
        found["batching_gain"] >= GAIN
        and found["batching_p99_ms"] <= BOUND_S * 1e3
        and found["off_where_it_does_not_pay"]
    )
    raise SystemExit(0 if is_met else 1)


if __name__ == "__main__":
    main()

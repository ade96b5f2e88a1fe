"""Published results, as rows of the data files, of networks whose cost is known."""

import csv
import gzip
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from derive_profiles.networks import MLPERF, TORCHVISION, Network, of_matrix

Rows = list[dict[str, str]]
_ATTENTION: Final = re.compile(r"vit|deit|swin|clip|detr|former|dino|sam_|depth_anything|owl|siglip|mlp")
"""Names of Hailo's models that are mostly attention, or products of matrices like it."""


@dataclass(frozen=True)
class Result:
    """One network on one device."""

    # Its publisher's name of it.
    model: str
    # What it computes.
    network: Network
    # Precision in which it ran. Empty: the vendor's compiler chose one, which is not told.
    precision: str
    # Seconds of one inference.
    latency_s: float
    # Joules of one inference. NaN: not published.
    joules: float
    # The row of the data file.
    source: str


def read_rows(path: Path) -> Rows:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    return list(csv.DictReader(io.StringIO(text)))


def mlperf_row(rows: Rows, system: str, model: str, scenario: str) -> dict[str, str]:
    """system: the end of its path in the results."""
    wanted = f"{system}/{model}/{scenario}".lower()
    (row,) = [row for row in rows if row["source"].lower().endswith(wanted)]
    return row


def mlperf_result(rows: Rows, system: str, model: str) -> Result:
    """MLPerf Inference, SingleStream: one request in flight."""
    row = mlperf_row(rows, system, model, "singlestream")
    source = f"device_catalogue.csv: {row['source']}: {row['latency_ms']} ms"
    latency_s, joules = float(row["latency_ms"]) / 1e3, _number(row["joules_per_query"])
    return Result(model, MLPERF[model], "", latency_s, joules, source)


def matrix_results(rows: Rows, system: str, compute: str) -> list[Result]:
    """MLPerf Inference, open division, SingleStream."""
    found = []
    for row in rows:
        network = of_matrix(row["model"])
        if network is not None and (row["system"], row["compute"]) == (system, compute):
            is_int8 = row["model"].endswith(("-quantized", "_uint8")) and not row["model"].endswith("non-quantized")
            latency_s, joules = float(row["latency_p90_ms"]) / 1e3, _number(row["joules_per_query"])
            source = f"edge_cloud_matrix.csv.gz: {row['source']}: {row['latency_p90_ms']} ms"
            found.append(Result(row["model"], network, "int8" if is_int8 else "fp32", latency_s, joules, source))
    return found


def hub_results(rows: Rows, device: str, runtime: str) -> list[Result]:
    """Qualcomm AI Hub Models. Rows of which a part ran on the processor are left out."""
    precisions = {"float": "fp16", "w8a8": "int8"}  # its NPUs have no fp32
    found = []
    for row in rows:
        key = (row["device"], row["runtime"], row["layers_cpu"], row["layers_gpu"])
        if key == (device, runtime, "0", "0") and row["model"] in TORCHVISION and row["precision"] in precisions:
            source = f"qai_hub_latency.csv.gz: {row['model']}, {row['precision']}, {device}, {runtime}"
            precision, latency_s = precisions[row["precision"]], float(row["latency_ms"]) / 1e3
            source = f"{source}: {row['latency_ms']} ms"
            found.append(Result(row["model"], TORCHVISION[row["model"]], precision, latency_s, math.nan, source))
    return found


def hailo_networks(rows: Rows) -> Mapping[str, Network]:
    """By name, from every device of the file."""
    found = {}
    for row in rows:
        flops, weights = _number(row["ops_g"]) * 1e9, _number(row["params_m"]) * 1e6
        if flops > 0 and weights > 0:
            found[row["model"]] = Network(flops, weights, bool(_ATTENTION.search(row["model"])))
    return found


def hailo_results(rows: Rows, device: str) -> list[Result]:
    """Hailo Model Zoo: frames per second of a stream at batch 1, so that one request takes at least that long."""
    networks = hailo_networks(rows)
    return [
        Result(
            row["model"],
            networks[row["model"]],
            "int8",
            1 / float(row["fps_batch1"]),
            math.nan,
            f"hailo_fps.csv: {row['model']}, {device}, batch 1: {row['fps_batch1']} frames/s",
        )
        for row in rows
        if row["device"] == device and row["model"] in networks and _number(row["fps_batch1"]) > 0
    ]


def rknn_results(rows: Rows, device: str, networks: Mapping[str, Network]) -> list[Result]:
    """RKNN Model Zoo: frames per second at the NPU's highest clock. networks: by Hailo's names, which has published
    what the same networks cost."""
    named = {"mobilenetv2-12": TORCHVISION["mobilenet_v2"], "resnet50-v2-7": TORCHVISION["resnet50"]}
    found = []
    for row in _once(row for row in rows if row["device"] == device):
        model = row["model"]
        known = model.replace("yolo11", "yolov11").replace("-", "_")
        network = named.get(model) or (networks.get(known) if "640,640" in row["input"] else None)
        if network is not None:
            source = f"rknn_fps.csv: {model}, {device}: {row['fps']} frames/s"
            found.append(Result(model, network, row["dtype"].lower(), 1 / float(row["fps"]), math.nan, source))
    return found


def _once(rows: Iterable[dict[str, str]]) -> Iterable[dict[str, str]]:
    """The first row of each model."""
    seen = set()
    for row in rows:
        if row["model"] not in seen:
            seen.add(row["model"])
            yield row


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
